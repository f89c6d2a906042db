"""The Hopper backend's order of products, with the kernels' NumPy twins in their place, so that a CPU can run it.

In float64, and with every buffer that the twins do not write full of NaN. What is tested is which product gets which array,
not the kernels.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blazeproto import dispatch, gemm
from blazeproto.autograd import SavePolicy, chunked, experts, hopper_products, library, mlp
from blazeproto.dispatch import build
from blazeproto.gemm import reference, unchecked
from blazeproto.reference import ACTIVATIONS

PRODUCTS = (
    "up_forward",
    "down_forward",
    "down_forward_fused",
    "down_backward_act",
    "down_backward_weight",
    "up_backward_act",
    "up_backward_weight",
    "combine",
    "expert_row_sum",
    "bias_score_grad",
)


def as_numpy(value):
    if isinstance(value, gemm.Rows):
        return gemm.Rows(*(as_numpy(field) for field in value))
    return value.detach().numpy() if isinstance(value, Tensor) else value


def run_twin(name, signature, *args, **kwargs):
    signature.bind(*args, **kwargs)  # the kernel's own signature takes these arguments
    arguments = {key: as_numpy(value) for key, value in kwargs.items() if key != "f32"}  # a twin sees the dtype
    getattr(reference, name)(*map(as_numpy, args), **arguments)  # writes into the outputs, which share memory


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    for name in PRODUCTS:
        signature = inspect.signature(getattr(unchecked, name))
        monkeypatch.setattr(unchecked, name, partial(run_twin, name, signature))
    monkeypatch.setattr(unchecked, "weight_workspace", lambda product, rows, shape: 24)
    monkeypatch.setattr(hopper_products, "rows_for", lambda rows: gemm.Rows(*rows))
    for module in (experts, chunked):
        monkeypatch.setattr(module, "products_for", lambda *_: hopper_products)
    real = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *size, **options: poison(real(self, *size, **options)),
    )


def poison(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**31))


CASES = [(activation, "minimal", "sentinels") for activation in ACTIVATIONS]
CASES += [("swiglu", save.value, routing) for save in SavePolicy for routing in ("fixed", "varying")]


@pytest.mark.parametrize(("activation", "save", "routing"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_the_oracle(make_case, activation, save, routing, bias):
    case = make_case(
        40, activation=activation, bias=bias, sentinels=routing == "sentinels", varying=routing == "varying", idle=(2,)
    )
    expected = case.reference()
    for combine in ("gather", "fused"):
        for workspace_bytes in (None,) if routing == "varying" else (None, 20_000):
            results = case.run(save=save, combine=combine, workspace_bytes=workspace_bytes)
            for got, reference_of_it in zip(results, expected, strict=True):
                # Some sums are left in float32: the fused output, bias gradients.
                torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_y_and_dx_rows_in_slices_of_columns(make_case, monkeypatch, workspace_bytes):
    """Cut as by the rows at hand and the up projection's size; a slice is gone before the next one is there."""
    case, slices, asked, parts = make_case(40, bias=True, sentinels=True), (range(8), range(8, 16)), set(), []

    def column_slices(num_rows, width, gradient_bytes):
        asked.add((num_rows <= case.topk_experts.numel(), width, gradient_bytes))
        return slices

    real_new_empty = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        made = real_new_empty(self, *size, **options)
        if len(size) == 2 and size[1] == 8:
            assert not any(part() is not None for part in parts)
            parts.append(weakref.ref(made))
        return made

    monkeypatch.setattr(hopper_products, "column_slices", column_slices)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for got, reference_of_it in zip(case.run(workspace_bytes=workspace_bytes), case.reference(), strict=True):
        torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert asked == {(True, 16, case.gate_up_proj.nbytes)} and len(parts) >= 4


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24), (264, 264)])
def test_y_is_written_over_act_where_a_tile_has_whole_rows_of_both(
    make_case, monkeypatch, save, workspace_bytes, widths
):
    """And where nobody keeps act: chunks copy what they save of it."""
    case, over = make_case(40, *widths), []
    real = unchecked.down_forward

    def down_forward(*args, **kwargs):
        over.append(kwargs["y"].data_ptr() == args[0].data_ptr())
        return real(*args, **kwargs)

    monkeypatch.setattr(unchecked, "down_forward", down_forward)
    results = case.run(save=save, workspace_bytes=workspace_bytes and workspace_bytes * widths[1] // 16)
    for got, reference_of_it in zip(results, case.reference(), strict=True):
        torch.testing.assert_close(got, reference_of_it, rtol=1e-5, atol=1e-5)
    assert set(over) == {widths == (16, 16) and (save != "paper" or workspace_bytes is not None)}
    assert (len(over) == 1) == (workspace_bytes is None)


@pytest.mark.parametrize("save", SavePolicy)
def test_a_chunks_act_is_gone_before_the_next_ones(make_case, monkeypatch, save):
    case, acts = make_case(40), []
    real = unchecked.up_forward

    def up_forward(*args, **kwargs):
        assert not any(act() is not None for act in acts)
        acts.append(weakref.ref(kwargs["act"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(unchecked, "up_forward", up_forward)
    case.forward(save=save, workspace_bytes=20_000)
    assert len(acts) > 1


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("watched", [None, "kept graph", "hooks", "profiler"])
def test_h_is_written_over_only_where_nobody_can_tell(make_case, monkeypatch, save, workspace_bytes, watched):
    case, over = make_case(40), []
    real = unchecked.down_backward_act

    def down_backward_act(*args, **kwargs):
        over.append(kwargs["dh"].data_ptr() == args[2].data_ptr())
        return real(*args, **kwargs)

    monkeypatch.setattr(unchecked, "down_backward_act", down_backward_act)
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

    def up_backward_act(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(unchecked, "up_backward_act", up_backward_act)
        with pytest.raises(MemoryError):
            torch.autograd.grad(out, case.parameters, case.d_out)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, case.parameters, case.d_out)


def test_dispatch_gets_what_it_asks_for(make_case, monkeypatch):
    """(T, K) ids as they are, pairs as tokens with one expert each; int64 ids with a place for their copy."""
    case, varying = make_case(sentinels=True), make_case(varying=True)
    calls = []

    def build_dispatch_unchecked(ids, num_experts, out, stream):
        assert ids.is_contiguous() and stream == 7
        calls.append((tuple(ids.shape), len(out)))
        signature.bind(ids, num_experts, out, stream)
        twin = dispatch.reference.build_dispatch(ids.numpy(), num_experts)
        names = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "token_expert_indices")
        for tensor, name in zip(out, names, strict=False):
            tensor.copy_(torch.from_numpy(getattr(twin, name)))

    signature = inspect.signature(build.build_dispatch_unchecked)
    for ids in (case.topk_experts, case.topk_experts.long(), varying.topk_experts):
        expected = torch.ops.blazeproto.dispatch(ids, 5, "torch")
        with monkeypatch.context() as patched:
            patched.setattr(hopper_products, "build_dispatch_unchecked", build_dispatch_unchecked)
            patched.setattr(hopper_products, "current_stream", lambda array: 7)
            patched.setattr(library, "has_dispatch_kernels", lambda *_: True)
            got = torch.ops.blazeproto.dispatch(ids, 5, "hopper")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert calls == [((37, 3), 3), ((37, 3), 4), ((varying.topk_experts.shape[0], 1), 3)]


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
        hopper_products.build_dispatch(ids, num_experts, (ids, ids, ids))


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
    assert library.caller(x) is library._call  # a fake tensor is a mode's
    monkeypatch.setattr(library, "_unheard", lambda tensors: True)
    assert library.caller(x) is (library._call if entered else library._call_directly)
    guarded = library._on_its_gpu(lambda needs, *tensors: (needs, *tensors, list(made_current)))
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
