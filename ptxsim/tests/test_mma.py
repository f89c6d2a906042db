"""mma.sync: a warp's registers against NumPy, and what the machine says of faults."""

from typing import Any

import numpy as np
import pytest
from small_kernels import ptx

import ptxsim
from ptxsim import MachineError, matrices
from ptxsim.mma import K, M, N

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r5,%r6}, {%f1,%f2,%f3,%f4};"
PARAMETERS = ".param .u64 o, .param .u64 a, .param .u64 b, .param .u64 c"
ADDRESSES = """
mov.u32 %r8, %tid.x;
mul.wide.u32 %rd5, %r8, 16;
mul.wide.u32 %rd6, %r8, 8;
ld.param.u64 %rd2, [a]; add.s64 %rd2, %rd2, %rd5;
ld.param.u64 %rd3, [b]; add.s64 %rd3, %rd3, %rd6;
ld.param.u64 %rd4, [c]; add.s64 %rd4, %rd4, %rd5;
add.s64 %rd1, %rd1, %rd5;
"""
LOAD_A = "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd2];"
LOAD_B = "ld.global.v2.u32 {%r5,%r6}, [%rd3];"
LOAD_C = "ld.global.v4.f32 {%f1,%f2,%f3,%f4}, [%rd4];"
STORE = "st.global.v4.f32 [%rd1], {%f1,%f2,%f3,%f4};"


def bits(values: Any) -> np.ndarray:
    """Cut off to bf16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B^T and C: whole numbers over four, whose sums are exact in any order; no two neighbours alike."""
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(-31, 32, shape) / 4 for shape in ((M, K), (N, K), (M, N)))
    return a, b, c.astype(np.float32)


def lanes_of(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """By lane and register, as PTX ISA §9.7.15.5.8 has it in words: groupID is lane / 4, and a register of bf16 has two columns.
    Registers go down rows first, by eight, then along columns by eight."""
    made: list[np.ndarray] = []
    for lane in range(32):
        group, place = lane // 4, lane % 4
        blocks = ((row, column) for column in range(0, columns, 8) for row in range(0, rows, 8))
        made += [matrix[row + group, column + 2 * place : column + 2 * place + 2] for row, column in blocks]
    return np.array(made)


def run(a: np.ndarray, b: np.ndarray, c: np.ndarray, body: str = LOAD_A + LOAD_B + LOAD_C + MMA) -> np.ndarray:
    """D, from the registers of a warp."""
    words = [np.ascontiguousarray(lanes_of(bits(one), *one.shape)).view(np.uint32) for one in (a, b)]
    places = lanes_of(np.arange(M * N).reshape(M, N), M, N).ravel()
    out = np.zeros(M * N, np.float32)
    arguments = [out, *words, np.ascontiguousarray(lanes_of(c, M, N))]
    assert not ptxsim.run(ptx(ADDRESSES + body + STORE, PARAMETERS), 1, 32, arguments).races
    made = np.empty(M * N, np.float32)
    made[places] = out
    return made.reshape(M, N)


def test_the_product_is_numpys() -> None:
    a, b, c = drawn()
    assert np.array_equal(run(a, b, c), a @ b.T + c)


@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_each_element_lies_where_the_isa_says(which: str) -> None:
    """One row of A, one column of B or one element of C at a time, beside an identity."""
    for row, column in ((0, 0), (0, 1), (7, 6), (8, 3), (15, 7)):
        a, b, c = np.zeros((M, K)), np.zeros((N, K)), np.zeros((M, N), np.float32)
        for k in (0, 1, 7, 8, 15):
            a[:], b[:], c[:] = 0, 0, 0
            if which == "c":
                c[row, column] = 1
            else:
                a[row, k], b[column, k] = (2, 1) if which == "a" else (1, 2)
            expected = a @ b.T + c
            assert np.count_nonzero(expected) == 1 and np.array_equal(run(a, b, c), expected)


def test_sums_are_those_of_wgmma() -> None:
    """Numbers whose sum depends on how it is rounded, bit for bit."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.normal(size=shape).astype(np.float32) ** 5 for shape in ((M, K), (N, K), (M, N)))
    wide = np.zeros((64, K), np.float32)
    wide[:M] = a
    tall = np.zeros((64, N), np.float32)
    tall[:M] = c
    expected = matrices.multiply(bits(wide), bits(b), tall)[:M]
    assert np.array_equal(run(a, b, c).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "body",
    [LOAD_B + LOAD_C, LOAD_A + LOAD_C, LOAD_A + LOAD_B],
    ids=["A", "B", "C"],
)
def test_a_register_that_nobody_wrote_is_said_of_its_product(body: str) -> None:
    """Where it is stored: a sum of it is as unknown as it is."""
    a, b, c = drawn()
    with pytest.raises(MachineError, match="it stores what nobody wrote"):
        run(a, b, c, body + MMA)


def test_an_unknown_row_of_a_leaves_the_others_known() -> None:
    """Registers 0 and 2 of A have rows 0 to 7, registers 1 and 3 the others."""
    a, b, c = drawn()
    half = "ld.global.u32 %r1, [%rd2]; ld.global.u32 %r3, [%rd2+8];" + LOAD_B + LOAD_C + MMA
    upper = half + "mov.f32 %f3, 0f00000000; mov.f32 %f4, 0f00000000;"
    assert np.array_equal(run(a, b, c, upper)[:8], (a @ b.T + c)[:8])
    with pytest.raises(MachineError, match="it stores what nobody wrote"):
        run(a, b, c, half)


def test_a_warp_with_lanes_away_is_refused() -> None:
    a, b, c = drawn()
    with pytest.raises(MachineError, match="expected all 32 lanes"):
        run(a, b, c, LOAD_A + LOAD_B + LOAD_C + "setp.lt.u32 %p1, %r8, 31; @!%p1 bra AWAY; " + MMA + " AWAY: ")


def test_other_shapes_are_refused() -> None:
    a, b, c = drawn()
    with pytest.raises(ptxsim.PtxError):
        run(a, b, c, LOAD_A + LOAD_B + LOAD_C + MMA.replace("m16n8k16", "m16n8k8"))
