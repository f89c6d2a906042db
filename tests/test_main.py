"""`python -m blazeproto`: tour, doctor, bench, kernels, and their exit codes; doctor where packages are missing or broken."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blazeproto import doctor, gemm
from blazeproto.__main__ import main
from blazeproto.doctor import Check, Gpu, Run
from blazeproto.gemm.registry import kernels_by_use
from blazeproto.runtime import optional

ROOT = Path(__file__).resolve().parents[1]
H200 = Gpu("NVIDIA H200", (9, 0), "580.1", (13, 0))
A100 = Gpu("NVIDIA A100", (8, 0), "535.1", (12, 2))
OLD = Gpu("NVIDIA V100", (7, 0), "535.1", (12, 2))
VERSIONS = {"numpy": "2.5.5", "torch": "2.13.0+cu130", "cupy-cuda13x": "14.2.0", "numba-cuda": "0.30.4"}
VERSIONS |= {"rich": "15.0.0", "matplotlib": "3.11.2"}


def command(
    *arguments: str, path: Path | None = None, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``python -m blazeproto`` with a path before all others that are searched for packages, in a folder, and environment
    variables."""
    paths = os.pathsep.join(str(p) for p in (path, ROOT, os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    line = [sys.executable, "-m", "blazeproto", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=300, cwd=folder)


# --- doctor ------------------------------------------------------------------------------------------------------------------


def test_doctor_finds_all_here() -> None:
    """As the environment of `make test` has it; each check has run what it says."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    done = command("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(check["ok"] and not check["mend"] for check in checks.values())
    assert {"Python", "GPU", "driver", "CUDA", "NVRTC", "NumPy", "torch", "CuPy", "Numba"} <= set(checks)
    assert [checks[name]["verdict"] for name in ("NVRTC", "NumPy", "torch", "Numba")] == ["works"] * 4
    assert checks["torch"]["version"] == torch.__version__


def test_doctor_fails_where_a_package_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libfake.so: cannot open')")
    (tmp_path / "numba.py").write_text("import os; os.abort()")
    done = command("doctor", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    torch_line = next(line for line in done.stdout.splitlines() if line.strip().startswith("torch"))
    assert "does not work" in torch_line and "libfake.so" in torch_line and "crashed (signal 6)" in done.stdout
    assert "pip install --force-reinstall 'torch>=2.11,<2.16'" in done.stdout
    assert "NVRTC" in done.stdout and "✗" in done.stdout


Examine = Callable[..., dict[str, Check]]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Doctor on a machine with this GPU, these packages, and these checks that fail."""

    def run(gpu: Gpu | None, versions: dict[str, str], **errors: str) -> dict[str, Check]:
        def probe(name: str) -> Run:
            error = errors.get(name)
            there = name == "nvrtc" and not (error or "").startswith("ModuleNotFound")
            return Run("12.9" if there else "", error)

        def installed(names: Sequence[str]) -> dict[str, str]:
            return {name: versions[name] for name in names if name in versions}

        monkeypatch.setattr(doctor, "find_gpu", lambda: gpu)
        monkeypatch.setattr(doctor, "probe", probe)
        for module in (doctor, optional):
            monkeypatch.setattr(module, "installed", installed)
        return {check.name: check for check in doctor.examine()}

    return run


@pytest.mark.parametrize("gpu", [None, OLD, A100, H200], ids=["cpu", "v100", "a100", "h200"])
def test_a_whole_machine_is_well(examine: Examine, gpu: Gpu | None) -> None:
    checks = examine(gpu, VERSIONS)
    assert all(check.ok for check in checks.values())
    assert ("kernels" in checks) == (gpu in (A100, H200)) and ("torch on the GPU" in checks) == (gpu is not None)
    assert "card" not in checks


@pytest.mark.parametrize(
    ("package", "name", "mend"),
    [
        ("numpy", "NumPy", "pip install 'numpy<3'"),
        ("torch", "torch", "pip install 'torch>=2.11,<2.16'"),
        ("numba-cuda", "Numba", "pip install 'numba-cuda[cu13]>=0.20'"),
        ("cupy-cuda13x", "CuPy", "pip install 'cupy-cuda13x[ctk]>=13.6'"),
    ],
)
@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "h200"])
def test_a_missing_package(examine: Examine, gpu: Gpu | None, package: str, name: str, mend: str) -> None:
    checks = examine(gpu, {p: version for p, version in VERSIONS.items() if p != package})
    assert checks[name].verdict == "missing"
    assert checks[name].ok == (name in ("CuPy", "Numba") and gpu is None)  # which the lab alone needs there
    without = gpu is None and package == "cupy-cuda13x"  # then nothing says which CUDA
    assert checks[name].mend == (mend.replace("cuda13x", "cuda12x") if without else mend)
    assert [check.name for check in checks.values() if not check.ok] == ([] if checks[name].ok else [name])


