"""CUDA C++ to machine code of an architecture, and a kernel as an object one can look into.

>>> sizes = {"LANES": 32, "VECTORS": 1, "THREADS": 256}
>>> kernel = Kernel("combine.cu", "combine", {"TOP_K": 8, "HAS_SCORES": 1, **sizes})
>>> kernel.compile()     # registers, spilled bytes, shared memory, macros
>>> print(kernel.sass)

NVRTC compiles to a cubin for a kernel's architecture (`blazeproto.runtime.arch`) and needs neither a GPU nor a driver, so
everything here but `Kernel.function` works on any machine. Cubins are kept in the compile cache (`runtime.cache`) under a
hash of the source with its headers, the options and the compiler's version. Those of edited sources (`blazeproto.lab.Workbench`)
are kept beside the sources instead. A kernel whose source includes a file in a way that is not followed (`Kernel.complete`) is
compiled again in each process.

A malformed ``wgmma`` can crash the compiler and the process with it: `compile_in_subprocess` survives that.
"""

import hashlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from blazeproto.gemm import nvrtc
from blazeproto.gemm.cubin import start_with
from blazeproto.gemm.nvrtc import Binary, CompileError
from blazeproto.gemm.tiles import BF16, E4M3, Element
from blazeproto.runtime import cache, driver
from blazeproto.runtime.arch import HOPPER, Arch, arch_of, capability_of
from blazeproto.runtime.arrays import current_device
from blazeproto.runtime.shown import Shown
from blazeproto.runtime.target import Handle

CUDA_SOURCES = Path(__file__).resolve().parent / "cuda"
CACHE_FORMAT = "2"  # part of every key: raise it when `Binary`'s file layout changes
JETSON = 87  # Orin, which runs no other GPU's code
_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:"(?P<beside>[^"\n]+)"|<(?P<listed>[^>\n]+)>)[ \t]*(?P<rest>.*)$', re.MULTILINE
)
# Every way to read another file, however it is written; in a comment too.
_READS = re.compile(r"(?:#|%:)(?:\s|/\*.*?\*/)*(?:include|import|embed)|__has_(?:include|embed)", re.DOTALL)


