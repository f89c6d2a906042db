"""What a compiled kernel takes of a multiprocessor, and how many of its CTAs run there at a time. Needs no GPU.

resources(gemm.kernel_for("up_forward"))    # Resources(registers=128, spills=0, ..., ctas=1, wgmma=8)
"""

import re
from dataclasses import dataclass

from blazeproto.gemm.compile import Kernel

# A Hopper multiprocessor (CUDA C++ programming guide, compute capability 9.0).
REGISTERS, QUARTERS, REGISTER_UNIT = 65536, 4, 256  # of which each quarter has as many; a warp takes whole units
SHARED_BYTES, SHARED_RESERVED, SHARED_UNIT = 228 * 1024, 1024, 128  # of a CTA, the system reserves some
MOST_THREADS, MOST_CTAS, WARP = 2048, 32, 32


@dataclass(frozen=True)
class Resources:
    """registers: that a thread starts with.  spills: bytes a thread stores and loads for want of them.
    smem_bytes: shared memory of a CTA.  threads: of a CTA.  ctas: of a multiprocessor at a time.
    wgmma: instructions in the machine code, each counted once however often it runs; None without nvdisasm.
    """

    registers: int
    spills: int
    smem_bytes: int
    threads: int
    ctas: int
    wgmma: int | None


def resources(kernel: Kernel, *, sass: bool = True) -> Resources:
    """The resources of a kernel, which is compiled if need be. CompileError if the compiler refuses it.

    sass: whether to disassemble it, half a second, and count its wgmma.
    """
    threads = threads_of(kernel)
    registers, smem = kernel.registers, kernel.smem_bytes
    ctas = ctas_per_multiprocessor(registers, threads, smem)
    return Resources(registers, kernel.spills, smem, threads, ctas, wgmma_count(kernel) if sass else None)


def threads_of(kernel: Kernel) -> int:
    """The threads of a CTA: what the kernel says, or the bound that its source declares (``__launch_bounds__``)."""
    if kernel.threads:
        return kernel.threads
    declared = re.search(rf"\.entry {re.escape(kernel.entry)}\(.*?\.maxntid (\d+), (\d+), (\d+)", kernel.ptx, re.DOTALL)
    if declared is None:
        raise ValueError(f"kernel: expected __launch_bounds__ at {kernel.entry} in {kernel.file}, found none")
    x, y, z = map(int, declared.groups())
    return x * y * z


def ctas_per_multiprocessor(registers: int, threads: int, smem_bytes: int) -> int:
    """How many CTAs fit on a Hopper multiprocessor: by registers, threads, shared memory, and 32 at most."""
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = QUARTERS * (REGISTERS // QUARTERS // warp_registers) // (-(-warps // QUARTERS) * QUARTERS)
    smem = -(-smem_bytes // SHARED_UNIT) * SHARED_UNIT + SHARED_RESERVED
    return min(by_registers, MOST_THREADS // (warps * WARP), SHARED_BYTES // smem, MOST_CTAS)


def wgmma_count(kernel: Kernel) -> int | None:
    """Instructions in the kernel's machine code that wgmma becomes, ``HGMMA`` on bf16 and ``QGMMA`` on fp8; None without
    nvdisasm."""
    if "wgmma.mma_async" not in kernel.ptx:
        return 0
    try:
        sass = kernel.sass
    except FileNotFoundError:
        return None
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", sass, flags=re.MULTILINE)  # others, name, text, name, ...
    return sum(
        len(re.findall(r"\b[HQ]GMMA\b", code))
        for name, code in zip(sections[1::2], sections[2::2], strict=True)
        if name == kernel.entry
    )
