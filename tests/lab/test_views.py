"""Views of dispatches, kernels, tiles and layers: what they say is so, in both forms, and nothing is imported for it before."""

import re
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from shown import Text

from blazeproto import MoE, gemm
from blazeproto.dispatch import Dispatch, reference
from blazeproto.lab import views
from blazeproto.lab.tables import Bar, Table, View
from blazeproto.lab.views import ctas_per_multiprocessor, imbalance, loads_of, resources, threads_of, view, wgmma_count
from tests.python import python
from tests.refusals import refuses

mpl.use("Agg")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def paper_dispatch() -> Dispatch:
    """The example of MoEBlaze §4.1."""
    return reference.build_dispatch(np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32), 4)


def skewed_dispatch(num_experts: int) -> Dispatch:
    """Expert e has e tokens."""
    ids = np.repeat(np.arange(num_experts, dtype=np.int32), np.arange(num_experts))
    return reference.build_dispatch(ids[:, None], num_experts)


def test_the_worked_example_is_the_paper_s() -> None:
    made = view(paper_dispatch())
    lines = [line.split() for line in made.text().splitlines()]
    assert ["expert_pair_indices", "2", "4", "8", "3", "6", "0", "7", "1", "5", "9"] in lines
    assert ["expert_token_indices", "1", "2", "4", "1", "3", "0", "3", "0", "2", "4"] in lines
    assert ["token_index_map", "5", "7", "0", "3", "1", "8", "4", "6", "2", "9"] in lines
    assert ["3", "1", "2", "4", "6"] in lines  # token 3: experts 1 and 2, rows 4 and 6
    expert_3 = next(line for line in lines if line[:2] == ["3", "3"])
    assert expert_3[-9:] == ["7", "to", "9", "1", "5", "9", "0", "2", "4"]
    assert made.facts["imbalance"].startswith("1.20")


def test_varying_numbers_of_experts() -> None:
    experts, tokens = np.array([0, 1, 1, -1], np.int32), np.array([0, 0, 2, 0], np.int32)
    dispatch = reference.build_dispatch_varying(experts, tokens, np.array([0, 2, 2, 3], np.int32), 2)
    assert [list(row) for row in view(dispatch).tables[1].rows] == [["0", "0 1", "0 1"], ["1", "", ""], ["2", "1", "2"]]


def test_many_experts_show_the_extremes() -> None:
    [table] = view(skewed_dispatch(100)).tables
    experts = [int(str(row[0])) for row in table.rows]
    assert experts == [*range(99, 83, -1), *range(15, -1, -1)] and table.rows[0][2] == Bar(99, 99, 49.5)


def test_no_token_is_no_error() -> None:
    made = view(reference.build_dispatch(np.zeros((0, 2), np.int32), 3))
    assert made.facts["imbalance"].startswith("nan") and "0" in made.text() and Text(made._repr_html_()).text


def test_load_and_imbalance() -> None:
    loads = loads_of(paper_dispatch())
    assert loads == [3, 2, 2, 3] and imbalance(loads) == pytest.approx(1.2) and imbalance([0, 8, 0, 0]) == 4


@pytest.mark.parametrize("thing", [paper_dispatch(), gemm.TileConfig(), skewed_dispatch(40)], ids=["5", "tiles", "40"])
def test_both_forms_have_the_same_cells(thing: object) -> None:
    made = view(thing)
    html = Text(thing._repr_html_()).text.rstrip()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in html.splitlines()] == made.text().rstrip().splitlines()
    wanted = [text for fact in made.facts.items() for text in fact]
    wanted += ["" if isinstance(cell, Bar) else cell for table in made.tables for row in table.rows for cell in row]
    text = View(made.title, made.facts, made.tables).text(width=400)
    for word in (word for cell in wanted for word in cell.split()):
        assert word in text


def test_html_is_escaped() -> None:
    html = View("<b>", {"<i>": "&"}, [Table(["<u>"], [["<script>"]], "<p>")], "<hr>")._repr_html_()
    assert not re.search("<script|<i>|<u>|<hr>|<b>", html)


def test_a_layer() -> None:
    layer = MoE(64, 32, 8, 2, bias=True, d_shared=16)
    made = view(layer)
    *rows, total = made.tables[0].rows
    assert [row[0] for row in rows] == [name for name, _ in layer.named_parameters()]
    count = sum(p.numel() for p in layer.parameters())
    assert total[3] == f"{count:,}"
    experts = sum(p.numel() for name, p in layer.named_parameters() if "proj" in name and "shared" not in name)
    assert f"{count - experts * 6 // 8:,} " in made.facts["parameters"]
    assert "parameters" in Text(layer._repr_html_()).text
    assert f"{layer.saved_bytes(4096) / 4096:,.0f} B" in made.facts["save"]


@pytest.mark.parametrize("keep", [True, False])
def test_weights_that_wait_for_backward_are_not_the_tokens(keep: bool) -> None:
    layer = MoE(64, 128, 8, 2, precision="fp8", keep_transposed=keep)
    of_token = 4 * 64 + 2 * (2 * 128 + 8 + 4 + 4 + 4)  # x; H and its scales, a score, two indices of each pair
    copies = 8 * (3 * 64 * 128 + 2 * 16) if keep else 0  # of both weights, with an expert's scales
    assert f"minimal: {of_token:,} B a token and {copies + 4 * 9:,} B" in view(layer).facts["save"]


