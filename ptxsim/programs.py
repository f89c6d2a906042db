"""Launches of anybody's kernels on NumPy arrays: PTX text or CUDA C++ source, without a GPU.

    report = ptxsim.run(source, grid=4, block=128, arguments=[2.0, x, y, len(x)])    # y is written in place
    report.races

CUDA C++ is compiled by NVRTC, which NVIDIA has for Linux and Windows. On macOS PTX text runs: Numba's, or ``nvcc -ptx``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ptxsim.arrays import Arrays
from ptxsim.checks import expect, integer
from ptxsim.cta import placed
from ptxsim.declared import Pointee, elements
from ptxsim.maps import TensorMap
from ptxsim.nvrtc import PTX, Binary, compile, text_of
from ptxsim.ptx import Entry, EntryParameter, Program
from ptxsim.schedule import Report
from ptxsim.schedule import run as run_program
from ptxsim.stepper import Stepper
from ptxsim.together import run_together as run_of_all

MOST_THREADS = 1024  # of a CTA; the CUDA programming guide's "Technical specifications per compute capability"
MOST_OF = {"block": (1024, 1024, 64), "grid": (2**31 - 1, 65535, 65535)}  # by axis
MOST_OF_CLUSTER = 16
MOST_SHARED = 227 * 1024  # bytes of a CTA
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap


@dataclass(frozen=True)
class ArrayMap:
    """The result of `tensor_map`: an argument of `run`."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int

    def at(self, address: int) -> TensorMap:
        """The map of the array at an address. Raises what `TensorMap` does."""
        array = self.array
        return TensorMap(
            address, array.shape[::-1], array.strides[-2::-1], self.box[::-1], array.itemsize, self.swizzle
        )


def tensor_map(array: np.ndarray, box: Sequence[int], swizzle: int = 0) -> ArrayMap:
    """A tensor map of an array, as cuTensorMapEncodeTiled makes it, for a parameter ``const __grid_constant__`` of 128 bytes.

    array: 1 to 5 dimensions, the last contiguous, the other strides multiples of 16 bytes.  box: elements of each dimension that
    a copy moves, in the array's order: the last is the innermost, 1 to 256 each.  swizzle: 0, 32, 64 or 128 bytes, which a
    row of the box then has. Outside the array a copy reads zeros and writes nothing.

    TypeError for no NumPy array, ValueError for what cuTensorMapEncodeTiled refuses.
    """
    expect("array", isinstance(array, np.ndarray), "a NumPy array", type(array).__name__, TypeError)
    expect(
        "array",
        array.strides[-1:] in ((), (array.itemsize,)),
        "the last dimension contiguous",
        f"strides {array.strides}",
    )
    expect("array", _is_numbers(array), "numbers in this computer's byte order", array.dtype, TypeError)
    expect(
        "box",
        isinstance(box, Iterable) and getattr(box, "shape", None) != (),
        "a size of each dimension",
        type(box).__name__,
        TypeError,
    )
    made = ArrayMap(array, tuple(integer("box", size) for size in box), integer("swizzle", swizzle))
    made.at(0)
    return made


@dataclass(frozen=True)
class Unwritten:
    """The result of `unwritten`: an argument of `run`."""

    array: np.ndarray


def unwritten(array: np.ndarray) -> Unwritten:
    """An array as an argument that counts as memory nobody has written: a kernel that reads it first gets an error.

    array: any that `run` takes; of a view, all that it views. A run overwrites its contents before it begins.
    TypeError for no NumPy array, ValueError for one that may not be written.
    """
    expect("array", isinstance(array, np.ndarray), "a NumPy array", type(array).__name__, TypeError)
    expect("array", array.flags.writeable, "one that may be written", "one that is only read")
    return Unwritten(array)


