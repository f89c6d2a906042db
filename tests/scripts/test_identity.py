"""What moves the identity of a kernel or the standing of a row, and what does not."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blazeproto import gemm
from blazeproto.blocksparse import topology
from blazeproto.dispatch import limit, tiled
from blazeproto.distributed import peer_memory
from blazeproto.gemm import Sizes
from blazeproto.gemm.compile import CUDA_SOURCES, Kernel
from blazeproto.gemm.product import PACKAGE, Variant
from blazeproto.gemm.registry import quantized_kernels
from blazeproto.gemm.sending import that_sends
from blazeproto.gemm.tiles import TILES, TileConfig
from blazeproto.router import topk
from blazeproto.runtime import driver
from blazeproto.runtime.numba_kernel import NumbaKernel
from scripts.bench import common, identity, layer_tiles
from scripts.checks import equal_kernels

# ------------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("#pragma once", "#pragma once\n// another comment\n/* and\none more */", True),
        ("constexpr int WGMMA_M = 64;", "constexpr  int WGMMA_M\n= 64;", True),
        ("constexpr int WGMMA_M = 64;", "constexpr int WGMMA_M = 65;", False),
    ],
)
def test_a_header_is_in_the_identity_without_comments_and_white_space(
    tmp_path: Path, old: str, new: str, same: bool
) -> None:
    before = identity.identity(gemm.kernel_for("up_forward"))
    sources = shutil.copytree(CUDA_SOURCES, tmp_path / "cuda")
    assert identity.identity(gemm.kernel_for("up_forward", sources=sources)) == before
    header = sources / "wgmma.cuh"
    assert old in header.read_text()
    header.write_text(header.read_text().replace(old, new))
    kernel = replace(gemm.kernel_for("up_forward", sources=sources))  # one object reads its source once
    assert (identity.identity(kernel) == before) is same


def test_macros_and_tiles_make_another_kernel() -> None:
    ways: list[dict[str, Any]] = [{}, {"debug": ("INJECT_DELAYS",)}, {"config": TileConfig(tile_n=128)}]
    assert len({identity.identity(gemm.kernel_for("up_forward", **way)) for way in ways}) == 3


NUMBA = '''
"""Kernels."""
from blazeproto.runtime.warp import device

SCALE = 3


def kernel(threads, wide):
    add = device(lambda x: x + SCALE)

    def kernel(out, size):
        """Fills out."""
        for i in range(size):
            out[i] = add(i) * threads if wide else i

    return kernel
'''


def numba_identity(folder: Path, source: str, **constants: Any) -> str:
    path = folder / f"kernels_{abs(hash(source))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return identity.identity(NumbaKernel(made.kernel, "int32* int64", **{"threads": 32, "wide": True} | constants))


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Fills out.", "Writes out, which has size places.", True),
        ("for i in range", "# each place\n        for i in range", True),
        ("def kernel(out, size)", "def kernel(out: object, size: int) -> None", True),
        ("SCALE = 3", "SCALE = 4", False),
        ("x + SCALE", "x - SCALE", False),
        ("threads if wide", "threads + 1 if wide", False),
    ],
)
def test_a_numba_kernel_is_its_module(tmp_path: Path, old: str, new: str, same: bool) -> None:
    assert NUMBA.count(old) == 1
    changed = numba_identity(tmp_path, NUMBA.replace(old, new))
    assert (changed == numba_identity(tmp_path, NUMBA)) is same


def test_a_numba_kernel_is_the_modules_that_it_takes_device_code_from(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [topk.forward_kernel(128, 8, "sigmoid", True, 1.0, False, False, True), limit.KERNEL]
    before, whole = [*map(identity.identity, kernels)], identity._tree_of
    monkeypatch.setattr(identity, "_tree_of", lambda file: "" if file.name == "best.py" else whole(file))
    monkeypatch.setattr(identity, "_IDENTITIES", {})
    assert [*map(identity.identity, kernels)] != before and identity.identity(kernels[1]) == before[1]


def kernels_of_numba() -> list[NumbaKernel]:
    route = topk.forward_kernel(128, 8, "sigmoid", True, 1.0, False, False, True)
    # The last one has a tuple among its constants, which JSON makes a list.
    return [*tiled.kernels(1024, 8, 128, "int32"), limit.KERNEL, route, topology.kernel((0, 2, 4), 2)]


def test_a_kernel_is_made_again_from_its_description() -> None:
    of_nvrtc = gemm.kernel_for("down_forward", low_rank=1), peer_memory.kernel("send")
    for kernel in (*kernels_of_numba(), *of_nvrtc):
        described = json.loads(json.dumps(identity.described(kernel)))
        assert identity.identity(identity.made_again(described)) == identity.identity(kernel)
    first, second = kernels_of_numba()[:2]
    assert identity.identity(first) != identity.identity(second)
    constants = {name: 2 * value for name, value in first.constants.items()}
    others: list[dict[str, Any]] = [{"min_blocks": 2}, {"threads": 2 * first.threads}, {"constants": constants}]
    for change in (*others, {"parameters": " ".join([*first.parameters, "int64"])}):
        other = identity.made_again(identity.described(first) | change)
        assert identity.identity(other) != identity.identity(first), change


# ------------------------------------------------------------------------------------------------------------- records


class Loaded(Kernel):
    """A kernel that a device holds."""

    def on(self, address: int) -> Kernel:
        self._functions[0] = SimpleNamespace(ptr=address)
        driver.LOADED.add(self)
        return self


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[int, Kernel | NumbaKernel]:
    """Kernels of either kind by the addresses under which a device holds them; a launch does nothing."""
    monkeypatch.setattr(driver, "launch", lambda *arguments: None)
    scan = NumbaKernel(tiled.scan_chunks, "int32* int32* int64 int64", threads=32, rows=4)
    scan._functions[0] = SimpleNamespace(ptr=11)
    driver.LOADED.add(scan)
    # What a layer of `row_of`'s size takes.
    unread = gemm.kernel_for("up_forward", replace(TILES["up_forward"], few_rows=True))
    made = {7: Loaded(**identity.described(unread) | {"options": ()}).on(7), 11: scan}
    return made | {9: Loaded(**identity.described(gemm.kernel_for("down_forward")) | {"options": ()}).on(9)}


def row_of(*addresses: int) -> dict[str, Any]:
    for address in addresses:
        driver.launch(address, (1, 1), 1, 0, 0)
    return {"cfg": {"T": 65536, "d": 512, "n": 512, "E": 16, "K": 4}, "ms": 1.0}


def test_a_row_says_what_was_launched_while_it_was_measured(
    launches: dict[int, Kernel | NumbaKernel], tmp_path: Path
) -> None:
    row = common.stamped(row_of, 7, 11, 7)
    of = row["of"]
    assert of["kernels"] == sorted(identity.identity(launches[address]) for address in (7, 11))
    assert (of["protocol"], of["version"]) == (f"{__name__}.row_of", 1) and of["measured"].endswith(" UTC")
    assert "torch " in of["versions"]
    common.write_json(tmp_path / "a.json", {"rows": [row]})
    assert json.loads((tmp_path / "a.json").read_text())["kernels"].keys() == set(of["kernels"])
    identity.KERNELS.clear()
    assert common.read_json(tmp_path / "a.json")["rows"] == [row] and identity.KERNELS.keys() == set(of["kernels"])
    assert common.stamped(row_of)["of"]["kernels"] == []


def test_a_row_is_earlier_if_a_kernel_or_the_benchmark_is_another_now(
    launches: dict[int, Kernel | NumbaKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = common.stamped(row_of, 7, 11)
    assert identity.earlier(row) == ""
    assert identity.earlier({}) == identity.earlier({"of": {"measured": "then"}}) == "kernels"
    assert identity.earlier({"of": row["of"] | {"kernels": ["0" * identity.DIGITS]}}) == "kernels"
    assert identity.earlier(row | {"of": row["of"] | {"protocol_identity": "0"}}) == "benchmark"
    monkeypatch.setitem(identity.VERSIONS, f"{__name__}.row_of", 2)
    assert identity.earlier(row) == "benchmark" and identity.earlier(common.stamped(row_of, 7, 11)) == ""
    # The product takes other tiles now: its kernel is there still, and is not what a layer runs.
    monkeypatch.setitem(TILES, "up_forward", TileConfig(deferred=False))
    layer_tiles._tiles_chosen.cache_clear()
    assert identity.earlier(row) == "kernels"
    layer_tiles._tiles_chosen.cache_clear()


def test_rows_from_before_versions_have_the_standing_of_the_table() -> None:
    """Each of their hashes leads to a benchmark that is here."""
    for name in {*identity.equal()["benchmarks"].values()}:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name
    hashed = next(iter(identity.equal()["benchmarks"]))
    of = {"kernels": [], "protocol": "gone", "protocol_identity": hashed}
    assert identity.earlier({"of": of}) == ""


@pytest.mark.parametrize("number", range(0, 27, 5))
def test_no_product_is_taken_for_one_with_other_tiles(number: int) -> None:
    sizes = common.MODULE_SHAPES[number]
    cfg = common.cfg_of(sizes)
    for product in gemm.PRODUCTS.values():
        if product.tiles is None or product.kernel is None:
            continue
        described = identity.described(product.kernel(product.tiles(sizes), product.variant, PACKAGE))
        assert not layer_tiles.other_tiles(described, cfg), product.name
        other = described | {"defines": described["defines"] | {"STAGES": 2}}
        assert layer_tiles.other_tiles(other, cfg), product.name
        assert not layer_tiles.other_tiles(other, {"E": 8, "hidden_size": 64})  # not a row of a layer


def test_a_product_that_sends_rows_takes_a_layers_tiles_without_tickets_or_pairs() -> None:
    cfg = {"T": 65536, "d": 2048, "n": 768, "E": 64, "K": 8}
    for name, variant in (
        ("down_backward_act", Variant(sends=True)),  # without tickets
        ("up_forward", Variant(bias=True, sends=True)),  # not in pairs
    ):
        tiles = gemm.PRODUCTS[name].tiles(Sizes(**cfg))
        sends = that_sends(tiles, variant.bias)
        for given, how, others in (
            (sends, variant, False),
            (replace(sends, stages=2), variant, True),
            (sends, variant._replace(sends=False), True),
        ):
            kernel = gemm.PRODUCTS[name].kernel(given, how, PACKAGE)
            assert sends != tiles and layer_tiles.other_tiles(identity.described(kernel), cfg) == others


def test_tiles_may_be_those_of_another_number_of_rows() -> None:
    sizes = Sizes(256, 64, 32, 8, 2)
    few, many = (gemm.PRODUCTS["up_forward"].tiles(sizes._replace(T=rows, K=1)) for rows in (512, 8192))
    assert few != many
    described = identity.described(gemm.PRODUCTS["up_forward"].kernel(many, Variant(), PACKAGE))
    assert layer_tiles.other_tiles(described, common.cfg_of(sizes))
    assert not layer_tiles.other_tiles(described, common.cfg_of(sizes), [1000, 8192])
    assert not any(layer_tiles.other_tiles(identity.described(of), common.cfg_of(sizes)) for of in quantized_kernels())


def test_a_kernel_whose_source_is_gone_or_another_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rows = "blazeproto.dispatch.limit.limit_rows"
    numba = {"make": limit_rows, "parameters": "", "threads": 1, "min_blocks": 1, "constants": {}}
    for description in (
        {"file": "gone.cu", "entry": "gone", "defines": {}, "options": []},
        numba | {"make": "blazeproto.gone.kernel"},
        numba | {"make": "blazeproto.dispatch.limit.gone"},
        identity.described(limit.KERNEL),  # whose identity is another
        identity.described(gemm.kernel_for("up_forward")),
    ):
        monkeypatch.setitem(identity.KERNELS, "f" * identity.DIGITS, description)
        identity._is_made_here.cache_clear()
        assert not identity.is_current("f" * identity.DIGITS)


def test_a_kernel_of_equal_code_is_todays_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file, its entry and its macros may be others; what it led to before leads on."""
    kernel = gemm.kernel_for("up_forward")
    name, described = identity.identity(kernel), identity.described(kernel)
    gone: dict[str, Any] = {"file": "gone.cu", "entry": "gone", "defines": {}, "options": []}
    old = {"a" * 16: {"code": "1"}, "b" * 16: {"code": "2"}, name: {"code": "3"}}
    old = {key: each | {"described": gone} for key, each in old.items()}
    new = {name: {"code": "1", "described": described}}
    table = equal_kernels.extended({"kernels": {"c" * 16: "a" * 16}, "descriptions": {}}, old, new)
    assert table == {
        "kernels": {"a" * 16: name, "c" * 16: name},
        "descriptions": {name: described},
        "ended": ["b" * 16],
    }
    turned = described | {"defines": dict(reversed(described["defines"].items()))}
    old["a" * 16]["described"] = turned  # equal as a dict, and of another identity
    assert equal_kernels.extended({"kernels": {"c" * 16: "a" * 16}, "descriptions": {}}, old, new) == table
    monkeypatch.setattr(identity, "equal", lambda: table)
    for earlier in ("a" * 16, "b" * 16):
        monkeypatch.setitem(identity.KERNELS, earlier, gone)
        identity._is_made_here.cache_clear()
        assert identity.is_current(earlier) == (earlier in table["kernels"])


def test_every_committed_row_keeps_its_kernels() -> None:
    """The identities of all committed rows are today's, or lead to today's or to a kernel that was ended on purpose."""
    ended = {*identity.equal()["ended"]}
    for path in sorted(identity.EQUAL.parent.rglob("*.json")):
        if path != identity.EQUAL and re.search(r'"kernels": \[', path.read_text()):
            rows = [*identity.rows_in(common.read_json(path))]
            names = {name for row in rows for name in row["of"].get("kernels") or ()}
            assert all(identity.is_current(name) or identity.todays(name) in ended for name in names), path
