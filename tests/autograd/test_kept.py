"""Weights in fp8 that a layer keeps by itself: for how long, and never those of before a write."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blazeproto import MoE, moe_mlp
from blazeproto.autograd import kept, torch_backend
from blazeproto.autograd.kept import KeptWeights
from tests.autograd.test_fp8 import WRITERS
from tests.refusals import refuses

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def layer_that(keeps: str = "step", **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(64, 128, 4, 2, precision="fp8", keep_quantized=keeps, **options)


def like(layer: MoE) -> MoE:
    """Which keeps nothing."""
    made = deepcopy(layer)
    made.kept = KeptWeights("used")
    return made


def step(layer: MoE, optimizer: torch.optim.Optimizer | None = None) -> None:
    layer(X)[0].square().mean().backward()
    (optimizer or torch.optim.SGD(layer.parameters(), lr=0.1)).step()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The device sees no write: what the host does not see stays as it was. -> the calls in which a weight was quantized."""
    real, made = torch_backend.refresh_weights, list[int]()

    def refresh(weight, dtype, out, transposed, hashes, call, **how):
        if not hashes.any():
            real(weight, dtype, out, transposed, hashes, call, **how)
            hashes.fill_(1)
            made.append(call)

    monkeypatch.setattr(torch_backend, "refresh_weights", refresh)
    return made


def test_they_last_from_the_first_forward_of_a_step_to_its_end(unseen):
    layer = layer_that()
    twin = like(layer)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (layer, twin)]
    held = []
    for _ in range(3):
        for x in torch.randn(2, 8, 64):
            made = [each(x)[0] for each in (layer, twin)]
            assert torch.equal(*made)
            held.append(layer.kept.nbytes)
            for out in made:
                out.square().mean().backward()
        assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (layer, twin))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        held.append(layer.kept.nbytes)
    copies = 2 * sum(p.numel() + 4 * p.numel() // 128**2 for p in (layer.gate_up_proj, layer.down_proj))
    assert held[:3] == [0, 0, 0] and {*held[5::3]} == {0}  # no optimizer had stepped them
    assert copies <= held[3] == held[4] == held[6] < copies + 300 and unseen == [0, 0, 0, 0]


def test_they_are_counted_and_shown(unseen):
    layer = layer_that()
    with torch.no_grad():
        layer(X)
    saved = layer.saved_bytes(8)  # in training nothing is kept yet
    step(layer)
    layer(X)
    assert f"kept={layer.kept.nbytes} bytes of quantized weights" in repr(layer) and layer.saved_bytes(8) < saved
    for copy in (deepcopy(layer), torch.nn.ModuleList([layer])[0]):
        assert (copy.kept.nbytes == 0) == (copy is not layer)
    assert deepcopy(layer_that("changed")).kept.how == "changed"


def test_frozen_and_evaluated_layers_quantize_once(unseen):
    layer = layer_that()
    for without_gradients in (torch.inference_mode, torch.no_grad):
        with without_gradients():
            layer(X)
        assert layer.kept.nbytes
    layer.requires_grad_(False)
    layer(X.clone().requires_grad_())[0].sum().backward()
    with torch.inference_mode():
        layer(X)
    assert unseen == [0, 0] and layer.kept.nbytes


def test_memory_that_stays_is_filled_again(unseen):
    layer = layer_that("changed")
    step(layer)
    layer(X)
    kept = layer.kept.of_weights((layer.gate_up_proj, layer.down_proj), X.dtype, torch_backend, "fp8")
    step(layer)
    assert torch.equal(layer(X)[0], like(layer)(X)[0])
    again = layer.kept.of_weights((layer.gate_up_proj, layer.down_proj), X.dtype, torch_backend, "fp8")
    assert kept is again and len(unseen) == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(X)[0], like(layer)(X)[0])
    assert layer.kept.nbytes and len(unseen) == 6


def experts(quantized: KeptWeights | None, weights: tuple[torch.Tensor, ...], precision: str) -> torch.Tensor:
    rows = torch.ones(8, 128), *weights, torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.int64)
    return moe_mlp(*rows, num_experts=len(weights[0]), precision=precision, quantized=quantized)


@pytest.mark.parametrize("keeps", ["step", "changed"])
def test_weights_are_kept_for_one_precision_and_shape(unseen, keeps):
    kept = KeptWeights(keeps)
    for E in (2, 3):
        weights = tuple(torch.nn.Parameter(torch.randn(E, *size), False) for size in ((256, 128), (128, 128)))
        for precision in ("fp8", "fp8_rollout", "fp8"):
            assert torch.equal(experts(kept, weights, precision), experts(None, weights, precision)) and kept.nbytes
    assert len(unseen) == 12
    experts(kept, (weights[0], weights[1].detach()), "fp8")  # one that a program made for this forward, say
    assert not kept.nbytes