def test_views_load_when_they_are_asked_for() -> None:
    probe = (
        "import sys, blazeproto\n"
        "blazeproto.Dispatch, blazeproto.gemm.TileConfig()\n"
        "assert not [m for m in sys.modules if m.startswith(('blazeproto.lab', 'rich', 'matplotlib'))]\n"
        "blazeproto.gemm.TileConfig()._repr_html_()\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    python("-c", probe)


# --- Kernels -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "ctas"),
    [
        (128, 512, 227 * 1024, 1),
        (64, 128, 0, 8),
        (33, 128, 0, 12),  # 40 are taken: whole units of 256 a warp
        (32, 64, 0, 16),  # registers are dealt out to four warps at a time
        (16, 32, 0, 32),
        (16, 1024, 0, 2),
        (16, 128, 32 * 1024, 6),
        (168, 384, 0, 1),
        (255, 512, 0, 0),
    ],
)
def test_ctas_a_multiprocessor(registers: int, threads: int, smem: int, ctas: int) -> None:
    """By the occupancy table of compute capability 9.0."""
    assert ctas_per_multiprocessor(registers, threads, smem) == ctas


def test_a_kernel() -> None:
    kernel = gemm.kernel_for("up_forward")
    has = resources(kernel)
    assert (has.registers, has.spills, has.threads, has.ctas) == (128, 0, 512, 1)
    assert has.smem_bytes == kernel.smem_bytes >= 4 * 48 * 1024
    facts = view(kernel).facts
    assert facts["registers"].startswith("128 ") and facts["CTAs"] == "1 a multiprocessor"
    combine = next(iter(gemm.PRODUCTS["combine"].kernels()))
    assert threads_of(combine) == 128 and resources(combine, sass=False).wgmma is None


def test_without_nvdisasm_the_view_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise FileNotFoundError(name)

    monkeypatch.setattr("blazeproto.gemm.nvrtc.find_tool", missing)
    kernel = gemm.kernel_for("up_forward")
    kernel.__dict__.pop("sass", None)
    assert "nvidia-cuda-nvdisasm" in view(kernel).facts["wgmma"]


@pytest.mark.gpu
def test_ctas_as_the_driver_counts_them() -> None:
    from cupy.cuda import driver

    kernels = [
        gemm.kernel_for("up_forward"),
        gemm.kernel_for("down_forward"),
        *list(gemm.PRODUCTS["combine"].kernels())[:4],
    ]
    kernels += list(gemm.PRODUCTS["bias_score_grad"].kernels())[:2]
    torch.zeros(1, device="cuda")
    for kernel in kernels:
        has = resources(kernel, sass=False)
        counted = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.handle(0), has.threads, kernel.dynamic_smem)
        assert has.ctas == counted, kernel


def test_the_load_of_a_layer_s_statistics() -> None:
    layer = MoE(16, 8, 4, 2)
    _, stats = layer(torch.randn(20, 16))
    routing = layer.router(torch.randn(20, 16))
    assert loads_of(stats) == stats.load.tolist() and loads_of(routing) == routing.load.tolist()
    axes = views.plot_load(stats)
    assert [bar.get_height() for bar in axes.patches] == stats.load.tolist()
    assert paper_dispatch().plot(axes) is axes
    mpl.pyplot.close("all")
    for function in (loads_of, views.plot_load):
        refuses(lambda function=function: function(stats.load), "dispatch", TypeError)
    refuses(lambda: view(3), "thing", TypeError)


@pytest.mark.parametrize("width", [45, 80, 110, 200])
def test_no_name_is_split(width: int) -> None:
    """Where the columns have no place beside each other, each cell has a line."""
    names = ["expert_pair_indices[40832]", "expert_token_offsets[1×129]", "d_router.weight[128×64]"]
    table = Table(
        ["arrays of", "reads", "writes"],
        [["dispatch", " ".join(names), " ".join(names)]] * 2,
        left=["arrays of", "reads", "writes"],
    )
    numbers = Table(["step", "", "read"], [["up_backward_weight", Bar(1, 1), "12,345.0 MiB"]] * 2, left=["step"])
    text = View("A view", {}, [table, numbers]).text(width)
    assert all(text.count(name) == 4 for name in names)
    assert text.count("up_backward_weight") == text.count("12,345.0 MiB") == 2
    assert max(map(len, text.splitlines())) <= width and (text.count("arrays of") == 1) == (width >= 80)


def test_ipython_shows_the_table() -> None:
    """And in a list the repr, for it may hold many."""
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    for shown in (paper_dispatch(), MoE(16, 8, 4, 2), gemm.tiles.TILES["up_forward"]):
        assert pretty(shown) == view(shown).text(80) and view(shown).text(80) not in pretty([shown])


def test_what_cannot_be_drawn_is_its_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel where there is no compiler."""
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    shown = paper_dispatch()

    def fail(thing: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(views, "view", fail)
    assert pretty(shown) == repr(shown)


def test_wgmma_are_counted_on_bf16_and_on_fp8() -> None:
    sass = "  .section .text.one,ax\n HGMMA.64x64 R1\n QGMMA.64x64 R2\n FFMA R3\n  .section .text.two,ax\n HGMMA R1\n"
    kernel: Any = SimpleNamespace(ptx="wgmma.mma_async", sass=sass, entry="one")
    assert wgmma_count(kernel) == 2