@pytest.mark.parametrize(
    ("package", "version", "name"),
    [
        ("numpy", "3.0.0", "NumPy"),
        ("torch", "2.10.1", "torch"),
        ("torch", "2.16.0", "torch"),
        ("cupy-cuda13x", "13.5.1", "CuPy"),
        ("numba-cuda", "0.19.1", "Numba"),
    ],
)
def test_a_wrong_version(examine: Examine, package: str, version: str, name: str) -> None:
    check = examine(H200, VERSIONS | {package: version})[name]
    assert check.verdict == "wrong version" and not check.ok and check.version == version
    assert check.mend.startswith("pip install ") and "expected" in check.detail


def test_two_cupys(examine: Examine) -> None:
    check = examine(H200, VERSIONS | {"cupy-cuda12x": "14.2.0"})["CuPy"]
    assert check.mend.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'cupy-cuda13x")
    assert not check.ok


def test_cuda_packages_that_the_driver_does_not_run(examine: Examine) -> None:
    checks = examine(Gpu("NVIDIA H100", (9, 0), "520.1", (11, 8)), VERSIONS)
    assert checks["CUDA"].verdict == "wrong version" and "up to 11.8" in checks["CUDA"].detail


@pytest.mark.parametrize(
    ("probe", "name"), [("nvrtc", "NVRTC"), ("kernels", "kernels"), ("torch_gpu", "torch on the GPU"), ("cupy", "CuPy")]
)
def test_what_does_not_run(examine: Examine, probe: str, name: str) -> None:
    check = examine(H200, VERSIONS, **{probe: "OSError: broken"})[name]
    assert check.verdict == "does not work" and check.detail == "OSError: broken" and not check.ok
    assert check.mend.startswith("pip install --force-reinstall ")


def test_without_nvrtc_cuda_is_missing(examine: Examine) -> None:
    checks = examine(None, VERSIONS, nvrtc="ModuleNotFoundError: No module named 'cuda'")
    assert [(checks[name].verdict, checks[name].ok) for name in ("CUDA", "NVRTC")] == [("missing", True)] * 2
    checks = examine(H200, VERSIONS, nvrtc="ModuleNotFoundError: No module named 'cuda'")
    assert [(checks[name].verdict, checks[name].ok) for name in ("CUDA", "NVRTC")] == [("missing", False)] * 2
    assert checks["NVRTC"].mend == "pip install 'cupy-cuda13x[ctk]>=13.6' 'numba-cuda[cu13]>=0.20'"


def test_bindings_without_their_library_are_a_fault(examine: Examine) -> None:
    checks = examine(None, VERSIONS | {"cuda-bindings": "13.1"}, nvrtc="ModuleNotFoundError: no libnvrtc")
    assert not checks["NVRTC"].ok and checks["NVRTC"].detail == "ModuleNotFoundError: no libnvrtc"


