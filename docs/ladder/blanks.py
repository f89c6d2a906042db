"""The exercises of the ladder, one a rung: a text to write in the place of a part of a kernel.

>>> from blanks import BLANKS, fill
>>> print(BLANKS["tails"])
>>> fill("tails", my_text)
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from rungs import RUNGS

from blazeproto.lab.verdict import Verdict


@dataclass(frozen=True)
class Blank:
    """rung: its name.  task: the exercise.  region: the text of the source that a solution replaces.
    sizes: of the check.  given: further changes, which come first.
    """

    rung: str
    task: str
    region: str
    sizes: tuple[int, ...]
    given: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{textwrap.fill(self.task, 100)}\n\nYour text replaces:\n\n{self.region}"


BLANKS = {
    "tails": Blank(
        "tiles",
        "Let k be any multiple of 8. A chunk of 8 numbers past the end of a row must count as zeros, and must not be read.",
        "        const uint4 of_a = load(a + k);\n        const uint4 of_b = load(b + k);\n",
        (64, 64, 40),
    ),
    "operands": Blank(
        "tensor_cores",
        "B's ldmatrix now names rows and chunks as A's does: lanes 0 to 7 name columns 0 to 7 of the first 8 k, lanes 8 to 15 "
        "columns 8 to 15 of the first 8 k, lanes 16 to 31 the same of the second 8 k. Give mma.sync the right registers.",
        "                mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);\n",
        (128, 128, 64),
        {
            "column + 16 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2":
            "column + 16 * j + lane % 16, 2 * step + lane / 16",
        },
    ),
    "groups": Blank(
        "ring",
        "Commit no empty groups in the loop. The wait then has to change: in the last steps fewer groups are under way. "
        "k is any multiple of 64.",
        "        cp_async_wait_group<STAGES - 2>();    // this thread's copies of this step have landed,\n"
        "        __syncthreads();                      // and all threads' copies; and all warps have multiplied step - 1\n"
        "        if (ahead < steps) copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);\n"
        "        cp_async_commit_group();\n",
        (128, 128, 256),
    ),
    "refill": Blank(
        "tma",
        "Thread 0 waits for the slowest warp of the step before. Fill a stage two steps after its products instead, so that "
        "this wait is rarely one.",
        "        if (threadIdx.x == 0 && step > 0 && step + STAGES - 1 < steps) load(p, tile, step + STAGES - 1);\n",
        (128, 256, 448),
    ),
    "in_flight": Blank(
        "specialised",
        "Keep the products of three stages under way instead of two: wait until two groups are left, and give back the stage "
        "before the last one. Every stage of every tile has to be given back once. k is any multiple of 64.",
        "            wgmma_wait_group<1>();  // this stage's products go on; those of the stage before are done\n"
        "            mbarrier_arrive_if(leads && k > 0, empty_at(passed - 1));\n"
        "        }\n"
        "        wgmma_wait_group<0>();\n"
        "        pin_registers(acc);\n"
        "        mbarrier_arrive_if(leads, empty_at(passed - 1));\n",
        (256, 768, 448),
    ),
    "width": Blank(
        "grouped",
        "Let d be any multiple of 8. TMA fills the columns past the end of W with zeros. The chunks of x past the end of a row "
        "must be zeros too, and must not be read: after the last row there is nothing.",
        "                cp_async_16(to + i * PASS_ROWS * SWIZZLE_ROW, rows[i] + k, row + i * PASS_ROWS < tile.row_end);\n",
        (60, 136, 64, 2, 1),
    ),
}  # fmt: skip


def fill(name: str, text: str) -> Verdict:
    """The verdict of a solution, on the machine. CompileError where it does not compile."""
    blank = BLANKS[name]
    text = text.strip("\n") + "\n"
    return RUNGS[blank.rung].edited({**blank.given, blank.region: text}).check(*blank.sizes)
