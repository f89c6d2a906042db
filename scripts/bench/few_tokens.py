"""A layer's forward for few tokens, as in decoding and rollout: the time beside the time that its weights' bytes take.

    python -m scripts.bench.few_tokens                    # -> results/h200/few_tokens.json on an H200

`MoE`'s forward of Qwen3-30B's layer under no_grad, router included, on uniform random tokens. One CUDA graph runs SETS layers of
different weights one after the other, more than L2 holds, and its time is divided by SETS: each layer reads its weights from
memory. The floor is the bytes of the weights of the experts that the tokens drew and of the router, at the GPU's rate of copying.
"""

from functools import lru_cache
from typing import Any

import torch

from blazeproto import MoE, cost
from blazeproto.gemm import Sizes
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LAYER = Sizes(0, 2048, 768, 128, 8)
SETS = 4
BYTES = 2  # of a bf16 number


@lru_cache(maxsize=1)
def layers(d: int, n: int, E: int, K: int, device: str) -> list[MoE]:
    """SETS layers of one kind, each with weights of its own, ready for inference."""
    made = []
    for seed in range(SETS):
        torch.manual_seed(seed)
        made.append(MoE(d, n, E, K, router="topk_softmax", device=device, dtype=torch.bfloat16).eval())
    return made


@torch.no_grad()
def measure(sizes: Sizes, machine: Machine) -> Row:
    """Microseconds of one layer's forward, by number of tokens."""
    made = layers(sizes.d, sizes.n, sizes.E, sizes.K, machine.device)
    generator = torch.Generator(machine.device).manual_seed(sizes.T)
    options: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16, "generator": generator}
    xs = [torch.randn(sizes.T, sizes.d, **options) for _ in made]
    drawn = sum(layer.router(x).experts.unique().numel() for layer, x in zip(made, xs, strict=True)) / len(made)
    weights = BYTES * sizes.d * (drawn * (sizes.h + sizes.n) + sizes.E)
    timed = machine.times({"forward": lambda: tuple(layer(x)[0] for layer, x in zip(made, xs, strict=True))})
    time, floor = 1e3 * timed.ms["forward"] / len(made), 1e3 * cost.floor_ms(0, weights)
    return {
        "experts": drawn,
        "floor_us": round(floor, 2),
        "forward_us": round(time, 2),
        "over_floor": round(time / floor, 3),
        "gpu_method": timed.method["forward"],
    }


CASES, QUICK = ([LAYER._replace(T=tokens) for tokens in some] for some in (TOKENS, (1, 8, 64, 1024)))
SMALL = Sizes(3, 64, 32, 8, 2)
BENCH = Bench("few_tokens", __doc__, {"rows": Item(measure, CASES, (SMALL,), QUICK, rounds=25)}, head={"sets": SETS})

if __name__ == "__main__":
    run(BENCH)
