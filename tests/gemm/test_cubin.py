"""Kernels with an epilogue warpgroup say that their threads start with 128 registers, and do with them until they get more."""

import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from blazeproto import gemm
from blazeproto.gemm import cubin
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.nvrtc import CompileError

REGISTERS = 65536  # of a multiprocessor
WITH_EPILOGUE_WARPGROUP = [kernel for kernel in gemm.all_kernels() if kernel.start_registers is not None]
UP = gemm.kernel_for("up_forward")
DOWN = gemm.kernel_for("down_forward")


@pytest.fixture(scope="module")
def plain() -> bytes:
    """A cubin as ptxas wrote it."""
    return DOWN.compile().cubin


def start_of(code: bytes) -> tuple[int, int]:
    """(registers, threads) that a launch of the only kernel goes by."""
    found = {
        attribute: struct.unpack_from(f"<{size // 4}I", code, at) for attribute, size, at in cubin._attributes(code)
    }
    return found[cubin.REGCOUNT][1], found[cubin.MAX_THREADS][0]


def test_only_blocks_of_512_threads_are_told_otherwise() -> None:
    assert {kernel.threads for kernel in WITH_EPILOGUE_WARPGROUP} == {512}
    assert (UP.threads, UP.start_registers) == (512, 128) and (DOWN.threads, DOWN.start_registers) == (384, None)


@pytest.mark.parametrize("kernel", [UP, DOWN], ids=lambda kernel: kernel.entry)
def test_a_block_fits_a_multiprocessor(kernel: Kernel) -> None:
    registers, threads = start_of(kernel.compile().cubin)
    assert (registers, threads) == (kernel.registers, kernel.threads) and registers * threads <= REGISTERS


def test_start_with_writes_two_numbers(plain: bytes) -> None:
    changed = cubin.start_with(plain, 128, 512)
    assert start_of(plain) == (168, 384) and start_of(changed) == (128, 512)
    assert cubin.start_with(changed, 168, 384) == plain
    assert sum(a != b for a, b in zip(plain, changed, strict=True)) <= 4


def test_what_is_no_cubin_of_one_kernel_raises(plain: bytes) -> None:
    without = plain.replace(b".nv.info", b".no.info")
    with pytest.raises(CompileError, match=r"cubin: expected one EIATTR_REGCOUNT and one EIATTR_MAX_THREADS, got \[\]"):
        cubin.start_with(without, 128, 512)


def kernels_to_disassemble() -> Iterator[Any]:
    """The common code is an entry's and its tile's: the full set alone has them with every other option."""
    seen = set()
    for kernel in WITH_EPILOGUE_WARPGROUP:
        kind = kernel.entry, *(kernel.defines[name] for name in ("BN", "CLUSTER", "EPILOGUE_REGISTERS"))
        marks = [pytest.mark.full] if kind in seen else []
        seen.add(kind)
        yield pytest.param(kernel, id=" ".join(kernel.macros).replace("-D", ""), marks=marks)


@pytest.mark.parametrize("kernel", kernels_to_disassemble())
def test_no_more_registers_are_used_before_there_are_more(nvdisasm: None, kernel: Kernel) -> None:
    """The code in front of the first USETMAXREG is what all warps run."""
    common, *roles = re.split(r"USETMAXREG\S*(?: \w+,)? (0x[0-9a-f]+)", kernel.compile().sass)
    assert _registers_used(common) <= (kernel.start_registers or 0)
    limits = [int(limit, 16) for limit in roles[::2]]
    assert len(limits) == 3 and 128 * (sum(limits) + max(limits)) <= REGISTERS  # two warpgroups are consumers


def _registers_used(sass: str) -> int:
    return 1 + max(int(number) for number in re.findall(r"\bR(\d+)\b", sass))
