"""Layouts: of the operands in a stage of shared memory, and of the accumulators in registers.

>>> from blazeproto.lab import fragment, swizzle
>>> swizzle("up_forward", "a").offset(row=3, chunk=0)        # 3 * 128 + 3 * 16 bytes into the stage
>>> fragment("up_forward").holder(row=9, column=2)           # (thread of the warpgroup, its register)

Both are facts of the PTX ISA manual ("Asynchronous warpgroup level matrix instructions": strides and swizzling modes; register
fragments of wgmma.mma_async m64nNk16), as gemm/cuda/wgmma.cuh has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as every
from typing import TYPE_CHECKING

import numpy as np

from blazeproto.gemm.registry import kernel_for
from blazeproto.gemm.tiles import BF16, BK, BM, CHUNK, WARPGROUP, TileConfig
from blazeproto.lab.svg import Picture, blank
from blazeproto.runtime import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_BYTES = 128  # of a swizzled row
PANEL = ROW_BYTES // BF16.bytes  # operands in one
CHUNK_BYTES = CHUNK * BF16.bytes
CHUNKS = ROW_BYTES // CHUNK_BYTES
PATTERN = 8  # rows after which the swizzle repeats
STRIP = 64  # rows of a wgmma
WARP = 32
COLOURS = ("#f4cccc", "#fce5cd", "#fff2cc", "#d9ead3", "#d0e0e3", "#cfe2f3", "#d9d2e9", "#ead1dc")
CELL_WIDTH, CELL_HEIGHT = 74, 22  # of the drawings, SVG units


class Grid(Picture):
    """Cells in rows and columns, each with a colour of COLOURS.

    corner: of the text, what its columns count.  step: from column to column.  lines: that are shown.  width: of a cell, in
    characters.
    """

    corner, step, lines, width = "byte of a row", CHUNK_BYTES, PATTERN, 10

    def _heading(self) -> list[str]:
        raise NotImplementedError

    def _cell(self, row: int, place: int) -> str:
        raise NotImplementedError

    def _colour(self, row: int, place: int) -> int:
        """One for each chunk."""
        return place ^ row

    def __repr__(self) -> str:
        places = "".join(f"{place * self.step:>{self.width}}" for place in range(CHUNKS))
        text = [*self._heading(), "", self.corner + places]
        for row in range(self.lines):
            cells = "".join(f"{self._cell(row, place):>{self.width}}" for place in range(CHUNKS))
            text.append(f"row {row}".ljust(len(self.corner)) + cells)
        return "\n".join(text)

    def figure(self) -> Figure:
        """The same, coloured."""
        made, ax = blank(CELL_WIDTH * (CHUNKS + 1), CELL_HEIGHT * (self.lines + 4), "\n".join(self._heading()))
        from matplotlib.colors import ListedColormap

        shades = [[self._colour(y, x) % len(COLOURS) for x in range(CHUNKS)] for y in range(self.lines)]
        ax.pcolormesh(shades, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS), edgecolors="white", linewidth=2)
        for y, x in every(range(self.lines), range(CHUNKS)):
            ax.text(x + 0.5, y + 0.5, self._cell(y, x), ha="center", va="center", size=8, family="monospace")
        ax.xaxis.tick_top()
        name = self.corner.split()[0]
        ax.set_xticks([x + 0.5 for x in range(CHUNKS)], [f"{name} {place * self.step}" for place in range(CHUNKS)])
        ax.set_yticks([y + 0.5 for y in range(self.lines)], [f"row {row}" for row in range(self.lines)])
        return made


@dataclass(frozen=True, repr=False)
class StageLayout(Grid):
    """An operand's part of a stage: rows of 128 bytes, whose 16-byte chunks change places (128-byte swizzle). Shown are the first
    eight rows, a colour for each chunk.

    operand: "a" or "b".  length: its rows (a) or columns (b) of a tile.  k: elements of the reduction in a stage.
    mn_major: False: a row is 64 consecutive k of one of the length. True: a row is 64 of the length, of one k; every 64 are a
    panel of k rows, and panels follow each other.  start: bytes from the stage's begin.
    """

    product: str
    operand: str
    length: int
    mn_major: bool
    start: int
    k: int = BK

    @property
    def rows(self) -> int:
        """The rows of a panel."""
        return self.k if self.mn_major else self.length

    @property
    def panels(self) -> int:
        return self.length // PANEL if self.mn_major else 1

    def offset(self, row: int, chunk: int, panel: int = 0) -> int:
        """The offset of a chunk of 8 elements, in bytes from the operand's begin. ValueError for a chunk outside the operand."""
        _within(row=(row, self.rows), chunk=(chunk, CHUNKS), panel=(panel, self.panels))
        return (panel * self.rows + row) * ROW_BYTES + (chunk ^ row % PATTERN) * CHUNK_BYTES

    def element(self, index: int, k: int) -> int:
        """The offset of element (index, k), in bytes from the operand's begin. index: the tile's row (a) or column (b)."""
        row, along = (k, index) if self.mn_major else (index, k)
        panel, within = divmod(along, PANEL)
        return self.offset(row, within // CHUNK, panel) + within % CHUNK * BF16.bytes

    @property
    def bytes(self) -> int:
        return self.length * self.k * BF16.bytes

    def holding(self, data: np.ndarray, written: np.ndarray) -> StageContents:
        """The contents with this layout. data: the operand's bytes, uint8 (bytes,).  written: True for each byte written,
        (bytes,).

        ValueError for another number of bytes.
        """
        if not len(data) == len(written) == self.bytes:
            raise ValueError(f"data, written: expected {self.bytes} bytes, got {len(data)} and {len(written)}")
        return StageContents(self, data, written)

    def _heading(self) -> list[str]:
        name = "row" if self.operand == "a" else "column"
        major = "MN" if self.mn_major else "K"
        row = f"64 {name}s of one k" if self.mn_major else f"64 k of one {name}"
        parts = f"{self.panels} panels of {self.rows} rows" if self.mn_major else f"{self.rows} rows"
        return [
            f"{self.product}, operand {self.operand}: {self.length} {name}s x {self.k} k, {major}-major, 128-byte swizzle",
            f"{parts}, each {row}; {self.bytes} bytes from byte {self.start} of a stage; every {PATTERN} rows alike",
        ]

    def _cell(self, row: int, place: int) -> str:
        """What lies in a 16-byte place of a row."""
        chunk = place ^ row % PATTERN
        unit = ("m" if self.operand == "a" else "n") if self.mn_major else "k"
        return f"{unit} {chunk * CHUNK}..{chunk * CHUNK + CHUNK - 1}"


@dataclass(frozen=True, repr=False)
class StageContents(Grid):
    """The contents of an operand's part of a stage, bf16. data: its bytes, as they lie.  written: True for each byte written."""

    width = 14
    layout: StageLayout
    data: np.ndarray
    written: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        """fp32 (length, k): the operand, out of the swizzle; NaN where nobody wrote."""
        layout = self.layout
        order = [
            layout.offset(row, chunk, panel)
            for panel, row, chunk in every(range(layout.panels), range(layout.rows), range(CHUNKS))
        ]
        chunks = np.array(order).reshape(layout.panels, layout.rows, CHUNKS) // CHUNK_BYTES
        values = self._values()[chunks].reshape(layout.panels, layout.rows, PANEL)
        lines = values.transpose(1, 0, 2).reshape(layout.rows, -1)
        return lines.T if layout.mn_major else lines

    def _values(self) -> np.ndarray:
        """fp32 (chunks, 8), in the order of the bytes."""
        values = (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return np.where(self.written[:: BF16.bytes], values, np.nan).reshape(-1, CHUNK)

    def _heading(self) -> list[str]:
        said = f"{int(self.written.sum())} of {self.layout.bytes} bytes are written; below, the first number of each 16 bytes"
        return [*self.layout._heading(), said]

    def _cell(self, row: int, place: int) -> str:
        value = self._values()[row * CHUNKS + place][0]
        where = self.layout._cell(row, place).partition("..")[0]
        return f"{where}: {'-' if np.isnan(value) else f'{value:.2g}'}"


def swizzle(product: str = "up_forward", operand: str = "a", *, config: TileConfig | None = None) -> StageLayout:
    """The layout of an operand in a stage of a product's ring.

    product: a name of `gemm.PRODUCTS` that is made of tiles.  operand: "a", the tile's rows, or "b", its columns.
    config: its tiles; default: from the table. ValueError for an unknown product or operand.
    """
    checks.one_of("operand", operand, ("a", "b"))
    kernel = kernel_for(product, config)
    weights = kernel.file == "weight.cu"  # WeightProducer: both operands are MN-major; RowProducer: a never is
    mn_major = weights or (operand == "b" and bool(kernel.defines["B_MN"]))
    length = BM if operand == "a" else int(kernel.defines["BN"])
    return StageLayout(product, operand, length, mn_major, 0 if operand == "a" else BM * BK * BF16.bytes)


@dataclass(frozen=True, repr=False)
class Fragment(Grid):
    """Maps each accumulator to the thread that holds it, for a strip of 64 rows by ``columns``, after ``wgmma.m64nNk16``:
    one warpgroup, columns / 2 fp32
    registers a thread. Rows and columns are the strip's. Shown are the first warp's 16 rows by 8 columns, a colour for each group
    of four lanes.
    """

    corner, step, lines, width = "column  ", 1, 16, 9
    product: str
    columns: int

    def holder(self, row: int, column: int) -> tuple[int, int]:
        """(thread of the warpgroup, its register) of the accumulator in a row and a column. ValueError outside the strip."""
        _within(row=(row, STRIP), column=(column, self.columns))
        warp, low = divmod(row, 16)
        h, row_of_eight = divmod(low, 8)
        j, pair = divmod(column, 8)
        return WARP * warp + 4 * row_of_eight + pair // 2, 4 * j + 2 * h + pair % 2

    def place(self, thread: int, register: int) -> tuple[int, int]:
        """(row, column) of a thread's register: the inverse of `holder`. ValueError for one that is not there."""
        _within(thread=(thread, WARPGROUP), register=(register, self.columns // 2))
        warp, lane = divmod(thread, WARP)
        j, rest = divmod(register, 4)
        h, i = divmod(rest, 2)
        return 16 * warp + 8 * h + lane // 4, 8 * j + 2 * (lane % 4) + i

    def _heading(self) -> list[str]:
        return [
            f"{self.product}: accumulators of a strip, 64 x {self.columns}, wgmma.m64n{self.columns}k16; thread:register",
            f"8 columns on: 4 registers on, to d[{self.columns // 2 - 1}]. 16 rows on: the next warp, 32 threads on",
        ]

    def _cell(self, row: int, column: int) -> str:
        thread, register = self.holder(row, column)
        return f"t{thread}:d{register}"

    def _colour(self, row: int, column: int) -> int:
        return self.holder(row, column)[0] // 4


def fragment(product: str = "up_forward", *, config: TileConfig | None = None) -> Fragment:
    """Maps accumulators to threads and registers of a consumer warpgroup.

    product: a name of `gemm.PRODUCTS` that is made of tiles.  config: its tiles; default: from the table. ValueError for an
    unknown product.
    """
    return Fragment(product, int(kernel_for(product, config).defines["BN"]))


def _within(**named: tuple[int, int]) -> None:
    """Refuses a value that is not below its count."""
    for name, (value, count) in named.items():
        if not 0 <= checks.integer(name, value) < count:
            raise ValueError(f"{name}: expected 0 to {count - 1}, got {value}")
