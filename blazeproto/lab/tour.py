"""The first minute: ``python -m blazeproto tour``. A dispatch, a kernel, an edit of its CUDA source, and the race that it brings.

It needs no GPU and writes to a temporary folder alone. The last part needs ptxsim, which is installed apart.
"""

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blazeproto import gemm
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm.compile import CompileError
from blazeproto.lab.edit import EditedSources, line_of
from blazeproto.lab.views import view

CHOSEN, EXPERTS = [[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], 4
PRODUCT, SIZES = "up_forward", {"T": 100, "d": 64, "n": 64, "E": 2, "K": 1}
FILE = "varlen_m.cuh"
BEFORE, AFTER = (f"{name}(ring.full_barrier());" for name in ("cp_async_mbarrier_arrive", "mbarrier_arrive"))
PLACE = re.compile(r"([\w.]+\.cuh?):(\d+)")
WORDS = (
    "1 of 4. Dispatch: five tokens choose two of four experts each. Rows are not copied: lists say where each token is.",
    "2 of 4. The kernel of the up projection gathers rows by these lists. NVRTC compiles it for a Hopper GPU.",
    "3 of 4. An edit, in a copy of the sources: the producer says that a stage is full, and its copies may still be on the way.",
    "4 of 4. ptxsim interprets the edited kernel's PTX, without a GPU, and watches for races.",
)
FOUND = """The first line writes a stage, the second one multiplies it, and nothing orders the two. A GPU may still give the right
result, run after run. With the line as it was:
"""
NEXT = """To go on, in IPython:

    from blazeproto.lab import Workbench
    bench = Workbench("up_forward", T=100, d=64, n=64, E=2, K=1)
    bench.edit("my_kernels")   # change my_kernels/up.cu, then
    bench.check()              # right, or where it is wrong
    bench.timeline()           # what each warp did, and when
    bench.score()              # one number to beat, on a Hopper GPU"""


class Screen(NamedTuple):
    """How a tour speaks. show: a view.  say: a text.  waiting: on a terminal, while something takes long, of a text."""

    show: Callable[[Any], None]
    say: Callable[[str], None]
    waiting: Callable[[str], AbstractContextManager[Any]]


def tour(screen: Screen) -> None:
    """All parts, in order. It says how to install a compiler or ptxsim that is missing, and goes on."""
    begin = time.perf_counter()
    screen.say(f"{WORDS[0]}\n")
    screen.show(view(build_dispatch(np.array(CHOSEN, np.int32), EXPERTS)))
    screen.say(f"\n{WORDS[1]}\n")
    try:
        with screen.waiting("compiling up.cu, some seconds"):
            kernel = gemm.kernel_for(PRODUCT).compile()
        screen.show(view(kernel))
    except CompileError as error:
        screen.say(f"It can't be compiled here. {error}")
    with tempfile.TemporaryDirectory() as folder:
        sources = EditedSources.copied(Path(folder) / "cuda")
        path = sources.folder / FILE
        text = path.read_text()
        path.write_text(text.replace(BEFORE, AFTER))
        screen.say(f"\n{WORDS[2]}\n\n{sources.diff()}\n{WORDS[3]}\n")
        try:
            _check(screen, sources.folder)
            path.write_text(text)
            screen.say(FOUND)
            _check(screen, sources.folder)
        except (CompileError, ImportError) as error:
            screen.say(f"This can't run here. {error}")
    screen.say(f"\n{time.perf_counter() - begin:.0f} seconds. {NEXT}")


def _check(screen: Screen, folder: Path) -> None:
    """Says what a check of the sources in a folder finds: of each race the lines, as they are there."""
    from blazeproto.lab.workbench import Workbench

    bench = Workbench(PRODUCT, **SIZES, device="cpu").reopen(folder)  # type: ignore[arg-type]
    with screen.waiting("compiling it"):
        bench.kernel.compile()
    verdict = bench.check()
    screen.say(verdict.summary)
    for line in "\n".join((*verdict.errors, *verdict.races)).splitlines():
        screen.say(line)
        if place := PLACE.search(line):
            screen.say(f"    {place[2]:>4} | {line_of(folder / place[1], int(place[2]))}")
    screen.say("")
