"""The marks of timeline.cuh: their kinds, and the source lines and the instruction of each, read off the kernel's PTX.

A mark stores a constant, its edge and kind. PTX has that constant, and the chain of lines by which the mark was inlined. A
span has the instructions between its begin and its end. So a GPU's timeline and one in steps have the same table.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from blazeproto.lab.edit import line_of
from blazeproto.lab.target import Program, PtxError

# timeline.cuh has the same.
EDGES = {1: "begin", 2: "end", 3: "at"}
TILE = "tile"
WHATS = (
    "",  # no record
    TILE,
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

Chain = tuple[tuple[str, int], ...]  # of places in files, innermost first; a compiler may leave out the last ones
CODE = re.compile(r"mov\.\w+\s+(%r\d+), (\d+)$")
MARK = re.compile(r"@records st\.global\.v2\.u32 \[at\], \{now, (%r\d+)\}")
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
"""Instructions that tell what a span is about: the first of these that it has."""


class Marked(NamedTuple):
    """A begin and its end. file, first, last: of the marks' lines.  outer: where these were inlined."""

    file: str
    first: int
    last: int
    outer: Chain

    def holds(self, chain: Chain) -> bool:
        """Whether something that was inlined by this chain lies in it."""
        return any(
            file == self.file and self.first < line < self.last and _agree(chain[place + 1 :], self.outer)
            for place, (file, line) in enumerate(chain)
        )


def _agree(one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def marked(ptx: str, entry: str) -> dict[tuple[str, str], str]:
    """By role and kind: the first source lines of spans and an instruction of theirs. The role is the one whose marks are around
    them in the text, as the compiler leaves it; "" for the roles' own spans.

    ptx: of a kernel that was compiled with the marks. {} for one with instructions that the machine does not know.
    """
    try:
        listed = Program.read(ptx).entry(entry).instructions
    except PtxError:
        return {}
    codes, marks = dict[str, int](), list[tuple[str, str, Chain]]()
    for one in listed:
        if made := CODE.match(one.text):
            codes[made[1]] = int(made[2])
        elif (stored := MARK.search(one.text)) and stored[1] in codes:
            edge, kind = divmod(codes[stored[1]], 256)
            marks.append((EDGES[edge], WHATS[kind], one.line.places[1:]))
    ends = [(what, chain) for edge, what, chain in marks if edge == "end"]
    roles, found = [""], dict[tuple[str, str], dict[str, None]]()
    for place, what, ((file, first), *outer) in marks:
        if place == "begin":
            same = (at[1] for kind, (at, *rest) in ends if (kind, at[0]) == (what, file) and _agree(rest, outer))
            last = min((line for line in same if line > first), default=first)
            span = Marked(file, first, last, tuple(outer))
            inside = [one.opcode for one in listed if what not in ROLES and span.holds(one.line.places)]
            source = f"{Path(file).name}:{first + 1}  {line_of(Path(file), first + 1)}"
            telling = [code for word in TELLING for code in inside if code.startswith(word)][:1]
            found.setdefault(("" if what in ROLES else roles[-1], what), {}).update(dict.fromkeys([source, *telling]))
        if what in ROLES:
            roles = [*roles, what] if place == "begin" else [role for role in roles if role != what]
    return {key: "\n".join(lines) for key, lines in found.items()}
