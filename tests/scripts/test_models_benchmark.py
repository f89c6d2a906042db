"""`scripts.bench.models`: every item in its short form on a CPU, processes of their own, README's table, and the pictures."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import common, headline_tables, markdown, peers, plot_results, result_tables, running, timing
from scripts.bench.identity import earlier
from scripts.bench.models import __main__ as models
from scripts.bench.models import apart, layers, megablocks, programs, shapes, tables
from scripts.bench.models.__main__ import SMALL
from scripts.bench.paper.layers import Case
from scripts.bench.peers import modules
from scripts.bench.timing import KernelTime, Machine, relative_difference

CPU = Machine("cpu", 1, ())
CLAIM = tables.SENTENCES["models_claim"]


pytestmark = pytest.mark.costly_fixture


@pytest.fixture
def measured(short_form: Callable[[str], Path]) -> Path:
    """The files of all short forms, in a folder of results."""
    return short_form("models.__main__") / "models"


def record_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = common.read_json(folder / f"{name}.json")
    return found


def test_the_pages_are_made_of_the_files(measured: Path) -> None:
    page = (plot_results.DOCS / "results.md").read_text()
    (measured.parent / "headline.json").write_text(json.dumps({"rows": []}))
    filled = result_tables.fill(page, measured.parent)
    assert "Not measured yet: `python -m scripts.bench.models" not in filled
    assert "Liger (ModuleNotFoundError" in filled and "SonicMoE (ModuleNotFoundError" in filled
    assert "beside transformers' Qwen3-MoE block with `grouped_mm` faster on" in filled
    plot_results.PICTURES["models_figure_10.png"].save(record_of(measured, "figure_10"), measured / "drawn.png")
    with Image.open(measured / "drawn.png") as drawn:
        assert drawn.width <= 800, "read at 690 pixels"


# ------------------------------------------------------------------------------------------------------------- models


def test_the_models() -> None:
    assert {*headline_tables.HEADLINE} <= shapes.BY_NAME.keys()
    tokens = {name: sizes.T for name, sizes in shapes.BY_NAME.items()}
    assert tokens == dict.fromkeys(tokens, 16384) | {"Kimi K2": 8192}


def test_transformers_block_computes_our_layer() -> None:
    inputs = peers.make_inputs(SMALL, device="cpu")
    ours, theirs = (programs.BUILDS[name](SMALL, inputs) for name in ("blazeproto", "grouped_mm"))
    for program in (ours, theirs):
        program.forward_backward()
    found = modules.agreement(ours, theirs)
    assert max(found[name] for name in ("router", "up", "down", "router_by_loss")) < 0.1
    assert modules.agreement(ours, theirs, weights=False)["median_out"] < 0.02
    assert all(leaf.grad is None for leaf in (ours.x, *ours.module.parameters())), "a step leaves no gradients"
    assert ours.module.down_proj.data_ptr() == theirs.module.experts.down_proj.data_ptr()  # type: ignore[union-attr]


def test_a_program_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(shape: Sizes, inputs: peers.LayerInputs) -> modules.ModuleProgram:
        made = modules.ours(shape, inputs)
        made.module.router.weight.data *= 2  # type: ignore[union-attr]
        return made

    monkeypatch.setitem(programs.BUILDS, "sonic", wrong)
    row = layers.models(Case(SMALL, label="small"), replace(CPU, peers=("sonic", "grouped_mm")))
    assert row["programs"].keys() == {"blazeproto", "grouped_mm"} == row["difference"].keys() | {"blazeproto"}
    assert "compute different layers" in row["absent"]["sonic"]


def test_with_one_expert_a_token_the_router_s_gradient_is_not_compared() -> None:
    """A score is 1 there, and its gradient 0 but for rounding."""
    machine = replace(CPU, peers=("grouped_mm",))
    of_k = {
        k: layers.models(Case(SMALL._replace(K=k), label="small"), machine)["difference"]["grouped_mm"] for k in (1, 2)
    }
    assert of_k[1].keys() == {"median_out", "median_x_grad"} < of_k[2].keys() >= {"router", "up", "down"}


def test_liger_is_called_as_its_module_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        @staticmethod
        def apply(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
            assert ids.dtype == torch.int32 and up.shape == (SMALL.E, 2 * SMALL.n, SMALL.d)
            gate, up_half = torch.einsum("td,tkhd->tkh", x, up[ids.long()]).chunk(2, -1)
            return torch.einsum("tkn,tkdn,tk->td", F.silu(gate) * up_half, down[ids.long()], scores)

    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stub = SimpleNamespace(LigerFusedMoEFunction=Function)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", stub)
    row = layers.liger(Case(SMALL, label="small"), CPU)
    assert row["programs"].keys() == {"blazeproto", "liger"} and row["difference"]["liger"]["out"] < 0.02
    monkeypatch.setattr(Function, "apply", staticmethod(lambda x, *_: 2 * x))
    row = layers.liger(Case(SMALL, label="small"), CPU)
    assert row["programs"].keys() == {"blazeproto"} and row["absent"]["liger"].startswith("computes something else")


def test_quack_s_products_are_laid_out_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that computes what its own reference does: gate and up rows in turn, rows by expert."""

    def experts_of(offsets: Tensor) -> Tensor:
        return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff().long())

    def gated(a: Tensor, b: Tensor, activation: str, cu_seqlens_m: Tensor, A_idx: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.einsum("rd,rdh->rh", a[A_idx.long()], b[experts_of(cu_seqlens_m)])
        return h, F.silu(h[:, ::2]) * h[:, 1::2]

    def dgated(
        a: Tensor,
        b: Tensor,
        h: Tensor,
        activation: str,
        cu_seqlens_m: Tensor,
        A_idx: Tensor,
        colvec_scale: Tensor,
        colvec_reduce: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_act = torch.einsum("rd,rdn->rn", a[A_idx.long()], b[experts_of(cu_seqlens_m)])
        leaf = h.detach().requires_grad_()
        act = F.silu(leaf[:, ::2]) * leaf[:, 1::2]
        (dh,) = torch.autograd.grad(act, leaf, d_act * colvec_scale[:, None].to(h.dtype))
        return dh, act.detach() * colvec_scale[:, None], (d_act * act).sum(1)

    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    stub = SimpleNamespace(gemm_gated=gated, gemm_dgated=dgated)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", stub)
    row = layers.quack(Case(SMALL, label="small"), CPU)
    assert row["programs"].keys() == {"our_products", "quack"}
    assert row["difference"]["quack"].keys() == {"act", "dh"}


def test_a_process_of_its_own_leaves_a_row_and_results(tmp_path: Path) -> None:
    spec = {"program": "blazeproto", "cfg": common.cfg_of(SMALL), "device": "cpu", "rounds": 1}
    command = [sys.executable, "-c", apart.CHILD, json.dumps(spec), str(tmp_path)]
    subprocess.run(command, cwd=common.REPOSITORY, env=apart.environment("blazeproto"), check=True, timeout=120)
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["fwdbwd_ms"] > 0 and row["launched"] == {} and "absent" not in row
    kept = torch.load(tmp_path / "results.pt")
    again = apart.layer("blazeproto", SMALL, "cpu")[1]
    assert all(relative_difference(kept[name], again[name]) == 0 for name in ("out", "x_grad"))


@pytest.mark.usefixtures("sonic_stub")
def test_sonicmoe_by_process_is_made_in_bf16_of_our_weights() -> None:
    made, ours = (apart.layer(name, SMALL, "cpu")[1] for name in ("sonic", "blazeproto"))
    assert torch.get_default_dtype() == torch.float32 and apart.differences(made, ours)["out"] < 0.02
    dtypes: list[torch.dtype] = []

    def build(shape: Sizes, inputs: peers.LayerInputs) -> modules.ModuleProgram:
        dtypes.append(torch.get_default_dtype())
        return modules.sonic(shape, inputs)

    program = apart.in_bf16(build, SMALL, peers.make_inputs(SMALL, device="cpu"))
    assert dtypes == [torch.bfloat16], "never in fp32"
    assert program.grad_loss.dtype == torch.float32 and float(program.grad_loss) == pytest.approx(0.01)


def test_other_libraries_are_for_those_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(apart.LIBRARIES, "/a/folder")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    for name in (*programs.BUILDS, *apart.PRODUCTS):
        path = apart.environment(name)["PYTHONPATH"].split(":")
        assert path == ["/a/folder"] * (name in ("liger", "quack")) + [str(common.REPOSITORY), "/mine"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "what is set")
    assert apart.environment("sonic")["PYTORCH_CUDA_ALLOC_CONF"] == "what is set"
    assert apart.environment("sonic")["TRITON_CACHE_AUTOTUNING"] == "1"


def test_nobody_computes_a_loss_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = peers.make_inputs(SMALL, device="cpu")
    made = {name: programs.BUILDS[name](SMALL, inputs) for name in ("blazeproto", "grouped_mm")}
    layers.without_loss([*made.values()])
    monkeypatch.setattr("transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func", None)
    ours, theirs = (program.forward() for program in made.values())
    assert not ours[1] and not theirs[1] and relative_difference(theirs[0], ours[0]) < 0.02


def test_on_a_gpu_kernels_are_timed_in_turn_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def times_of(calls: dict[str, Any], rounds: int) -> dict[str, KernelTime]:
        seen.append((*calls, rounds))
        return {name: KernelTime(1.0 + place, 3.0, (1.0, 2.0)) for place, name in enumerate(calls)}

    monkeypatch.setattr(timing, "long_bursts", times_of)
    monkeypatch.setattr(Machine, "peak_bytes", lambda _, call: call() << 20)
    made = {"ours": {"fwd": lambda: 1, "fwdbwd": lambda: 5}, "theirs": {"fwd": lambda: 1, "fwdbwd": lambda: 9}}
    found = programs.figures(made, replace(CPU, device="cuda", rounds=5))
    assert seen == [("ours", "theirs", 5)] * 2
    assert found["theirs"]["fwdbwd_ms"] == 2.0 and found["theirs"]["peak_MiB"] == 9.0
    assert found["ours"]["fwd_sum_ms"] == 3.0 and found["ours"]["fwdbwd_rounds_ms"] == [1.0, 2.0]


def test_processes_take_turns_and_their_kernels_are_the_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def in_process(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        name = spec["program"]
        ran.append(name)
        kernels = {f"identity of {name}": {"a": "description"}}
        if name == "liger":
            return {"absent": "it does not run", "launched": {}}, {}
        ms = float(len(ran))
        row = {"fwd_rounds_ms": [ms, ms + 1], "fwd_ms": ms, "peak_MiB": ms, "versions": [], "launched": kernels}
        return row, {"out": torch.ones(2, 2)}

    monkeypatch.setattr(apart, "in_process", in_process)
    gpu = replace(CPU, device="cuda")
    row = apart.measure_apart(("blazeproto", "sonic", "liger"), SMALL, gpu)
    assert ran == ["sonic", "liger", "blazeproto", "sonic", "blazeproto"]
    assert row["absent"] == {"liger": "it does not run"} and row["programs"]["sonic"]["fwd_ms"] == 3.0
    assert row["programs"]["blazeproto"] == {"fwd_rounds_ms": [3.0, 4.0, 5.0, 6.0], "fwd_ms": 4.5, "peak_MiB": 5.0}
    ran.clear()
    assert apart.measure_apart(("blazeproto", "liger"), SMALL, gpu, alone=False)["programs"] == {} and ran == ["liger"]


def test_layers_that_do_not_fit_have_their_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    kimi = shapes.BY_NAME["Kimi K2"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 139 << 30))
    assert layers.fits(kimi, 3) and not layers.fits(kimi, 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 79 << 30))
    monkeypatch.setattr(apart, "measure_apart", lambda names, *_: names)
    gpu = Machine("cuda", 5, ("sonic", "grouped_mm"))
    assert layers.models(Case(kimi), gpu) == ["blazeproto", "sonic", "grouped_mm"]  # type: ignore[comparison-overlap]


# ----------------------------------------------------------------------------------------------------- README, tables


def model_row(name: str) -> dict[str, Any]:
    """Ours at 0.8 of the floor's speed, transformers' 2.5 times as long; SonicMoE's 12 / 11."""
    sizes = shapes.BY_NAME[name]
    ours = (sum(cost.layer_floor_ms(sizes)) + sum(cost.router_floor_ms(sizes))) / 0.8

    def program(ms: float, peak: float) -> dict[str, float]:
        return {"fwd_ms": ms / 3, "fwdbwd_ms": ms, "peak_MiB": peak}

    made = {"blazeproto": program(ours, 80.0), "sonic": program(12.0 / 11 * ours, 100.0)}
    made["grouped_mm"] = program(2.5 * ours, 400.0)
    of = {"gpu": "NVIDIA H200, driver 580.159.04", "measured": "a day", "versions": "torch 2.11.0", "kernels": []}
    return {"label": name, "cfg": common.cfg_of(sizes), "programs": made, "of": of, "peers": []}


def test_readme_has_models_by_name(tmp_path: Path) -> None:
    readme = (common.REPOSITORY / "README.md").read_text()
    rows = [model_row(name) | {"runs": [model_row(name)] * 3} for name in headline_tables.HEADLINE]
    record = {"benchmark": "headline", "rows": rows}
    (tmp_path / "headline.json").write_text(json.dumps(record))
    filled = result_tables.fill(readme, tmp_path)
    ours = next(row for row in rows if row["label"] == "DeepSeek-V3")["programs"]["blazeproto"]["fwdbwd_ms"]
    assert f"| DeepSeek-V3 | {ours:.2f} | 1.09 | 2.50 | – | 0.80 | 0.80 |" in filled
    assert filled.count("2.50 | – | 0.80") == len(headline_tables.HEADLINE) and len(filled.encode()) <= 8192
    assert filled.count("| --- |") == 1
    plot_results.PICTURES["speed.png"].save(record, tmp_path / "speed.png")
    caption = plot_results.caption_in(tmp_path / "speed.png")
    assert caption and caption.startswith("NVIDIA H200")
    assert tables.share_of_floor(rows[0], "sonic") == pytest.approx(0.8 * 11 / 12)
    assert "forward + backward of 16384 tokens, Kimi K2: 8192; medians of 3 runs." in filled


def test_a_peer_s_table_has_the_versions_of_its_process() -> None:
    row = model_row("OLMoE")
    row["programs"] = {name: {"up_ms": 1.0, "dh_ms": 2.0} for name in ("our_products", "quack")}
    row |= {
        "versions": {
            "our_products": ["quack-kernels 0.3.11"],
            "quack": ["torch 2.11.0", "quack-kernels 0.4.1", "peft 1"],
        }
    }
    absent = model_row("DBRX") | {"absent": {"quack": "it does not run"}, "programs": {"our_products": {}}}
    made = tables.TABLES["models_quack"]({"rows": [row, absent]})
    assert "torch 2.11.0, QuACK 0.4.1; " in made and "0.3.11" not in made and "peft" not in made
    assert (
        "| OLMoE |" in made and "| DBRX |" not in made and "QuACK in 1 of the 2 rows measured (it does not run)" in made
    )
    absent["absent"] = {"liger": "it does not run"}
    said = tables.TABLES["models_liger"]({"rows": [absent]})
    assert said == "Not measured. Absent: Liger (it does not run)."


def test_few_tokens_have_a_floor_of_the_weights_that_they_read() -> None:
    row = model_row("Mixtral 8x7B") | {"chosen_experts": 7.5}
    weights = 2 * (7.5 * 3 * 4096 * 14336 + 8 * 4096)
    assert tables.weights_us(row) == pytest.approx(weights / 4.24e6, rel=0.01)
    assert tables.weights_us(row | {"of": {"gpu": "none"}}) is None
    sizes = Sizes(**row["cfg"])
    assert tables.module_ms("fwd", sizes, "H200") == cost.layer_floor_ms(sizes)[0] + cost.router_floor_ms(sizes)[0]


def test_a_claim_counts_the_models_of_one_run() -> None:
    rows = [model_row(name) for name in ("OLMoE", "DBRX", "GLM-4.5")]
    for row, ms in zip(rows, (5.5, 10.1, 12.0), strict=True):
        row["programs"]["sonic"]["fwdbwd_ms"] = ms
        row["programs"]["blazeproto"]["fwdbwd_ms"] = 10.0
    del rows[1]["programs"]["grouped_mm"]
    none: dict[str, Any] = {"rows": []}
    said = CLAIM({"rows": rows}, none)
    assert "beside SonicMoE's module faster on 1, even within 2 % on 1, slower on 1 of 3, 0.87 times as fast in" in said
    assert "block with `grouped_mm` faster on 2," in said and CLAIM(none, none) == "Not measured."
    headline = {"rows": [{"label": "OLMoE", "runs": [{}] * 3}, {"label": "DBRX", "runs": [{}]}]}
    assert [row["label"] for row in tables.outside({"rows": rows}, headline)] == ["DBRX", "GLM-4.5"]
    without = CLAIM({"rows": rows}, headline)
    assert "beside SonicMoE's module faster on 1, even within 2 % on 1, slower on 0 of 2, " in without


# --------------------------------------------------------------------------------------------------------- MegaBlocks


def test_figure_10_has_errors_and_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megablocks, "time_of", lambda call, calls, machine: 2.0 if calls == 2 else next(times))
    times = iter([1.0, 2.0, 10.0, 1.2, 2.0, 30.0])
    gpu_like = replace(CPU, rounds=2)
    case = Case(SMALL._replace(E=2, K=1, halves=1), "gelu")
    row = case.key | megablocks.figure_10(case, gpu_like)
    assert row["programs"]["blazeproto"]["fwd_ms"] == pytest.approx(1.1)
    assert row["programs"]["sequential"] == {"fwd_ms": 20.0, "deviation_ms": 14.14214, "rounds_ms": [10.0, 30.0]}
    entries = tables.TABLES["models_figure_10"].entries
    cells = [cell(row | {"of": {}}) for _, cell in markdown.columns(entries)]  # type: ignore[arg-type]
    assert cells == ["2", "1.100 ± 0.141", "2.000 ± 0.000", "20.000 ± 14.142", "10.00", "1.15", "18.18"]
    assert [case.shape.E for case in models.ITEMS["figure_10"].cases] == [2, 4, 8, 16, 32, 64, 128]
    assert models.ITEMS["figure_10"].rounds == 5


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    def fits(sequences: int) -> float:
        if sequences > 16:
            raise torch.OutOfMemoryError("no memory")
        return sequences / 2

    assert megablocks.most_sequences(fits, 4, 1024) == (16, {"4": 2.0, "8": 4.0, "16": 8.0})
    assert megablocks.most_sequences(fits, 1, 4)[0] == 4
    assert megablocks.most_sequences(lambda sequences: fits(32), 1, 4) == (0, {})


