"""The kernels themselves in Numba's simulator: small shapes, small blocks, compared with the twin. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate.py input|tiled|dense

A process of its own, because Numba looks at that variable when it is first imported. The simulator runs a Python
thread for each CUDA thread, so blocks are cut to 32 of them.
"""

import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np
from routings import capacities, differences, make_foreign, make_routing, make_varying

from blazeproto.dispatch import build_dispatch, build_dispatch_varying, dense, reference, tiled, workspace_bytes
from blazeproto.runtime.numba_kernel import NumbaKernel

# (kind, T, E, K, dtype): several chunks, tiles and words; T = 0 and 1; E = 1; K = E; K and E above a block's threads, one
# to four columns a thread
CASES = [
    ("random", 0, 4, 2, "int32"),
    ("random", 1, 1, 1, "int64"),
    ("random", 75, 8, 2, "int32"),
    ("zipf", 150, 11, 3, "int64"),
    ("sentinels", 130, 37, 4, "int32"),
    ("sentinels", 70, 40, 3, "int64"),
    ("same", 67, 5, 5, "int32"),
    ("nobody_here", 40, 6, 2, "int32"),
    ("sentinels", 100, 33, 1, "int32"),
    ("sentinels", 100, 64, 2, "int32"),
    ("sentinels", 70, 99, 3, "int32"),
    ("one_expert_busy", 33, 70, 35, "int32"),
]


def set_sizes(**changes: int) -> None:
    """The sizes of method="tiled"."""
    tiled.SIZES = tiled.SIZES._replace(**changes)


def check_method(method: str) -> Iterator[str]:
    for kind, num_tokens, num_experts, top_k, dtype in CASES:
        ids = make_routing(kind, num_tokens, num_experts, top_k, dtype=dtype)
        expected = reference.build_dispatch(ids, num_experts)
        got = build_dispatch(ids, num_experts, method=method, validate=True)
        yield from (f"{kind} {ids.shape} E={num_experts}: {line}" for line in differences(got, expected))

    varying = make_varying(40, 9)
    lines = differences(
        build_dispatch_varying(*varying, 9, method=method, validate=True), reference.build_dispatch_varying(*varying, 9)
    )
    yield from (f"varying: {line}" for line in lines)
    yield from check_duplicates(method)
    yield from check_capacities(method)


def check_capacities(method: str) -> Iterator[str]:
    """No row, some rows and all rows beyond the capacity, of ids that are mostly elsewhere, K > E; and a varying number."""
    shapes = [(41, 5, 3, "int64"), (23, 2, 8, "int32"), (0, 3, 2, "int32")]
    for num_tokens, num_experts, top_k, dtype in shapes if method == "tiled" else shapes[:1]:
        ids = make_foreign(num_tokens, num_experts, top_k, dtype=dtype)
        for capacity in capacities(int(reference.build_dispatch(ids, num_experts).expert_token_offsets[-1])):
            options = {"row_capacity": capacity, "method": method}
            expected = reference.build_dispatch(ids, num_experts, row_capacity=capacity)
            sizes = [min(capacity, ids.size), num_experts + 1, *[ids.size] * (2 if dtype == "int64" else 1), 1]
            out = tuple(np.full(size, -77, np.int32) for size in sizes)
            needed = workspace_bytes(num_tokens, top_k, num_experts, method, row_capacity=capacity)
            workspace = np.full(needed + 64, 0x77, np.uint8)
            got = build_dispatch(ids, num_experts, **options, out=out, workspace=workspace[:needed])
            if (workspace[needed:] != 0x77).any():
                yield f"capacity {capacity} of {ids.shape} E={num_experts}: wrote past the workspace"
            yield from (
                f"capacity {capacity} of {ids.shape} E={num_experts}: {line}" for line in differences(got, expected)
            )
    varying = make_varying(40, 9)
    expected = reference.build_dispatch_varying(*varying, 9, row_capacity=20)
    lines = differences(build_dispatch_varying(*varying, 9, row_capacity=20, method=method), expected)
    yield from (f"capacity 20, varying: {line}" for line in lines)

    launched = []
    for capacity in (None, 5):
        with mock.patch.object(NumbaKernel, "launch", lambda kernel, *_: launched.append(kernel.name)):
            build_dispatch(np.zeros((9, 1), np.int32), 3, row_capacity=capacity, method=method)
        if (launched.count("limit_rows") == 1) != (capacity is not None):
            yield f"capacity {capacity}: launched {launched}"


