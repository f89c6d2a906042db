"""The bit check of a rebuild: its cases, how it calls either package, and what it counts as a difference."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS
from blazeproto.dispatch import Dispatch
from blazeproto.lab.oracle import dispatch_fixed
from scripts.checks import bit_cases, bit_products, same_bits

ROOT = Path(__file__).resolve().parents[2]
LAYERS = list(bit_cases.layer_cases())
PRODUCTS = list(bit_products.product_cases())


# --- The list ------------------------------------------------------------------------------------------------------------


def test_every_case_has_a_name_of_its_own() -> None:
    routing = [name for name, _ in bit_products.routing_cases(SimpleNamespace(), "cpu")]  # type: ignore[arg-type]
    names = [case.name for case in (*LAYERS, *PRODUCTS)] + routing
    assert len(set(names)) == len(names)


def test_the_list_has_every_activation_policy_and_routing() -> None:
    assert set(bit_cases.ACTIVATIONS) <= set(ACTIVATIONS)
    for shape in bit_cases.TAILS:
        small = [case for case in LAYERS if case.shape == shape and case.options.keys() == {"save", "combine"}]
        drawn = {(case.activation, case.bias, case.options["save"], case.routing) for case in small}
        assert len(drawn) == 5 * 2 * 3 * 3
    chunked = {case.options.get("save") for case in LAYERS if "workspace_bytes" in case.options}
    assert chunked >= set(bit_cases.POLICIES)
    assert {case.routing for case in LAYERS if case.fused} == set(bit_cases.ROUTINGS)


def test_chunked_cases_have_several_chunks_and_the_wide_one_slices() -> None:
    from blazeproto.autograd.chunks import chunk_tokens_for, num_chunks

    column_slices = importlib.import_module("blazeproto.gemm.combine").column_slices
    for case in LAYERS:
        tokens, d, n, experts, top_k = case.shape
        if bound := case.options.get("workspace_bytes"):
            length = chunk_tokens_for(bound, tokens, top_k, d, n, case.activation, 2)
            assert num_chunks(tokens, length) >= 3, case.name
        if case.shape == bit_cases.Y_IN_SLICES:
            assert len(column_slices(tokens * top_k, d, 2 * 2 * experts * n * d)) > 1


@pytest.mark.parametrize("routing", bit_cases.ROUTINGS)
def test_inputs_are_the_same_each_time_and_what_they_say(routing: str) -> None:
    case = bit_cases.Case(bit_cases.TAILS[0], "relu", True, routing)
    first, second = bit_cases.inputs_of(case), bit_cases.inputs_of(case)
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    tokens, d, n, num_experts, top_k = case.shape
    assert first["up_proj"].shape == (num_experts, n, d)
    experts = first["experts"]
    outside = (experts < 0) | (experts >= num_experts)
    assert bool(outside.any()) == (routing != "fixed")
    if routing == "varying":
        counts = first["token_offsets"].diff()
        assert counts.min() >= 0 and counts.max() <= top_k and len(counts) == tokens
        used = int(first["token_offsets"][-1])
        assert outside[used:].all() and not outside[:used].any()
        assert torch.equal(first["pair_tokens"][:used], torch.arange(tokens).repeat_interleave(counts).int())


# --- Calls ---------------------------------------------------------------------------------------------------------------


class Recorder:
    """A room of products that only binds its arguments to the real signatures; outputs stay as they are handed in."""

    OUTPUTS = ("y", "out", "dx_rows", "dw", "d_scores", "out_f32")

    def __init__(self) -> None:
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "Rows":
            raise AttributeError(name)
        signature = inspect.signature(getattr(gemm, name))

        def call(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options).arguments
            if name == "weight_workspace":
                return 4
            assert isinstance(bound["dispatch"], Dispatch)
            self.called.add(name)
            return next((bound[output] for output in self.OUTPUTS if output in bound), None)

        return call


@pytest.mark.parametrize("case", [case for case in PRODUCTS if case.shape[0] <= 3500], ids=lambda case: case.name)
def test_products_are_called_as_they_are_defined(case: bit_products.Case) -> None:
    recorder = Recorder()

    def varying(experts: Tensor, tokens: Tensor, offsets: Tensor, num_experts: int) -> Dispatch:
        lists = dispatch_fixed(experts[:, None], num_experts).arrays.values()
        return Dispatch(*list(lists)[:3], experts, num_experts, None, len(offsets) - 1, offsets, tokens)

    room = SimpleNamespace(build_dispatch=dispatch_fixed, build_dispatch_varying=varying)
    package: Any = SimpleNamespace(gemm=recorder, dispatch=room)
    made = bit_products.run_products(package, case, "cpu")
    products = set(gemm.PRODUCTS) - {"down_forward_fused"} | {"grouped_mm"}
    assert recorder.called == products - (set() if case.bias else {"bias_score_grad"})
    assert all(isinstance(tensor, Tensor) for tensor in made.values())


def test_a_package_with_rows_of_its_own_gets_them() -> None:
    dispatch = dispatch_fixed(torch.tensor([[0, 1], [1, 2]]), 3)
    room = SimpleNamespace(Rows=lambda *fields: fields)
    fields = bit_products.record(room, dispatch)
    assert fields[:4] == (dispatch.expert_pair_indices, dispatch.expert_token_offsets, dispatch.token_index_map, 2)
    assert bit_products.record(SimpleNamespace(), dispatch) is dispatch


def test_two_runs_of_one_package_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.checks.same_bits"]
    only = [
        "--only",
        "T300 d136 n72 E7 K3, geglu, bias, varying",
        "--only",
        "needs nothing",
        "--only",
        "MoE: token_rounding",
    ]
    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    for out in outs:
        run = [*command, "--package-root", ".", "--backend", "torch", "--out", str(out), *only]
        subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
    cases = json.loads(outs[0].read_text())["cases"]
    assert len(cases) == 3 + 3 + 1
    assert {"out", "d_x", "d_up_proj", "d_down_proj", "d_scores"} < cases[next(iter(cases))]["hashes"].keys()
    compared = subprocess.run(
        [*command, "--compare", *map(str, outs)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert compared.returncode == 0 and compared.stdout.endswith("7 cases; all the same\n")


def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="expected blazeproto in"):
        same_bits.package_of(tmp_path)


# --- Comparison ----------------------------------------------------------------------------------------------------------


def record(**cases: Any) -> same_bits.Record:
    return {"backend": "hopper", "gpu": "a GPU", "torch": "2", "cases": cases}


def hashes(**outputs: Tensor) -> same_bits.Record:
    return same_bits.run_case(lambda: outputs, varies=False)


def varying_runs(*runs: Tensor) -> same_bits.Record:
    left = list(runs)
    return same_bits.run_case(lambda: {"out": left.pop(0), "d_x": torch.ones(2)}, varies=True)


def test_what_differs_is_named() -> None:
    x = torch.randn(4, 3)
    flipped = x.clone()
    flipped[2, 1] = torch.nextafter(flipped[2, 1], torch.tensor(9.0))
    old = record(same=hashes(out=x), other=hashes(out=x, d_x=x), gone=hashes(out=x))
    new = record(same=hashes(out=x.clone()), other=hashes(out=x, d_x=flipped), failed={"error": "ValueError: no"})
    lines = same_bits.differences(old, new)
    assert lines == ["other: d_x", "gone: in one of the two only", "failed: in one of the two only"]
    assert same_bits.compare(old, new) == 1
    assert same_bits.compare(old, old) == 0
    assert same_bits.differences(new, new) == ["failed: failed: ValueError: no"]
    assert same_bits.compare(record(), record()) == 1  # nothing compared is nothing shown
    assert same_bits.differences(old, old | {"gpu": "another"}) == ["gpu: a GPU and another"]


def test_a_hash_tells_bytes_shapes_and_dtypes_apart() -> None:
    zero = torch.zeros(2, 3)
    others = [-zero, zero.reshape(3, 2), zero.int(), zero.bfloat16(), zero[:1]]
    assert len({same_bits.digest(tensor) for tensor in (zero, *others)}) == 6
    assert same_bits.digest(zero.T) == same_bits.digest(zero.T.contiguous())


def test_outputs_that_are_not_finite_fail() -> None:
    with pytest.raises(ValueError, match="d_x: expected finite"):
        same_bits.run_case(lambda: {"d_x": torch.tensor([1.0, float("nan")])}, varies=False)


def test_outputs_that_vary_are_compared_with_how_much_they_vary() -> None:
    base = torch.tensor([1.0, -2.0, 4.0]).bfloat16()
    up, far = base + torch.tensor([0.0, 0.0, 2**-5]), base + torch.tensor([0.0, 0.5, 0.0])
    old, near = varying_runs(base, up, base), varying_runs(up, base, up)
    assert old["run_to_run"] == pytest.approx(2**-5 / (4 + 2**-5))
    assert set(old["hashes"]) == {"d_x"}
    assert same_bits.differences(record(fused=old), record(fused=near)) == []
    (line,) = same_bits.differences(record(fused=old), record(fused=varying_runs(far, far, far)))
    assert line.startswith("fused: out: 0.124 apart, 0.00775 from run to run")
    steady = varying_runs(base, base, base)
    assert same_bits.differences(record(fused=steady), record(fused=steady)) == []
    assert same_bits.differences(record(fused=steady), record(fused=varying_runs(up, up, up)))


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        same_bits.arguments(["--package-root", "."])
    assert "--out" in capsys.readouterr().err
