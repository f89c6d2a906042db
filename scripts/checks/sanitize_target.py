"""A short run of every kernel, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python -m scripts.checks.sanitize_target

Small layers with tails everywhere: all activations, biases, save policies, both combines, chunks, fp32 weight
gradients, sentinels, fewer rows than pairs, an expert without tokens, Y over act, slices of columns; then the dispatch
builders, and the fused top-k and its backward. Each part runs even if one before it fails.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch

from blazeproto import dispatch, gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import LowRank, moe_mlp
from blazeproto.dispatch.build import Method
from blazeproto.gemm.tiles import give_tickets
from blazeproto.router import ROUTERS, make_router, topk_route, topk_route_backward
from blazeproto.router.topk import Score
from scripts.command import argument_parser, need_hopper

DEVICE = torch.device("cuda")
SHAPES = ((37, 72, 40, 5, 3), (300, 136, 264, 4, 2))  # (T, d, n, E, K)
Y_OVER_ACT = (300, 136, 136, 4, 2)


def layer(
    shape: tuple[int, int, int, int, int],
    activation: str = "swiglu",
    bias: bool = False,
    weight_dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    rank: int = 0,
    **options: Any,
) -> None:
    """One forward and backward; the last expert gets no token, the first token's first choice is not here.

    rank: of low-rank factors, beside weights that are frozen then.
    """
    T, d, n, E, K = shape
    up_rows = activation_named(activation).halves * n

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device=DEVICE).to(dtype).requires_grad_()

    x, up, down = normal(T, d), normal(E, up_rows, d, dtype=weight_dtype), normal(E, d, n, dtype=weight_dtype)
    scores = torch.rand(T, K, device=DEVICE).requires_grad_()
    experts = torch.rand(T, E - 1, device=DEVICE).topk(K, dim=1).indices.to(torch.int32)
    experts[0, 0] = E
    if transposed:
        up, down = (t.detach().mT.contiguous().mT.requires_grad_() for t in (up, down))
    leaves = [x, up, down, scores]
    if bias:
        options |= {"up_bias": normal(E, up_rows), "down_bias": normal(E, d)}
        leaves += [options["up_bias"], options["down_bias"]]
    if rank:
        factors = [LowRank(normal(E, rank, t.shape[2]), normal(E, t.shape[1], rank)) for t in (up, down)]
        up, down, leaves = up.detach(), down.detach(), [x, scores, *factors[0], *factors[1]]
        options |= {"up_factors": factors[0], "down_factors": factors[1]}
    out = moe_mlp(x, up, down, scores, experts, num_experts=E, activation=activation, backend="hopper", **options)
    gradients = torch.autograd.grad(out, leaves, torch.randn_like(out))
    torch.cuda.synchronize()
    for tensor in (out, *gradients):
        if not tensor.isfinite().all():
            raise AssertionError(f"not finite: {shape} {activation} {options.keys()}")


def with_tickets(run: Callable[[], None]) -> None:
    give_tickets(True)
    try:
        run()
    finally:
        give_tickets(False)


def slices_of_columns() -> None:
    """Outputs a few columns at a time, as the largest layers make them; the first eight columns are left out."""
    tokens, d, n, num_experts, top_k = 300, 328, 136, 4, 2
    experts = torch.rand(tokens, num_experts, device=DEVICE).topk(top_k, dim=1).indices.to(torch.int32)
    made = dispatch.build_dispatch(experts, num_experts)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE).to(torch.bfloat16)

    act, down, bias = normal(tokens * top_k, n), normal(num_experts, d, n), normal(num_experts, d)
    dh, up, scores = (
        normal(tokens * top_k, 2 * n),
        normal(num_experts, 2 * n, d),
        torch.rand(tokens, top_k, device=DEVICE),
    )
    out, dx = (torch.zeros(tokens, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    for columns in (range(8, 264), range(264, 328)):
        y, dx_rows = (normal(tokens * top_k, len(columns)) for _ in range(2))
        gemm.down_forward(act, down, made, bias=bias, columns=columns, y=y)
        gemm.combine(y, made, scores=scores, columns=columns, out=out)
        gemm.up_backward_act(dh, up, made, columns=columns, dx_rows=dx_rows)
        gemm.combine(dx_rows, made, columns=columns, out=dx)
    torch.cuda.synchronize()
    for summed in (out, dx):
        if summed[:, :8].any() or not (summed.isfinite().all() and summed[:, 8:].any(dim=0).all()):
            raise AssertionError("wrong: slices of columns")


def weight_gradients_in_partials(dtype: torch.dtype, gather: bool) -> None:
    """The first of two experts has all rows, so many that several CTAs share their reduction."""
    T, d, n, E = 40_010, 72, 264, 2

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=DEVICE).to(torch.bfloat16)

    made = dispatch.build_dispatch(torch.zeros(T, 1, dtype=torch.int32, device=DEVICE), E)
    products: dict[str, tuple[torch.Tensor, torch.Tensor, tuple[int, int, int]]] = {
        "down_backward_weight": (normal(T, d), normal(T, n), (E, d, n)),
        "up_backward_weight": (normal(T, 2 * n), normal(T, d), (E, 2 * n, d)),
    }
    for product, (first, second, shape) in products.items():
        dw = torch.empty(shape, dtype=dtype, device=DEVICE)
        workspace = torch.empty(gemm.weight_workspace(product, dw, made), device=DEVICE)
        getattr(gemm, product)(first, second, made, dw=dw, gather=gather, workspace=workspace)
        torch.cuda.synchronize()
        if not (dw.isfinite().all() and dw[0].any() and not dw[1].any()):
            raise AssertionError(f"wrong: {product} {dtype} {gather=}")


def layers() -> Iterator[tuple[str, Callable[[], None]]]:
    for shape in SHAPES:
        for activation in ACTIVATIONS:
            yield f"{shape} {activation}", partial(layer, shape, activation)
            yield f"{shape} {activation} bias", partial(layer, shape, activation, bias=True)
        variants: tuple[dict[str, Any], ...] = (
            {"save": "paper"},
            {"save": "recompute"},
            {"combine": "fused"},
            {"workspace_bytes": 1 << 18},
            {"weight_dtype": torch.float32},
            {"row_capacity": 50},
            {"row_capacity": 0},
            {"row_capacity": 50, "workspace_bytes": 1 << 15},
            {"transposed": True},
            {"transposed": True, "activation": "alternating(clamped_swiglu)", "bias": True},
            {"rank": 16},
            {"rank": 72, "transposed": True, "activation": "alternating(clamped_swiglu)"},
        )
        for options in variants:
            yield f"{shape} {options}", partial(layer, shape, **options)
        for combine in ("gather", "fused"):
            yield f"{shape} {combine}, tickets", partial(with_tickets, partial(layer, shape, combine=combine))
    yield f"{Y_OVER_ACT}: Y over act", partial(layer, Y_OVER_ACT, bias=True)
    yield "slices of columns", slices_of_columns
    for dtype, gather in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)):
        run = partial(weight_gradients_in_partials, dtype, gather)
        yield f"weight gradients in partials, {dtype}, {gather=}", run


def build(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, method: Method, row_capacity: int | None = None
) -> None:
    """A dispatch of random ids, some of them -1."""
    experts = torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k, dim=1).indices.to(dtype)
    experts[: num_tokens // 7, 0] = -1
    dispatch.build_dispatch(experts, num_experts, method=method, row_capacity=row_capacity)
    torch.cuda.synchronize()


def dispatches() -> Iterator[tuple[str, Callable[[], None]]]:
    ids = [(shape, torch.int32) for shape in ((37, 5, 3), (5000, 130, 8), (1, 1, 1), (0, 4, 2))]
    ids.append(((20_000, 130, 8), torch.int64))  # 79 chunks: of so many the table is scanned
    for (num_tokens, num_experts, top_k), dtype in ids:
        for method in get_args(Method):
            run = partial(build, num_tokens, num_experts, top_k, dtype, method)
            yield f"dispatch {method} {num_tokens} {num_experts} {top_k} {dtype}", run
            yield (
                f"dispatch {method} {num_tokens} {num_experts} {top_k} {dtype} limited",
                partial(run, row_capacity=1000),
            )


def choose(score: Score, num_experts: int, top_k: int, dtype: torch.dtype, bias: bool) -> None:
    """The fused top-k and its backward, with random logits."""
    logits = torch.randn(77, num_experts, device=DEVICE).to(dtype)
    added = torch.randn(num_experts, device=DEVICE) if bias else None
    scores, experts = topk_route(logits, top_k, score=score, bias=added)
    d_logits = topk_route_backward(logits, experts, torch.randn_like(scores), score=score)
    torch.cuda.synchronize()
    if not (
        scores.isfinite().all() and d_logits.isfinite().all() and 0 <= experts.min() <= experts.max() < num_experts
    ):
        raise AssertionError(f"wrong: {score} {num_experts} {top_k} {dtype} {bias=}")


def choices() -> Iterator[tuple[str, Callable[[], None]]]:
    """Rows that begin at multiples of 16 bytes and others; a lane a token and several."""
    kinds = [(score, False) for score in get_args(Score)] + [("sigmoid", True)]
    for score, bias in kinds:
        for dtype in (torch.float32, torch.bfloat16):
            for num_experts, top_k in ((5, 3), (128, 8), (130, 4), (520, 16)):
                run = partial(choose, score, num_experts, top_k, dtype, bias)
                yield f"topk_route {score} {num_experts} {top_k} {dtype} {bias=}", run


def route(name: str, num_tokens: int, num_experts: int, top_k: int, weight_dtype: torch.dtype) -> None:
    """A named router forward and backward: its products, choice, losses and scores."""
    losses = {} if name in ("expert_choice", "hash") else {"aux_loss": 0.1}
    router = make_router(name, 64, num_experts, top_k, z_loss=0.1, device=DEVICE, dtype=weight_dtype, **losses)
    x = torch.randn(num_tokens, 64, device=DEVICE).bfloat16().requires_grad_()
    routing = router(x, torch.arange(num_tokens, device=DEVICE))
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
    parts = {"layers": layers, "dispatches": dispatches, "choices": choices, "routers": routers}
    parser.add_argument("--parts", default=",".join(parts), help="some of " + ", ".join(parts))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name, such as tickets")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - parts.keys():
        parser.error(f"--parts: expected some of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    need_hopper()
    torch.manual_seed(0)
    failed = []
    for part in names:
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
