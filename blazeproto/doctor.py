"""Lists what works on this machine, what is missing, and the command that mends it: `python -m blazeproto doctor`.

    for check in examine():
        print(check.name, check.verdict, check.mend)

Every check runs what it is about, in a process of its own, so that a package that crashes when it is imported takes nothing
down: the torch backend trains a step of a small layer, NVRTC compiles a kernel, Numba's simulator runs one, and on a GPU
that runs the kernels a dispatch and `combine` are compared with their twins. This module imports none of these packages.

`check` runs the oracle checks of `blazeproto.lab.card` on the GPU: `python -m blazeproto doctor --check`.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from blazeproto.runtime import arch, notes, optional
from blazeproto.runtime.optional import CUPY, cuda_major, driver_cuda, installed, or_the_lab, requirement

WANTED = {"numpy": "<3", "torch": ">=2.11,<2.16", **optional.WANTED}
"""Versions, as in pyproject.toml."""
PYTHON = ">=3.11"
TIMEOUT = 300  # seconds of a check: the first NVRTC or Numba in a new environment is slow
CARD_TIMEOUT = 900  # seconds of `check`, which compiles the kernels of several layers

WORKS, MISSING, WRONG, BROKEN, ABSENT = "works", "missing", "wrong version", "does not work", "not here"


@dataclass(frozen=True)
class Check:
    """verdict: "works", "missing", "wrong version", "does not work", or "not here", which is no fault.

    needed: False of what is missing, where only the lab uses it.  detail: what was tried, or what came instead.
    mend: a command, empty if nothing needs mending.
    """

    name: str
    version: str
    verdict: str
    detail: str = ""
    mend: str = ""
    needed: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing is missing that this machine could run."""
        return not self.needed or self.verdict in (WORKS, ABSENT)


@dataclass(frozen=True)
class Gpu:
    """The first GPU that CUDA shows. driver: its version.  cuda: the newest (major, minor) that the driver runs."""

    name: str
    capability: tuple[int, int]
    driver: str
    cuda: tuple[int, int]

    @property
    def runs_kernels(self) -> bool:
        return arch.arch_of(self.capability) is not None


def examine() -> list[Check]:
    """All checks, in the order in which one stands on another. Takes some seconds, more where kernels are compiled first."""
    gpu = find_gpu()
    on_gpu = gpu is not None and gpu.runs_kernels
    major = cuda_major(gpu.cuda if gpu else None)
    mends = {
        "numpy": _pip(f"numpy{WANTED['numpy']}"),
        "torch": _pip(f"torch{WANTED['torch']}"),
        "cupy": _pip(requirement("cupy", major)),
        "numba-cuda": _pip(requirement("numba-cuda", major)),
        "nvrtc": _pip(requirement("cupy", major), requirement("numba-cuda", major)),
    }
    wanted = [
        name
        for name in PROBES
        if name != "card" and not ((name == "kernels" and not on_gpu) or (name == "torch_gpu" and gpu is None))
    ]
    with ThreadPoolExecutor() as pool:
        runs = dict(zip(wanted, pool.map(probe, wanted), strict=True))

    tool = runs["nvdisasm"]
    by_what = f"for machine code: pip install nvidia-cuda-nvdisasm{or_the_lab(major)}" if tool.error else tool.printed
    what = "imports" if gpu else "imports; needed only on a GPU"
    lab = f"optional, for the lab: pip install -e '.[{f'cu{major},lab' if gpu else 'laptop'}]'"
    for_kernels = "" if on_gpu else lab
    for_nvrtc = "" if installed(["cuda-bindings"]) else for_kernels
    return [
        _python(),
        *_machine(gpu),
        _cuda(gpu, runs["nvrtc"], mends["nvrtc"], for_nvrtc),
        _nvrtc(runs["nvrtc"], mends["nvrtc"], for_nvrtc),
        _package("NumPy", ["numpy"], runs["numpy"], "imports", mends["numpy"]),
        _package("torch", ["torch"], runs["torch"], "trains a step on the torch backend", mends["torch"]),
        *([_ran("torch on the GPU", "", runs["torch_gpu"], "multiplies there", mends["torch"])] if gpu else []),
        _package("CuPy", CUPY, runs["cupy"], what, mends["cupy"], for_kernels if gpu else "needed only on a GPU"),
        _package("Numba", ["numba-cuda"], runs["numba-cuda"], "simulates a kernel", mends["numba-cuda"], for_kernels),
        *(_package(name, [name], runs[name], "imports", _pip(name), lab) for name in optional.LAB),
        Check("nvdisasm", "", MISSING if tool.error else WORKS, by_what, needed=False),
        *(
            [_ran("kernels", "", runs["kernels"], "a dispatch and combine agree with their twins", mends["nvrtc"])]
            if on_gpu
            else []
        ),
    ]


