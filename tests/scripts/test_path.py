"""How much code a bf16 layer runs: the rule that counts it, and the ceiling."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.checks.path import OTHERS, PAGE, is_table, lines_of_code, modules_that_run, page_with
from scripts.checks.stand_in import PACKAGE

CEILING = 11_214
"""Lines of code. To lower it is free, to raise it takes a line in docs/decisions.md that says what was bought."""


def test_a_bf16_layer_runs_little_code() -> None:
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    assert all((PACKAGE / name).is_file() for names in OTHERS.values() for name in names)
    command = [sys.executable, "-m", "scripts.checks.path"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout
    *rows, total = [line.split(maxsplit=1) for line in printed.splitlines() if line]
    files = {name: int(count) for count, name in rows if (PACKAGE / name).is_file()}
    assert total == [str(sum(files.values())), f"in all, {len(files)} files"] and sum(files.values()) <= CEILING
    page = PAGE.read_text()
    listed = re.findall(r"^\| \[`([\w/.]+)`\]", page, re.MULTILINE)
    assert sorted(listed) == sorted(name for name in files if not name.endswith("__init__.py"))
    assert page_with(files, page) == page, "python -m scripts.checks.path --write"


def test_a_line_of_code_holds_more_than_comments(tmp_path: Path) -> None:
    python, cuda = tmp_path / "a.py", tmp_path / "a.cu"
    python.write_text(
        '"""Doc."""\n\n# why\nTEXT = """\nof two"""\n\ndef f(\n    x,  # what\n):\n    """Doc,\n    long."""\n'
    )
    cuda.write_text("// why\nint x;  // what\n/* why\n   not */\n\n/* a */ int y; /* b\n*/\n")
    assert (lines_of_code(python), lines_of_code(cuda)) == (5, 2) and not is_table(python)


def test_what_an_import_calls_does_not_run() -> None:
    from blazeproto.runtime import checks
    from blazeproto.runtime.arch import Arch

    frames = "def importing():\n    checks.integer('x', 1)\nimporting()"
    with modules_that_run() as ran:
        exec(frames, {"__name__": "blazeproto.made", "checks": checks})
        Arch("", (8, 0), False, "", "", 0, (), "", False)
    assert ran == {"blazeproto.runtime.arch"}
    with modules_that_run() as ran:
        checks.integer("x", 1)
    assert ran == {"blazeproto.runtime.checks"}