def test_widths_have_as_many_operations_and_weights() -> None:
    cases = models.ITEMS["ratios"].cases
    assert [case.label for case in cases] == ["0.125", "0.25", "0.5", "1", "2", "4"]
    assert len({cost.layer_operations(case.shape) for case in cases}) == 1
    assert len({case.shape.E * case.shape.n for case in cases}) == 1


def test_the_exponent_of_loads_and_ids_of_an_exponent() -> None:
    assert layers.exponent_of([8 * rank**-0.7 for rank in range(1, 9)] + [0.0]) == pytest.approx(0.7, abs=1e-3)
    assert layers.exponent_of([5.0, 0.0]) == 0.0
    shape = SMALL._replace(T=20000, E=16)
    ids = layers.zipf(shape._replace(K=1), 0.7, "cpu")
    assert layers.exponent_of(torch.bincount(ids.flatten()).tolist()) == pytest.approx(0.7, abs=0.05)
    assert layers.zipf(shape, 1.2, "cpu").sort(dim=1).values.diff(dim=1).gt(0).all()


def test_one_expert_has_every_token() -> None:
    for shape in (SMALL, SMALL._replace(K=1), SMALL._replace(K=4)):
        ids = layers.everybody_s(shape, "cpu")
        assert (ids[:, 0] == 0).all() and ids.sort(dim=1).values.diff(dim=1).gt(0).all() and ids.max() < shape.E


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_item_runs_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases, with the kernels; peers may be absent. Left out: items whose programs have a process each, slow to start."""
    wanted = {name: item for name, item in models.ITEMS.items() if name not in ("liger", "quack")}
    small = {name: replace(item, cases=item.short) for name, item in wanted.items()}
    monkeypatch.setitem(megablocks.LEAST, "cuda", 1)
    monkeypatch.setitem(megablocks.MOST, "cuda", 2)
    monkeypatch.setitem(layers.STEPS, "cuda", 4)
    words = ["all", "--peers", "grouped_mm,torch_grouped", "--rounds", "2", "--out", str(tmp_path)]
    running.run(replace(models.BENCH, items=small), words)
    for name in small:
        record = record_of(tmp_path / "models", name)
        assert "failed" not in record and len(record["rows"]) == len(small[name].short)
        ours = [row for row in record["rows"] if row.get("system") not in ("dropping", "sequential")]
        assert all(row["of"]["kernels"] or row.get("absent") for row in ours)
        assert not any(map(earlier, record["rows"]))
