"""The ring of stages of a launch that is run step by step: what each stage holds, its barriers, and who multiplies it.

>>> stepper = Machine(1).step(lambda: gemm.up_forward(x, up_proj, dispatch))
>>> ring(stepper.until("wgmma.mma_async"))       # a line a stage
>>> ring(stepper.back(100))
"""

from typing import Any

from blazeproto.gemm.tiles import BF16, WARPGROUP
from blazeproto.lab.layouts import WARP
from blazeproto.lab.tables import Table, View
from blazeproto.lab.target import Stepper
from blazeproto.runtime import checks

MADE = "made at mainloop.cuh"  # the ring's barriers; an epilogue's are made elsewhere


def ring(stepper: Stepper, cta: int = 0) -> View:
    """The ring of one CTA as a table, a line a stage.

    stepper: a launch of a product that is made of tiles, as ``Machine().step`` returns it.  cta: its number in the cluster that
    runs. A stage is free, filling or full. A barrier is shown as its phase, and the arrivals and bytes that this phase expects.
    The last columns show the last ``wgmma`` of each warpgroup: the first and the last byte that it reads of the stage.

    TypeError for a launch of another kernel; ValueError for a CTA that does not exist.
    """
    macros = getattr(getattr(stepper, "kernel", None), "defines", {})
    if "STAGES" not in macros:
        raise TypeError(f"stepper: expected a launch of a product made of tiles, got {type(stepper).__name__}")
    checks.integer("cta", cta, least=0)
    count, a, b = int(macros["STAGES"]), *(int(macros[n]) * int(macros["BK"]) * BF16.bytes for n in ("BM", "BN"))
    barriers: list[Any] = [barrier for barrier in stepper.barriers(cta).values() if MADE in barrier.place]
    read: list[list[str]] = [[] for _ in range(count)]
    for group in range(stepper.warps(cta) * WARP // WARPGROUP):
        if operands := [*stepper.reads(group, cta).values()]:
            stage = operands[0].first // (a + b)
            parts = (f"{one.name} {one.first - stage * (a + b)}–{one.last - stage * (a + b)}" for one in operands)
            read[stage].append(f"{group}: {', '.join(parts)}")
    rows = []
    for stage, (full, empty) in enumerate(
        zip(barriers[:count], barriers[count:], strict=True)
    ):  # none before they are made
        begun = full.pending < full.expected or full.bytes > 0
        state = "full" if full.phase > empty.phase else "filling" if begun else "free"
        written = stepper.shared(stage * (a + b), a + b, cta)[1].mean()
        waits = (f"{one.phase}: {one.pending} of {one.expected}, {one.bytes} B" for one in (full, empty))
        rows.append([str(stage), state, f"{written:.0%}", *waits, "; ".join(read[stage]) or "–"])
    columns = [
        "stage",
        "state",
        "written",
        "full barrier",
        "empty barrier",
        "warpgroup: bytes that its last wgmma reads",
    ]
    sizes = f"{a + b} bytes: A from 0, B from {a}"
    note = "A barrier: its phase, the arrivals that the phase still expects, the bytes that are still to come."
    title = f"{stepper.kernel.entry}: ring of {count} stages"
    return View(title, {"a stage": sizes}, [Table(columns, rows, left=[columns[1], *columns[3:]])], note)
