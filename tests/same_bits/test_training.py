"""Every way to train a layer that PyTorch has gives the bits of a plain step; float32 weights keep their unrounded gradients. On
the CPU with the torch backend, on a Hopper GPU with the kernels."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from places import (
    D_MODEL,
    PLACES,
    TOKENS,
    Place,
    Results,
    assert_same_bits,
    backward,
    collect,
    in_two_threads,
    plain,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@PLACES
def test_functional_call(place: Place) -> None:
    expected, layer, (x, d_out) = plain(place), place.build(seed=9), place.batch()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in place.build().named_parameters()}
    with place.autocast():
        out, stats = torch.func.functional_call(layer, parameters, (x,))
    backward(out, stats.aux_loss, d_out)
    got = {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in parameters.items()}}
    assert_same_bits(got, expected)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


@PLACES
def test_parametrizations(place: Place) -> None:
    """Weights that are computed: here twice what is stored, which is exact."""
    expected, layer = plain(place), place.build()
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(layer, name, Twice())
    got = train(place, layer, *place.batch())
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(got.pop(f"parametrizations.{name}.original") / 2, expected.pop(name))
    assert_same_bits(got, {name: expected[name] for name in got})


@PLACES
def test_two_layers_share_their_weights(place: Place) -> None:
    """Each adds its gradient to the one that they share."""
    first, second = place.build(), place.build()
    shared = ("gate_up_proj", "down_proj")
    batches = [place.batch(seed) for seed in (2, 3)]
    expected = [train(place, layer, *batch) for layer, batch in zip((first, second), batches, strict=True)]
    for name in shared:
        setattr(second, name, getattr(first, name))
    first.zero_grad()
    second.zero_grad()
    for layer, (x, d_out) in zip((first, second), batches, strict=True):
        out, aux_loss = place.forward(layer, x)
        backward(out, aux_loss, d_out)
    for name in shared:
        assert torch.equal(getattr(first, name).grad, expected[0][name] + expected[1][name])


@PLACES
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients_then_training(place: Place, mode: Callable) -> None:
    expected, layer, (x, d_out) = plain(place), place.build(), place.batch()
    for _ in range(2):
        with mode(), place.autocast():
            out, _ = layer(x)
        assert not out.requires_grad and torch.equal(out, expected["out"])
        assert_same_bits(train(place, layer, x, d_out), expected)


@PLACES
def test_accumulation_and_a_kept_graph(place: Place) -> None:
    first, second, layer = plain(place, seed=2), plain(place, seed=3), place.build()
    for seed in (2, 3):
        x, d_out = place.batch(seed)
        out, aux_loss = place.forward(layer, x)
        backward(out, aux_loss, d_out)
    for name, p in layer.named_parameters():
        assert torch.equal(p.grad, first[name] + second[name]), name

    layer.zero_grad()
    x, d_out = place.batch()
    out, aux_loss = place.forward(layer, x)
    for keep in (True, True, False):
        x.grad = None
        layer.zero_grad()
        backward(out, aux_loss, d_out, retain_graph=keep)
        assert_same_bits(collect(out, x, layer), first)


@PLACES
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_checkpoint(place: Place, reentrant: bool, save: str) -> None:
    """Reentrant checkpoints know the tensors that the function returns by themselves: so the loss is one of them."""
    expected, layer, (x, d_out) = plain(place), place.build(save=save), place.batch()

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux_loss = place.forward(layer, x)
        return out, aux_loss

    out, aux_loss = checkpoint(block, x, use_reentrant=reentrant)
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)


HOOKED: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "one backward thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "deterministic algorithms": lambda: deterministic(),
}


@contextlib.contextmanager
def deterministic():
    """New memory is filled with NaN, so that nothing uninitialised is read unnoticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@PLACES
@pytest.mark.parametrize("mode", HOOKED)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:.*deterministic")
def test_modes_of_autograd(place: Place, mode: str) -> None:
    expected = plain(place)
    with HOOKED[mode]():
        results = train(place, place.build(), *place.batch())
    assert_same_bits(results, expected)


