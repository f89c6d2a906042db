"""Ranks with a GPU each that share a layer's experts by `Symmetric`, started by `test_symmetric.py`. Each function is a case.

Every rank makes the batches of all ranks, from seeds, and so knows what must come out.
"""

import gc
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blazeproto import MoE, moe_mlp
from blazeproto.autograd.options import Options
from blazeproto.distributed import AllToAll, Symmetric, check_overflow, expert_parallel
from blazeproto.router.router import Routing
from tests.autograd.cases import assert_as_good_as
from tests.refusals import refuses

BF16 = torch.bfloat16


class Batch(NamedTuple):
    x: Tensor
    ids: Tensor
    scores: Tensor
    d_out: Tensor


class Sizes(NamedTuple):
    d: int = 256
    n: int = 128
    E: int = 16
    K: int = 4
    tokens: tuple[int, ...] = (700, 300)  # of the ranks in turn


def ids_of(kind: str, sizes: Sizes, tokens: int, ranks: int, generator: torch.Generator) -> Tensor:
    """Distinct in a row. "one": all on rank 0, -1 beyond its experts; "empty": none on the last rank."""
    here = sizes.E // ranks
    expert = torch.arange(sizes.E, device="cuda")
    weights = {
        "uniform": torch.ones(sizes.E, device="cuda"),
        "zipf": 1.0 / (1 + expert) ** 1.5,
        "one": (expert < here).float(),
        "empty": (expert < sizes.E - here).float(),
    }[kind]
    most = min(sizes.K, int((weights > 0).sum()))
    made = torch.full((tokens, sizes.K), -1, device="cuda", dtype=torch.int32)
    if tokens:
        made[:, :most] = torch.multinomial(weights.expand(tokens, -1), most, generator=generator).int()
    return made


def batch(
    rank: int, sizes: Sizes, ranks: int, kind: str = "uniform", seed: int = 0, tokens: int | None = None
) -> Batch:
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    tokens = sizes.tokens[rank % len(sizes.tokens)] if tokens is None else tokens
    x, d_out = (torch.randn(tokens, sizes.d, device="cuda", generator=generator).to(BF16) for _ in range(2))
    scores = torch.rand(tokens, sizes.K, device="cuda", generator=generator)
    return Batch(x, ids_of(kind, sizes, tokens, ranks, generator), scores, d_out)


def weights_of(sizes: Sizes) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    up = torch.randn(sizes.E, 2 * sizes.n, sizes.d, device="cuda", generator=generator) * sizes.d**-0.5
    down = torch.randn(sizes.E, sizes.d, sizes.n, device="cuda", generator=generator) * sizes.n**-0.5
    return up.to(BF16), down.to(BF16)


class Fixed(torch.nn.Module):
    """A router that gives what it was given."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.given = sizes.E, sizes.K, (torch.empty(0), torch.empty(0))

    def forward(self, x: Tensor) -> Routing:
        scores, ids = self.given
        load = torch.zeros(self.num_experts, dtype=torch.int32, device=x.device)
        return Routing(scores, ids, scores, load, {})


def layer_of(sizes: Sizes, dispatcher: Any, **options: Any) -> MoE:
    up, down = weights_of(sizes)
    layer = MoE(sizes.d, sizes.n, sizes.E, sizes.K, router=Fixed(sizes), dtype=BF16, device="cuda", **options)
    with torch.no_grad():
        layer.gate_up_proj.copy_(up), layer.down_proj.copy_(down)
    return expert_parallel(layer, dispatcher.group, dispatcher=dispatcher)


def symmetric(sizes: Sizes, **options: Any) -> Symmetric:
    most = max(sizes.tokens)
    assert dist.group.WORLD is not None
    arguments = {"d_model": sizes.d, "max_tokens": most, "max_pairs": most * sizes.K, "timeout": 20.0}
    return Symmetric(dist.group.WORLD, sizes.E, **arguments | options)


def run(layer: MoE, given: Batch) -> dict[str, Tensor]:
    x, scores = given.x.clone().requires_grad_(), given.scores.clone().requires_grad_()
    layer.zero_grad()
    layer.router.given = (scores, given.ids)
    out, _ = layer(x)
    out.backward(given.d_out)
    weights: Any = (layer.gate_up_proj.grad, layer.down_proj.grad)
    return {
        "out": out.detach(),
        "x": x.grad,
        "scores": scores.grad,
        **{name: w.to_local().clone() for name, w in zip(("up", "down"), weights, strict=True)},
    }


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor], *names: str) -> None:
    for name in names or a:
        assert torch.equal(a[name], b[name]), f"{name}: {int((a[name] != b[name]).sum())} of {a[name].numel()} differ"


def expected(sizes: Sizes, batches: list[Batch], rank: int, dtype: torch.dtype, ranks: int) -> dict[str, Tensor]:
    """By the torch backend on this GPU alone, each rank's partial sums rounded to ``dtype``, of O and of dX."""
    up, down = (w.to(dtype).requires_grad_() for w in weights_of(sizes))
    here, results = sizes.E // ranks, {}
    for each, given in enumerate(batches):
        x, scores = (
            given.x.detach().to(dtype, copy=True).requires_grad_(),
            given.scores.double() if dtype == torch.float64 else given.scores,
        )
        scores = scores.clone().requires_grad_()
        out, dx = (
            torch.zeros(x.shape, device="cuda", dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)
        )
        for p in range(ranks):
            ids = torch.where((given.ids >= p * here) & (given.ids < (p + 1) * here), given.ids - p * here, -1)
            part = slice(p * here, (p + 1) * here)
            made = moe_mlp(x, up[part], down[part], scores, ids, num_experts=here, backend="torch")
            made.backward(given.d_out.to(dtype))
            assert x.grad is not None
            out += made.detach()
            dx += x.grad
            x.grad = None
        if each == rank:
            results = {"out": out.to(dtype), "x": dx.to(dtype), "scores": scores.grad}
    own = slice(rank * here, (rank + 1) * here)
    assert up.grad is not None and down.grad is not None
    return results | {"up": up.grad[own], "down": down.grad[own]}