def check_duplicates(method: str) -> Iterator[str]:
    """An expert named twice: what comes out is unspecified, but every index is in bounds, and so are all writes."""
    ids = np.random.default_rng(0).integers(-1, 3, (90, 4)).astype(np.int32)
    sizes = {"expert_pair_indices": ids.size, "expert_token_offsets": 4, "token_index_map": ids.size}
    guarded = {name: np.full(size + 16, -77, np.int32) for name, size in sizes.items()}
    inner = {name: array[8:-8] for name, array in guarded.items()}
    dispatch = build_dispatch(ids, 3, method=method, out=inner)
    for name, array in guarded.items():
        if (array[:8] != -77).any() or (array[-8:] != -77).any():
            yield f"duplicates: {name} was written out of bounds"
    offsets, rows, index_map = (
        inner[name] for name in ("expert_token_offsets", "expert_pair_indices", "token_index_map")
    )
    if not (offsets[0] == 0 and (np.diff(offsets) >= 0).all() and offsets[-1] <= ids.size):
        yield f"duplicates: offsets {offsets}"
    if not ((rows[: offsets[-1]] >= 0).all() and (rows < ids.size).all() and (rows >= -1).all()):
        yield f"duplicates: rows {rows}"
    if not ((index_map >= -1) & (index_map < max(offsets[-1], 1))).all():
        yield f"duplicates: token_index_map {index_map}"
    try:
        build_dispatch(ids, 3, method=method, validate=True)
        yield "duplicates: validate=True raised nothing"
    except ValueError:
        pass
    del dispatch


def check_wide_ids(method: str) -> Iterator[str]:
    """An int64 id outside [0, E) is not here, whatever its lower 32 bits are."""
    ids = make_routing("sentinels", 40, 8, 4, dtype="int64")
    expected = reference.build_dispatch(ids, 8)
    here = ids[(ids >= 0) & (ids < 8)]
    if expected.expert_token_offsets.tolist() != [0, *np.cumsum(np.bincount(here, minlength=8))]:
        yield "wide ids: the twin counts pairs that are not here"
    yield from (f"wide ids: {line}" for line in differences(build_dispatch(ids, 8, method=method), expected))


def check_input() -> Iterator[str]:
    """Read-only ids are read; a method that the simulator has not is refused."""
    ids = make_routing("random", 20, 8, 2)
    expected = reference.build_dispatch(ids, 8)
    ids.flags.writeable = False
    for method in ("tiled", "dense"):
        yield from differences(build_dispatch(ids, 8, method=method, validate=True), expected)
    for method in ("tiled", "dense"):
        yield from check_wide_ids(method)
    varying = make_varying(40, 9)
    for array in varying:
        array.flags.writeable = False
    yield from differences(build_dispatch_varying(*varying, 9), reference.build_dispatch_varying(*varying, 9))
    try:
        build_dispatch(ids, 8, method="sort")
        yield "method='sort': taken, not refused"
    except ValueError:
        pass


def main(what: str) -> None:
    set_sizes(
        count_threads=32,
        count_per_thread=2,
        scan_threads=32,
        scan_rows=2,
        place_threads=32,
        place_warps=1,
        min_tile=32,
        max_tile=64,
        tile_pairs=128,
        chunk_pairs=256,
        num_chunks=3,
        few_chunks=0,
    )
    dense.THREADS, dense.SCAN_THREADS, dense.TILE_TOKENS, dense.MAX_TILES = 32, 32, 16, 12
    lines = list(check_input() if what == "input" else check_method(what))
    if what == "tiled":  # again, with blocks that sum the table themselves
        assert tiled.plan(75, 2, 8).scanned
        set_sizes(few_chunks=8)
        assert not tiled.plan(75, 2, 8).scanned
        lines += check_method(what)
    print("\n".join(lines) or "as the twin")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main(sys.argv[1])
