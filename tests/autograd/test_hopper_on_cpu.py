"""The Hopper backend's order of products, with the kernels' NumPy twins in their place, so that a CPU can run it.

In float64, and with every buffer that the twins do not write full of NaN. What is tested is which product gets which array,
not the kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import LowRank, SavePolicy, chunks, hopper_backend, mlp, operators, private, steps
from blazeproto.dispatch import Dispatch, build
from blazeproto.dispatch import reference as dispatch_twin
from blazeproto.gemm import TWINS, down_backward, fused, linear, reduce, up, weight
from blazeproto.reference import moe_mlp as reference_mlp
from tests.integrations import test_grouped as grouped


def as_numpy(value):
    if isinstance(value, Dispatch):
        return replace(value, **{name: as_numpy(t) for name, t in value.arrays.items()})
    if isinstance(value, tuple):
        return tuple(map(as_numpy, value))
    return value.detach().numpy() if isinstance(value, Tensor) else value


def weight_gradient(name, rows, ordered, dispatch, *, f32, **options):
    if name == weight.DOWN:
        return TWINS["down_backward_weight"](rows, ordered, dispatch, **options)
    return TWINS["up_backward_weight"](ordered, rows, dispatch, **options)


def expert_row_sum(values, dispatch, *, f32, **options):
    return TWINS["expert_row_sum"](values, dispatch, **options)


LAUNCHES = (  # module, launch, twin
    (up, "launch", TWINS["up_forward"]),
    (linear, "launch", TWINS["grouped_mm"]),
    (fused, "launch", TWINS["down_forward_fused"]),
    (fused, "launch_dx", TWINS["up_backward_act_fused"]),
    (down_backward, "launch", TWINS["down_backward_act"]),
    (weight, "launch", weight_gradient),
    (hopper_backend, "launch_combine", TWINS["combine"]),
    (reduce, "launch_expert_row_sum", expert_row_sum),
    (reduce, "launch_bias_score_grad", TWINS["bias_score_grad"]),
)


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    """The launches are the twins, which see the dispatch instead of addresses; torch fills new memory with NaN."""

    def run(launch, twin, *args, **kwargs):
        inspect.signature(launch).bind(*args, **kwargs)  # the launch itself takes these arguments
        twin(*map(as_numpy, args), **{key: as_numpy(value) for key, value in kwargs.items()})  # outputs share memory

    for module, name, twin in LAUNCHES:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _real=real, _twin=twin, **k: run(_real, _twin, *a, **k))
    monkeypatch.setattr(weight, "workspace_elements", lambda product, where, shape: 24)
    monkeypatch.setattr(Dispatch, "where", (0, 0, 0), raising=False)
    monkeypatch.setattr(hopper_backend, "rows_of", lambda rows: rows)
    monkeypatch.setattr(steps, "backend_on", lambda *_, **__: hopper_backend)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def watch(monkeypatch):
    """``watch(module, name, function)``: call ``function`` with the arguments of each launch, before it."""

    def watch(module, name, look):
        real = getattr(module, name)

        def launch(*args, **kwargs):
            look(*args, **kwargs)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, launch)

    return watch


COMBINES = ("gather", "fused", "fused_both")
CASES = [(activation, "minimal", "sentinels") for activation in (*ACTIVATIONS, clamped_swiglu(0.5, 1.3))]
CASES += [("swiglu", save.value, routing) for save in SavePolicy for routing in ("fixed", "varying")]


@pytest.mark.parametrize(("activation", "save", "routing"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_the_oracle(make_case, activation, save, routing, bias):
    case = make_case(
        40, activation=activation, bias=bias, sentinels=routing == "sentinels", varying=routing == "varying", idle=(2,)
    )
    expected = case.reference()
    for combine in COMBINES:
        for workspace_bytes in (None,) if routing == "varying" else (None, 20_000):
            results = case.run(save=save, combine=combine, workspace_bytes=workspace_bytes)
            for got, reference_of_it in zip(results, expected, strict=True):
                # Some sums are left in float32: the fused output and dX, bias gradients.
                torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", "alternating(swiglu)", "relu2"])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_transposed_weights_are_read_where_they_lie(make_case, watch, activation, combine, workspace_bytes):
    """And their gradients lie likewise."""
    case, seen = make_case(40, activation=activation, bias=True, sentinels=True), set()
    expected = case.reference()
    for name in ("gate_up_proj", "down_proj"):
        setattr(case, name, getattr(case, name).detach().mT.contiguous().mT.requires_grad_())
    for module, name in (
        (up, "launch"),
        (linear, "launch"),
        (fused, "launch"),
        (fused, "launch_dx"),
        (down_backward, "launch"),
    ):
        watch(module, name, lambda a, weights, *args, **kwargs: seen.add(weights.data_ptr()))
    out, *gradients = case.run(combine=combine, workspace_bytes=workspace_bytes)
    for got, reference_of_it in zip([out, *gradients], expected, strict=True):
        torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert seen == {case.gate_up_proj.data_ptr(), case.down_proj.data_ptr()}
    assert all(gradients[i].stride() == case.parameters[i].stride() for i in (1, 2))


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_y_and_dx_rows_in_slices_of_columns(make_case, monkeypatch, watch, workspace_bytes):
    """Cut as by the rows at hand and the up projection's size; a slice is gone before the next one is there."""
    case, slices, asked, parts = make_case(40, bias=True, sentinels=True), (range(8), range(8, 16)), set(), []

    def column_slices(num_rows, width, gradient_bytes):
        asked.add((num_rows <= case.topk_experts.numel(), width, gradient_bytes))
        return slices

    def look(*args, out, **kwargs):
        assert out.shape[1] == 8 and not any(part() is not None for part in parts)
        parts.append(weakref.ref(out))

    monkeypatch.setattr(hopper_backend, "column_slices", column_slices)
    watch(linear, "launch", look)
    for got, reference_of_it in zip(case.run(workspace_bytes=workspace_bytes), case.reference(), strict=True):
        torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert asked == {(True, 16, case.gate_up_proj.nbytes)} and len(parts) >= 4


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24), (264, 264)])
def test_y_is_written_over_act_where_a_tile_has_whole_rows_of_both(make_case, watch, save, workspace_bytes, widths):
    """And where act is not saved."""
    case, over = make_case(40, *widths), []

    def look(a, *args, out, transposed=False, **kwargs):
        if not transposed:
            over.append(out.data_ptr() == a.data_ptr())

    watch(linear, "launch", look)
    results = case.run(save=save, workspace_bytes=workspace_bytes and workspace_bytes * widths[1] // 16)
    for got, reference_of_it in zip(results, case.reference(), strict=True):
        torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert set(over) == {widths == (16, 16) and save != "paper"}
    assert (len(over) == 1) == (workspace_bytes is None)


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("combine", COMBINES)
def test_where_there_are_rows_of_tokens_width(make_case, watch, combine, save, workspace_bytes):
    """(R, d): Y in forward and dX~ in backward, but where they are summed on the fly."""
    case, phase, found, rows = make_case(40, 16, 24), "forward", set(), set()

    def look(*args, **kwargs):
        dispatch = next(each for each in args if isinstance(each, Dispatch))
        rows.add(dispatch.num_rows)
        arrays = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        found.update(phase for each in arrays if each.shape == (dispatch.num_rows, 16))

    for module, name, _ in LAUNCHES:
        watch(module, name, look)
    out = case.forward(combine=combine, save=save, workspace_bytes=workspace_bytes)
    phase = "backward"
    torch.autograd.grad(out, case.parameters, case.d_out)
    assert found == {"gather": {"forward", "backward"}, "fused": {"backward"}, "fused_both": set()}[combine]
    assert (max(rows) < 120) == (workspace_bytes is not None)


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_a_chunks_act_is_gone_before_the_next_ones(make_case, watch, save):
    case, acts = make_case(40), []

    def look(*args, act, **kwargs):
        assert not any(kept() is not None for kept in acts)
        acts.append(weakref.ref(act))

    watch(up, "launch", look)
    case.forward(save=save, workspace_bytes=20_000)
    assert len(acts) > 1


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("watched", [None, "kept graph", "hooks", "profiler", "names missing"])
def test_h_is_written_over_only_where_it_cannot_be_noticed(
    make_case, monkeypatch, watch, save, workspace_bytes, watched
):
    case, over = make_case(40), []
    watch(down_backward, "launch", lambda d_out, w, h, *args, dh, **kwargs: over.append(dh.data_ptr() == h.data_ptr()))
    if watched == "names missing":  # those of torch's private ones that would tell
        monkeypatch.setattr(private, "AVAILABLE", False)
    with contextlib.ExitStack() as watching:
        if watched == "hooks":
            watching.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        if watched == "profiler":
            watching.enter_context(torch.profiler.profile())
        out = case.forward(save=save, workspace_bytes=workspace_bytes)
    once = torch.autograd.grad(out, case.parameters, case.d_out, retain_graph=watched == "kept graph")
    assert set(over) == {watched is None or save == "recompute"}
    for a, b in zip(once, case.reference()[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if watched == "kept graph":
        for a, b in zip(torch.autograd.grad(out, case.parameters, case.d_out), once, strict=True):
            assert torch.equal(a, b)
        assert over[-1]


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_a_backward_that_failed_halfway_is_not_run_again(make_case, monkeypatch, workspace_bytes):
    """By then H, or some of it, has been written over."""
    case = make_case(40)
    out = case.forward(workspace_bytes=workspace_bytes)

    def launch(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(linear, "launch", launch)
        with pytest.raises(MemoryError):
            torch.autograd.grad(out, case.parameters, case.d_out)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, case.parameters, case.d_out)


@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("routing", ["fixed", "varying", "elsewhere"])
def test_a_capacity(make_case, watch, capacity, routing):
    """H has so many rows, and what lies beyond is not computed; ``elsewhere``: K > E."""
    sizes = {"num_experts": 2, "top_k": 9} if routing == "elsewhere" else {}
    case, rows = make_case(40, **sizes, bias=True, varying=routing == "varying", capacity=capacity), set()
    watch(up, "launch", lambda *args, h, **kwargs: rows.add(h.shape[0]))
    expected = case.reference()
    for options in [{}, {"save": "recompute"}, {"combine": "fused"}, {"combine": "fused_both"}]:
        for got, reference_of_it in zip(case.run(**options), expected, strict=True):
            torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert rows == {min(case.options["row_capacity"], case.topk_experts.numel())}
    if routing != "varying":
        for got, reference_of_it in zip(case.run(workspace_bytes=40_000), expected, strict=True):
            torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)


def test_dispatch_gets_what_it_asks_for(make_case, monkeypatch):
    """(T, K) ids as they are, pairs as tokens with one expert each; int64 ids with a place for their copy; overflow where
    there are fewer rows than pairs."""
    case, varying = make_case(sentinels=True), make_case(varying=True)
    calls = []

    def array(address, size, dtype=np.int32):
        return np.frombuffer((ctypes.c_byte * (size * np.dtype(dtype).itemsize)).from_address(address), dtype)

    class Method:
        def __init__(self, capacity):
            self.capacity = capacity

        def workspace_bytes(self, *shape):
            return 4

        def run(self, ids, lists, workspace, num_tokens, top_k, num_experts, device, stream):
            assert stream == 7
            num_lists, num_pairs = len(lists) - (self.capacity is not None), num_tokens * top_k
            calls.append(((num_tokens, top_k), num_lists, self.capacity))
            ids = array(ids, num_pairs, np.int64 if num_lists == 4 else np.int32).reshape(num_tokens, top_k)
            twin = dispatch_twin.build_dispatch(ids, num_experts, row_capacity=self.capacity)
            names = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "token_expert_indices")
            for address, name in zip(lists[:num_lists], names, strict=False):
                array(address, getattr(twin, name).size)[:] = getattr(twin, name)

    for ids in (case.topk_experts, case.topk_experts.long(), varying.topk_experts):
        for chunk_tokens, capacity in ((0, None), (16, None), (0, 20), (16, 20)) if ids.dim() == 2 else ((0, None),):
            expected = torch.ops.blazeproto.dispatch(ids, 5, chunk_tokens, "torch", capacity)
            with monkeypatch.context() as patched:
                patched.setattr(build, "_method", lambda _, capacity: Method(capacity))
                patched.setattr(build.arrays, "current_stream", lambda array: 7)
                patched.setattr(chunks, "dispatch_backend", lambda *_: hopper_backend)
                got = torch.ops.blazeproto.dispatch(ids, 5, chunk_tokens, "hopper", capacity)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    whole, parts = ((37, 3), None), [((16, 3), None), ((16, 3), None), ((5, 3), None)]
    limited = ((37, 3), 20)  # in chunks it says which pairs run
    of_fixed = [(s, n, rows) for n in (3, 4) for s, rows in (whole, *parts, limited, limited, *parts)]
    assert calls == [*of_fixed, ((varying.topk_experts.shape[0], 1), 3, None)]


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [
        (torch.zeros(3, 2), 4),
        (torch.zeros(3, 2, dtype=torch.int16), 4),
        (torch.zeros(3, 0, dtype=torch.int32), 4),
        (torch.zeros(3, 2, dtype=torch.int32), 0),
    ],
)
def test_dispatch_refuses_what_its_kernels_would_misread(ids, num_experts):
    with pytest.raises(ValueError, match="topk_experts: expected int32 or int64"):
        hopper_backend.build_dispatch(ids, num_experts, (ids, ids, ids))


