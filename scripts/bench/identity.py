"""What a figure is a figure of: the kernels that were launched while it was measured, and the benchmark that measured it.

An identity is a hash that a comment, white space, a docstring and other host code leave as it is. It is made of

    CUDA kernels     what the preprocessor leaves of the source for the kernel's macros: code of other variants is not in it
    Numba kernels    the syntax trees of the kernel and of the device functions that it calls, and the values of their constants
    benchmarks       the syntax trees of the function that makes a row and of all that it calls in scripts/, and their constants

A results file has every kernel's description beside its identity. `is_current` makes the kernel of the description again, from
the sources that are here, and compares. What else decides a time, and is in no identity: libraries, whose versions each row has,
grids, and which of several kernels the host chooses; but `has_other_tiles` says whether a product's tiles are others now.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from types import CellType, FunctionType, ModuleType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np

from blazeproto.gemm.compile import Kernel
from blazeproto.runtime import driver
from blazeproto.runtime.numba_kernel import NumbaKernel
from scripts.bench.layer_tiles import has_other_tiles

Description = dict[str, Any]  # of a kernel: what it is made again from

DIGITS = 16  # of an identity
KERNELS: dict[str, Description] = {}
"""The description of every kernel that a row has, by its identity: of rows made here, and of files that were read."""


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]


# ------------------------------------------------------------------------------------------------------- CUDA kernels


def preprocessed(source: str) -> str:
    """A CUDA source without comments, white space, and what its macros leave out. RuntimeError where it is malformed."""
    import pcpp  # type: ignore[import-untyped]

    class Preprocessor(pcpp.Preprocessor):  # type: ignore[misc]
        def on_include_not_found(self, *_: object) -> None:  # CUDA's own headers
            raise pcpp.OutputDirective(pcpp.Action.IgnoreAndPassThrough)

        def on_error(self, file: str, line: int, message: str) -> None:
            raise RuntimeError(f"{file}:{line}: {message}")

    made, text = Preprocessor(), io.StringIO()
    made.line_directive = None
    made.parse(source)
    made.write(text)
    return "".join(text.getvalue().split())


def _cuda_identity(kernel: Kernel) -> str:
    options = [option for option in kernel.options if not option.startswith("-D")]
    defines = (option[2:].replace("=", " ", 1) for option in kernel.options if option.startswith("-D"))
    source = "\n".join([*(f"#define {define}" for define in defines), kernel.source])
    launch = (kernel.threads, kernel.start_registers, kernel.dynamic_smem)
    return _digest([kernel.entry, str(launch), *kernel.arch.options, *options, preprocessed(source)])


# ------------------------------------------------------------------------------------------- Python: kernels, benchmarks


@cache
def _functions_of(file: str) -> dict[tuple[str, int], list[Any]]:
    """The functions and lambdas of a file by name and first line, decorators included."""
    found: dict[tuple[str, int], list[Any]] = {}
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min(each.lineno for each in (node, *node.decorator_list))
            found.setdefault((node.name, line), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
    return found


ASIDE = ("annotation", "returns", "decorator_list")  # of a syntax tree


def tree(node: Any) -> str:
    """A syntax tree as text, the same for every version of Python; without docstrings, annotations and decorators."""
    if isinstance(node, list):
        return f"[{' '.join(map(tree, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    inside = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if (
        isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and ast.get_docstring(node, clean=False) is not None
    ):
        inside["body"] = node.body[1:]
    parts = (f"{name}={tree(value)}" for name, value in inside.items() if name not in ASIDE)
    return f"{type(node).__name__}({' '.join(parts)})"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, but for what `tree` leaves out."""
    yield node
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and name not in ASIDE:
                yield from _nodes(each)