def _pip(*packages: str) -> str:
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def check(say: Callable[[str], None]) -> bool:
    """Runs the oracle checks on the first GPU and says a report, to paste into an issue. Returns whether all passed.

    A failure is noted in the compile cache's folder; "auto" then takes torch on GPUs of this name. Checks that pass remove the
    note. A crash or a hang is a failure. An error before the first check changes no note; neither does too little memory.
    """
    gpu = find_gpu()
    lacks = arch.missing(gpu.capability if gpu else None)
    lacks = lacks or next(filter(None, map(optional.missing, optional.KERNELS)), None)
    if gpu is None or lacks:
        say(f"The check needs {lacks}.")
        return False
    say(
        "The checks take about a minute, longer where kernels are compiled first. The report, to paste into an issue:\n"
    )
    run, capability = probe("card"), ".".join(map(str, gpu.capability))
    versions = installed(["blazeproto", "torch", *CUPY, *optional.KERNELS]) | {"Python": _python().version}
    say(f"{gpu.name}, compute capability {capability}, driver {gpu.driver}, CUDA up to {gpu.cuda[0]}.{gpu.cuda[1]}")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    say("\n".join(filter(None, (found, run.printed, run.error or "All checks passed."))))
    no_memory = (
        re.search("out ?of ?memory", f"{run.error} {run.complaint}", re.IGNORECASE) or run.error == "crashed (signal 9)"
    )
    if run.error is None:
        with suppress(OSError):  # no folder, and so no note
            notes.note_path("check", gpu.name).unlink()
    elif run.printed and not no_memory:
        file = notes.note("check", gpu.name, failed=run.error)
        say(f'\n"auto" takes torch on this GPU until the check passes or {file} is deleted.')
    return run.error is None


# --- The machine -----------------------------------------------------------------------------------------------------------


def find_gpu() -> Gpu | None:
    """By the driver's own libraries, so that nothing need be installed; None without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)

    def asked(status: int) -> int:
        if status != 0:
            raise OSError(f"CUDA driver: error {status}")
        return number.value

    try:
        asked(cuda.cuInit(0))
        if not asked(cuda.cuDeviceGetCount(ctypes.byref(number))):
            return None
        device = ctypes.c_int(asked(cuda.cuDeviceGet(ctypes.byref(number), 0)))
        asked(cuda.cuDeviceGetName(name, len(name), device))
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        capability = [asked(cuda.cuDeviceGetAttribute(ctypes.byref(number), which, device)) for which in (75, 76)]
    except OSError:
        return None
    return Gpu(
        name.value.decode(errors="replace"), (capability[0], capability[1]), _driver_version(), driver_cuda() or (0, 0)
    )


def _driver_version() -> str:
    try:
        management = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(80)
    if management.nvmlInit_v2() != 0 or management.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return "unknown"
    return text.value.decode()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    right = SpecifierSet(PYTHON).contains(version)
    return Check("Python", version, WORKS if right else WRONG, "" if right else f"expected {PYTHON}")


def _machine(gpu: Gpu | None) -> list[Check]:
    if gpu is None:
        return [
            Check(
                "GPU",
                "",
                ABSENT,
                "the torch backend runs on the CPU; with the lab, kernels compile and dispatch is simulated",
            ),
            Check("driver", "", ABSENT),
        ]
    capability = ".".join(map(str, gpu.capability))
    detail = gpu.name if gpu.runs_kernels else f"{gpu.name}: the kernels need {arch.WANTED}; the torch backend runs"
    return [
        Check("GPU", capability, WORKS if gpu.runs_kernels else ABSENT, detail),
        Check("driver", gpu.driver, WORKS, f"runs CUDA up to {gpu.cuda[0]}.{gpu.cuda[1]}"),
    ]


def _cuda(gpu: Gpu | None, compiler: "Run", mend: str, optional_for: str) -> Check:
    """The check of the CUDA packages, whose major version the driver must run."""
    version = _version_of(compiler)
    if not version:
        return Check("CUDA", "", MISSING, optional_for or "no NVRTC that says its version", mend, not optional_for)
    if gpu is not None and int(version.split(".")[0]) > gpu.cuda[0]:
        return Check("CUDA", version, WRONG, f"the driver runs CUDA up to {gpu.cuda[0]}.{gpu.cuda[1]}", mend)
    return Check("CUDA", version, WORKS, "of the installed packages")


def _nvrtc(run: "Run", mend: str, optional_for: str) -> Check:
    if not (version := _version_of(run)):
        return Check("NVRTC", "", MISSING, optional_for or run.error or "", mend, not optional_for)
    return _ran("NVRTC", version, run, f"compiles for {arch.HOPPER.target}", mend)


# --- Packages --------------------------------------------------------------------------------------------------------------


def _package(
    name: str, distributions: Sequence[str], run: "Run", what: str, mend: str, optional_for: str = ""
) -> Check:
    """Is it there, in a version that this package takes, and does it run? optional_for: what it is for, where it may be missing;
    there, but wrong or broken, it is a fault all the same."""
    versions = installed(distributions)
    if not versions:
        return Check(name, "", MISSING, optional_for, mend, not optional_for)
    if len(versions) > 1:
        remove = f"pip uninstall -y {' '.join(versions)} && {mend}"
        return Check(name, "", BROKEN, f"{' and '.join(versions)} overwrite each other", remove)
    version = next(iter(versions.values()))
    wanted = WANTED[next(key for key in WANTED if distributions[0].startswith(key))]
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return Check(name, version, WRONG, f"expected {wanted}", mend)
    return _ran(name, version, run, what, mend)


def _ran(name: str, version: str, run: "Run", what: str, mend: str) -> Check:
    if run.error is None:
        return Check(name, version, WORKS, what)
    return Check(name, version, BROKEN, run.error, mend.replace("install", "install --force-reinstall", 1))


# --- What is run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """printed: what a check's process wrote.  error: why it failed, None where it did not.  complaint: all that it wrote to
    stderr."""

    printed: str = ""
    error: str | None = None
    complaint: str = ""


def _version_of(run: Run) -> str:
    return run.printed.split("\n")[0]


PROBES = {
    "numpy": "import numpy; assert numpy.arange(4).sum() == 6",
    "torch": """