@pytest.mark.parametrize(("gpu", "entered"), [(0, []), (1, ["cuda:1"])])
def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch, gpu, entered):
    """With GPU 0 the current one: operators are called by the dispatcher, where theirs is another, and make it current."""
    made_current = []

    @contextlib.contextmanager
    def device(where):
        made_current.append(str(where))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        x = torch.empty(3, device=f"cuda:{gpu}")
    assert not private.unobserved((x,))  # a fake tensor is a mode's
    assert operators.on_another_gpu(x) == bool(entered)
    guarded = operators._on_its_gpu(lambda needs, *tensors: (needs, *tensors, list(made_current)))
    assert guarded([True], x, None) == ([True], x, None, entered)


def test_fake_tensors_of_a_gpu_need_none(make_case):
    case = make_case(dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, up_proj, down_proj, scores, experts = (
            torch.empty_like(t, device="cuda:1")
            for t in (case.x, case.gate_up_proj, case.down_proj, case.scores, case.topk_experts)
        )
        out = mlp.moe_mlp(x, up_proj, down_proj, scores, experts, num_experts=5)
    assert out.shape == x.shape and out.device == x.device


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("padding", [0, 5])
def test_rows_that_lie_by_expert(watch, save, padding):
    """As torchtitan has them; dH lies over H there too."""
    tensors, counts, d_out = grouped.inputs([5, 0, 20, 9], padding)
    given = [tensor.double() for tensor in tensors], counts, d_out.double()
    over = []
    watch(down_backward, "launch", lambda *args, dh, **kwargs: over.append(dh.data_ptr() == args[2].data_ptr()))
    got = grouped.results(grouped.grouped_experts, *given, save=save)
    wanted = grouped.results(grouped.by_loop, *given)
    wanted["x"][34:] = 0
    grouped.close(got, wanted)
    assert over == [True]


def with_factors(case, rank=8):
    """The case's options with factors, and the factors' tensors."""
    made = []
    for weight_ in (case.gate_up_proj, case.down_proj):
        num_experts, width_out, width_in = weight_.shape
        a, b = torch.randn(num_experts, rank, width_in), torch.randn(num_experts, width_out, rank)
        made.append(LowRank(*(t.double().div_(t.shape[2] ** 0.5).requires_grad_() for t in (a, b))))
    return {"up_factors": made[0], "down_factors": made[1]}, [t for pair in made for t in pair]


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 30_000])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("routing", ["sentinels", "varying", "capacity", "transposed"])
def test_low_rank_factors(make_case, watch, save, workspace_bytes, trained, routing):
    """The gradients are those of W + b a; dH lies over H on the same terms, and a frozen weight has no gradient launched."""
    if routing == "varying" and workspace_bytes:
        pytest.skip("chunks need a fixed K")
    options = {"capacity": 0.6} if routing == "capacity" else {} if routing == "transposed" else {routing: True}
    case = make_case(40, bias=True, **options)
    factors, leaves = with_factors(case)
    weights = [case.gate_up_proj, case.down_proj]
    dense = [w + pair.b @ pair.a for w, pair in zip(weights, factors.values(), strict=True)]
    case.gate_up_proj, case.down_proj = dense
    expected = moe_mlp_reference(case)
    wanted = torch.autograd.grad(expected, [case.x, case.scores, *leaves, *weights], case.d_out)
    case.gate_up_proj, case.down_proj = (
        (t.detach().mT.contiguous().mT if routing == "transposed" else t.detach()).requires_grad_(trained)
        for t in weights
    )
    over, gradients = [], []
    watch(down_backward, "launch", lambda d_out, w, h, *args, dh, **kwargs: over.append(dh.data_ptr() == h.data_ptr()))
    watch(weight, "launch", lambda *args, dw, **kwargs: gradients.append(dw.shape[1:]))
    out = case.forward(save=save, workspace_bytes=workspace_bytes, **factors)
    leaves = [case.x, case.scores, *leaves, *([case.gate_up_proj, case.down_proj] if trained else [])]
    got = torch.autograd.grad(out, leaves, case.d_out)
    for a, b in zip((out, *got), (expected, *wanted[: len(got)]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert set(over) == {True}
    assert len(gradients) == (6 if trained else 4) * len(over)


@pytest.mark.parametrize("workspace_bytes", [None, 30_000])
@pytest.mark.parametrize("transposed", [False, True])
def test_low_rank_factors_of_a_sum_on_the_fly(make_case, workspace_bytes, transposed):
    """Beside up_proj, as with "fused"."""
    case = make_case(40, bias=True, sentinels=True)
    factors, leaves = with_factors(case)
    factor, weight_ = factors["up_factors"], case.gate_up_proj
    case.gate_up_proj = weight_ + factor.b @ factor.a
    expected = moe_mlp_reference(case)
    wanted = torch.autograd.grad(expected, [case.x, *leaves[:2], weight_], case.d_out)
    case.gate_up_proj = (weight_.detach().mT.contiguous().mT if transposed else weight_.detach()).requires_grad_()
    for combine in COMBINES:
        out = case.forward(combine=combine, workspace_bytes=workspace_bytes, up_factors=factor)
        got = torch.autograd.grad(out, [case.x, *leaves[:2], case.gate_up_proj], case.d_out)
        for a, b in zip((out, *got), (expected, *wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def moe_mlp_reference(case):
    return reference_mlp(
        *(case.x, case.gate_up_proj, case.down_proj, case.scores, case.topk_experts),
        up_bias=case.up_bias,
        down_bias=case.down_bias,
        pair_tokens=case.varying.get("pair_tokens"),
        **case.options,
    )