def _module_of(value: Any) -> str:
    """The name of a module, or of what a module defines; of a program that runs, its own."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    program = sys.modules[name].__spec__ if name == "__main__" else None
    return program.name if program else str(name)


DEVICE_OPTIONS = {"fastmath": False, "inline": "always", "opt": True}
"""Of a Numba device function, as `warp.device` has them: only others are in an identity."""
MADE_BY_PYTHON = (
    "__module",
    "__doc",
    "__q",
    "__match",
    "__first",
    "__slotnames",
    "__static",
    "__anno",
    "__dataclass",
    "_field_",
)
"""How names in a class begin that nobody wrote."""


class Code:
    """All code of some packages that a function uses, found from the objects: what its closure and its globals hold.

    parts: syntax trees of functions, and values of constants by name.
    """

    def __init__(self, root: Any, packages: tuple[str, ...]) -> None:
        self.packages, self.parts, self.seen = packages, set[str](), dict[int, Any]()
        self.add("", root)

    @property
    def identity(self) -> str:
        return _digest(sorted(self.parts))

    def add(self, name: str, value: Any) -> None:
        options = DEVICE_OPTIONS | getattr(value, "targetoptions", {})
        other = {each: options[each] for each in DEVICE_OPTIONS if options[each] != DEVICE_OPTIONS[each]}
        if other:
            self.parts.add(f"{name}: {other}")
        # What Numba's device functions, its intrinsics and functools wrap.
        for wrapper in ("py_func", "_defn", "__wrapped__", "fget", "__func__"):
            if wrapper == "__wrapped__" and isinstance(value, FunctionType) and hasattr(value, wrapper):
                self.add_code(value)  # of a decorator
            value = getattr(value, wrapper, value)
        if isinstance(value, functools.partial):
            value = (value.func, value.args, value.keywords)
        if isinstance(value, Mapping):
            value = (*value.items(),)
        if isinstance(value, set | frozenset):
            value = (*sorted(value, key=repr),)
        if isinstance(value, tuple | list) and len(value):
            for index, each in enumerate(value):
                self.add(f"{name}[{index}]", each)
        elif isinstance(value, FunctionType | type) and _module_of(value).startswith(self.packages):
            self.add_code(value)
        elif not isinstance(value, ModuleType | FunctionType):
            self.parts.add(f"{name} = {_text_of(value)}")
            if _module_of(type(value)).startswith(self.packages) and id(value) not in self.seen:
                self.seen[id(value)] = value
                self.add_code(type(value))
                for attribute, each in getattr(value, "__dict__", {}).items():
                    self.add(f"{name}.{attribute}", each)

    def add_code(self, value: Any) -> None:
        """A function or a class, once, if it stands in the packages."""
        module = value.__globals__["__name__"] if isinstance(value, FunctionType) else ""
        module = _module_of(value) if module in ("", "__main__") else module  # a decorator's is not what it takes
        if module.startswith(self.packages) and module != __name__ and id(value) not in self.seen:
            self.seen[id(value)] = value
            self.add_members(value) if isinstance(value, type) else self.add_function(value)

    def add_members(self, value: type) -> None:
        functions = FunctionType | property | staticmethod | classmethod
        constants = int | float | str | tuple | list | dict | set | frozenset
        for name, member in vars(value).items():
            if isinstance(member, functions | constants) and not name.startswith(MADE_BY_PYTHON):
                self.add(f"{value.__qualname__}.{name}", member)
        for base in value.__bases__:
            self.add_code(base)

    def add_function(self, function: FunctionType) -> None:
        code, where = function.__code__, f"{_module_of(function)}.{function.__qualname__}"
        if code.co_filename.startswith("<"):  # what dataclasses and named tuples make
            return
        # Those of several lambdas in one line are all taken.
        trees = _functions_of(code.co_filename).get((code.co_name, code.co_firstlineno), [])
        self.parts.update(f"{where}: {tree(each)}" for each in trees)
        nodes = [node for each in trees for node in _nodes(each)]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        own = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        known = function.__globals__
        used = {name.id: known[name.id] for name in names if name.id in known and name.id not in own}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        used |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        for name, value in used.items():
            if value is sys.modules[__name__]:  # says what a figure is of: no part of what makes it
                continue
            if isinstance(value, ModuleType) and _module_of(value).startswith(self.packages):
                for attribute in attributes & vars(value).keys():
                    self.add(f"{name}.{attribute}", vars(value)[attribute])
            else:
                self.add(f"{where} {name}", value)


def _text_of(value: Any) -> str:
    """A constant as text that tells it from others, on every machine."""
    if value is None or isinstance(value, int | float | str | bytes):
        return repr(value)
    if isinstance(value, np.ndarray):  # whose text leaves out digits and places
        return f"{value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if value == REPOSITORY:  # lies in a folder of any name
        return "the repository"
    text = value.name if isinstance(value, PurePath) else getattr(value, "__name__", None) or str(value)
    return type(value).__name__ if " at 0x" in text else str(text)


def _numba_identity(kernel: NumbaKernel) -> str:
    code = Code(kernel.function, ("blazeproto.",)).identity
    return _digest([kernel.name, str(kernel.parameters), str((kernel.threads, kernel.min_blocks)), code])


TIMED_BY = ("scripts.", "blazeproto.lab.times")  # where what times a figure stands
# The router's floor is blazeproto.cost's, to the digit; the exchange's had a checkout's path in it. A row has its sizes under
# other names. A models' row borrows no figure of another run, and one more program can be measured. The language model's trainer
# compares checksums and refuses options that do nothing. What launches blazeproto's kernels gives the backend a record, whose
# class moved, and the launches of quantized operands have other names. What keeps the kernels from running has another name.
AS_BEFORE = {
    "0934be240837f86d": "338d3e0ffcef8934",  # scripts.bench.router.measure
    "6bb3e78b8fa01ba1": "8229904c33236c82",  # scripts.bench.distributed.weak_scaling
    "193b1a374887dad8": "f3d7dfbeb5137d3d",  # scripts.bench.distributed.losses
    "6f5873371f6d8013": "dc256b1a0d23245b",  # scripts.bench.expert_parallel.measure
    "6fca11a6ce220cd5": "f487aae5d2d596e7",  # scripts.bench.expert_parallel.measure_torchs
    "e90fa147c2e681b7": "f487aae5d2d596e7",  # scripts.bench.expert_parallel.measure_torchs
    "018f31ac54ebf294": "5b1a89a4e527d6f1",  # scripts.bench.models.layers.decode
    "0a1a00da1934b126": "b42d62887995c876",  # scripts.bench.models.layers.liger
    "81568987246788d1": "9f61c5c6d1bdf746",  # scripts.bench.models.layers.models
    "0527f1e7f8bda857": "6d7a9c84bde26de3",  # scripts.bench.models.layers.quack
    "315abaa9ea29451c": "d827297762c04cf6",  # scripts.bench.models.layers.skew
    "12525638eb3c72ef": "7ef367d94c1926ef",  # scripts.bench.models.megablocks.micro_batch
    "3c6b66779da873bc": "9e6446864a1b4c47",  # scripts.bench.blocksparse.measure_layers
    "17a2d1d0177fa977": "143baebe95008f3a",  # scripts.bench.blocksparse.measure_others
    "46cd499ea5760897": "402d7dd74e9da491",  # scripts.bench.extras.bounded_workspace
    "dcf15b5ee66f1b51": "5808f32a0601d7c1",  # scripts.bench.extras.four_million_tokens
    "cd299a9da41173e5": "aa510345da02bd83",  # scripts.bench.extras.skewed_routing
    "478a7e76c2858201": "1a80be1c1c9f4bac",  # scripts.bench.fp8.check
    "c744450bc572db3a": "ae8dce0da97bc7dc",  # scripts.bench.fp8.in_a_row
    "22997ac49692f5de": "3ae315f2913680e5",  # scripts.bench.fp8.layer
    "7657ad5e66b167d4": "990b7a77b18ab964",  # scripts.bench.fp8.products
    "5b5ab315b667b24f": "e20c56e5f4b6c114",  # scripts.bench.fp8_peers.layers
    "e620daa0b8275559": "1a07158d5655d1f2",  # scripts.bench.headline.run_of
    "58630920b97628e5": "c2952f98bdcd2dad",  # scripts.bench.layer.measure
    "85c6ed861b5685eb": "79d5c6255a099e5d",  # scripts.bench.lora.measure
    "0ce7b291ff95e0a2": "e151859d12c8d391",  # scripts.bench.models.layers.choices
    "2976600ee6bb3634": "0bd740520cd82165",  # scripts.bench.models.layers.padding
    "944c27ffa1eaf7f0": "d2e093481aa6127c",  # scripts.bench.module.measure
    "13733e8f5c4e1967": "a1247020c34f1be4",  # scripts.bench.paper.kernels.gather
    "a79688d047be3610": "f97620d8f111479c",  # scripts.bench.paper.kernels.kernel_times
    "61c7250fa7b8686c": "f4c5ab440fdbecf8",  # scripts.bench.paper.kernels.scores_gradient
    "571cbacd639e611f": "e9c1b2a219093bc0",  # scripts.bench.paper.kernels.token_rounding
    "1256d94c08370a81": "019fed3061d7343f",  # scripts.bench.paper.layers.ablation
    "62d7d70d4d33de8e": "b6863781d19a5f70",  # scripts.bench.paper.layers.against_all
    "1901cb40738016f3": "43ca5d688a9c04ff",  # scripts.bench.paper.layers.against_megablocks
    "17ad9678ee5b4ff7": "9e4129bcb0f17d02",  # scripts.bench.paper.layers.combines
    "9429517690ba491e": "6fa9e6b76950743f",  # scripts.bench.paper.steps.activations
    "ecb0635c3298e60c": "a7a2a1e65a5633c7",  # scripts.bench.paper.steps.policies
    "ab57d6b1d6cc5775": "00220b27191ad3ae",  # scripts.bench.paper.steps.waterfall
}
"""By the identity of an earlier form of a benchmark, that of today's, which times the same and computes the same from it."""
REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).parent / "peers"  # are imported by name, so that objects don't lead to them


