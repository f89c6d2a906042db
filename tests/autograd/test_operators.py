"""The operators as torch sees them: opcheck, torch.compile without a graph break, activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import SavePolicy, checkpoint_contexts
from blazeproto.autograd.policy import Options
from blazeproto.layer import MoE
from blazeproto.router.router import Router

POLICIES = [policy.value for policy in SavePolicy]
ops = torch.ops.blazeproto


def options(save="minimal", activation="swiglu"):
    return Options(activation, save, "gather", "torch").encode()


def tail_of(case, save="minimal", chunk_tokens=0):
    index_arrays = ops.dispatch(case.topk_experts, 5, chunk_tokens, "torch")
    top_k = 0 if case.varying else 3
    varying = (case.varying.get("pair_tokens"), case.varying.get("token_offsets"))
    return (*index_arrays, top_k, *varying, chunk_tokens, options(save))


def test_opcheck_dispatch(make_case):
    case = make_case(sentinels=True)
    for chunk_tokens in (0, 16):
        for capacity in ((), (0,), (20,), (1000,)):
            torch.library.opcheck(ops.dispatch.default, (case.topk_experts, 5, chunk_tokens, "torch", *capacity))


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("varying", [False, True])
def test_opcheck_experts(make_case, save, varying):
    case = make_case(bias=True, varying=varying, unused=0)  # rows without a pair hold anything, opcheck compares all
    tail = tail_of(case, save)
    up, down = (case.x, case.gate_up_proj, case.up_bias), (case.down_proj, case.down_bias)
    torch.library.opcheck(ops.moe_experts.default, (*up, *down, case.scores, *tail))

    up, down, scores = tuple(t.detach() for t in up), tuple(t.detach() for t in down), case.scores.detach()
    _, h, act = ops.moe_experts(*up, *down, scores, *tail)
    kept = {"minimal": (h, None), "paper": (h, act), "recompute": (None, None)}[save]
    again = up if save == "recompute" else (None, None, None)
    for needs in ([True, True, True, True], [True, False, True, False]):
        arguments = (needs, case.d_out, *kept, scores, *down, *again, *tail)
        torch.library.opcheck(ops.moe_down_backward.default, arguments)
    dh = torch.randn(tail[0].shape[0], case.gate_up_proj.shape[1], dtype=act.dtype)
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.moe_up_backward.default, (needs, dh, *up, *tail))


@pytest.mark.parametrize("save", POLICIES)
def test_opcheck_chunks(make_case, save):
    case = make_case(bias=True)
    tail = tail_of(case, save, chunk_tokens=16)
    parameters = (case.x, case.gate_up_proj, case.up_bias, case.down_proj, case.down_bias, case.scores)
    torch.library.opcheck(ops.moe_experts.default, (*parameters, *tail))
    parameters = tuple(p.detach() for p in parameters)
    _, h, act = ops.moe_experts(*parameters, *tail)
    kept = {"minimal": (h, None), "paper": (h, act), "recompute": (None, None)}[save]
    for needs in ([True] * 6, [True, False, False, True, False, False]):
        torch.library.opcheck(ops.moe_backward.default, (needs, case.d_out, *parameters, *kept, *tail))


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


def test_who_listens_hears_the_operators(make_case):
    """Though they are called past the dispatcher where nobody does."""
    case = make_case()
    expected = {f"blazeproto::{name}" for name in ("dispatch", "moe_experts")}
    expected_backward = {"blazeproto::moe_up_backward", "blazeproto::moe_down_backward"}
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
