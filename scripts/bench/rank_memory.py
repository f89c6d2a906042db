"""The peak of a layer with its experts over any number of GPUs, computed from the bytes that are held at each moment.

It counts the bytes that `scripts.bench.expert_parallel` measures: weights and their gradients, the exchange's memory, and all
that forward and backward allocate, but not the caller's x, scores, ids and dO. Policy "minimal", a gate, K experts a token, bf16.
"""

from typing import Any

from blazeproto.distributed.peer_memory import MemoryLayout
from blazeproto.gemm import Sizes
from blazeproto.gemm.combine import column_slices
from blazeproto.gemm.down_backward import score_partials
from blazeproto.gemm.weight import DOWN, UP, workspace_elements
from blazeproto.runtime.target import FIRST_DEVICE
from scripts.bench.markdown import Record, figure, number, plain_shape, table

BF16, WORD = 2, 4  # bytes
HOPPER = FIRST_DEVICE + 132  # as a device: its multiprocessors, by which weight gradients are cut
RANKS = (2, 4, 8)
CAPACITY = 1.25  # rows over the mean, of dispatcher "capacity": `Symmetric` with a row_capacity


def peak_bytes(sizes: Sizes, ranks: int, row_capacity: int | None = None) -> int:
    """Bytes of one rank of ``ranks`` with `Symmetric`; with 1 the layer alone, without a dispatcher. sizes: T of a rank."""
    T, d, n, experts, K = sizes.T, sizes.d, sizes.n, sizes.E // ranks, sizes.K
    pairs = ranks * T * K
    rows = pairs if row_capacity is None else min(row_capacity, pairs)
    up, down = BF16 * experts * 2 * n * d, BF16 * experts * n * d
    out = BF16 * T * d  # and dX
    h, act = BF16 * rows * 2 * n, BF16 * rows * n  # dH lies over H; A' is as large as act
    y, dx_rows = (BF16 * rows * max(map(len, column_slices(rows, d, weight))) for weight in (2 * down, up))
    d_scores = WORD * pairs
    cut = [
        WORD * workspace_elements(name, (rows, experts, HOPPER), shape)
        for name, shape in ((DOWN, (experts, d, n)), (UP, (experts, 2 * n, d)))
    ]
    moments = (
        h + act + y,  # Y, by columns
        h
        + d_scores
        + act
        + max(WORD * rows * score_partials(n), down + cut[0]),  # dH and dS, then the gradient of down
        h + d_scores + down + out + dx_rows,  # dX~, by columns
        h + d_scores + down + out + up + cut[1],  # the gradient of up
    )
    kept = up + down + out + WORD * (pairs + rows)  # two index lists
    if ranks > 1:
        exchange = MemoryLayout(ranks, T, T * K, d).size
        # Scores, whether a pair is here, ranks of a token, and the order in which products send tokens to each rank.
        kept += exchange + WORD * pairs + pairs + WORD * T + WORD * T * (ranks - 1)
    return kept + max(moments)


def rank_memory_table(record: Record) -> str:
    """Peaks of a rank by number of GPUs, computed, beside what was measured."""
    measured: dict[tuple[Any, ...], float] = {}
    for row in record.get("ep", []):
        sizes = Sizes(**row["cfg"])
        if "peak_MiB" in row:
            measured[sizes, row["gpus"], row["dispatcher"]] = row["peak_MiB"]
        if "alone_MiB" in row:
            measured[sizes, 1, "symmetric"] = row["alone_MiB"]
    rows = []
    for sizes in dict.fromkeys(key[0] for key in measured):
        alone = peak_bytes(sizes, 1)
        for ranks in (1, *RANKS):
            whole, bounded = (peak_bytes(sizes, ranks, most) for most in (None, int(CAPACITY * sizes.rows)))
            made = {"cfg": sizes._asdict(), "gpus": ranks, "whole": whole / 2**20, "of_one": whole / alone}
            made["measured"] = measured.get((sizes, ranks, "symmetric"))
            if ranks > 1:
                made |= {"bounded": bounded / 2**20, "bounded_of_one": bounded / alone}
                made["bounded_measured"] = measured.get((sizes, ranks, "capacity"))
            rows.append(made)
    columns = [
        ("T of a rank, d, n, E, K", plain_shape),
        ("GPUs", lambda row: number(row["gpus"], 0)),
        ("peak MiB", figure("whole", digits=0)),
        ("measured", figure("measured", digits=0)),
        ("over one GPU's", figure("of_one")),
        (f"with {CAPACITY} times the mean rows, MiB", figure("bounded", digits=0)),
        ("measured", figure("bounded_measured", digits=0)),
        ("over one GPU's", figure("bounded_of_one")),
    ]
    return table(rows, columns)
