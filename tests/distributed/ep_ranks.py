"""Processes that share a layer's experts, started by `test_expert_parallel.py`. Each function is a case; all ranks run all.

What a rank has is compared with the same layer on one rank, which is given the batches of all ranks, one after the other.
"""

import copy
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from blazeproto import MoE, moe_mlp
from blazeproto.autograd import LowRank, Options
from blazeproto.autograd.mlp import dispatched_mlp
from blazeproto.distributed import AllToAll, Symmetric, check_overflow, clip_grad_norm_, expert_parallel
from blazeproto.router.router import Routing
from blazeproto.stored import quantize
from tests.refusals import refuses

D, N, E = 16, 8, 8
TOKENS = (13, 0, 30, 8)  # of each rank; `run_rank` sets both
RANKS = len(TOKENS)


class Given(nn.Module):
    """A router whose choice ``ids`` (T, K) is given, with scores that depend on x and a weight."""

    def __init__(self, top_k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.ids = E, top_k, torch.empty(0)
        self.weight = nn.Parameter(torch.randn(E, D, dtype=dtype))

    def forward(self, x: Tensor) -> Routing:
        logits = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        load = torch.bincount(self.ids[(self.ids >= 0) & (self.ids < E)].flatten(), minlength=E).int()
        return Routing(wide.sigmoid().gather(1, self.ids.clamp(0, E - 1)), self.ids.int(), wide, load, {})


def ids_of(kind: str, num_tokens: int, top_k: int, seed: int) -> Tensor:
    """Distinct in a row, -1 or E + 2 where there is none. "one": all on rank 0 of four; "empty": none on the last rank."""
    weights = {
        "uniform": torch.ones(E),
        "zipf": 1.0 / torch.arange(1, E + 1) ** 1.5,
        "one": torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]),
        "empty": torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0]),
    }[kind]
    most = int((weights > 0).sum())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor([-1, E + 2])[torch.arange(top_k) % 2].repeat(num_tokens, 1)
    if num_tokens:
        chosen = torch.multinomial(weights.expand(num_tokens, E), min(top_k, most), generator=generator)
        drawn[:, : chosen.shape[1]] = chosen
    return drawn


