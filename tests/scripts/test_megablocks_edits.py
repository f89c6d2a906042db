"""The edits of MegaBlocks' and stk's installed files, on files that read as theirs do."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import pytest

from blazeproto.gemm import Sizes
from scripts.bench import megablocks_edits
from scripts.bench.peers import layers

KERNELS = """
    pid_m = tl.load(row_indices + pid)
    end_inx = tl.load(offsets + pid_m + 1)
    ptr_A = A + tl.load(block_offsets_t + start_inx + block_inx) * BLOCK_ELEMENTS
    a = tl.load(ptr_A)
"""
CHECK = "                if triton.__version__ >= '3.2.0':\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in (
        (tmp_path / "stk/backend/triton_kernels.py", KERNELS),
        (tmp_path / "megablocks/layers/arguments.py", CHECK),
    ):
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


def test_a_layer_that_megablocks_would_miscount_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected less than 2\^31 numbers in its rows, got up to 2280652800"):
        layers.megablocks(Sizes(32768, 4096, 256, 256, 16), cast(Any, None))
