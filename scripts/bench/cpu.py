"""The torch backend on this machine's CPU against transformers' ``grouped_mm`` experts, on the same layer.

    python -m scripts.bench.cpu                       # needs: pip install transformers
    python -m scripts.bench.cpu --tokens 2048 --dtype bfloat16

Forward, and forward + backward, of the expert MLP (top-k excluded), the two programs interleaved A B A B; the quickest
round of each counts, since other work on the machine only adds time. A ratio above 1 means that blazeproto is faster.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program, make_inputs
from scripts.bench.peers.layers import ours
from scripts.bench.timing import quickest_ms, rotations
from scripts.command import argument_parser, positive

SHAPES = (
    Sizes(1024, 256, 128, 8, 2),
    Sizes(2048, 512, 256, 16, 4),
    Sizes(1024, 768, 256, 64, 8),
    Sizes(4096, 256, 256, 16, 2),
)


def by_transformers(shape: Sizes, inputs: LayerInputs) -> Program:
    """Its function, on what that reads of an experts module."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    module = SimpleNamespace(
        num_experts=shape.E,
        gate_up_proj=inputs.gate_up_proj,
        down_proj=inputs.down_proj,
        act_fn=F.silu,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
        _apply_gate=lambda gate_up: F.silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1],
    )
    scores = inputs.scores.detach().to(inputs.x.dtype).requires_grad_()  # as its routers give them
    forward = partial(grouped_mm_experts_forward, module, inputs.x, inputs.experts.long(), scores)
    return layer_program(replace(inputs, scores=scores), forward)


def line_of(shape: Sizes, dtype: torch.dtype, rounds: int) -> str:
    """The times of both programs on one shape."""
    made = make_inputs(shape, device="cpu")
    tensors: dict[str, Any] = {
        name: getattr(made, name).detach().to(dtype) for name in ("x", "gate_up_proj", "down_proj")
    }
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    inputs = replace(made, grad_output=made.grad_output.to(dtype), **leaves)
    programs = {"blazeproto": [ours(shape, inputs)]}
    if find_spec("transformers"):
        programs["transformers"] = [by_transformers(shape, inputs)]
    line = f"T={shape.T:<5} d={shape.d:<4} n={shape.n:<4} E={shape.E:<3} K={shape.K}  {str(dtype).split('.')[1]:<9}"
    for what, step in (("fwd", "forward"), ("fwd+bwd", "forward_backward")):
        times = quickest_ms(rotations(programs, step), rounds)
        line += f"  {what} " + " ".join(f"{name} {ms:.1f} ms" for name, ms in times.items())
        if "transformers" in times:
            line += f" ({times['transformers'] / times['blazeproto']:.2f}x)"
    return line


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
            shape = shape._replace(T=options.tokens or shape.T)
            print(line_of(shape, getattr(torch, dtype), options.rounds), flush=True)


if __name__ == "__main__":
    main()
