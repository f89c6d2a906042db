"""Bad input raises, naming the argument, what was expected and what came, and launches nothing."""

from dataclasses import replace

import pytest
import torch

from blazeproto import MoE
from blazeproto.autograd import checks, chunks
from blazeproto.autograd.backends import missing_for_kernels
from blazeproto.dispatch import Dispatch
from tests.refusals import refuses


@pytest.fixture
def call(make_case, monkeypatch):
    """``call(argument=value)``: moe_mlp on good input with some of it replaced; running anything fails the test."""

    def launched(*args, **kwargs):
        raise AssertionError("something was launched")

    monkeypatch.setattr(chunks, "dispatch_backend", launched)
    return make_case(37, 16, 24, 5, 3, dtype=torch.float32).forward


INDICES = torch.zeros(37, 3, dtype=torch.int32)
BAD = {  # what no wrong value of tests/test_wrong_arguments.py is
    "x with a batch dimension": ("x", {"x": torch.ones(1, 37, 16)}),
    "x of another dtype": ("x", {"x": torch.ones(37, 16, dtype=torch.float64)}),
    "weights of another dtype": ("x", {"gate_up_proj": torch.ones(5, 48, 16, dtype=torch.bfloat16)}),
    "a hidden width of 0": ("down_proj", {"gate_up_proj": torch.ones(5, 0, 16), "down_proj": torch.ones(5, 16, 0)}),
    "x of another width": ("down_proj", {"x": torch.ones(37, 8)}),
    "up weight without a gate": ("gate_up_proj", {"gate_up_proj": torch.ones(5, 24, 16)}),
    "up weight for an ungated activation": ("gate_up_proj", {"activation": "relu"}),
    "another number of experts": ("num_experts", {"num_experts": 4}),
    "scores of another shape": ("scores", {"scores": torch.ones(37, 2)}),
    "ids for other tokens": ("topk_experts", {"topk_experts": INDICES[:30], "scores": torch.ones(30, 3)}),
    "no expert per token": ("topk_experts", {"topk_experts": INDICES[:, :0], "scores": torch.ones(37, 0)}),
    "no ids": ("topk_experts", {"topk_experts": None}),
    "half of the varying arguments": ("pair_tokens", {"pair_tokens": INDICES[:, 0]}),
    "a workspace too small": ("workspace_bytes", {"workspace_bytes": 100}),
    "hopper on a CPU": ("backend", {"backend": "hopper"}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(call, what):
    """Again too: what passed between hides nothing."""
    argument, replaced = BAD[what]
    for _ in range(2):
        refuses(lambda: call(**replaced), argument)
        with pytest.raises(AssertionError, match="something was launched"):
            call()


def test_float64_is_sound_in_autocast_alone(call):
    x = torch.ones(37, 16, dtype=torch.float64)
    with torch.autocast("cpu"), pytest.raises(AssertionError, match="something was launched"):
        call(x=x)
    refuses(lambda: call(x=x), "x")


def dispatch_of(num_pairs, num_experts, **changed):
    pairs, offsets = (torch.zeros(size, dtype=torch.int32) for size in (num_pairs, num_experts + 1))
    made = Dispatch(pairs, offsets, pairs, pairs, num_experts=num_experts, top_k=3, num_tokens=num_pairs // 3)
    return replace(made, **changed)


SHORT = torch.zeros(100, dtype=torch.int32)
LONG = torch.zeros(112, dtype=torch.int32)
VARYING = {"top_k": None, "token_offsets": torch.zeros(38, dtype=torch.int32), "pair_tokens": SHORT}
FOREIGN = {
    "other pairs": ("scores", dispatch_of(30, 5), {}),
    "other experts": ("dispatch", dispatch_of(111, 4), {}),
    "ids beside it": ("dispatch", dispatch_of(111, 5), {"topk_experts": INDICES}),
    "fewer rows": ("dispatch.expert_pair_indices", dispatch_of(111, 5, expert_pair_indices=SHORT), {}),
    "more rows": (
        "dispatch.expert_pair_indices",
        dispatch_of(111, 5, expert_pair_indices=LONG, overflow=SHORT[:1]),
        {},
    ),
    "fewer tokens of pairs": ("dispatch.pair_tokens", dispatch_of(111, 5, **VARYING), {}),
    "a workspace": ("workspace_bytes", dispatch_of(111, 5), {"workspace_bytes": 100_000}),
    "a capacity": ("row_capacity", dispatch_of(111, 5), {"row_capacity": 7}),
    "another K": ("dispatch", dispatch_of(111, 5, top_k=2), {}),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_dispatch_for_other_pairs(call, what):
    argument, dispatch, options = FOREIGN[what]
    refuses(lambda: call(**{"topk_experts": None, "dispatch": dispatch, **options}), argument)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "said"),
    [
        ("cpu", torch.bfloat16, (8, 64, 64), "on cpu"),
        ("cuda:0", torch.float32, (8, 64, 64), "torch.float32"),
        ("cuda:0", torch.bfloat16, (8, 64, 20), "20"),
        ("cuda:0", torch.bfloat16, (513, 64, 64), "513"),
    ],
)
def test_what_the_hopper_backend_misses(device, dtype, sizes, said):
    assert missing_for_kernels(torch.device(device), dtype, *sizes).endswith(said)


def test_more_than_the_hopper_backend_can_gather_from(call, monkeypatch):
    monkeypatch.setattr(checks, "GATHERED_ELEMENTS", 37 * 16)
    refuses(lambda: call(backend="hopper"), "x")


WRONG_IDS = {
    "that count from 1": [[1, 2, 3], [3, 4, 5]],
    "below -1": [[0, 1, 2], [0, 1, -2]],
    "of 64 bits": [[0, 1, 2], [0, 1, 2**32]],
    "twice": [[0, 1, 2], [3, 0, 3]],
}


@pytest.mark.parametrize("what", WRONG_IDS)
def test_ids_are_looked_at_where_that_is_asked_for(make_case, what):
    case = make_case(2, 16, 24, 5, 3, dtype=torch.float32)
    case.topk_experts = torch.tensor(WRONG_IDS[what])
    if what != "twice":  # whose dispatch is unspecified
        case.forward()
    assert refuses(lambda: case.forward(validate=True), "topk_experts").got == f"{WRONG_IDS[what][1]} at [1]"


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
