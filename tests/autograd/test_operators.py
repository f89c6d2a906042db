"""The operators as torch sees them: opcheck, torch.compile without a graph break, activation checkpointing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import SavePolicy, checkpoint_contexts
from blazeproto.autograd.options import Options
from blazeproto.layer import MoE
from blazeproto.router.router import Router

POLICIES = [policy.value for policy in SavePolicy]
ops = torch.ops.blazeproto


def options(save="minimal", activation="swiglu"):
    return Options(activation, backend="torch").encode(save)


def tail_of(case, save="minimal", chunk_tokens=0):
    index_arrays = ops.dispatch(case.topk_experts, 5, chunk_tokens, "torch")
    top_k = 0 if case.varying else 3
    varying = (case.varying.get("pair_tokens"), case.varying.get("token_offsets"))
    return (None, None, *index_arrays, top_k, *varying, chunk_tokens, None, "", options(save))


def test_opcheck_dispatch(make_case):
    case = make_case(sentinels=True)
    for chunk_tokens in (0, 16):
        for capacity in ((), (0,), (20,), (1000,)):
            torch.library.opcheck(ops.dispatch.default, (case.topk_experts, 5, chunk_tokens, "torch", *capacity))


def parameters_of(case, factors):
    """As the operators take them; factors: whether there are some."""
    up, down = (
        tuple(torch.randn(5, *shape, dtype=case.x.dtype).requires_grad_() if factors else None for shape in shapes)
        for shapes in (((8, 16), (48, 8)), ((8, 24), (16, 8)))
    )
    return (case.x, case.gate_up_proj, case.up_bias, *up, case.down_proj, case.down_bias, *down, case.scores)


def detached(tensors):
    return tuple(None if t is None else t.detach() for t in tensors)


def kept(made, save, factors):
    h, act, xa, act_a, _, _ = made
    if save == "recompute":
        return (None,) * 6
    return h, act if save == "paper" else None, *((xa, act_a) if factors else (None, None)), None, None


@pytest.mark.parametrize(
    ("factors", "varying", "save"),
    [
        pytest.param(*case, marks=[pytest.mark.full] if number % 4 else [])
        for number, case in enumerate(product([False, True], [False, True], POLICIES))
    ],
)
def test_opcheck_whole_batch(make_case, save, varying, factors):
    case = make_case(bias=True, varying=varying, unused=0)  # rows without a pair hold anything, opcheck compares all
    tail, parameters = tail_of(case, save), parameters_of(case, factors)
    torch.library.opcheck(ops.moe_experts.default, (*parameters, None, *tail))

    parameters = detached(parameters)
    saved = kept(ops.moe_experts(*parameters, None, *tail)[1:], save, factors)
    again = save == "recompute"
    from_x = parameters[:5] if again else (None,) * 5
    no, there = [False] * 5, factors
    for dh, of_down in ((True, [True, True, there, there, True]), (True, [False, True, there, False, False])):
        needs = [dh, again and factors, False, *no, *of_down]
        arguments = (needs, case.d_out, None, None, *from_x, *parameters[5:], *saved, *tail)
        torch.library.opcheck(ops.moe_backward.default, arguments)
    dh = torch.randn(tail[2].shape[0], case.gate_up_proj.shape[1], dtype=case.x.dtype)
    xa = torch.randn(tail[2].shape[0], 8, dtype=case.x.dtype) if factors else None
    for of_up in ([True, True, True, there, there], [False, True, False, there, False]):
        needs = [False, False, False, *of_up, *no]
        arguments = (needs, None, dh, None, *parameters, None, None, xa, None, None, None, *tail)
        torch.library.opcheck(ops.moe_backward.default, arguments)


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("factors", [False, True])
def test_opcheck_chunks(make_case, save, factors):
    case = make_case(bias=True)
    tail, parameters = tail_of(case, save, chunk_tokens=16), parameters_of(case, factors)
    torch.library.opcheck(ops.moe_experts.default, (*parameters, None, *tail))
    parameters = detached(parameters)
    saved = kept(ops.moe_experts(*parameters, None, *tail)[1:], save, factors)
    some = [True, False, False, False, factors, True, False, factors, False, False]
    for needs in ([t is not None for t in parameters], some):
        arguments = ([False, False, False, *needs], case.d_out, None, None, *parameters, *saved, *tail)
        torch.library.opcheck(ops.moe_backward.default, arguments)


def test_opcheck_gate_and_up_apart(make_case):
    case = make_case(bias=True)
    gate, up = (half.contiguous().requires_grad_() for half in case.gate_up_proj.detach().chunk(2, dim=1))
    x, _, *rest = parameters_of(case, False)
    torch.library.opcheck(ops.moe_experts.default, (x, gate, *rest, up, *tail_of(case)))


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_compiles_without_a_break(make_case, save, workspace_bytes):
    case = make_case(bias=True, sentinels=True)
    expected = case.run(save=save, workspace_bytes=workspace_bytes)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda: case.forward(save=save, workspace_bytes=workspace_bytes), fullgraph=True, backend="aot_eager"
    )
    out = compiled()
    for a, b in zip((out, *torch.autograd.grad(out, case.parameters, case.d_out)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_layer_compiles_for_other_batch_sizes():
    torch.compiler.reset()
    layer = MoE(16, 24, 5, 2, router="top_k", bias=True)
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (24, 40):
        x = torch.randn(num_tokens, 16)
        gradients = []
        for function in (compiled, lambda x: layer(x)[0]):
            layer.zero_grad()
            out = function(x)
            out.square().mean().backward()
            gradients.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_saved_bytes_under_compile_are_the_policys(make_case):
    """The compiler keeps what the operators save: the policy holds, act is not among it."""
    case = make_case(96, 16, 24, 5, 2, dtype=torch.float32)
    torch.compiler.reset()
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    compiled = torch.compile(lambda: case.forward(save="minimal"), fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled()
    out.sum().backward()
    assert (192, 48) in shapes and (192, 24) not in shapes


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.heard.add(operator.name())
        return operator(*args, **(kwargs or {}))


def test_modes_and_profilers_are_told_of_the_operators(make_case):
    """Though they are called past the dispatcher where they are unobserved."""
    case = make_case()
    expected = {f"blazeproto::{name}" for name in ("dispatch", "moe_experts")}
    expected_backward = {"blazeproto::moe_backward"}
    alone = case.run()
    with Names() as names:
        heard = case.run()
    assert expected | expected_backward <= names.heard
    assert all(torch.equal(a, b) for a, b in zip(alone, heard, strict=True))
    with torch.profiler.profile() as profile:
        case.run()
    assert expected | expected_backward <= {event.key for event in profile.key_averages()}


class Contrary(torch.nn.Module):
    """A router that, asked a second time, prefers the experts that it liked least."""

    def __init__(self, router):
        super().__init__()
        self.router, self.calls = router, 0

    def forward(self, x):
        self.calls += 1
        return self.router(x * (1 if self.calls == 1 else -1))


@pytest.mark.parametrize("save", POLICIES)
def test_checkpointing_does_not_route_again(save):
    router = Contrary(Router(16, 5, 2))
    layer = MoE(16, 24, 5, 2, router=router, save=save)
    x = torch.randn(1, 16)
    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    out.sum().backward()
    assert router.calls == 2
    used = layer.down_proj.grad.abs().amax(dim=(1, 2)) > 0
    assert torch.equal(used, stats.load > 0)
    assert not torch.equal(stats.load, router(x).load)


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("router", ["top_k", "token_rounding", "expert_choice"])
def test_checkpointing_gives_the_same_gradients(save, router):
    layer = MoE(16, 24, 5, 2, save=save, dtype=torch.float64, router=router)
    x = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    parameters = [x, *layer.parameters()]
    out, stats = layer(x)
    expected = torch.autograd.grad(out.square().sum() + stats.aux_loss, parameters)
    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    gradients = torch.autograd.grad(out.square().sum() + stats.aux_loss, parameters)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