def batch(rank: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x, d_out = (torch.randn(TOKENS[rank], D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, d_out


def build(seed: int = 1, **options: Any) -> MoE:
    torch.manual_seed(seed)
    return MoE(**{"d_model": D, "d_expert": N, "num_experts": E, "top_k": 3, "dtype": torch.float64, **options})


def step(layer: nn.Module, rank: int, ids: Tensor | None = None, seed: int = 0, **given: Any) -> dict[str, Tensor]:
    """Forward and backward of a rank's batch; its own results."""
    x, d_out = batch(rank, seed=seed)
    x.requires_grad_()
    if ids is not None:
        layer.router.ids = ids
    out, stats = layer(x, **given)
    (torch.sum(out * d_out) + stats.aux_loss).backward()
    return {"out": out.detach(), "x": x.grad, "load": stats.load}


def whole(gradient: Any) -> Tensor:
    """A sharded one gathered, a plain one summed over ranks."""
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def assert_near(name: str, got: Any, expected: Any, least: float = 1e-12) -> None:
    assert got.shape == expected.shape, f"{name}: {got.shape}, expected {expected.shape}"
    error = float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0
    assert error <= least * max(1.0, float(expected.abs().max()) if got.numel() else 0.0), f"{name}: {error}"


def symmetric(where: Any, **options: Any) -> Symmetric:
    """The dispatcher's twin on a CPU, for a group or the last dimension of a mesh."""
    group = where if isinstance(where, dist.ProcessGroup) else where.get_group(where.ndim - 1)
    return Symmetric(group, E, **{"d_model": D, "max_tokens": 32, "max_pairs": 256, **options})


def compare(rank: int, make: Callable[[], MoE], where: Any, ids: list[Tensor] | None = None, given: Any = None) -> None:
    """Against one rank: out, x's gradient, loads, and the gradients of all parameters, summed over ranks."""
    alone, own = make(), {}
    for each in range(RANKS):
        results = step(alone, each, ids and ids[each], **({} if given is None else given(each)))
        own = results if each == rank else own
    for dispatcher in (None, symmetric(where)):
        layer = make()
        layer.combine = layer.combine if dispatcher is None else "gather"
        layer = expert_parallel(layer, where, dispatcher=dispatcher)
        got = step(layer, rank, ids and ids[rank], **({} if given is None else given(rank)))
        for name, value in got.items():
            assert_near(name, value, own[name])
        for (name, parameter), right in zip(layer.named_parameters(), alone.parameters(), strict=True):
            assert (parameter.grad is None) == (right.grad is None), name
            if right.grad is not None:
                assert_near(name, whole(parameter.grad), right.grad)


def choices_that_are_given(rank: int, folder: Path) -> None:
    policies = ("minimal", "paper", "recompute")
    fp8 = {"precision": "fp8", "d_expert": 128}
    cases = [(kind, top_k, {}) for kind in ("uniform", "zipf", "one", "empty") for top_k in (1, 3, 6)]
    cases += [("zipf", 3, fp8), ("empty", 6, fp8 | {"save": "recompute"})]
    for number, (kind, top_k, precision) in enumerate(cases):
        ids = [ids_of(kind, tokens, top_k, seed) for seed, tokens in enumerate(TOKENS)]
        options = precision or {
            "save": policies[number % 3],
            "bias": number % 2 == 0,
            "combine": ("gather", "fused", "fused_both")[number // 3 % 3],
        }

        def make(options: Any = options, top_k: int = top_k) -> MoE:
            torch.manual_seed(3)
            return build(router=Given(top_k, torch.float64), top_k=top_k, **options)

        compare(rank, make, dist.group.WORLD, ids)


def routers(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    named: list[dict[str, Any]] = [
        {"router": "top_k", "aux_loss": 0.01, "z_loss": 0.01, "d_shared": 8, "activation": "relu"},
        {"router": "aux_free"},
        {"router": "token_rounding", "tile": 4},
        {"router": "expert_choice"},
    ]
    for options in named:
        compare(rank, lambda options=options: build(**options), mesh)

    def frozen() -> MoE:
        layer = build()
        layer.router.requires_grad_(False)
        layer.down_proj.requires_grad_(False)
        return layer

    compare(rank, frozen, mesh)

    def masked(each: int) -> dict[str, Tensor]:
        return {"mask": torch.arange(TOKENS[each]) % 3 != 1}

    compare(rank, build, mesh, given=masked)


def copies_of_experts(rank: int, folder: Path) -> None:
    """(dp, ep): experts on half of the ranks, two copies; their gradients are summed over the copies, in each of two
    micro-batches."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "ep"))
    compare(rank, build, mesh)
    layer, alone = expert_parallel(build(), mesh), build()
    for seed in (0, 1):
        step(layer, rank, seed=seed)
        for each in range(RANKS):
            step(alone, each, seed=seed)
    for name in ("gate_up_proj", "down_proj"):
        assert_near(name, layer.get_parameter(name).grad.full_tensor(), alone.get_parameter(name).grad)


def fsdp(rank: int, folder: Path) -> None:
    """fully_shard reduces experts over dp and the router over all; the factor RANKS makes the mean of the ranks' losses."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "ep"))
    layer, alone = expert_parallel(build(), mesh["ep"]), build()
    fully_shard(layer.router, mesh=init_device_mesh("cpu", (RANKS,)))
    fully_shard(layer, mesh=mesh["dp"])
    layer.set_gradient_divide_factor(RANKS)
    got = step(layer, rank)
    own = [step(alone, each) for each in range(RANKS)][rank]
    assert_near("out", got["out"], own["out"])
    assert_near("x", got["x"], own["x"])
    for (name, parameter), right in zip(layer.named_parameters(), alone.parameters(), strict=True):
        assert_near(name, parameter.grad.full_tensor(), right.grad / RANKS)


def training(rank: int, folder: Path) -> None:
    """An optimizer's step with clipped gradients; a checkpoint of two ranks on four ranks and on one."""
    alone, layer = build(), expert_parallel(build(), dist.group.WORLD)
    step(layer, rank)
    for each in range(RANKS):
        step(alone, each)
    dist.all_reduce(layer.router.weight.grad)
    right = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    assert_near("norm", clip_grad_norm_(layer.parameters(), 0.5), right)
    for module in (layer, alone):
        torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    for (name, parameter), expected in zip(layer.named_parameters(), alone.parameters(), strict=True):
        made: Any = parameter.detach()
        assert_near(name, made.full_tensor() if hasattr(made, "full_tensor") else made, expected.detach())

    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    pair = expert_parallel(build(seed=5), first if rank < 2 else second)
    assert pair.down_proj.to_local().untyped_storage().nbytes() == 8 * E // 2 * D * N  # not all experts' memory
    if rank < 2:
        dcp.save(pair.state_dict(), checkpoint_id=folder / "two", process_group=first)
    dist.barrier()
    saved, fresh, plain = build(seed=5), expert_parallel(build(seed=6), dist.group.WORLD), build(seed=7)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder / "two")
    fresh.load_state_dict(state)
    assert torch.equal(fresh.down_proj.full_tensor(), saved.down_proj)
    assert torch.equal(fresh.gate_up_proj.full_tensor(), saved.gate_up_proj)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder / "two", no_dist=True)
    assert all(torch.equal(t, saved.state_dict()[name]) for name, t in state.items())


def bf16(rank: int, folder: Path) -> None:
    """As near to the float64 oracle as plain bf16 with a rank's partial sums rounded, forward and backward; the same bits again.
    Weights in bf16, and in float32."""
    errors: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"out": [], "x": []}
    size = E // RANKS
    for weights in (torch.bfloat16, torch.float32):
        x, d_out = batch(rank, torch.bfloat16)
        ids = ids_of("uniform", len(x), 6, seed=rank)

        def make(weights: torch.dtype = weights) -> MoE:
            torch.manual_seed(3)
            return build(router=Given(6, torch.float32), top_k=6, dtype=weights).to(weights)

        def run(layer: MoE, dtype: torch.dtype, x: Tensor = x, d_out: Tensor = d_out, ids: Tensor = ids) -> Any:
            layer.zero_grad()
            layer.router.ids, x = ids, x.detach().to(dtype).clone().requires_grad_()
            scores = layer.router(x).scores.detach().requires_grad_()
            layer.router.forward = lambda _: Routing(scores, ids.int(), scores, torch.zeros(E).int(), {})
            out = layer(x)[0]
            out.backward(d_out.to(dtype))
            del layer.router.forward
            return out.detach(), x.grad, scores.grad, layer.down_proj.grad, scores.detach()

        layer = expert_parallel(make(), dist.group.WORLD)
        *got, scores = run(layer, torch.bfloat16)
        for a, b in zip(got, run(layer, torch.bfloat16), strict=False):
            assert torch.equal(
                a.to_local() if hasattr(a, "to_local") else a, b.to_local() if hasattr(b, "to_local") else b
            )
        assert got[3].dtype == weights and got[0].dtype == torch.bfloat16
        alone, leaf, local = make(), x.clone().requires_grad_(), scores.clone().requires_grad_()
        sums = [torch.zeros(x.shape), torch.zeros(x.shape)]
        oracle_x, oracle_scores = x.detach().double().requires_grad_(), scores.double()
        up, down = (t.detach().bfloat16() for t in (alone.gate_up_proj, alone.down_proj))
        oracle = moe_mlp(oracle_x, up.double(), down.double(), oracle_scores, ids, num_experts=E)
        oracle.backward(d_out.double())
        for p in range(RANKS):
            here = slice(size * p, size * p + size)
            of_rank = torch.where(ids // size == p, ids - size * p, -1)
            made = moe_mlp(leaf, up[here].contiguous(), down[here].contiguous(), local, of_rank, num_experts=size)
            sums[0] += made.detach().float()
            sums[1] += torch.autograd.grad(made, leaf, d_out, retain_graph=True)[0].float()
        for place, (name, right) in enumerate((("out", oracle.detach()), ("x", oracle_x.grad))):
            errors[name].append((got[place].double() - right, sums[place].bfloat16().double() - right, right))
    for name, found in errors.items():
        ours, plain, right = (torch.cat(each) for each in zip(*found, strict=True))
        if len(right):
            assert ours.norm() / right.norm() <= 1.1 * plain.norm() / right.norm(), name
            assert ours.abs().max() <= 3 * plain.abs().max() and ours.norm(dim=1).max() <= 3 * plain.norm(dim=1).max()


def bits_of_a_token(rank: int, folder: Path) -> None:
    """The same, whatever the other tokens of its own and of other ranks are; a router's pairs of experts in any order."""
    dispatcher, top_k, kept = AllToAll(dist.group.WORLD, E), 5, 3
    results = []
    for seed, more in ((0, 0), (1, 0), (2, 17)):
        generator = torch.Generator().manual_seed(50 * seed + rank)
        x = torch.randn(TOKENS[rank] + more, D, generator=generator).bfloat16()
        scores = torch.rand(len(x), top_k, generator=generator)
        ids = ids_of("uniform", len(x), top_k, 10 * seed + rank).int()
        own = torch.Generator().manual_seed(rank)
        at = slice(0, min(kept, TOKENS[rank]))
        x[at] = torch.randn(kept, D, generator=own).bfloat16()[at]
        scores[at] = torch.rand(kept, top_k, generator=own)[at]
        ids[at] = ids_of("uniform", kept, top_k, rank).int()[at]
        x.requires_grad_(), scores.requires_grad_()
        arrived = dispatcher.dispatch(x, scores, ids, None, None)
        weight = torch.zeros(len(arrived.x)).index_add(
            0, arrived.pair_tokens.long(), arrived.scores * (1 + arrived.topk_experts)
        )
        assert arrived.token_offsets[-1] == len(arrived.scores) and arrived.token_offsets.diff().ge(1).all()
        out = dispatcher.combine((weight[:, None] * arrived.x.float()).bfloat16(), arrived)
        (out.float() * torch.arange(D)).sum().backward()
        results.append([t.detach()[at] for t in (out, x.grad, scores.grad)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def two_dispatchers(rank: int, folder: Path) -> None:
    """On bf16 tokens the twin of `Symmetric` gives the bits of `AllToAll`: a partial sum is rounded, and theirs added in float32.
    In fp8 it sends quantized rows; `AllToAll` quantizes them where they arrive."""
    for precision in ({}, {"precision": "fp8", "d_expert": 128}):
        results = []
        for dispatcher in (AllToAll(dist.group.WORLD, E), symmetric(dist.group.WORLD)):
            torch.manual_seed(3)
            made = build(router=Given(6, torch.float32), top_k=6, dtype=torch.bfloat16, **precision)
            layer = expert_parallel(made, dist.group.WORLD, dispatcher=dispatcher)
            x, d_out = batch(rank, torch.bfloat16)
            layer.router.ids = ids_of("uniform", len(x), 6, rank)
            out = layer(x.requires_grad_())[0]
            out.backward(d_out)
            weights: Any = (layer.gate_up_proj.grad, layer.down_proj.grad)
            results.append([out.detach(), x.grad, layer.router.weight.grad, *(weight.to_local() for weight in weights)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def a_row_goes_once_to_a_rank(rank: int, folder: Path) -> None:
    x, ids = batch(rank)[0], ids_of("uniform", TOKENS[rank], 6, rank)
    arrived = AllToAll(dist.group.WORLD, E).dispatch(x, torch.rand(ids.shape), ids, None, None)
    there = [ids // (E // RANKS) == p for p in range(RANKS)]
    goes = [[here.any(1).sum().item(), here.sum().item()] for here in there]
    counts: list[Any] = [None] * RANKS
    dist.all_gather_object(counts, goes)
    rows, pairs = torch.tensor(counts)[:, rank].sum(0).tolist()
    assert (len(arrived.x), len(arrived.scores)) == (rows, pairs)


def refusals(rank: int, folder: Path) -> None:
    three = dist.new_group([0, 1, 2])
    mesh = init_device_mesh("cpu", (2, 2))
    if rank < 3:
        refuses(lambda: expert_parallel(build(), three), "moe")
        refuses(lambda: AllToAll(three, E), "num_experts")
    refuses(lambda: expert_parallel(build(), three if rank == 3 else None), "mesh_or_group", TypeError)
    two = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        refuses(lambda: expert_parallel(build(), two), "mesh_or_group")
    layer = build()
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    refuses(lambda: expert_parallel(layer, mesh), "moe")


def factors(rank: int, folder: Path, store: Callable[[Tensor], Any] = Tensor.detach) -> None:
    """Low-rank factors of a rank's experts, by both dispatchers, as one rank computes them."""
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    up, down = store(drawn(E, 2 * N, D)), store(drawn(E, D, N))
    pairs = [(drawn(E, 3, D), drawn(E, 2 * N, 3)), (drawn(E, 5, N), drawn(E, D, 5))]
    here = slice(rank * E // RANKS, (rank + 1) * E // RANKS)

    def run(dispatcher: Any, each: int) -> tuple[Tensor, list[Tensor]]:
        x, d_out = batch(each)
        ids = ids_of("zipf", len(x), 4, each)
        scores = torch.rand(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(each))
        part = slice(None) if dispatcher is None else here
        leaves = [t[part].clone().requires_grad_() for pair in pairs for t in pair] + [x.requires_grad_()]
        low = {"up_factors": LowRank(*leaves[:2]), "down_factors": LowRank(*leaves[2:4])}
        if dispatcher is None:
            out = moe_mlp(x, up, down, scores, ids, num_experts=E, **low)
        else:
            given: Any = dict.fromkeys(("up_bias", "down_bias", "pair_tokens", "token_offsets"))
            given |= {"num_experts": E, "options": Options()}
            out, _ = dispatched_mlp(dispatcher, x, up[part], down[part], scores, ids, **given, **low)
        return out.detach(), list(torch.autograd.grad(out, leaves, d_out))

    alone = [run(None, each) for each in range(RANKS)]
    for dispatcher in (AllToAll(dist.group.WORLD, E), symmetric(dist.group.WORLD)):
        out, gradients = run(dispatcher, rank)
        assert_near("out", out, alone[rank][0])
        assert_near("x", gradients[-1], alone[rank][1][-1])
        for index, got in enumerate(gradients[:-1]):
            assert_near(f"factor {index}", got, sum(each[1][index] for each in alone)[here])


def stored_experts(rank: int, folder: Path) -> None:
    """Beside weights in int4, of which a rank holds its experts'."""
    factors(rank, folder, lambda weight: quantize(weight, "int4", (1, 8)))


def overflow_of_one_rank(rank: int, folder: Path) -> None:
    """Only rank 1's rows are too few: all ranks know how many pairs are left out, and all raise or none."""
    capacity, here = 40, E // RANKS
    ids = torch.arange(here, 2 * here).expand(TOKENS[rank], here)  # rank 1's experts
    left_out = sum(TOKENS) * here - capacity

    for kind, precision in (("drop", {"precision": "fp8", "d_expert": 128}), ("raise", {})):
        made = build(router=Given(here, torch.float64), top_k=here, row_capacity=capacity, **precision)
        layer = expert_parallel(made, dist.group.WORLD, dispatcher=symmetric(dist.group.WORLD, overflow=kind))
        layer.router.ids = ids
        x, d_out = batch(rank)
        out, stats = layer(x.requires_grad_())
        out.backward(d_out)
        assert stats.overflow.tolist() == [left_out] and x.grad.isfinite().all()
        if kind == "raise":
            told = refuses(lambda: check_overflow(layer), "row_capacity", OverflowError)  # noqa: B023
            assert told.got.startswith(f"{left_out} pairs")
        else:
            assert check_overflow(layer) == left_out
        layer.router.ids = ids_of("uniform", TOKENS[rank], here, rank)  # 102 pairs on four ranks
        layer(x)
        assert check_overflow(layer) == 0


def overflow_of_one_copy(rank: int, folder: Path) -> None:
    """Experts on half of the ranks, two copies, of which the first alone has too few rows: all ranks know, where told of all."""
    mesh, world = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "ep")), dist.group.WORLD
    layer = build(router=Given(2, torch.float64), top_k=2, row_capacity=10)
    layer = expert_parallel(layer, mesh, dispatcher=symmetric(mesh["ep"]))
    left_out = 2 * sum(TOKENS[: RANKS // 2]) - 10
    for group, expected in ((world, left_out), (None, left_out if rank < RANKS // 2 else 0)):
        layer.router.ids = torch.tensor([0, 1] if rank < RANKS // 2 else [-1, -1]).expand(TOKENS[rank], 2)
        layer(batch(rank)[0])
        if expected:
            told = refuses(lambda: check_overflow(layer, group), "row_capacity", OverflowError)  # noqa: B023
            assert told.got.startswith(f"{expected} pairs")
        assert check_overflow(layer, group) == 0


def a_checkpoint_counts_once(rank: int, folder: Path) -> None:
    """Pairs left out are not counted again where a forward pass runs again, and gradients are those without a checkpoint."""
    dispatcher = symmetric(dist.group.WORLD, overflow="drop")
    layers = [expert_parallel(build(seed, row_capacity=20), dist.group.WORLD, dispatcher=dispatcher) for seed in (1, 2)]

    def run(x: Tensor) -> Tensor:
        return layers[1](layers[0](x)[0])[0]

    x, d_out = batch(rank)
    x.requires_grad_()
    right, count = torch.autograd.grad(run(x), x, d_out)[0], check_overflow(layers[0])
    assert count > 0
    for reentrant in (False, True):
        x.grad = None
        checkpoint(run, x, use_reentrant=reentrant).backward(d_out)
        assert torch.equal(x.grad, right) and check_overflow(layers[0]) == count


def copies_of_a_layer(rank: int, folder: Path) -> None:
    """A deep copy has the dispatcher of what it was copied from; a graph outlives layer and dispatcher."""
    x, d_out = batch(rank)
    for dispatcher in (None, symmetric(dist.group.WORLD)):
        layer = expert_parallel(build(), dist.group.WORLD, dispatcher=dispatcher)
        made = copy.deepcopy(layer)
        assert made.dispatcher is layer.dispatcher and torch.equal(made(x)[0], layer(x)[0])
        layer.requires_grad_(False)
        layer.down_proj.requires_grad_(True)
        out, weight = layer(x)[0], layer.down_proj
        right = torch.autograd.grad(out, weight, d_out, retain_graph=True)[0].to_local()
        del layer, made, dispatcher
        gc.collect()
        assert torch.equal(torch.autograd.grad(out, weight, d_out)[0].to_local(), right)


def ids_beyond_int32(rank: int, folder: Path) -> None:
    """Are of no expert, as every id outside [0, E) is."""
    x = batch(rank)[0]
    scores = torch.rand(len(x), 2, dtype=torch.float64)
    up, down = (t.detach()[: E // RANKS] for t in (build().gate_up_proj, build().down_proj))
    given: Any = dict.fromkeys(("up_bias", "down_bias", "pair_tokens", "token_offsets"))
    given |= {"num_experts": E, "options": Options()}
    for dispatcher in (AllToAll(dist.group.WORLD, E), symmetric(dist.group.WORLD)):
        results = []
        for none in (-1, E, 1 << 32, -(1 << 63), (1 << 63) - 1):
            ids = torch.tensor([none, 3]).expand(len(x), 2)
            results.append(dispatched_mlp(dispatcher, x, up, down, scores, ids, **given)[0])
        assert all(torch.equal(results[0], other) for other in results[1:])


def ranks_that_differ(rank: int, folder: Path) -> None:
    """A dispatcher of other ranks than those that share the experts is refused, then and later; so are counts of some ranks."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "ep"))
    others = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("ep", "dp"))["ep"]  # as many, every second rank
    layer = build()
    for where in (others, dist.group.WORLD):
        for made in (symmetric(where), AllToAll(symmetric(where).group, E)):
            refuses(lambda: expert_parallel(layer, mesh, dispatcher=made), "dispatcher")  # noqa: B023
    parallel, alone, x = expert_parallel(build(), mesh), build(), batch(rank)[0]
    parallel.dispatcher = symmetric(others)
    refuses(lambda: parallel(x), "dispatcher")
    refuses(lambda: check_overflow(parallel, mesh.get_group("ep")), "group")
    alone.dispatcher = AllToAll(dist.group.WORLD, E)  # its weights are still all ranks'
    refuses(lambda: alone(x), "dispatcher")
    order = DeviceMesh("cpu", [*reversed(range(RANKS))])
    refuses(lambda: expert_parallel(build(), order), "mesh_or_group")


CASES = (
    choices_that_are_given,
    routers,
    copies_of_experts,
    fsdp,
    training,
    bf16,
    bits_of_a_token,
    two_dispatchers,
    a_row_goes_once_to_a_rank,
    factors,
    stored_experts,
    overflow_of_one_rank,
    overflow_of_one_copy,
    a_checkpoint_counts_once,
    copies_of_a_layer,
    ids_beyond_int32,
    ranks_that_differ,
    refusals,
)


EIGHT = (13, 0, 30, 8, 5, 0, 1, 17)
ANY_NUMBER = tuple(case for case in CASES if case not in (training, refusals))  # the others are written for four ranks


def run_rank(rank: int, folder: Path, tokens: tuple[int, ...], cases: tuple[Callable[[int, Path], None], ...]) -> None:
    global RANKS, TOKENS
    RANKS, TOKENS = len(tokens), tokens
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    for case in cases:
        case(rank, folder)
        dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive
