"""Masked tokens, with NaN in x: every router, and a layer, does with the others as if the masked ones were not there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.router.router import ROUTERS, Router, make_router, routing_stats

T, D, E, K = 59, 8, 6, 2


def router_of(name: str) -> Router:
    """With both losses, and tiles that are not too large for so few tokens. All tokens choose expert 0, which would be rounded up
    beyond their number."""
    torch.manual_seed(1)
    options = {"tile": 4} if name.startswith("token_rounding") else {}
    options |= {} if name in ("hash", "expert_choice") else {"aux_loss": 0.5}
    router = make_router(name, D, E, K, z_loss=0.1, **options).double()
    with torch.no_grad():
        router.weight[0, 0] = 2.0
    return router


def masked_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """x (T, d) with NaN at masked tokens, the mask (T,), token ids (T,). 39 tokens are not masked."""
    x, mask = torch.randn(T, D, dtype=torch.float64), torch.arange(T) % 3 != 1
    x[:, 0], x[~mask] = 4.0, torch.nan
    return x, mask, torch.randint(0, 1000, (T,))


def weights_of_pairs(routing: Any, mask: Tensor | None) -> Tensor:
    """(T, E): each pair's score, of the tokens that are not masked."""
    experts = routing.experts.flatten().long()
    tokens = routing.pair_tokens if routing.pair_tokens is not None else torch.arange(len(experts)) // K
    used = experts >= 0
    made = torch.zeros(len(routing.logits), E, dtype=torch.float64)
    made = made.index_put((tokens[used].long(), experts[used]), routing.scores.flatten()[used], accumulate=True)
    if mask is not None:
        assert not made[~mask].any() and int(used.sum()) == int((made[mask] > 0).sum())
    return made if mask is None else made[mask]


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_does_without_masked_tokens(name: str) -> None:
    """Pairs, scores, load, losses, figures to log, and the gradients of x and the weight."""
    router, (x, mask, ids) = router_of(name), masked_tokens()
    slopes = torch.randn(T, E, dtype=torch.float64)
    outcomes = []
    for tokens, of_tokens, given in ((x, ids, mask), (x[mask], ids[mask], None)):
        leaf = tokens.clone().requires_grad_()
        torch.manual_seed(2)
        routing = router(leaf, token_ids=of_tokens if name == "hash" else None, mask=given)
        pairs = weights_of_pairs(routing, given)
        loss = (pairs * slopes[mask]).sum() + sum(routing.aux_losses.values())
        d_x, d_weight = torch.autograd.grad(loss, (leaf, router.weight))
        assert given is None or not d_x[~given].any()
        d_x = d_x if given is None else d_x[given]
        outcomes.append(
            [pairs, d_x, d_weight, routing.load, *routing.aux_losses.values(), *routing_stats(routing, K).values()]
        )
        assert int(routing.load.sum()) == int((pairs > 0).sum())
    for got, right in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", ["top_k", "token_rounding"])
@pytest.mark.parametrize("everyone", [False, True], ids=["some", "all masked"])
def test_a_layer_does_without_masked_tokens(name: str, everyone: bool) -> None:
    """Outputs and gradients of masked tokens are 0, with a shared expert too; with all masked those of weights are."""
    options: dict[str, Any] = {"router": name, "d_shared": 8, "dtype": torch.float64}
    options |= {"tile": 4} if name == "token_rounding" else {}
    layer, (x, mask, _) = MoE(D, 8, E, K, **options), masked_tokens()
    if everyone:
        mask, x = torch.zeros_like(mask), torch.full_like(x, torch.nan)
    outcomes = []
    for tokens, given in ((x, mask), (x[mask], None)):
        leaf = tokens.clone().requires_grad_()
        out, stats = layer(leaf, mask=given)
        slopes = torch.ones_like(out) if given is None else torch.where(given[:, None], torch.ones_like(out), torch.nan)
        made = torch.autograd.grad(
            (out, stats.aux_loss), (leaf, *layer.parameters()), (slopes, torch.ones_like(stats.aux_loss))
        )
        if given is not None:
            assert not out[~given].any() and not made[0][~given].any()
            out, made = out[given], (made[0][given], *made[1:])
        outcomes.append([out, stats.load, stats.aux_loss, *made])
    for got, right in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, right)
    assert not everyone or not any(part.any() for part in outcomes[0])
