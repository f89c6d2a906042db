"""The kernels and the benchmark that a figure belongs to: their identities, and whether the sources here still give them.

    CUDA kernels     a hash of its source with all included headers and its macros, tiles among them, and of how it is launched
    Numba kernels    a hash of its module and the modules that it takes device code from, its parameters and its constants
    benchmarks       a name and a version, which VERSIONS raises when what is timed, or how, changes

Comments, white space, docstrings and annotations are in no hash. A results file describes each kernel beside its identity, so
that `is_current` can make the kernel again and compare. results/equal.json maps identities of earlier sources to today's kernels
with the same machine code, and benchmarks of earlier rows to today's.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from blazeproto.gemm.compile import Kernel
from blazeproto.runtime import driver
from blazeproto.runtime.arch import ARCHES, HOPPER
from blazeproto.runtime.numba_kernel import NumbaKernel, source_files
from scripts.bench.layer_tiles import has_other_tiles

Description = dict[str, Any]  # of a kernel: what it is made again from

DIGITS = 16  # of an identity
REPOSITORY = Path(__file__).resolve().parents[2]
EQUAL = REPOSITORY / "results" / "equal.json"
KERNELS: dict[str, Description] = {}
"""The description of every kernel that a row has, by its identity: of rows made here, and of files that were read."""
VERSIONS: dict[str, int] = {"scripts.bench.clock.measure": 2, "scripts.bench.integrations.measure_steps": 2}
"""Benchmarks by module and function, with how often what they time, or how, has changed; 1 for those that are not here."""
RUNTIME = Path(driver.__file__).parent  # host code, but for warp.py
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ASIDE = ("annotation", "returns")  # of a syntax tree


def tree(node: Any) -> str:
    """A syntax tree as text, the same for every version of Python; without docstrings and annotations."""
    if isinstance(node, list):
        return f"[{' '.join(map(tree, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    inside = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    documented = ast.Module | ast.FunctionDef | ast.ClassDef
    if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
        inside["body"] = node.body[1:]
    return f"{type(node).__name__}({' '.join(f'{key}={tree(inside[key])}' for key in inside if key not in ASIDE)})"


@functools.cache
def _tree_of(file: Path) -> str:
    return tree(ast.parse(file.read_bytes()))


_IDENTITIES: WeakKeyDictionary[Kernel | NumbaKernel, str] = WeakKeyDictionary()


def identity(kernel: Kernel | NumbaKernel) -> str:
    """A hash of a kernel's sources and of how it is compiled and launched."""
    if kernel not in _IDENTITIES:
        if isinstance(kernel, Kernel):
            launch: Any = (kernel.entry, kernel.threads, kernel.start_registers, kernel.dynamic_smem)
            parts = [*kernel.arch.options, *kernel.options, "".join(COMMENT.sub(" ", kernel.source).split())]
        else:
            launch = (kernel.name, kernel.parameters, kernel.threads, kernel.min_blocks)
            files = source_files(Path(kernel.make.__code__.co_filename).resolve())
            sources = [_tree_of(file) for file in files if RUNTIME not in file.parents or file.name == "warp.py"]
            parts = [str(sorted(kernel.constants.items())), *sources]
        _IDENTITIES[kernel] = hashlib.sha256("\0".join([str(launch), *parts]).encode()).hexdigest()[:DIGITS]
    return _IDENTITIES[kernel]


def described(kernel: Kernel | NumbaKernel) -> Description:
    """The description that `made_again` makes the kernel from."""
    if isinstance(kernel, NumbaKernel):
        made: Description = {
            "make": f"{kernel.make.__module__}.{kernel.name}",
            "parameters": " ".join(kernel.parameters),
        }
        return made | {name: getattr(kernel, name) for name in ("threads", "min_blocks", "constants")}
    names = ("file", "entry", "dynamic_smem", "threads", "start_registers")
    made = {name: getattr(kernel, name) for name in names}
    return made | {"defines": dict(kernel.defines), "options": [*kernel.options]}


