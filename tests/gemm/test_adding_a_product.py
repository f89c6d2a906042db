"""A product added as CONTRIBUTING says, in a copy of the sources: three files, and everything that lists products has it."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
COPIED = ("blazeproto", "scripts", "tests", "pyproject.toml")
PRODUCT = '''"""The down projection's rows, weighed (cuda/weighted.cu): S y. From MoEBlaze Algorithm 1, lines 10 and 11."""

from functools import lru_cache
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import product
from blazeproto.gemm.arguments import Array
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.formulas import Namespace
from blazeproto.gemm.launch import Plan, dense_box
from blazeproto.gemm.product import PACKAGE, PLAIN, SHAPES, Build, Product, Variant, tiled_kernel
from blazeproto.gemm.rows import rows_plan, words
from blazeproto.gemm.specification import Specification, by_tile
from blazeproto.gemm.tiles import BF16, CANDIDATES, SLAB, TILES, WIDTHS, TileConfig
from blazeproto.runtime import driver


def formula(m: Namespace, act: Any, down_proj: Any, scores: Any) -> Any:
    """out_r = S_p act_r W_down^T."""
    return m.of_rows(scores) * m.product(act, down_proj, transposed=False)


SPEC = Specification(
    inputs=(Array("down_proj", "E d n"), Array("act", "R n"), Array("scores", "P", "float32")),
    outputs=(Array("y", "R d", tile=by_tile),),
    formula=formula,
)


@SPEC.public
def down_weighted(
    act: Any,
    down_proj: Any,
    scores: Any,
    dispatch: Dispatch,
    *,
    y: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """y = S act W_down^T. act (R, n), down_proj (E, d, n), bf16, scores (P,) fp32, and a dispatch -> y (R, d) bf16."""
    return SPEC.run(launch, locals(), "config")


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    macros = {"GATHER": 0, "B_MN": 0, "HAS_BIAS": 0, "FUSED_COMBINE": 0}
    return tiled_kernel("weighted.cu", "weighted", config or TILES["down_forward"], build, widths=WIDTHS, **macros)


@lru_cache(maxsize=SHAPES)
def _plan(where: tuple[int, int, int], shape: tuple[int, int, int], config: TileConfig, build: Build) -> Plan:
    out = dense_box((shape[1], where[0]), (SLAB, SLAB), BF16)
    made = kernel(config, PLAIN, build)
    return rows_plan(made, config, where, shape, PLAIN, mn_major=False, columns=shape[1], out0=out)


def launch(act: Any, down_proj: Any, scores: Any, at: Addresses, *, y: Any, config: TileConfig | None = None) -> None:
    """`down_weighted` of arrays that have been checked."""
    if not at.num_rows:
        return
    config = config or TILES["down_forward"]
    plan = _plan(at.where, down_proj.shape, config, product.build_of("down_weighted"))
    addresses = words(at, config=config, out0=y.data_ptr(), scores=scores.data_ptr())
    driver.launch(*plan.fill((act.data_ptr(), down_proj.data_ptr(), y.data_ptr()), addresses), at.stream)


DOWN_WEIGHTED = Product(
    "down_weighted",
    down_weighted,
    SPEC,
    kernels=lambda: [*map(kernel, CANDIDATES["down_forward"])],
    kernel=kernel,
    tiles=lambda sizes: TILES["down_forward"],
)
'''
SCORE = """    DEVICE float score_of(const RowTile& tile, int h) const {
        const int row = tile.row + strip_row(h);
        return row < tile.row_end ? load_f32(p.scores + load_s32(p.pairs.pair_indices + row)) : 0.0f;
    }

"""
CUDA = {  # what weighted.cu has otherwise than linear.cu
    "// Rows times weights,": "// The down projection's rows, weighed. Rows times weights,",
    "    DEVICE uint32_t bias_pair(": f"{SCORE}    DEVICE uint32_t bias_pair(",
    "#pragma unroll\n        for (int i = 0; i < BN / 4; ++i) {": (
        "        const float score[2] = {score_of(tile, 0), score_of(tile, 1)};\n"
        "#pragma unroll\n        for (int i = 0; i < BN / 4; ++i) {"
    ),
    "pack_biased(acc[2 * i], acc[2 * i + 1], bias)": (
        "pack_biased(score[i % 2] * acc[2 * i], score[i % 2] * acc[2 * i + 1], bias)"
    ),
    "    linear(const __grid_constant__": "    weighted(const __grid_constant__",
}
REGISTRY = {
    "from blazeproto.gemm.weight import ": "from blazeproto.gemm.weighted import DOWN_WEIGHTED\n",
    "        EXPERT_ROW_SUM,\n": "        DOWN_WEIGHTED,\n",
}
PROGRAM = """
from blazeproto import cost, gemm
from blazeproto.gemm.compile import compile_many
from blazeproto.lab import Workbench
from blazeproto.lab.calls import CALLS
from scripts.bench import products
from scripts.checks import fuzz

name = "down_weighted"
call = CALLS[name]
assert call.given == ("act",) and list(call.made) == ["y of down_weighted"]
bench = Workbench(name, T=300, d=136, n=72, E=7, K=3)
made = compile_many([bench.kernel, *gemm.PRODUCTS[name].kernels()])
assert all(kernel.registers and not kernel.spills for kernel in made)
assert {*gemm.PRODUCTS[name].kernels()} <= {*gemm.all_kernels()}
assert any(kernel.file == "weighted.cu" for kernel in fuzz.kernels_of_products(range(1)))
sizes = gemm.Sizes(64, 32, 16, 4, 2)
assert gemm.PRODUCTS[name].operations(sizes) == 2 * 128 * 32 * 16
assert cost.product_floor_ms(name, sizes) > 0
"""
# Each runs what the copy's registry lists: the oracle, the error bounds, the twins into poisoned memory, the workbench's check.
TESTS = ("tests/lab/test_oracle.py", "tests/lab/test_workbench.py")
CHOSEN = "down_weighted and not edited_kernels or every_call_of_a_layer or called_once"


def changed(one: Path, other: Path) -> set[str]:
    """The files that differ, or are in one of two folders only."""
    found = filecmp.dircmp(one, other, ignore=["__pycache__"])
    here = {*found.diff_files, *found.left_only, *found.right_only}
    return here | {f"{name}/{file}" for name in found.common_dirs for file in changed(one / name, other / name)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources with the product in it."""
    for part in COPIED:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / part)
    gemm = tmp_path / "blazeproto/gemm"
    (gemm / "weighted.py").write_text(PRODUCT)
    text, registry = (gemm / "cuda/linear.cu").read_text(), (gemm / "registry.py").read_text()
    for old, new in CUDA.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (gemm / "cuda/weighted.cu").write_text(text)
    for behind, line in REGISTRY.items():
        [at] = [whole for whole in registry.splitlines(keepends=True) if whole.startswith(behind)]
        registry = registry.replace(at, at + line)
    (gemm / "registry.py").write_text(registry)
    return tmp_path


def test_a_product_needs_three_files(copy: Path) -> None:
    files = changed(ROOT / "blazeproto", copy / "blazeproto")
    assert files == {"gemm/weighted.py", "gemm/cuda/weighted.cu", "gemm/registry.py"}
    environment = {**os.environ, "PYTHONPATH": str(copy), "BLAZEPROTO_CACHE": str(copy / "cache")}
    for arguments in (("-c", PROGRAM), ("-m", "pytest", "-q", *TESTS, "-k", CHOSEN)):
        done = subprocess.run([sys.executable, *arguments], env=environment, cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
