"""One frozen object carries the options: to operators, to a layer, and with keywords that change a part of it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from blazeproto.autograd import Options, SavePolicy
from blazeproto.layer import MoE


def test_they_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Options().save = "paper"


def test_operators_are_told_all_but_the_sizes():
    options = Options("relu", "paper", "torch", "fused", 3, 4)
    assert Options.decode(options.encode("recompute")) == Options("relu", "recompute", "torch", "fused")
    assert Options(save=SavePolicy.PAPER).encode(SavePolicy.PAPER) == Options().encode("paper")


def test_a_layer_has_each_as_an_attribute_that_is_checked():
    layer = MoE(16, 24, 4, 2, save="paper", workspace_bytes=9)
    assert layer.save is SavePolicy.PAPER and layer.workspace_bytes == 9 and layer.activation == "swiglu"
    layer.row_capacity = 7
    assert layer.options == Options(save="paper", workspace_bytes=9, row_capacity=7)
    with pytest.raises(ValueError, match="combine: expected one of 'gather', 'fused', got 'atomics'"):
        layer.combine = "atomics"
    assert layer.combine == "gather"


def test_an_unknown_keyword_is_refused_with_the_nearest(make_case):
    case = make_case()
    with pytest.raises(TypeError, match="workspace: unknown keyword of moe_mlp; did you mean 'workspace_bytes'"):
        case.forward(workspace=3)
    with pytest.raises(TypeError, match="down_factor: unknown keyword of moe_mlp; did you mean 'down_factors'"):
        case.forward(down_factor=None)


def test_one_object_of_which_keywords_change_a_part(make_case):
    case = make_case(activation="relu")
    del case.options["activation"]
    expected = case.forward(activation="relu")
    assert (case.forward(options=Options("relu")) == expected).all()
    assert (case.forward(options=Options("relu2", save="paper"), activation="relu") == expected).all()