def run(
    kernel: str | Path | Any,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared: int = 0,
    cluster: int = 1,
    seed: int = 0,
    entry: str | None = None,
    options: Sequence[str] = (),
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Runs one launch. Arrays are written in place; the report has races, and the seed that gives the same run.

    kernel: CUDA C++ source, PTX text, a file of either as str or Path, or an object whose ``ptx`` is text or makes it, such as
    `compile`'s result.  options: NVRTC's, for CUDA C++, such as ``-DN=4``.
    grid, block: CTAs, and threads of a CTA, as a number or up to three.  shared: bytes of dynamic shared memory of a CTA.
    cluster: CTAs of a cluster.  seed: of the schedule.  entry: the kernel's name as in the PTX, if it has more than one.
    most: instructions of all warps, beyond which it is a MachineError that says where they are; as of a loop without end.
    progress: called with clusters done and in all.

    arguments: one for each parameter. A NumPy array (bf16 as uint16) is its address; where CUDA C++ source declares a pointer to
    numbers, its dtype has to be of these. Through a view the kernel may reach the whole array behind it; a copy has bounds of its
    own. A NumPy number has the parameter's size; a Python int or float takes its size and, of .f32 and .f64, its type. A
    `tensor_map`. An array as `unwritten` memory. A struct is its bytes, a NumPy void, or a tuple of arrays, NumPy numbers and
    tensor maps, which lie as C has them.

    TypeError or ValueError naming the argument, before anything runs; CompileError for source that NVRTC refuses, RuntimeError
    for CUDA C++ on macOS, which has no NVRTC. PtxError for what ptxsim does not know, MachineError for what a kernel may not
    do, as an access out of bounds, Deadlock where no warp can go on; their ``report`` has the races found before.
    """
    expect("progress", progress is None or callable(progress), "a function", type(progress).__name__, TypeError)
    arrays, how = _start(seed, most)
    arguments_of_run, launched = _launch(arrays, kernel, grid, block, arguments, shared, cluster, entry, options)
    return run_program(*arguments_of_run, **launched, **how, progress=progress)


def run_together(
    streams: Sequence[Sequence[Mapping[str, Any]]],
    *,
    resident: int | None = None,
    seed: int = 0,
    most: int | None = None,
) -> Report:
    """Runs launches of several GPUs at once, which reach each other's memory; each GPU's one after the other, as on a stream.

    streams: for each GPU its launches, in order, each a dict of `run`'s ``kernel``, ``grid``, ``block``, ``arguments``, and if
    need be ``shared``, ``cluster``, ``entry``, ``options``. An array that several launches are given is one array, which all
    GPUs reach.
    resident: clusters of a launch that run at once; others begin as these end, in order of their index. Default: all.
    seed, most: as in `run`.

    Each GPU sees the others' plain stores late, unless they are released at system scope; two GPUs' accesses that nothing orders
    are a race. The report is one of all launches.

    TypeError or ValueError naming the argument, before anything runs; beside what `run` raises, Deadlock where all that go on
    read the same words again and again.
    """
    arrays, how = _start(seed, most)
    if resident is not None:
        how["resident"] = integer("resident", resident, least=1)
    expect(
        "streams",
        isinstance(streams, list | tuple) and all(isinstance(stream, list | tuple) for stream in streams),
        "a list of each GPU's list of launches",
        repr(streams)[:80],
        TypeError,
    )
    needed = {"kernel", "grid", "block", "arguments"}
    whole: dict[str, Any] = {"shared": 0, "cluster": 1, "entry": None, "options": ()}
    for launch in (launch for stream in streams for launch in stream):
        expect("streams", isinstance(launch, Mapping), "each launch as a dict", type(launch).__name__, TypeError)
        expect(
            "streams",
            needed <= launch.keys() <= needed | whole.keys(),
            f"launches of {sorted(needed)} and, if need be, {[*whole]}",
            [*launch],
            TypeError,
        )
    made = [[_launch(arrays, **{**whole, **launch}) for launch in stream] for stream in streams]
    return run_of_all(made, **how)


def step(
    kernel: str | Path | Any,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared: int = 0,
    cluster: int = 1,
    seed: int = 0,
    entry: str | None = None,
    options: Sequence[str] = (),
) -> Stepper:
    """The same launch, to be run instruction by instruction (`ptxsim.stepper`); it has not begun.

    kernel, grid, block, arguments, shared, cluster, seed, entry, options: as in `run`.

    TypeError or ValueError, CompileError, RuntimeError, PtxError as `run` raises them.
    """
    arrays, how = _start(seed)
    arguments_of_run, launched = _launch(arrays, kernel, grid, block, arguments, shared, cluster, entry, options)
    return Stepper(*arguments_of_run, **launched, **how)


def _start(seed: int, most: int | None = None) -> tuple[Arrays, dict[str, Any]]:
    """New memory, and how launches run."""
    arrays = Arrays()
    how: dict[str, Any] = {"memory": arrays.memory, "seed": integer("seed", seed)}
    if most is not None:
        how["most"] = integer("most", most, least=1)
    return arrays, how


def _launch(
    arrays: Arrays,
    kernel: Any,
    grid: Any,
    block: Any,
    arguments: Sequence[Any],
    shared: int,
    cluster: int,
    entry: str | None,
    options: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and options of `ptxsim.cta.Launch`, behind its world."""
    program, entry_name, declared = _program(kernel, entry, options)
    whole_grid, whole_block = _sizes("grid", grid), _sizes("block", block)
    expect("block", prod(whole_block) <= MOST_THREADS, f"at most {MOST_THREADS} threads", block)
    expect("shared", integer("shared", shared, least=0) <= MOST_SHARED, f"at most {MOST_SHARED} bytes", shared)
    expect(
        "cluster", integer("cluster", cluster, least=1) <= MOST_OF_CLUSTER, f"at most {MOST_OF_CLUSTER} CTAs", cluster
    )
    expect("grid", whole_grid[0] % cluster == 0, f"a multiple of the cluster's {cluster} CTAs", grid)
    _check_limits(program, program.entry(entry_name), whole_block, shared, cluster)
    parameters, maps = _laid_out(arrays, program, entry_name, arguments, declared)
    return (
        (program, entry_name, whole_grid, whole_block, parameters),
        {"shared_bytes": shared, "cluster": cluster, "maps": maps},
    )


def _check_limits(program: Program, entry: Entry, block: tuple[int, ...], shared: int, cluster: int) -> None:
    """What the kernel itself says of its launch, and all of its shared memory."""
    of_all, name = placed(program, entry, shared)[1], entry.name
    expect(
        "shared", of_all <= MOST_SHARED, f"at most {MOST_SHARED - of_all + shared} bytes beside {name}'s own", shared
    )
    most, exactly, ctas = (entry.limits.get(name) for name in ("maxntid", "reqntid", "reqnctapercluster"))
    if most:
        expect("block", prod(block) <= prod(most), f"at most {prod(most)} threads, as {name}'s .maxntid says", block)
    if exactly:
        expect("block", (*exactly, 1, 1)[:3] == (*block, 1, 1)[:3], f"{exactly}, as {name}'s .reqntid says", block)
    if ctas:
        expect("cluster", prod(ctas) == cluster, f"{prod(ctas)} CTAs, as {name}'s .reqnctapercluster says", cluster)


# --- The kernel --------------------------------------------------------------------------------------------------------------


def _program(kernel: Any, entry: str | None, options: Sequence[str]) -> tuple[Program, str, list[Pointee | None]]:
    """The program, its entry's name, and what its parameters point to as far as the source says."""
    expect("entry", isinstance(entry, str | None), "a str or None", type(entry).__name__, TypeError)
    expect("options", isinstance(options, list | tuple), "a list or a tuple", type(options).__name__, TypeError)
    if hasattr(kernel, "ptx"):
        text = kernel.ptx() if callable(kernel.ptx) else kernel.ptx
        entry = entry or getattr(kernel, "entry", None)
    elif PTX.search(text := text_of(kernel)[1]):
        kernel = None
    else:
        kernel = compile(kernel, *options)
        text = kernel.ptx
    program = Program.read(text)
    name = program.entry(entry).name
    return program, name, elements(kernel.source, name) if isinstance(kernel, Binary) else []


def _sizes(name: str, value: int | tuple[int, ...]) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple) else (value,)
    expect(name, 1 <= len(sizes) <= 3, "one to three sizes", value)
    for size, most in zip(sizes, MOST_OF[name], strict=False):
        expect(name, integer(name, size, least=1) <= most, f"at most {MOST_OF[name]}", value)
    return tuple(map(int, sizes))


