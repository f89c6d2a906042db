"""The kernels of GPUs from compute capability 8.0 on, on the machine: products of awkward shapes, and faults planted into their
sources. test_products.py has every product with every option, in the full set."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.activations import activation_named
from blazeproto.gemm.product import Build, alone
from blazeproto.lab import oracle
from blazeproto.lab.edit import EditedSources
from blazeproto.lab.target import Machine
from blazeproto.runtime.arch import AMPERE, kernels_of
from ptxsim import MachineError
from tests.lab.machine.trials import Logits, ampere_tiles, with_tiles
from tests.lab.planted_bugs import plant


@pytest.fixture(autouse=True)
def of_ampere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Formulas multiply expert by expert: a CPU is slow at a matrix for each row."""
    monkeypatch.setattr(oracle, "BY_ROW_BYTES", 0)
    with kernels_of("ampere"):
        yield


def macros(activation: str = "swiglu", **others: int) -> dict[str, Any]:
    return activation_named(activation).macros | {"B_MN": 0, "HAS_BIAS": 0, "LOW_RANK": 0} | others


PRODUCTS = {  # entry, columns of a tile, macros
    "up": ("up_forward", 128, macros(GATHER=1)),
    "up of alternating rows, transposed, biases, low rank": (
        "up_forward",
        128,
        macros("alternating(clamped_swiglu)", B_MN=1, HAS_BIAS=1, LOW_RANK=1),
    ),
    "down": ("linear", 128, macros(GATHER=0)),
    "gathered, transposed, bias, low rank": ("linear", 128, macros(GATHER=1, B_MN=1, HAS_BIAS=1, LOW_RANK=1)),
    "down backward of no gate": ("down_backward", 256, macros("relu", B_MN=1)),
    "down's weights": ("weight_gradient", 128, {"GATHER": 1, "TRANSPOSED": 0, "OUT_F32": 0}),
    "up's weights": ("weight_gradient", 128, {"GATHER": 1, "TRANSPOSED": 1, "OUT_F32": 1}),
}


QUICK = (
    "up",
    "gathered, transposed, bias, low rank",
    "down backward of no gate",
    "up's weights",
    "a tail that is not zeroed",
)


def quick_or_full(names: Iterable[str]) -> list[Any]:
    """The slower ones are of the full set."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("which", quick_or_full(PRODUCTS))
def test_a_product_is_right(which: str) -> None:
    entry, width, of = PRODUCTS[which]
    machine = Machine()
    assert not with_tiles(entry, ampere_tiles(width), of).run(machine) and machine.reports[0].entry == entry


def test_logits_are_right() -> None:
    assert not Logits(128, 2, AMPERE).run(Machine())


# --- Faults ----------------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """An edit of the file, what replaces its text, the entry that has it, and what is said: a race's two source lines each have
    one of these texts, or a line says the one."""

    file: str
    old: str
    new: str
    says: str
    entry: str = "linear"
    macros: dict[str, Any] = PRODUCTS["down"][2]


RACE = r"race in byte \d+ of shared memory"
FAULTS = {
    "a missing commit": Fault(
        "mainloop.cuh",
        "            }\n        }\n        cp_async_commit_group();\n",
        "            }\n        }\n",
        RACE,
    ),
    "a wait for one group too few": Fault(
        "mainloop.cuh",
        "                    cp_async_wait_group<STAGES - 2>();",
        "                    cp_async_wait_group<STAGES - 1>();",
        RACE,
    ),
    "a stage overwritten": Fault(
        "mainloop.cuh",
        "if (k + 1 < steps) copier.copy(slot);",
        "if (k + 1 < steps) copier.copy(next);",
        RACE,
    ),
    "a wrong address of ldmatrix": Fault(
        "mainloop.cuh", "row + lane % 16, lane / 16)", "row + lane % 16, 0)", "beyond"
    ),
    "a tail that is not zeroed": Fault(
        "columns.cuh",
        "column < width && first + at < end",
        "column < width",
        "beyond",
        "weight_gradient",
        {"GATHER": 0, "TRANSPOSED": 0, "OUT_F32": 0},
    ),
}
NAMES = {"linear": "down_forward", "weight_gradient": "down_backward_weight"}


@pytest.mark.parametrize("which", quick_or_full(FAULTS))
def test_a_planted_fault_is_found(which: str, tmp_path: Path) -> None:
    fault = FAULTS[which]
    sources = EditedSources.copied(tmp_path / "sources")
    plant(sources.folder, [(f"ampere/{fault.file}", fault.old, fault.new)])
    trial = with_tiles(fault.entry, ampere_tiles(128), fault.macros)
    with alone({NAMES[fault.entry]: Build((), sources.snapshot())}):
        try:
            found = trial.run(Machine())
        except MachineError as error:
            found = [str(error)]
    assert any(re.search(fault.says, line) for line in found), found
