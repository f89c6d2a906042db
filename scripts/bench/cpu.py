"""The torch backend on this machine's CPU against transformers' ``grouped_mm`` experts, on the same layer.

    python -m scripts.bench.cpu                       # needs: pip install transformers
    python -m scripts.bench.cpu --tokens 2048 --dtype bfloat16

Forward, and forward + backward, of the expert MLP (top-k excluded), the two programs interleaved A B A B; the quickest
round of each counts, since other work on the machine only adds time. A ratio above 1 means that blazeproto is faster.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd import moe_mlp
from scripts.bench.timing import quickest_ms
from scripts.command import argument_parser, positive

# T, d, n, E, K
SHAPES = [(1024, 256, 128, 8, 2), (2048, 512, 256, 16, 4), (1024, 768, 256, 64, 8), (4096, 256, 256, 16, 2)]


def bench(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> None:
    num_tokens, d, n, num_experts, top_k = shape
    x = torch.randn(num_tokens, d, dtype=dtype, requires_grad=True)
    gate_up_proj = (torch.randn(num_experts, 2 * n, d) * d**-0.5).to(dtype).requires_grad_()
    down_proj = (torch.randn(num_experts, d, n) * n**-0.5).to(dtype).requires_grad_()
    scores, experts = torch.randn(num_tokens, num_experts).softmax(1).topk(top_k)
    scores.requires_grad_()
    d_out = torch.randn_like(x)
    parameters = (x, gate_up_proj, down_proj, scores)

    ours = partial(moe_mlp, *parameters, experts, num_experts=num_experts, backend="torch")
    forwards: dict[str, Callable[[], Tensor]] = {"blazeproto": ours}
    if find_spec("transformers"):
        from transformers.integrations.moe import grouped_mm_experts_forward

        # What the function reads of an experts module.
        module = SimpleNamespace(
            num_experts=num_experts,
            gate_up_proj=gate_up_proj,
            down_proj=down_proj,
            act_fn=F.silu,
            has_gate=True,
            has_bias=False,
            has_post_expert_norm=False,
            is_transposed=False,
            is_concatenated=True,
            _is_expert_parallel=False,
        )
        module._apply_gate = lambda gate_up: F.silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]
        weights = scores if dtype == torch.float32 else scores.to(dtype)
        forwards["transformers"] = partial(grouped_mm_experts_forward, module, x, experts, weights)

    def with_backward(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), parameters, d_out, retain_graph=True)

    forward_times = quickest_ms(forwards, rounds)
    both_times = quickest_ms({name: with_backward(forward) for name, forward in forwards.items()}, rounds)
    line = f"T={num_tokens:<5} d={d:<4} n={n:<4} E={num_experts:<3} K={top_k}  {str(dtype).split('.')[1]:<9}"
    for what, times in (("fwd", forward_times), ("fwd+bwd", both_times)):
        line += f"  {what} " + " ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
        if "transformers" in times:
            line += f" ({times['transformers'] / times['blazeproto']:.2f}x)"
    print(line, flush=True)


def main() -> None:
    parser = argument_parser("scripts.bench.cpu", __doc__)
    parser.add_argument("--tokens", type=positive, help="instead of the shapes' own")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append", help="default: both")
    parser.add_argument("--rounds", type=positive, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in options.dtype or ("float32", "bfloat16"):
        for shape in SHAPES:
            bench((options.tokens or shape[0], *shape[1:]), getattr(torch, dtype), options.rounds)


if __name__ == "__main__":
    main()