def bits_of_all_to_all(sizes: Sizes, given: Batch, **options: Any) -> dict[str, Tensor]:
    """The results, which are those of `AllToAll`, and again the same."""
    layer = layer_of(sizes, symmetric(sizes), **options)
    got = run(layer, given)
    same_bits(got, run(layer, given))
    same_bits(got, run(layer_of(sizes, AllToAll(layer.dispatcher.group, sizes.E), **options), given))
    return got


def accuracy(rank: int, ranks: int) -> None:
    """DESIGN's accuracy for all kinds of routing, and the bits of `AllToAll`, which in fp8 quantizes rows where they arrive."""
    policies = ("minimal", "paper", "recompute")
    cases = [
        (Sizes(), "uniform"),
        (Sizes(tokens=(512, 700)), "zipf"),
        (Sizes(tokens=(400, 300)), "one"),
        (Sizes(tokens=(300, 400)), "empty"),
        (Sizes(tokens=(0, 512)), "uniform"),
        (Sizes(d=2880, n=72, K=1, tokens=(150, 150)), "uniform"),
        (Sizes(d=136, n=264, K=9, tokens=(333, 1)), "zipf"),
    ]
    for number, (sizes, kind) in enumerate(cases):
        batches = [batch(each, sizes, ranks, kind) for each in range(ranks)]
        got = bits_of_all_to_all(sizes, batches[rank], save=policies[number % 3])
        if sizes.n % 128 == 0:
            bits_of_all_to_all(sizes, batches[rank], precision="fp8", save=policies[number % 2 * 2])
        by_dtype = [expected(sizes, batches, rank, dtype, ranks) for dtype in (BF16, torch.float64)]
        assert_as_good_as(*([each[name] for name in got] for each in (got, *by_dtype)))


def bits_of_a_token(rank: int, ranks: int, precision: str = "bf16") -> None:
    """Out, dx and the scores' gradients of 100 tokens, whatever the others of all ranks are."""
    sizes = Sizes(tokens=(700,))
    layer, results = layer_of(sizes, symmetric(sizes), precision=precision), []
    own = batch(rank, sizes, ranks, tokens=100)
    for seed, kind, tokens in ((1, "uniform", 100), (2, "zipf", 600), (3, "empty", 333)):
        others = batch(rank, sizes, ranks, kind, seed=seed, tokens=tokens)
        given = Batch(*(torch.cat(parts) for parts in zip(own, others, strict=True)))
        results.append({name: t[:100] for name, t in run(layer, given).items()})
    for other in results[1:]:
        same_bits(results[0], other, "out", "x", "scores")


def graph(rank: int, ranks: int, precision: str = "bf16") -> None:
    """Forward and backward of two layers that share a dispatcher, captured and replayed with other tokens and routings."""
    sizes = Sizes(tokens=(640, 512))
    dispatcher = symmetric(sizes)
    layers = [layer_of(sizes, dispatcher, precision=precision) for _ in range(2)]
    static = batch(rank, sizes, ranks)
    x, scores = static.x.clone().requires_grad_(), static.scores.clone().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        hidden = x
        for layer in layers:
            layer.router.given = (scores, static.ids)
            hidden = layer(hidden)[0]
        weights = [w for layer in layers for w in (layer.gate_up_proj, layer.down_proj)]
        gradients = torch.autograd.grad(hidden, (x, scores, *weights), static.d_out)
        return (hidden.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in gradients))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            results = call()
    torch.cuda.synchronize()
    for seed, kind in enumerate(("zipf", "uniform", "empty", "one"), 5):
        fresh = batch(rank, sizes, ranks, kind, seed=seed)
        for old, new in zip((x, static.ids, scores, static.d_out), fresh, strict=True):
            old.detach().copy_(new)
        for made in results:
            made.fill_(torch.nan)
        captured.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in results]
        for index, (a, b) in enumerate(zip(got, call(), strict=True)):
            assert torch.equal(a, b), f"result {index} of a replay with {kind} ids"


