"""The scripts as commands: each says how it is called, and what a script, the Makefile or a check runs is there."""

import importlib
import re
from pathlib import Path

import pytest

from tests.scripts.conftest import main_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "scripts").rglob("*.py")}
FILES = {  # by the name that python -m takes
    path.removesuffix(".py").replace("/", ".").removesuffix(".__main__"): path
    for path, text in SOURCES.items()
    if 'if __name__ == "__main__"' in text
}
COMMANDS = sorted(FILES)
NAMED = re.compile(r"-m\"?,? \"?(scripts[\w.]*\w)")  # of a command line, or of a list of its words


@pytest.mark.parametrize("module", COMMANDS)
def test_help_shows_how_it_is_called(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        main_of(importlib.import_module(FILES[module].removesuffix(".py").replace("/", ".")))()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    usage, description = printed.split("\n\n", 1)
    assert f"python -m {module}" in description, "no example"
    if "argument_parser" in SOURCES[FILES[module]] or "BENCH" in SOURCES[FILES[module]]:
        assert usage.startswith(f"usage: python -m {module} ")


def test_commands_are_found() -> None:
    assert {"scripts.train_lm", "scripts.bench.layer", "scripts.bench.models", "scripts.checks.style"} <= {*COMMANDS}


@pytest.mark.parametrize("path", sorted([*SOURCES, "Makefile"]))
def test_the_scripts_that_are_named_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    assert not re.search(r"python3? scripts/", text), "a script is run as a module"
    assert set(NAMED.findall(text)) <= set(COMMANDS)


def test_the_package_needs_no_script() -> None:
    importing = re.compile(r"^\s*(from|import) scripts\b", flags=re.MULTILINE)
    assert not [path for path in (ROOT / "blazeproto").rglob("*.py") if importing.search(path.read_text())]
