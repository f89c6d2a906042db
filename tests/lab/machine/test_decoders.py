"""Frozen weights on Hopper (cuda/decoders.cuh): some multiprocessors decode, the others multiply from their ring, all at once."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import Sizes, down_backward, linear, up
from blazeproto.gemm.linear import GROUPED_MM, grouped_mm
from blazeproto.gemm.product import Build, alone
from blazeproto.gemm.stored import MOST_PARTS, packed
from blazeproto.gemm.tiles import TileConfig
from blazeproto.lab.edit import EditedSources
from blazeproto.lab.oracle import dispatch_fixed, make_case
from blazeproto.lab.target import Machine, hosted
from blazeproto.runtime.arrays import view
from ptxsim import MachineError
from tests.lab.machine.test_ampere import HOW, WEIGHTS, frozen, macros
from tests.lab.machine.trials import Trial, of_reports, with_tiles
from tests.lab.planted_bugs import plant

NARROW = TileConfig(tile_n=128)


def rows_of(counts: list[int], width: int) -> Trial:
    """A product of so many rows by expert."""
    ids = torch.full((sum(counts), 2), -1)
    ids[:, 0] = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    case = make_case(Sizes(len(ids), 8, 8, len(counts), 2), device="cpu")
    case = replace(case, dispatch=dispatch_fixed(ids, len(counts)))
    widths = {"width": width, "reduction": 96}
    options = {"transposed": False, "gather": False}
    return Trial(grouped_mm, GROUPED_MM, case, options, 0, (), widths=widths, config=NARROW)


of_up, of_rows = partial(with_tiles, "up_forward"), partial(with_tiles, "linear", NARROW)
clamped = macros("alternating(clamped_swiglu)", GATHER=1, HAS_BIAS=1, STORED=1)
deferred = TileConfig(deferred=False)
READING: dict[str, tuple[Any, range | None, int, int]] = {
    # trial, columns of the output, tiles of a part, slots of the ring: one more than an expert has parts
    "up": (partial(of_up, NARROW, macros(GATHER=1, HAS_BIAS=1, LOW_RANK=1, STORED=1)), None, 1, 3),
    "alternating": (partial(of_up, NARROW, clamped), None, 1, 3),
    "tickets": (partial(of_up, TileConfig(few_rows=True, tickets=True), macros(GATHER=1, STORED=1)), None, 1, 3),
    "down": (partial(of_rows, macros(GATHER=0, HAS_BIAS=1, STORED=1)), range(32, 136), 1, 2),
    "all of down": (partial(of_rows, macros(GATHER=0, HAS_BIAS=1, STORED=1)), None, 1, 3),
    "two tiles": (partial(rows_of, [140, 20, 0, 30], 288), None, 2, 3),
    "no rows": (partial(rows_of, [300, 0, 0, 20, 30, 9], 128), None, 1, 2),
    "all of dX": (partial(of_rows, macros(GATHER=0, B_MN=1, STORED=1)), None, 1, 3),
    "dX": (partial(of_rows, macros(GATHER=0, B_MN=1, LOW_RANK=1, STORED=1)), range(32, 160), 1, 2),
    "dH": (partial(with_tiles, "down_backward", deferred, macros(B_MN=1, LOW_RANK=1, STORED=1)), None, 1, 3),
}


def outputs_of(which: str, format: str, block: Any, patch: pytest.MonkeyPatch, *, decoded: bool) -> list[Tensor]:
    """AssertionError for a race."""
    make, columns, tiles, slots = READING[which]
    trial: Any = make()
    if columns:
        trial.options |= {"columns": columns}
    inputs, machine = trial.inputs(), Machine(multiprocessors=4)
    outputs = {name: memory.values for name, memory in trial.outputs().items()}
    outputs |= {"out": outputs["out"][:, : len(columns)].contiguous()} if columns else {}
    (name,) = inputs.keys() & {*WEIGHTS}
    weight = frozen(format, inputs[name].shape, block)
    inputs[name] = weight.decode()
    part = trial.config.tile_n * tiles * weight.shape[1 if which[-2:] in ("dX", "dH") else 2]  # by the reduction
    given = {name: hosted(value) for name, value in trial.arguments(trial.function, inputs, **outputs).items()}

    def as_stored(real: Any, *args: Any, **given: Any) -> None:
        memory = (
            torch.full((slots * part,), torch.nan, dtype=torch.bfloat16),
            torch.zeros(2 * weight.shape[0] * MOST_PARTS, dtype=torch.int32),
        )
        arrays = [
            None if t is None else view(hosted(t))
            for t in (*(t if t is None else t.view(torch.uint8) for t in weight.tensors), *memory)
        ]
        fields: dict[str, Any] = dict(zip(("values", "scales", "zeros", "ring", "progress"), arrays, strict=True))
        of = packed(weight, 2 * slots * part)._replace(**fields)
        real(*(*args[:1], of, *args[2:]) if args else (), **given if args else given | {name: of})

    with patch.context() as patched:
        patched.setattr("blazeproto.gemm.stored.PART_BYTES", 2 * part)
        for module in () if decoded else (up, linear, down_backward):
            patched.setattr(module, "launch", partial(as_stored, module.launch))
        machine.together([lambda: trial.function(**given)])
    assert not of_reports(machine.reports)
    return [out[: len(trial.case.row_pair)] for out in outputs.values()]


CASES = [(which, *how) for which in READING for how in HOW]
SOON = {("up", "mxfp4"), ("dX", "int4"), ("down", "nf4"), ("dH", "fp8"), ("two tiles", "mxfp4"), ("no rows", "mxfp4")}


@pytest.mark.parametrize(
    ("which", "format", "block"),
    [case if case[:2] in SOON else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_a_ring_gives_the_bits_of_decoded_weights(
    which: str, format: str, block: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, expected = (outputs_of(which, format, block, monkeypatch, decoded=decoded) for decoded in (False, True))
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


FAULTS = {  # text of decoders.cuh, what takes its place, product, format, what the machine says; "": other bits
    "a slot is written while it is read": (
        "            wait_for(read + before, tiles_of(before));",
        "",
        "all of down",
        "mxfp4",
        "race",
    ),
    "weights are read before they are there": (
        "wait_for(p.progress + part, p.decoders * (THREADS / 32));",
        "",
        "dX",
        "mxfp4",
        "race",
    ),
    "the next part's slot": (
        "tile.expert = part % p.slots;",
        "tile.expert = (part + 1) % p.slots;",
        "down",
        "mxfp4",
        "",
    ),
    "told before it is stored": ("bulk_wait_group<1>();", "bulk_wait_group<2>();", "all of down", "mxfp4", "race"),
    "who waits does not tell first": (
        "            if (untold >= 0) add_release_gpu(p.progress + untold, 1);\n            untold = -1;\n            wait_for",
        "            wait_for",
        "all of down",
        "mxfp4",
        "nobody|Deadlock|wait",
    ),
    "a part too early": (
        "int before = index - p.slots;",
        "int before = index - p.slots - 1;",
        "all of dX",
        "mxfp4",
        "race",
    ),
    "tiles that a short part does not have": (
        "min(p.part_columns, p.columns - part % p.parts * p.part_columns)",
        "p.part_columns",
        "two tiles",
        "mxfp4",
        "nobody|Deadlock|wait",
    ),
    "experts without rows end the search": (
        "while (before >= 0 && rows_of(before) == 0) before -= p.slots;",
        "if (before >= 0 && rows_of(before) == 0) before = -1;",
        "no rows",
        "mxfp4",
        "race",
    ),
    "another row's zero point": (
        "part.row_of(part.slot_row(first + 32 * i + lane))",
        "lane",
        "dX",
        "int4",
        "",
    ),
}


@pytest.mark.parametrize(
    "which", [name if name[0] == "w" else pytest.param(name, marks=pytest.mark.full) for name in FAULTS]
)
def test_a_fault_of_the_ring_is_found(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, product, format, says = FAULTS[which]
    sources = EditedSources.copied(tmp_path / "sources")
    plant(sources.folder, [("decoders.cuh", old, new)])
    run = partial(outputs_of, product, format, (1, 32), monkeypatch)
    edited = Build((), sources.snapshot())
    with alone(dict.fromkeys(("down_forward", "up_backward_act", "grouped_mm"), edited)):
        try:
            found = str(torch.equal(*(run(decoded=decoded)[0].view(torch.uint8) for decoded in (False, True))))
        except (AssertionError, MachineError) as error:
            found = str(error)
    assert re.search(says or "False", found), found
