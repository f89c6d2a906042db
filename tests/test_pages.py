"""What the pages of docs/ give to paste runs: their Python with tiny models, and their commands' options exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages


def run(page: str, folder: Path, *, hopper: bool) -> None:
    for package in re.findall(
        r"^from (transformers|peft)\b", program := pages.program(page, hopper=hopper), re.MULTILINE
    ):
        pytest.importorskip(package)
    environment = {**os.environ, "PYTHONPATH": str(pages.ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_there_are_pages_with_python() -> None:
    assert {"transformers.md", "peft.md", "kernels.md", "glossary.md"} <= {*pages.pages()}


@pytest.mark.parametrize("page", pages.pages())
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run(page, tmp_path, hopper=False)


@pytest.mark.gpu
@pytest.mark.parametrize("page", pages.pages())
def test_the_python_of_a_page_runs_on_a_gpu(page: str, tmp_path: Path) -> None:
    run(page, tmp_path, hopper=True)


# --- Commands ----------------------------------------------------------------------------------------------------------------

TEXT = "\n".join(
    (pages.ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "results/README.md")
) + "\n".join(page.read_text() for page in sorted(pages.DOCS.glob("*.md")))
COMMANDS = re.findall(r"python -m ((?:scripts|blazeproto)[\w.]*)([^`\n#]*)", TEXT)
OPTIONS = {
    module: {option for name, rest in COMMANDS if name == module for option in re.findall(r"(?<= )--[a-z][\w-]*", rest)}
    for module, _ in COMMANDS
}


def test_there_are_commands() -> None:
    assert {"scripts.checks.fuzz", "scripts.bench.plot_results", "blazeproto"} <= OPTIONS.keys()
    assert "--debug" in OPTIONS["scripts.checks.fuzz"]


@pytest.mark.parametrize("module", OPTIONS)
def test_the_commands_are_programs(module: str) -> None:
    assert importlib.util.find_spec(module.rstrip("."))


@pytest.mark.full
@pytest.mark.parametrize("module", [module for module in OPTIONS if OPTIONS[module]])
def test_the_commands_have_their_options(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    listed = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert not [option for option in OPTIONS[module] if not re.search(rf"{option}\b", listed)]
