"""Twelve bugs for copies of the CUDA sources: four each in epilogue, gather and schedule. None hangs, none writes outside of the
memory that a launch is given. Each is found at SHAPE by `Workbench.check`, which names the experts and tiles that are told here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SHAPE = {"T": 1200, "d": 320, "n": 192, "E": 4, "K": 2}
"""Some 600 rows an expert: four row tiles and a part of one. Two column tiles of each row product, the second one narrower."""
WRONG_PAIR = 777


class Bug(NamedTuple):
    """edits: (file, text, what replaces it), each text standing once in its file.

    outputs: those that are wrong.  experts: that are named; None: any.  row_tiles, column_tiles: that are named for each of
    these experts, None where all are, "last" and "of the pair" as they say, "any" where chance decides.
    """

    name: str
    kind: str
    product: str
    edits: tuple[tuple[str, str, str], ...]
    outputs: tuple[str, ...]
    experts: tuple[int, ...] | None = None
    row_tiles: tuple[int, ...] | str | None = None
    column_tiles: tuple[int, ...] | str | None = None


BUGS = (
    Bug(
        "one 16-byte chunk of act: gate and up exchanged",
        "epilogue",
        "up_forward",
        (
            (
                "up.cu",
                "else if (plane < PLANES / HALVES) store(p.out1_rows + column_zero + own, activate(h[plane], h[HALVES - 1]));",
                """else if (plane < PLANES / HALVES) {
                const bool here = tile.expert == 2 && row == p.offsets[2] + BM && pass == 3 && first_row == 5;
                store(p.out1_rows + column_zero + own, here && own_column == 64 ? activate(h[HALVES - 1], h[plane])
                                                                                : activate(h[plane], h[HALVES - 1]));
            }""",
            ),
        ),
        ("act",),
        (2,),
        (1,),
        (0,),
    ),
    Bug(
        "half of the columns of one expert 5 % too large",
        "epilogue",
        "down_forward",
        (
            (
                "linear.cu",
                "out[i] = pack_biased(acc[2 * i], acc[2 * i + 1], bias);",
                "out[i] = pack_biased(acc[2 * i] * (tile.expert == 1 && tile.column ? 1.05f : 1.0f), acc[2 * i + 1], bias);",
            ),
        ),
        ("y",),
        (1,),
        None,
        (1,),
    ),
    Bug(
        "an expert's last row is not stored",
        "epilogue",
        "down_forward",
        (
            (
                "epilogue.cuh",
                "const int there = min(SLAB, row_end - row);\n    tma_store_4d(",
                "const int there = min(SLAB, row_end - 1 - row);\n    tma_store_4d(",
            ),
        ),
        ("y",),
        (0, 1, 2, 3),
        "last",
        None,
    ),
    Bug(
        "dS of one expert lacks half of the lanes",
        "epilogue",
        "down_backward_act",
        (
            (
                "down_backward.cuh",
                "d_score[h] += __shfl_xor_sync(~0u, d_score[h], 2);",
                """const float other = __shfl_xor_sync(~0u, d_score[h], 2);
            if (tile.expert != 3) d_score[h] += other;""",
            ),
        ),
        ("d_scores",),
        (3,),
        None,
        None,
    ),
    Bug(
        "a stage is said to be full before the rows are copied: a race",
        "gather",
        "up_forward",
        (
            (
                "varlen_m.cuh",
                "                const int width_left = p.reduction - k - column;\n",
                """                mbarrier_arrive(ring.full_barrier());
                maybe_delay();
                const int width_left = p.reduction - k - column;
""",
            ),
            (
                "varlen_m.cuh",
                "                cp_async_mbarrier_arrive(ring.full_barrier());\n",
                "",
            ),
        ),
        ("h", "act"),
        None,
        "any",
        "any",
    ),
    Bug(
        "neighbouring rows exchanged",
        "gather",
        "up_forward",
        (
            (
                "gather.cuh",
                "thread / 32 * WARP_ROWS + lane % WARP_ROWS;",
                "thread / 32 * WARP_ROWS + (lane ^ 1) % WARP_ROWS;",
            ),
        ),
        ("h", "act"),
        (0, 1, 2, 3),
        None,
        None,
    ),
    Bug(
        "one pair has another token",
        "gather",
        "up_forward",
        (
            (
                "params.cuh",
                ": int(uint64_t(pair) * multiplier >> shift);",
                f": pair == {WRONG_PAIR} ? 0 : int(uint64_t(pair) * multiplier >> shift);",
            ),
        ),
        ("h", "act"),
        None,
        "of the pair",
        None,
    ),
    Bug(
        "the rows of one expert are fetched twice",
        "gather",
        "down_backward_weight",
        (
            (
                "weight.cu",
                "load_pair(p.pairs, ahead, tile.row_end)",
                "load_pair(p.pairs, tile.expert == 2 ? row : ahead, tile.row_end)",
            ),
        ),
        ("d_down",),
        (2,),
        None,
        None,
    ),
    Bug(
        "one expert's first columns are computed in place of its others",
        "schedule",
        "up_backward_act",
        (
            (
                "schedule.cuh",
                "p.offsets[expert + 1], column_block * tile_columns};",
                "p.offsets[expert + 1], expert == 1 ? 0 : column_block * tile_columns};",
            ),
        ),
        ("dx_rows",),
        (1,),
        None,
        (1,),
    ),
    Bug(
        "the last rows of one expert are in no tile",
        "schedule",
        "down_forward",
        (
            (
                "tiles.cuh",
                "return (offsets[e + 1] - offsets[e] + BM - 1) / BM;",
                "return (offsets[e + 1] - offsets[e] + (e == 3 ? 0 : BM - 1)) / BM;",
            ),
        ),
        ("y",),
        (3,),
        "last",
        None,
    ),
    Bug(
        "the reduction of one expert ends a row early",
        "schedule",
        "up_backward_weight",
        (
            (
                "weight_schedule.cuh",
                "WeightTile found{expert, __ldg(p.offsets + expert), __ldg(p.offsets + expert + 1),",
                "WeightTile found{expert, __ldg(p.offsets + expert), __ldg(p.offsets + expert + 1) - (expert == 0),",
            ),
        ),
        ("d_up",),
        (0,),
        None,
        None,
    ),
    Bug(
        "the first tiles of an expert are taken for the expert before",
        "schedule",
        "up_forward",
        (
            (
                "schedule.cuh",
                "(before[middle] * each <= position ? low : high) = middle;",
                "(before[middle] * each < position ? low : high) = middle;",
            ),
        ),
        ("h", "act"),
        (1, 2, 3),
        (0, 1),
        (0,),
    ),
)


def plant(folder: Path, edits: Sequence[tuple[str, str, str]]) -> None:
    """Edits, which are a file, a text that stands there once and what takes its place, in the sources in ``folder``."""
    for file, old, new in edits:
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file}: {old!r} stands {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new))