def rows_sent_by_products(rank: int, ranks: int) -> None:
    """The same bits as rows that are sent before a product, with and without biases, also where a rank has no token."""
    for kind in ("uniform", "zipf", "empty", "one"):
        for tokens, options in (((640,), {}), ((640, 0), {"bias": True}), ((8, 300), {"save": "recompute"})):
            sizes, results = Sizes(tokens=tokens), []
            for by_products in (True, False):
                dispatcher = symmetric(sizes)
                dispatcher._exchange.by_products = by_products
                torch.manual_seed(3)  # of biases
                results.append(run(layer_of(sizes, dispatcher, **options), batch(rank, sizes, ranks, kind)))
            same_bits(*results)


def overflow_of_one_rank(rank: int, ranks: int, precision: str = "bf16") -> None:
    """All tokens go to the last rank, whose capacity they pass: all ranks know, raise, and have the same count."""
    sizes, capacity = Sizes(tokens=(256,)), 1200
    given = batch(rank, sizes, ranks)
    last = torch.arange(sizes.K, device="cuda", dtype=torch.int32) + sizes.E - sizes.E // ranks
    given = given._replace(ids=last.expand_as(given.ids).contiguous())
    left_out = ranks * 256 * sizes.K - capacity
    options = {"row_capacity": capacity, "precision": precision}
    dropping = layer_of(sizes, symmetric(sizes, overflow="drop"), **options)
    results = run(dropping, given)
    assert check_overflow(dropping) == left_out and check_overflow(dropping) == 0
    dropped = (results["scores"] == 0).sum().reshape(1)  # such a pair's score has no gradient
    dist.all_reduce(dropped)
    assert int(dropped) == left_out and all(t.isfinite().all() for t in results.values())

    raising = layer_of(sizes, symmetric(sizes), **options)
    optimizer = torch.optim.SGD(raising.parameters(), lr=1.0)
    before = [p.detach().to_local().clone() for p in optimizer.param_groups[0]["params"]]
    run(raising, given)
    told = refuses(lambda: check_overflow(raising), "row_capacity", OverflowError)
    assert told.got.startswith(f"{left_out} pairs")
    after = [p.detach().to_local() for p in optimizer.param_groups[0]["params"]]
    assert all(map(torch.equal, before, after))
    run(raising, batch(rank, sizes, ranks))
    assert check_overflow(raising) == 0  # there are rows enough for these, on every rank


def varying(rank: int, ranks: int) -> None:
    """A number of experts that varies by token, as `AllToAll` has it, to the bit."""
    sizes = Sizes(tokens=(640,))
    for router in ("expert_choice", "token_rounding"):
        results = []
        for dispatcher in (AllToAll(dist.group.WORLD, sizes.E), symmetric(sizes, max_pairs=8 * 640)):
            torch.manual_seed(3)
            layer = MoE(sizes.d, sizes.n, sizes.E, sizes.K, router=router, dtype=BF16, device="cuda")
            layer = expert_parallel(layer, dispatcher.group, dispatcher=dispatcher)
            x = batch(rank, sizes, ranks).x.requires_grad_()
            out, _ = layer(x)
            out.backward(batch(rank, sizes, ranks).d_out)
            results.append({"out": out.detach(), "x": x.grad, "router": layer.router.weight.grad})
        same_bits(*results)


def more_experts_than_one_gpu_takes(rank: int, ranks: int) -> None:
    """512 on a rank, as `AllToAll` has them, to the bit."""
    sizes = Sizes(d=64, n=8, E=512 * ranks)
    dispatchers = (AllToAll(dist.group.WORLD, sizes.E), symmetric(sizes))
    same_bits(*(run(layer_of(sizes, dispatcher), batch(rank, sizes, ranks)) for dispatcher in dispatchers))


def refusals(rank: int, ranks: int) -> None:
    """Before anything is sent."""
    sizes = Sizes(tokens=(640,))
    small = symmetric(sizes)
    layer = layer_of(sizes, small)
    refuses(lambda: run(layer, batch(rank, sizes, ranks, tokens=641)), "x")
    refused = {"combine": "fused", "workspace_bytes": 1 << 20, "backend": "torch"}
    for name, value in refused.items():
        refuses(lambda: small.check(Options(**{name: value})), name)  # noqa: B023


EITHER = (bits_of_a_token, graph, overflow_of_one_rank)
IN_FP8 = tuple(partial(case, precision="fp8") for case in EITHER)
CASES = (accuracy, rows_sent_by_products, *EITHER, *IN_FP8, varying, more_experts_than_one_gpu_takes, refusals)


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    options = {
        "rank": rank,
        "world_size": ranks,
        "timeout": timedelta(seconds=120),
        "device_id": torch.device("cuda", rank),
    }
    dist.init_process_group("nccl", store=store, **options)
    for case in CASES:
        case(rank, ranks)
        gc.collect()  # torch's symmetric memory must not be freed while a later case captures a graph
        dist.barrier()
        if rank == 0:
            print("passed:", case, flush=True)
    torch.cuda.synchronize()
    os._exit(0)
