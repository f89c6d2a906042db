"""The kernels where there is no GPU: run in Numba's simulator, and compiled to machine code."""

from pathlib import Path

import pytest

from tests.python import simulate

pytest.importorskip("numba.cuda", reason="needs numba-cuda")


FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize("what", ["input", *(pytest.param(what, marks=FULL) for what in ("tiled", "dense"))])
def test_simulated(what):
    simulate(Path(__file__).with_name("simulate.py"), what)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))


def compiled(kernel) -> str:
    """PTX, after checking that it links to a cubin that the cache then holds."""
    pytest.importorskip("cuda.core", reason="needs cuda.core")
    entry, code = kernel.cubin((9, 0))
    assert code[:4] == b"\x7fELF" and entry.encode() in code and kernel.cubin((9, 0)) == (entry, code)
    return kernel.ptx((9, 0))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "dtype"),
    [
        (2**20, 512, 10, "int64"),
        (2**10, 128, 8, "int32"),
        pytest.param(2**20, 8, 1, "int32", marks=FULL),
        pytest.param(2**20, 128, 8, "int32", marks=FULL),
        pytest.param(2**20, 512, 10, "int32", marks=FULL),
        pytest.param(2**10, 512, 10, "int64", marks=FULL),
        pytest.param(2**10, 512, 10, "int32", marks=FULL),
        pytest.param(2**10, 8, 1, "int32", marks=FULL),
    ],
)
def test_tiled_compiles(num_tokens, num_experts, top_k, dtype):
    from blazeproto.dispatch import tiled

    kernels = tiled.kernels(num_tokens, top_k, num_experts, dtype)
    assert len(kernels) == (3 if num_tokens == 2**20 else 2), "of few chunks the table is not scanned"
    for kernel in kernels:
        ptx = compiled(kernel)
        assert ".local" not in ptx, f"{kernel!r}: arrays meant for registers went to memory"


def test_dense_compiles():
    from blazeproto.dispatch import dense

    for kernel in dense.kernels(1000, 4, 8, "int32"):
        assert "atom." not in compiled(kernel), f"{kernel!r} has an atomic"


def test_the_limit_compiles():
    from blazeproto.dispatch import limit

    assert "atom." not in compiled(limit.KERNEL)


def test_the_plan_keeps_the_table_small_and_the_tiles_in_shared_memory():
    from blazeproto.dispatch import tiled, workspace_bytes

    for num_tokens in (1, 1000, 8192, 100_000, 2**20, 2**22):
        for num_experts, top_k in [
            (128, 8),
            (256, 8),
            (16, 4),
            (8, 2),
            (128, 4),
            (40, 8),
            (512, 10),
            (384, 8),
            (512, 1),
            (512, 512),
        ]:
            plan = tiled.plan(num_tokens, top_k, num_experts)
            assert plan.place_shared_bytes <= tiled.SHARED_LIMIT
            assert plan.num_chunks * plan.chunk_tokens >= num_tokens and plan.chunk_tokens % plan.tile_tokens == 0
            assert plan.chunk_tokens * top_k <= tiled.MAX_CHUNK_PAIRS
            lists = 8 * num_tokens * top_k
            assert workspace_bytes(num_tokens, top_k, num_experts) <= 0.05 * lists + 8 * num_experts
    with pytest.raises(ValueError, match=r"num_experts=99999.*method='sort'"):
        tiled.plan(1000, 2, 99_999)
