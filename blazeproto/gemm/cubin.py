"""Reads and changes what a cubin says of a kernel's registers and threads.

A kernel can start with fewer registers a thread than its code uses, if it asks for more by ``setmaxnreg`` before it needs
them. ptxas allows that, but for one thing: it refuses a ``wgmma`` with 128 accumulators wherever threads *start* with 128
registers or fewer, as in a block of 512. So such a kernel is compiled as if its blocks had 384 threads, which
start with 168, and the two numbers that a launch goes by are written over. They are attributes of the ELF file, records of
(format, attribute, size, payload):

    section                attribute          payload
    .nv.info               EIATTR_REGCOUNT    symbol, registers a thread starts with
    .nv.info.<kernel>      EIATTR_MAX_THREADS x, y, z of the largest block

All code before ``setmaxnreg`` must do with the fewer registers, which a test sees to.
"""

import struct
from collections.abc import Iterator

from blazeproto.gemm.nvrtc import CompileError

REGCOUNT, MAX_THREADS = 0x2F, 0x05  # EIATTR_…
_WITH_SIZE = 4  # the format of records that have a payload; the others are four bytes


def start_with(cubin: bytes, registers: int, threads: int) -> bytes:
    """The cubin of one kernel, whose blocks have ``threads`` threads that start with ``registers`` registers.

    CompileError where the file isn't made as expected.
    """
    found = sorted(record for record in _attributes(cubin) if record[:2] in ((MAX_THREADS, 12), (REGCOUNT, 8)))
    if [attribute for attribute, _, _ in found] != [MAX_THREADS, REGCOUNT]:
        raise CompileError(f"cubin: expected one EIATTR_REGCOUNT and one EIATTR_MAX_THREADS, got {found}")
    (_, _, threads_at), (_, _, registers_at) = found
    out = bytearray(cubin)
    struct.pack_into("<3I", out, threads_at, threads, 1, 1)
    struct.pack_into("<I", out, registers_at + 4, registers)
    return bytes(out)


def _attributes(cubin: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, size and offset of its payload) of every record with a payload in the .nv.info sections."""
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
                yield attribute, length, at
                at += length
