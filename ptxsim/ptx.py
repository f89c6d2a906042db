"""PTX text to a program: entries, parameters, variables, and instructions with the source lines that they came from.

As NVRTC and Numba write it (PTX ISA §4, "Syntax", and §5, "State spaces, types, and variables"). No call, no function, no local
memory. Unknown text raises here, before anything runs.
"""

import re
from collections import ChainMap
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

BITS = {"pred": 1, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
BITS |= {f"{letter}{bits}": bits for letter in "bus" for bits in (8, 16, 32, 64)}
WORDS = {1: np.dtype(np.bool_)} | {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
# Statements that say nothing that an interpreter needs.
IGNORED = (
    *("version", "target", "address_size", "file", "minnctapersm", "maxnreg", "pragma"),
    *("explicitcluster", "loc", "noreturn"),
)
LIMITS = ("maxntid", "reqntid", "reqnctapercluster")  # of the sizes of launches: PTX ISA §11.4


class PtxError(ValueError):
    """Text that the machine can't run; it names what and the line."""


def require(right: object, what: str) -> None:
    """PtxError that says ``what``, unless it is right."""
    if not right:
        raise PtxError(what)


class Register(NamedTuple):
    place: int  # among the entry's
    bits: int


class Immediate(NamedTuple):
    value: int  # the bits; of a 64-bit word where it is negative


class Special(NamedTuple):
    name: str  # as tid.x


class Symbol(NamedTuple):
    name: str


class Label(NamedTuple):
    """The target of a branch."""

    target: int  # the instruction's number in its entry


Scopes = ChainMap[str, "Operand"]


class BranchTarget(NamedTuple):
    """The label that a branch names, which may come later, among the names of its block."""

    name: str
    scopes: Scopes


class Address(NamedTuple):
    """[base + offset], or of TMA [base, {coordinates}]."""

    base: "Operand"
    offset: int
    coordinates: tuple["Operand", ...] = ()


class Vector(NamedTuple):
    parts: tuple["Operand", ...]


class Pair(NamedTuple):
    """result|predicate"""

    first: "Operand"
    second: "Operand"


class Nothing(NamedTuple):
    """_: a result that nobody wants."""


Operand = Register | Immediate | Special | Symbol | Label | BranchTarget | Address | Vector | Pair | Nothing


class Line(NamedTuple):
    """A place in the source, and where it was inlined, innermost first."""

    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """The first line outside the wrappers of single instructions leads."""
        if not self.places:
            return "no source line"
        lead = next((p for p in self.places if PurePath(p[0]).name not in WRAPPERS), self.places[-1])
        rest = [p for p in self.places if p != lead]
        within = f" (by {', '.join(f'{PurePath(file).name}:{line}' for file, line in rest)})" if rest else ""
        return f"{PurePath(lead[0]).name}:{lead[1]}{within}"


WRAPPERS = ("ptx.cuh", "wgmma.cuh", "warp.py")  # files with an instruction a function, whose callers say more


@dataclass
class Statement:
    """``opcode`` with its modifiers apart; guard: (predicate's register, whether it is negated) or None."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None
    line: Line
    text: str
    number: int  # of the text's line

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))


class Variable(NamedTuple):
    space: str  # shared, global, const
    name: str
    alignment: int
    size: int
    data: bytes  # §5.4.4: zeros where the text gives no value
    external: bool


class EntryParameter(NamedTuple):
    name: str
    offset: int
    size: int
    kind: str  # as u64, f32; b8 of a struct


@dataclass
class Entry:
    """A kernel: its parameters by offset in their block, its registers' names and widths, its instructions.

    limits: the sizes of a launch that .maxntid, .reqntid and .reqnctapercluster say.
    """

    name: str
    parameters: list[EntryParameter]
    variables: list[Variable]
    names: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    instructions: list[Statement] = field(default_factory=list)
    limits: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> int:
        return max((p.offset + p.size for p in self.parameters), default=0)


@dataclass
class Program:
    """The contents of a PTX text."""

    entries: dict[str, Entry]
    variables: list[Variable]

    @classmethod
    def read(cls, text: str) -> "Program":
        """PtxError for what the machine does not know, with its text and line."""
        return _Reader(text).read()

    def entry(self, name: str | None = None) -> Entry:
        """The entry of this name; without a name the only one. PtxError if it does not exist."""
        if name is None and len(self.entries) == 1:
            return next(iter(self.entries.values()))
        require(name in self.entries, f"entry: expected one of {', '.join(self.entries)}, got {name!r}")
        return self.entries[str(name)]


_IGNORED = re.compile(rf"\.(?:{'|'.join((*IGNORED, *LIMITS))})\b")
# A statement is a directive of one line, a label, a brace, an entry with its parameters, or what ends in a semicolon.
_STATEMENT = re.compile(
    rf"{_IGNORED.pattern}[^\n]*|[\w$]+:|[{{}}]|(?:\.\w+\s+)*\.entry\b[^)]*\)|[^\s;][^;]*;",
)
_BREAK = re.compile(r"\n\s*")
_PART = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+")
_SECTION = re.compile(r"^\s*\.section\b", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
_VARIABLE = re.compile(
    r"(?P<how>(?:\.(?:visible|extern|weak|common)\s+)*)\.(?P<space>shared|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    r"\.(?P<type>\w+)\s+(?P<name>[\w$]+)(?P<array>\[\d*\])?(?:\s*=\s*(?P<data>.*))?$",
    re.DOTALL,
)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.number = text, 1
        self.files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
        self.program = Program({}, [])
        self.entry: Entry | None = None
        # Names of blocks (§4.4), of the entry's parameters, of the module and of the language.
        self.scopes: Scopes = ChainMap({"_": Nothing(), "WARP_SZ": Immediate(32)})
        self.line = Line(())
        self.chains: dict[tuple[int, ...], tuple[tuple[str, int], ...]] = {}

    def fail(self, what: str, text: str) -> PtxError:
        return PtxError(f"line {self.number}: {what}: {' '.join(text.split())[:200]}")

    def read(self) -> Program:
        before = _SECTION.split(self.text)[0]  # the rest is debugging data
        body = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), before)
        read = end = 0
        for statement in _STATEMENT.finditer(body):
            self.number += body.count("\n", read, statement.start())
            read, end = statement.start(), statement.end()
            self._take(_BREAK.sub(" ", statement[0].rstrip(";").strip()))
        if self.entry or body[end:].strip(" \t\n;"):
            raise self.fail("the text ends in", body[end:])
        require(self.program.entries, "text: expected PTX with an .entry, got none")
        return self.program

    def _take(self, text: str) -> None:
        if re.match(r"\.loc\s", text):
            self._loc(text)
        elif _IGNORED.match(text):
            name, *sizes = re.findall(r"\w+", text)
            if name in LIMITS and self.entry:
                self.entry.limits[name] = tuple(map(int, sizes))
        elif ".entry" in text.split("(", 1)[0]:
            self._entry(text)
        elif text == "{" and self.entry:
            self.scopes = self.scopes.new_child()
        elif text == "}" and self.entry:
            self.scopes = self.scopes.parents
            if len(self.scopes.maps) == 2:
                self.entry = None
        elif text.endswith(":") and self.entry:
            self._name(text[:-1], Label(len(self.entry.instructions)), text)
        elif text.startswith(".reg") and self.entry:
            self._registers(self.entry, text)
        elif found := _VARIABLE.match(text):
            self._variable(found, text)
        elif self.entry and text[0] != ".":
            self._instruction(self.entry, text)
        else:
            raise self.fail("unknown statement", text)

    def _name(self, name: str, what: Operand, text: str) -> None:
        """§4.4: a name is that of the block that declares it."""
        if name in self.scopes.maps[0]:
            raise self.fail("a second declaration", text)
        self.scopes[name] = what

    # --- Declarations --------------------------------------------------------------------------------------------------------

    def _loc(self, text: str) -> None:
        """.loc file line column[, function_name label, inlined_at file line column]: the chain hangs together by places."""
        numbers = [int(n) for n in re.findall(r"(?<![\w$])\d+(?![\w$])", text.split("function_name")[0])]
        inlined = re.search(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)", text)
        chain: tuple[tuple[str, int], ...] = ()
        if inlined:
            outer = tuple(map(int, inlined.groups()))
            chain = self.chains.get(outer, ((self.files.get(outer[0], "?"), outer[1]),))
        else:
            self.chains = {}
        self.line = Line(((self.files.get(numbers[0], "?"), numbers[1]), *chain))
        self.chains[tuple(numbers[:3])] = self.line.places

    def _entry(self, text: str) -> None:
        name, _, inside = text.partition(".entry")[2].partition("(")
        parameters, end = [], 0
        for stated in filter(str.strip, inside.rstrip(") ").split(",")):
            found = re.match(
                r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr.*?)?\s+([\w$]+)(?:\[(\d+)\])?\s*$", stated
            )
            if not found:
                raise self.fail("unknown parameter", stated)
            size, alignment = BITS[found[2]] // 8 * int(found[4] or 1), int(found[1] or BITS[found[2]] // 8)
            begin = -(-end // alignment) * alignment
            parameters.append(EntryParameter(found[3], begin, size, found[2]))
            end = begin + size
        self.scopes, self.chains = (
            ChainMap({one.name: Symbol(one.name) for one in parameters}, self.scopes.maps[-1]),
            {},
        )
        self.entry = self.program.entries[name.strip()] = Entry(name.strip(), parameters, [])

    def _registers(self, entry: Entry, text: str) -> None:
        kind, names = text.split(None, 2)[1:]
        for name in map(str.strip, names.split(",")):
            found = re.match(r"(%?[\w$]+)(?:<(\d+)>)?$", name)
            if not found or kind[1:] not in BITS:
                raise self.fail("unknown register", text)
            for number in range(int(found[2])) if found[2] else ("",):
                entry.names.append(f"{found[1]}{number}")
                self.scopes[entry.names[-1]] = Register(len(entry.widths), BITS[kind[1:]])
                entry.widths.append(BITS[kind[1:]])

    def _variable(self, found: re.Match[str], text: str) -> None:
        kind, count = found["type"], found["array"]
        if kind not in BITS:
            raise self.fail("unknown type", text)
        width, size = BITS[kind] // 8, BITS[kind] // 8 * (int(count[1:-1] or 0) if count else 1)
        values = [self._operand(part, text) for part in _split((found["data"] or "").strip("{} "))]
        if not all(isinstance(value, Immediate) for value in values):
            raise self.fail("expected numbers as initial values", text)
        data = b"".join((value.value % (1 << 8 * width)).to_bytes(width, "little") for value in values)  # type: ignore[union-attr]
        size = max(size, len(data))
        made = Variable(
            found["space"],
            found["name"],
            int(found["align"] or width),
            size,
            data.ljust(size, bytes(1)),
            "extern" in found["how"],
        )
        self._name(made.name, Symbol(made.name), text)
        known = self.entry.variables if self.entry else self.program.variables
        if any(variable.name == made.name for variable in known):
            raise self.fail("expected another name in another block", text)
        known.append(made)

    # --- Instructions --------------------------------------------------------------------------------------------------------

    def _instruction(self, entry: Entry, text: str) -> None:
        guard, rest = None, text
        if text[0] == "@":
            word, rest = text.split(None, 1)
            register = self._operand(word.lstrip("@!"), text)
            if not isinstance(register, Register):
                raise self.fail("unknown predicate", text)
            guard = register.place, "!" in word
        opcode, operands = [*rest.split(None, 1), ""][:2]
        parts = (
            (BranchTarget(operands.strip(), self.scopes),)
            if opcode in ("bra", "bra.uni")
            else tuple(self._operand(part, text) for part in _split(operands))
        )
        entry.instructions.append(Statement(opcode, parts, guard, self.line, text, self.number))

    def _operand(self, text: str, statement: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self._operand(part, statement) for part in _split(text[1:-1])))
        if text.startswith("["):
            base, *coordinates = _split(text[1:-1])
            at, _, offset = base.partition("+")
            added = self._operand(offset or "0", statement)
            inside = self._operand(coordinates[0], statement) if coordinates else Vector(())
            if not (isinstance(inside, Vector) and isinstance(added, Immediate)):
                raise self.fail("unknown address", statement)
            return Address(self._operand(at, statement), added.value, inside.parts)
        if "|" in text:
            return Pair(*(self._operand(part, statement) for part in text.split("|", 1)))
        if _NUMBER.match(text):
            return Immediate(int(re.sub(r"^(-?)0(?=\d)", r"\g<1>0o", text.rstrip("U")), 0))
        if found := _FLOAT.match(text):
            return Immediate(int(found[1] or found[2], 16))
        if text in self.scopes:
            return self.scopes[text]
        if text.startswith("%"):
            return Special(text[1:])
        raise self.fail(f"unknown operand {text!r}", statement)


def _split(text: str) -> list[str]:
    """At the commas that are in no brace or bracket."""
    return [part for part in _PART.findall(text) if part.strip()]
