"""What `gemm.prepare` compiles is what a layer launches: all of it, and nothing that no number of tokens would launch. And how
deep a launch lies. Nothing is compiled or launched here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import (
    Arrived,
    LowRank,
    chunks,
    grouped_experts,
    hopper_backend,
    moe_mlp,
    steps,
    torch_backend,
)
from blazeproto.gemm import launch, registry, weight
from blazeproto.gemm.combine import in_slices
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import CHOSEN, PLAIN, TILES
from blazeproto.layer import MoE
from blazeproto.runtime import driver
from tests.autograd.frames import MOST_FRAMES, frames_here, kernel_of, names_of

T, D, N, E, K = 40, 64, 32, 6, 3
HANDLES: list[Kernel] = []  # a kernel's handle is its place here; what one test has planned, the next one finds


class Launches:
    """Stands in for the driver."""

    CUDADriverError = RuntimeError

    def __init__(self) -> None:
        self.prepared: list[Kernel] | None = []  # None: whatever is launched
        self.loaded: list[Kernel] = []
        self.launched: set[int] = set()
        self.frames: dict[tuple[str, str], list[list[str]]] = {}  # by room and kernel

    def handle(self, kernel: Kernel, device: int) -> int:
        assert self.prepared is None or kernel in self.prepared, f"{kernel!r} was not prepared"
        self.loaded.append(kernel)
        HANDLES.append(kernel)
        return len(HANDLES) - 1

    def launchKernel(self, function: int, *_: object) -> None:
        self.launched.add(id(HANDLES[function]))
        frames = frames_here()
        self.frames.setdefault(kernel_of(frames), []).append(names_of(frames))


@pytest.fixture
def launches(monkeypatch):
    """Kernels compile to nothing, and the Hopper backend runs on the CPU, whose tensors are of device -1."""
    made = Launches()
    for product in CHOSEN:  # these few rows take one of the tiles that others may take
        monkeypatch.setitem(TILES, product, replace(PLAIN[product]))

    def compile_many(kernels, jobs=None):
        made.prepared.extend(kernels)
        return made.prepared

    monkeypatch.setattr(registry, "compile_many", compile_many)
    monkeypatch.setattr(Kernel, "handle", lambda kernel, device: made.handle(kernel, device))
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(launch, "_tensor_maps", lambda: (lambda *_: 0, lambda *_: 0))
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(weight, "num_sms", lambda device: 132)
    monkeypatch.setattr(weight, "WORKSPACE_PART", 1e6)  # so that these few rows may be cut, and partials be summed
    monkeypatch.setattr(steps, "backend_on", lambda *_, **__: hopper_backend)
    monkeypatch.setattr(chunks, "dispatch_backend", lambda *_: torch_backend)
    monkeypatch.setattr(hopper_backend, "current_stream", lambda array: 0)
    return made


def run(activation="swiglu", up_bias=False, down_bias=False, combine="gather", f32=False, varying=False, d=D):
    width = N * activation_named(activation).halves

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, dtype=dtype).requires_grad_()

    scores, experts = torch.randn(T, E).topk(K)
    options, weights = {"combine": combine, "activation": activation}, torch.float32 if f32 else torch.bfloat16
    if varying:
        scores, experts = scores.flatten(), experts.flatten()
        options["pair_tokens"] = torch.arange(T, dtype=torch.int32).repeat_interleave(K)
        options["token_offsets"] = torch.arange(T + 1, dtype=torch.int32) * K
    parameters = {
        "x": random(T, d),
        "gate_up_proj": random(E, width, d, dtype=weights),
        "down_proj": random(E, d, N, dtype=weights),
        "scores": scores.requires_grad_(),
        "up_bias": random(E, width) if up_bias else None,
        "down_bias": random(E, d) if down_bias else None,
    }
    moe_mlp(**parameters, topk_experts=experts, num_experts=E, **options).sum().backward()


CASES = [(activation, False, False, "gather", False, False) for activation in ACTIVATIONS]
CASES += [
    ("swiglu", True, True, "gather", True, False),
    ("swiglu", True, False, "gather", False, True),
    ("relu", False, True, "fused", False, True),
    ("swiglu", False, False, "fused", True, False),
    ("swiglu", True, True, "fused_both", False, False),
    ("relu", False, False, "fused_both", True, True),
]


@pytest.mark.parametrize(("activation", "up_bias", "down_bias", "combine", "f32", "varying"), CASES)
def test_a_prepared_layer_compiles_nothing(launches, activation, up_bias, down_bias, combine, f32, varying):
    prepared = gemm.prepare(
        D,
        N,
        E,
        None if varying else K,
        activation=activation,
        up_bias=up_bias,
        down_bias=down_bias,
        fused=combine != "gather",
        fused_backward=combine == "fused_both",
        f32_weight_grads=f32,
    )
    assert not launches.launched
    run(activation, up_bias, down_bias, combine, f32, varying)
    assert launches.launched == {id(kernel) for kernel in prepared}


@pytest.mark.parametrize("d", [16, 256, 272, 2312])
def test_no_slice_is_empty(d):
    for count in range(1, 20):
        slices = in_slices(d, count)
        assert all(slices) and [column for each in slices for column in each] == list(range(d))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_layer_prepared_for_slices_of_columns(launches, monkeypatch, count):
    monkeypatch.setattr(hopper_backend, "column_slices", lambda num_rows, d, size: in_slices(d, count))
    prepared = gemm.prepare(2312, N, E, K)
    run(d=2312)
    assert launches.launched <= {id(kernel) for kernel in prepared}


def test_loads_where_it_is_told_to(launches):
    assert gemm.prepare(D, N, E, K, device=1) == launches.loaded


LAYERS = {
    "plain": {},
    "biases": {"bias": True},
    "fused": {"combine": "fused"},
    "fused_both": {"combine": "fused_both"},
    "recompute": {"save": "recompute", "bias": True},
    "chunks": {"workspace_bytes": 10_000, "bias": True},
    "ungated": {"activation": "relu", "save": "paper"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_launch_is_at_most_seven_frames_deep(launches, name):
    """Frames of this package, from MoE.forward and from the node's backward to the driver; on a GPU: test_frames.py."""
    launches.prepared = None
    layer = MoE(D, N, E, K, dtype=torch.bfloat16, **LAYERS[name])
    layer(torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True))[0].sum().backward()
    kernels = {kernel for _, kernel in launches.frames}
    assert {"up.launch", "down_backward.launch", "weight.launch", "reduce_scores_grad"} <= kernels
    assert ("combine.launch" in kernels) == (layer.combine != "fused_both")
    assert ("fused.launch" in kernels) == (layer.combine != "gather")
    assert ("fused.launch_dx" in kernels) == (layer.combine == "fused_both")
    starts = set()
    for stacks in launches.frames.values():
        for frames in stacks:
            assert frames[-1] == "driver.launch" and len(frames) <= MOST_FRAMES, frames
            starts.add(frames[0])
    assert starts == {"layer.forward", "node.backward"}


