"""A short run of every kernel, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python -m scripts.checks.sanitize_target

Small layers with tails everywhere: all activations, biases, save policies, all combines, chunks, fp32 weight
gradients, sentinels, fewer rows than pairs, experts without tokens, Y over act, slices of columns; then the dispatch
builders, and the router's operators: cases of `scripts.checks.compare`, on shapes that a sanitizer gets through. Each part runs
even if one before it fails.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm import Sizes
from blazeproto.gemm.tiles import FORCED, force
from blazeproto.lab.calls import LAYER
from blazeproto.lab.oracle import make_block_case, make_case, run_block_kernels, run_kernels
from blazeproto.lab.same_bits import wrong_in_order, wrong_in_place
from blazeproto.router import ROUTERS, make_router
from scripts.checks.cases import FEW, METHODS, SCANNED, run_dispatch, run_experts, run_router
from scripts.checks.layers import Layer
from scripts.command import argument_parser, need_hopper, some_of

Run = tuple[str, Callable[[], dict[str, Tensor]]]

SHAPES = (Sizes(37, 72, 40, 5, 3), Sizes(300, 136, 264, 4, 2))
Y_OVER_ACT = Sizes(300, 136, 136, 4, 2)
ONE_EXPERT = Sizes(40_010, 72, 264, 2, 1)  # with routing "same": several CTAs share an expert's sum
FP8 = Sizes(300, 144, 256, 4, 2)
FP8_WAYS: tuple[dict[str, Any], ...] = ({}, {"save": "recompute"}, {"keep_transposed": False})
IN_TURN = {"transposed": True, "activation": "alternating(clamped_swiglu)"}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"options": {"save": "paper"}},
    {"options": {"save": "recompute"}},
    {"options": {"combine": "fused"}},
    {"options": {"combine": "fused_both"}},
    {"options": {"combine": "fused_both", "workspace_bytes": 1 << 18}},
    {"options": {"combine": "fused_both"}, "inputs": IN_TURN},
    {"options": {"workspace_bytes": 1 << 18}},
    {"f32": True},
    {"inputs": {"row_capacity": 50}},
    {"inputs": {"row_capacity": 0}},
    {"inputs": {"row_capacity": 50}, "options": {"workspace_bytes": 1 << 15}},
    {"inputs": {"transposed": True}},
    {"inputs": IN_TURN | {"biases": True}},
    {"ranks": (16, 16)},
    {"ranks": (72, 72), "inputs": IN_TURN},
)
FROZEN = ("d_up", "d_down")


def finite(run: Callable[[], dict[str, Tensor]]) -> None:
    """Run it, and look at what it has made."""
    for name, made in run().items():
        if not made.isfinite().all():
            raise AssertionError(f"{name}: expected finite values, got {made}")


def forced(layer: Layer, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The layer with these changes to its tiles."""
    force(**changes)
    try:
        return run_experts(layer, 0, "cuda")
    finally:
        force()


def in_place(layer: Layer) -> dict[str, Tensor]:
    """Every product, and those that can over an input, in slices of columns and of rows in order. Their bits are the fuzzer's."""
    case = make_case(layer.sizes, **layer.inputs)
    made = run_kernels(case)
    wrong_in_order(case, made, made)
    wrong_in_place(case, made, made)
    return {name: case.in_use(name, value) for name, value in made.items()}


def weight_gradients(sizes: Sizes) -> dict[str, Tensor]:
    """One expert's, in bf16 and in fp32."""
    case, made = make_case(sizes, "same"), dict[str, Tensor]()
    rows = {
        name: torch.randn(sizes.rows, width, device="cuda").bfloat16()
        for name, width in (("dh", sizes.h), ("a_scaled", sizes.n))
    }
    for call in LAYER:
        if call.product in ("down_backward_weight", "up_backward_weight"):
            outputs = call.outputs(case, rows).items()
            out = {name: torch.zeros(each.shape, dtype=each.dtype, device="cuda") for name, each in outputs}
            call.run(case, rows, out)
            made |= out
    wrong_in_order(case, rows, made)
    return made


