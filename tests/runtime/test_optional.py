"""Packages of wrong versions, or none, where they are used: the error names the version wanted, the one found, the command."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from blazeproto.autograd import backends
from blazeproto.gemm import nvrtc
from blazeproto.gemm.compile import Kernel
from blazeproto.runtime import optional
from tests.python import python

ROOT = Path(__file__).resolve().parents[2]
CUPY_USES = (
    "arrays.current_device()",
    "arrays.current_stream()",
    "arrays.empty((1,), 'float32')",
    "memory.as_cupy(a)",
    "memory.on_stream(a, None)",
    "driver.load(b'', 'f', 0)",
    "driver.launch(0, (1, 1), 1, 0, 0, [1])",
    "launch.num_sms(0)",
    "tickets.counters(0)",
    "timeline.record(print)",
)


def fake(folder: Path, name: str, version: str) -> None:
    """What pip leaves of a distribution: the version is read from nothing else."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("distribution", "version", "expected", "uses"),
    [
        ("cupy-cuda12x", "13.5.1", "cupy>=13.6, got 13.5.1", CUPY_USES),
        (
            "numba-cuda",
            "0.19.1",
            "numba-cuda>=0.20, got 0.19.1",
            ["from blazeproto.dispatch import tiled", "from blazeproto.router import topk_kernels"],
        ),
        (
            "cuda-core",
            "2.0.0",
            "cuda-core>=0.3,<2, got 2.0.0",
            ["numba_kernel.NumbaKernel(print, '', threads=32).cubin()"],
        ),
        (
            "cuda-bindings",
            "12.8.0",
            "cuda-bindings>=12.9,<14, got 12.8.0",
            ["nvrtc.version()", "compile_one().compile()"],
        ),
    ],
)
def test_a_wrong_version_where_it_is_used(
    tmp_path: Path, distribution: str, version: str, expected: str, uses: Sequence[str]
) -> None:
    fake(tmp_path, distribution, version)
    if distribution != "cuda-bindings":
        fake(tmp_path, "cuda-bindings", "13.1.0")
    code = f"""
from blazeproto.runtime import optional
optional.driver_cuda = lambda: None
from blazeproto.lab import timeline
from blazeproto.gemm import launch, nvrtc, tickets
from blazeproto.gemm.compile import Kernel
from blazeproto.runtime import arrays, driver, memory, numba_kernel
numba_kernel.NumbaKernel.key, numba_kernel.NumbaKernel._files = lambda *_: "none", ()
a = arrays.DeviceArray(256, (1,), "float32", (1,), 0, None)
def compile_one(): return Kernel("combine.cu", "combine", {{"TOP_K": 8, "HAS_SCORES": 1}})
for use in {list(uses)}:
    try:
        exec(use)
    except (ImportError, nvrtc.CompileError) as error:
        print(error)
    else:
        raise AssertionError(use)
"""
    printed = python("-c", code, variables={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    package = {"cupy-cuda12x": "cupy-cuda13x[ctk]>=13.6", "cuda-bindings": "numba-cuda[cu12]>=0.20"}
    command = f"pip install '{package.get(distribution, 'numba-cuda[cu13]>=0.20')}'"
    lines = printed.splitlines()
    assert len(lines) == len(uses)
    assert all(line.endswith(f"expected {expected}: {command}") for line in lines), lines


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Those of the distributions that are installed: none. No module of theirs can be imported."""
    found: dict[str, str] = {}
    monkeypatch.setattr(optional, "installed", lambda names: {name: found[name] for name in names if name in found})
    monkeypatch.setattr(optional, "_is_importable", lambda module: False)
    monkeypatch.setattr(optional, "driver_cuda", lambda: None)
    optional.need.cache_clear()
    yield found
    optional.need.cache_clear()


def test_a_missing_package(versions: dict[str, str]) -> None:
    with pytest.raises(ImportError) as error:
        optional.need("cupy")
    assert error.value.name == "cupy"
    lab = ", or -e '.[cu12,lab]' for all that the lab needs"
    assert str(error.value) == f"expected cupy>=13.6, got none: pip install 'cupy-cuda12x[ctk]>=13.6'{lab}"
    versions["cuda-bindings"] = "13.1.0"
    told = optional.missing("cupy")
    assert told == f"cupy>=13.6, got none: pip install 'cupy-cuda13x[ctk]>=13.6'{lab.replace('cu12', 'cu13')}"
    versions.update({"cuda-bindings": "11.8.0", "cupy-cuda13x": "14.0"})
    assert (optional.missing("cuda-bindings") or "").endswith("got 11.8.0: pip install 'numba-cuda[cu13]>=0.20'")


def test_bindings_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings.nvrtc")

    def absent() -> None:
        raise RuntimeError("no libnvrtc.so.12")

    monkeypatch.setattr(bindings, "nvrtcVersion", absent)
    with pytest.raises(
        nvrtc.CompileError, match=r"expected libnvrtc, got no libnvrtc\.so\.12: pip install 'numba-cuda"
    ):
        nvrtc.version.__wrapped__()


def test_a_disassembler_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'fatal: unknown version' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(nvrtc, "find_tool", lambda name: str(tool))
    monkeypatch.setattr(Kernel, "cubin", b"")
    with pytest.raises(RuntimeError, match=r"got fatal: unknown version: pip install -U 'nvidia-cuda-nvdisasm>=\d"):
        _ = Kernel("combine.cu", "combine").sass


def test_right_versions(versions: dict[str, str]) -> None:
    versions |= {"cupy": "13.6.0", "numba-cuda": "0.20.0+local", "cuda-bindings": "13.0rc1", "cuda-core": "1.2.2"}
    versions |= {
        "transformers": "5.17.0",
        "peft": "0.21.2",
        "torchtitan": "0.3.0",
        "rich": "15.0.0",
        "matplotlib": "3.11",
    }
    for name in optional.WANTED:
        optional.need(name)
    versions.clear()
    optional.need("cupy")  # looked up once


def test_a_package_without_a_version_is_taken(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_is_importable", lambda module: module == "cupy")
    assert optional.missing("cupy") is None and optional.missing("numba-cuda")


WITHOUT_THE_LAB = """
import sys
sys.modules.update(rich=None, matplotlib=None)
from blazeproto.runtime import optional
installed = optional.installed
optional.installed = lambda names: installed([name for name in names if name not in optional.LAB])
"""


def test_the_layer_needs_no_package_of_the_lab() -> None:
    """It runs, and IPython and Jupyter show it by its repr."""
    code = f"""{WITHOUT_THE_LAB}
import io, torch, blazeproto
from types import SimpleNamespace
layer = blazeproto.MoE(16, 8, 4, 2)
out, stats = layer(torch.randn(8, 16))
(out.sum() + stats.aux_loss).backward()
printed = []
layer._repr_pretty_(SimpleNamespace(stack=[0], text=printed.append), False)
assert printed == [repr(layer)] and layer._repr_html_() is None
"""
    python("-c", code)


def test_what_draws_says_how_to_install_it() -> None:
    code = f"""{WITHOUT_THE_LAB}
import numpy
from blazeproto.dispatch import reference
from blazeproto.runtime import shown
uses = (
    "from blazeproto.lab import Workbench",
    "from blazeproto.lab import explain",
    "from blazeproto.lab import machine_code",
    "from blazeproto.lab import views",
    "import blazeproto.lab.target",
    "from blazeproto.__main__ import waiting; waiting('')",
    "from blazeproto.lab import fragment; fragment('up_forward')._repr_html_()",
    "from blazeproto.lab import svg; svg.blank(1, 1, '')",
)
for use in uses:
    try:
        exec(use)
    except ImportError as error:
        print(error)
    else:
        raise AssertionError(use)
"""
    told = "expected {}, got none: pip install -e '.[lab]'"
    assert python("-c", code).splitlines() == [told.format("rich")] * 6 + [told.format("matplotlib")] * 2


def test_the_hopper_backend_says_what_it_lacks(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it refuses; "auto" runs the torch backend, and says why once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    versions |= {"cupy-cuda12x": "13.5.1", "numba-cuda": "0.30.4", "cuda-bindings": "12.9.4", "cuda-core": "1.2.2"}
    arguments = (torch.device("cuda", 97), torch.bfloat16, 8, 64)
    lacks = r"cupy>=13\.6, got 13\.5\.1: pip install 'cupy-cuda12x\[ctk\]>=13\.6'"
    try:
        with pytest.warns(UserWarning, match=lacks):
            assert backends.backend_on("auto", *arguments).__name__.endswith("torch_backend")
        with pytest.raises(ValueError, match=f'got "hopper", which needs {lacks}'):
            backends.backend_on("hopper", *arguments)
    finally:
        backends.backend_on.cache_clear()
        backends._missing_on_device.cache_clear()


def test_the_kernels_need_no_integrations_package(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    versions |= {"cupy-cuda12x": "13.6.0", "numba-cuda": "0.30.4", "cuda-bindings": "12.9.4", "cuda-core": "1.2.2"}
    versions |= dict.fromkeys(optional.INTEGRATIONS, "0.1")
    try:
        assert backends._missing_on_device(97) is None
    finally:
        backends._missing_on_device.cache_clear()
