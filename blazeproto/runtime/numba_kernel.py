"""A Numba kernel compiled once and launched by raw pointers.

    Python function --numba.cuda.compile--> PTX --cuda.core.Linker--> cubin --CuPy Module--> CUfunction
    --cuLaunchKernel-->

Numba's own launch wraps every array and costs 50 µs; what it compiled can be launched for 3. Kernels take raw pointers
(``types.CPointer``) and 64-bit integers only, so an argument block is a row of 8-byte words. Everything up to the cubin needs
neither a GPU nor a driver, so any machine can check that a kernel compiles. Cubins are kept in the compile cache.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) the same object runs the same function on NumPy arrays.
"""

import ast
import functools
import hashlib
import re
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from blazeproto.runtime import cache, driver, optional
from blazeproto.runtime.arch import HOPPER, capability_of
from blazeproto.runtime.target import in_simulator, simulated

OF_HOPPER = HOPPER.least
CACHE_FORMAT = "4"  # part of every key: raise it when what a cache entry holds changes
PACKAGE = Path(__file__).resolve().parents[1]  # blazeproto/
BEGAN = time.time()  # about when kernels are imported


class NumbaKernel(driver.Loadable):
    """One kernel: ``make(threads, **constants)`` returns the Python function, with the constants as compile-time
    values.

    make: a module-level function; nothing is called before the kernel is compiled.
    parameters: one word a parameter: ``int32*``, ``float32*``…  for a pointer, ``int64`` for a number.
    threads: of a block.  min_blocks: resident on a multiprocessor, which bounds the registers.
    """

    cluster = 1  # blocks

    def __init__(
        self, make: Callable[..., Any], parameters: str, *, threads: int, min_blocks: int = 1, **constants: Any
    ) -> None:
        self.make, self.parameters, self.constants = make, parameters.split(), constants
        self.threads, self.min_blocks = threads, min_blocks
        self.name = make.__name__
        self._functions = {}

    def __repr__(self) -> str:
        return f"NumbaKernel({self.name}: {', '.join(f'{key}={value}' for key, value in self.constants.items())})"

    # --- Compiling ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def function(self) -> Any:
        """The Python function itself."""
        return self.make(self.threads, **self.constants)

    def ptx(self, capability: tuple[int, int] = OF_HOPPER, *, lineinfo: bool = False) -> str:
        """PTX for a compute capability, from the cache or compiled now (about 1 s).

        lineinfo: with the source's lines, where the compiler can. Some instructions stand elsewhere then, so cubins are made
        without.
        """
        name = f"{self.key(capability)}{'.lineinfo' if lineinfo else ''}.numba.ptx"
        return self._kept(name, lambda: self._compile(capability, lineinfo)).decode()

    def _compile(self, capability: tuple[int, int], lineinfo: bool) -> bytes:
        if in_simulator():
            raise RuntimeError(
                f"{self!r}: expected Numba's compiler, got its simulator; start without NUMBA_ENABLE_CUDASIM=1"
            )
        from blazeproto.runtime.numba import cuda, types

        kinds = [(getattr(types, word.rstrip("*")), word.endswith("*")) for word in self.parameters]
        signature = types.void(*(types.CPointer(kind) if pointer else kind for kind, pointer in kinds))
        try:
            code, _ = cuda.compile(
                self.function,
                signature,
                device=False,
                abi="numba",
                cc=capability,
                output="ptx",
                launch_bounds=(self.threads, self.min_blocks),
                lineinfo=lineinfo,
            )
        except Exception:  # libNVVM 12.9, of a few kernels with lines: "Symbol name with unsupported characters"
            if not lineinfo:
                raise
            return self._compile(capability, False)
        return code if isinstance(code, bytes) else code.encode()

    def cubin(self, capability: tuple[int, int] = OF_HOPPER) -> tuple[str, bytes]:
        """Entry name and machine code, from the cache or compiled now (about 1 s)."""
        entry, code = self._kept(f"{self.key(capability)}.numba.cubin", lambda: self._link(capability)).split(b"\n", 1)
        return entry.decode(), code

    def _link(self, capability: tuple[int, int]) -> bytes:
        optional.need("cuda-core")
        try:
            from cuda.core import Linker, LinkerOptions, ObjectCode
        except ImportError:  # before 1.0
            from cuda.core.experimental import Linker, LinkerOptions, ObjectCode

        ptx = self.ptx(capability)
        found = re.search(r"\.entry\s+([\w$]+)", ptx)
        assert found, f"{self!r}: no entry point in the PTX"
        options = LinkerOptions(arch="sm_{}{}".format(*capability))
        code = bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)
        return found[1].encode() + b"\n" + code

    def key(self, capability: tuple[int, int] = OF_HOPPER) -> str:
        """A hash of all that decides the machine code: sources, constants, compilers."""
        parts = [CACHE_FORMAT, self.name, self.parameters, self.threads, self.min_blocks, self.constants, capability]
        parts += [metadata.version(compiler) for compiler in ("numba", "numba-cuda")]
        parts += [file.read_bytes() for file in self._files]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def _files(self) -> list[Path]:
        return source_files(Path(self.make.__code__.co_filename).resolve())

    def _kept(self, name: str, make: Callable[[], bytes]) -> bytes:
        """A file of the compile cache, made and written where it is absent. Made, and not kept there, where a source was edited
        after it may have been imported: its text is in the name, and need not be what is compiled."""
        edited = [file.name for file in self._files if file.stat().st_mtime > BEGAN]
        if edited:
            warnings.warn(
                f"{self!r}: {', '.join(edited)} changed after this process began; compiled is what was imported, so start again",
                stacklevel=4,
            )
            return make()
        if (found := cache.read(name)) is None:
            found = make()
            cache.write(name, found)
        return found

    def _code_for(self, device: int) -> tuple[bytes, str, int | None]:
        """As `driver.Loadable._code_for`."""
        entry, code = self.cubin(capability_of(device))
        return code, entry, None

    # --- Launching ---------------------------------------------------------------------------------------------------

    def launch(self, device: int, stream: int, blocks: int, shared_bytes: int, *arguments: Any) -> None:
        """Launch on ``device`` and a raw cudaStream_t. Pointers and numbers are both Python ints; no synchronisation.

        In the simulator the pointers are NumPy arrays, and device and stream don't matter.
        """
        if simulated():
            from blazeproto.runtime.numba import cuda

            cuda.jit(self.function)[blocks, self.threads, 0, shared_bytes](*arguments)
        else:
            function = self._functions.get(device) or self.load(device)
            driver.launch(function.ptr, (blocks, 1), self.threads, shared_bytes, stream, arguments)


# --- The sources of a kernel -----------------------------------------------------------------------------------------


@functools.cache
def source_files(file: Path) -> list[Path]:
    """A Python file and all files of this package that it imports, directly or through others; sorted.

    They are found by the import statements, wherever these stand in a file. Nothing is imported to find them.
    """
    files, unread = {file}, [file]
    while unread:
        new = _imported_files(unread.pop()) - files
        files |= new
        unread += new
    return sorted(files)


@functools.cache
def _imported_files(file: Path) -> set[Path]:
    found = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        level, module = getattr(node, "level", 0), getattr(node, "module", None)
        root = file.parents[level - 1] if level else PACKAGE.parent
        for alias in node.names:
            path = root.joinpath(*f"{module or ''}.{alias.name}".strip(".").split("."))
            # A module, a package, or a name in one of the two.
            places = [place for one in (path, path.parent) for place in (one.with_suffix(".py"), one / "__init__.py")]
            found.update([place for place in places if place.is_relative_to(PACKAGE) and place.is_file()][:1])
    return found