@cache
def protocol_identity(name: str) -> str:
    """The identity of the function that makes a row, by its module and name; "" where there is none of this name."""
    module, _, function = name.rpartition(".")
    try:
        code = Code(getattr(importlib.import_module(module), function), TIMED_BY)
    except (ImportError, AttributeError):
        return ""
    if any(part.startswith("scripts.bench.peers") for part in code.parts):
        code.parts |= {tree(ast.parse(file.read_bytes())) for file in PEERS.glob("*.py")}
    return code.identity


# ------------------------------------------------------------------------------------------------ kernels of both kinds


def described(kernel: Kernel | NumbaKernel) -> Description:
    """What `made_again` makes the kernel of."""
    if isinstance(kernel, NumbaKernel):
        names = ("threads", "min_blocks", "constants")
        make = {"make": f"{kernel.make.__module__}.{kernel.name}", "parameters": " ".join(kernel.parameters)}
        return make | {name: getattr(kernel, name) for name in names}
    fixed = ("file", "entry", "dynamic_smem", "threads", "start_registers")
    values = {name: getattr(kernel, name) for name in fixed}
    return values | {"defines": dict(kernel.defines), "options": [*kernel.options]}


def made_again(description: Description) -> Kernel | NumbaKernel:
    """The kernel of a description, from the sources that are here. ImportError, AttributeError, TypeError where there is none."""
    given = dict(description)
    if "file" in given:
        return Kernel(**given | {"options": tuple(given["options"])})
    module, _, name = given.pop("make").rpartition(".")
    make = getattr(importlib.import_module(module), name)
    return NumbaKernel(make, given.pop("parameters"), **given.pop("constants"), **given)


