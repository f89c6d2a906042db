"""The options of the expert MLP: each is a keyword of every function that takes options, documented, and checked in one place."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from blazeproto import MoE, moe_mlp
from blazeproto.autograd import Dispatcher, Options, SavePolicy, backends, dispatcher, grouped_experts, mlp
from tests.refusals import refuses

TAKERS = {"moe_mlp": moe_mlp, "MoE": MoE, "grouped_experts": grouped_experts}
LEFT_OUT = {"grouped_experts": {"row_capacity", "workspace_bytes", "validate"}}
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
        made = Options.decode(Options().encode())
        assert getattr(made, option.name) == option.default


def test_they_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Options().save = "paper"


def test_operators_are_told_all_but_the_sizes_and_what_a_call_decides():
    options = Options("relu", "paper", "torch", "fused", 3, 4)
    assert Options.decode(options.encode()) == Options("relu", backend="torch", combine="fused")


def test_a_layer_has_each_as_an_attribute_that_is_checked():
    layer = MoE(16, 24, 4, 2, save="paper", workspace_bytes=9)
    assert layer.save is SavePolicy.PAPER and layer.workspace_bytes == 9 and layer.activation == "swiglu"
    layer.row_capacity = 7
    assert layer.options == Options(save="paper", workspace_bytes=9, row_capacity=7)
    refuses(lambda: setattr(layer, "combine", "atomics"), "combine")
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


@pytest.mark.parametrize(
    ("module", "name", "new", "thing"),
    [
        (dispatcher, "dispatched_mlp", "autograd.mlp.dispatched_mlp now", mlp.dispatched_mlp),
        (dispatcher, "Dispatcher", "autograd.ranks.Dispatcher now", Dispatcher),
        (backends, "HOPPER_CAPABILITY", "runtime.arch.HOPPER.least", (9, 0)),
    ],
    ids=["dispatched_mlp", "Dispatcher", "HOPPER_CAPABILITY"],
)
def test_an_old_name_warns_and_says_the_new_one(module, name: str, new: str, thing: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module.__name__}.{name} is blazeproto.{new}"):
        assert getattr(module, name) == thing
