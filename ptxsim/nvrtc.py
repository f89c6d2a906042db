"""CUDA C++ to PTX and machine code by NVRTC, which needs neither a GPU nor a driver, and has no other packages beside it.

A malformed ``wgmma`` crashes NVRTC, so it runs in a process of its own: ``python nvrtc.py``.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17", "-lineinfo", "-default-device", "--no-cache")
LONGEST_PATH = 1000  # letters; more are no path, and the system would say so in its own words
PTX = re.compile(r"^\s*\.(version|visible|entry)\b", re.MULTILINE)


class CompileError(RuntimeError):
    """NVRTC is missing, refused a source, or crashed over it; the message ends with the compiler's log."""


class Binary(NamedTuple):
    """A compiled source: its text, its PTX, its machine code (an ELF file), and all that the compiler said."""

    source: str
    ptx: str
    cubin: bytes
    log: str

    @property
    def sass(self) -> str:
        """The machine code as text, by nvdisasm. FileNotFoundError without nvdisasm, RuntimeError where it fails."""
        tools = [path for home in _homes() for path in sorted(home.glob("bin/nvdisasm*"))]
        tool = shutil.which("nvdisasm") or next(map(str, tools), None)
        if tool is None:
            raise FileNotFoundError("nvdisasm: expected it on PATH or in CUDA_HOME: pip install nvidia-cuda-nvdisasm")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(self.cubin)
            done = subprocess.run([tool, "--print-code", str(path)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{tool}: expected one as new as NVRTC, got {done.stderr.strip()}")
        return done.stdout


def compile(kernel: str | Path, *options: str) -> Binary:
    """CUDA C++, as text or a file, compiled for ``sm_90a``.

    options: NVRTC's, such as ``-DN=4`` or ``-Ifolder``. Headers beside a file are found, and CUDA's where they are installed.

    TypeError, FileNotFoundError for a file that is not there, ValueError for a text without a kernel, CompileError for a source
    that NVRTC refuses, RuntimeError on macOS, which has no NVRTC.
    """
    name, source = text_of(kernel)
    if "__global__" not in source:
        raise ValueError("kernel: expected an .entry (PTX) or a __global__ function (CUDA C++), got neither")
    if sys.platform == "darwin":
        raise RuntimeError("kernel: expected PTX text, got CUDA C++; it is compiled by NVRTC, which macOS has not")
    if not all(isinstance(option, str) for option in options):
        raise TypeError(f"options: expected NVRTC's as text, got {options}")
    reads_files = "include" in source or any("include" in option for option in options)
    return (_compiled.__wrapped__ if reads_files else _compiled)(name, source, options)


def text_of(kernel: Any) -> tuple[str, str]:
    """The file's name, or ``kernel.cu`` for a text, and the text."""
    if not isinstance(kernel, str | Path):
        raise TypeError(f"kernel: expected text, a path, or an object with PTX, got {type(kernel).__name__}")
    if isinstance(kernel, str) and ("\n" in kernel or "{" in kernel):
        return "kernel.cu", kernel
    if len(str(kernel)) > LONGEST_PATH or not Path(kernel).is_file():
        got = repr(str(kernel)[:200])
        raise FileNotFoundError(f"kernel: expected PTX text, CUDA C++ source or a file of either, got {got}")
    return str(Path(kernel).resolve()), Path(kernel).read_text()


@lru_cache(maxsize=64)
def _compiled(name: str, source: str, options: tuple[str, ...]) -> Binary:
    library, places = _library()
    done = subprocess.run(
        [sys.executable, "-P", __file__],  # -P: this folder's modules must not shadow others
        input=json.dumps([library, name, source, [*OPTIONS, *options, *(f"-I{place}" for place in places)]]),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        mend = "CUDA's own headers: pip install nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12"
        said = done.stderr + mend * ("cannot open source file" in done.stderr)
        raise CompileError(f"{Path(name).name}: {said or f'NVRTC crashed, signal {-done.returncode}'}")
    ptx, cubin, log = json.loads(done.stdout)
    return Binary(source, ptx, bytes.fromhex(cubin), log)


def _homes() -> Iterator[Path]:
    """Folders of CUDA's parts: of its wheels, a newer CUDA's first, then of toolkits."""
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(folder).glob("*/"))
    yield from (Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if os.environ.get(name))
    yield Path("/usr/local/cuda")


def _library() -> tuple[str, list[Path]]:
    """NVRTC's path, and the folders of the headers that lie beside it. CompileError where there is none."""
    for home in _homes():
        for library in (*sorted(home.glob("lib*/libnvrtc.so*")), *sorted(home.glob("bin/**/nvrtc64_*_0.dll"))):
            homes = (home, home.parent / "cuda_runtime", home.parent / "cuda_cccl")
            places = (one / part for one in homes for part in ("include", "include/cccl"))
            return str(library), [place for place in places if place.is_dir()]
    raise CompileError("NVRTC: expected its library, got none: pip install nvidia-cuda-nvrtc-cu12, or set CUDA_HOME")


# --- The compiler's process: ``[library, name, source, options]`` on stdin, ``[ptx, cubin, log]`` on stdout, both JSON ---------


def _main(library: str, name: str, source: str, options: list[str]) -> None:
    """An error ends the process with what the compiler said."""
    nvrtc, program = ctypes.CDLL(library), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)

    def fetched(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value + 1)
        getattr(nvrtc, f"nvrtcGet{what}")(program, data)
        return data.raw[: size.value]

    ptx, log = (fetched(what).rstrip(b"\0 \n").decode(errors="replace") for what in ("PTX", "ProgramLog"))
    if failed:
        sys.exit(_with_sources(log, ptx))
    json.dump([ptx + "\n", fetched("CUBIN").hex(), log], sys.stdout)


def _with_sources(log: str, ptx: str) -> str:
    """ptxas's log, with the line of the source and the instruction behind each line of PTX that it names."""
    lines, files = ptx.splitlines(), dict(re.findall(r'^\s*\.file\s+(\d+) "([^"]+)"', ptx, re.MULTILINE))

    def with_source(found: re.Match[str]) -> str:
        before = lines[: int(found[1])]
        file, line = re.findall(r"^\s*\.loc\s+(\d+) (\d+)", "\n".join(before), re.MULTILINE)[-1]
        return f"{found[0]} ({Path(files[file]).name}:{line}: {before[-1].strip()})"

    return re.sub(r"ptx input, line (\d+)", with_source, log)


if __name__ == "__main__":
    _main(*json.load(sys.stdin))
