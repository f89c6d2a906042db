"""Masked tokens on the kernels: the batch without them gives the same bits, for every router."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.router.choices import Hash
from blazeproto.router.router import ROUTERS
from tests.gpu import Captured, no_waiting

pytestmark = pytest.mark.gpu

D, N, E, K = 512, 128, 16, 2
DRAWING = ("token_rounding_sr_f", "token_rounding_nr_s")  # another draw in a graph


def layer_of(router: str, backend: str, **losses: float) -> MoE:
    torch.manual_seed(0)
    tile = {"tile": 16} if router.startswith("token_rounding") else {}
    losses = {"aux_loss": 0.0, **losses} if "aux_loss" in ROUTERS[router] else losses
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "backend": backend}
    return MoE(D, N, E, K, router=router, d_shared=64, **where, **tile, **losses)


def batch(num_tokens: int, masked: float) -> tuple[Tensor, Tensor, Tensor]:
    """x and d_out (T, d), NaN where masked, and the mask."""
    x, d_out = (torch.randn(num_tokens, D, device="cuda").bfloat16() for _ in range(2))
    mask = torch.rand(num_tokens, device="cuda") >= masked
    x[~mask] = d_out[~mask] = torch.nan
    return x, d_out, mask


def step(layer: MoE, x: Tensor, d_out: Tensor, mask: Tensor | None, ids: Tensor) -> tuple[Any, ...]:
    """out, dx, statistics, the routing and the weights' gradients."""
    routings: list[Any] = []
    handle = layer.router.register_forward_hook(lambda *given: routings.append(given[-1]))
    given = {"token_ids": ids} if isinstance(layer.router.choice, Hash) else {}
    x = x.clone().requires_grad_()
    out, stats = layer(x, mask=mask, **given)
    handle.remove()
    roots = [out, *(loss for loss in stats.aux_losses.values() if loss.requires_grad)]
    made = torch.autograd.grad(roots, [x, *layer.parameters()], [d_out, *map(torch.ones_like, roots[1:])])
    return out.detach(), made[0], stats, routings[0], made[1:]


def outcome(made: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """out, dx and the load, without the graph of what made them: a capture needs nodes of its own."""
    return made[0], made[1], made[2].load


def pairs_of(routing: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """ids and scores of these tokens; with a number that varies, each pair's token too."""
    if routing.pair_tokens is None:
        return routing.experts[tokens], routing.scores[tokens]
    used = routing.experts >= 0
    place = torch.full((int(tokens.max()) + 1,), -1, device="cuda")
    place[tokens] = torch.arange(len(tokens), device="cuda")
    return routing.experts[used], routing.scores[used], place[routing.pair_tokens[used].long()]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("num_tokens", "masked"), [(1000, 0.5), (4096, 0.1), (33, 0.9)])
def test_masked_tokens_might_not_be_there(router: str, num_tokens: int, masked: float, backend: str) -> None:
    x, d_out, mask = batch(num_tokens, masked)
    mask[0] = True
    x[0] = d_out[0] = 1
    ids, tokens = torch.arange(num_tokens, device="cuda") * 7, mask.nonzero().flatten()
    alone = x[mask], d_out[mask], None, ids[mask]

    layer = layer_of(router, backend)
    torch.manual_seed(1)  # what rounding draws
    out, dx, stats, routing, _ = step(layer, x, d_out, mask, ids)
    torch.manual_seed(1)
    right_out, right_dx, right_stats, right_routing, _ = step(layer, *alone)
    assert not out[~mask].any() and not dx[~mask].any()
    assert torch.equal(out[mask], right_out) and torch.equal(dx[mask], right_dx)
    assert torch.equal(stats.load, right_stats.load)
    right = pairs_of(right_routing, torch.arange(len(tokens), device="cuda"))
    assert all(map(torch.equal, pairs_of(routing, tokens), right))

    losses = {"z_loss": 0.1} | ({"aux_loss": 0.1} if "aux_loss" in ROUTERS[router] else {})
    layer = layer_of(router, backend, **losses)
    torch.manual_seed(1)
    _, dx, stats, _, gradients = step(layer, x, d_out, mask, ids)
    torch.manual_seed(1)
    _, right_dx, right_stats, _, right_gradients = step(layer, *alone)
    for name, loss in stats.aux_losses.items():
        torch.testing.assert_close(loss, right_stats.aux_losses[name], rtol=1e-5, atol=0)
    assert not dx[~mask].any()
    for got, expected in zip((dx[mask], *gradients), (right_dx, *right_gradients), strict=True):
        assert (got - expected).float().norm() <= 2**-7 * expected.float().norm()


@pytest.mark.parametrize("router", ROUTERS)
def test_nothing_waits_and_a_graph_takes_another_mask(router: str, backend: str) -> None:
    layer = layer_of(router, backend, z_loss=0.1)
    ids = torch.arange(600, device="cuda")
    batches = [batch(600, share) for share in (0.3, 0.8, 1.0)]
    x, d_out, mask = (t.clone() for t in batches[0])
    expected = [outcome(step(layer, *given, ids)) for given in batches]
    with no_waiting():
        step(layer, x, d_out, mask, ids)
    if router in DRAWING:
        return
    layer = layer_of(router, backend, z_loss=0.1)  # whose nodes of autograd are all made on the stream that captures
    captured = Captured(lambda: outcome(step(layer, x, d_out, mask, ids)))
    for given, right in zip(batches, expected, strict=True):
        for buffer, value in zip((x, d_out, mask), given, strict=True):
            buffer.copy_(value)
        assert all(map(torch.equal, captured.replay(), right))


@pytest.mark.parametrize("router", ["top_k", "capacity", "token_rounding"])
def test_compiles_to_one_graph(router: str, backend: str) -> None:
    layer, (x, _, mask) = layer_of(router, backend), batch(300, 0.4)
    made = torch.compile(layer, fullgraph=True)(x, mask=mask)
    assert torch.equal(made[0], layer(x, mask=mask)[0])
