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

import blazeproto
from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm.tiles import FORCED, force
from blazeproto.lab.oracle import make_block_case, run_block_kernels
from blazeproto.router import ROUTERS, make_router
from scripts.checks.cases import (
    FEW,
    METHODS,
    ONE_EXPERT,
    Layer,
    Shape,
    products_of,
    run_dispatch,
    run_layer,
    run_product,
    run_router,
)
from scripts.command import argument_parser, need_hopper, some_of

SHAPES = (Shape(37, 72, 40, 5, 3), Shape(300, 136, 264, 4, 2))
Y_OVER_ACT = Shape(300, 136, 136, 4, 2)
WIDE = Shape(300, 328, 136, 4, 2)  # of which some columns are made at a time
FP8 = Shape(300, 144, 256, 4, 2)
FP8_WAYS: tuple[dict[str, Any], ...] = ({}, {"save": "recompute"}, {"keep_transposed": False})
SCANNED = Shape(20_000, 8, 8, 130, 8)  # 79 chunks: of so many the table is scanned
VARIANTS: tuple[dict[str, Any], ...] = (
    {"options": {"save": "paper"}},
    {"options": {"save": "recompute"}},
    {"options": {"combine": "fused"}},
    {"options": {"combine": "fused_both"}},
    {"options": {"combine": "fused_both", "workspace_bytes": 1 << 18}},
    {"options": {"combine": "fused_both"}, "transposed": True, "activation": "alternating(clamped_swiglu)"},
    {"options": {"workspace_bytes": 1 << 18}},
    {"f32_weights": True},
    {"options": {"row_capacity": 50}},
    {"options": {"row_capacity": 0}},
    {"options": {"row_capacity": 50, "workspace_bytes": 1 << 15}},
    {"transposed": True},
    {"transposed": True, "activation": "alternating(clamped_swiglu)", "bias": True},
    {"rank": 16},
    {"rank": 72, "transposed": True, "activation": "alternating(clamped_swiglu)"},
)


def finite(run: Callable[[], dict[str, Any]]) -> None:
    """Run it, and look at what it has made."""
    for name, made in run().items():
        if isinstance(made, str) or not made.isfinite().all():
            raise AssertionError(f"{name}: expected finite values, got {made}")


def forced(changes: dict[str, Any], run: Callable[[], None]) -> None:
    force(**changes)
    try:
        run()
    finally:
        force()


def layers() -> Iterator[tuple[str, Callable[[], None]]]:
    """Whole layers, with ids outside [0, E); then products whose outputs or sums are cut."""
    chosen = [Layer(FEW[2]), Layer(Y_OVER_ACT, bias=True)]
    for shape in SHAPES:
        chosen += [Layer(shape, activation, bias) for activation in ACTIVATIONS for bias in (False, True)]
        chosen += [Layer(shape, **{"routing": "sentinels", **variant}) for variant in VARIANTS]
    for way, f32 in itertools.product(FP8_WAYS, (False, True)):
        chosen.append(Layer(FP8, routing="sentinels", options={"precision": "fp8", **way}, f32_weights=f32))
    for layer in chosen:
        yield layer.name, partial(finite, partial(run_layer, blazeproto, "cuda", layer))
    for shape, changes in itertools.product(SHAPES, FORCED):
        layer = Layer(shape)
        run = partial(finite, partial(run_layer, blazeproto, "cuda", layer))
        yield f"{layer.name}, {changes or 'tiles of the table'}", partial(forced, changes, run)
    products = products_of(blazeproto.gemm)
    for names, shape, routing in ((("down_forward", "combine", "up_backward_act"), WIDE, "fixed"),
                                  (("down_backward_weight", "up_backward_weight"), ONE_EXPERT, "one")):  # fmt: skip
        for name in names:
            title = f"product {name}: {shape}"
            given = (blazeproto, "cuda", title, products[name], shape, routing, "swiglu", True)
            yield title, partial(finite, partial(run_product, *given))


def run_blocks(mask: np.ndarray) -> dict[str, Any]:
    return run_block_kernels(make_block_case(mask, 136, 200))


def block_products() -> Iterator[tuple[str, Callable[[], None]]]:
    """On a random topology, one of no blocks, and one whose rows have odd numbers of them."""
    masks = {
        "random": np.random.default_rng(0).random((3, 4)) < 0.6,
        "empty": np.zeros((2, 1), bool),
        "odd": np.ones((2, 3), bool),
    }
    for name, mask in masks.items():
        yield f"block-sparse products: {name}", partial(finite, partial(run_blocks, mask))


def dispatches() -> Iterator[tuple[str, Callable[[], None]]]:
    for shape, routing, method in itertools.product((SHAPES[0], *FEW, SCANNED), ("sentinels", "capacity"), METHODS):
        name = f"dispatch: {shape}, {routing}, {method}"
        yield name, partial(finite, partial(run_dispatch, blazeproto, "cuda", name, shape, routing, method))


def operators() -> Iterator[tuple[str, Callable[[], None]]]:
    """All operators of the router: rows that begin at multiples of 16 bytes and others, a lane a token and several."""
    for experts, top_k in ((5, 3), (128, 8), (130, 4), (520, 16)):
        name = f"operators of the router: E{experts} K{top_k}"
        yield name, partial(finite, partial(run_router, blazeproto, "cuda", name, experts, top_k, True))


def route(name: str, num_tokens: int, num_experts: int, top_k: int, weight_dtype: torch.dtype) -> None:
    """A named router forward and backward: its products, choice, losses and scores."""
    losses = {} if name in ("expert_choice", "hash") else {"aux_loss": 0.1}
    router = make_router(name, 64, num_experts, top_k, z_loss=0.1, device="cuda", dtype=weight_dtype, **losses)
    x = torch.randn(num_tokens, 64, device="cuda").bfloat16().requires_grad_()
    routing = router(x, torch.arange(num_tokens, device="cuda"))
    total = routing.scores.square().sum() + sum(routing.aux_losses.values())
    gradients = torch.autograd.grad(total, (x, router.weight))
    torch.cuda.synchronize()
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise AssertionError(f"not finite: {name} {num_tokens} {num_experts} {top_k}")


def routers() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in ROUTERS:
        for sizes, dtype in (((300, 8, 2), torch.bfloat16), ((77, 37, 5), torch.float32)):
            yield f"router {name} {sizes} {dtype}", partial(route, name, *sizes, dtype)
    yield "router of long sums", partial(route, "top_k", 9000, 130, 8, torch.float32)


def main() -> None:
    parser = argument_parser("scripts.checks.sanitize_target", __doc__)
    parts = {
        "layers": layers,
        "blocks": block_products,
        "dispatches": dispatches,
        "operators": operators,
        "routers": routers,
    }
    parser.add_argument("--parts", type=some_of(parts), default=[*parts], help="some of " + ", ".join(parts))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name, such as tickets")
    options = parser.parse_args()
    need_hopper()
    torch.manual_seed(0)
    failed = []
    for part in options.parts:
        for name, run in parts[part]():
            if options.only not in name:
                continue
            try:
                run()
                print("ran", name, flush=True)
            except Exception:  # noqa: BLE001  the sanitizer's report on the others is wanted
                traceback.print_exc()
                failed.append(name)
    print(f"failed: {failed}" if failed else "all ran")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
