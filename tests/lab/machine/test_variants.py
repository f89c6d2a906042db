"""Each product on the machine with what a layer may ask of it: biases, a clamp whose limits the data reach, no gate, weights that
lie transposed, low-rank factors, rows that lie in order. The experts have 1, 127, 128, 129 rows and none."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.gemm.arguments import LOW
from blazeproto.gemm.linear import GROUPED_MM, grouped_mm
from blazeproto.lab import oracle
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import dispatch_fixed, make_case
from blazeproto.lab.target import Machine
from tests.lab.machine.trials import Trial

COUNTS = (1, 127, 0, 129, 128)  # an expert's rows; a tile has 128
TOKENS = 256


@pytest.fixture(autouse=True)
def few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas multiply expert by expert: a CPU is slow at a matrix for each row."""
    monkeypatch.setattr(oracle, "BY_ROW_BYTES", 0)


def case_of(activation: str) -> Case:
    """Two distinct experts a token, or one and one that is elsewhere."""
    ids = torch.full((TOKENS, 2), -1)
    ids[:129, 0], ids[:128, 1] = 3, 4
    ids[129:, 0], ids[128, 1] = 1, 0
    ids = torch.where(torch.rand(TOKENS, 1) < 0.5, ids, ids.flip(1))[torch.randperm(TOKENS)]
    made = make_case(Sizes(TOKENS, 72, 40, len(COUNTS), 2), activation=activation, device="cpu")
    return replace(made, dispatch=dispatch_fixed(ids, len(COUNTS)))


@dataclass
class Reaching(Trial):
    """reach: the size of H, or of what makes it, as a standard deviation."""

    reach: float = 1.0

    def inputs(self) -> dict[str, Tensor]:
        made = super().inputs()
        return {name: values * self.reach if name in ("x", "h", "bias") else values for name, values in made.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "limited_swiglu": {"reach": 8.0, "transposed": True, "rank": 8},  # a limit of 10: 2 in 10 are beyond it
    "alternating(clamped_swiglu)": {"reach": 6.0, "transposed": True, "rank": 0},  # of 7
    "gelu": {"reach": 1.0, "transposed": False, "rank": 8},  # no gate
}
BY_ACTIVATION = ("up_forward", "down_backward_act")
BY_WEIGHTS = ("down_forward", "down_forward_fused", "up_backward_act", "up_backward_act_fused")


def trial_of(name: str, activation: str) -> Reaching:
    spec, how = PRODUCTS[name].spec, VARIANTS[activation]
    options = {"activation": activation, "transposed": how["transposed"], "gather": True}
    rank = how["rank"] if any(array.name in LOW for array in spec.inputs) else 0
    optional = ("bias", "scores")
    return Reaching(PRODUCTS[name].run, spec, case_of(activation), options, rank, optional, reach=how["reach"])


def of_names(*names: str, activations: tuple[str, ...] = tuple(VARIANTS)) -> list[tuple[str, str]]:
    return [(name, activation) for name in names for activation in activations]


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *of_names(*BY_ACTIVATION),
        *of_names(*BY_WEIGHTS, activations=("limited_swiglu", "gelu")),
        *((name, "gelu") for name in PRODUCTS if name not in (*BY_ACTIVATION, *BY_WEIGHTS)),
    ],
)
def test_a_product_is_right(name: str, activation: str) -> None:
    """By a schedule of its own each."""
    machine = Machine(2, seed=len(name) + len(activation))
    assert not trial_of(name, activation).run(machine)


@pytest.mark.parametrize(("name", "f32"), [("down_backward_weight", False), ("up_backward_weight", True)])
def test_weight_gradients_of_rows_in_order_are_right(name: str, f32: bool) -> None:
    product = PRODUCTS[name]
    assert not Trial(product.run, product.spec, case_of("relu"), {"gather": False}, f32=f32).run(Machine(2))


def test_a_product_of_tokens_is_right() -> None:
    """With nothing after it but a store: of gathered rows, with biases and low-rank factors."""
    options, widths = {"transposed": True, "gather": True}, {"width": 72, "reduction": 40}
    trial = Trial(grouped_mm, GROUPED_MM, case_of("relu"), options, 8, ("bias",), widths=widths)
    assert not trial.run(Machine(2))
