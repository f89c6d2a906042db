"""A short run of every kernel, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python -m scripts.checks.sanitize_target

Small layers of the fuzzer, with tails everywhere: all activations, biases, save policies, all combines, chunks, fp32 weight
gradients, sentinels, fewer rows than pairs, experts without tokens, Y over act, slices of columns; such layers by the kernels of
ampere; layers with stored weights by both; then the dispatch builders, and the router's operators: cases of
`scripts.checks.compare`, on shapes that a sanitizer gets through. Each part runs even if one before it fails.
"""

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from blazeproto import stored
from blazeproto.autograd import moe_mlp
from blazeproto.gemm import Sizes
from blazeproto.gemm import stored as kernels
from blazeproto.gemm.tiles import FORCED, force
from blazeproto.lab.calls import LAYER
from blazeproto.lab.oracle import make_block_case, make_case, run_block_kernels, run_kernels
from blazeproto.lab.same_bits import wrong_in_order, wrong_in_place
from blazeproto.router import ROUTERS, logits_product, make_router
from blazeproto.runtime.arch import kernels_of
from scripts.bench.lora import factors_of
from scripts.checks.cases import FEW, METHODS, SCANNED, run_dispatch, run_experts, run_router
from scripts.checks.layers import Layer, draw_experts, on_ampere
from scripts.command import argument_parser, need_kernels, some_of

Run = tuple[str, Callable[[], dict[str, Tensor]]]

SMALL, Y_OVER_ACT = Sizes(37, 72, 40, 5, 3), Sizes(300, 136, 136, 4, 2)
ONE_EXPERT = Sizes(40_010, 72, 264, 2, 1)  # with routing "same": several CTAs share an expert's sum
FP8_WAYS: tuple[dict[str, Any], ...] = ({}, {"save": "recompute"}, {"keep_transposed": False})
TOKENS, MOST_ROWS, MOST_WEIGHTS = range(9, 400), 800, 2**20  # of drawn layers; elements of d n E


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
            made |= {name: each for name, each in out.items() if name != "workspace"}
    wrong_in_order(case, rows, made)
    return made


def drawn() -> list[Layer]:
    """Layers of the fuzzer that a sanitizer gets through: with every activation, option and kind of routing."""
    every = map(draw_experts, range(300))
    small = (each for each in every if each.sizes.T in TOKENS and each.sizes.T * each.sizes.K < MOST_ROWS)
    return [each for each in small if prod(each.sizes[1:4]) < MOST_WEIGHTS]


def layers() -> Iterator[Run]:
    """Whole layers, by every tiles in turn, with ids outside [0, E) too; then products."""
    chosen = [Layer(FEW[2]), Layer(Y_OVER_ACT, {"biases": True}), Layer(SMALL, f32=True), *drawn()]
    for way, f32 in itertools.product(FP8_WAYS, (False, True)):
        chosen.append(Layer(Sizes(300, 144, 256, 4, 2), {"sentinels": 0.2}, {"precision": "fp8", **way}, f32=f32))
    for precision in ("fp8", "fp8_rollout"):
        inputs = {"sentinels": 0.2, "biases": True}
        chosen.append(Layer(Sizes(300, 256, 256, 4, 2), inputs, {"precision": precision}, ranks=(16, 48)))
    for layer, changes in zip(chosen, itertools.cycle(FORCED)):
        yield f"layer: {layer}, {changes or 'tiles of the table'}", partial(forced, layer, changes)
    for layer in (Layer(SMALL), Layer(Y_OVER_ACT, {"biases": True})):
        yield f"products: {layer}", partial(in_place, layer)
    yield f"weight gradients: {Layer(ONE_EXPERT)}", partial(weight_gradients, ONE_EXPERT)


def layers_of_ampere() -> Iterator[Run]:
    """Whole layers by the kernels of ampere, a quarter of those drawn, and a router's logits."""
    for layer in (Layer(FEW[2]), Layer(Y_OVER_ACT, {"biases": True}), Layer(SMALL, f32=True), *drawn()[::4]):
        yield f"ampere: {layer}", partial(run_experts, on_ampere(layer), 0, "cuda")

    def logits() -> dict[str, Tensor]:
        x, weight = (torch.randn(rows, 200, device="cuda").bfloat16() for rows in (300, 130))
        with kernels_of("ampere"):
            return {"logits": logits_product(x, weight, 2)}

    yield "ampere: logits", logits


def frozen(format: str, backend: str, few_rows: int) -> dict[str, Tensor]:
    """A layer with stored weights and factors, by kernels for few rows where experts have less than ``few_rows``."""
    sizes = Sizes(300, 256, 384, 5, 2)
    shapes = (sizes.E, 2 * sizes.n, sizes.d), (sizes.E, sizes.d, sizes.n)
    weights = [stored.quantize(torch.randn(shape, device="cuda").bfloat16() / 16, format) for shape in shapes]
    factors = [factors_of(weight.decode(), 16) for weight in weights]
    x = torch.randn(sizes.T, sizes.d, device="cuda").bfloat16().requires_grad_()
    scores = torch.rand(sizes.T, sizes.K, device="cuda").requires_grad_()
    ids = torch.rand(sizes.T, sizes.E - 1, device="cuda").topk(sizes.K).indices.int()  # the last has none
    given: Any = {"num_experts": sizes.E, "backend": backend, "up_factors": factors[0], "down_factors": factors[1]}
    with patch.object(kernels, "FEW_ROWS", few_rows):
        out = moe_mlp(x, weights[0], weights[1], scores, ids, **given)
        made = torch.autograd.grad(out, [x, scores, *factors[0], *factors[1]], torch.randn_like(out))
    return {"out": out} | {str(index): each for index, each in enumerate(made)}


def stored_layers() -> Iterator[Run]:
    for format, backend, few_rows in itertools.product(stored.FORMATS, ("hopper", "ampere"), (0, 1000)):
        yield f"stored: {format} {backend}, few rows: {few_rows}", partial(frozen, format, backend, few_rows)


def block_products() -> Iterator[Run]:
    """On a random topology, one of no blocks, and one whose rows have odd numbers of them."""
    masks = {
        "random": np.random.default_rng(0).random((3, 4)) < 0.6,
        "empty": np.zeros((2, 1), bool),
        "odd": np.ones((2, 3), bool),
    }
    for name, mask in masks.items():
        yield f"block-sparse products: {name}", lambda mask=mask: run_block_kernels(make_block_case(mask, 136, 200))  # type: ignore[misc]


def dispatches() -> Iterator[Run]:
    for sizes, routing, method in itertools.product((SMALL, *FEW, SCANNED), ("sentinels", "capacity"), METHODS):
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
    "ampere": layers_of_ampere,
    "stored": stored_layers,
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
    need_kernels()
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
