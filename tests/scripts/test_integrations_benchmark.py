"""`scripts.bench.integrations` on a CPU: tiny models, made-up times and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from blazeproto.integrations.transformers import experts_forward, register
from scripts.bench import integrations
from scripts.bench.timing import KernelTime, Rotation

QWEN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations in the order in which they were timed; grouped_mm takes 3 ms and ours 2."""
    register()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    order: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            order.append(name)
            return function(*args)

        return call

    for name, function in (("grouped_mm", grouped_mm_experts_forward), ("blazeproto", experts_forward)):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, watched(name, function))

    def elapsed_ms(call: Callable[[], object], calls: int = 1) -> float:
        call()
        return {"grouped_mm": 3.0, "blazeproto": 2.0}[order[-1]]

    def times_of(calls: dict[str, Rotation], rounds: int) -> dict[str, KernelTime]:
        return {name: KernelTime(elapsed_ms(call), 9.0) for name, call in calls.items()}

    def allocated(call: Callable[[], object]) -> int:
        call()
        return {"grouped_mm": 40, "blazeproto": 30}[order[-1]] << 20

    monkeypatch.setattr(integrations, "elapsed_ms", elapsed_ms)
    monkeypatch.setattr(integrations, "times_of", times_of)
    monkeypatch.setattr(integrations, "most_allocated", allocated)
    monkeypatch.setattr(integrations, "peak_bytes", allocated)
    return order


def test_a_training_step_is_timed_in_turn(ran: list[str]) -> None:
    row = integrations.measure_qwen(sizes=QWEN, batch=(2, 16), rounds=3, device="cpu")
    layers, turns = QWEN["num_hidden_layers"], integrations.WARM_UPS + 3
    compared = ["grouped_mm"] * layers + ["grouped_mm", "blazeproto"] * layers
    assert ran == compared + (["grouped_mm"] * layers + ["blazeproto"] * layers) * turns
    assert set(row["difference"]) == {"out", "x", "scores", "gate_up_proj", "down_proj"}
    assert row["ms"] == {"grouped_mm": 3.0, "blazeproto": 2.0} and row["peak_MiB"] == {
        "grouped_mm": 40,
        "blazeproto": 30,
    }
    assert {name: len(each) for name, each in row["losses"].items()} == dict.fromkeys(integrations.IMPLEMENTATIONS, 5)
    losses = [loss for pair in zip(*row["losses"].values(), strict=True) for loss in pair]
    assert losses[-1] < losses[0], "it trains"
    claims = integrations.claims_of_qwen(row)
    assert all(claims.values()) and "qwen: 1.500 x as fast" in next(iter(claims))
    slow = row | {"ms": {"grouped_mm": 3.0, "blazeproto": 2.3}, "peak_MiB": {"grouped_mm": 40, "blazeproto": 35}}
    assert not any(integrations.claims_of_qwen(slow).values())


def zeros(experts: Any, *inputs: Any) -> torch.Tensor:
    return 0 * experts_forward(experts, *inputs)


def a_little_more(experts: Any, *inputs: Any) -> torch.Tensor:
    return 1.05 * experts_forward(experts, *inputs)


def another_gradient(experts: Any, *inputs: Any) -> torch.Tensor:
    """The output is right, and so are the other gradients."""
    out = experts_forward(experts, *inputs)
    return out + 0.1 * (experts.down_proj.sum() - experts.down_proj.detach().sum())


@pytest.mark.parametrize(
    ("wrong", "what"), [(zeros, "'out': 1.0"), (a_little_more, "'out': 0.0[45]"), (another_gradient, "'out': 0.0")]
)
def test_other_experts_of_a_model_are_refused(
    wrong: Callable[..., torch.Tensor], what: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of zeros too, by which the loss hardly changes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "blazeproto", wrong)
    with pytest.raises(RuntimeError, match=f"compute different experts: .*{what}"):
        integrations.measure_qwen(sizes=QWEN, batch=(2, 16), rounds=1, device="cpu")


def test_experts_are_timed_in_turn(ran: list[str]) -> None:
    row = integrations.measure_gpt_oss(sizes=GPT_OSS, tokens=40, rounds=1, device="cpu")
    assert ran == ["grouped_mm", "blazeproto"] * 3
    assert row["ms"] == {"grouped_mm": 3.0, "blazeproto": 2.0}
    assert set(row["difference"]) == {"out", "x", "scores", "gate_up_proj", "down_proj"}
    assert all(integrations.claims_of_gpt_oss(row).values())
    assert not any(integrations.claims_of_gpt_oss(row | {"ms": {"grouped_mm": 2.7, "blazeproto": 2.0}}).values())


def test_no_leaf_has_a_gradient_before_a_backward(ran: list[str]) -> None:
    program = integrations.gpt_oss(GPT_OSS, 40, "cpu")
    call = program.call("blazeproto")
    first = {name: tensor.clone() for name, tensor in call().items()}
    assert all(torch.equal(first[name], again) for name, again in call().items()), "gradients were added up"
    program.clear()
    assert all(leaf.grad is None for leaf in (program.x, program.scores, *program.experts.parameters()))


def test_other_experts_are_refused(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def halved(experts: Any, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return experts_forward(experts, x, ids, scores / 2)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "blazeproto", halved)
    with pytest.raises(RuntimeError, match="compute different experts"):
        integrations.measure_gpt_oss(sizes=GPT_OSS, tokens=40, rounds=1, device="cpu")


def test_parts_that_are_not_asked_for_stay(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "integrations.json"
    then = {"gpu": "a GPU", "measured": "then", "versions": "torch 2.11.0"}
    file.write_text(json.dumps({"parts": {name: {"ms": {}, "of": then} for name in ("qwen", "gpt_oss")}}))
    monkeypatch.setattr(integrations, "need_hopper", lambda: None)
    row = {"cfg": {}, "ms": {"grouped_mm": 3.0, "blazeproto": 2.0}, "peak_MiB": {"grouped_mm": 4.0, "blazeproto": 3.0}}

    def measure(rounds: int) -> dict[str, Any]:
        return row | {"rounds": rounds}

    part = integrations.Part(measure, integrations.claims_of_gpt_oss)
    monkeypatch.setitem(integrations.PARTS, "gpt_oss", part)
    monkeypatch.setattr("sys.argv", ["", "--parts", "gpt_oss", "--rounds", "2", "--out", str(file)])
    integrations.main()
    record = json.loads(file.read_text())
    assert record["parts"]["qwen"] == {"ms": {}, "of": then}
    assert record["parts"]["gpt_oss"]["rounds"] == 2 and record["parts"]["gpt_oss"]["of"]["measured"].endswith("UTC")
    assert record["sources_sha256"] and record["protocol"].startswith("qwen: a whole training step")
    assert "holds  gpt_oss: 1.500 x as fast as grouped_mm, at least 1.4" in capsys.readouterr().out
    gpt_oss = row | {"of": then | {"kernels": []}}
    table = integrations.TABLES["integrations"]({"parts": {"qwen": row | {"of": then}, "gpt_oss": gpt_oss}})
    assert "| gpt-oss's experts, forward + backward | 2.00 | 3.00 | 1.50 | 0.75 |" in table
    assert "| training step of Qwen3-MoE, 4 layers † | 2.00 |" in table and "then. †: of earlier kernels." in table
