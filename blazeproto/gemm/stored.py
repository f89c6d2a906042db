"""A frozen weight as a launch takes it: a kernel decodes it to bf16 between load and tensor core (cuda/stored.cuh)."""

from typing import Any, NamedTuple

from blazeproto.gemm.tiles import ELEMENTS, Element
from blazeproto.runtime import checks

RUN = 32  # numbers of a row that a thread decodes at a time: one scale
FORMATS = {"mxfp4": 1, "int4": 2, "nf4": 3, "fp8": 4}
"""STORED of a format's kernels (cuda/stored.cuh), by the name that `blazeproto.stored` has for it."""


class Storage(NamedTuple):
    """All of a frozen weight that a kernel is compiled for.

    format: a name of `FORMATS`.  rows, columns: the block of numbers that share a scale.  scale_bytes: of a scale.
    zeros: whether the weight has zero points.
    """

    format: str
    rows: int
    columns: int
    scale_bytes: int
    zeros: bool = False

    @property
    def element(self) -> Element:
        """The type of its numbers."""
        return ELEMENTS.get(self.format) or ELEMENTS["e4m3"]

    @property
    def macros(self) -> dict[str, int | str]:
        """The macros of cuda/stored.cuh."""
        blocks = {"BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns}
        return {"STORED": FORMATS[self.format], **blocks, "SCALE_BYTES": self.scale_bytes, "HAS_ZEROS": self.zeros}


class Packed(NamedTuple):
    """values, scales, zeros (or None): the tensors of a `StoredWeight`.  shape: (E, out, in)."""

    values: Any
    scales: Any
    zeros: Any
    storage: Storage
    shape: tuple[int, int, int]


def packed(weight: Any) -> Packed:
    """A `StoredWeight` as a launch takes it. ValueError for a format or a block that no kernel decodes."""
    values, scales, zeros = weight.tensors
    checks.require(weight.format in FORMATS, "weight", f"a format of {', '.join(FORMATS)} for kernels", weight.format)
    rows, columns = weight.block
    checks.require(columns % RUN == 0, "weight", f"scales of a multiple of {RUN} numbers for kernels", columns)
    storage = Storage(weight.format, rows, columns, scales.element_size(), zeros is not None)
    return Packed(values, scales, zeros, storage, tuple(weight.shape))
