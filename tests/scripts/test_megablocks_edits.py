"""The edits of MegaBlocks' and stk's installed files, on files that read as theirs do."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from scripts.bench import megablocks_edits

KERNELS = """
    pid_m = tl.load(row_indices + pid)
    end_inx = tl.load(offsets + pid_m + 1)
    ptr_A = A + tl.load(block_offsets_t + start_inx + block_inx) * BLOCK_ELEMENTS
    a = tl.load(ptr_A)
"""
CHECK = "                if triton.__version__ >= '3.2.0':\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for package, name, text in (
        ("stk", "backend/triton_kernels.py", KERNELS),
        ("megablocks", "layers/arguments.py", CHECK),
    ):
        path = tmp_path / package / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    specs = {
        name: ModuleSpec(name, None, origin=str(tmp_path / name / "__init__.py")) for name in ("stk", "megablocks")
    }
    monkeypatch.setattr(megablocks_edits, "find_spec", specs.get)
    return tmp_path


def test_indices_become_32_bits_and_the_version_is_not_refused(installed: Path) -> None:
    assert len(megablocks_edits.edit()) == 2
    kernels = (installed / "stk/backend/triton_kernels.py").read_text()
    assert kernels.count(").to(tl.int32)") == 3 and "a = tl.load(ptr_A)\n" in kernels
    assert "'3.2.0'" not in (installed / "megablocks/layers/arguments.py").read_text()
    assert megablocks_edits.edit() == [], "a second time there is nothing to edit"


def test_other_files_are_refused(installed: Path) -> None:
    (installed / "megablocks/layers/arguments.py").write_text("pass\n")
    with pytest.raises(RuntimeError, match=r"arguments\.py: expected"):
        megablocks_edits.edit()
