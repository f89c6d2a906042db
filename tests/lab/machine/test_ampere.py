"""The kernels of GPUs from compute capability 8.0 on, on the machine: products of awkward shapes, and faults planted into their
sources. test_products.py has every product with every option, in the full set."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import stored
from blazeproto.activations import activation_named
from blazeproto.gemm import down_backward, linear, up
from blazeproto.gemm.product import Build, alone
from blazeproto.gemm.stored import packed
from blazeproto.lab import oracle
from blazeproto.lab.edit import EditedSources
from blazeproto.lab.target import Machine, hosted, launch
from blazeproto.runtime.arch import AMPERE, kernels_of
from blazeproto.runtime.arrays import view
from blazeproto.stored import StoredWeight
from ptxsim import MachineError
from tests.lab.machine.trials import Logits, ampere_tiles, of_reports, with_tiles
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


# --- Frozen weights --------------------------------------------------------------------------------------------------------

READING = {  # a frozen weight: entry, columns of a tile, macros, columns of the output
    "up": ("up_forward", 128, macros(GATHER=1, HAS_BIAS=1, LOW_RANK=5, STORED=1), None),
    "alternating": ("up_forward", 256, macros("alternating(clamped_swiglu)", GATHER=1, HAS_BIAS=1, STORED=1), None),
    "down": ("linear", 128, macros(GATHER=0, HAS_BIAS=1, STORED=1), range(32, 136)),
    "dX": ("linear", 128, macros(GATHER=0, B_MN=1, LOW_RANK=1, STORED=1), range(32, 160)),
    "dH": ("down_backward", 256, macros(B_MN=1, LOW_RANK=1, STORED=1), None),
}
FEW = {  # read by kernels for few rows
    "few, up": READING["up"],
    "few, alternating": READING["alternating"],
    "few, no gate": ("up_forward", 128, macros("relu2", GATHER=1, STORED=1), None),
    "few, down": READING["down"],
}
READING |= FEW
WEIGHTS = ("up_proj", "down_proj", "weights")


def frozen(format: str, shape: torch.Size, block: tuple[int, int] | None) -> StoredWeight:
    """Scales differ from block to block, and are NaN for experts without rows. int4 has zero points."""
    generator = torch.Generator().manual_seed(2)
    powers = torch.randint(-3, 3, (*shape[:2], shape[2] // 32), generator=generator)
    numbers = torch.randn(shape, generator=generator) * (2.0**powers).repeat_interleave(32, 2)
    made = stored.quantize(numbers, format.removesuffix(" e8m0"), block)
    if format.endswith("e8m0"):
        made = stored.fp8(made.values, made.scales.to(torch.float8_e8m0fnu), block=made.block)
    if format == "int4":
        points = torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8, made.scales.shape[2]), generator=generator)
        made = stored.int4(made.values.view(torch.int32), made.scales, points.int(), group=made.block[1])
    made.scales.view(torch.uint8)[1::2] = 0xFF
    return made


def outputs_of(which: str, format: str, block: Any, patch: pytest.MonkeyPatch, *, decoded: bool) -> list[Tensor]:
    """AssertionError for a race."""
    entry, width, of, columns = READING[which]
    tiles = ampere_tiles(width)
    trial: Any = with_tiles(
        entry, replace(tiles, stages=8) if which in FEW else tiles, of
    )  # a reduction of several pieces
    trial.config = tiles
    trial.options |= {"columns": columns}
    inputs, machine = trial.inputs(), Machine()
    outputs = {name: memory.values for name, memory in trial.outputs().items()}
    outputs |= {"out": outputs["out"][:, : len(columns)].contiguous()} if columns else {}
    (name,) = inputs.keys() & {*WEIGHTS}
    weight = frozen(format, inputs[name].shape, block)
    inputs[name] = weight.decode()

    def as_stored(real: Any, *args: Any, **given: Any) -> None:
        tensors = [None if t is None else view(hosted(t.view(torch.uint8))) for t in weight.tensors]
        of = packed(weight, few=which in FEW)._replace(values=tensors[0], scales=tensors[1], zeros=tensors[2])
        real(*(*args[:1], of, *args[2:]) if args else (), **given if args else given | {name: of})

    with patch.context() as patched:
        for module in () if decoded else (up, linear, down_backward):
            patched.setattr(module, "launch", partial(as_stored, module.launch))
        launch(machine, trial.function, **trial.arguments(trial.function, inputs, **outputs))
    assert not of_reports(machine.reports)
    return [out[: len(trial.case.row_pair)] for out in outputs.values()]


HOW = (("mxfp4", None), ("int4", (1, 32)), ("nf4", (1, 32)), ("fp8", (8, 32)))  # formats and their blocks
CASES = [(which, *how) for which in READING for how in HOW]
CASES += [(which, "fp8 e8m0", (8, 32)) for which in ("down", "few, down")]
SOON = {("up", "mxfp4"), ("dX", "mxfp4"), ("dX", "int4"), ("down", "nf4"), ("up", "fp8")}
SOON |= {("few, up", "mxfp4"), ("few, down", "nf4"), ("few, down", "int4"), ("few, down", "fp8 e8m0")}


@pytest.mark.parametrize(
    ("which", "format", "block"),
    [case if case[:2] in SOON else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_frozen_weights_give_the_bits_of_decoded_ones(which, format, block, monkeypatch) -> None:
    made, expected = (outputs_of(which, format, block, monkeypatch, decoded=decoded) for decoded in (False, True))
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


FAULTS_OF_DECODING = {  # file, text, what takes its place, product, format, what the machine says; "": other bits
    "the scale of another block": (
        "stored.cuh",
        "number / BLOCK_COLUMNS,",
        "number / BLOCK_COLUMNS / 2,",
        "down",
        "mxfp4",
        "",
    ),
    "halves of a byte swapped": ("mxfp4.cuh", "Codebook<true, false>", "Codebook<true, true>", "down", "mxfp4", ""),
    "a tail not zeroed": (
        "ampere/rows.cuh",
        "column < p.columns && reduced < p.reduction",
        "column < p.columns",
        "dX",
        "mxfp4",
        "",
    ),
    "a run in the wrong half": (
        "ampere/rows.cuh",
        "threadIdx.x % 2 * (RUN / CHUNK), run",
        "0, run",
        "down",
        "mxfp4",
        "race",
    ),
    "a slot too early": (
        "ampere/mainloop.cuh",
        "copier.finish(before(slot));",
        "copier.finish(slot);",
        "down",
        "mxfp4",
        "race",
    ),
    "lanes' bytes in another order": (
        "ampere/few_rows.cu",
        "BITS == 4 ? 0x7531 : 0x7632",
        "BITS == 4 ? 0x7351 : 0x7632",
        "few, down",
        "mxfp4",
        "",
    ),
    "a neighbour's scale": ("ampere/few_rows.cu", "owner = group * ", "owner = group ^ 1 * ", "few, down", "mxfp4", ""),
    "a piece multiplied before it has landed": (
        "ampere/few_rows.cu",
        "cp_async_wait_group<0>();",
        "cp_async_wait_group<1>();",
        "few, down",
        "mxfp4",
        "race",
    ),
    "tokens past the reduction": (
        "ampere/few_rows.cu",
        "i * PANEL < row_left",
        "row_left > 0",
        "few, down",
        "mxfp4",
        "",
    ),
    "another row's zero point": ("stored.cuh", "row % 8 * 4", "row % 4 * 4", "dX", "int4", ""),
}


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=pytest.mark.full) if name[0] == "a" else name for name in FAULTS_OF_DECODING]
)
def test_a_fault_in_decoding_is_found(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, product, format, says = FAULTS_OF_DECODING[which]
    sources = EditedSources.copied(tmp_path / "sources")
    plant(sources.folder, [(file, old, new)])
    run = partial(outputs_of, product, format, None, monkeypatch)
    with alone({"down_forward" if product.endswith("down") else "up_backward_act": Build((), sources.snapshot())}):
        try:
            found = str(torch.equal(run(decoded=False)[0], run(decoded=True)[0]))
        except (AssertionError, MachineError) as error:
            found = str(error)
    assert re.search(says or "False", found)
