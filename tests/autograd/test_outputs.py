"""What is handed out is the caller's: writing to it between forward and backward changes no gradient, or raises torch's error."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blazeproto
from blazeproto import MoE
from blazeproto.autograd import moe_mlp
from blazeproto.blocksparse import DroppingMoE, dMoE
from blazeproto.router import ops, pair_ops
from blazeproto.router.linear import router_logits
from blazeproto.router.router import ROUTERS

ROUTE = ("sigmoid", True, 1.5)
OFFSETS, PAIRS = torch.arange(0, 25, 2, dtype=torch.int32), torch.tensor([0, 3] * 12, dtype=torch.int32)
IDS = PAIRS.view(12, 2)
# With a derivative: how each is called with a leaf (12, 6), and the outputs that its backward reads.
OPERATORS: dict[str, tuple[Callable[[Tensor], Any], set[int]]] = {
    "router_logits": (lambda x: router_logits(x, torch.ones(4, 6, dtype=x.dtype), None), {0}),
    "route_top_k": (lambda x: ops.route_top_k(x, None, 2, *ROUTE), {1}),
    "routing_losses": (lambda x: ops.routing_losses(x, IDS, "softmax_topk", 0.5, 0.1, False), {3}),
    "score_pairs": (lambda x: pair_ops.score_pairs(x, PAIRS, OFFSETS, *ROUTE), set()),
    "moe_experts": (lambda x: experts_of(x), set()),
}


def experts_of(x: Tensor) -> Tensor:
    up, down = torch.ones(4, 8, 6, dtype=x.dtype), torch.ones(4, 6, 4, dtype=x.dtype)
    return moe_mlp(x, up, down, torch.ones(12, 2, dtype=x.dtype), IDS, num_experts=4, backend="torch")


def test_every_operator_with_a_derivative_is_here() -> None:
    root = Path(blazeproto.__file__).parent
    defined = re.findall(
        r'\bdefine\(\s*f?"(\w+)\((.*?)\n\)[\n(]', "".join(p.read_text() for p in root.rglob("*.py")), re.DOTALL
    )
    names = {name for name, rest in defined if "setup=" in rest or "derivative(" in rest}
    assert names == set(OPERATORS) and len(defined) > 10


def gradient(call: Callable[[Tensor], Any], write: Callable[[list[Tensor]], None]) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    made = call(x)
    made = [made] if isinstance(made, Tensor) else [*made]
    loss = sum((t * torch.linspace(1, 2, t.numel()).view_as(t)).sum() for t in made if t.requires_grad)
    write(made)
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_of_operators(name: str) -> None:
    call, kept = OPERATORS[name]
    right = gradient(call, lambda made: None)
    with torch.no_grad():
        count = len(call(torch.randn(12, 6, dtype=torch.float64))) if name in ("route_top_k", "routing_losses") else 1
    for place in range(count):

        def fill(made: list[Tensor], place: int = place) -> None:
            (made[place].detach() if made[place].requires_grad else made[place]).fill_(1)

        def fill_data(made: list[Tensor], place: int = place) -> None:
            made[place].data.fill_(1)

        if place in kept:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradient(call, fill)
        else:
            torch.testing.assert_close(gradient(call, fill_data), right, rtol=0, atol=0)


def tensors_in(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, tuple) else ()
    return [t for part in parts for t in tensors_in(part)]


LAYERS: dict[str, Callable[..., MoE]] = {
    **{name: partial(MoE, 8, 8, 8, 2, router=name, dtype=torch.float64) for name in ROUTERS},
    "shared": lambda: MoE(8, 8, 8, 2, d_shared=8, row_capacity=40, dtype=torch.float64, z_loss=0.1),
    "coefficients of 1": lambda: MoE(8, 8, 8, 2, aux_loss=1.0, z_loss=1.0, dtype=torch.float64),
    "aux_free and a loss": lambda: MoE(8, 8, 8, 2, router="aux_free", aux_loss=0.1, dtype=torch.float64),
    "dropping": lambda: DroppingMoE(8, 8, 8, 2, dtype=torch.float64),
    "blocks": lambda: dMoE(8, 128, 8, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_hands_out(name: str, masked: bool) -> None:
    """The load above all, which is to be summed over ranks: a collective writes past autograd's counts, as ``data`` does."""
    layer = LAYERS[name]()
    x = torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(32) if name == "hash" else None
    mask = torch.arange(32) % 5 > 0 if masked else None

    def gradients(write: bool) -> list[Tensor]:
        torch.manual_seed(1)
        out, stats = layer(x, ids, mask)
        loss = (out * torch.linspace(1, 2, 8)).sum() + stats.aux_loss
        for handed_out in tensors_in((out, stats)) if write else ():
            handed_out.data.fill_(3)
        return [*torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)]

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)
