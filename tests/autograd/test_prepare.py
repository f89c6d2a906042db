"""What `gemm.prepare` compiles is what a layer launches: all of it, and nothing that no number of tokens would launch. And how
deep a launch lies. Nothing is compiled or launched here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import blazeproto
from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import hopper_backend, moe_mlp, node, torch_backend
from blazeproto.gemm import launch, registry, weight
from blazeproto.gemm.combine import in_slices
from blazeproto.gemm.compile import Kernel
from blazeproto.layer import MoE
from blazeproto.runtime import driver

T, D, N, E, K = 40, 64, 32, 6, 3
PACKAGE = Path(blazeproto.__file__).parent
MOST_FRAMES = 7
HANDLES: list[Kernel] = []  # a kernel's handle is its place here; what one test has planned, the next one finds


class Launches:
    """Stands in for the driver."""

    CUDADriverError = RuntimeError

    def __init__(self) -> None:
        self.prepared: list[Kernel] = []
        self.loaded: list[Kernel] = []
        self.launched: set[int] = set()
        self.frames: list[list[str]] = []

    def handle(self, kernel: Kernel, device: int) -> int:
        assert kernel in self.prepared, f"{kernel!r} was not prepared"
        self.loaded.append(kernel)
        HANDLES.append(kernel)
        return len(HANDLES) - 1

    def launchKernel(self, function: int, *_: object) -> None:
        self.launched.add(id(HANDLES[function]))
        frame, mine = sys._getframe(1), []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                mine.append(frame.f_code.co_name)
            frame = frame.f_back
        self.frames.append(mine[::-1])


@pytest.fixture
def launches(monkeypatch):
    """Kernels compile to nothing, and the Hopper backend runs on the CPU, whose tensors are of device -1."""
    made = Launches()

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
    monkeypatch.setattr(node, "backend_on", lambda *_: hopper_backend)
    monkeypatch.setattr(node, "dispatch_backend", lambda *_: torch_backend)
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
        fused=combine == "fused",
        f32_weight_grads=f32,
    )
    assert not launches.launched
    run(activation, up_bias, down_bias, combine, f32, varying)
    assert launches.launched == {id(kernel) for kernel in prepared}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_layer_prepared_for_slices_of_columns(launches, monkeypatch, count):
    monkeypatch.setattr(hopper_backend, "column_slices", lambda num_rows, d, size: in_slices(d, count))
    prepared = gemm.prepare(2312, N, E, K)
    run(d=2312)
    assert launches.launched <= {id(kernel) for kernel in prepared}


def test_loads_where_it_is_told_to(launches):
    assert gemm.prepare(D, N, E, K, device=1) == launches.loaded


def test_a_launch_is_at_most_seven_frames_deep(launches):
    """Of this package, from MoE.forward to the driver's launch: the experts' forward, eager."""
    layer = MoE(D, N, E, K, dtype=torch.bfloat16, bias=True)
    gemm.prepare(D, N, E, K, up_bias=True, down_bias=True)
    layer(torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True))
    assert launches.frames
    for frames in launches.frames:
        assert frames[0] == "forward" and frames[-1] == "launch"
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
