"""The Makefile, in a folder whose name has a space, with a stub for Python."""

import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Notes how it is called; makes an environment that has the same stub.
STUB = """#!/usr/bin/env bash
echo "$0 $*" >> "{log}"
if [[ "$1 $2" == "-m venv" ]]; then
  made="${{@: -1}}"; mkdir -p "$made/bin"; touch "$made/pyvenv.cfg"; cp "$0" "$made/bin/python"; fi
"""

pytestmark = pytest.mark.skipif(not (shutil.which("make") and shutil.which("bash")), reason="needs make and bash")


class Project:
    """A folder with the Makefile, and make in it."""

    def __init__(self, place: Path) -> None:
        self.folder, self.log, self.python = place / "a project's folder", place / "log", place / "the python"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.python.write_text(STUB.format(log=self.log))
        self.python.chmod(0o755)

    def make(self, *words: str) -> list[str]:
        """The calls of Python that it made: the words without those of a version check."""
        self.log.write_text("")
        command = ["make", f"PYTHON={self.python}", *words]
        # What a make that runs the tests hands down would win over the command.
        handed_down = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "VENV", "NEWEST")
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
    assert [line.split()[-1] for line in project.make("lint", given)][2:] == [".", ".", "mypy", "scripts.checks.style"]
    assert len(project.make("lint", given)) == 4 and project.make("clean", given) == []
    assert not environment.exists()


def test_the_site_has_tools_of_its_own(project: Project) -> None:
    first = project.make("site", "CUDA=")
    assert first[-2:] == [
        ".venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .[cu12,docs]",
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
    assert {path.name for path in project.folder.iterdir()} == {"Makefile", "pyproject.toml", "constraints.txt"}


@pytest.mark.parametrize("venv", ["notes", ".", "{folder}"])
def test_clean_removes_nothing_but_an_environment(venv: str, project: Project) -> None:
    """A folder that is none stays, and so does an environment that the project lies in."""
    (project.folder / "notes").mkdir()
    if venv != "notes":
        (project.folder / "pyvenv.cfg").touch()
    project.make("clean", "VENV=" + venv.format(folder=project.folder))
    assert (project.folder / "notes").exists() and (project.folder / "Makefile").exists()


@pytest.mark.parametrize(
    ("cuda", "blackwell", "build"), [("12", "", "/cu126"), ("12", "12.0", "/cu128"), ("13", "12.0", "")]
)
def test_a_gpu_gets_the_torch_for_its_driver(cuda: str, blackwell: str, build: str, project: Project) -> None:
    calls = project.make("train", f"CUDA={cuda}", f"BLACKWELL={blackwell}")
    assert "torch>=2.11,<2.16" in calls[1] and build in calls[1] and calls[2].endswith(f"-e .[cu{cuda},lab]")
    assert ("--index-url" in calls[1]) == (cuda == "12")
    assert not any("constraints.txt" in call for call in calls), "its driver chooses versions"


def test_what_is_installed_follows_the_constraints(project: Project) -> None:
    installs = [call for call in project.make("lint", "CUDA=") if " pip install " in call]
    assert len(installs) == 4 and all(" -c constraints.txt " in call for call in installs)
    assert " torch==2.13.0" in installs[0] and " -e ./ptxsim -e .[cu12,lab]" in installs[1]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in pins), "exact, of an index"
    assert {"numpy", "transformers", "peft", "torchtitan", "ruff", "mypy", "pytest"} < {
        line.split("=")[0] for line in pins
    }
    os.utime(project.folder / "constraints.txt", (2**32, 2**32))
    assert any(" pip install " in call for call in project.make("lint", "CUDA=")), "made again where they are newer"


@pytest.mark.parametrize("newest", [".venv-newest", "new est"])
def test_the_newest_releases_have_an_environment_of_their_own(newest: str, project: Project) -> None:
    calls = project.make("newest", "CUDA=", f"NEWEST={newest}")
    assert calls[0] == f"{project.python} -m venv --clear {newest}"
    assert not (project.folder / ".venv").exists() and not any("constraints.txt" in call for call in calls)
    assert " torch==2.13.0" in calls[2] and calls[-1].startswith(f"{newest}/bin/python -m pytest ")
    assert calls[-1].endswith("tests/integrations")
    project.make("pins", f"NEWEST={newest}")
    assert "pip freeze" in project.log.read_text()
    assert (project.folder / "constraints.txt").read_text().startswith("# Made by `make newest pins`")
    project.make("clean", f"NEWEST={newest}")
    assert not (project.folder / newest).exists()


def test_no_other_folder_is_cleared_for_the_newest(project: Project) -> None:
    with pytest.raises(AssertionError, match=r"NEWEST: expected a virtual environment, or no folder yet, got \."):
        project.make("newest", "NEWEST=.")
    assert (project.folder / "Makefile").exists()


def test_a_public_forge_runs_what_ci_runs() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    own = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    alone = ["pip install -c constraints.txt './ptxsim[test]'", "python -m pytest -q ptxsim"]
    assert runs == {"test": own, "ptxsim": alone, "newest": ["make newest"]}
    assert [name for name, job in jobs.items() if job.get("continue-on-error")] == ["newest"]
