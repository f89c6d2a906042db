"""CONTRIBUTING's recipes, done as they are written: each in a copy of the sources, its files counted, its commands run there.

A recipe begins with its name in bold. A block of code whose first line is a comment with a path is an edit: a new file, or lines
that go behind the line that the comment quotes. A block of commands says what has to pass afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("blazeproto", "scripts", "tests", "docs", "results", "CONTRIBUTING.md", "README.md", "pyproject.toml")
PLACE = re.compile(r"(?:#|//) (?P<path>[\w/.]+\.(?:py|cu|cuh))(?:, behind `(?P<line>.+)`)?$")


class Edit(NamedTuple):
    path: str
    behind: str | None  # the line that the text follows; None: a new file
    text: str


class Recipe(NamedTuple):
    most_files: int
    edits: list[Edit]
    commands: list[str]


def recipes() -> dict[str, Recipe]:
    """By name, those of "How to add" that have a block of code. How many files each may cost: the table of "Where things go"."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    limits = {name: int(count) for name, count in re.findall(r"^\| (.+?) \| .+ \| (\d+) \|$", text, re.MULTILINE)}
    section = text.partition("## How to add")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*(.+?)\.\*\*", section, flags=re.MULTILINE)[1:]
    found = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        edits, commands = [], list[str]()
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE):
            if language == "sh":
                commands += block.splitlines()
                continue
            first, _, rest = block.partition("\n")
            place = PLACE.match(first)
            assert place, f"{name}: {first!r} names no file"
            edits.append(Edit(place["path"], place["line"], rest))
        if edits:
            found[name] = Recipe(limits[name[0].lower() + name[1:]], edits, commands)
    return found


RECIPES = recipes()
QUICK = {"A score"}  # the others take longer


def apply(edit: Edit, root: Path) -> None:
    """Make one edit in the copy at ``root``; the line must be there once."""
    path = root / edit.path
    if edit.behind is None:
        assert not path.exists(), f"{edit.path} is there already"
        path.write_text(edit.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    [at] = [index for index, line in enumerate(lines) if line.strip() == edit.behind]
    lines.insert(at + 1, edit.text)
    path.write_text("".join(lines))


def changed(root: Path) -> set[str]:
    """Files of the package that are other than the originals, or new."""
    files = [path.relative_to(root) for path in (root / "blazeproto").rglob("*") if path.is_file()]
    return {
        str(path)
        for path in files
        if "__pycache__" not in path.parts
        and (not (ROOT / path).exists() or (ROOT / path).read_bytes() != (root / path).read_bytes())
    }


def test_the_recipes_are_found() -> None:
    assert RECIPES.keys() >= WANTED, WANTED - RECIPES.keys()
    assert all(recipe.commands for recipe in RECIPES.values())


WANTED = {
    "An activation",
    "A product",
    "A choice of experts",
    "A choice of experts with a kernel",
    "A score",
    "A router option",
    "An option of `moe_mlp` and `MoE`",
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in RECIPES]
)
def test_a_recipe_works_and_costs_what_the_table_says(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    for part in COPIED:
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / part)
    for edit in recipe.edits:
        apply(edit, tmp_path)
    files = changed(tmp_path)
    assert files == {edit.path for edit in recipe.edits}
    assert len(files) <= recipe.most_files, files
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command in recipe.commands:
        arguments = [sys.executable, *command.split()[1:]]  # behind "python"
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
