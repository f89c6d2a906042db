"""Backward runs what the trained tensors need, and no more."""

from __future__ import annotations

import pytest
import torch

from blazeproto.autograd import SavePolicy, steps, torch_backend

POLICIES = [policy.value for policy in SavePolicy]
REDUCED, UP_ROWS = "low_rank_rows d_out b", "low_rank_rows dh b"
DH, DOWN = ("down_backward_act dh", REDUCED), "down_backward_act a_scaled"
STEPS = {  # the one tensor that is trained -> what backward runs for it where H was saved
    "x": {*DH, UP_ROWS, "up_backward_act", "cast up_proj"},
    "scores": {"down_backward_act d_scores bias", REDUCED},
    "gate_up_proj": {*DH, "weight_gradient"},
    "up_bias": {*DH, "expert_row_sum"},
    "up_a": {*DH, UP_ROWS, "weight_gradient"},
    "up_b": {*DH, "weight_gradient"},
    "down_proj": {DOWN, REDUCED, "weight_gradient"},
    "down_bias": {"expert_row_sum"},
    "down_a": {DOWN, REDUCED, "weight_gradient"},
    "down_b": {"weight_gradient"},
}
AGAIN = {"up_forward", "low_rank_rows x a", "cast up_proj"}


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("trained", STEPS)
def test_backward_runs_what_the_one_trained_tensor_needs(make_case, monkeypatch, trained, save, workspace_bytes):
    case, seen = make_case(64, dtype=torch.float32, bias=True, factors="both"), set()
    for name, parameter in case.trained.items():
        parameter.requires_grad_(name == trained)

    def shown(name, args, options):
        if name == "low_rank_rows":
            kinds = {(True, False): "x a", (False, False): "act a", (True, True): "d_out b", (False, True): "dh b"}
            return f"{name} {kinds[options['gather'], options['transposed']]}"
        if name == "down_backward_act":
            step, needs, *_ = args
            made = [each for each, need in zip(("dh", "d_scores", "a_scaled"), needs, strict=True) if need]
            return " ".join((name, *made, *["bias"] * (step.bias is not None)))
        return name

    def watch(name):
        real = getattr(torch_backend, name)

        def watched(*args, **options):
            seen.add(shown(name, args, options))
            return real(*args, **options)

        monkeypatch.setattr(torch_backend, name, watched)

    out = case.forward(save=save, workspace_bytes=workspace_bytes)
    for name in (
        "up_forward",
        "low_rank_rows",
        "down_backward_act",
        "up_backward_act",
        "weight_gradient",
        "expert_row_sum",
    ):
        watch(name)
    real_cast = steps.cast

    def cast(t, dtype):
        if t is not None and t.data_ptr() == case.gate_up_proj.data_ptr():
            seen.add("cast up_proj")
        return real_cast(t, dtype)

    monkeypatch.setattr(steps, "cast", cast)
    out.backward(case.d_out)
    again = AGAIN | ({"low_rank_rows act a"} if trained == "down_b" else set())
    assert seen == STEPS[trained] | (again if save == "recompute" and trained != "down_bias" else set())
