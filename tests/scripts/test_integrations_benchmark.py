"""`scripts.bench.integrations` on a CPU: tiny models, made-up times and bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from blazeproto.integrations.transformers import experts_forward, register
from scripts.bench import integrations, timing
from scripts.bench.tables import TABLES
from scripts.bench.timing import Machine

QWEN, GPT_OSS, CPU = integrations.SMALL_QWEN, integrations.SMALL_GPT_OSS, Machine("cpu", 1)


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

    def of_last(call: Callable[[], object], theirs: float, ours: float) -> float:
        call()
        return {"grouped_mm": theirs, "blazeproto": ours}[order[-1]]

    for module in (integrations, timing):
        monkeypatch.setattr(module, "host_ms", lambda call, rounds, calls: of_last(call, 3.0, 2.0))
    monkeypatch.setattr(Machine, "peak_bytes", lambda _, call: of_last(call, 40 << 20, 30 << 20))
    return order


def test_a_training_step_is_timed_in_turn(ran: list[str]) -> None:
    row = integrations.measure_qwen(QWEN, Machine("cpu", 3))
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
    bounds = [*integrations.bounds({"parts": {"qwen": row, "gpt_oss": row}})]
    assert all(holds for _, holds in bounds) and "qwen: 1.500 x as fast" in bounds[0][0] and len(bounds) == 3
    slow = row | {"ms": {"grouped_mm": 3.0, "blazeproto": 2.3}, "peak_MiB": {"grouped_mm": 40, "blazeproto": 35}}
    assert not any(holds for _, holds in integrations.bounds({"parts": {"qwen": slow, "gpt_oss": slow}}))


@pytest.mark.parametrize(
    ("factor", "of_weight", "what"),
    [
        (0.0, 0.0, "'out': 1.0"),  # by which the loss hardly changes
        (1.05, 0.0, "'out': 0.0[45]"),
        (1.0, 0.1, "'out': 0.0"),  # the output is right, and so are the other gradients
    ],
)
def test_other_experts_of_a_model_are_refused(
    factor: float, of_weight: float, what: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def wrong(experts: Any, *inputs: Any) -> torch.Tensor:
        nothing = experts.down_proj.sum() - experts.down_proj.detach().sum()  # but its gradient
        return factor * experts_forward(experts, *inputs) + of_weight * nothing

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "blazeproto", wrong)
    with pytest.raises(RuntimeError, match=f"compute different experts: .*{what}"):
        integrations.measure_qwen(QWEN, CPU)


def test_experts_are_timed_in_turn(ran: list[str]) -> None:
    row = integrations.measure_gpt_oss(GPT_OSS, CPU)
    assert ran == ["grouped_mm", "blazeproto"] * 3 and row["ms"] == {"grouped_mm": 3.0, "blazeproto": 2.0}
    assert set(row["difference"]) == {"out", "x", "scores", "gate_up_proj", "down_proj"}


def test_no_leaf_has_a_gradient_before_a_backward(ran: list[str]) -> None:
    program = integrations.gpt_oss(GPT_OSS, "cpu")
    call = program.call("blazeproto")
    first = {name: tensor.clone() for name, tensor in call().items()}
    assert all(torch.equal(first[name], again) for name, again in call().items()), "gradients were added up"
    program.clear()
    assert all(leaf.grad is None for leaf in (program.x, program.scores, *program.experts.parameters()))


def test_the_table() -> None:
    row = {"ms": {"grouped_mm": 3.0, "blazeproto": 2.0}, "peak_MiB": {"grouped_mm": 4.0, "blazeproto": 3.0}}
    then = {"gpu": "a GPU", "measured": "then", "versions": "torch 2.11.0"}
    gpt_oss = row | {"of": then | {"kernels": []}}
    table = TABLES["integrations"]({"parts": {"qwen": row | {"of": then}, "gpt_oss": gpt_oss}})
    assert "| gpt-oss's experts, forward + backward | 2.00 | 3.00 | 1.50 | 0.75 |" in table
    assert "| training step of Qwen3-MoE, 4 layers † | 2.00 |" in table and "then. †: of earlier kernels." in table