def test_the_layer_alone_is_all_that_a_machine_without_a_gpu_needs(
    examine: Examine, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `pip install -e .`, which brings neither rich, with which nothing is then drawn, nor CUDA's packages."""
    versions = {name: VERSIONS[name] for name in ("numpy", "torch")}
    checks = examine(None, versions, nvrtc="ModuleNotFoundError: cuda", nvdisasm="FileNotFoundError")
    absent = [check for check in checks.values() if check.verdict == "missing" and check.name != "nvdisasm"]
    assert {check.name for check in absent} == {"CUDA", "NVRTC", "CuPy", "Numba", "rich", "matplotlib"}
    on_gpus = "needed only on a GPU"
    assert {check.detail for check in absent} == {"optional, for the lab: pip install -e '.[laptop]'", on_gpus}
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "✗" not in out and "all that it can run" in out and "mend" not in out


def test_without_nvdisasm_nothing_fails(examine: Examine) -> None:
    check = examine(None, VERSIONS, nvdisasm="FileNotFoundError: nvdisasm")["nvdisasm"]
    assert check.verdict == "missing" and check.ok
    assert check.detail.endswith("pip install nvidia-cuda-nvdisasm, or -e '.[cu13,lab]' for all that the lab needs")


@pytest.mark.parametrize(
    ("driver", "packages", "major"),
    [
        ((12, 9), {"cuda-bindings": "13.1"}, "12"),
        ((13, 0), {}, "13"),
        (None, {"cuda-bindings": "13.1"}, "13"),
        (None, {"cuda-bindings": "12.9", "cupy-cuda13x": "14.2"}, "12"),
        (None, {"cupy-cuda13x": "14.2"}, "13"),
        (None, {}, "12"),
    ],
)
def test_doctor_and_errors_name_the_same_cuda(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    driver: tuple[int, int] | None,
    packages: dict[str, str],
    major: str,
) -> None:
    gpu = driver and Gpu("NVIDIA H100", (9, 0), "500.1", driver)
    mend = examine(gpu, packages)["Numba"].mend
    monkeypatch.setattr(optional, "driver_cuda", lambda: driver)
    monkeypatch.setattr(optional, "_is_importable", lambda module: False)
    assert mend == f"pip install 'numba-cuda[cu{major}]>=0.20'"
    told = optional.missing("numba-cuda")
    assert told == f"numba-cuda>=0.20, got none: {mend}, or -e '.[cu{major},lab]' for all that the lab needs"


def test_exit_codes(examine: Examine, capsys: pytest.CaptureFixture[str]) -> None:
    examine(None, VERSIONS)
    assert main(["doctor"]) == 0 and "all that it can run" in capsys.readouterr().out
    examine(None, {})
    assert main(["doctor"]) == 1 and "mend torch" in (out := capsys.readouterr().out) and "mend CuPy" not in out
    assert main(["doctor", "--json"]) == 1 and not all(check["ok"] for check in json.loads(capsys.readouterr().out))


def test_a_check_that_hangs_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT", 0.2)
    monkeypatch.setitem(doctor.PROBES, "numpy", "import time; time.sleep(60)")
    assert doctor.probe("numpy").error == "no answer in 0.2 s"
    monkeypatch.setattr(doctor, "TIMEOUT", 60)
    monkeypatch.setitem(doctor.PROBES, "numpy", "print('1'); raise SystemExit(3)")
    assert doctor.probe("numpy") == Run("1", "exit code 3")


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {
        *project["dependencies"],
        *project["optional-dependencies"]["cu12"],
        *project["optional-dependencies"]["cu13"],
    }
    wanted = {
        *(f"{name}{doctor.WANTED[name]}" for name in ("numpy", "torch")),
        *(f"cupy-cuda{major}x[ctk]{doctor.WANTED['cupy']}" for major in (12, 13)),
        *(f"numba-cuda[cu{major}]{doctor.WANTED['numba-cuda']}" for major in (12, 13)),
        *(f"{name}{doctor.WANTED[name]}" for name in ("cuda-bindings", "cuda-core")),
    }
    assert wanted <= listed
    assert {f"{name}{versions}" for name, versions in optional.LAB.items()} < {*project["optional-dependencies"]["lab"]}
    in_extras = {
        re.split(r"[<>=\[]", line)[0] for extra in ("cu12", "cu13") for line in project["optional-dependencies"][extra]
    }
    assert in_extras == {*optional.KERNELS, *optional.CUPY} - {"cupy"}
    for name, versions in optional.INTEGRATIONS.items():
        assert project["optional-dependencies"][name] == [f"{name}{versions}"]
    assert project["requires-python"] == doctor.PYTHON


def test_the_gpu_is_the_one_that_torch_sees() -> None:
    gpu = doctor.find_gpu()
    assert (gpu is not None) == torch.cuda.is_available()
    if gpu is not None:
        assert (gpu.name, gpu.capability) == (torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))


@pytest.mark.gpu
def test_doctor_launches_on_a_hopper_gpu() -> None:
    checks = {check.name: check for check in doctor.examine()}
    assert checks["kernels"].verdict == "works", checks["kernels"].detail
    assert all(check.ok for check in checks.values())


# --- bench and kernels -------------------------------------------------------------------------------------------------------


def test_bench_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "16,32,16,4,2", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)
    assert times["sizes"]["d"] == 32 and times["backend"] == "torch" and times["floor_both_ms"] is None
    assert times["forward_ms"] > 0 and times["both_ms"] > 0 and main(["bench", "16,32,16,4,2"]) == 0
    out = capsys.readouterr().out
    assert "forward + backward" in out and "floor" not in out and "T=16, d=32, n=16, E=4, K=2" in out


@pytest.mark.gpu
def test_bench_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "16384,1024,512,32,4", "--json"]) == 0
    times: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert times["backend"] == "hopper" and times["dtype"] == "bfloat16"
    assert 0.01 < times["floor_forward_ms"] / times["forward_ms"] < 1  # other tests may run on the GPU meanwhile
    assert 0.01 < times["floor_both_ms"] / times["both_ms"] < 1


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--products", "bias_score_grad", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    kernels = list(gemm.PRODUCTS["bias_score_grad"].kernels())
    assert [(entry["entry"], entry["registers"]) for entry in listed] == [(k.entry, k.registers) for k in kernels]
    assert {"spills", "smem_bytes", "threads", "ctas", "wgmma", "macros"} <= set(listed[0])
    assert main(["kernels", "--products", "bias_score_grad"]) == 0
    out = capsys.readouterr().out
    assert f"{len(kernels)} kernels" in out and "reduce_scores_grad" in out and "TOP_K=8" in out


