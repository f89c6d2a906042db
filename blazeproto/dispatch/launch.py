"""A Numba kernel compiled once and launched by raw pointers.

    Python function --numba.cuda.compile--> PTX --cuda.core.Linker--> cubin --CuPy Module--> CUfunction
    --cuLaunchKernel-->

Numba's own launch wraps every array and costs 50 µs; what it compiled can be launched for 3. Kernels take raw pointers
(``types.CPointer``) and 64-bit integers only, so an argument block is a row of 8-byte words. Everything up to the
cubin needs neither a GPU nor a driver, so any machine can check that a kernel compiles. Cubins are kept in
``$BLAZEPROTO_CACHE`` (default ``~/.cache/blazeproto``), and where one is found there Numba isn't even imported.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) the same object runs the same function on NumPy arrays.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from blazeproto import arrays, driver

CACHE_FORMAT = "1"  # part of every key: raise it when what a cache entry holds changes


@cache
def simulated() -> bool:
    """Whether kernels run in Numba's simulator, on NumPy arrays."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


class Kernel:
    """One kernel: ``make(threads, **constants)`` returns the Python function, with the constants as compile-time
    values.

    make: a module-level function; nothing is called before the kernel is compiled.
    parameters: one word a parameter: ``int32*``, ``float32*``…  for a pointer, ``int64`` for a number.
    threads: of a block.  min_blocks: resident on a multiprocessor, which bounds the registers.
    """

    def __init__(
        self, make: Callable[..., Any], parameters: str, *, threads: int, min_blocks: int = 1, **constants: Any
    ) -> None:
        self.make, self.parameters, self.constants = make, parameters.split(), constants
        self.threads, self.min_blocks = threads, min_blocks
        self.name = make.__name__
        self._functions: dict[int, int] = {}  # CUDA ordinal -> CUfunction
        self._modules: list[Any] = []  # what keeps them loaded

    def __repr__(self) -> str:
        return f"Kernel({self.name}: {', '.join(f'{key}={value}' for key, value in self.constants.items())})"

    # --- Compiling ---------------------------------------------------------------------------------------------------

    @cached_property
    def function(self) -> Any:
        """The Python function itself."""
        return self.make(self.threads, **self.constants)

    def ptx(self, capability: tuple[int, int] = (9, 0)) -> str:
        """PTX for a compute capability."""
        from numba import cuda, types

        signature = types.void(*(_numba_type(types, word) for word in self.parameters))
        code, _ = cuda.compile(
            self.function,
            signature,
            device=False,
            abi="numba",
            cc=capability,
            output="ptx",
            launch_bounds=(self.threads, self.min_blocks),
        )
        return code.decode() if isinstance(code, bytes) else code

    def cubin(self, capability: tuple[int, int] = (9, 0)) -> tuple[str, bytes]:
        """Entry name and machine code, from the cache or compiled now (about 0.5 s)."""
        path = cache_folder() / f"{self._key(capability)}.numba.cubin"
        try:
            digest, entry, code = path.read_bytes().split(b"\n", 2)
            if hashlib.sha256(code).hexdigest().encode() == digest:
                return entry.decode(), code
        except (OSError, ValueError):  # absent or damaged: compile again
            pass
        try:
            from cuda.core import Linker, LinkerOptions, ObjectCode
        except ImportError:  # before 1.0
            from cuda.core.experimental import Linker, LinkerOptions, ObjectCode

        ptx = self.ptx(capability)
        found = re.search(r"\.entry\s+([\w$]+)", ptx)
        assert found, f"{self!r}: no entry point in the PTX"
        options = LinkerOptions(arch="sm_{}{}".format(*capability))
        code = bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)
        _write(path, b"\n".join([hashlib.sha256(code).hexdigest().encode(), found[1].encode(), code]))
        return found[1], code

    def _key(self, capability: tuple[int, int]) -> str:
        """All that decides the machine code: the file with the kernel and its helpers, its constants, the compilers."""
        compilers = [f"{name} {metadata.version(name)}" for name in ("numba", "numba-cuda")]
        # The kernels' file, found without importing it twice.
        source = Path(self.make.__code__.co_filename).read_bytes()
        helpers = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("warp.py", "best.py"))
        parts = [CACHE_FORMAT, self.name, self.parameters, self.threads, self.min_blocks, self.constants, capability]
        digest = hashlib.sha256("\0".join([*map(repr, parts), *compilers]).encode())
        digest.update(source + helpers)
        return digest.hexdigest()

    def load(self, device: int) -> int:
        """The CUfunction on a device (a CUDA ordinal). Compiled and loaded the first time."""
        if device in self._functions:
            return self._functions[device]
        import cupy

        capability = cupy.cuda.Device(device).compute_capability
        entry, code = self.cubin((int(capability[:-1]), int(capability[-1])))
        module = cupy.cuda.Module()
        optin = cupy.cuda.runtime.deviceGetAttribute(cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
        limit = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with cupy.cuda.Device(device):
            module.load(code)
            function = module.get_function(entry).ptr
            cupy.cuda.driver.funcSetAttribute(function, limit, optin)
        self._modules.append(module)
        self._functions[device] = function
        return function

    # --- Launching ---------------------------------------------------------------------------------------------------

    def launch(self, device: int, stream: int, blocks: int, shared_bytes: int, *arguments: Any) -> None:
        """Launch on ``device`` and a raw cudaStream_t. Pointers and numbers are both Python ints; no synchronisation.

        In the simulator the pointers are NumPy arrays, and device and stream don't matter.
        """
        if simulated():
            return self._simulate(blocks, shared_bytes, *arguments)
        function = self._functions.get(device) or self.load(device)
        driver.launch_words(function, (blocks, 1), self.threads, shared_bytes, stream, arguments)

    def _simulate(self, blocks: int, shared_bytes: int, *arguments: Any) -> None:
        from numba import cuda

        cuda.jit(self.function)[blocks, self.threads, 0, shared_bytes](*arguments)


def clear(where: Any, size: int, stream: int) -> None:
    """Zero ``size`` bytes at an address, on a stream; a NumPy array in the simulator."""
    if simulated():
        where[...] = 0
    elif size:
        import cupy

        cupy.cuda.runtime.memsetAsync(where, 0, size, stream)


def _numba_type(types: Any, word: str) -> Any:
    return types.CPointer(getattr(types, word[:-1])) if word.endswith("*") else getattr(types, word)


class Buffers(NamedTuple):
    """The arrays of a dispatch, as kernel arguments: raw addresses, or NumPy arrays in the simulator."""

    ids: Any
    expert_pair_indices: Any
    expert_token_offsets: Any
    token_index_map: Any
    ids_copy: Any
    workspace: Any

    @staticmethod
    def of(ids: Any, outputs: Iterable[Any], workspace: Any) -> Buffers:
        """outputs: the three lists and, for int64 ids, their int32 copy; of int32 ids none is made."""
        pairs, offsets, index_map, *copy = outputs
        return Buffers(ids, pairs, offsets, index_map, copy[0] if copy else ids, workspace)


def part(workspace: Any, first: int, size: int, dtype: str) -> Any:
    """Elements of ``dtype`` from byte ``first`` of the workspace, as a kernel argument."""
    if isinstance(workspace, int):
        return workspace + first
    item = arrays.ITEM_BYTES.get(dtype, 2)
    return workspace.view("uint8")[first : first + size * item].view(dtype)


# --- The cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``$BLAZEPROTO_CACHE``, or ``blazeproto`` in the user's cache folder."""
    chosen = os.environ.get("BLAZEPROTO_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "blazeproto"


def _write(path: Path, data: bytes) -> None:
    """Write beside, then rename: another process sees all or nothing. A folder we may not write to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        pass
