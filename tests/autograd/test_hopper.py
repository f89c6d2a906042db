"""``moe_mlp`` on the Hopper backend: the oracle, determinism, CUDA graphs, no host synchronisation, memory."""

import gc
import itertools

import pytest
import torch

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import SavePolicy, hopper_backend, saved_bytes
from tests.autograd.cases import WEIGHTS, assert_as_good_as, assert_close, assert_same_bits
from tests.autograd.test_against_reference import ROUTINGS
from tests.gpu import Captured, no_waiting
from tests.refusals import refuses

pytestmark = pytest.mark.gpu

MIB = 1 << 20


FUSED = ("fused", "fused_both")
SHAPE = (3000, 128, 96, 8, 3)


# ---- right answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("routing", "factors"),
    [
        *((routing, None) for routing in ROUTINGS),
        *(("sentinels", "both"), ("varying", "both"), ("fixed", "up"), ("sentinels", "down")),
    ],
)
def test_agrees_with_the_oracle(gpu_case, poisoned, activation, bias, routing, factors, backend):
    options = {"activation": activation, "bias": bias, "factors": factors, "rank": 16, **ROUTINGS[routing]}
    case = gpu_case(3500, 72, 40, 7, 3, idle=(2,), **options)
    assert_as_good_as(case.run(backend=backend), case.run(backend="torch"), case.reference())


ADAPTED = [
    {"factors": "both", "trained": (), "rank": rank, "factor_dtype": dtype}
    for rank in (1, 8, 16, 32, 72)
    for dtype in (torch.bfloat16, torch.float32)
]


@pytest.mark.parametrize(
    "shape", [(1, 64, 64, 1, 1), (37, 72, 40, 5, 3), (4096, 512, 2048, 4, 1), (2048, 256, 256, 128, 4)]
)
@pytest.mark.parametrize(
    ("save", "options"), [*((save, {}) for save in SavePolicy), *(("minimal", a) for a in ADAPTED)]
)
def test_shapes(gpu_case, poisoned, shape, save, options, backend):
    # The gradient of a lone token's score is one number, which may nearly cancel: many such cases are judged as one.
    cases = [gpu_case(*shape, **options) for _ in range(32 if shape[0] == 1 else 1)]
    runs = [(c.run(backend=backend, save=save), c.run(backend="torch", save=save), c.reference()) for c in cases]
    got, yardstick, exact = (
        [torch.stack(outputs) for outputs in zip(*of, strict=True)] for of in zip(*runs, strict=True)
    )
    assert_as_good_as(got, yardstick, exact)
    assert [t.dtype for t in got[1:]] == [p.dtype for p in cases[0].parameters]


def test_gradients_of_float32_factors_are_not_rounded(gpu_case, poisoned, backend):
    case = gpu_case(1000, 128, 96, 8, 3, factors="both", trained=(), factor_dtype=torch.float32)
    for gradient in case.run(backend=backend)[3:]:
        assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("workspace_bytes", [None, 2_000_000])
@pytest.mark.parametrize("trained", [(), WEIGHTS, ("down_proj",)])
def test_factors_with_policies_chunks_and_capacity(
    gpu_case, poisoned, save, capacity, workspace_bytes, trained, backend
):
    options = {"factors": "both", "rank": 16, "capacity": capacity, "trained": trained}
    case = gpu_case(3500, 72, 40, 7, 3, bias=True, sentinels=True, **options)
    got = case.run(backend=backend, save=save, workspace_bytes=workspace_bytes)
    yardstick = case.run(backend="torch", save=save, workspace_bytes=workspace_bytes)
    assert_as_good_as(got, yardstick, case.reference())
    assert_same_bits(got, case.run(backend=backend, save="minimal", workspace_bytes=workspace_bytes))