@PLACES
def test_hooks(place: Place) -> None:
    """Hooks of modules, tensors, nodes and parameters: all are called, none changes a bit."""
    expected, layer, (x, d_out) = plain(place), place.build(), place.batch()
    called: list[str] = []
    layer.register_forward_pre_hook(lambda *_: called.append("forward pre"))
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: called.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.down_proj.register_hook(lambda grad: called.append("tensor"))
    layer.down_proj.register_post_accumulate_grad_hook(lambda p: called.append("parameter"))
    out, aux_loss = place.forward(layer, x)
    out.register_hook(lambda grad: called.append("out"))
    out.grad_fn.register_hook(lambda *_: called.append("node"))
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)
    assert set(called) == {"forward pre", "forward", "backward pre", "backward", "tensor", "parameter", "out", "node"}


@PLACES
def test_frozen_parameters(place: Place) -> None:
    """Each alone, and all experts' weights, as in training adapters."""
    expected, layer = plain(place), place.build()
    names = [name for name, _ in layer.named_parameters()]
    for frozen in (*([name] for name in names), ["gate_up_proj", "down_proj"]):
        layer.zero_grad()
        x, d_out = place.batch()
        for name, p in layer.named_parameters():
            p.requires_grad_(name not in frozen)
        out, aux_loss = place.forward(layer, x)
        losses = [(out, d_out)] + [(aux_loss, torch.ones_like(aux_loss))] * aux_loss.requires_grad
        torch.autograd.backward(*zip(*losses, strict=True))
        assert torch.equal(x.grad, expected["x"])
        for name, p in layer.named_parameters():
            assert p.grad is None if name in frozen else torch.equal(p.grad, expected[name]), name


@PLACES
def test_no_tokens(place: Place) -> None:
    layer, (x, d_out) = place.build(), place.batch(tokens=0)
    results = train(place, layer, x, d_out)
    assert results["out"].shape == (0, D_MODEL) and results["out"].dtype == torch.bfloat16
    assert not any(t.any() for t in results.values())
    assert_same_bits(train(place, layer, *place.batch()), plain(place))


@PLACES
@pytest.mark.parametrize("one_layer", [False, True])
def test_two_threads(place: Place, one_layer: bool) -> None:
    """A layer each, and one layer in both, forward and backward, on the same stream."""
    layers = [place.build()] * 2 if one_layer else [place.build(), place.build()]
    expected = [plain(place, seed) for seed in (2, 3)]
    names = ["x", *dict(layers[0].named_parameters())]

    def work(number: int) -> None:
        for _ in range(5):
            x, d_out = place.batch(2 + number)
            out, aux_loss = place.forward(layers[number], x)
            inputs = [x, *layers[number].parameters()]
            ones = torch.ones_like(aux_loss)
            made = torch.autograd.grad([out, aux_loss], inputs, [d_out, ones])
            got: Results = {"out": out.detach(), **dict(zip(names, made, strict=True))}
            assert_same_bits(got, expected[number])

    in_two_threads(work)


@PLACES
def test_a_batch_of_any_shape(place: Place) -> None:
    """(..., d), views, other strides: the tokens in order."""
    expected = plain(place)
    spread = [
        lambda x: x.view(3, TOKENS // 3, D_MODEL),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x])[:TOKENS],
    ]
    for view in spread:
        layer, (x, d_out) = place.build(), place.batch()
        out, aux_loss = place.forward(layer, view(x))
        backward(out.reshape(x.shape), aux_loss, d_out)
        assert_same_bits(collect(out.reshape(x.shape), x, layer), expected)


@PLACES
@pytest.mark.parametrize("compiler", ["aot_eager"])
def test_compile(place: Place, compiler: str) -> None:
    expected, layer, (x, d_out) = plain(place), place.build(), place.batch()
    torch.compiler.reset()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux_loss = place.forward(layer, x)
        return out, aux_loss

    out, aux_loss = torch.compile(forward, fullgraph=True, backend=compiler)(x)
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)