import torch, blazeproto
torch.manual_seed(0)
layer = blazeproto.MoE(16, 8, 4, 2, backend="torch")
out, stats = layer(torch.randn(8, 16))
(out.square().mean() + stats.aux_loss).backward()
assert all(p.grad.isfinite().all() for p in layer.parameters())
""",
    "nvrtc": """
import pathlib, tempfile
from blazeproto.gemm import nvrtc
print("%d.%d" % nvrtc.version(), flush=True)
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "probe.cu")
    file.write_text('#include <cuda_bf16.h>\\nextern "C" __global__ void f(__nv_bfloat16 *x) { *x = 1.0f; }')
    includes = [f"-I{path}" for path in nvrtc.include_folders()]
    assert nvrtc.compile(str(file), ["--gpu-architecture=sm_90a", "-default-device", *includes]).cubin
""",
    "nvdisasm": "from blazeproto.gemm import nvrtc; print(nvrtc.find_tool('nvdisasm'))",
    "cupy": "import cupy",
    **{name: f"import {name}" for name in optional.LAB},
    "numba-cuda": """
import numpy
from numba import cuda
@cuda.jit
def double(x):
    shared = cuda.shared.array(4, "int32")
    shared[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    cuda.syncthreads()
    x[cuda.threadIdx.x] = 2 * shared[cuda.threadIdx.x]
x = numpy.arange(4, dtype="int32")
double[1, 4](x)
assert x.tolist() == [0, 2, 4, 6]
""",
    "torch_gpu": """
import torch
if torch.version.cuda is None:
    raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
x = torch.ones(16, 16, device="cuda")
assert (x @ x).sum() == 4096
""",
    "kernels": """
import torch
from blazeproto import dispatch, gemm
from blazeproto.dispatch import reference
torch.manual_seed(0)
experts = torch.rand(64, 8, device="cuda").topk(2).indices.int()
made = dispatch.build_dispatch(experts, 8)
twin = reference.build_dispatch(experts.cpu().numpy(), 8)
assert made.token_index_map.tolist() == twin.token_index_map.tolist()
y = torch.randint(-8, 8, (128, 64), device="cuda").bfloat16()
out = gemm.combine(y, made)
assert torch.equal(out, y[made.token_index_map.long()].view(64, 2, 64).sum(1))
""",
    "card": """
from blazeproto.autograd import backends
backends._failed_check = lambda index: None  # an earlier failure, after which the router would run on torch
from blazeproto import gemm
from blazeproto.lab import card
from blazeproto.runtime import arch
import torch
name = arch.arch_of(torch.cuda.get_device_capability()).name
torch.ones(1, device="cuda")
gemm.prepare(64, 32, 4, 2, backend=name)  # what this machine lacks shows before the first check
card.check("cuda", name)
""",
}
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "numba-cuda": {"NUMBA_ENABLE_CUDASIM": "1"},
    "torch": {"CUDA_VISIBLE_DEVICES": ""},
}


def probe(name: str) -> Run:
    """One of `PROBES`, in a process of its own with this one's interpreter."""
    environment = {**os.environ, **ENVIRONMENT.get(name, {})}
    command = [sys.executable, "-c", PROBES[name]]
    limit = CARD_TIMEOUT if name == "card" else TIMEOUT
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Run("no answer", f"no answer in {limit} s")
    if done.returncode == 0:
        return Run(done.stdout.strip())
    if done.returncode < 0:
        return Run(done.stdout.strip(), f"crashed (signal {-done.returncode})", done.stderr)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return Run(done.stdout.strip(), said[-1] if said else f"exit code {done.returncode}", done.stderr)
