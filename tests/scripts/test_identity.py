"""What moves the identity of a kernel or of a benchmark, and what does not."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blazeproto import gemm
from blazeproto.dispatch import limit, tiled
from blazeproto.gemm import Sizes
from blazeproto.gemm.compile import CUDA_SOURCES, Kernel
from blazeproto.gemm.product import PACKAGE, Variant
from blazeproto.gemm.registry import quantized_kernels
from blazeproto.gemm.tiles import TILES, TileConfig
from blazeproto.router import topk
from blazeproto.runtime import driver
from blazeproto.runtime.numba_kernel import NumbaKernel
from scripts.bench import common, identity, layer_tiles, module
from scripts.checks import equal_kernels

# ------------------------------------------------------------------------------------------------------- CUDA kernels


def identities(folder: Path, *activations: str) -> list[str]:
    """They are those of new kernels: one object reads its source once."""
    kernels = [gemm.kernel_for("up_forward", sources=folder, activation=name) for name in activations]
    return [identity.identity(replace(kernel)) for kernel in kernels]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return shutil.copytree(CUDA_SOURCES, tmp_path / "cuda")


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) >= 1, f"{file.name} no longer has {old!r}"
    file.write_text(text.replace(old, new, 1))


def test_a_comment_and_white_space_leave_a_kernel_what_it_is(sources: Path) -> None:
    before = identities(sources, "swiglu")
    assert before == identities(CUDA_SOURCES, "swiglu")
    for file in sources.glob("*.cu*"):
        text = re.sub(r"^(#pragma once)$", r"\1\n// another comment\n\n", file.read_text(), flags=re.MULTILINE)
        file.write_text(f"{text}\n/* and one more */\n")
    edit(sources / "up.cu", "{\n", "{   \n\n\t")
    assert identities(sources, "swiglu") == before


def test_code_of_a_variant_is_in_that_variant_s_kernels_alone(sources: Path) -> None:
    swiglu, relu, relu2 = identities(sources, "swiglu", "relu", "relu2")
    header = sources / "activation.cuh"
    text = header.read_text()
    start = text.index("#elif ACTIVATION_IS_RELU\n")
    header.write_text(text[:start] + text[start:].replace("0.0f", "0.5f", 1))
    assert header.read_text() != text
    after = identities(sources, "swiglu", "relu", "relu2")
    assert after[0] == swiglu and after[1] != relu and after[2] == relu2


def test_a_number_in_a_header_and_a_macro_make_another_kernel(sources: Path) -> None:
    plain = gemm.kernel_for("up_forward", sources=sources)
    before = identity.identity(plain)
    debug = gemm.kernel_for("up_forward", sources=sources, debug=("INJECT_DELAYS",))
    tiles = gemm.kernel_for("up_forward", TileConfig(tile_n=128), sources=sources)
    assert len({before, identity.identity(debug), identity.identity(tiles)}) == 3
    header = sources / "wgmma.cuh"
    header.write_text(header.read_text().replace("64", "65"))
    assert identities(sources, "swiglu") != [before]


def test_a_header_that_is_malformed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="1"):
        identity.preprocessed("#if 1\n")


# ------------------------------------------------------------------------------------------------------ Numba kernels

NUMBA = '''
"""Kernels."""
from blazeproto.runtime.warp import device

SCALE = 3


@device
def helper(x):
    """Twice."""
    return x * 2


@device
def unused(x):
    return x


def host():
    return "prepares"


def kernel(threads, wide):
    add = device(lambda x: x + SCALE)

    def kernel(out, size):
        """Fills out."""
        for i in range(size):
            out[i] = add(helper(i)) * threads if wide else i

    return kernel
'''


def numba_identity(folder: Path, source: str, **constants: Any) -> str:
    path = folder / f"kernels_{abs(hash(source))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernels_of_a_test", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return identity.Code(made.kernel(**{"threads": 32, "wide": True} | constants), ("kernels_of_a_test",)).identity


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("Fills out.", "Writes out, which has size places.", True),
        ("Twice.", "Two times x.", True),
        ("for i in range", "# each place\n        for i in range", True),
        ("def kernel(out, size)", "def kernel(out: object, size: int) -> None", True),
        ('return "prepares"', 'return "prepares more"', True),
        ("    return x\n", "    return 7 * x\n", True),  # a device function that the kernel does not call
        ("SCALE = 3", "SCALE = 4", False),
        ("x * 2", "x * 4", False),  # one that it calls
        ("x + SCALE", "x - SCALE", False),
        ("threads if wide", "threads + 1 if wide", False),
    ],
)
def test_what_a_numba_kernel_is(tmp_path: Path, old: str, new: str, same: bool) -> None:
    assert NUMBA.count(old) == 1
    changed = numba_identity(tmp_path, NUMBA.replace(old, new))
    assert (changed == numba_identity(tmp_path, NUMBA)) is same


FOUND = """
from functools import wraps
import numpy as np
from blazeproto.runtime.numba import cuda
TABLE = np.where(np.arange(5000) == 2500, 7, 0)

