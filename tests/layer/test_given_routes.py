"""`MoE.forward` with the experts and scores of another program."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.router.router import Router, Routing
from tests.refusals import refuses

T, D, E, K = 12, 64, 5, 2


class Silent(Router):
    """Which takes no mask, and is not run."""

    def forward(self, x: Tensor) -> Routing:
        raise AssertionError


@pytest.fixture
def layer() -> MoE:
    torch.manual_seed(0)
    return MoE(D, 32, E, K, d_shared=16, aux_loss=0.1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, T // 3, D, generator=torch.Generator().manual_seed(1), requires_grad=True)


def routes(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    routing = layer.router(x.reshape(-1, D))
    return {name: getattr(routing, name).detach().view(3, T // 3, K) for name in ("experts", "scores")}


@pytest.mark.parametrize("masked", [False, True])
def test_the_routers_own_routes_give_its_output_and_load(layer: MoE, x: Tensor, masked: bool) -> None:
    mask = torch.arange(T).view(3, T // 3) % 3 > 0 if masked else None
    expected, stats = layer(x, mask=mask)
    given = routes(layer, x)
    layer.router.__class__ = Silent
    out, mine = layer(x, mask=mask, **given)
    assert torch.equal(out, expected) and torch.equal(mine.load, stats.load) and not mine.aux_losses
    out.sum().backward()
    assert layer.router.weight.grad is None and layer.down_proj.grad is not None
    turned = {name: t.movedim(-1, 0).contiguous().movedim(0, -1) for name, t in given.items()}
    assert torch.equal(layer(x, mask=mask, **turned)[0], out)


def test_scores_get_their_gradient_and_ids_of_no_expert_no_row(layer: MoE, x: Tensor) -> None:
    given = routes(layer, x)
    given["experts"][0, :2, 0] = torch.tensor([-1, E + 1])
    given["scores"].requires_grad_()
    out, stats = layer(x, **given)
    out.square().sum().backward()
    assert given["scores"].grad[0, :2, 0].eq(0).all() and (given["scores"].grad != 0).sum() == T * K - 2
    assert int(stats.load.sum()) == T * K - 2


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [
        ("scores", {"scores": None}, TypeError),
        ("scores", {"experts": None}, ValueError),
        ("experts", {"experts": torch.zeros(3, T // 3, K)}, TypeError),
        ("scores", {"scores": torch.zeros(3, T // 3, K, dtype=torch.int64)}, TypeError),
        ("experts", {"experts": torch.zeros(T, K, dtype=torch.int64)}, ValueError),
        ("scores", {"scores": torch.zeros(3, T // 3, K + 1)}, ValueError),
        ("mask", {"mask": torch.ones(T // 3, 3, dtype=torch.bool)}, ValueError),
        ("token_ids", {"token_ids": torch.zeros(3, T // 3, dtype=torch.int64)}, ValueError),
    ],
)
def test_what_does_not_fit_is_refused(
    layer: MoE, x: Tensor, argument: str, change: dict[str, Any], error: type[Exception]
) -> None:
    refuses(lambda: layer(x, **routes(layer, x) | change), argument, error)
