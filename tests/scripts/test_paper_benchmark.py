"""`scripts.bench.paper`: every item in its short form on a CPU, what is kept of a run that ended early, tables and plots."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import common, peers, plot_results, running, timing
from scripts.bench.identity import earlier
from scripts.bench.paper import __main__ as paper
from scripts.bench.paper import kernels, layers, printed, tables
from scripts.bench.paper.layers import Case
from scripts.bench.peers import layers as programs
from scripts.bench.result_tables import fill
from scripts.bench.timing import Machine

SMALL = Sizes(48, 32, 16, 4, 2)
CPU = Machine("cpu", 1, ("torch_grouped",))


pytestmark = pytest.mark.costly_fixture


@pytest.fixture
def measured(short_form: Callable[[str], Path]) -> Path:
    """The files of all short forms, where docs/papers.md looks for them beside a folder of results."""
    return short_form("paper.__main__") / "paper"


def record_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = common.read_json(folder / f"{name}.json")
    return found


def test_peers_that_are_missing_are_reasons_in_the_row(measured: Path) -> None:
    (row, _) = record_of(measured, "sonicmoe-layers")["rows"]
    assert row["programs"].keys() | row["absent"].keys() == {"blazeproto", *paper.ALL_PEERS}
    assert "torch_grouped" in row["programs"]
    assert all(each["fwdbwd_ms"] > 0 and each["peak_MiB"] > 0 for each in row["programs"].values())


def test_the_tables_of_the_page_are_made_of_the_files(measured: Path) -> None:
    page = (plot_results.DOCS / "papers.md").read_text()
    filled = fill(page, measured.parents[1] / "h200")
    assert filled.count("Not measured") == 3, "Figure 1's shapes, claims and kernels are not on a CPU"
    assert filled.count("| 256, 64, 32, 8, 2 |") > 10 and "MegaBlocks (ModuleNotFoundError" in filled
    assert fill(filled, measured.parents[1] / "h200") == filled


def test_the_plots_are_drawn(measured: Path, tmp_path: Path) -> None:
    pages = "".join(page.read_text() for page in plot_results.DOCS.glob("*.md"))
    for name, picture in plot_results.PICTURES.items():
        assert f"]({name})" in pages or f"](docs/{name})" in (plot_results.REPOSITORY / "README.md").read_text()
        if picture.file.startswith("paper/"):
            picture.save(record_of(measured.parent, picture.file), tmp_path / name)
            assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.gpu
def test_every_item_runs_on_a_gpu(tmp_path: Path) -> None:
    """Its small cases, with the kernels; peers that are not installed are absent."""
    small = {name: replace(item, cases=item.short) for name, item in paper.ITEMS.items()}
    words = ["all", "--peers", "torch_grouped,bmm_ub,mb_sparse", "--rounds", "2", "--out", str(tmp_path)]
    running.run(replace(paper.BENCH, items=small), words)
    for name in small:
        record = record_of(tmp_path / "paper", name)
        assert "failed" not in record and len(record["rows"]) == len(small[name].short)
        assert all(row["of"]["kernels"] and not earlier(row) for row in record["rows"])
    (row,) = record_of(tmp_path / "paper", "sonicmoe-kernels")["rows"]
    known = [line for line in tables.our_kernels({"rows": [row]}) if line["ms"] > 0]
    assert {line["kernel"] for line in known} == {name for _, name in kernels.our_kernels(paper.SMALL)}


def test_a_gpu_is_timed_by_kernels_where_no_graph_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"kernel_times": {"ours": timing.KernelTime(busy=1.0, total=2.0)}, "interleaved_ms": {}}
    seen: list[Any] = []
    for name, made in found.items():
        monkeypatch.setattr(
            timing, name, lambda *given, name=name, made=made, **_: seen.append((name, *given)) or {**made}
        )
    monkeypatch.setattr(timing.torch.cuda, "graph_pool_handle", lambda: None)
    gpu, calls = Machine("cuda", 7, ()), {"ours": dict}
    assert gpu.times(calls, graphs=False).ms == {"ours": 2.0}
    gpu.eager(calls)
    assert seen[1:] == [("kernel_times", calls, 7), ("interleaved_ms", calls, 7, 5)]


@pytest.mark.parametrize("together", [(), ("ours", "theirs"), ("ours", "not built")])
def test_programs_that_are_compared_are_timed_by_one_method(
    monkeypatch: pytest.MonkeyPatch, together: tuple[str, ...]
) -> None:
    """One that can't be captured takes those beside it along."""

    def captured(call: Any, pool: object) -> Any:
        if call is list:
            raise RuntimeError("it waits for the GPU")
        return call

    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing.torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(timing, "interleaved_ms", lambda calls, *_, **options: dict.fromkeys(calls, 1.0))
    by_kernels = timing.KernelTime(busy=2.0, total=3.0)
    monkeypatch.setattr(timing, "kernel_times", lambda calls, rounds: dict.fromkeys(calls, by_kernels))
    found = Machine("cuda", 7, ()).times({"ours": dict, "theirs": list}, together)
    alike = "theirs" in together
    assert found.ms == {"ours": 3.0 if alike else 1.0, "theirs": 3.0}
    assert found.method == {"ours": "kernels" if alike else "graph", "theirs": "kernels"}
    assert found.refused == {"theirs": "RuntimeError: it waits for the GPU"}


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H100 80GB HBM3, driver 580.159.04", "h100"),
        ("NVIDIA H200, driver 580.159.04", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("none", "other"),
    ],
)
def test_each_gpu_has_a_folder(gpu: str, folder: str) -> None:
    assert common.folder_of(gpu) == folder