def repeated(count):
    def decorated(function):
        @wraps(function)
        def run():
            return [function() for _ in range(count)]
        return run
    return decorated

class Base:
    LEAST = [1]
    def inherited(self):
        return "inherited"

class Made(Base):
    def own(self):
        return "own"

class Holder:
    def __init__(self):
        self.held = lambda x: x + 1

MADE, HOLDER = Made(), Holder()

@repeated(2)
def step():
    return "step"

@cuda.jit(device=True, inline="always")
def helper(x):
    return x

def kernel(threads, wide):
    def kernel(out):
        step(), MADE.own(), HOLDER.held(3), TABLE, helper(1)
    return kernel
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2500, 7", "2500, 8"),  # which NumPy does not print
        ("range(count)", "range(count + 1)"),
        ("repeated(2)", "repeated(3)"),
        ('return "step"', 'return "other"'),
        ("LEAST = [1]", "LEAST = [2]"),
        ('"inherited"', '"other"'),
        ('"own"', '"other"'),
        ("x + 1", "x + 2"),
        ('inline="always"', 'inline="always", fastmath=True'),
    ],
)
def test_what_is_found_behind_decorators_and_objects(tmp_path: Path, old: str, new: str) -> None:
    assert FOUND.count(old) == 1
    assert numba_identity(tmp_path, FOUND.replace(old, new)) != numba_identity(tmp_path, FOUND)


def test_a_numba_kernel_s_constants_make_it_another(tmp_path: Path) -> None:
    made = {numba_identity(tmp_path, NUMBA, **constants) for constants in ({}, {"threads": 64}, {"wide": False})}
    assert len(made) == 3


def kernels_of_numba() -> list[NumbaKernel]:
    route = topk.forward_kernel(128, 8, "sigmoid", True, 1.0, False, False, True)
    return [*tiled.kernels(1024, 8, 128, "int32"), limit.KERNEL, route]


def test_a_kernel_is_made_again_from_its_description() -> None:
    for kernel in (*kernels_of_numba(), gemm.kernel_for("down_forward", low_rank=1)):
        described = json.loads(json.dumps(identity.described(kernel)))
        assert identity.identity(identity.made_again(described)) == identity.identity(kernel)
    first, second = kernels_of_numba()[:2]
    assert identity.identity(first) != identity.identity(second)
    for change in ({"min_blocks": 2}, {"parameters": " ".join([*first.parameters, "int64"])}):
        other = identity.made_again(identity.described(first) | change)
        assert identity.identity(other) != identity.identity(first), change
    scored = [
        topk.forward_kernel(128, 8, score, True, 1.0, False, False, True) for score in ("sigmoid", "topk_softmax")
    ]
    assert len(set(map(identity.identity, scored))) == 2


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


def test_an_object_that_was_copied_is_as_before() -> None:
    """copy and pickle note a class' slots in the class."""

    class Settings:
        rounds = 5

    def code() -> str:
        return identity.Code(Settings, (__name__,)).identity

    before = code()
    copy.copy(Settings())
    assert "__slotnames__" in vars(Settings) and code() == before
    Settings.rounds = 6
    assert code() != before


