"""`scripts.bench.integrations` on a CPU: tiny models, made-up times and bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from blazeproto.integrations.peft import explain, register
from blazeproto.integrations.transformers import experts_forward
from scripts.bench import integrations, timing
from scripts.bench.tables import SENTENCES, TABLES
from scripts.bench.timing import Machine

GPT_OSS, STEPS, CPU = integrations.SMALL_GPT_OSS, integrations.BENCH.items["steps"].short, Machine("cpu", 1)
FULL = STEPS[0]


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
    row = integrations.measure_steps(FULL, Machine("cpu", 3))
    theirs, ours = (FULL.sizes["num_hidden_layers"] * [name] for name in integrations.IMPLEMENTATIONS)
    assert ran == theirs + ["grouped_mm", "blazeproto"] * len(ours) + 2 * theirs + 2 * ours + 3 * (theirs + ours)
    assert set(row["difference"]) == {"out", "x", "scores", "gate_up_proj", "down_proj"}
    assert row["best"]["blazeproto"].items() >= {"ms": 2.0, "tokens_per_s": 16000, "peak_MiB": 30}.items()
    bounds = [
        *integrations.bounds(
            {
                "parts": {
                    "steps": [each.key | row | {"cfg": each.sizes} for each in STEPS[:3]],
                    "gpt_oss": {"ms": {"grouped_mm": 3.0, "blazeproto": 2.0}},
                }
            }
        )
    ]
    assert all(holds for _, holds in bounds) and "A3B, full: 1.500 x as fast" in bounds[0][0] and len(bounds) == 4
    row["best"]["grouped_mm"] |= {"ms": 2.5, "peak_MiB": 35}
    assert not any(holds for _, holds in integrations.bounds({"parts": {"steps": [FULL.key | row]}}))


@pytest.mark.parametrize("case", [case for case in STEPS if case.tuning == "LoRA"], ids=str)
def test_adapters_alone_are_trained(case: integrations.Case) -> None:
    register()
    step, _ = integrations.step_of(case, "cpu")
    step.use("blazeproto", "eager")
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    step()
    changed = {name for name, parameter in step.model.named_parameters() if not torch.equal(parameter, before[name])}
    b, both = ({name for name in before if part in name} for part in ("lora_B", "lora_"))
    assert len(b) == 2 * 6 and b <= changed <= both and {*explain(step.model).values()} == {"factors"}


def test_layers_are_compiled_and_a_failure_is_recorded(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with a compiler that refuses ours."""

    def called(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if forward.__self__.mlp.experts.config._experts_implementation == "blazeproto":
            raise RuntimeError("no\ngraph")
        return forward(*args, **kwargs)

    monkeypatch.setattr(
        torch, "compile", lambda forward, backend: lambda *args, **kwargs: called(forward, *args, **kwargs)
    )
    monkeypatch.setattr(Machine, "on_gpu", True)
    times = iter(range(9, 0, -1))
    monkeypatch.setattr(integrations, "elapsed_ms", lambda call, calls: (call(), next(times))[1])
    row = integrations.measure_steps(FULL, Machine("cpu", 3))  # 9, 6, 3 ms; compiled 8, 5, 2; ours 7, 4, 1
    assert list(map(list, row["programs"].values())) == [["eager", "compiled"], ["eager"]]
    assert row["refused"] == {"blazeproto compiled": "RuntimeError: no graph"} and row["best"][
        "grouped_mm"
    ].items() >= {("setting", "compiled"), ("ms", 5)}


def test_an_implementation_is_compiled_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With peft's adapters, whose forward breaks graphs."""
    register()
    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(len(graph.graph.nodes))
            return graph.forward(*args)

        return run

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: backend)
    case, found = next(case for case in STEPS if case.tuning == "LoRA"), []
    for names in (("blazeproto",), ("grouped_mm", "blazeproto")):
        torch.compiler.reset()
        step, _ = integrations.step_of(case, "cpu")
        for name in names:
            step.use(name, "compiled")
            for _ in range(integrations.WARM_UPS):
                ran.clear()
                step()
        found.append([*ran])
    assert found[0] and found[0] == found[1]


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
        integrations.measure_steps(FULL, CPU)


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


def test_the_tables() -> None:
    then = {"of": {"gpu": "a GPU", "measured": "then", "versions": "torch 2.11.0", "kernels": []}}
    row = {"ms": {"grouped_mm": 3.0, "blazeproto": 2.0}, "peak_MiB": {"grouped_mm": 4.0, "blazeproto": 3.0}} | then
    assert "forward + backward | 2.00 | 3.00 | 1.50 | 0.75 |" in TABLES["integrations"]({"parts": {"gpt_oss": row}})
    ours, theirs = ({"setting": "compiled", "tokens_per_s": each, "peak_MiB": each} for each in (1500, 1000))
    row = then | {
        "cfg": FULL.sizes,
        "programs": {"blazeproto": {"compiled": ours}, "grouped_mm": {"eager": {"tokens_per_s": 900}}},
        "best": {"blazeproto": ours, "grouped_mm": theirs},
        "refused": {"grouped_mm compiled": "no graph"},
    }
    record = {"parts": {"steps": [case.key | row for case in STEPS[:2]]}}
    line = "| Qwen3-30B-A3B | full | 2 | 32 | – | 1 500 | 900 | – | compiled | compiled | 1.50 | 1 500 | 1 000 |"
    assert line in (made := TABLES["whole_steps"](record)) and made.endswith("LoRA: grouped_mm compiled (no graph).")
    assert SENTENCES["steps_claim"](record) == "Qwen3-30B-A3B 1.50 (LoRA 1.50), on one a GPU"
