"""`scripts.bench.clock`: the kinds of a step's kernels, and the bounds."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench import clock


@pytest.mark.parametrize(("formulation", "products"), [("moe", 2), ("dense", 4)])
def test_kernels_by_kind(formulation: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond each: a product of attention; in the layer a kernel and a cast; in its backward a gradient and clipping."""
    log: list[str] = []
    for block in (program := clock.Program(replace(clock.SMALL, formulation=formulation), "cpu")).model.blocks:
        block.attention.register_forward_hook(lambda *_: log.append("linear"))
        (block.moe.router or block.moe.up).register_forward_hook(
            lambda *_: log.extend(["topk", "void a_copy_kernel<8>"])
        )
        block.moe.down_proj.register_hook(lambda _: log.extend(["weight_gradient", "void multi_tensor_apply_kernel"]))
    monkeypatch.setattr("torch.cuda._sleep", lambda _: log.append(clock.MARKER))
    monkeypatch.setattr(
        clock, "device_spans", lambda call: call() and [(name, 1e3 * at, 1e3 * at + 1e3) for at, name in enumerate(log)]
    )
    assert [*clock.kernels_ms(program).values()] == [products, 4 - products, 2, 2, 2]


def test_an_overlap_counts_once_and_casts_of_attention_are_rest() -> None:
    spans = [
        ("a_copy_kernel", 13e3, 15e3),  # after the layer, though it is listed first
        (clock.MARKER, 0, 0),
        ("topk", 1e3, 9e3),
        ("linear", 2e3, 3e3),
        ("combine_linear", 5e3, 11e3),
        (clock.MARKER, 12e3, 12e3),
    ]
    assert [*clock.by_kind(spans, dense=False).values()] == [0, 5, 0, 0, 1]


@pytest.mark.parametrize(
    ("formulation", "device", "compiled"), [("dense", "cuda", 2), ("moe", "cuda", 0), ("dense", "cpu", 0)]
)
def test_the_dense_models_mlp_is_compiled_on_a_gpu(
    formulation: str, device: str, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config = list[Any](), replace(clock.SMALL, formulation=formulation)
    for name, stand_in in (("torch.randint", None), (f"{clock.__name__}.GPT", clock.GPT(config))):
        monkeypatch.setattr(name, lambda *_, its=stand_in: its)
    monkeypatch.setattr("torch.compile", made.append)
    program = clock.Program(config, device)
    assert len(made) == compiled and program.optimizer.param_groups[0]["capturable"] == (device == "cuda")


def test_ratios_are_of_the_moe_over_the_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {"moe": 5.0, "dense": 1.0}
    monkeypatch.setattr(clock, "kernels_ms", lambda program: {"rest": rest[program.config.formulation]})
    machine: Any = SimpleNamespace(
        device="cpu",
        on_gpu=True,
        eager=lambda _: {"moe": 3.0, "dense": 2.0},
        peak_bytes=lambda _: 1 << 20,
        times=lambda *_: SimpleNamespace(
            ms={"moe": 6.0, "dense": 2.0}, method=dict.fromkeys(rest, "graph"), refused={}
        ),
    )
    row = clock.measure(clock.SHORT[0], machine)
    assert row.items() >= {"eager": 1.5, "graph": 3.0, "more_ms": {"rest": 4.0}}.items() and (
        row["balance"] >= 1
        and row["tokens_per_s"]["dense"] == 256_000
        and row["peak_MiB"]["moe"] == 1 + 12 * row["parameters"]["moe"] // 2**20
    )


def test_the_better_ratio_is_bounded() -> None:
    rows = [
        {"cfg": {"d": 1024, "E": E, "K": K}, "eager": 1.16, "graph": graph}
        for E, K, graph in ((8, 1, None), (16, 2, 1.15), (16, 4, 2.0), (64, 1, 1.2))
    ]
    assert {said[-12:]: holds for said, holds in clock.bounds({"rows": rows})} == {
        "1.160, eager": False,
        "1.150, graph": True,
    } and [shape.E <= 16 and shape.K <= 2 for shape in clock.FULL] == 8 * [True] + 7 * [False]


def test_a_step_clips_the_gradients_of_both_losses_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    program, (a, b) = clock.Program(clock.SMALL, "cpu"), (torch.nn.Parameter(torch.ones(())) for _ in "ab")
    program.model, program.optimizer = SimpleNamespace(parameters=lambda: [a, b]), torch.optim.SGD([a, b], lr=1.0)
    clipped: list[Any] = []
    monkeypatch.setattr(clock, "clip_grad_norm_", lambda given, most: clipped.append([most, *(w.grad for w in given)]))
    monkeypatch.setattr(clock, "forward", lambda *_, **__: SimpleNamespace(loss=2 * a, aux_loss=3 * b))
    assert [float(program()), float(program())] == [2.0, -2.0] and clipped == [[1.0, 2.0, 3.0]] * 2
