"""Modules can be executed again: by importlib.reload, as IPython's autoreload does, and after sys.modules has lost them."""

import shutil
from pathlib import Path

import blazeproto
from tests.python import python


def test_modules_can_be_executed_again(tmp_path: Path) -> None:
    """A layer is right afterwards, and an operator that was edited runs as edited."""
    shutil.copytree(
        Path(blazeproto.__file__).parent, tmp_path / "blazeproto", ignore=shutil.ignore_patterns("__pycache__")
    )
    python(str(Path(__file__).with_name("reloading.py")), str(tmp_path), timeout=300, cwd=tmp_path)
