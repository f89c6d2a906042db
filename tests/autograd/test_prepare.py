"""What `gemm.prepare` compiles is what a layer launches: all of it, and nothing that no number of tokens would launch. Nothing is
compiled or launched here."""

from __future__ import annotations

import pytest
import torch

from blazeproto import driver, gemm
from blazeproto.autograd import backends, checks, hopper_products, moe_mlp
from blazeproto.gemm import compile as gemm_compile
from blazeproto.gemm import config, launch, rowops, unchecked, weights
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.nvrtc import Binary

CACHES = (
    config.kernel_for,
    config.weight_sum_kernel,
    rowops._combine_kernel,
    rowops.reduce_kernel,
    rowops._combine_plan,
    unchecked._up_plan,
    unchecked._linear_plan,
    unchecked._down_backward_plan,
    weights.weight_plan,
    weights._shares,
    backends.products_on,
)
T, D, N, E, K = 40, 64, 32, 6, 3


@pytest.fixture
def launched(monkeypatch):
    """The kernels whose handles have been asked for; kernels compile to nothing, and the Hopper backend runs on the CPU."""
    handles = []

    def compile_to_nothing(kernel):
        kernel.__dict__.setdefault("binary", Binary(b"", "", ""))
        return kernel

    def handle(self, device):
        assert "binary" in self.__dict__, f"{self!r} was not prepared"
        handles.append(self)
        return 1

    monkeypatch.setattr(gemm_compile, "compile_in_subprocess", compile_to_nothing)
    monkeypatch.setattr(Kernel, "handle", handle)
    monkeypatch.setattr(Kernel, "registers", 32)
    monkeypatch.setattr(driver, "launch", lambda *_: None)
    monkeypatch.setattr(launch, "_tensor_maps", lambda: (lambda *_: 0, lambda *_: 0))
    for module in (launch, weights):
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    monkeypatch.setattr(weights, "WORKSPACE_PART", 1e6)  # so that these few rows may be shared, and pieces be summed
    monkeypatch.setattr(backends, "missing_for_hopper", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    forget()
    yield handles
    forget()


def forget():
    checks._passed.clear()
    for cached in CACHES:
        cached.cache_clear()


def run(activation="swiglu", up_bias=False, down_bias=False, combine="gather", f32=False, varying=False, d=D):
    width = N * (1 + config.is_gated(activation))

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()

    scores, experts = torch.randn(T, E).topk(K)
    options = {"combine": combine, "activation": activation, "weight_grad_dtype": torch.float32 if f32 else None}
    if varying:
        scores, experts = scores.flatten(), experts.flatten()
        options["pair_tokens"] = torch.arange(T, dtype=torch.int32).repeat_interleave(K)
        options["token_offsets"] = torch.arange(T + 1, dtype=torch.int32) * K
    parameters = {
        "x": random(T, d),
        "gate_up_proj": random(E, width, d),
        "down_proj": random(E, d, N),
        "scores": scores.requires_grad_(),
        "up_bias": random(E, width) if up_bias else None,
        "down_bias": random(E, d) if down_bias else None,
    }
    moe_mlp(**parameters, topk_experts=experts, num_experts=E, backend="hopper", **options).sum().backward()


CASES = [(activation, False, False, "gather", False, False) for activation in config.ACTIVATIONS]
CASES += [
    ("swiglu", True, True, "gather", True, False),
    ("swiglu", True, False, "gather", False, True),
    ("relu", False, True, "fused", False, True),
    ("swiglu", False, False, "fused", True, False),
]


@pytest.mark.parametrize(("activation", "up_bias", "down_bias", "combine", "f32", "varying"), CASES)
def test_a_prepared_layer_compiles_nothing(launched, activation, up_bias, down_bias, combine, f32, varying):
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
    assert not launched
    run(activation, up_bias, down_bias, combine, f32, varying)
    assert {id(kernel) for kernel in launched} == {id(kernel) for kernel in prepared}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_layer_prepared_for_slices_of_columns(launched, monkeypatch, count):
    monkeypatch.setattr(hopper_products, "column_slices", lambda num_rows, d, size: rowops._in_slices(d, count))
    prepared = gemm.prepare(2312, N, E, K)
    run(d=2312)
    assert {id(kernel) for kernel in launched} <= {id(kernel) for kernel in prepared}


def test_loads_where_it_is_told_to(launched):
    assert gemm.prepare(D, N, E, K, device=1) == launched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((60, N, E, K), "d_model: expected a positive multiple of 8, got 60"),
        ((D, 0, E, K), "d_expert: expected a positive multiple of 8, got 0"),
        ((D, N, 513, K), "num_experts: expected 1 to 512, got 513"),
        ((D, N, E, 7), "top_k: expected 1 to num_experts=6, or None if it varies, got 7"),
    ],
)
def test_refuses_what_the_products_do_not_take(launched, arguments, message):
    with pytest.raises(ValueError, match=message):
        gemm.prepare(*arguments)
    with pytest.raises(ValueError, match="activation: expected one of 'swiglu'"):
        gemm.prepare(D, N, E, K, activation="tanh")
