"""The first minute: ``python -m blazeproto tour``. A dispatch, a kernel, an edit of its CUDA source, and the race that it brings.

It needs no GPU and writes to a temporary folder alone. The last part needs ptxsim, which is installed apart.
"""

import re
import tempfile
from typing import Any

import numpy as np

from blazeproto import gemm
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm.compile import CompileError
from blazeproto.lab.edit import EditedSources, line_of
from blazeproto.lab.views import view

TEXTS = (
    """1 of 4. Dispatch: five tokens choose two of four experts each. Rows are not copied: lists say where each token is.
""",
    """
2 of 4. The kernel of the up projection gathers rows by these lists. NVRTC compiles it for a Hopper GPU.
""",
    """
3 of 4. An edit, in a copy of the sources: the producer says that a stage is full, and its copies may still be on the way.

{diff}
4 of 4. ptxsim interprets the edited kernel's PTX, without a GPU, and watches for races.
""",
    """
The first line writes a stage, the second one multiplies it, and nothing orders the two. A GPU may still give the right
result, run after run. With the line as it was:
""",
    """
To go on, in IPython:

    from blazeproto.lab import Workbench
    bench = Workbench("up_forward", T=100, d=64, n=64, E=2, K=1)
    bench.edit("my_kernels")   # change my_kernels/up.cu, then
    bench.check()              # right, or where it is wrong
    bench.timeline()           # what each warp did, and when
    bench.score()              # one number to beat, on a Hopper GPU

A clone has docs/ladder, six notebooks from the naive kernel to this one, and docs/glossary.md, the words.""",
)


def tour(show: Any, say: Any, waiting: Any) -> None:
    """All parts, in order. It says how to install a compiler or ptxsim that is missing, and goes on.

    show: called with views.  say: with texts.  waiting: a context on a terminal, of a text, while something takes long.
    """
    say(TEXTS[0])
    show(view(build_dispatch(np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32), 4)))
    say(TEXTS[1])
    with tempfile.TemporaryDirectory() as folder:
        sources = EditedSources.copied(f"{folder}/cuda")
        text = (path := sources.folder / "varlen_m.cuh").read_text()
        try:
            with waiting("compiling up.cu, some seconds"):
                kernel = gemm.kernel_for("up_forward").compile()
            show(view(kernel))
            for words, source in zip(
                TEXTS[2:4], (text.replace("cp_async_mbarrier_arrive", "mbarrier_arrive"), text), strict=True
            ):
                path.write_text(source)
                say(words.format(diff=sources.diff()))
                say(checked(sources.folder))
        except (CompileError, ImportError) as error:
            say(f"This can't run here. {error}")
    say(TEXTS[4])


def checked(folder: Any) -> str:
    """The findings of a check of the sources in a folder: of each race the lines, as they are there."""
    from blazeproto.lab.workbench import Workbench

    verdict = Workbench("up_forward", T=100, d=64, n=64, E=2, K=1, device="cpu").reopen(folder).check()
    return re.sub(
        r"(?m)^ *([\w.]+\.cuh?):(\d+).*$",
        lambda at: f"{at[0]}\n    {at[2]:>4} | {line_of(folder / at[1], int(at[2]))}",
        "\n".join((verdict.summary, *verdict.errors, *verdict.races)),
    )