def test_nothing_as_large_as_a_frozen_weight_and_no_loop_over_experts(gpu_case, backend):
    """The largest allocation is Y or dX~, and H the least that has to be seen; kernels are fewer than experts."""
    case = gpu_case(512, 256, 96, 128, 8, factors="both", rank=16, trained=())
    case.run(backend=backend)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case.run(backend=backend)
            torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [event["size"] for trace in traces for event in trace if event["action"] == "alloc"]
    assert 2 * 512 * 8 * 2 * 96 <= max(sizes) < case.down_proj.nbytes
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 5 < len(kernels) < 64, kernels


@pytest.mark.parametrize("workspace_bytes", [None, 3_000_000])
@pytest.mark.parametrize("bias", [False, True])
def test_policies_agree_to_the_bit(gpu_case, poisoned, workspace_bytes, bias, backend):
    case = gpu_case(*SHAPE, bias=bias, sentinels=True)
    results = [case.run(save=save, backend=backend, workspace_bytes=workspace_bytes) for save in SavePolicy]
    for first, second in itertools.pairwise(results):
        assert_same_bits(first, second)


@pytest.mark.parametrize("save", SavePolicy)
def test_chunks_equal_the_whole(gpu_case, poisoned, save, backend):
    case = gpu_case(*SHAPE, bias=True, sentinels=True)
    whole = case.run(backend=backend, save=save)
    chunks = case.run(backend=backend, save=save, workspace_bytes=1_000_000)
    assert_same_bits(whole[:2], chunks[:2])  # out and dx: a row's sums do not depend on its neighbours
    assert_as_good_as(chunks, whole, case.reference())