@pytest.mark.parametrize("keeps", ["step", "changed"])
@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "copied records"])
def test_who_writes_is_noticed(unseen, keeps, writer):
    layer = layer_that(keeps)
    step(layer)
    layer(X)[0].sum().backward()
    assert layer.kept.nbytes
    WRITERS[writer](layer)
    with torch.no_grad():
        layer.router.weight.mul_(1)
    assert torch.equal(layer(X)[0], like(layer)(X)[0])


def test_a_write_that_the_host_does_not_see_is_seen_on_the_device():
    layer = layer_that()
    step(layer)
    layer(X)
    for weight in (layer.gate_up_proj, layer.down_proj):
        version = weight._version
        weight.data.mul_(-1)
        assert weight._version == version and torch.equal(layer(X)[0], like(layer)(X)[0])


def test_a_step_of_other_weights_frees_nothing(unseen):
    layer, other = layer_that(), layer_that()
    step(layer)
    layer(X)
    step(other)
    assert layer.kept.nbytes and len(unseen) == 2


def test_a_forward_before_the_last_backward_leaves_its_weights(unseen):
    """As in a pipeline."""
    layer = layer_that()
    step(layer)
    made = [layer(x)[0] for x in torch.randn(3, 8, 64)]
    for out in made:
        out.sum().backward()
    assert len(unseen) == 2


@pytest.mark.parametrize("reshard", [True, False])
def test_what_fsdp_gathers_is_not_kept(group, reshard):
    layer = layer_that()
    twin = like(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshard)
    for _ in range(3):
        assert torch.equal(layer(X)[0], twin(X)[0])
        with torch.no_grad():
            layer(X)
        assert not layer.kept.nbytes
        for each in (layer, twin):
            step(each)


@pytest.mark.parametrize("keeps", ["step", "changed"])
def test_another_models_weights_in_between_change_no_backward(keeps):
    """As of a teacher."""
    layer, gradients = layer_that(keeps), []
    step(layer)
    others = {name: torch.nn.Parameter(torch.randn_like(p)) for name, p in layer.named_parameters()}
    for each in (layer, like(layer)):
        x = X.clone().requires_grad_()
        out = each(x)[0]
        with torch.no_grad():
            torch.func.functional_call(each, others, (X,))
        gradients += torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("make", [MoE.quantize_weights, lambda layer: layer(X)])
def test_weights_are_quantized_on_their_own_gpu(monkeypatch, make):
    layer, of = layer_that(), list[Any]()
    step(layer)
    monkeypatch.setattr(kept, "gpu_of", lambda weight: nullcontext(of.append(weight)))
    make(layer)
    assert of[0] is layer.gate_up_proj


def test_no_stream_takes_what_another_may_still_be_making(unseen, monkeypatch):
    layer = layer_that()
    step(layer)
    records = []
    for stream in (0, 0, 1):
        monkeypatch.setattr(kept, "stream_of", lambda _, stream=stream: stream)
        records.append(layer.kept.of_weights((layer.gate_up_proj, layer.down_proj), X.dtype, torch_backend, "fp8"))
    assert records[0] is records[1] is not records[2] and unseen == [0, 0, 0, 0]


def test_a_forward_of_fake_tensors_leaves_nothing():
    layer = layer_that()
    step(layer)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer(mode.from_tensor(X))
    assert torch.equal(layer(X)[0], like(layer)(X)[0])


def test_weights_of_ones_own_beside_the_optimizers_are_not_kept(unseen):
    """As where an optimizer steps float32 copies, and writes back through data."""
    layer = layer_that()
    masters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(2):
        layer(X)[0].square().mean().backward()
        for master, parameter in zip(masters, layer.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        for master, parameter in zip(masters, layer.parameters(), strict=True):
            parameter.data.copy_(master)
        assert torch.equal(layer(X)[0], like(layer)(X)[0]) and not layer.kept.nbytes


def test_nothing_is_kept_where_that_is_asked(unseen):
    layer = layer_that("used")
    step(layer)
    layer(X)
    assert not layer.kept.nbytes and not unseen
    refuses(lambda: layer_that("always"), "keep_quantized")
    bf16 = MoE(64, 128, 4, 2)
    bf16(X)
    assert not bf16.kept.nbytes


def test_nothing_is_kept_while_a_graph_is_captured(unseen, monkeypatch):
    layer = layer_that().requires_grad_(False)
    layer(X)
    assert layer.kept.nbytes
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weights = layer.gate_up_proj, layer.down_proj
    assert layer.kept.of_weights(weights, X.dtype, torch_backend, "fp8") is None and not layer.kept.nbytes


@pytest.mark.full
def test_a_compiled_layer_keeps_nothing_and_takes_nothing_stale(unseen):
    layer = layer_that()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(X)[0], like(layer)(X)[0])
        layer(X)
        step(layer)
