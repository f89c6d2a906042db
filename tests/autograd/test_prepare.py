"""What `gemm.prepare` compiles is what a layer launches: all of it, and nothing that no number of tokens would launch. Nothing is
compiled or launched here."""

from dataclasses import replace

import pytest
import torch

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd import chunks, hopper_backend, moe_mlp, steps, torch_backend
from blazeproto.gemm import launch, registry, weight
from blazeproto.gemm.combine import in_slices
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import CHOSEN, PLAIN, TILES
from blazeproto.runtime import arch, driver
from tests.refusals import refuses

T, D, N, E, K = 40, 64, 32, 6, 3
HANDLES: list[Kernel] = []  # a kernel's handle is its place here; what one test has planned, the next one finds


class Launches:
    """Stands in for the driver."""

    CUDADriverError = RuntimeError

    def __init__(self) -> None:
        self.prepared: list[Kernel] | None = []  # None: whatever is launched
        self.loaded: list[Kernel] = []
        self.launched: set[int] = set()

    def handle(self, kernel: Kernel, device: int) -> int:
        assert self.prepared is None or kernel in self.prepared, f"{kernel!r} was not prepared"
        self.loaded.append(kernel)
        HANDLES.append(kernel)
        return len(HANDLES) - 1

    def launchKernel(self, function: int, *_: object) -> None:
        self.launched.add(id(HANDLES[function]))


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
    monkeypatch.setattr(arch, "_arch_of_gpu", lambda device: arch.HOPPER)
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


@pytest.mark.parametrize(
    ("argument", "sizes"),
    [
        ("d_model", (60, N, E, K)),
        ("d_expert", (D, 0, E, K)),
        ("num_experts", (D, N, 513, K)),
        ("top_k", (D, N, E, 0)),
    ],
)
def test_refuses_what_the_products_do_not_take(launches, argument, sizes):
    refuses(lambda: gemm.prepare(*sizes), argument)
