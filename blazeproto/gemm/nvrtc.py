"""The compiler: one .cu file in, machine code out. Needs no GPU and no driver; serves CUDA 12 and CUDA 13 alike.

Compiling imports nothing of this package, so that ``python nvrtc.py`` is a compiler process of its own, quick to start: a
malformed ``wgmma`` can crash NVRTC instead of failing (``compile_in_subprocess`` in compile.py is its caller).
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

# The headers our kernels may include, the CUDA ones directly or not; each is looked for once, in this order.
HEADERS = ("cuda_bf16.h", "nv/target", "cuda/std/cstdint")


class CompileError(RuntimeError):
    """The compiler refused a kernel, or died over it; the message ends with the compiler's log."""


class Binary(NamedTuple):
    """One compiled .cu file."""

    cubin: bytes
    ptx: str
    log: str  # all that the compiler and ptxas said

    def to_bytes(self) -> bytes:
        return json.dumps([self.cubin.hex(), self.ptx, self.log]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        cubin, ptx, log = json.loads(data)
        return cls(bytes.fromhex(cubin), ptx, log)


def _check(result: tuple[Any, ...]) -> Any:
    """cuda.bindings returns (error, value…): raise on an error, else hand over the value."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if values else None


@cache
def version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles here. CompileError without NVRTC, or with a cuda-bindings of another version."""
    from blazeproto.runtime import optional

    try:
        optional.need("cuda-bindings")
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except ImportError as error:
        raise CompileError(f"NVRTC, which compiles kernels: {error}") from error
    except RuntimeError as error:  # the bindings are here, the library isn't
        mend = optional.command("cuda-bindings")
        raise CompileError(f"NVRTC, which compiles kernels: expected libnvrtc, got {error}: {mend}") from error
    _check((status,))
    return major, minor


@cache
def targets() -> tuple[int, ...]:
    """The compute capabilities that this NVRTC compiles for, times ten. CompileError as for `version`."""
    version()
    from cuda.bindings import nvrtc

    return tuple(_check(nvrtc.nvrtcGetSupportedArchs()))


def compile(file: str, options: Sequence[str]) -> Binary:
    """Compile the .cu at ``file`` in this process. ``options`` are NVRTC's, include folders among them."""
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(Path(file).read_bytes(), file.encode(), 0, [], []))

    def fetch(what: str) -> bytes:
        size = _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
        # Filled in place, and so never a single byte: that would be Python's own b" ", for all who read one from then on.
        data = b" " * (size + 1)
        _check(getattr(nvrtc, f"nvrtcGet{what}")(program, data))
        return data[:size]

    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = fetch("ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if int(status) != 0:
            raise CompileError(
                f"{Path(file).name}: {status.name}\n{with_sources(log, fetch('PTX').decode(errors='replace'))}"
            )
        return Binary(fetch("CUBIN"), fetch("PTX").rstrip(b"\0").decode(), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def with_sources(log: str, ptx: str) -> str:
    """ptxas's log, with the line of the source and the instruction behind each line of PTX that it names. ptx: with -lineinfo."""
    lines, files = ptx.splitlines(), dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.MULTILINE))

    def with_source(found: re.Match[str]) -> str:
        before = "\n".join(lines[: (number := int(found[1]))])
        places = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", before, re.MULTILINE)
        if not places or places[-1][0] not in files:
            return found[0]
        return f"{found[0]} ({Path(files[places[-1][0]]).name}:{places[-1][1]}: {lines[number - 1].strip()})"

    return re.sub(r"ptx input, line (\d+)", with_source, log)


# --- Where CUDA's headers and tools lie ------------------------------------------------------------------------------


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _cuda_homes() -> Iterator[Path]:
    """Roots of CUDA installations, likeliest to match our NVRTC first: its wheels, the environment, nvcc's, the usual one."""
    for wheels in _wheel_folders():  # CUDA 13's wheels share a folder, CUDA 12's have one each
        yield from (wheels / part for part in (f"cu{version()[0]}", "cuda_runtime", "cuda_cccl"))
    yield from (Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if os.environ.get(name))
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


@cache
def include_folders() -> tuple[str, ...]:
    """The folders in which NVRTC finds CUDA's headers: for each of HEADERS the first that has it, of CUDA's wheels, a toolkit and
    CuPy. CompileError where a header is in none."""
    inside = ("include", "include/cccl", "targets/x86_64-linux/include")
    folders = [home / part for home in _cuda_homes() for part in inside]
    if spec := importlib.util.find_spec("cupy"):  # brings a copy of <nv/target> and <cuda/std/…>: better than none
        folders.append(Path(spec.origin or "").parent / "_core/include/cupy/_cccl/libcudacxx")
    found: list[Path] = []
    for header in HEADERS:
        folder = next((folder for folder in found + folders if (folder / header).is_file()), None)
        if folder is None:
            raise CompileError(f"no <{header}>: pip install -e '.[cu{version()[0]}]', or set CUDA_HOME")
        found.append(folder)
    return tuple(dict.fromkeys(map(str, found)))


def find_tool(name: str) -> str:
    """Path of a CUDA program: on PATH, in a CUDA installation, or in a wheel of any CUDA version; FileNotFoundError."""
    installed = [home / "bin" / name for home in _cuda_homes()]
    wheels = [path for folder in _wheel_folders() for path in sorted(folder.glob(f"*/bin/{name}"))]
    found = shutil.which(name) or next((str(path) for path in installed + wheels if path.is_file()), None)
    if found is None:
        from blazeproto.runtime.optional import or_the_lab

        either = f"pip install nvidia-cuda-{name}{or_the_lab(str(version()[0]))}"
        raise FileNotFoundError(f"{name} not found: {either}; or set CUDA_HOME")
    return found


# The compiler process: ``[file, options]`` as JSON on stdin, a Binary's bytes on stdout, an error as exit code 1.
if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(compile(*json.load(sys.stdin)).to_bytes())
    except CompileError as error:
        sys.exit(str(error))