# --- Its arguments -----------------------------------------------------------------------------------------------------------


def _laid_out(
    arrays: Arrays, program: Program, entry: str, arguments: Sequence[Any], declared: list[Pointee | None]
) -> tuple[bytes, dict[int, TensorMap]]:
    """The bytes of all parameters, and tensor maps by their offsets in these."""
    taken = program.entry(entry)
    expect("arguments", isinstance(arguments, list | tuple), "a list or a tuple", type(arguments).__name__, TypeError)
    expect(
        "arguments",
        len(arguments) == len(taken.parameters),
        f"{len(taken.parameters)} for {entry}",
        len(arguments),
    )
    data, maps = bytearray(taken.parameter_bytes), dict[int, TensorMap]()
    declared = declared if len(declared) == len(arguments) else [None] * len(arguments)
    for number, (value, parameter, element) in enumerate(zip(arguments, taken.parameters, declared, strict=True)):
        name = f"argument {number} ({parameter.size} bytes, .{parameter.kind})"
        struct, made, whole = isinstance(value, tuple), bytearray(), 1
        for place, given in enumerate(value if struct else (value,)):
            member = given.array if isinstance(given, Unwritten) else given
            if isinstance(array := member.array if isinstance(member, ArrayMap) else member, np.ndarray) and array.ndim:
                _check_array(name, array, contiguous=array is member)
                arrays.address(array, f"argument {number}" + f", member {place}" * struct, written=member is given)
                if array is member and not struct:
                    expect(name, parameter.kind != "f64", "a number", "an array, which is an address", TypeError)
                    expect(
                        name,
                        not element or element.holds(array.dtype),
                        f"an array of {element}",
                        array.dtype,
                        TypeError,
                    )
            one, alignment = _bytes(arrays, name, member, None if struct else parameter)
            made += bytes(-len(made) % alignment)
            if isinstance(member, ArrayMap):
                maps[parameter.offset + len(made)] = member.at(arrays.address(member.array))
            made += one
            whole = max(whole, alignment)
        made += bytes(-len(made) % whole)
        expect(name, len(made) == parameter.size, f"{parameter.size} bytes", len(made))
        data[parameter.offset : parameter.offset + parameter.size] = made
    return bytes(data), maps


