"""A layer's forward for few tokens, as in decoding and rollout: the time beside the time that its weights' bytes take.

    python -m scripts.bench.few_tokens                    # results/h200/few_tokens.json

`MoE`'s forward of Qwen3-30B's layer under no_grad, router included, on uniform random tokens. One CUDA graph runs SETS layers of
different weights one after the other, more than L2 holds, and its time is divided by SETS: each layer reads its weights from
memory. The floor is the bytes of the weights of the experts that the tokens drew and of the router, at the GPU's rate of copying.
"""

from __future__ import annotations

from typing import Any

import torch

from blazeproto import MoE, cost
from blazeproto.gemm import Sizes
from scripts.bench.common import (
    begun,
    bench_parser,
    cfg_of,
    finished,
    in_turn,
    part_file,
    settled,
    stamped,
    write_json,
)
from scripts.bench.tables import TABLES
from scripts.bench.timing import gpu_ms
from scripts.command import need_hopper

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
QUICK_TOKENS = (1, 8, 64, 1024)
LAYER = Sizes(0, 2048, 768, 128, 8)
SETS = 4
BYTES = 2  # of a bf16 number


def layers(sizes: Sizes, device: str, count: int = SETS) -> list[MoE]:
    """So many layers of one kind, each with weights of its own, ready for inference."""
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        made.append(MoE(sizes.d, sizes.n, sizes.E, sizes.K, router="topk_softmax", **options).eval())
    return made


@torch.no_grad()
def measure(sizes: Sizes, made: list[MoE], rounds: int) -> dict[str, Any]:
    """A row: microseconds of one layer's forward for so many tokens."""
    device = made[0].down_proj.device
    generator = torch.Generator(device).manual_seed(sizes.T)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    xs = [torch.randn(sizes.T, sizes.d, **options) for _ in made]
    drawn = sum(layer.router(x).experts.unique().numel() for layer, x in zip(made, xs, strict=True)) / len(made)
    weights = BYTES * sizes.d * (drawn * (sizes.h + sizes.n) + sizes.E)
    timed = gpu_ms({"forward": lambda: tuple(layer(x)[0] for layer, x in zip(made, xs, strict=True))}, (), rounds)
    time, floor = 1e3 * timed.ms["forward"] / len(made), 1e3 * cost.floor_ms(0, weights)
    return {
        "cfg": cfg_of(sizes),
        "experts": drawn,
        "floor_us": round(floor, 2),
        "forward_us": round(time, 2),
        "over_floor": round(time / floor, 3),
        "gpu_method": timed.method["forward"],
    }


def main() -> None:
    parser = bench_parser("few_tokens", __doc__, quick=f"T = {', '.join(map(str, QUICK_TOKENS))}, 7 rounds")
    options = settled(parser.parse_args(), "few_tokens", rounds=25)
    need_hopper()
    record, made = begun("few_tokens", __doc__, 1, sets=SETS), layers(LAYER, "cuda")
    for tokens in in_turn(QUICK_TOKENS if options.quick else TOKENS):
        record["rows"].append(stamped(measure, LAYER._replace(T=tokens), made, options.rounds))
        write_json(options.out or part_file("few_tokens"), record)
    print(TABLES["few_tokens"](record))
    print("wrote", options.out or finished("few_tokens", whole=not options.quick))


if __name__ == "__main__":
    main()