def made_again(description: Description) -> Kernel | NumbaKernel:
    """The kernel of a description, from the sources that are here. ImportError, AttributeError, TypeError if it is gone."""
    given = dict(description)
    if "file" in given:
        folder = given["file"].rpartition("/")[0]
        arch = next((arch for arch in ARCHES.values() if arch.folder == folder), HOPPER)
        return Kernel(**given | {"options": tuple(given["options"]), "arch": arch})
    module, _, name = given.pop("make").rpartition(".")
    make = getattr(importlib.import_module(module), name)
    given |= {key: tuple(value) if isinstance(value, list) else value for key, value in given.pop("constants").items()}
    return NumbaKernel(make, given.pop("parameters"), **given)


@contextmanager
def launched() -> Iterator[dict[str, Description]]:
    """The kernels of this package that are launched inside, by their identities; filled in at the end. A CUDA graph's are those
    that are launched while it is captured. Meanwhile a launch takes the host some tenths of a microsecond more."""
    functions: set[int] = set()
    launch, found = driver.launch, dict[str, Description]()

    def noted(function: int, *rest: Any) -> None:
        functions.add(function)
        launch(function, *rest)

    try:
        with mock.patch.object(driver, "launch", noted):
            yield found
    finally:
        ours = [kernel for kernel in driver.LOADED if isinstance(kernel, Kernel | NumbaKernel)]
        used = [kernel for kernel in ours if functions & {each.ptr for each in kernel._functions.values()}]
        found |= {identity(kernel): described(kernel) for kernel in used}


@functools.cache
def equal() -> dict[str, dict[str, Any]]:
    """kernels: by the identity of a kernel of earlier sources, today's kernel with the same code (scripts.checks.equal_kernels).
    descriptions: of kernels of today, by identity.  benchmarks: by the hash that rows had before VERSIONS, the benchmark's
    name."""
    found: dict[str, dict[str, Any]] = json.loads(EQUAL.read_text())
    return found


def todays(name: str) -> str:
    """The identity that this checkout gives a kernel of earlier sources with the same machine code; any other's own."""
    return str(equal()["kernels"].get(name, name))


def is_current(name: str) -> bool:
    """Whether the kernel of this identity, which KERNELS describes, is the one that the sources here give."""
    return name in KERNELS and _is_made_here(name)  # KERNELS grows, so a name that it lacks is not remembered


@functools.cache
def _is_made_here(name: str) -> bool:
    today = todays(name)
    try:
        return identity(made_again(equal()["descriptions"].get(today, KERNELS[name]))) in (name, today)
    except (OSError, ImportError, AttributeError, TypeError):  # its file, its function or one of its constants is gone
        return False


# ----------------------------------------------------------------------------------------------------------------- rows


def name_of(measure: Callable[..., Any]) -> str:
    """A function's module and name, also where the module is the program that runs."""
    name = measure.__module__
    program = sys.modules[name].__spec__ if name == "__main__" else None
    return f"{program.name if program else name}.{measure.__name__}"


def benchmark_of(of: Mapping[str, Any]) -> tuple[str, int]:
    """The name and the version of the benchmark that made a row. Rows from before versions have a hash."""
    if "protocol_identity" in of:
        return equal()["benchmarks"].get(of["protocol_identity"], ""), 1
    return equal()["benchmarks"].get(of["protocol"], of["protocol"]), of["version"]


def compared(of: Mapping[str, Any]) -> tuple[frozenset[str], tuple[str, int]]:
    """Kernels and benchmark of a row's `of`; a kernel of earlier sources counts as the one of the sources here that equals it."""
    return frozenset(map(todays, of["kernels"])), benchmark_of(of)


def earlier(row: Mapping[str, Any]) -> str:
    """The part of a row that is no longer here: "kernels", "benchmark", or "" for a current row.

    A row that does not say which kernels were launched is of earlier ones; one that no benchmark timed has no protocol.
    """
    of = row.get("of", {})
    kernels = of.get("kernels", ["none that is said"])
    if not all(map(is_current, kernels)) or has_other_tiles(row, [KERNELS[name] for name in kernels]):
        return "kernels"
    if "protocol" not in of:
        return ""
    name, version = benchmark_of(of)
    return "" if name and version == VERSIONS.get(name, 1) else "benchmark"


def rows_in(record: Any) -> Iterator[dict[str, Any]]:
    """Every row of a record, wherever it stands: what says what it is of."""
    if isinstance(record, dict) and "of" in record:
        yield record
    elif isinstance(record, dict | list):
        for each in record.values() if isinstance(record, dict) else record:
            yield from rows_in(each)