class OneRank:
    """A dispatcher whose tokens stay where they are."""

    def check(self, options):
        pass

    def dispatch(self, x, scores, topk_experts, pair_tokens, token_offsets):
        return Arrived(x, scores, topk_experts, pair_tokens, token_offsets, None)

    def combine(self, partial, arrived):
        return partial


@pytest.mark.parametrize("what", ["fp8", "dispatcher"])
def test_with_fp8_or_a_dispatcher_it_is_one_more(launches, monkeypatch, what):
    launches.prepared = None
    layer = MoE(D, 128, E, K, dtype=torch.bfloat16, precision="fp8" if what == "fp8" else "bf16")
    layer.dispatcher = OneRank() if what == "dispatcher" else None
    layer(torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True))[0].sum().backward()
    stacks = [frames for stacks in launches.frames.values() for frames in stacks]
    assert {frames[0] for frames in stacks} == {"layer.forward", "node.backward"}
    assert max(map(len, stacks)) <= MOST_FRAMES + 1, max(stacks, key=len)


def test_launches_with_factors_and_of_rows_that_have_arrived_are_as_deep(launches):
    """A layer has no factors: `moe_mlp` is the first."""
    launches.prepared = None

    def trained(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)

    x, up, down = trained(T, D), trained(E, 2 * N, D), trained(E, D, N)
    factors = {"up_factors": LowRank(trained(E, 8, D), trained(E, 2 * N, 8))}
    factors["down_factors"] = LowRank(trained(E, 8, N), trained(E, D, 8))
    scores, experts = torch.randn(T, E).topk(K)
    for options in ({}, {"workspace_bytes": 20_000, "save": "recompute"}):
        moe_mlp(x, up, down, scores, experts, num_experts=E, **factors, **options).sum().backward()
    grouped_experts(x, up, down, torch.full((E,), T // E), **factors).sum().backward()
    for frames in (frames for stacks in launches.frames.values() for frames in stacks):
        assert len(frames) <= MOST_FRAMES, frames


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((60, N, E, K), "d_model: expected a positive multiple of 8, got 60"),
        ((D, 0, E, K), "d_expert: expected a positive multiple of 8, got 0"),
        ((D, N, 513, K), "num_experts: expected 1 to 512, got 513"),
        ((D, N, E, 0), "top_k: expected at least 1, or None if it varies, got 0"),
    ],
)
def test_refuses_what_the_products_do_not_take(launches, arguments, message):
    with pytest.raises(ValueError, match=message):
        gemm.prepare(*arguments)
    with pytest.raises(ValueError, match="activation: expected one of 'swiglu'"):
        gemm.prepare(D, N, E, K, activation="tanh")