_IDENTITIES: WeakKeyDictionary[Kernel | NumbaKernel, str] = WeakKeyDictionary()


def identity(kernel: Kernel | NumbaKernel) -> str:
    if kernel not in _IDENTITIES:
        made = _cuda_identity(kernel) if isinstance(kernel, Kernel) else _numba_identity(kernel)
        _IDENTITIES[kernel] = made
    return _IDENTITIES[kernel]


@contextmanager
def launched() -> Iterator[dict[str, Description]]:
    """The kernels of this package that are launched inside, by their identities; filled in at the end. A CUDA graph's are those
    that are launched while it is captured. Meanwhile a launch takes the host some tenths of a microsecond more."""
    importlib.import_module("pcpp")  # before anything is measured that could not be told of
    functions: set[int] = set()
    launch, found = driver.launch, dict[str, Description]()

    def noted(function: int, *rest: Any) -> None:
        functions.add(function)
        launch(function, *rest)

    try:
        with mock.patch.object(driver, "launch", noted):
            yield found
    finally:
        for kernel in driver.LOADED:
            if isinstance(kernel, Kernel | NumbaKernel) and any(
                each.ptr in functions for each in kernel._functions.values()
            ):
                found[identity(kernel)] = described(kernel)


@cache
def equal_kernels() -> dict[str, dict[str, Any]]:
    """kernels: by the identity of a kernel of earlier sources, that of today's which was shown to have the same code
    (scripts.checks.equal_kernels).  descriptions: of those of today, by identity."""
    found: dict[str, dict[str, Any]] = json.loads((REPOSITORY / "results" / "equal_kernels.json").read_text())
    return found


