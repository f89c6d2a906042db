"""`MoE` with any router and any options against its own parts, to the bit, in every dtype; and with masked tokens. The parts are
held to their references in test_router_properties.py and test_experts_properties.py."""

import contextlib
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from profiles import SHARDS, check
from router_cases import BF16, F16, F32, F64, Case, dense_mask, draw_case
from torch import Tensor

from blazeproto import MoE, moe_mlp
from blazeproto.activations import ACTIVATIONS
from blazeproto.layer import MoEStats
from blazeproto.router.router import Routing, routing_stats

EXACT = [(F64, F64)]
ANY = [(F64, F64), (F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32)]


def draw_layer(data: Any, case: Case) -> MoE:
    num_experts, d = case.router.weight.shape
    n = data.draw(st.sampled_from([1, 3, 8, 16, 24]), "n")
    for_a_token = 8 * case.router.top_k * (2 * n + max(n, d))  # bytes of workspace, at most
    layer = MoE(
        d,
        n,
        num_experts,
        case.router.top_k,
        activation=data.draw(st.sampled_from(ACTIVATIONS), "activation"),
        router=case.router,
        bias=data.draw(st.booleans(), "bias"),
        d_shared=data.draw(st.sampled_from([0, 0, 1, 8]), "d_shared"),
        save=data.draw(st.sampled_from(["minimal", "paper", "recompute"]), "save"),
        row_capacity=data.draw(st.sampled_from([None, None, 0, 5, 50, 1000]), "row_capacity"),
        workspace_bytes=None if case.varies else data.draw(st.sampled_from([None, 9 * for_a_token, 10**9])),
        dtype=case.router.weight.dtype,
    )
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed of weights"))
    layer.train(case.router.training)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("router"):
                parameter.normal_().mul_(parameter.shape[-1] ** -0.5)
    return layer


def run(layer: MoE, case: Case, shape: tuple[int, ...], mask: Tensor | None = None) -> tuple[Tensor, MoEStats, Routing]:
    """x, its token ids and the mask in this shape -> what the layer returns, and its router."""
    seen: list[Routing] = []
    handle = layer.router.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.manual_seed(0)  # of a rounding that draws
    given = {name: t.view(shape) for name, t in (("token_ids", case.ids), ("mask", mask)) if t is not None}
    out, stats = layer(case.x.view(*shape, case.x.shape[1]), **given)
    handle.remove()
    return out, stats, seen[0]


def gradients(loss: Tensor, layer: MoE, x: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(layer.named_parameters())}
    made = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(named.items(), made, strict=True)}


def draw_shape(data: Any, num_tokens: int) -> tuple[int, ...]:
    if num_tokens and num_tokens % 2 == 0 and data.draw(st.booleans(), "batch of sequences"):
        return 2, num_tokens // 2
    return () if num_tokens == 1 and data.draw(st.booleans(), "one token") else (num_tokens,)


def try_parts(data: Any) -> None:
    """The layer is its router, `moe_mlp` and its shared expert, to the bit, forward and backward, in every dtype."""
    case = draw_case(data, ANY)
    layer = draw_layer(data, case)
    x = case.x.requires_grad_()
    shape = draw_shape(data, len(x))
    autocast = data.draw(st.sampled_from([None, None, BF16]), "autocast")
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        out, stats, _ = run(layer, case, shape)
        torch.manual_seed(0)
        routing = layer.router(x, case.ids)
        parts = moe_mlp(
            x,
            layer.up_proj_weight,
            layer.down_proj,
            routing.scores,
            routing.experts,
            num_experts=layer.num_experts,
            activation=layer.activation,
            up_bias=getattr(layer, f"{layer.up_name}_bias"),
            down_bias=layer.down_proj_bias,
            save=layer.save,
            row_capacity=layer.row_capacity,
            workspace_bytes=layer.workspace_bytes,
            pair_tokens=routing.pair_tokens,
            token_offsets=routing.token_offsets,
        )
        if layer.shared_expert is not None:
            parts = parts + layer.shared_expert(x)
    assert out.dtype == (x.dtype if autocast is None or x.dtype == F64 else autocast)
    assert out.shape == (*shape, x.shape[1]) and torch.equal(out.view(x.shape), parts)
    used = int((routing.experts >= 0).sum())
    assert torch.equal(stats.load, routing.load) and int(stats.load.sum()) == used
    assert (stats.overflow is None) == (layer.row_capacity is None)
    assert stats.overflow is None or stats.overflow.tolist() == [max(0, used - layer.row_capacity)]
    d_out = torch.randn(x.shape).to(out.dtype)
    got = gradients((out.view(x.shape) * d_out).sum() + stats.aux_loss, layer, x)
    losses = sum(routing.aux_losses.values()) if routing.aux_losses else 0.0
    wanted = gradients((parts * d_out).sum() + losses, layer, x)
    for name, gradient in got.items():
        assert torch.equal(gradient, wanted[name]), f"gradient of {name}"