@pytest.mark.parametrize("capacity", [None, 0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("routing", ["fixed", "sentinels", "varying", "elsewhere"])
def test_a_capacity(gpu_case, poisoned, capacity, routing, backend):
    """None, some and all rows over it; ``elsewhere``: K > E. A pair left out has a score's gradient of zero."""
    sizes = (3500, 72, 40, 2, 9) if routing == "elsewhere" else (3500, 72, 40, 7, 3)
    case = gpu_case(
        *sizes, bias=True, capacity=capacity, sentinels=routing == "sentinels", varying=routing == "varying"
    )
    expected, yardstick = case.reference(), case.run(backend="torch")
    for save in SavePolicy:
        for workspace_bytes in (None,) if routing == "varying" else (None, 1_000_000):
            got = case.run(backend=backend, save=save, workspace_bytes=workspace_bytes)
            assert_as_good_as(got, yardstick, expected)
            assert (got[4][expected[4] == 0] == 0).all()
    if capacity == 0:
        assert not any(t.any() for t in got)
    for combine in FUSED * (backend == "hopper"):
        assert_as_good_as(case.run(backend=backend, combine=combine), yardstick, expected)


@pytest.mark.parametrize("workspace_bytes", [None, 1_000_000])
def test_a_capacity_in_a_graph(gpu_case, workspace_bytes, backend):
    """Captured with a routing that fits, replayed with some that do not, and back."""
    options = {"backend": backend, "workspace_bytes": workspace_bytes, "row_capacity": 4500}
    case, many, few = (gpu_case(*SHAPE, bias=True) for _ in range(3))
    few.topk_experts[1200:] = -1
    captured = Captured(lambda: case.run(**options))
    for inputs, fits in ((few, True), (many, False), (few, True)):
        expected = inputs.run(**options)
        assert torch.equal(expected[0], inputs.forward(**{**options, "row_capacity": None})) == fits
        case.load(inputs)
        assert_same_bits(captured.replay(), expected)


def test_a_capacity_bounds_the_memory(gpu_case, backend):
    """An eighth of the rows: H, act and Y have no more."""
    case = gpu_case(8192, 256, 512, 4, 8)
    whole, limited = (peak_of(case, backend=backend, row_capacity=capacity) for capacity in (None, 8192))
    of_h = 2 * 2 * 512 * (8192 * 8 - 8192)
    assert whole - limited >= of_h


@pytest.mark.parametrize("combine", FUSED)
@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("shape", [SHAPE, (37, 72, 40, 5, 3), (700, 264, 40, 4, 1)])
@pytest.mark.parametrize("rank", [None, 8, 72])
def test_fused_combine(gpu_case, poisoned, shape, save, combine, rank):
    """Whole, in chunks, and where the graph is kept and backward runs twice; K = 1, too; factors of the up projection alone."""
    factors = {"factors": "up", "rank": rank} if rank else {}
    case = gpu_case(*shape, bias=True, sentinels=True, **factors)
    expected, yardstick = case.reference(), case.run(backend="torch")
    options = {"backend": "hopper", "combine": combine, "save": save}
    for workspace_bytes in (None, 300_000):
        assert_as_good_as(case.run(**options, workspace_bytes=workspace_bytes), yardstick, expected)
    out = case.forward(**options)
    for keep in (True, False):
        assert_as_good_as(case.gradients(out, retain_graph=keep), yardstick, expected)


@pytest.mark.parametrize("combine", FUSED)
@pytest.mark.parametrize("routing", ["varying", "idle"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_combine_of_other_routings_and_layouts(gpu_case, poisoned, combine, routing, transposed):
    options = {"varying": True} if routing == "varying" else {"idle": (0, 2)}
    case = gpu_case(3000, 200, 96, 8, 3, **options)
    if transposed:
        case.gate_up_proj, case.down_proj = (
            t.detach().mT.contiguous().mT.requires_grad_() for t in (case.gate_up_proj, case.down_proj)
        )
    assert_as_good_as(case.run(backend="hopper", combine=combine), case.run(backend="torch"), case.reference())


@pytest.mark.parametrize("combine", FUSED)
@pytest.mark.parametrize("workspace_bytes", [None, 3_000_000])
def test_fused_combine_captured_compiled_and_without_waiting(gpu_case, combine, workspace_bytes):
    options = {"backend": "hopper", "combine": combine, "workspace_bytes": workspace_bytes}
    case, other = (gpu_case(*SHAPE, bias=True) for _ in range(2))
    captured = Captured(lambda: case.run(**options))
    with no_waiting():
        case.run(**options)
    case.load(other)
    for _ in range(2):  # sums begin at zero each time
        assert_as_good_as(captured.replay(), other.run(backend="torch"), other.reference())
    torch.compiler.reset()
    out = torch.compile(lambda: case.forward(**options), fullgraph=True, backend="aot_eager")()
    assert_as_good_as(case.gradients(out), other.run(backend="torch"), other.reference())


@pytest.mark.parametrize("save", SavePolicy)
def test_fused_both_has_no_rows_of_tokens_width(gpu_case, save):
    """(T K, d) in bf16 would be more than all that forward or backward takes; "fused" has them in backward."""
    num_tokens, d, n, num_experts, top_k = 8192, 1024, 32, 8, 8
    case = gpu_case(num_tokens, d, n, num_experts, top_k)
    peaks = {}
    for combine in ("gather", *FUSED):
        peaks[combine] = peaks_of_phases(case, backend="hopper", combine=combine, save=save)
    rows = 2 * num_tokens * top_k * d
    assert [peak >= rows for peak in peaks["gather"]] == [True, True]
    assert [peak >= rows for peak in peaks["fused"]] == [False, True]
    assert [peak >= rows for peak in peaks["fused_both"]] == [False, False]


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("factors", [None, "both"])
def test_few_tokens(gpu_case, num_tokens, factors, backend):
    case = gpu_case(num_tokens, 64, 64, 5, 3, bias=True, factors=factors)
    out, *gradients = case.run(backend=backend)
    assert [g.shape for g in gradients] == [p.shape for p in case.parameters]
    assert all(t.isfinite().all() for t in (out, *gradients)) and (num_tokens or not any(g.any() for g in gradients))


def test_idle_experts_get_zeros(gpu_case, poisoned, backend):
    idle = [0, 2, 3, 5, 6, 7]
    case = gpu_case(500, 64, 64, 8, 2, idle=tuple(idle), bias=True, factors="both")
    for name, gradient in zip(case.trained, case.run(backend=backend)[1:], strict=True):
        if name not in ("x", "scores"):
            assert gradient[idle].abs().max() == 0 and gradient[[1, 4]].abs().max() > 0


def test_stride_zero_gradient_and_unaligned_input(gpu_case, backend):
    case = gpu_case(500, 64, 64, 8, 2)
    expanded = torch.autograd.grad(case.forward(backend=backend).sum(), case.parameters)
    case.d_out = torch.ones_like(case.d_out)
    expected = case.run(backend=backend)
    assert_same_bits(expanded, expected[1:])

    odd = torch.empty(500 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(500, 64)
    odd.copy_(case.x.detach())
    assert odd.data_ptr() % 16
    case.x = odd.requires_grad_()
    assert_same_bits(case.run(backend=backend), expected)


def test_autocast_and_float32_weight_gradients(gpu_case, backend):
    case = gpu_case(*SHAPE, dtype=torch.float32)
    case.d_out = case.d_out.bfloat16()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = case.forward(backend=backend)
    results = case.gradients(out)
    assert all(g.dtype == torch.float32 for g in results[1:])
    assert_close(results, case.reference(), 2e-2)

    case = gpu_case(*SHAPE)
    expected, in_bf16 = case.reference(), {name: case.run(backend=name) for name in (backend, "torch")}
    case.gate_up_proj, case.down_proj = (
        t.detach().float().requires_grad_() for t in (case.gate_up_proj, case.down_proj)
    )
    for workspace_bytes in (None, 3_000_000):
        for name, rounded in in_bf16.items():
            unrounded = case.run(backend=name, workspace_bytes=workspace_bytes)
            for fine, coarse, reference in zip(unrounded[2:4], rounded[2:4], expected[2:4], strict=True):
                assert fine.dtype == torch.float32 and not torch.equal(fine.bfloat16().float(), fine)
                assert (fine - reference).norm() <= (coarse - reference).norm()


@pytest.mark.parametrize("replaced", [{"dtype": torch.float32}, {"d_model": 20}, {"d_expert": 20}])
def test_what_cannot_run_raises_or_goes_to_torch(gpu_case, replaced, backend):
    sizes = {"num_tokens": 50, "d_model": 32, "d_expert": 32, "num_experts": 4, "top_k": 2}
    case = gpu_case(**{**sizes, **replaced})
    refuses(lambda: case.forward(backend=backend), "backend")
    assert_same_bits(case.run(backend="auto"), case.run(backend="torch"))


# ---- contracts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workspace_bytes", [None, 3_000_000])
@pytest.mark.parametrize("factors", [None, "both"])
def test_bit_identical_over_repeats(gpu_case, workspace_bytes, factors, backend):
    case = gpu_case(*SHAPE, bias=True, sentinels=True, factors=factors)
    first = case.run(backend=backend, workspace_bytes=workspace_bytes)
    for _ in range(20):
        assert_same_bits(first, case.run(backend=backend, workspace_bytes=workspace_bytes))


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("kind", ["whole", "chunks", "bias", "varying", "factors"])
def test_cuda_graph_replayed_with_another_routing(gpu_case, save, kind, backend):
    """Captured once, replayed with other tokens, scores and experts: the bits of an eager run."""
    options = {"save": save, "backend": backend, "workspace_bytes": 3_000_000 if kind == "chunks" else None}
    kinds = {"bias": kind == "bias", "varying": kind == "varying", "factors": "both" if kind == "factors" else None}
    case, other = gpu_case(*SHAPE, **kinds), gpu_case(*SHAPE, **kinds, idle=(1, 5))
    if kind == "varying":  # places for pairs are of a static number
        longest = max(case.scores.shape[0], other.scores.shape[0])
        for each in (case, other):
            missing = longest - each.scores.shape[0]
            each.scores = torch.nn.functional.pad(each.scores.detach(), (0, missing)).requires_grad_()
            each.topk_experts = torch.nn.functional.pad(each.topk_experts, (0, missing), value=-1)
            each.varying["pair_tokens"] = torch.nn.functional.pad(each.varying["pair_tokens"], (0, missing))
    captured = Captured(lambda: case.run(**options))
    for inputs in (other, gpu_case(*SHAPE, **kinds) if kind != "varying" else other):
        case.load(inputs)
        assert_same_bits(captured.replay(), inputs.run(**options))


@pytest.mark.parametrize("workspace_bytes", [None, 3_000_000])
@pytest.mark.parametrize("save", SavePolicy)
def test_never_waits_for_the_device(gpu_case, save, workspace_bytes, backend):
    case = gpu_case(*SHAPE, bias=True)
    options = {"save": save, "backend": backend, "workspace_bytes": workspace_bytes}
    case.run(**options)  # compiles
    with no_waiting():
        case.run(**options)


def test_torch_backend_never_waits_either(gpu_case):
    case = gpu_case(*SHAPE)
    case.run(backend="torch")
    with no_waiting():
        case.run(backend="torch")


@pytest.mark.parametrize("workspace_bytes", [None, 3_000_000])
@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("factors", [None, "both"])
def test_a_kept_graph_runs_backward_again(gpu_case, save, workspace_bytes, factors, backend):
    """Then H is not written over; the last backward lets go of it."""
    options = {"save": save, "backend": backend, "workspace_bytes": workspace_bytes}
    case = gpu_case(*SHAPE, factors=factors)
    expected, out = case.run(**options), case.forward(**options)
    for keep in (True, True, False):
        assert_same_bits(case.gradients(out, retain_graph=keep), expected)
    with pytest.raises(RuntimeError, match="second time"):
        case.gradients(out)


def test_runs_on_the_current_stream(gpu_case, backend):
    case = gpu_case(*SHAPE)
    expected = case.run(backend=backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what ran elsewhere would overtake this
        case.x.data.mul_(1)
        results = case.run(backend=backend)
    stream.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("workspace_bytes", [None, 2 * MIB])
def test_another_gpu_than_the_current_one(gpu_case, workspace_bytes, one_thread, backend):
    case = gpu_case(*SHAPE)
    expected = case.run(backend=backend, workspace_bytes=workspace_bytes)
    for name, tensor in list(vars(case).items()):
        if isinstance(tensor, torch.Tensor):
            setattr(case, name, tensor.detach().to("cuda:1").requires_grad_(tensor.requires_grad))
    with torch.autograd.set_multithreading_enabled(not one_thread):
        results = case.run(backend=backend, workspace_bytes=workspace_bytes)
    assert torch.cuda.current_device() == 0
    assert_same_bits([result.to("cuda:0") for result in results], expected)


@pytest.mark.parametrize("save", SavePolicy)
def test_weights_that_move_between_forward_and_backward(gpu_case, save, backend):
    case = gpu_case(*SHAPE)
    expected = case.run(backend=backend, save=save)
    out = case.forward(backend=backend, save=save)
    for weight in (case.gate_up_proj, case.down_proj):
        moved = weight.detach().clone()
        weight.data.fill_(torch.nan)
        weight.data = moved
    assert_same_bits(case.gradients(out), expected)


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("factors", [None, "both"])
def test_compiles_without_a_break(gpu_case, save, factors, backend):
    case = gpu_case(*SHAPE, bias=True, factors=factors)
    expected = case.run(save=save, backend=backend)
    torch.compiler.reset()
    compiled = torch.compile(lambda: case.forward(save=save, backend=backend), fullgraph=True, backend="aot_eager")
    assert_same_bits(case.gradients(compiled()), expected)


def test_any_subset_of_gradients(gpu_case, backend):
    case = gpu_case(300, 64, 64, 8, 2, bias=True)
    tensors, results = case.trained, dict(zip(("out", *case.trained), case.run(backend=backend), strict=True))
    for wanted in itertools.product([False, True], repeat=6):
        if any(wanted):
            for parameter, want in zip(tensors.values(), wanted, strict=True):
                parameter.requires_grad_(want)
            assert_same_bits(case.run(backend=backend), [results[name] for name in ("out", *case.trained)])


# ---- memory --------------------------------------------------------------------------------------------------------


def peaks_of_phases(case, **options):
    """Bytes at the highest points of forward and of backward, above what lies there before each."""
    case.run(**options)
    gc.collect()  # or what earlier tests have left may go in between
    made, peaks = [], []
    for phase in (lambda: made.append(case.forward(**options)), lambda: made.append(case.gradients(made[0]))):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        phase()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks


def peak_of(case, **options):
    """The same of both, above the inputs, with the output and all gradients kept."""
    case.run(**options)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.run(**options)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("save", SavePolicy)
def test_peak_memory(gpu_case, save, backend):
    num_tokens, d, n, num_experts, top_k = 65536, 256, 256, 16, 4
    case = gpu_case(num_tokens, d, n, num_experts, top_k)
    rows, item = num_tokens * top_k, 2
    saved = (
        saved_bytes(save, num_tokens=num_tokens, d_model=d, d_expert=n, num_experts=num_experts, top_k=top_k)
        - num_tokens * d * item
    )  # X is an input
    out, h, act, y = num_tokens * d * item, rows * 2 * n * item, rows * n * item, rows * d * item
    again = h if save == "recompute" else 0
    moments = (
        again + act,  # up forward
        act + (y if save == "paper" else 0) + out,  # down forward: Y over act where that isn't saved
        out + again + act + rows * 4 * 2,  # down backward: dH over H, A', dS and its partials
        out + again + y + out,  # up backward: dH, dX~, dX
    )
    assert peak_of(case, save=save, backend=backend) <= 1.03 * (saved + max(moments)) + 16 * MIB


def test_slices_of_columns_change_no_bit_and_lower_the_peak(gpu_case, monkeypatch, backend):
    num_tokens, d, n, num_experts, top_k = 16384, 1536, 64, 8, 4
    case = gpu_case(num_tokens, d, n, num_experts, top_k, bias=True)
    whole, peak_whole = case.run(backend=backend), peak_of(case, backend=backend)
    slices = (range(768), range(768, 1536))
    monkeypatch.setattr(hopper_backend, "column_slices", lambda *_: slices)
    assert_same_bits(case.run(backend=backend), whole)
    peak = peak_of(case, backend=backend)
    half_of_y = num_tokens * top_k * d
    assert peak <= peak_whole - 0.9 * half_of_y


def test_workspace_bounds_the_peak(gpu_case, backend):
    num_tokens, d, n, num_experts, top_k = 262144, 256, 256, 32, 4
    case = gpu_case(num_tokens, d, n, num_experts, top_k)
    weights = sum(w.numel() for w in (case.gate_up_proj, case.down_proj))
    for save in SavePolicy:
        kept = saved_bytes(save, num_tokens=num_tokens, d_model=d, d_expert=n, num_experts=num_experts, top_k=top_k)
        out_and_scores = num_tokens * d * 2 + num_tokens * top_k * 4  # X, an input, counts for dX
        gradients = 6 * weights  # bf16, and float32 while they are summed
        workspace = 64 * MIB
        peak = peak_of(case, save=save, backend=backend, workspace_bytes=workspace)
        assert peak <= kept + out_and_scores + gradients + 1.1 * workspace + 16 * MIB


def test_dispatch_operator_agrees_with_torchs(gpu_case):
    for num_tokens, num_experts, top_k in ((0, 4, 2), (1, 1, 1), (5000, 64, 8), (300, 512, 10)):
        case = gpu_case(num_tokens, 16, 16, num_experts, top_k, sentinels=True)
        for ids in (case.topk_experts, case.topk_experts.long()):
            ours = torch.ops.blazeproto.dispatch(ids, num_experts, 0, "hopper")
            theirs = torch.ops.blazeproto.dispatch(ids, num_experts, 0, "torch")
            assert_same_bits(ours, theirs)
