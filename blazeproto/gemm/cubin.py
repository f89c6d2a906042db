"""What a cubin says of a kernel's registers and threads, and how to say something else.

A kernel can start with fewer registers a thread than its code uses, if it asks for more by ``setmaxnreg`` before it needs
them. ptxas allows that, but for one thing: it refuses a ``wgmma`` with 128 accumulators wherever threads *start* with 128
registers or fewer, as those of a block of 512 must. So such a kernel is compiled as if its blocks had 384 threads, which
start with 168, and the two numbers that a launch goes by are written over. They are attributes of the ELF file, records of
(format, attribute, size, payload):

    section                attribute          payload
    .nv.info               EIATTR_REGCOUNT    symbol, registers a thread starts with
    .nv.info.<kernel>      EIATTR_MAX_THREADS x, y, z of the largest block

All code before ``setmaxnreg`` must do with the fewer registers, which a test sees to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from blazeproto.gemm.nvrtc import CompileError

REGCOUNT, MAX_THREADS = 0x2F, 0x05  # EIATTR_…
_WITH_SIZE = 4  # the format of records that have a payload; the others are four bytes


def start_with(cubin: bytes, registers: int, threads: int) -> bytes:
    """The cubin of one kernel, whose blocks have ``threads`` threads that start with ``registers`` registers.

    CompileError where the file isn't made as expected.
    """
    out = bytearray(cubin)
    written = []
    for attribute, at, size in _attributes(cubin):
        if attribute == REGCOUNT and size == 8:
            struct.pack_into("<I", out, at + 4, registers)
            written.append(attribute)
        elif attribute == MAX_THREADS and size == 12:
            struct.pack_into("<3I", out, at, threads, 1, 1)
            written.append(attribute)
    if sorted(written) != [MAX_THREADS, REGCOUNT]:
        raise CompileError(f"cubin: expected one EIATTR_REGCOUNT and one EIATTR_MAX_THREADS, got {written}")
    return bytes(out)


def start_of(cubin: bytes) -> tuple[int, int]:
    """(registers, threads) that a launch of the only kernel goes by."""
    found = {attribute: struct.unpack_from(f"<{size // 4}I", cubin, at) for attribute, at, size in _attributes(cubin)}
    return found[REGCOUNT][1], found[MAX_THREADS][0]


def _attributes(cubin: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, offset and size of its payload) of every record with a payload in the .nv.info sections."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)  # ELF64's header: where sections are listed,
    entry, count, names = struct.unpack_from("<3H", cubin, 0x3A)  # bytes an entry, how many, and which holds the names
    sections = [struct.unpack_from("<II8x8xQQ", cubin, table + index * entry) for index in range(count)]
    names_at = sections[names][2]
    for name, _, offset, size in sections:
        start = names_at + name
        if not cubin[start : cubin.index(0, start)].startswith(b".nv.info"):
            continue
        at = offset
        while at < offset + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == _WITH_SIZE:
                yield attribute, at, length
                at += length
