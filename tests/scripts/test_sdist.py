"""What is handed out. The sdist has the whole repository (MANIFEST.in), the wheel the package alone; both are built here, and
what an editable install is made of. ptxsim is a distribution of its own."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import blazeproto
import ptxsim
from blazeproto.runtime import optional

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".*", "build", "dist", "site", "runs", "*.egg-info", "__pycache__")
STEM = f"blazeproto-{blazeproto.__version__}"
SIMULATOR = f"ptxsim-{ptxsim.__version__}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel, sdist and editable wheel of both, made by setuptools, as pip calls it; nothing is fetched.

    They are of a copy of the repository, ``clone/blazeproto`` in that folder.
    """
    setuptools = pytest.importorskip("setuptools")
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip(f"needs setuptools>=77, got {setuptools.__version__}")
    out = tmp_path_factory.mktemp("out")
    copy = out / "clone" / "blazeproto"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for folder in (".ci", ".github", ".gitignore", ".pre-commit-config.yaml"):
        source = ROOT / folder
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / folder)
    calls = "; ".join(f"b.build_{kind}({str(out)!r})" for kind in ("sdist", "wheel", "editable"))
    code = f"from setuptools import build_meta as b; {calls}"
    for project in (copy, copy / "ptxsim"):
        done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return out


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_has_the_package_alone(built: Path) -> None:
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.startswith(f"{STEM}.dist-info/")}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "blazeproto").rglob("*")
        if path.suffix in (".py", ".cu", ".cuh") or path.name == "py.typed"
    }
    assert names - info == package and f"{STEM}.dist-info/licenses/LICENSE" in info


def test_the_sdist_has_the_repository(built: Path) -> None:
    with tarfile.open(built / f"{STEM}.tar.gz") as archive:
        names = {member.name.removeprefix(f"{STEM}/") for member in archive.getmembers()}
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert {
        here,
        "pyproject.toml",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".ci/run",
        "docs/decisions.md",
    } <= names
    assert {"constraints.txt", ".github/workflows/test.yml", "ptxsim/pyproject.toml"} <= names
    assert {"scripts/train_lm.py", "results/README.md", "blazeproto/gemm/cuda/up.cu"} <= names
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]


def test_ptxsim_is_a_distribution_of_its_own(built: Path) -> None:
    wheel = built / f"{SIMULATOR}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    folder = ROOT / "ptxsim"
    assert names == {f"ptxsim/{path.name}" for path in (*folder.glob("*.py"), folder / "py.typed")}
    data = metadata(wheel)
    assert (data["Name"], data["Version"]) == ("ptxsim", ptxsim.__version__)
    required = [Requirement(line) for line in data.get_all("Requires-Dist", [])]
    always = {
        one.name
        for one in required
        if one.marker is None or one.marker.evaluate({"sys_platform": "linux", "extra": ""})
    }
    assert always == {"numpy", "rich", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm"}
    assert all(one.name in constrained() for one in required if one.name != "pytest")
    with tarfile.open(built / f"{SIMULATOR}.tar.gz") as archive:
        packed = {member.name.removeprefix(f"{SIMULATOR}/") for member in archive.getmembers()}
    assert {"README.md", "pyproject.toml", "races.py", "tests/test_races.py", "tests/ptx_programs.npz"} <= packed
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def constrained() -> set[str]:
    """What constraints.txt has a version of."""
    return {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}


@pytest.mark.parametrize(
    ("wheel", "package", "folder"),
    [
        *((SIMULATOR, "ptxsim", folder) for folder in ("clone/blazeproto", "clone", ".")),
        (STEM, "blazeproto", "clone"),  # the folder that has the clone, whose own folder is no package
    ],
)
def test_an_editable_install_is_found_wherever_python_starts(
    built: Path, tmp_path: Path, wheel: str, package: str, folder: str
) -> None:
    """Type checkers and editors, which run nothing, find what a .pth file of blazeproto names."""
    with zipfile.ZipFile(built / f"{wheel}-0.editable-py3-none-any.whl") as archive:
        archive.extractall(tmp_path)
    clone = built / "clone" / "blazeproto"
    if package == "blazeproto":
        assert [path.read_text().split() for path in tmp_path.glob("*.pth")] == [[str(clone)]]
    find = f"site.addsitedir({str(tmp_path)!r}); print(importlib.util.find_spec({package!r}).origin)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # -S: without what this environment has installed
    command = [sys.executable, "-S", "-c", f"import importlib.util, site; {find}"]
    done = subprocess.run(command, cwd=built / folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(clone / package / "__init__.py")], done.stderr


def test_metadata(built: Path) -> None:
    """What `pip install blazeproto[cu13]` asks for."""
    data = metadata(built / f"{STEM}-py3-none-any.whl")
    assert (data["Name"], data["Version"]) == ("blazeproto", blazeproto.__version__)
    assert data["Requires-Python"] == ">=3.11" and data["License-Expression"] == "Apache-2.0"
    assert set(data.get_all("Provides-Extra", [])) == {
        "cu12",
        "cu13",
        "laptop",
        "lab",
        "dev",
        "docs",
        *optional.INTEGRATIONS,
    }
    required = [Requirement(line) for line in data.get_all("Requires-Dist", [])]
    always = {one.name for one in required if one.marker is None}
    assert always == {"torch", "numpy", "packaging"}
    for major in ("12", "13"):
        chosen = [one for one in required if one.marker and one.marker.evaluate({"extra": f"cu{major}"})]
        asked = {one.name: sorted(one.extras) for one in chosen}
        cuda = {f"cupy-cuda{major}x": ["ctk"], "numba-cuda": [f"cu{major}"], "cuda-bindings": [], "cuda-core": []}
        assert asked == cuda


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.*)", text, flags=re.MULTILINE)[:2] == ["Unreleased", blazeproto.__version__]
    assert re.search(rf"^## {blazeproto.__version__}\n\n\d{{4}}-\d\d-\d\d\. ", text, flags=re.MULTILINE), "no date"