# --- The kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Kernel(driver.Loadable, Shown):
    """One ``extern "C" __global__`` function of one .cu file, compiled with one set of macros. Nothing is done until asked for.

    file: name of a .cu in ``blazeproto/gemm/cuda``, or any path.  entry: the function's name.
    defines: macros, as ``-DNAME=value``.  dynamic_smem: bytes of shared memory that every launch asks for.
    threads: of a block, where the source fixes them.  start_registers: what a thread starts with, where that is not what
    ptxas wrote down (`blazeproto.gemm.cubin`).  options: further NVRTC options.
    sources: the folder that ``file`` and its headers are taken from, where that is not ``blazeproto/gemm/cuda``. Its files must
    not change. Its machine code is kept in the folder that it lies in, never in the package's cache.
    arch: the architecture that it is written for.
    """

    file: str
    entry: str
    defines: Mapping[str, int | str] = field(default_factory=dict)
    dynamic_smem: int = 0
    threads: int = 0
    start_registers: int | None = None
    options: tuple[str, ...] = ()
    sources: Path | None = None
    arch: Arch = HOPPER
    _functions: dict[int, Any] = field(default_factory=dict, init=False)

    @property
    def path(self) -> Path:
        """The .cu file."""
        return self.folder / self.file  # an absolute `file` stays itself

    @property
    def folder(self) -> Path:
        """The folder in which headers are looked for."""
        return self.sources or CUDA_SOURCES

    @property
    def macros(self) -> tuple[str, ...]:
        """``defines`` as options of the compiler."""
        values = ((name, int(value) if isinstance(value, bool) else value) for name, value in self.defines.items())
        return tuple(f"-D{name}={value}" for name, value in values)

    @cached_property
    def source(self) -> str:
        """The macros, then the .cu with each header but CUDA's written out where it is first included."""
        return self._read()

    def _read(self) -> str:
        lines = [f"#define {macro[2:].replace('=', ' ', 1)}" for macro in self.macros]
        return "\n".join([*lines, _expand(self.path, self.folder, set())])

    @property
    def is_changed(self) -> bool:
        """Whether its files are others than when `source` read them, which is before it is compiled."""
        return "source" in self.__dict__ and self._read() != self.source

    @cached_property
    def complete(self) -> bool:
        """Whether `source` has all that the compiler reads but CUDA's own headers. Not where it includes the value of a macro,
        asks whether a file is there, or where ``options`` name a header or a folder of headers."""
        left = [match["beside"] or match["listed"] for match in _INCLUDE.finditer(self.source)]
        followed = len(left) == len(_READS.findall(self.source.replace("\\\n", "")))
        cuda_has = all(any((Path(folder) / name).is_file() for folder in nvrtc.include_folders()) for name in left)
        return followed and cuda_has and not any(re.match("-I|--?(pre-)?include", option) for option in self.options)

    @cached_property
    def key(self) -> str:
        """Name of the cache entry: all that decides the machine code. The CUDA headers count by the compiler's version.
        A kernel that is not `complete` has no entry: its key is another one for each object."""
        start = str((self.start_registers, self.threads))
        parts = [CACHE_FORMAT, str(nvrtc.version()), *self.arch.options, *self.options, start, self.source]
        parts += [str(self.sources)] if self.sources else []
        parts += [] if self.complete else [secrets.token_hex()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @cached_property
    def binary(self) -> Binary:
        """From the cache, or else compiled in this process (and cached)."""
        return self._obtain(nvrtc.compile)

    def compile(self) -> Self:
        """Now rather than at first use."""
        _ = self.binary
        return self

    def _obtain(self, compiler: Callable[[str, Sequence[str]], Binary]) -> Binary:
        name, beside = f"{self.key}.kernel", self.sources.parent if self.sources else None
        kept = cache.read(name, beside) if self.complete else None
        if kept is not None:
            binary = Binary.from_bytes(kept)
        else:
            includes = [f"-I{folder}" for folder in (self.folder, *nvrtc.include_folders())]
            binary = compiler(str(self.path), [*self.arch.options, *self.options, *self.macros, *includes])
            if self.start_registers is not None:
                binary = binary._replace(cubin=start_with(binary.cubin, self.start_registers, self.threads))
            if self.complete and self._read() == self.source:  # else somebody has changed it meanwhile
                cache.write(name, binary.to_bytes(), beside)
        if "C7510" in binary.log or "serialized" in binary.log:
            warnings.warn(f"{self.entry} ({' '.join(self.macros)}): wgmma was serialised, see .log", stacklevel=3)
        return binary

    @property
    def cubin(self) -> bytes:
        """Machine code, an ELF file; compiled, or read from the cache, when asked for."""
        return self.binary.cubin

    @property
    def ptx(self) -> str:
        """The compiler's intermediate code, as text."""
        return self.binary.ptx

    @property
    def log(self) -> str:
        """All that the compiler said, ptxas's resource usage included."""
        return self.binary.log

    @cached_property
    def sass(self) -> str:
        """Machine code as text, by nvdisasm (PyPI: nvidia-cuda-nvdisasm). FileNotFoundError without nvdisasm, RuntimeError
        where it refuses the code, as one older than the compiler may."""
        return self.disassemble()

    def disassemble(self, *options: str) -> str:
        """As `sass`, with further ``options`` of nvdisasm; raises what that does."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(self.cubin)
            command = [nvrtc.find_tool("nvdisasm"), "--print-code", *options, str(cubin)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            release = "{}.{}".format(*nvrtc.version())
            mend = f"pip install -U 'nvidia-cuda-nvdisasm>={release}'"
            raise RuntimeError(
                f"{command[0]}: expected one for code of NVRTC {release}, got {done.stderr.strip()}: {mend}"
            )
        return done.stdout

    @property
    def element(self) -> Element:
        """The type of the operands that it multiplies."""
        return E4M3 if self.defines.get("FP8") else BF16

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return int(self.defines.get("CLUSTER", 1))

    def _usage(self, pattern: str) -> list[int]:
        """Numbers that ``pattern`` finds in the part of ptxas's report that is about this entry."""
        _, found, report = self.log.partition(f"Compiling entry function '{self.entry}'")
        if not found:
            raise CompileError(f"{self.file} has no extern 'C' __global__ function {self.entry}\n{self.log}")
        return [int(number) for number in re.findall(pattern, report.partition("Compiling entry function")[0])]

    @property
    def registers(self) -> int:
        """That a thread starts with."""
        return self.start_registers or self._usage(r"Used (\d+) registers")[0]

    @property
    def spills(self) -> int:
        """Bytes per thread that are stored to and loaded from local memory for want of registers."""
        return sum(self._usage(r"(\d+) bytes spill"))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: declared in the source plus asked for at the launch."""
        return sum(self._usage(r"(\d+) bytes smem")) + self.dynamic_smem

    def function(self, device: int | None = None) -> Any:
        """The ``cupy.cuda.Function`` on a device, by default the current one: call it with ``(grid, block, args, shared_mem,
        stream)``. ``stream`` is any object whose ``.ptr`` is a cudaStream_t. On a target's, a `Handle`, and nothing is compiled.
        """
        return self.load(current_device() if device is None else device)

    def _code_for(self, device: int) -> tuple[bytes, str, int | None]:
        """As `driver.Loadable._code_for`. A kernel whose architecture is not the GPU's serves every GPU: it is compiled for the
        GPU's. Code for compute capability 8.0 runs on 8.6 and 8.9. Other GPUs get code of their own where NVRTC knows them, but
        Hopper GPUs and newer ones get PTX, which the driver compiles. ValueError for what the GPU cannot run."""
        capability = capability_of(device)
        if not self.arch.runs_on(capability) and (own := arch_of(capability)) is not None:
            try:
                return replace(self, arch=own)._code_for(device)
            except CompileError as error:
                raise ValueError(f"{self.file}: expected a GPU of {self.arch.wanted}, got {capability}") from error
        number, made = 10 * capability[0] + capability[1], self
        shared = capability[0] == self.arch.least[0] and number != JETSON
        if not shared and capability != HOPPER.least and number in nvrtc.targets():
            made, shared = replace(self, arch=replace(self.arch, target=f"sm_{number}")), True
        return made.cubin if shared else made.ptx.encode(), self.entry, self.dynamic_smem

    def handle(self, device: int) -> int | Handle:
        """The CUfunction on a device, as an address; loaded the first time."""
        return (self._functions.get(device) or self.load(device)).ptr

    def __repr__(self) -> str:
        made_from = " ".join([self.file, *(macro[2:] for macro in self.macros)])
        if "binary" not in self.__dict__:  # where cached_property keeps it
            return f"Kernel({self.entry}: not compiled; {made_from})"
        usage = f"{self.registers} registers, {self.spills} B spilled, {self.smem_bytes} B shared"
        return f"Kernel({self.entry}: {usage}; {made_from})"


def _expand(path: Path, folder: Path, seen: set[Path]) -> str:
    """The file's text with each ``#include`` replaced by the file it names, the first time. Files are looked for where NVRTC
    does: ``"…"`` beside the file that includes it, then, as ``<…>``, in ``folder``. What is in neither stays: CUDA has it, or
    the compiler says that nobody does. Bytes that are no UTF-8 become escapes, as in a string literal."""

    def include(match: re.Match[str]) -> str:
        name = match["beside"] or match["listed"]
        places = [path.parent, folder] if match["beside"] else [folder]
        header = next((place / name for place in places if (place / name).is_file()), None)
        if header is None:
            return match[0]
        if header.resolve() in seen:
            return f"// ---- {name} again\n{match['rest']}"  # which is a place: it may do something each time
        seen.add(header.resolve())
        return f"// ---- {name}\n{_expand(header, folder, seen)}\n// ---- end of {name}{match['rest']}"

    return _INCLUDE.sub(include, path.read_text(encoding="utf-8", errors="backslashreplace"))


# --- In another process ----------------------------------------------------------------------------------------------


def compile_in_subprocess(kernel: Kernel) -> Kernel:
    """Fill ``kernel.binary`` by a compiler in a process of its own. CompileError if it refuses the kernel or crashes."""

    def compiler(file: str, options: Sequence[str]) -> Binary:
        command = [sys.executable, "-P", nvrtc.__file__]  # -P: this folder's modules must not shadow others
        done = subprocess.run(command, check=False, input=json.dumps([file, options]).encode(), capture_output=True)
        if done.returncode < 0:
            raise CompileError(f"NVRTC crashed (signal {-done.returncode}) over {kernel!r}")
        if done.returncode > 0:
            raise CompileError(done.stderr.decode(errors="replace"))
        return Binary.from_bytes(done.stdout)

    if "binary" not in kernel.__dict__:
        kernel.__dict__["binary"] = kernel._obtain(compiler)
    return kernel


def compile_many(kernels: Iterable[Kernel], jobs: int | None = None) -> list[Kernel]:
    """Compile in ``jobs`` processes at a time (default: one a core), equal kernels once; raises the first CompileError."""
    kernels = list(kernels)
    unique = {kernel.key: kernel for kernel in kernels}
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        list(pool.map(compile_in_subprocess, unique.values()))
    for kernel in kernels:
        kernel.__dict__["binary"] = unique[kernel.key].binary
    return kernels
