"""The marks of timeline.cuh: their kinds, and the source lines and the instruction of each, read off the kernel's PTX.

A mark stores a constant, its edge and kind. PTX has that constant and the mark's line. A span's instructions are
of the lines from its begin to its end. So a GPU's timeline and one in steps have the same table.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from blazeproto.lab.edit import line_of
from blazeproto.lab.target import Program, PtxError

# timeline.cuh has the same.
EDGES = {1: "begin", 2: "end", 3: "at"}
WHATS = (
    "",  # no record
    "tile",
    "producer",
    "consumer",
    "epilogue",
    "schedule",
    "wait full",
    "wait empty",
    "TMA",
    "copy",
    "mma",
    "hand-over",
    "store",
)
ROLES = ("producer", "consumer", "epilogue")

TELLING = (
    *(
        "wgmma.mma",
        "cp.async.bulk.tensor",
        "cp.async.cg",
        "red",
        "stmatrix",
        "st.global",
        "st.shared",
        "mbarrier.try_wait",
    ),
    *("bar.sync", "cp.async.bulk", "ld.global"),
)
"""Instructions by which a span is known: the first of these that it has."""


def marked(ptx: str, entry: str) -> dict[tuple[str, str], str]:
    """By role and kind: the first source lines of spans and an instruction of theirs. The role is the one whose marks are around
    them in the text, as the compiler leaves it.

    ptx: of a kernel that was compiled with the marks. {} for one with instructions that the machine does not know.
    """
    listed: list[Any] = []
    with suppress(PtxError):
        listed = Program.read(ptx).entry(entry).instructions
    codes = {made[1]: int(made[2]) for one in listed if (made := re.match(r"mov\.\w+\s+(%r\d+), (\d+)$", one.text))}
    marks = [
        (EDGES[code >> 8], WHATS[code & 0xFF], *one.line.places[1])
        for one in listed
        if (made := re.match(r"@records st\.global\.v2\.u32 .*(%r\d+)\}", one.text)) and (code := codes.get(made[1]))
    ]
    roles, found = [""], dict[tuple[str, str], dict[str, None]]()
    for edge, what, file, first in marks:
        if what in ROLES:
            roles = [*roles, what] if edge == "begin" else [role for role in roles if role != what]
        if edge == "begin":
            ends = [mark[3] for mark in marks if mark[:3] == ("end", what, file) and mark[3] > first]
            inside = range(first + 1, min(ends, default=first))
            own = [one.opcode for one in listed if any(at == file and line in inside for at, line in one.line.places)]
            telling = [opcode for word in TELLING for opcode in own if opcode.startswith(word)]
            lines = [f"{Path(file).name}:{first + 1}  {line_of(Path(file), first + 1)}", *telling[: what not in ROLES]]
            found[roles[-1], what] = found.get((roles[-1], what), {}) | dict.fromkeys(lines)
    return {key: "\n".join(lines) for key, lines in found.items()}
