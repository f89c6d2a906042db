"""Pictures of a stage's layout and of the accumulators, against other formulas and against the C++. Needs no GPU."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest

from blazeproto import gemm
from blazeproto.gemm.compile import CompileError, Kernel, compile_in_subprocess
from blazeproto.lab.layouts import Fragment, StageLayout, fragment, swizzle
from ptxsim import matrices
from tests.refusals import refuses

PRODUCTS = [name for name, entry in gemm.PRODUCTS.items() if entry.kernel]
MN_MAJOR = {  # operands of which neighbours in a row of shared memory are not neighbours in the reduction
    ("down_backward_act", "b"),
    ("up_backward_act", "b"),
    ("up_backward_act_fused", "b"),
    ("down_backward_weight", "a"),
    ("down_backward_weight", "b"),
    ("up_backward_weight", "a"),
    ("up_backward_weight", "b"),
}


def by_address(row: int, byte: int) -> int:
    """The 128-byte swizzle as the PTX ISA has it: of an address, bits 4 to 6 are XORed with bits 7 to 9."""
    address = row * 128 + byte
    return address ^ (address >> 7 & 7) << 4


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product(product: str, operand: str) -> None:
    layout = swizzle(product, operand)
    assert layout.mn_major == ((product, operand) in MN_MAJOR)
    assert layout.length == (128 if operand == "a" else int(gemm.kernel_for(product).defines["BN"]))
    assert layout.panels * layout.rows * 128 == layout.length * 64 * 2
    places = {layout.offset(*where) for where in combinations(range(layout.rows), range(8), range(layout.panels))}
    assert places == set(range(0, layout.length * 128, 16))  # each 16 bytes once


@pytest.mark.parametrize(("mn_major", "row", "byte"), [(False, 0, 0), (False, 3, 16), (False, 77, 126), (True, 12, 40)])
def test_the_swizzle_is_an_exclusive_or_of_the_address(mn_major: bool, row: int, byte: int) -> None:
    layout = StageLayout("up_forward", "a", 128, mn_major, 0)
    along = byte // 2
    assert layout.element(*((along, row) if mn_major else (row, along))) == by_address(row, byte)
    if mn_major:  # the next 64 are a panel of 64 rows further on
        assert layout.element(64 + along, row) == 64 * 128 + by_address(row, byte)


def swizzle_check(layout: StageLayout, wrong: int = 0) -> str:
    """A kernel that compiles only if `swizzled` of wgmma.cuh gives the same: a call of a function without a body survives
    otherwise."""
    tests = [
        f"if (swizzled(0, {row}, {chunk}) != {layout.offset(row, chunk) + wrong}) lies_elsewhere();"
        for row, chunk in combinations((0, 1, 2, 7, 8, 13, 63, 127), range(8))
    ]
    start = '#include "wgmma.cuh"\nextern "C" __device__ void lies_elsewhere();\n'
    return f'{start}extern "C" __global__ void check() {{ {" ".join(tests)} }}'


def test_it_is_what_the_kernels_compute(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    path = tmp_path / "check.cu"
    path.write_text(swizzle_check(swizzle()))
    compile_in_subprocess(Kernel(str(path), "check"))
    path.write_text(swizzle_check(swizzle(), wrong=16))
    with pytest.raises(CompileError, match="lies_elsewhere"):
        compile_in_subprocess(Kernel(str(path), "check"))


@pytest.mark.parametrize("columns", [128, 192, 256])
def test_fragments(columns: int) -> None:
    """Each accumulator has one holder. The manual's figure of m64nNk16's D: row 0 is T0 T0 T1 T1 T2 T2 T3 T3, and again every 8
    columns; row 1 begins with T4; row 8 with T0's d2; row 16 with T32."""
    layout = Fragment("up_forward", columns)
    holders = {layout.holder(row, column): (row, column) for row in range(64) for column in range(columns)}
    assert set(holders) == set(combinations(range(128), range(columns // 2)))
    assert all(layout.place(*holder) == place for holder, place in holders.items())
    first = [layout.holder(0, column) for column in range(10)]
    assert first == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (0, 4), (0, 5)]
    assert [layout.holder(row, 0) for row in (1, 7, 8, 16, 63)] == [(4, 0), (28, 0), (0, 2), (32, 0), (124, 2)]


def test_pictures() -> None:
    assert repr(fragment("down_forward")).splitlines()[-1].split()[:4] == ["row", "15", "t28:d2", "t28:d3"]
    for picture, cells in ((swizzle("up_backward_weight", "b"), 64), (fragment(), 128)):
        root = ElementTree.fromstring(picture._repr_html_())
        words = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert sum(re.fullmatch(r"[kmn] \d+\.\.\d+|t\d+:d\d+", word) is not None for word in words) == cells


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: swizzle("up_forwrd"), "product"),
        (lambda: swizzle("combine"), "product"),
        (lambda: swizzle("up_forward", "c"), "operand"),
        (lambda: swizzle().offset(128, 0), "row"),
        (lambda: swizzle().offset(0, 8), "chunk"),
        (lambda: fragment().holder(64, 0), "row"),
        (lambda: fragment().place(0, 128), "register"),
    ],
)
def test_what_there_is_not_is_refused(call: Callable[[], object], argument: str) -> None:
    refuses(call, argument)


@pytest.mark.parametrize(("rows", "mn_major"), [(64, False), (256, False), (64, True), (256, True)])
def test_a_stage_lies_as_wgmma_reads_it(rows: int, mn_major: bool) -> None:
    """Every step of a stage, as mainloop.cuh advances its descriptors."""
    start = 3 * 49152
    stage = StageLayout("up_forward", "b", rows, mn_major, start)
    for step in range(4):
        at = start + step * (16 * 128 if mn_major else 32)
        read = matrices.operand_addresses(matrices.Descriptor(at, 64 * 128, 1024, 128), rows, 16, mn_major)
        for row, k in ((0, 0), (1, 7), (8, 8), (13, 15), (rows - 1, 9), (rows // 2 + 5, 3)):
            assert read[row, k] == start + stage.element(row, 16 * step + k)


@pytest.mark.parametrize("columns", [8, 64, 192, 256])
def test_a_fragment_lies_as_wgmma_writes_it(columns: int) -> None:
    matrix = np.random.default_rng(0).normal(size=(64, columns)).astype(np.float32)
    thread, register = Fragment("up_forward", columns).holder(41, columns - 3)
    assert matrices.matrix_to_fragment(matrix)[thread // 32, register, thread % 32] == matrix[41, columns - 3]
