"""README's example runs, README and docs/ say what they must, and what they link to exists."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
INSTALL, MAP = ((ROOT / "docs" / page).read_text() for page in ("install.md", "map.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
SOURCES = ("MoEBlaze", "SonicMoE", "MegaBlocks", "review", "MoE at Scale", "2601.05296", "2512.14080")


def test_the_example_is_twelve_lines_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = BLOCKS[0]
    assert len(example.splitlines()) == 12
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    x = names["x"]
    assert isinstance(x, torch.Tensor) and x.grad is not None and torch.isfinite(x.grad).all()
    assert "torch.Size([8, 128, 512])" in capsys.readouterr().out


@pytest.mark.parametrize("simulator", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_the_session_of_the_lab_runs_on_a_cpu(tmp_path: Path, simulator: str) -> None:
    """And `check`, at a small size, before the edit and after it; in a process of its own, for Numba decides at its import
    whether to simulate."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": simulator, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    assert "CUDASIM" not in README
    large, small, check = (
        "T=4096, d=512, n=512, E=16, K=4",
        "T=20, d=16, n=16, E=2, K=1",
        "print(bool(bench.check()))\n",
    )
    assert large in BLOCKS[1]
    before_edit, edit, rest = BLOCKS[1].replace(large, small).partition("header = ")
    command = [sys.executable, "-c", before_edit + check + edit + rest + check]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "imbalance" in run.stdout, "the picture of a dispatch"
    assert "registers" in run.stdout, "that of a kernel"
    assert "wgmma.cuh" in run.stdout and "HGMMA" in run.stdout, "its SASS by source line"
    assert "\n+    return {up + 1.0f, 1.0f};\n" in run.stdout, "the edit"
    assert [line for line in run.stdout.splitlines() if line in ("True", "False")] == ["True", "False"]
    before, after = (int(line) for line in run.stdout.splitlines() if line.isdigit())
    assert before < after, "additions in the machine code of the edited kernel, compiled"
    assert (tmp_path / "my_kernels" / "up.cu").exists()
    assert "/my_kernels/" in (ROOT / ".gitignore").read_text().split()
    if simulator == "1":
        return
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "reopen()" in again.stderr and 'reopen("my_kernels")' in BLOCKS[1], "a second run is told how to go on"


def test_the_options_of_train_lm_are_its_own() -> None:
    options = {
        word for args in re.findall(r"ARGS='?([^'`]+)", INSTALL) for word in args.split() if word.startswith("--")
    }
    assert {"--resume", "--steps", "--sample"} <= options
    command = [sys.executable, "-m", "scripts.train_lm", "--help"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert not [option for option in options if option not in listed]


def test_the_extras_of_the_pages_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for group in re.findall(r"'(?:\.|blazeproto)\[([\w,]+)\]", page.read_text())
        for extra in group.split(",")
    }
    assert {"cu12", "lab", "peft"} <= named <= extras.keys()


def test_readme_fits_on_two_screens() -> None:
    assert len(README) <= 6000
    assert README.count("| --- |") == 1, "one table"
    assert "small" not in README.partition("<!-- results:readme -->")[0]


def test_the_map_cites_the_sources() -> None:
    cited = MAP[MAP.index("## Sources") :]
    assert not [source for source in SOURCES if source not in cited]


def test_the_map_names_every_page() -> None:
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.parent == ROOT / "docs"]
    assert not [page for page in pages if f"]({page})" not in MAP and page != "map.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    places = [place for place in re.findall(r"\]\(([^)#]+)", page.read_text()) if not place.startswith("http")]
    assert not [place for place in places if not (page.parent / place).exists()]