def layers() -> Iterator[Run]:
    """Whole layers, with ids outside [0, E); then products."""
    chosen = [Layer(FEW[2]), Layer(Y_OVER_ACT, {"biases": True})]
    for sizes in SHAPES:
        chosen += [Layer(sizes, {"activation": a, "biases": bias}) for a in ACTIVATIONS for bias in (False, True)]
        for variant in VARIANTS:
            frozen = FROZEN if "ranks" in variant else ()
            inputs = {"sentinels": 0.2, **variant.get("inputs", {})}
            chosen.append(Layer(sizes, **variant | {"inputs": inputs, "frozen": frozen}))
    for way, f32 in itertools.product(FP8_WAYS, (False, True)):
        chosen.append(Layer(FP8, {"sentinels": 0.2}, {"precision": "fp8", **way}, f32=f32))
    for layer in chosen:
        yield f"layer: {layer}", partial(run_experts, layer, 0, "cuda")
    for layer, changes in itertools.product(map(Layer, SHAPES), FORCED):
        yield f"layer: {layer}, {changes or 'tiles of the table'}", partial(forced, layer, changes)
    for layer in (Layer(SHAPES[0]), Layer(Y_OVER_ACT, {"biases": True})):
        yield f"products: {layer}", partial(in_place, layer)
    yield f"weight gradients: {Layer(ONE_EXPERT)}", partial(weight_gradients, ONE_EXPERT)


def run_blocks(mask: np.ndarray) -> dict[str, Tensor]:
    return run_block_kernels(make_block_case(mask, 136, 200))


def block_products() -> Iterator[Run]:
    """On a random topology, one of no blocks, and one whose rows have odd numbers of them."""
    masks = {
        "random": np.random.default_rng(0).random((3, 4)) < 0.6,
        "empty": np.zeros((2, 1), bool),
        "odd": np.ones((2, 3), bool),
    }
    for name, mask in masks.items():
        yield f"block-sparse products: {name}", partial(run_blocks, mask)


def dispatches() -> Iterator[Run]:
    for sizes, routing, method in itertools.product((SHAPES[0], *FEW, SCANNED), ("sentinels", "capacity"), METHODS):
        yield f"dispatch: {Layer(sizes)}, {routing}, {method}", partial(run_dispatch, sizes, routing, method, "cuda")


def operators() -> Iterator[Run]:
    """All operators of the router: rows that begin at multiples of 16 bytes and others, a lane a token and several."""
    for experts, top_k in ((5, 3), (128, 8), (130, 4), (520, 16)):
        name = f"operators of the router: E{experts} K{top_k}"
        yield name, partial(run_router, name, experts, top_k, True, "cuda")


def route(name: str, num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A named router forward and backward, by its products, choice, losses and scores: the gradients."""
    losses = {} if name in ("expert_choice", "hash") else {"aux_loss": 0.1}
    router = make_router(name, 64, num_experts, top_k, z_loss=0.1, device="cuda", dtype=dtype, **losses)
    x = torch.randn(num_tokens, 64, device="cuda").bfloat16().requires_grad_()
    routing = router(x, torch.arange(num_tokens, device="cuda"))
    total = routing.scores.square().sum() + sum(routing.aux_losses.values())
    return dict(zip(("dX", "dW"), torch.autograd.grad(total, (x, router.weight)), strict=True))


def routers() -> Iterator[Run]:
    few = ((300, 8, 2, torch.bfloat16), (77, 37, 5, torch.float32))
    long_sums: tuple[str, tuple[Any, ...]] = ("top_k", (9000, 130, 8, torch.float32))
    for name, sizes in (*itertools.product(ROUTERS, few), long_sums):
        yield f"router {name} {sizes}", partial(route, name, *sizes)


PARTS = {
    "layers": layers,
    "blocks": block_products,
    "dispatches": dispatches,
    "operators": operators,
    "routers": routers,
}


def main() -> None:
    parser = argument_parser("scripts.checks.sanitize_target", __doc__)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS], help="some of " + ", ".join(PARTS))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name, such as tickets")
    options = parser.parse_args()
    need_hopper()
    torch.manual_seed(0)
    failed = []
    for name, run in itertools.chain(*(PARTS[part]() for part in options.parts)):
        if options.only not in name:
            continue
        try:
            finite(run)
            print("ran", name, flush=True)
        except Exception:  # noqa: BLE001  the sanitizer's report on the others is wanted
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {failed}" if failed else "all ran")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