@pytest.mark.parametrize(
    "encoding", ["ascii", *(pytest.param(name, marks=pytest.mark.full) for name in ("latin-1", "cp1252"))]
)
@pytest.mark.parametrize(
    "arguments", [["kernels", "--products", "bias_score_grad"], ["bench", "16,32,16,4,2"]], ids=["kernels", "bench"]
)
def test_a_table_is_printed_in_any_encoding(encoding: str, arguments: list[str]) -> None:
    done = command(*arguments, PYTHONIOENCODING=encoding, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stdout.isascii() and "---" in done.stdout, done.stderr
    assert "?" not in done.stdout


@pytest.mark.parametrize("encoding", [pytest.param("ascii", marks=pytest.mark.full), "latin-1"])
def test_doctor_names_what_is_missing_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    """In Latin-1 what the child process says comes back with a character that Latin-1 lacks."""
    (tmp_path / "numba.py").write_text("raise ImportError('libf\u00e4lschung.so')")
    done = command("doctor", path=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 1 and "x does not work" in done.stdout and "ImportError: libf" in done.stdout, done.stderr


def test_no_kernel_is_listed_twice() -> None:
    """Nor one of the registry left out."""
    kernels = [*kernels_by_use()]
    listed = {(k.element.name, k.arch.name, k.file, k.entry, str(k.defines)) for k in kernels}
    assert len(listed) == len(kernels) == len(gemm.all_kernels())


@pytest.mark.full
@pytest.mark.slow
def test_all_kernels_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(gemm.all_kernels())
    for entry in listed:
        multiplies = entry["file"] not in ("combine.cu", "reduce.cu", "weight_sum.cu", "quantize.cu")
        multiplies = multiplies and entry["arch"] == "hopper"
        assert entry["ctas"] >= 1 and (entry["wgmma"] > 0) == multiplies


# --- tour --------------------------------------------------------------------------------------------------------------------


def test_the_tour_finds_the_race_that_it_plants(tmp_path: Path) -> None:
    """In an empty folder, with an empty cache, in less than its minute; nothing of it is left there."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    here = tmp_path / "here"
    here.mkdir()
    begin = time.monotonic()
    done = command("tour", folder=here, BLAZEPROTO_CACHE=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and not [*here.iterdir()], done.stderr
    assert time.monotonic() - begin < 120
    parts = re.split(r"\d of 4\. ", done.stdout)
    assert len(parts) == 5 and "expert_pair_indices    2 4 8 3 6 0 7 1 5 9" in parts[1]
    assert "registers" in parts[2] and "+                mbarrier_arrive(ring.full_barrier());" in parts[3]
    race, right = parts[4].split("With the line as it was:")
    for file, code in (("varlen_m.cuh", "cp_async_16("), ("mainloop.cuh", "wgmma<")):
        assert re.search(rf"{file}:(\d+) .*\n +\1 \| {re.escape(code)}", race)
    assert "race in byte" in race and "up_forward: right" in right and "race in" not in right
    assert "bench.score()" in right


@pytest.mark.parametrize(
    ("module", "said"), [("ptxsim", "pip install ./ptxsim"), ("cuda", "NVRTC, which compiles kernels")]
)
def test_the_tour_goes_on_without_what_is_missing(module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('none')")
    done = command(
        "tour", path=tmp_path, folder=tmp_path, BLAZEPROTO_CACHE=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert "2 of 4" in done.stdout and "This can't run here." in done.stdout and "To go on" in done.stdout
    assert (module == "cuda") == ("4 of 4" not in done.stdout), "the kernel and the edit need no ptxsim"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "1,2,3"], "expected T,d,n,E,K, five ints"),
        (["bench", "16,32,16,4,0"], "expected T,d,n,E,K, five ints"),
        (["bench", "16,32,16,4,5"], "expected K of at most E=4, got 5"),
        (["bench", "1000000000000,32,16,4,2"], "expected sizes that fit in "),
        (["bench", "16,1000000,1000000,4,2"], "expected sizes that fit in "),
        (["kernels", "--products", "up_forwards"], "did you mean 'up_forward'"),
        (["doctors"], "invalid choice"),
        ([], "required"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_help_names_the_commands() -> None:
    done = command("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in ("tour", "doctor", "tune", "bench", "kernels"))