@SHARDS
def test_layer_is_its_parts(shard: int) -> None:
    check(try_parts, shard, examples=450)


def try_mask(data: Any) -> None:
    """With masked tokens, NaN in x and in d_out, all is as in the batch of the others, and masked tokens have zeros."""
    case = draw_case(data, EXACT)
    # On a CPU torch computes the last rows of a product, and the last elements of a tensor, otherwise than the rest: equal tokens
    # may have unequal logits, equal logits unequal sigmoids; so which of equal tokens an expert takes depends on where they lie.
    if case.varies and (case.kind == "same" or (case.kind == "integers" and case.router.score == "sigmoid")):
        return
    layer = draw_layer(data, case)
    share = data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]), "share of masked tokens")
    mask = torch.rand(len(case.x)) >= share
    alone = replace(case, x=case.x[mask].contiguous(), ids=None if case.ids is None else case.ids[mask])
    d_out = torch.randn(case.x.shape, dtype=F64)
    case.x[~mask] = d_out[~mask] = torch.nan

    def outcome(case: Case, shape: tuple[int, ...], d_out: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
        x = case.x.requires_grad_()
        out, stats, routing = run(layer, case, shape, mask)
        named = {"x": x, **dict(layer.named_parameters())}
        roots = [(out.view(x.shape), d_out), *((loss, torch.ones_like(loss)) for loss in stats.aux_losses.values())]
        roots = [(root, slope) for root, slope in roots if root.requires_grad]
        outputs, slopes = zip(*roots, strict=True)
        made = torch.autograd.grad(outputs, list(named.values()), slopes, allow_unused=True)
        return out.view(x.shape).detach(), dict(zip(named, made, strict=True)), stats, routing

    out, got, stats, routing = outcome(case, draw_shape(data, len(mask)), d_out, mask)
    right_out, right, right_stats, right_routing = outcome(alone, (len(alone.x),), d_out[mask], None)
    assert not out[~mask].any() and not got["x"][~mask].any() and torch.equal(stats.load, right_stats.load)
    assert stats.overflow is None or torch.equal(stats.overflow, right_stats.overflow)
    assert torch.equal(dense_mask(routing, layer.num_experts)[mask], dense_mask(right_routing, layer.num_experts))
    got["x"] = got["x"][mask]
    pairs = {name: (got[name], right[name]) for name in got}
    pairs |= {name: (loss, right_stats.aux_losses[name]) for name, loss in stats.aux_losses.items()}
    for name, (a, b) in {"out": (out[mask], right_out), **pairs}.items():
        a, b = (torch.zeros(()) if t is None else t for t in (a, b))
        assert (a - b).norm() <= 1e-12 * (1 + b.norm()), name
    logged, right_logged = (routing_stats(r, layer.top_k) for r in (routing, right_routing))
    for name, value in logged.items():
        torch.testing.assert_close(value, right_logged[name], msg=name)


@SHARDS
def test_masked_tokens_might_not_be_there(shard: int) -> None:
    check(try_mask, shard, examples=250)
