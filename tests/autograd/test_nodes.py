"""What the autograd node saves, when it lets go of it, and how it treats unusual gradients."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from blazeproto.autograd import SavePolicy, moe_mlp, torch_backend
from blazeproto.autograd.once import edge, once_differentiable
from tests.autograd.cases import assert_close, assert_same_bits


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_x_is_saved_where_it_is_read_again(make_case, bytes_saved_by, save, workspace_bytes):
    """Not for dX and dW_down, whatever way dO lies, compiled or not."""
    case, options = make_case(96, 32, 48, 6, 3), {"save": save, "workspace_bytes": workspace_bytes}
    wanted = [case.x, case.down_proj]
    everything = bytes_saved_by(lambda: case.forward(**options), [*wanted[1:], case.gate_up_proj])
    _, *gradients = case.run(**options)
    case.gate_up_proj.requires_grad_(False)
    saved = bytes_saved_by(lambda: case.forward(**options), [*wanted[1:], case.gate_up_proj])
    assert everything - saved == (0 if save == "recompute" else case.x.nbytes)
    for compiled in (False, True)[: 1 + (save == "minimal")]:
        run = torch.compile(case.forward, backend="aot_eager") if compiled else case.forward
        for d_out in (case.d_out, case.d_out.t().contiguous().t()):
            d_x, d_down = torch.autograd.grad(run(**options), wanted, d_out)
            assert torch.allclose(d_x, gradients[0], rtol=1e-12) and torch.allclose(d_down, gradients[2], rtol=1e-12)
        (d_x,) = torch.autograd.grad(run(**options).sum(), wanted[:1])  # whose dO has strides of 0
        assert d_x.is_contiguous() and d_x.isfinite().all()


@pytest.mark.parametrize("save", ["minimal", "paper"])
@pytest.mark.parametrize("keep", [False, True])
def test_h_is_freed_before_the_up_backward(make_case, watch, save, keep):
    """Unless the graph is kept. What autograd holds and what the backward itself holds."""
    case = make_case(96, 16, 24, 5, 2, dtype=torch.float32)
    references = []

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        kept = Kept(tensor)
        if tensor.shape in ((192, 48), (192, 24)):  # H, act
            references.extend((weakref.ref(kept), weakref.ref(tensor)))
        return kept

    alive_then = []

    def look(*args, **options):
        alive_then.extend(reference() is not None for reference in references)

    watch(torch_backend, "up_backward_act", look)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = case.forward(save=save)
    out.backward(case.d_out, retain_graph=keep)
    assert alive_then == [keep] * (2 if save == "minimal" else 4)


@pytest.mark.parametrize("save", SavePolicy)
def test_nothing_saved_is_written_over(make_case, save):
    """And a graph that is kept runs twice."""
    case = make_case(bias=True, sentinels=True, factors="both")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t, t.clone())) or t, lambda t: t):
        out = case.forward(save=save)
    assert_same_bits(case.gradients(out, retain_graph=True), case.gradients(out))
    # By bytes: rows that no pair has may hold NaN, which equals nothing.
    assert all(torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)) for tensor, copy in saved)


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("factors", [None, "both"])
def test_double_backward_is_refused(make_case, workspace_bytes, factors):
    case = make_case(factors=factors)
    out = case.forward(workspace_bytes=workspace_bytes)
    (dx,) = torch.autograd.grad(out.square().sum(), case.x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dx.sum().backward()


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("inside", [nullcontext, lambda: FlopCounterMode(display=False), lambda: torch.device("cpu")])
def test_what_a_backward_keeps_of_frozen_experts_is_no_constant(make_case, save, inside):
    """H is made of x, but nothing that backward reads requires a gradient."""
    case = make_case()
    for tensor in case.trained.values():
        tensor.requires_grad_(tensor is case.x)
    for d_out in (case.d_out, case.d_out.clone().requires_grad_()):
        with inside():
            first, second = (case.forward(save=save) for _ in range(2))
        (plain,) = torch.autograd.grad(first, case.x, d_out)
        (dx,) = torch.autograd.grad(second, case.x, d_out, create_graph=True)
        assert_same_bits([dx], [plain])
        for inputs in ([d_out] if d_out.requires_grad else None, [case.x]):
            with pytest.raises(RuntimeError, match="can be differentiated once"):
                dx.square().sum().backward(inputs=inputs, retain_graph=True)


@pytest.mark.parametrize("saved", ["x", "edge"])
def test_a_function_that_is_differentiable_once(saved):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach()
            ctx.save_for_backward(x if saved == "x" else edge(x))
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx, d_out, *_):
            return (2 * ctx.x * d_out,)

    x = torch.tensor([3.0], requires_grad=True)
    assert torch.autograd.grad(Square.apply(x), x) == (6,)
    (dx,) = torch.autograd.grad(Square.apply(x), x, create_graph=True)
    for inputs in (None, [x]):
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            dx.backward(inputs=inputs, retain_graph=True)


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_gradient_of_stride_zero(make_case, save, workspace_bytes):
    """``out.sum().backward()`` hands over a gradient that is one element, expanded."""
    case = make_case(factors="both")
    out = case.forward(save=save, workspace_bytes=workspace_bytes)
    expanded = torch.autograd.grad(out.sum(), case.parameters)
    case.d_out = torch.ones_like(case.d_out)
    assert_same_bits(expanded, case.run(save=save, workspace_bytes=workspace_bytes)[1:])


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("factors", [None, "both", "up", "down"])
def test_any_subset_of_gradients(make_case, save, workspace_bytes, factors):
    """What requires no gradient gets none, and the others do not change."""
    case = make_case(bias=True, factors=factors)
    options = {"save": save, "workspace_bytes": workspace_bytes}
    tensors, gradients = case.trained, dict(zip(("out", *case.trained), case.run(**options), strict=True))
    for wanted in (*({name} for name in tensors), *(tensors.keys() - {name} for name in tensors)):
        for name, t in tensors.items():
            t.requires_grad_(name in wanted)
        for name, got in zip(("out", *case.trained), case.run(**options), strict=True):
            torch.testing.assert_close(got, gradients[name], rtol=1e-12, atol=1e-14)
        assert all(t.grad is None for t in tensors.values())


def test_no_graph_where_no_gradient_is_wanted(make_case):
    case = make_case(factors="both")
    with torch.no_grad():
        assert case.forward().grad_fn is None
    for parameter in case.parameters:
        parameter.requires_grad_(False)
    assert case.forward().grad_fn is None


@pytest.mark.parametrize("biased", ["up", "down"])
def test_a_bias_is_in_the_sum_that_is_rounded(biased):
    """257 is half-way between two bf16 numbers and goes to 256; 257.25 goes to 258."""
    x, ones, eye = torch.tensor([[256.0, 1.0]]), torch.ones(1, 2, 2), torch.eye(2)[None]
    up, down, options = (ones, eye, {"up_bias": 0.25}) if biased == "up" else (eye, ones, {"down_bias": 0.25})
    options = {name: torch.full((1, 2), value).bfloat16() for name, value in options.items()}
    arguments = (x.bfloat16(), up.bfloat16(), down.bfloat16(), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    out = moe_mlp(*arguments, num_experts=1, activation="relu", **options)
    assert out.tolist() == [[258.0, 258.0]]


@pytest.mark.parametrize("factors", [None, "both"])
def test_autocast(make_case, factors):
    """float32 parameters, computed in bfloat16; gradients come in the parameters' dtype."""
    case = make_case(96, 32, 48, 6, 3, dtype=torch.float32, bias=True, factors=factors)
    expected = case.reference()
    case.d_out = case.d_out.bfloat16()
    for workspace_bytes in (None, 40_000):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, *gradients = case.run(workspace_bytes=workspace_bytes)
        assert out.dtype == torch.bfloat16 and {g.dtype for g in gradients} == {torch.float32}
        assert_close((out, *gradients), expected, 2e-2)


def test_autocast_leaves_float64_alone(make_case):
    case = make_case()
    expected = case.forward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(case.forward(), expected)


def test_weights_that_move_between_forward_and_backward(make_case):
    """As FSDP does: storage is freed after forward and another one filled before backward."""
    case = make_case()
    expected = case.run()
    out = case.forward()
    for weight in (case.gate_up_proj, case.down_proj):
        moved = weight.detach().clone()
        weight.data.fill_(torch.nan)
        weight.data = moved
    assert_same_bits(case.gradients(out), expected)
