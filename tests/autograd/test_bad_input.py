"""Bad input raises, naming the argument, what was expected and what came, and launches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blazeproto import MoE
from blazeproto.autograd import checks, chunks, moe_mlp


@pytest.fixture
def call(make_case, monkeypatch):
    """``call(argument=value)``: moe_mlp on good input with some of it replaced; running anything fails the test."""
    case = make_case(37, 16, 24, 5, 3, dtype=torch.float32)

    def refuse(*args, **kwargs):
        raise AssertionError("something was launched")

    monkeypatch.setattr(chunks, "dispatch_backend", refuse)

    def call(**replaced):
        arguments = {
            "x": case.x,
            "gate_up_proj": case.gate_up_proj,
            "down_proj": case.down_proj,
            "scores": case.scores,
            "topk_experts": case.topk_experts,
            **case.options,
        }
        return moe_mlp(**{**arguments, **replaced})

    return call


INDICES = torch.zeros(37, 3, dtype=torch.int32)
BAD = {
    "x is no tensor": ({"x": [1.0]}, TypeError, r"x: expected a torch.Tensor, got list"),
    "x of integers": ({"x": torch.ones(37, 16, dtype=torch.int32)}, TypeError, r"x: expected dtype .*got torch.int32"),
    "x with a batch dimension": (
        {"x": torch.ones(1, 37, 16)},
        ValueError,
        r"x: expected shape \(T, d\), got \(1, 37, 16\)",
    ),
    "x of another dtype": (
        {"x": torch.ones(37, 16, dtype=torch.float64)},
        ValueError,
        r"x: expected dtype torch.bfloat16 or .* or torch.float32 with gate_up_proj in torch.float32 .*, got torch.float64",
    ),
    "weights of another dtype": (
        {"gate_up_proj": torch.ones(5, 48, 16, dtype=torch.bfloat16)},
        ValueError,
        r"x: expected dtype torch.bfloat16 with gate_up_proj in torch.bfloat16 \(outside autocast\), got torch.float32",
    ),
    "a hidden width of 0": (
        {"gate_up_proj": torch.ones(5, 0, 16), "down_proj": torch.ones(5, 16, 0)},
        ValueError,
        r"down_proj: expected d and n of at least 1, got \(5, 16, 0\)",
    ),
    "x of another width": (
        {"x": torch.ones(37, 8)},
        ValueError,
        r"down_proj: expected shape \(E, d, n\) = \(5, 8, n\), got \(5, 16, 24\)",
    ),
    "up weight without a gate": (
        {"gate_up_proj": torch.ones(5, 24, 16)},
        ValueError,
        r"gate_up_proj: expected shape .* = \(5, 48, 16\), got \(5, 24, 16\)",
    ),
    "up weight for an ungated activation": (
        {"activation": "relu"},
        ValueError,
        r"gate_up_proj: expected shape .* = \(5, 24, 16\), got \(5, 48, 16\)",
    ),
    "down weight on another device": (
        {"down_proj": torch.ones(5, 16, 24, device="meta")},
        ValueError,
        r"down_proj: expected on cpu as x is, got meta",
    ),
    "up weight on another device": (
        {"gate_up_proj": torch.ones(5, 48, 16, device="meta")},
        ValueError,
        r"gate_up_proj: expected on cpu as x is, got meta",
    ),
    "another number of experts": (
        {"num_experts": 4},
        ValueError,
        r"num_experts: expected 5 as the weights have, got 4",
    ),
    "up bias of another shape": ({"up_bias": torch.ones(5, 24)}, ValueError, r"up_bias: expected shape .* = \(5, 48\)"),
    "down bias of another shape": ({"down_bias": torch.ones(5, 24)}, ValueError, r"down_bias: .* = \(5, 16\), got"),
    "scores of another shape": ({"scores": torch.ones(37, 2)}, ValueError, r"scores: .* = \(37, 3\), got \(37, 2\)"),
    "scores of integers": ({"scores": INDICES}, TypeError, r"scores: expected dtype"),
    "ids of floats": ({"topk_experts": torch.ones(37, 3)}, TypeError, r"topk_experts: expected dtype torch.int32 or"),
    "ids for other tokens": (
        {"topk_experts": INDICES[:30], "scores": torch.ones(30, 3)},
        ValueError,
        r"topk_experts: expected shape \(T, K\) = \(37, K\), got \(30, 3\)",
    ),
    "no expert per token": (
        {"topk_experts": INDICES[:, :0], "scores": torch.ones(37, 0)},
        ValueError,
        r"topk_experts: expected \(T, K\) with K >= 1, got \(37, 0\)",
    ),
    "a negative capacity": ({"row_capacity": -1}, ValueError, r"row_capacity: expected at least 0, got -1"),
    "a capacity of floats": ({"row_capacity": 20.0}, TypeError, r"row_capacity: expected an int, got float"),
    "no ids": ({"topk_experts": None}, ValueError, r"topk_experts: expected .*, got neither"),
    "half of the varying arguments": (
        {"pair_tokens": INDICES[:, 0]},
        ValueError,
        r"pair_tokens: expected together with token_offsets",
    ),
    "activation": ({"activation": "tanh"}, ValueError, r"activation: expected one of 'swiglu', .*, got 'tanh'"),
    "save": ({"save": "nothing"}, ValueError, r"save: expected one of 'minimal', .*, got 'nothing'"),
    "backend": ({"backend": "cuda"}, ValueError, r"backend: expected one of 'auto', .*, got 'cuda'"),
    "combine": (
        {"combine": "atomics"},
        ValueError,
        r"combine: expected one of 'gather', 'fused', 'fused_both', got 'atomics'",
    ),
    "experts as a float": ({"num_experts": 5.0}, TypeError, r"num_experts: expected an int, got float"),
    "a workspace of half a byte": (
        {"workspace_bytes": 1000.5},
        TypeError,
        r"workspace_bytes: expected an int, got float",
    ),
    "a workspace in words": ({"workspace_bytes": "9"}, TypeError, r"workspace_bytes: expected an int, got str"),
    "a workspace too small": (
        {"workspace_bytes": 100},
        ValueError,
        r"workspace_bytes: expected at least \d+, .* got 100",
    ),
    "a negative workspace": ({"workspace_bytes": -1}, ValueError, r"workspace_bytes: expected at least 1, got -1"),
    "hopper on a CPU": (
        {"backend": "hopper"},
        ValueError,
        r'backend: .* got "hopper", which needs a CUDA GPU of compute capability 9.0; the tensors are on cpu',
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(call, what):
    replaced, error, message = BAD[what]
    with pytest.raises(error, match=message):
        call(**replaced)


def test_what_passed_before_hides_nothing(call):
    good = pytest.raises(AssertionError, match="something was launched")
    for replaced, error, message in BAD.values():
        for _ in range(2):
            with good:
                call()
            with pytest.raises(error, match=message):
                call(**replaced)
    with pytest.raises(ValueError, match=r"activation: expected one of"):
        call(activation=["swiglu"])  # which has no hash
    with torch.autocast("cpu"), good:
        call(x=torch.ones(37, 16, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"x: expected dtype torch.bfloat16 or"):
        call(x=torch.ones(37, 16, dtype=torch.float64))


def test_a_dispatch_for_other_pairs(make_case):
    from blazeproto.dispatch import Dispatch

    def dispatch_of(num_pairs, num_experts):
        pairs = torch.zeros(num_pairs, dtype=torch.int32)
        offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
        return Dispatch(pairs, offsets, pairs, pairs, num_experts=num_experts, top_k=3, num_tokens=num_pairs // 3)

    case = make_case(37, 16, 24, 5, 3)
    arguments = (case.x, case.gate_up_proj, case.down_proj, case.scores)
    with pytest.raises(ValueError, match=r"scores: expected 30 of them, one a pair of dispatch, got \(37, 3\)"):
        moe_mlp(*arguments, dispatch=dispatch_of(30, 5), num_experts=5)
    with pytest.raises(ValueError, match=r"dispatch: expected one for num_experts=5, got offsets of shape \(5,\)"):
        moe_mlp(*arguments, dispatch=dispatch_of(111, 4), num_experts=5)
    with pytest.raises(ValueError, match=r"dispatch: expected without topk_experts"):
        moe_mlp(*arguments, case.topk_experts, dispatch=dispatch_of(111, 5), num_experts=5)
    short, given = torch.zeros(100, dtype=torch.int32), dispatch_of(111, 5)
    with pytest.raises(ValueError, match=r"dispatch.expert_pair_indices: expected 111 of them, .*, got 100"):
        moe_mlp(*arguments, dispatch=replace(given, expert_pair_indices=short), num_experts=5)
    longer = replace(given, expert_pair_indices=torch.zeros(112, dtype=torch.int32), overflow=short[:1])
    with pytest.raises(ValueError, match=r"dispatch.expert_pair_indices: expected 111 of them, .*, got 112"):
        moe_mlp(*arguments, dispatch=longer, num_experts=5)
    varying = {"top_k": None, "token_offsets": torch.zeros(38, dtype=torch.int32), "pair_tokens": short}
    with pytest.raises(ValueError, match=r"dispatch.pair_tokens: expected 111 of them, one a pair, got 100"):
        moe_mlp(*arguments, dispatch=replace(given, **varying), num_experts=5)
    with pytest.raises(ValueError, match=r"workspace_bytes: expected None with dispatch="):
        moe_mlp(*arguments, dispatch=dispatch_of(111, 5), num_experts=5, workspace_bytes=100_000)
    with pytest.raises(ValueError, match=r"row_capacity: expected None with dispatch=, which has its rows, got 7"):
        moe_mlp(*arguments, dispatch=dispatch_of(111, 5), num_experts=5, row_capacity=7)
    wide = replace(dispatch_of(111, 5), token_index_map=torch.zeros(111, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"dispatch.token_index_map: expected dtype torch.int32, got torch.int64"):
        moe_mlp(*arguments, dispatch=wide, num_experts=5)
    with pytest.raises(ValueError, match=r"dispatch: expected 37 tokens of top_k=2, got 111 pairs"):
        moe_mlp(*arguments, dispatch=replace(dispatch_of(111, 5), top_k=2), num_experts=5)
    with pytest.raises(TypeError, match=r"dispatch.pair_tokens: expected a torch.Tensor, got NoneType"):
        moe_mlp(*arguments, dispatch=replace(dispatch_of(111, 5), top_k=None), num_experts=5)


def test_more_than_the_hopper_backend_can_gather_from(call, monkeypatch):
    monkeypatch.setattr(checks, "GATHERED_ELEMENTS", 37 * 16)
    with pytest.raises(ValueError, match=r'x: expected fewer than 592 elements unless backend="torch", got \(37, 16\)'):
        call(backend="hopper")


def test_what_the_hopper_backend_misses():
    from blazeproto.autograd.backends import missing_for_kernels

    gpu = torch.device("cuda", 0)
    assert "the tensors are on cpu" in missing_for_kernels(torch.device("cpu"), torch.bfloat16, 8, 64, 64)
    assert "torch.bfloat16 tensors; they are torch.float32" in missing_for_kernels(gpu, torch.float32, 8, 64, 64)
    assert "multiples of 8 (16 bytes of bf16); one is 20" in missing_for_kernels(gpu, torch.bfloat16, 8, 64, 20)
    assert "at most 512 experts; there are 513" in missing_for_kernels(gpu, torch.bfloat16, 513, 64, 64)


WRONG_IDS = {
    "that count from 1": ([[1, 2, 3], [3, 4, 5]], r"expected ids from 0 to 4, or -1, got \[3, 4, 5\] at \[1\]"),
    "below -1": ([[0, 1, -2], [0, 1, 2]], r"expected ids from 0 to 4, or -1, got \[0, 1, -2\] at \[0\]"),
    "of 64 bits": ([[0, 1, 2], [0, 1, 2**32]], r"expected ids from 0 to 4, or -1, got \[0, 1, 4294967296\] at \[1\]"),
    "twice": ([[0, 1, 2], [3, 0, 3]], r"expected distinct ids in a token's row, got \[3, 0, 3\] at \[1\]"),
}


@pytest.mark.parametrize("what", WRONG_IDS)
def test_ids_are_looked_at_where_that_is_asked_for(make_case, what):
    rows, message = WRONG_IDS[what]
    case = make_case(2, 16, 24, 5, 3, dtype=torch.float32)
    case.topk_experts = torch.tensor(rows)
    if what != "twice":  # whose dispatch is unspecified
        case.forward()
    with pytest.raises(ValueError, match=f"topk_experts: {message}"):
        case.forward(validate=True)


def test_sound_ids_pass_and_padding_too(make_case):
    case = make_case(37, 16, 24, 5, 3, dtype=torch.float32)
    case.topk_experts[3] = -1
    assert torch.equal(case.forward(validate=True), case.forward())
    layer = MoE(16, 24, 5, 3, validate=True)
    mask = torch.arange(4) < 3
    assert torch.equal(layer(torch.ones(4, 16), mask=mask)[0][3], torch.zeros(16))
    rounded = MoE(16, 24, 5, 3, router="expert_choice", validate=True)
    assert rounded(torch.ones(9, 16))[0].shape == (9, 16)


def test_ids_cannot_be_looked_at_in_a_compiled_graph(make_case):
    case = make_case(2, 16, 24, 5, 3, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="validate: expected False where a graph is captured or compiled"):
        torch.compile(case.forward, backend="eager", fullgraph=True)(validate=True)


@pytest.mark.gpu
def test_ids_cannot_be_looked_at_during_a_capture():
    layer, x = MoE(64, 64, 8, 2, validate=True, device="cuda", dtype=torch.bfloat16), torch.randn(9, 64, device="cuda")
    layer(x.bfloat16())
    with pytest.raises(RuntimeError, match="validate: expected False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x.bfloat16())