def todays(name: str) -> str:
    """The identity of today's kernel with the same machine code as a kernel of earlier sources; any other's own."""
    return str(equal_kernels()["kernels"].get(name, name))


def is_current(name: str) -> bool:
    """Whether the kernel of this identity, which KERNELS describes, is the one that the sources here give."""
    return name in KERNELS and _is_made_here(name)  # KERNELS grows, so a name that it lacks is not remembered


@cache
def _is_made_here(name: str) -> bool:
    today = todays(name)
    try:
        return identity(made_again(equal_kernels()["descriptions"].get(today, KERNELS[name]))) in (name, today)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("blazeproto"):
            return False
        raise  # what identities are made with is not installed
    except (OSError, AttributeError, TypeError):  # its file, its function or one of its constants is gone
        return False


# ----------------------------------------------------------------------------------------------------------------- rows


def compared(of: Mapping[str, Any]) -> tuple[frozenset[str], str]:
    """Kernels and benchmark of a row's `of`, each by the name of today's that was shown to be equal to it."""
    protocol = of["protocol_identity"]
    return frozenset(map(todays, of["kernels"])), AS_BEFORE.get(protocol, protocol)


def name_of(measure: Callable[..., Any]) -> str:
    """A function's module and name, also where the module is the program that runs."""
    return f"{_module_of(measure)}.{measure.__name__}"


def earlier(row: Mapping[str, Any]) -> str:
    """What of a row is no longer what is here: "kernels", "benchmark" or, of a row of today's, "".

    A row that does not say which kernels were launched is of earlier ones; one that no benchmark timed has no protocol.
    """
    of = row.get("of", {})
    kernels = of.get("kernels")
    if (
        kernels is None
        or not all(map(is_current, kernels))
        or has_other_tiles(row, [KERNELS[name] for name in kernels])
    ):
        return "kernels"
    if "protocol" not in of:
        return ""
    then = of["protocol_identity"]
    return "" if protocol_identity(of["protocol"]) in (then, AS_BEFORE.get(then)) else "benchmark"


def rows_in(record: Any) -> Iterator[dict[str, Any]]:
    """Every row of a record, wherever it stands: what says what it is of."""
    if isinstance(record, dict) and "of" in record:
        yield record
    elif isinstance(record, dict | list):
        for each in record.values() if isinstance(record, dict) else record:
            yield from rows_in(each)