def _is_numbers(array: np.ndarray) -> bool:
    return array.dtype.isnative and not array.dtype.hasobject


def _check_array(name: str, array: np.ndarray, contiguous: bool) -> None:
    """Kernels have an array's memory, and no more of it than its address."""
    expect(name, _is_numbers(array), "an array of numbers in this computer's byte order", array.dtype, TypeError)
    expect(
        name,
        array.flags.c_contiguous or not contiguous,
        "a C-contiguous array",
        f"strides {array.strides} of {list(array.shape)}",
    )
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    expect(
        name,
        array.flags.writeable or not root.flags.writeable,
        "an array that may be written, or a copy",
        "one that is only read, a view of one that is not",
    )


def _bytes(arrays: Arrays, name: str, value: Any, parameter: EntryParameter | None) -> tuple[bytes, int]:
    """A value's bytes, and their alignment. parameter: that it is for; None in a struct, where Python's numbers have no size."""
    if isinstance(value, ArrayMap):
        return bytes(MAP_BYTES), MAP_ALIGNMENT
    if isinstance(value, np.ndarray) and value.ndim:
        return arrays.address(value).to_bytes(8, "little"), 8
    if isinstance(value, bytes):
        return value, 1
    if isinstance(value, np.void) or (isinstance(value, np.generic | np.ndarray) and parameter is None):
        return value.tobytes(), value.dtype.alignment if value.dtype.names else value.dtype.itemsize
    if parameter is None or not isinstance(value, int | float | np.generic | np.ndarray):
        expected = "an array, a NumPy number or a tensor_map" + (", or a number or a struct" if parameter else "")
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    kind, size, given = parameter.kind, parameter.size, np.asarray(value)
    real, whole = kind.startswith("f"), kind[0] in "us"
    expect(name, given.dtype.isnative, "this computer's byte order", given.dtype, TypeError)
    expect(name, kind != "b8" or size == 1, "a struct, as bytes, a NumPy void or a tuple", repr(value), TypeError)
    fits = given.dtype.kind in "iuf" if real else given.dtype.kind != "f" or not whole
    expect(name, fits, "a number" if real else "an int", repr(value), TypeError)
    if isinstance(value, np.generic | np.ndarray):
        expect(
            name,
            given.itemsize == size and (given.dtype.kind == "f" or not real),
            "a NumPy number of its type",
            f"{value!r} ({given.dtype})",
            TypeError,
        )
        return given.tobytes(), 1
    if real or isinstance(value, float):
        fits = not real or not math.isfinite(value) or bool(abs(value) <= np.finfo(f"f{size}").max)
        expect(name, fits, f"a number of {size} bytes", value)
        return np.array(value, f"f{size}").tobytes(), 1
    expect(name, -(2 ** (8 * size - 1)) <= value < 2 ** (8 * size), f"an int of {size} bytes", value)
    return (value % 2 ** (8 * size)).to_bytes(size, "little"), 1
