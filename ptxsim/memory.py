"""Memory: 64-bit addresses that name NumPy arrays, and every access checked.

Global memory is a set of arrays, each at an address of its own with a gap behind it. Shared memory of the CTA of rank r in its
cluster begins at r << 24 (PTX ISA §5.1.7, "Shared state space"): an address of ``shared::cta`` is one of ``shared::cluster`` too.
A parameter block is a global array that nobody may write.
"""

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np

from ptxsim.checks import expect

POISON = 0xFB  # what memory holds that nobody wrote: bf16 and fp32 numbers of -1e36
PAGE = 1 << 21  # arrays begin at multiples, the first at 1 << 40
SHARED_BASE = 1024  # the bytes below belong to the system
WINDOW = 24  # bits of a CTA's shared addresses,
IN_WINDOW = (1 << WINDOW) - 1  # of which these say where in its shared memory


SCOPES = {"cta": 1, "cluster": 2, "gl": 3, "gpu": 3, "sys": 4}  # each within the next; gl: of membar
GPU, SYSTEM = SCOPES["gpu"], SCOPES["sys"]


class Semantics(NamedTuple):
    """How an instruction accesses memory (PTX ISA §8.3 to §8.5).

    scope: of `SCOPES`, 0 where it is weak.  nc: nobody writes what it reads while the launch runs.
    """

    scope: int = 0
    acquire: bool = False
    release: bool = False
    atomic: bool = False
    nc: bool = False

    @classmethod
    def of(cls, words: tuple[str, ...]) -> "Semantics":
        """volatile is relaxed of system scope (§8.4); fences and membar do both, where they don't say which."""
        known, atomic = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel"), words[0] in ("atom", "red")
        usual = {"ld": "weak", "st": "weak", "fence": "acq_rel", "membar": "acq_rel"}.get(words[0], "relaxed")
        how = next((word for word in words if word in known), usual)
        scope = next((SCOPES[word] for word in words if word in SCOPES), SYSTEM if how == "volatile" else GPU)
        acquire, release = (how in (one, "acq_rel") for one in ("acquire", "release"))
        return cls(0 if how == "weak" else scope, acquire, release, atomic, "nc" in words)


class Refusal(ValueError):
    """A forbidden access, raised where the instruction is not known: the step that runs it adds it."""


class Block:
    """Bytes at an address.

    bytes: (size,) uint8.  written: (size,) bool, or None where all is.  words: its views by the width of an element.
    home: whose copy this is, as one GPU sees it, or itself.  numbers: (size,), of copies: which store each byte is of.
    """

    def __init__(
        self, name: str, address: int, data: np.ndarray, *, written: bool = True, read_only: bool = False
    ) -> None:
        self.name, self.address, self.size, self.read_only = name, address, data.nbytes, read_only
        self.end = address + data.nbytes
        self.bytes = data.reshape(-1).view(np.uint8) if data.size else np.empty(0, np.uint8)
        self.written: Any = None if written else np.zeros(self.size, np.bool_)
        self.home, self.numbers = self, np.empty(0, np.int64)
        self.stale: Any = None  # of shared memory, bools: where the async proxy does not see what was written ...
        self.before: Any = None  # ... and what it sees there
        self.words = {width: self.bytes[: self.size // width * width].view(f"u{width}") for width in (1, 2, 4, 8)}

    def copy(self) -> "Block":
        """As one of several GPUs sees it, and may come to see it later than others."""
        made = Block(self.name, self.address, self.bytes.copy())
        made.written, made.home, made.numbers = self.written, self, np.zeros(self.size, np.int64)
        return made

    def known(self, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray | bool]:
        """Pieces of ``size`` bytes, (pieces, size) uint8, and which of these somebody wrote, bool or True for all."""
        index = offsets[:, None] + np.arange(size)
        return self.bytes[index], self.written is None or self.written[index]

    def wrote(self, index: np.ndarray | slice, anything: bool = True) -> None:
        """These bytes are written; or hold again what nobody wrote."""
        if self.written is not None:
            self.written[index] = anything

    def shows_late(self, index: np.ndarray) -> None:
        """Threads are about to write: until a fence the async proxy sees what is there now (PTX ISA §8.6, "Proxies")."""
        if self.stale is not None:
            fresh = index[~self.stale[index]]
            self.before[fresh] = self.bytes[fresh]
            self.stale[index] = True

    def seen_by_async(self, index: np.ndarray) -> np.ndarray:
        """Bytes as the async proxy sees them."""
        found, stale = self.bytes[index], self.stale[index]
        return np.where(stale, self.before[index], found) if stale.any() else found


def bytes_at(offsets: np.ndarray, size: int) -> np.ndarray:
    """The offsets of all bytes of pieces of this many, flat."""
    return (offsets[:, None] + np.arange(size)).reshape(-1)


class Memory:
    """The arrays of a launch, by address."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.next = 1 << 40

    def add(self, array: np.ndarray, name: str, *, written: bool = True, read_only: bool = False) -> int:
        """The address of a contiguous array, which stays the caller's: kernels write to it.

        written: False for an array whose contents nobody may rely on; it is filled with `POISON`.
        ValueError for one that is not contiguous.
        """
        expect(name, array.flags.c_contiguous, "a C-contiguous array", f"strides {array.strides}")
        address = self.next
        if not written:
            array.reshape(-1).view(np.uint8)[:] = POISON
        self.blocks.append(Block(name, address, array, written=written, read_only=read_only))
        self.next += -(-(array.nbytes + 256) // PAGE) * PAGE
        return address

    def block(self, address: int, size: int = 1) -> Block | None:
        """The owner of these bytes; None for nobody's."""
        found = self._near(address)
        return found if found is not None and address + size <= found.end else None

    def _near(self, address: int) -> Block | None:
        """The last array that does not begin behind the address."""
        place = bisect_right(self.blocks, address, key=lambda block: block.address)
        return self.blocks[place - 1] if place else None

    def describe(self, address: int) -> str:
        """The place of an address, for a message."""
        near = self._near(address)
        if near is None:
            return f"address {address:#x}, below all arrays"
        beyond = address - near.end
        where = f"byte {address - near.address}" if beyond < 0 else f"{beyond} bytes beyond the end"
        return f"address {address:#x}, {where} of {near.name} ({near.size} bytes)"


def shared_block(rank: int, size: int) -> Block:
    """A CTA's shared memory: poisoned, and nobody wrote it."""
    made = Block("shared memory", (rank << WINDOW) + SHARED_BASE, np.full(size, POISON, np.uint8), written=False)
    made.stale, made.before = np.zeros(size, np.bool_), np.zeros(size, np.uint8)
    return made
