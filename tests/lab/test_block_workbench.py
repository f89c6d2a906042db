"""The bench of block-sparse products: right as they are, on the machine; planted faults are found where they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_bugs import plant

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import MoE
from blazeproto.blocksparse import SequentialMoE, dMoE
from blazeproto.gemm import Kernel, TileConfig, product
from blazeproto.lab import BlockWorkbench, Workbench, explain, times
from blazeproto.lab.oracle import BLOCK_CALLS, EXACT, evaluate_blocks
from blazeproto.lab.target import Machine
from blazeproto.lab.verdict import Comparison, Verdict
from tests.refusals import refuses

SMALL = {"k": 136, "m": 72, "device": "cpu"}  # the second is less than a tile


def edited(tmp_path: Path, name: str, *edits: tuple[str, str, str]) -> BlockWorkbench:
    bench = BlockWorkbench(name, **SMALL)
    plant(bench.edit(tmp_path / "sources"), edits)
    return bench


@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_what_is_expected_is_the_oracles_and_one_wrong_chunk_is_found(name: str) -> None:
    bench = BlockWorkbench(name, np.random.default_rng(3).random((3, 4)) < 0.5, **SMALL)
    inputs = bench._inputs
    exact, bound = inputs.references["out"]
    torch.testing.assert_close(exact, evaluate_blocks(EXACT, inputs.case)[name])
    out = exact.bfloat16()
    comparison = Comparison(inputs.references, inputs.places)
    comparison.add({"out": out})
    assert comparison.verdict(name)
    assert float((bound / exact.abs().clamp(min=1e-2)).median()) < 0.02, "a few roundings wide"
    lines = out.view(-1, out.shape[-1])
    line = int(exact.view(lines.shape)[:, :8].abs().amin(dim=1).argmax())
    lines[line, :8] = lines[line, :8].flip(0) * 1.25
    comparison.add({"out": out})
    (tile,) = comparison.verdict(name).tiles
    assert tile.expert == (-1 if bench.entry.name == "dds" else line // 128) and tile.wrong >= 6


@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_the_kernel_is_the_one_that_a_launch_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, taken = BlockWorkbench(name, **SMALL), list[Kernel]()
    monkeypatch.setattr(Machine, "launch", lambda self, kernel, *_, **__: taken.append(kernel))
    bench._launch(product.PACKAGE, Machine())
    assert taken == bench._kernels(product.PACKAGE)


# ---- planted faults -----------------------------------------------------------------------------------------------


def found(verdict: Verdict) -> set[tuple[int, int, int]]:
    return {(tile.expert, tile.row_tile, tile.column_tile) for tile in verdict.tiles}


def test_the_wrong_columns_of_b(tmp_path: Path) -> None:
    """The second block of a tile gets the first one's: blocks 1, 3 and 6 of rows of 2, 2, 1 and 3."""
    old = "(piece == 0 ? tile.column : other) * BLOCK"
    bench = edited(tmp_path, "SDD", ("sdd.cu", old, "tile.column * BLOCK"))
    verdict = bench.check()
    assert not verdict and verdict.part == "block" and verdict.experts == [1, 3, 6], verdict
    assert re.search(r"block 1 +row tile 0 +##\n", repr(verdict))
    assert "+                load_b<BLOCK>" in bench.diff() and bench.last_kernel is bench.kernel


def test_a_store_of_the_wrong_block(tmp_path: Path) -> None:
    """Consumer 1 stores the right slab of a tile's second block over its first: those two are wrong, in that slab alone."""
    old = "const int block = tile.block + part * SLAB / BLOCK;"
    new = "const int block = tile.block + (consumer_index() && part == 3 ? 0 : part * SLAB / BLOCK);"
    verdict = edited(tmp_path, "SDD^T", ("sdd.cu", old, new)).check()
    assert not verdict and {(block, 1, 1) for block in (1, 3, 6)} <= found(verdict), verdict
    assert found(verdict) <= {(block, 1, 1) for block in (0, 1, 2, 3, 5, 6)}


def test_the_wrong_line_of_blocks(tmp_path: Path) -> None:
    """Column 3 of blocks, whose expert has no rows, gets zeros from this too."""
    old = "S_TRANSPOSED ? __ldg(p.block_offsets_t + mine) : mine"
    verdict = edited(tmp_path, "DS^TD", ("dsd.cu", old, "mine")).check()
    assert verdict.part == "block column" and verdict.experts == [0, 1], verdict


