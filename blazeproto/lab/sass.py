"""A kernel's machine code (SASS) in colours, beside the source lines that it came from.

>>> from blazeproto.lab import machine_code
>>> code = machine_code(bench.kernel)
>>> rich.print(code)                                # in Jupyter just: code
>>> rich.print(machine_code(bench.kernel, "wgmma.cuh"))

Kernels are compiled with ``-lineinfo``, which adds a table of lines to a cubin and changes no instruction; nvdisasm reads it.
Instructions stand as they lie in memory: the compiler mixes instructions of several lines, so a line appears more than once. An
instruction that it moves or merges may have a neighbour's line: of the eight HGMMA of ``up_forward`` one is put down to the loop
around it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from blazeproto.gemm.compile import Kernel
from blazeproto.lab.edit import line_of, refuse_changed
from blazeproto.lab.tables import Drawn  # before rich, for it says how to install that

# isort: split
from rich.columns import Columns
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

_Frames = tuple[tuple[str, int], ...]  # a line by path and number, then those that it was inlined at
# Instructions by their first word, as "CUDA Binary Utilities" lists Hopper's; colours are legible on white and on black.
_OTHER = "arithmetic, moves"
_KINDS = {
    "wgmma": ("#e0404f", "HGMMA IGMMA QGMMA BGMMA WARPGROUP WARPGROUPSET"),
    "cp.async, TMA": (
        "#e08020",
        "LDGSTS LDGDEPBAR DEPBAR UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    ),
    "barriers, fences": (
        "#a060d0",
        "SYNCS ARRIVES BAR B2R MEMBAR FENCE ERRBAR CGAERRBAR CCTL UCGABAR_ARV UCGABAR_WAIT ACQBULK",
    ),
    "shared memory": ("#2f9e44", "LDS LDSM STS STSM ATOMS STAS REDAS"),
    "global memory": ("#2f80d0", "LDG STG LD ST ATOM ATOMG RED REDG LDGMC LDL STL"),
    _OTHER: ("#808080", ""),
    "control flow": (
        "#b08050",
        "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSSY BSYNC BREAK BMOV RPCMOV WARPSYNC ELECT ENDCOLLECTIVE YIELD "
        "NANOSLEEP PREEXIT USETMAXREG BPT",
    ),
}
_KIND_OF = {name: kind for kind, (_, names) in _KINDS.items() for name in names.split()}

_SECTION = re.compile(r"^//-+ \.text\.(\S+)")
_FRAME = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
HTML_WIDTH = 200  # columns
_FIRST_WORD = re.compile(r"(?:@!?U?P\w+\s+)?(\w+)")


@dataclass(frozen=True)
class SourceLine:
    """A line of CUDA C++. file: as it is called in the folder of sources, number: from 1, text: without its indentation."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Instruction:
    """One of the machine's. address: in bytes from where the function begins.  label: by which branches name it, or empty."""

    address: int
    text: str
    label: str = ""

    @property
    def kind(self) -> str:
        """The instruction's kind in the legend: "wgmma", "shared memory", …"""
        match = _FIRST_WORD.match(self.text)
        return _KIND_OF.get(match[1], _OTHER) if match else _OTHER


@dataclass(frozen=True)
class InlinedCode:
    """Instructions that follow each other and came from one line.

    line: where they are written; None where the compiler names none.  calls: the lines that this one was inlined at, the nearest
    first.  function: whose code it is.
    """

    function: str
    line: SourceLine | None
    calls: tuple[SourceLine, ...]
    instructions: tuple[Instruction, ...]

    def source(self) -> Iterator[Text]:
        """The line, and those that it was inlined at."""
        if self.line is None:
            yield Text("no source line", style="dim")
            return
        yield Text.assemble((f"{self.line}  ", "bold"), self.line.text)
        if self.calls:
            yield Text("  in " + " < ".join(map(str, self.calls)), style="dim")

    def listing(self) -> Iterator[Text]:
        """The instructions and their labels."""
        for instruction in self.instructions:
            if instruction.label:
                yield Text(f"{instruction.label}:", style="dim")
            colour, _ = _KINDS[instruction.kind]
            yield Text.assemble((f"{instruction.address:05x}  ", "dim"), (instruction.text, colour))


