"""The Makefile, in a folder whose name has a space, with a stub for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Notes how it is called; makes an environment that has the same stub.
STUB = """#!/usr/bin/env bash
echo "$0 $*" >> "{log}"
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; fi
"""

pytestmark = pytest.mark.skipif(not (shutil.which("make") and shutil.which("bash")), reason="needs make and bash")


class Project:
    """A folder with the Makefile, and make in it."""

    def __init__(self, place: Path) -> None:
        self.folder, self.log, self.python = place / "a project's folder", place / "log", place / "the python"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        self.python.write_text(STUB.format(log=self.log))
        self.python.chmod(0o755)

    def make(self, *words: str) -> list[str]:
        """The calls of Python that it made: the words without those of a version check."""
        self.log.write_text("")
        command = ["make", f"PYTHON={self.python}", *words]
        # What a make that runs the tests hands down would win over the command.
        handed_down = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "VENV")
        environment = {name: value for name, value in os.environ.items() if name not in handed_down}
        run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)
        made = run(command, cwd=self.folder, env=environment)
        assert made.returncode == 0, made.stderr
        return [line for line in self.log.read_text().splitlines() if " -c import" not in line]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("venv", [".venv", "my env", "{tmp}/else where/env"])
def test_the_environment_is_made_once_and_removed(venv: str, project: Project, tmp_path: Path) -> None:
    given = "VENV=" + venv.format(tmp=tmp_path)
    environment = project.folder / venv.format(tmp=tmp_path)
    python = f"{given[5:]}/bin/python"
    first = project.make("train", "ARGS=--steps 3", given)
    assert first[0] == f"{project.python} -m venv {given[5:]}"
    assert all(" pip install " in line and line.startswith(python) for line in first[1:-1]) and len(first) == 4
    assert first[-1] == f"{python} -m scripts.train_lm --steps 3"
    assert project.make("train", given) == [f"{python} -m scripts.train_lm"]
    assert [line.split()[-1] for line in project.make("lint", given)][2:] == [".", ".", "mypy"]
    assert len(project.make("lint", given)) == 3
    assert project.make("clean", given) == []
    assert not environment.exists()


def test_the_site_has_tools_of_its_own(project: Project) -> None:
    first = project.make("site", "CUDA=")
    assert first[-2:] == [
        ".venv/bin/python -m pip install --disable-pip-version-check -q -e .[cu12,docs]",
        ".venv/bin/python -m scripts.site",
    ]
    assert project.make("site", "CUDA=") == first[-1:]


def test_the_families_are_logged(project: Project) -> None:
    echoes = project.python.read_text() + 'echo "$*"; echo torch==2\n'
    project.python.write_text(echoes)
    assert "tests/integrations/test_transformers.py" in project.make("families", "VENV=")[-1]
    log = (project.folder / "results/cpu/families.log").read_text()
    assert log.startswith("torch==2") and "pytest -v" in log


def test_an_empty_venv_uses_python_as_it_is(project: Project) -> None:
    assert project.make("train", "VENV=") == [f"{project.python} -m scripts.train_lm"]
    assert {path.name for path in project.folder.iterdir()} == {"Makefile", "pyproject.toml"}


@pytest.mark.parametrize("venv", ["notes", ".", "{folder}"])
def test_clean_removes_nothing_but_an_environment(venv: str, project: Project) -> None:
    """A folder that is none stays, and so does an environment that the project lies in."""
    (project.folder / "notes").mkdir()
    if venv != "notes":
        (project.folder / "pyvenv.cfg").touch()
    project.make("clean", "VENV=" + venv.format(folder=project.folder))
    assert (project.folder / "notes").exists() and (project.folder / "Makefile").exists()


@pytest.mark.parametrize(("cuda", "torch"), [("12", "torch>=2.11,<2.16 --index-url"), ("13", "torch>=2.11,<2.16")])
def test_a_gpu_gets_the_torch_for_its_driver(cuda: str, torch: str, project: Project) -> None:
    calls = project.make("train", f"CUDA={cuda}")
    assert torch in calls[1] and calls[2].endswith(f"-e .[cu{cuda}]")
    assert ("--index-url" in calls[1]) == (cuda == "12")
