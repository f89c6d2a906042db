"""The operators as torch sees them: opcheck, torch.compile without a graph break, activation checkpointing."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import SavePolicy, checkpoint_contexts
from blazeproto.autograd.call import Beside, ExpertsCall, How, Parameters, pack
from blazeproto.autograd.options import Options
from blazeproto.autograd.policy import Saved, places
from blazeproto.dispatch import Dispatch
from blazeproto.layer import MoE
from blazeproto.router.router import Router

ops = torch.ops.blazeproto


def call_of(case, save="minimal", chunk_tokens=0):
    up, down = (case.up_a, case.up_b), (case.down_a, case.down_b)
    p = (case.x, case.gate_up_proj, case.up_bias, *up, case.down_proj, case.down_bias, *down, case.scores)
    lists = ops.dispatch(case.topk_experts, 5, chunk_tokens, "torch")
    top_k, varying = None if case.varying else 3, (case.varying.get("token_offsets"), case.varying.get("pair_tokens"))
    lists = (lists[0], lists[1] if chunk_tokens else lists[1][0], lists[2])
    dispatch = Dispatch(*lists, None, 5, top_k, len(case.x), *varying)
    return ExpertsCall(
        Parameters(*p), Beside(), dispatch, How(Options(backend="torch"), save, False, top_k or 0, chunk_tokens)
    )


def test_opcheck_dispatch(make_case):
    case = make_case(sentinels=True)
    for chunk_tokens in (0, 16):
        for capacity in ((), (0,), (20,), (1000,)):
            torch.library.opcheck(ops.dispatch.default, (case.topk_experts, 5, chunk_tokens, "torch", *capacity))


def detached(call):
    return call._replace(p=Parameters(*(None if t is None else t.detach() for t in call.p)))


def saved_by(call):
    made = ops.moe_experts(*pack(call))[1:]
    return Saved(*(None if place is None else t for t, place in zip(made, places(call), strict=True)))


def check(name, needs, given, call):
    """A step whose gradients of these names are needed."""
    torch.library.opcheck(
        ops.moe_backward.default, (name, [each in needs for each in Parameters._fields], given, *pack(call))
    )


@pytest.mark.parametrize(
    ("factors", "varying", "save"),
    [
        pytest.param(*case, marks=[pytest.mark.full] if number % 4 else [])
        for number, case in enumerate(product([None, "both"], [False, True], SavePolicy))
    ],
)
def test_opcheck_whole_batch(make_case, save, varying, factors):
    # Rows without a pair hold anything, and opcheck compares all.
    case = make_case(bias=True, varying=varying, unused=0, factors=factors)
    call = call_of(case, save)
    torch.library.opcheck(ops.moe_experts.default, pack(call))

    call, num_rows = detached(call), call.dispatch.num_rows
    saved, there = saved_by(call), {name for name, t in zip(Parameters._fields, call.p, strict=True) if t is not None}

    def rows(width, given=True):
        return torch.randn(num_rows, width, dtype=case.x.dtype) if given else None

    dh, a_scaled, low = rows(case.gate_up_proj.shape[1]), rows(24), rows(8, factors)
    for needs in (there, {"x", "scores"}, {"down_proj", "up_bias"}, there & {"down_a", "down_b", "up_b"}):
        check("down_backward", needs, (case.d_out, *saved), call)
        check("down_gradients", needs, (case.d_out, a_scaled, low, low), call)
        check("up_backward", needs, (dh, None), call)
        check("up_gradients", needs, (dh, low, low), call)


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("factors", [None, "both"])
def test_opcheck_chunks(make_case, save, factors):
    call = call_of(case := make_case(bias=True, factors=factors), save, 16)
    torch.library.opcheck(ops.moe_experts.default, pack(call))
    call = detached(call)
    saved = saved_by(call)
    for needs in (Parameters._fields, ("x", "down_proj", *(("up_b", "down_b") if factors else ()))):
        needs = [name for name in needs if getattr(call.p, name) is not None]
        check("backward", needs, (case.d_out, *saved), call)


def test_opcheck_gate_and_up_apart(make_case):
    case = make_case(bias=True)
    gate, up = (half.contiguous().requires_grad_() for half in case.gate_up_proj.detach().chunk(2, dim=1))
    call = call_of(case)
    torch.library.opcheck(ops.moe_experts.default, pack(call._replace(p=call.p._replace(up_proj=gate, up_rest=up))))


@pytest.mark.parametrize(
    ("save", "options", "workspace_bytes"),
    [
        *(
            (save, {"capacity": capacity}, size)
            for save in SavePolicy
            for capacity, size in ((None, None), (0.6, 20_000))
        ),
        *(("minimal", {"factors": factors}, None) for factors in ("both", "up", "down")),
    ],
)
def test_compiles_without_a_break(make_case, save, options, workspace_bytes):
    case = make_case(bias=True, sentinels=True, **options)
    expected = case.run(save=save, workspace_bytes=workspace_bytes)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda: case.forward(save=save, workspace_bytes=workspace_bytes), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(case.gradients(compiled()), expected, rtol=1e-12, atol=1e-12)


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
    compiled = torch.compile(lambda: case.forward(save="minimal"), fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
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


@pytest.mark.parametrize("save", SavePolicy)
def test_checkpointing_does_not_route_again(save):
    router = Contrary(Router(16, 5, 2))
    layer = MoE(16, 24, 5, 2, router=router, save=save)
    x = torch.randn(1, 16)
    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
    out.sum().backward()
    assert router.calls == 2
    used = layer.down_proj.grad.abs().amax(dim=(1, 2)) > 0
    assert torch.equal(used, stats.load > 0) and not torch.equal(stats.load, router(x).load)