def test_what_lies_transposed_is_named_by_its_columns(tmp_path: Path) -> None:
    old = "OUT_TRANSPOSED ? row : column, OUT_TRANSPOSED ? column : row"
    new = "OUT_TRANSPOSED ? row ^ (row == 256 ? 64 : 0) : column, OUT_TRANSPOSED ? column : row"
    verdict = edited(tmp_path, "DDS", ("dsd.cu", old, new)).check()
    assert found(verdict) == {(-1, 0, 2)}, verdict
    assert re.search(r"all block columns +row tile 0 +\.\.[x#]\.\.\.\.\n", repr(verdict)), verdict


def test_a_missing_full_wait_is_a_race(tmp_path: Path) -> None:
    wait = "    ring.wait_until_full();\n    if (GATHER)"
    verdict = edited(tmp_path, "DSD", ("mainloop.cuh", wait, "    if (GATHER)")).check()
    assert not verdict and verdict.races, verdict
    assert "wgmma" in verdict.races[0] and verdict.races[0].splitlines()[1] in repr(verdict)


# ---- the rest of a bench ------------------------------------------------------------------------------------------


def test_kernel_diff_and_layers_of_the_edited_function_alone(tmp_path: Path) -> None:
    bench = BlockWorkbench("DS^TD", **SMALL)
    plain = bench.kernel
    assert plain.entry == "dsd" and plain.registers > 0 and bench.diff() == ""
    folder = bench.edit(tmp_path / "sources")
    (folder / "dsd.cu").write_text((folder / "dsd.cu").read_text() + "// mine\n")
    assert "+// mine" in bench.diff() and str(folder) in repr(bench) and "8 of 4 x 7 blocks, m=72" in repr(bench)
    with bench.use():
        assert product.build_of("dsd").sources is not None
        assert product.build_of("dds").sources is None and product.build_of("sdd").sources is None
    assert bench.last_kernel is bench.kernel is not plain


def test_the_floor_is_that_of_the_sources() -> None:
    """max(2 nnz 128^2 k / 785 TFLOP/s, 2 (M k + N k + nnz 128^2) bytes / 4.24 TB/s), and dsd.cu's."""
    mask = np.ones((2, 3), bool)
    assert BlockWorkbench("SDD", mask, k=64, device="cpu")._floor_ms("H200") == pytest.approx(
        1e3 * 2 * (256 * 64 + 384 * 64 + 6 * 128**2) / 4.24e12
    )
    assert BlockWorkbench("DDS", mask, m=4096, device="cpu")._floor_ms("H200") == pytest.approx(
        1e3 * max(2 * 6 * 128**2 * 4096 / 785e12, 2 * (6 * 128**2 + 4096 * 640) / 4.24e12)
    )


def test_a_time_stands_beside_the_floor_of_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = BlockWorkbench("SDD", np.ones((2, 3), bool), k=64, device="cpu")
    for name, known in (("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA H100 PCIe", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert times.gpu_here() == known
    assert bench._floor_ms("H100") == pytest.approx(bench._floor_ms("H200") * 4.24 / 3.35)
    combine = Workbench("combine", T=64, d=64, n=64, E=4, K=2, device="cpu")
    assert combine._floor_ms("H100") == pytest.approx(combine._floor_ms("H200") * 4.24 / 3.35)


@pytest.mark.parametrize(
    ("arguments", "argument", "error"),
    [
        ({"product": "SSD"}, "product", ValueError),
        ({"mask": [[True]]}, "mask", TypeError),
        ({"mask": np.ones(3, bool)}, "mask", ValueError),
        ({"mask": np.zeros((2, 2), bool)}, "mask", ValueError),
        ({"k": 12}, "k", ValueError),
        ({"m": 0}, "m", ValueError),
        ({"seed": 1.5}, "seed", TypeError),
        ({"config": 256}, "config", TypeError),
        ({"config": TileConfig(tile_n=192)}, "config", ValueError),
        ({"device": "cuda"}, "device", ValueError),
    ],
)
def test_bad_input_raises(arguments: dict[str, Any], argument: str, error: type[Exception]) -> None:
    refuses(lambda: BlockWorkbench(**arguments), argument, error)


@pytest.mark.parametrize(("what", "error"), [("counters", NotImplementedError), ("time", RuntimeError)])
def test_what_there_is_not_says_so(what: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{what}: expected "):
        getattr(BlockWorkbench(device="cpu"), what)()


@pytest.mark.parametrize("layer", [dMoE(64, 128, 2, 1), SequentialMoE(64, 128, 2, 1)])
def test_the_layers_are_not_explained_as_moes(layer: MoE) -> None:
    refuses(lambda: explain(layer, torch.ones(3, 64)), "layer", TypeError)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    bench = BlockWorkbench(name, np.random.default_rng(5).random((9, 8)) < 0.4, k=520, m=520)
    bench.edit(tmp_path / "sources")
    assert bench.check()
    times = bench.time(5)
    assert times.ms > 0 and times.floor_ms > 0 and bench.timeline().unit != "steps"