@dataclass(frozen=True, repr=False)
class MachineCode(Drawn):
    """The machine code of a kernel. Rich and Jupyter show it in colours.  total: the number of instructions, shown or not."""

    width = HTML_WIDTH
    entry: str
    groups: tuple[InlinedCode, ...]
    total: int

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all groups."""
        return [instruction for group in self.groups for instruction in group.instructions]

    @property
    def kinds(self) -> dict[str, int]:
        """The number of instructions of each kind of the legend."""
        counts = Counter(instruction.kind for instruction in self.instructions)
        return {kind: counts[kind] for kind in _KINDS}

    def _title(self) -> str:
        shown = len(self.instructions)
        part = f"{shown:,} of {self.total:,}" if shown < self.total else f"{shown:,}"
        lines = len({group.line for group in self.groups})
        return f"{self.entry}: {part} instructions of {lines:,} source lines"

    def __repr__(self) -> str:
        return f"MachineCode({self._title()})"

    def __rich__(self) -> Group:
        legend = Columns(Text(f"■ {kind} {count:,}", _KINDS[kind][0]) for kind, count in self.kinds.items())
        table = RichTable(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0), pad_edge=False)
        for _ in ("source", "instructions"):
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for group in self.groups:
            table.add_row(*(Text("\n").join(lines) for lines in (group.source(), group.listing())))
        return Group(Text(self._title(), style="bold"), legend, table)


def machine_code(kernel: Kernel, lines: str | None = None) -> MachineCode:
    """The instructions of ``kernel``, grouped by the source lines that they came from.

    kernel: `Workbench.kernel`, or one of `gemm.kernel_for`; compiled if need be. Lines are read in its own folder of sources, so
    an edited kernel shows edited lines.  lines: which of them to show, all by default: a file ("up.cu"), a line ("up.cu:172"),
    or else a regular expression that is searched for in "file:number" and in the line's text.

    TypeError for what is no kernel or no text. ValueError for a kernel whose files have changed since it was compiled, or without
    line information, for what is no regular expression, and for one that no line has. FileNotFoundError without nvdisasm.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel: expected a Kernel, got {type(kernel).__name__}")
    refuse_changed(kernel)
    if not (lines is None or isinstance(lines, str)):
        raise TypeError(f"lines: expected a file or a regular expression, got {type(lines).__name__}")
    try:
        pattern = re.compile(lines or "")
    except re.error as error:
        raise ValueError(f"lines: expected a file or a regular expression, got {lines!r}: {error}") from None
    groups = tuple(_parse(kernel.disassemble("--print-line-info-inline"), kernel))
    if all(group.line is None for group in groups):
        raise ValueError(f"kernel: expected one compiled with line information (-lineinfo), got {kernel!r}")
    code = MachineCode(kernel.entry, groups, sum(len(group.instructions) for group in groups))
    return code if lines is None else replace(code, groups=_matching(groups, lines, pattern))


def _matching(groups: tuple[InlinedCode, ...], wanted: str, pattern: re.Pattern[str]) -> tuple[InlinedCode, ...]:
    """Those of a file or a line of that name, or else of the lines that the expression is found in."""
    written = [(group, group.line) for group in groups if group.line]
    found = tuple(group for group, line in written if wanted in (line.file, str(line)))
    found = found or tuple(group for group, line in written if pattern.search(str(line)) or pattern.search(line.text))
    if not found:
        files = ", ".join(sorted({line.file for _, line in written}))
        raise ValueError(
            f"lines: expected a file, or what is found in a line with instructions, got {wanted!r}; files: {files}"
        )
    return found


# --- What nvdisasm prints --------------------------------------------------------------------------------------------------


def _parse(disassembly: str, kernel: Kernel) -> Iterator[InlinedCode]:
    """Groups of what nvdisasm prints with ``--print-line-info-inline``.

    Before an instruction of another line stand that line and, one to a row, those that it was inlined at.
    """

    @cache
    def source_line(path: str, number: int) -> SourceLine:
        found, name = _source_file(Path(path), kernel)
        return SourceLine(name, number, line_of(found, number))

    for (function, frames), found in groupby(_instructions(disassembly), key=lambda row: row[:2]):
        lines = [source_line(*frame) for frame in frames]
        yield InlinedCode(function, lines[0] if lines else None, tuple(lines[1:]), tuple(row[2] for row in found))


def _instructions(disassembly: str) -> Iterator[tuple[str, _Frames, Instruction]]:
    """Each with its function and frames."""
    function, label = "", ""
    frames: _Frames = ()
    after_frame = False
    for row in disassembly.splitlines():
        if frame := _FRAME.match(row):
            frames = (*(frames if after_frame else ()), (frame[1], int(frame[2])))
        elif instruction := _INSTRUCTION.match(row):
            yield function, frames, Instruction(int(instruction[1], 16), instruction[2], label)
            label = ""
        elif section := _SECTION.match(row):
            function, frames = section[1], ()
        elif named := _LABEL.match(row):
            label = named[1]
        after_frame = frame is not None


def _source_file(path: Path, kernel: Kernel) -> tuple[Path, str]:
    """Where a file that the compiler was given lies now, and what to call it.

    A cubin out of the cache may have been compiled from another copy of the same sources.
    """
    if path.name == kernel.path.name:
        return kernel.path, kernel.path.name
    for begin in range(1, len(path.parts)):
        name = Path(*path.parts[begin:])
        if (kernel.folder / name).is_file():
            return kernel.folder / name, name.as_posix()
    return path, path.name  # a header of CUDA
