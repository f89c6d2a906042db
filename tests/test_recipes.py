"""The recipes of docs/recipes.md, carried out as written: each in a copy of the sources, its files counted. The programs of some
run there, and in the full set those of all, and their commands; tests/test_activations.py does so with one change in every run.

A recipe begins with its name in bold. A block of code whose first line is a comment with a path is an edit; one that begins with
"# afterwards" is a program that runs then, and a block of commands is run after that.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("blazeproto", "scripts", "tests", "pyproject.toml")
PLACE = re.compile(
    r"(?:#|//) (?P<path>[\w/.]+\.(?:py|cu|cuh))(?:, (?P<how>behind|before|in place of|a copy of) `(?P<line>.+)`)?$"
)
PROMPT = (  # whose programs take some seconds each; others run in the full set alone
    "A product that a layer calls",
    "A tile size, a ring depth",
    "A weight layout",
    "Another tensor saved for backward",
)
WANTED = {
    *PROMPT,
    "An activation",
    "A product",
    "A choice of experts",
    "A choice of experts with a kernel",
    "A score",
    "A router option",
    "An option of `moe_mlp` and `MoE`",
}


class Edit(NamedTuple):
    """how: None for a new file; else where the text goes, seen from ``line``; "a copy of": the file that ``line`` names."""

    path: str
    how: str | None
    line: str
    text: str


class Recipe(NamedTuple):
    most_files: int
    edits: list[Edit]
    runs: list[list[str]]  # arguments of Python


def recipes() -> dict[str, Recipe]:
    """By name, those of "How to add" that have edits. How many files each may cost: the table before."""
    text = (ROOT / "docs/recipes.md").read_text()
    limits = {name: int(count) for name, count in re.findall(r"^\| (.+?) \| .+ \| (\d+) \|$", text, re.MULTILINE)}
    section = text.partition("## How to add")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*(.+?)\.\*\*", section, flags=re.MULTILINE)[1:]
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        edits, runs = [], list[list[str]]()
        for language, first, rest in re.findall(r"^```(\w+)\n(.*?)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE):
            if language == "sh":
                runs += [shlex.split(command)[1:] for command in f"{first}\n{rest}".splitlines()]  # behind "python"
            elif first == "# afterwards":
                runs.append(["-c", rest])
            else:
                place = PLACE.match(first)
                assert place, f"{name}: {first!r} names no file"
                edits.append(Edit(place["path"], place["how"], place["line"], rest))
        if edits:
            other = re.sub(" with a kernel$| that a layer calls$", "", name)  # the recipe that it goes on from
            edits = [*(found[other].edits if other != name else []), *edits]
            found[name] = Recipe(limits[name[0].lower() + name[1:]], edits, runs)
    return found


RECIPES = recipes()


def apply(edit: Edit, root: Path) -> None:
    """Make one edit in the copy at ``root``; the line that it names must be there once."""
    path = root / edit.path
    if edit.how in (None, "a copy of"):
        assert not path.exists(), f"{edit.path} is there already"
        path.write_text(edit.text if edit.how is None else (root / edit.line).read_text())
        return
    lines = path.read_text().splitlines(keepends=True)
    [at] = [index for index, line in enumerate(lines) if line.strip() == edit.line]
    lines[at : at + 1] = {
        "behind": [lines[at], edit.text],
        "before": [edit.text, lines[at]],
        "in place of": [edit.text],
    }[edit.how]  # type: ignore[index]
    path.write_text("".join(lines))


def changed(root: Path) -> Iterator[str]:
    """Files of the package that are other than the originals, or new."""
    for path in (root / "blazeproto").rglob("*"):
        name = path.relative_to(root)
        if path.is_file() and "__pycache__" not in name.parts:
            original = ROOT / name
            if not original.exists() or original.read_bytes() != path.read_bytes():
                yield str(name)


def test_every_change_has_a_recipe_that_says_what_passes() -> None:
    assert RECIPES.keys() >= WANTED, WANTED - RECIPES.keys()
    assert all(recipe.runs for recipe in RECIPES.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_lines_that_a_recipe_names_are_there_and_it_costs_what_the_table_says(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    shutil.copytree(ROOT / "blazeproto", tmp_path / "blazeproto", ignore=shutil.ignore_patterns("__pycache__"))
    for edit in recipe.edits:
        apply(edit, tmp_path)
    for path in {edit.path for edit in recipe.edits if edit.path.endswith(".py")}:
        compile((tmp_path / path).read_text(), path, "exec")
    files = {*changed(tmp_path)}
    assert files == {edit.path for edit in recipe.edits}
    assert len(files) <= recipe.most_files, files


def run(recipe: Recipe, runs: list[list[str]], copy: Path) -> None:
    for part in COPIED:
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
    for edit in recipe.edits:
        apply(edit, copy)
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    for arguments in runs:
        done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", PROMPT)
def test_what_follows_a_recipe_passes(name: str, tmp_path: Path) -> None:
    run(RECIPES[name], [arguments for arguments in RECIPES[name].runs if arguments[0] == "-c"], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works(name: str, tmp_path: Path) -> None:
    run(RECIPES[name], RECIPES[name].runs, tmp_path)
