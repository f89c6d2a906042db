"""A stranger's first hour: an environment made by the lines of docs/install.md, of the wheel, runs README's lab lines, the
notebooks and the Python of the pages of docs/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blazeproto.runtime import optional
from blazeproto.runtime.arch import arch_of
from tests import pages
from tests.scripts.test_sdist import SIMULATOR, STEM, built

__all__ = ["built"]
pytestmark = [pytest.mark.full, pytest.mark.slow]

README = (pages.ROOT / "README.md").read_text()
PAGE = (pages.DOCS / "install.md").read_text()
INSTALL = {  # by machine, the commands between backticks
    machine: "\n".join(re.findall(r"`(.+?)`", commands))
    for machine, commands in re.findall(r"^\| (.+?) \| (`pip install .+`) \|$", PAGE, re.MULTILINE)
}
VENV = re.findall(r"`(python3 -m venv .+?)`", PAGE)[0]
OF_PAGES = [
    line
    for page in pages.pages()
    for line in re.findall(r"`(pip install -e '\.\[cu13,(?:transformers|peft)\]')`", (pages.DOCS / page).read_text())
]
NOTEBOOKS = sorted(path.name for path in (pages.DOCS / "tutorial").glob("*.ipynb"))


class Environment:
    """A folder with a virtual environment, a copy of docs/ and results/, and no way to this checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "IPYTHONDIR")
        }
        self.variables = {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}

    def run(self, script: str, *, seconds: float = 600, **variables: str) -> str:
        """What a bash script prints. AssertionError with all of it where it fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        return done.stdout

    def here(self, script: str, **variables: str) -> str:
        """The same in the virtual environment."""
        return self.run(f"source .venv/bin/activate\n{script}", **variables)


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("fresh")
    for name in ("docs", "results"):
        shutil.copytree(pages.ROOT / name, folder / name)
    made = Environment(folder)
    reach = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "reached"), "rich"]
    if subprocess.run(reach, capture_output=True, check=False).returncode:
        pytest.skip("needs a package index")
    (folder / "constraints.txt").write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    wheel = built / f"{STEM}-py3-none-any.whl"
    simulator = built / f"{SIMULATOR}-py3-none-any.whl"
    cuda = f"cu{optional.cuda_major(optional.driver_cuda())}" if optional.driver_cuda() else ""
    lines = [VENV, INSTALL[cuda.replace("cu", "GPU, CUDA ") or "Linux without a GPU"], *OF_PAGES]
    with_simulator = "\n".join(lines).replace("cu13,", cuda and f"{cuda},").replace("-e ./ptxsim", f"-q '{simulator}'")
    made.run(
        re.sub(r"-e '\.\[", f"'{wheel}[", with_simulator),
        seconds=1800,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        HOME=os.environ.get("HOME", str(folder)),  # pip's settings
        PIP_CONSTRAINT=str(folder / "constraints.txt"),
    )
    return made


def hopper() -> bool:
    return torch.cuda.is_available() and arch_of(torch.cuda.get_device_capability()) is not None


def test_the_pages_say_how_to_install() -> None:
    assert [*INSTALL] == ["GPU, CUDA 13", "GPU, CUDA 12", "Linux without a GPU", "macOS"]
    assert {"pip install -e '.[cu13,transformers]'", "pip install -e '.[cu13,peft]'"} == set(OF_PAGES)


def test_the_package_is_the_wheel(fresh: Environment) -> None:
    for package in ("blazeproto", "ptxsim"):
        place = fresh.here(f"python -c 'import {package}; print({package}.__file__)'")
        assert place.startswith(str(fresh.folder))


def test_the_tests_of_ptxsim_need_it_and_pytest_alone(built: Path, tmp_path: Path) -> None:
    """A wheel of its own, in an environment without torch, CuPy, Numba and blazeproto."""
    made = Environment(tmp_path)
    shutil.copytree(pages.ROOT / "ptxsim" / "tests", tmp_path / "tests")
    shutil.copy(pages.ROOT / "ptxsim" / "pyproject.toml", tmp_path)
    shutil.copy(pages.ROOT / "ptxsim" / "README.md", tmp_path)
    wheel = built / f"{SIMULATOR}-py3-none-any.whl"
    settings = os.environ.get("HOME", str(tmp_path))  # pip's
    made.run(f"{sys.executable} -m venv .venv")
    if "No matching distribution" in made.here(f"pip install -q '{wheel}[test]' 2>&1 || true", HOME=settings):
        pytest.skip("needs a package index")
    assert {"torch", "cupy-cuda12x", "numba-cuda", "blazeproto"}.isdisjoint(made.here("pip list").split())
    made.here("python -m pytest -q")


def test_doctor_has_nothing_to_mend(fresh: Environment) -> None:
    assert "This machine has all that it can run." in fresh.here("python -m blazeproto doctor")


def test_the_lines_of_the_lab(fresh: Environment) -> None:
    (fresh.folder / "lab.py").write_text(pages.BLOCK.findall(README)[1])
    said = fresh.here("ipython lab.py", NUMBA_ENABLE_CUDASIM="1", NO_COLOR="1")
    assert "imbalance" in said and "HGMMA" in said and "up + 1.0f" in said


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook(fresh: Environment, notebook: str) -> None:
    fresh.here(
        f"jupyter lab --version && jupyter nbconvert --to notebook --execute --output-dir ran docs/tutorial/{notebook}"
    )
    assert (fresh.folder / "ran" / notebook).exists()


@pytest.mark.parametrize("page", pages.pages())
def test_the_python_of_a_page(fresh: Environment, page: str) -> None:
    (fresh.folder / "page.py").write_text(pages.program(page, hopper=hopper()))
    fresh.here("python page.py")
