"""The options of the expert MLP: each is a keyword of every function that takes options, documented, and checked in one place."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

import pytest
import torch

from blazeproto import MoE, moe_mlp
from blazeproto.autograd import Options, grouped_experts

TAKERS = {"moe_mlp": moe_mlp, "MoE": MoE, "grouped_experts": grouped_experts}
LEFT_OUT = {"grouped_experts": {"row_capacity", "workspace_bytes"}}
OPTIONS = [
    (taker, option) for taker in TAKERS for option in fields(Options) if option.name not in LEFT_OUT.get(taker, ())
]


@pytest.mark.parametrize(("taker", "option"), OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_an_option_is_a_keyword_with_its_default_and_documented(taker: str, option) -> None:
    parameter = inspect.signature(TAKERS[taker]).parameters[option.name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default == option.default
    first = " ".join(option.metadata["doc"].split())[:40]
    assert first in " ".join((TAKERS[taker].__doc__ or "").split())


@pytest.mark.parametrize("option", fields(Options), ids=lambda option: option.name)
def test_a_layer_carries_an_option_and_operators_give_it_back(option) -> None:
    layer = MoE(16, 8, num_experts=4, top_k=2, **{option.name: option.default})
    assert getattr(layer.options, option.name) == option.default
    if option.metadata["in_operators"]:
        made = Options.decode(Options().encode("minimal"))
        assert getattr(made, option.name) == option.default


@pytest.mark.parametrize("option", fields(Options), ids=lambda option: option.name)
@pytest.mark.parametrize("wrong", [object(), "sloot"], ids=["object", "sloot"])
def test_a_wrong_value_is_refused_by_name(option, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match=option.name):
        replace(Options(), **{option.name: wrong})


@pytest.mark.parametrize("taker", ["moe_mlp", "MoE"])
def test_an_unknown_option_is_refused_with_the_nearest(taker: str) -> None:
    sizes = (16, 8, 4, 2) if taker == "MoE" else (torch.ones(2, 16), torch.ones(4, 16, 16), torch.ones(4, 16, 8), None)
    keywords = {} if taker == "MoE" else {"num_experts": 4}
    with pytest.raises(TypeError, match=r"combin: unknown keyword.*'combine'"):
        TAKERS[taker](*sizes, combin="gather", **keywords)