# ---------------------------------------------------------------------------------------------------------- programs


def test_plain_torch_computes_the_layer_and_keeps_what_the_paper_says() -> None:
    """Routed tokens, a, b, sigmoid(a), SiLU(a), the product, y; beside them scores and three lists of integers at most."""
    inputs = peers.make_inputs(SMALL, device="cpu")
    plain, ours = programs.plain(SMALL, inputs), programs.ours(SMALL, inputs)
    for mine, other in zip(
        timing.tensors_in(plain.forward_backward()), timing.tensors_in(ours.forward_backward()), strict=True
    ):
        assert timing.relative_difference(mine, other) < 0.02
    kept = timing.saved_bytes(plain.forward, plain.weights)
    rows = 2 * SMALL.rows * (2 * SMALL.d + 5 * SMALL.n)
    assert rows <= kept <= rows + SMALL.rows * (2 + 4 + 3 * 8)


def test_each_step_of_the_ablation_keeps_no_more_than_the_one_before() -> None:
    row = layers.ablation(Case(SMALL), CPU)
    assert list(row["programs"]) == [*printed.LINES]
    saved = [each["saved_MiB"] for each in row["programs"].values()]
    assert saved[0] > saved[1] >= saved[2] == saved[3]


def test_megablocks_without_a_gate_has_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        scale = 1.0

        def __init__(self, arguments: SimpleNamespace) -> None:
            self.mlp, self.act, self.E = nn.Module(), arguments.activation_fn, arguments.moe_num_experts
            names = {"glu": ("w1", "v1", "w2"), "mlp": ("w1", "w2")}[arguments.mlp_type]
            for name in names:
                setattr(self.mlp, name, nn.Parameter(torch.empty(SMALL.E * SMALL.n, SMALL.d, dtype=torch.bfloat16)))

        def sparse_forward_once(self, x: Tensor, scores: Tensor, experts: Tensor) -> tuple[Tensor]:
            out = torch.zeros_like(x)
            up, down = (w.view(self.E, SMALL.n, SMALL.d) for w in (self.mlp.w1, self.mlp.w2))
            for slot in range(SMALL.K):
                chosen = experts[:, slot].long()
                h = torch.einsum("td,tnd->tn", x, up[chosen])
                out = out + self.scale * scores[:, slot, None] * torch.einsum("tn,tnd->td", self.act(h), down[chosen])
            return (out,)

    for name in ("megablocks", "megablocks.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megablocks.layers.arguments", SimpleNamespace(Arguments=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "megablocks.layers.dmoe", SimpleNamespace(ParallelDroplessMLP=Layer))
    case = Case(SMALL._replace(halves=1), "silu")
    beside = Machine("cpu", 1, ("mb_sparse",))
    row = layers.against_megablocks(case, beside)
    assert row["programs"].keys() == {"blazeproto", "paper", "mb_sparse"}
    monkeypatch.setattr(Layer, "scale", 1.1)  # what computes something else is left out
    row = layers.against_megablocks(case, beside)
    assert "mb_sparse" not in row["programs"] and "computes something else" in row["absent"]["mb_sparse"]


def test_the_first_program_has_to_run() -> None:
    def build(shape: Sizes, inputs: peers.LayerInputs) -> peers.Program:
        raise ValueError("it does not")

    with pytest.raises(RuntimeError, match="ValueError: it does not"):
        layers.layer_row(Case(SMALL), {"blazeproto": build}, CPU)


# ------------------------------------------------------------------------------------------------------------- floors


def test_floors_are_of_the_gpu_that_a_row_is_of() -> None:
    cfg = common.cfg_of(Sizes(32768, 4096, 1024, 64, 4))

    def row_of(gpu: str) -> dict[str, Any]:
        return {"cfg": cfg, "of": {"gpu": gpu}}

    (h100, h200) = (row_of(f"NVIDIA {name}, driver 580.159.04") for name in ("H100 80GB HBM3", "H200"))
    for row, name in ((h100, "H100"), (h200, "H200")):
        assert tables.gpu_of(row) == name
        assert tables.floor(row, tables.experts_ms) == sum(cost.layer_floor_ms(Sizes(**cfg), name))
    for other in ("none", "NVIDIA A100-SXM4-80GB, driver 1", "NVIDIA GH200 480GB, driver 1"):
        assert tables.floor(row_of(other), tables.experts_ms) is None
    y, d_out, scores = 2 * 4 * 32768 * 4096, 2 * 32768 * 4096, 4 * 4 * 32768
    assert tables.floor(h100, tables.dot_ms) == pytest.approx((y + d_out + scores) / 3.35e9)
    assert tables.floor(h200, tables.dispatch_ms) == cost.floor_ms(0.0, cost.dispatch_bytes(4 * 32768))


@pytest.mark.parametrize(
    ("name", "gpu", "rates"),
    [
        ("dispatch", "none", ""),  # a CPU has none
        ("dispatch", "NVIDIA H100 80GB HBM3, driver 580.159.04", "Floors: 785 TFLOP/s and 3.35 TB/s (H100: operations"),
        ("combine", "NVIDIA H200, driver 580.159.04", ""),
    ],
)
def test_the_rates_of_floors_stand_under_tables_that_have_some(measured: Path, name: str, gpu: str, rates: str) -> None:
    file = tables.TABLES[f"paper_{name}"].file
    rows = [row | {"of": row["of"] | {"gpu": gpu}} for row in record_of(measured.parent, file)["rows"]]
    made = tables.TABLES[f"paper_{name}"]({"rows": rows})
    assert rates in made and ("Floors:" in made) is bool(rates)


def test_the_versions_under_a_table_are_those_of_its_programs(measured: Path) -> None:
    record, combine = record_of(measured, "combine"), tables.TABLES["paper_combine"]
    versions = "torch 2.11.0, sonic-moe 0.1.2, quack-kernels 0.3.11, megablocks 0.11, transformers 5.17.0"
    for row in record["rows"]:
        row["of"]["versions"] = versions
    assert "; torch 2.11.0; " in combine(record)
    record["rows"][0]["programs"]["sonic"] = {}
    assert "; torch 2.11.0, SonicMoE 0.1.2, QuACK 0.3.11; " in combine(record)
    record["rows"][0]["absent"] = {"mb_sparse": "it does not run"}
    assert "QuACK 0.3.11, MegaBlocks 0.11; " in combine(record)


def test_the_work_of_our_kernels_is_the_layer_s() -> None:
    shape = Sizes(24576, 1536, 256, 128, 8)
    known = kernels.our_kernels(shape)
    for phase, operations in zip(("forward", "backward"), cost.layer_operations(shape), strict=True):
        products = [work for (of, name), (work, _) in known.items() if of == phase and name != "combine"]
        assert sum(products) == operations and known[phase, "combine"][1] > 0


def test_the_kernels_of_a_gpu_are_summed_by_name_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's events aside; a kernel that runs in both phases is in each with its own part."""
    on_gpu, on_host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    calls: list[str] = []

    def event(name: str, us: float, where: Any = on_gpu) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=where, time_range=SimpleNamespace(elapsed_us=lambda: us))

    @contextmanager
    def profile(activities: Any) -> Iterator[SimpleNamespace]:
        begin = len(calls)
        recorded = SimpleNamespace()
        yield recorded
        forward = [event("linear", 100.0), event("cudaLaunchKernel", 7.0, on_host)]
        both = [*forward, event("linear", 50.0), event("nvjet_gemm", 20.0)]
        made = [one for name in calls[begin:] for one in (forward if name == "forward" else both)]
        recorded.events = lambda: made

    monkeypatch.setattr(kernels, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    program: Any = SimpleNamespace(
        forward=lambda: calls.append("forward"), forward_backward=lambda: calls.append("both")
    )
    found = kernels.kernels_of(program, "cuda")
    assert found["forward"] == {"linear": {"ms": pytest.approx(0.1), "launches": pytest.approx(1)}}
    assert found["backward"] == {
        "linear": {"ms": pytest.approx(0.05), "launches": pytest.approx(1)},
        "nvjet_gemm": {"ms": pytest.approx(0.02), "launches": pytest.approx(1)},
    }
    assert kernels.MATRICES.search("nvjet_gemm") and not kernels.MATRICES.search("combine")


# ------------------------------------------------------------------------------------------------- what papers print


def test_what_is_printed_fits_together() -> None:
    """Table 4's third line leaves out SiLU's output, 2 K n bytes a token: n follows, and so does that MB are MiB. Tables 2 and 4
    are of one layer, at times ten times apart."""
    for (_, _, n), lines in printed.ABLATION.items():
        assert (lines[1][1] - lines[2][1]) * common.MIB == 2 * 4 * n * (1 << 19)
    ms, saved, *_ = printed.SCALE["swiglu", 1 << 19]
    assert printed.ABLATION[256, 128, 256][-1] == (str(round(10 * ms)), saved)


def test_the_cases_are_the_papers() -> None:
    cases = {name: item.cases for name, item in paper.ITEMS.items()}
    assert len(cases["moeblaze-figures"]) == 14 and len(cases["moeblaze-scale"]) == len(printed.SCALE) == 10
    assert {(case.activation, case.shape.T) for case in cases["moeblaze-scale"]} == printed.SCALE.keys()
    assert {(c.shape.d, c.shape.E, c.shape.n) for c in cases["moeblaze-ablation"]} == printed.ABLATION.keys()
    assert [case.label for case in cases["moeblaze-dispatch"]] == [*printed.DISPATCH]
    assert {case.shape.halves for case in cases["moeblaze-figures"] if case.activation == "silu"} == {1}
    figure_1 = [
        case for case in cases["sonicmoe-layers"] if case.shape.n * case.shape.K == 4096 and case.shape.T == 32768
    ]
    assert sorted(case.shape.K for case in figure_1) == [2, 4, 8, 16]
    assert len(cases["combine"]) == 23 and len(cases["sonicmoe-rounding"]) == 16
    assert {label for label, _ in printed.FIGURE_MEMORY} <= {case.label for case in cases["moeblaze-figures"]}


def test_what_sonicmoe_s_text_says_is_computed() -> None:
    def program(ms: float, saved: float) -> dict[str, float]:
        return {"fwd_ms": ms, "fwdbwd_ms": 3 * ms, "saved_MiB": saved}

    def row(*shape: int) -> dict[str, Any]:
        figures = {"blazeproto": program(1.0, 50.0), "sonic": program(1.25, 55.0), "bmm_ub": program(1.0, 300.0)}
        return {
            "cfg": dict(zip("TdnEK", shape, strict=True)),
            "of": {"measured": str(shape[0])},
            "programs": figures | {"scattermoe": program(2.0, 100.0)},
        }

    rows = [
        row(40960, 768, 256, 128, 8),
        row(24576, 1536, 256, 128, 8),
        row(32768, 4096, 1024, 64, 4),
        row(32768, 4096, 2048, 64, 4),
    ]
    found = tables.claims({"rows": rows})
    assert [each["sonic"] for each in found] == [
        "0.80 (0.80 to 0.80)",
        "0.55 (0.55 to 0.55)",
        "1.60 (1.60 to 1.60)",
        "1.60 (1.60 to 1.60)",
    ]
    assert found[0]["ours"] == "1.00 (1.00 to 1.00)" and found[0]["printed"] == "0.88 (0.86 to 0.91)"
    assert found[2]["of"] == {"measured": "24576"}, "the older of two"
    assert len(tables.granularity({"rows": rows})) == 1