def test_a_row_says_what_was_launched_while_it_was_measured(
    launches: dict[int, Kernel | NumbaKernel], tmp_path: Path
) -> None:
    row = common.stamped(row_of, 7, 11, 7)
    assert row["of"]["kernels"] == sorted(identity.identity(launches[address]) for address in (7, 11))
    assert row["of"]["protocol"] == f"{__name__}.row_of" and row["of"]["measured"].endswith(" UTC")
    assert row["of"]["protocol_identity"] == identity.protocol_identity(row["of"]["protocol"]) != ""
    assert "torch " in row["of"]["versions"]
    common.write_json(tmp_path / "a.json", {"rows": [row]})
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["kernels"].keys() == set(row["of"]["kernels"])
    identity.KERNELS.clear()
    assert common.read_json(tmp_path / "a.json")["rows"] == [row] and identity.KERNELS.keys() == set(
        row["of"]["kernels"]
    )
    assert common.stamped(row_of)["of"]["kernels"] == []


def test_a_row_is_earlier_if_a_kernel_or_the_benchmark_is_no_longer_what_it_was(
    launches: dict[int, Kernel | NumbaKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = common.stamped(row_of, 7, 11)
    monkeypatch.setattr(identity, "protocol_identity", lambda name: row["of"]["protocol_identity"])
    assert identity.earlier(row) == ""
    assert identity.earlier({}) == identity.earlier({"of": {"measured": "then"}}) == "kernels"
    gone = {"of": row["of"] | {"kernels": ["0" * identity.DIGITS]}}
    assert identity.earlier(gone) == "kernels"
    assert identity.earlier({"of": row["of"] | {"protocol_identity": "0"}}) == "benchmark"
    # The product takes other tiles now: its kernel is there still, and is not what a layer runs.
    monkeypatch.setitem(TILES, "up_forward", TileConfig(deferred=False))
    layer_tiles._tiles_chosen.cache_clear()
    assert identity.earlier(row) == "kernels"
    layer_tiles._tiles_chosen.cache_clear()


@pytest.mark.parametrize("number", range(0, 27, 5))
def test_no_product_is_taken_for_one_with_other_tiles(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = common.MODULE_SHAPES[number]
    cfg = common.cfg_of(sizes)
    for product in gemm.PRODUCTS.values():
        if product.tiles is None or product.kernel is None:
            continue
        described = identity.described(product.kernel(product.tiles(sizes), product.variant, PACKAGE))
        monkeypatch.setitem(identity.KERNELS, "a", described)
        assert not layer_tiles.other_tiles(identity.KERNELS["a"], cfg), product.name
        monkeypatch.setitem(identity.KERNELS, "a", described | {"defines": described["defines"] | {"STAGES": 2}})
        assert layer_tiles.other_tiles(identity.KERNELS["a"], cfg), product.name
        assert not layer_tiles.other_tiles(identity.KERNELS["a"], {"E": 8, "hidden_size": 64})  # not a row of a layer


def test_tiles_may_be_those_of_another_number_of_rows() -> None:
    sizes = Sizes(256, 64, 32, 8, 2)
    few, many = (gemm.PRODUCTS["up_forward"].tiles(sizes._replace(T=rows, K=1)) for rows in (512, 8192))
    assert few != many
    described = identity.described(gemm.PRODUCTS["up_forward"].kernel(many, Variant(), PACKAGE))
    assert layer_tiles.other_tiles(described, common.cfg_of(sizes))
    assert not layer_tiles.other_tiles(described, common.cfg_of(sizes), [1000, 8192])
    assert not any(layer_tiles.other_tiles(identity.described(of), common.cfg_of(sizes)) for of in quantized_kernels())


def test_what_is_left_of_a_kernel_whose_source_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for description in (
        {"file": "gone.cu", "entry": "gone", "defines": {}, "options": []},
        {"make": "blazeproto.gone.kernel", "parameters": "", "threads": 1, "min_blocks": 1, "constants": {}},
        {"make": "blazeproto.dispatch.limit.gone", "parameters": "", "threads": 1, "min_blocks": 1, "constants": {}},
        {"make": "blazeproto.dispatch.limit.limit_rows", "parameters": "", "threads": 1, "min_blocks": 1,
         "constants": {"no": 1}},
    ):  # fmt: skip
        monkeypatch.setitem(identity.KERNELS, "f" * identity.DIGITS, description)
        identity._is_made_here.cache_clear()
        assert not identity.is_current("f" * identity.DIGITS)


def test_what_cannot_be_compared_is_not_taken_for_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pcpp nothing is measured, and no page is marked."""
    described = identity.described(gemm.kernel_for("up_forward"))
    monkeypatch.setitem(identity.KERNELS, "e" * identity.DIGITS, described)
    monkeypatch.setitem(sys.modules, "pcpp", None)
    identity._is_made_here.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pcpp"):
        identity.is_current("e" * identity.DIGITS)
    with pytest.raises(ModuleNotFoundError, match="pcpp"):
        common.stamped(lambda: pytest.fail("it was measured"))


def test_a_benchmark_is_what_it_runs_and_not_what_it_prints() -> None:
    code = identity.Code(module.measure, identity.TIMED_BY)
    text = "\n".join(code.parts)
    for used in (
        "kernel_times",
        "peak_bytes",
        "make_inputs",
        "LARGEST_DIFFERENCE = ",
        "modules.ours",
        "Rotation.__call__",
    ):
        assert used in text, used
    for not_used in ("module_table", "print_verdicts", "TABLES", "LEAST_RATIO", str(common.REPOSITORY)):
        assert not_used not in text, not_used


def test_a_benchmark_does_not_depend_on_the_kernels_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one asks what was launched, and whether a row is of earlier kernels."""
    name = "scripts.bench.models.layers.models"
    before = identity.protocol_identity.__wrapped__(name)
    monkeypatch.setitem(identity.KERNELS, "0123456789abcdef", {"file": "a.cu"})
    assert before and identity.protocol_identity.__wrapped__(name) == before


def test_the_protocol_moves_with_a_constant_and_with_what_a_peer_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = identity.name_of(module.measure)
    before = identity.protocol_identity.__wrapped__(name)
    assert before and identity.protocol_identity.__wrapped__(name) == before
    with monkeypatch.context() as patch:
        patch.setattr(module, "MOST_CALLS", 13)
        assert identity.protocol_identity.__wrapped__(name) != before
    peers = shutil.copytree(identity.PEERS, tmp_path / "peers")
    monkeypatch.setattr(identity, "PEERS", peers)
    assert identity.protocol_identity.__wrapped__(name) == before
    edit(peers / "sonic.py", "False, False", "False, True")
    assert identity.protocol_identity.__wrapped__(name) != before
    assert identity.protocol_identity("scripts.bench.module.gone") == ""


def test_a_kernel_of_equal_code_is_todays_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file, its entry and its macros may be others; what it led to before leads on."""
    kernel = gemm.kernel_for("up_forward")
    name, described = identity.identity(kernel), identity.described(kernel)
    gone: dict[str, Any] = {"file": "gone.cu", "entry": "gone", "defines": {}, "options": []}
    old = {"a" * 16: {"code": "1"}, "b" * 16: {"code": "2"}, name: {"code": "3"}}
    old = {key: each | {"described": gone} for key, each in old.items()}
    new = {name: {"code": "1", "described": described}}
    table = equal_kernels.extended({"kernels": {"c" * 16: "a" * 16}, "descriptions": {}}, old, new)
    assert table == {"kernels": {"a" * 16: name, "c" * 16: name}, "descriptions": {name: described}}
    monkeypatch.setattr(identity, "equal_kernels", lambda: table)
    for earlier in ("a" * 16, "b" * 16):
        monkeypatch.setitem(identity.KERNELS, earlier, gone)
        identity._is_made_here.cache_clear()
        assert identity.is_current(earlier) == (earlier in table["kernels"])
