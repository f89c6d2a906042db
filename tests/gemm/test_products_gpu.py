"""Each product on the GPU against the float64 oracle, within the bounds of accuracy.py.

Outputs are poisoned with NaN before each run, rows of no pair in inputs and outputs alike.
"""

import ctypes
import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS, activate, clamped_swiglu
from blazeproto.gemm import Sizes, tickets
from blazeproto.gemm import product as products
from blazeproto.gemm.combine import kernel as combine_kernel
from blazeproto.gemm.compile import compile_many
from blazeproto.gemm.tiles import BM, FORCED, OF_AMPERE, TUNED, force
from blazeproto.lab import calls
from blazeproto.lab.accuracy import Pool, worst_mismatches
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import (
    EXACT,
    ROUTINGS,
    YARDSTICK,
    dispatch_fixed,
    evaluate,
    make_case,
    run_kernels,
    stray_writes,
)
from blazeproto.lab.same_bits import wrong_in_order, wrong_in_place
from blazeproto.runtime.arch import AMPERE, HOPPER, arch_on
from tests.gpu import Captured, passes_for
from tests.locks import alone

pytestmark = pytest.mark.gpu

SHAPES = [
    Sizes(1, 64, 64, 1, 1),
    Sizes(37, 72, 40, 5, 3),
    Sizes(4096, 512, 2048, 4, 1),
    Sizes(4608, 2880, 2880, 72, 4),  # weights over 2**31 bytes, gradients in fp32 over 2**32
    Sizes(8192, 2048, 512, 512, 10),
    Sizes(4096, 1536, 512, 40, 8),
]
SMALL = Sizes(300, 136, 72, 7, 3)  # tails in every direction
WIDTHS = (8, 40, 64, 136, 256, 768, 1536, 2880, 4096, 6152)
TOP_KS = (1, 2, 3, 4, 6, 8, 16, 17, 40)
POOLED_ELEMENTS, MOST_SEEDS = 10_000, 160
LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All kernels at once, in parallel processes, instead of one by one as the tests meet them: of pytest's processes the first
    compiles, and the others find them in the cache."""
    of_combine = [combine_kernel(d, k, scores) for d in WIDTHS for k in (0, *TOP_KS) for scores in (False, True)]
    with alone("compile"):
        compile_many([*gemm.all_kernels(), *of_combine])


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend's, with the tiles that `force` takes."""
    backend, tiles = request.param
    if backend == "ampere":
        monkeypatch.setattr(calls, "LAYER", tuple(call for call in calls.LAYER if "fused" not in call.product))
    force(**tiles)
    with passes_for(backend):
        yield
    force()


def of(*params: tuple[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """The test runs with each of these `kernels`."""
    ids = [" ".join((backend, *tiles)) for backend, tiles in params]
    return pytest.mark.parametrize("kernels", params, ids=ids, indirect=True)


BACKENDS = of(("hopper", {}), ("ampere", {}))
EVERY_TILES = of(*(("hopper", tiles) for tiles in FORCED), ("ampere", {}))


def check_products(
    shape: Sizes, routing: str = "uniform", *, configs: dict | None = None, counts: tuple[int, ...] = (), **options
) -> None:
    """Every product of a layer, each fed with the yardstick's inputs, over seeds until small outputs are big enough to judge.

    counts: rows of each expert, where K is 1, instead of a routing.
    """
    pool, seeds = Pool(), max(1, min(MOST_SEEDS, POOLED_ELEMENTS // max(1, shape.T * shape.d)))
    report: list[str] = []
    for seed in range(seeds):
        case = make_case(shape, routing, seed=seed, **options)
        if counts:
            experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            shuffled = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed))]
            dispatch = dispatch_fixed(shuffled.int().cuda()[:, None], len(counts), None)
            case = dataclasses.replace(case, dispatch=dispatch)
        given = evaluate(YARDSTICK, case)
        result = run_kernels(case, given, configs)
        report += [f"seed {seed}: {line}" for line in stray_writes(case, result)]
        if configs is None:
            lines = [*wrong_in_order(case, given, result), *wrong_in_place(case, given, result)]
            report += [f"seed {seed}: {line}" for line in lines]
        exact = evaluate(EXACT, case, given)
        pool.add_all(result, given, {name: exact[name] for name in result})
    for failure in pool.failures():  # the places are the last seed's
        name = failure.partition(":")[0]
        report += [failure, *worst_mismatches(result[name][: len(exact[name])], exact[name])]
    assert not report, "\n".join(report)


@BACKENDS
@pytest.mark.much_gpu_memory
@pytest.mark.timeout(600)  # with the wait for the others
@pytest.mark.parametrize("routing", ["uniform", "zipf", "same"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_routings(kernels: None, shape: Sizes, routing: str) -> None:
    check_products(shape, routing)


@BACKENDS
@pytest.mark.parametrize("routing", ROUTINGS)
def test_unit_weights(kernels: None, routing: str) -> None:
    check_products(SMALL, routing, unit_weights=True)


@BACKENDS
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
def test_activations(kernels: None, activation: str, biases: bool) -> None:
    check_products(SMALL, activation=activation, biases=biases)


@BACKENDS
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("varying", [False, True], ids=["sentinels", "varying"])
def test_pairs_without_a_row(kernels: None, share: float, varying: bool) -> None:
    check_products(SMALL, "zipf", sentinels=share, varying=varying, biases=True)


@EVERY_TILES
@pytest.mark.parametrize(("d", "n"), [(576, 328), (776, 136), (256, 640)])
def test_rows_that_end_in_every_strip(kernels: None, d: int, n: int) -> None:
    """Experts that end in the first or the second strip of a tile, after groups of tiles too; an odd number of columns."""
    counts = (1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 1024, 1025, 1088, 1089, 40, 0)
    check_products(Sizes(sum(counts), d, n, len(counts), 1), counts=counts, biases=True)


@EVERY_TILES
def test_experts_left_empty(kernels: None) -> None:
    check_products(SMALL, "half_empty", biases=True)


@BACKENDS
def test_wide_top_k(kernels: None) -> None:
    check_products(Sizes(65, 128, 64, 48, 40), biases=True)


@BACKENDS
@pytest.mark.parametrize("product", gemm.TILES)
def test_every_tile_configuration(kernels: None, product: str) -> None:
    widths = OF_AMPERE if product in TUNED else (256,)
    configs = gemm.candidates(product) if arch_on(0) is HOPPER else [OF_AMPERE[width] for width in widths]
    for config in configs:
        check_products(Sizes(1500, 200, 328, 5, 2), "zipf", configs={product: config})


@BACKENDS
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_no_tokens(kernels: None, biases: bool) -> None:
    case = make_case(Sizes(0, 64, 128, 4, 2), biases=biases)
    result = run_kernels(case)
    assert result["out"].shape == result["dx"].shape == (0, 64)
    for name in ("d_up", "d_down", "d_up_f32", "d_down_f32") + (("d_up_bias", "d_down_bias") if biases else ()):
        assert (result[name] == 0).all(), name


@BACKENDS
def test_weight_gradients_accumulate_in_fp32(kernels: None) -> None:
    case = make_case(SMALL, "half_empty")
    given = evaluate(YARDSTICK, case)
    for name, function, args in (
        ("d_down", gemm.down_backward_weight, (case.d_out, given["a_scaled"])),
        ("d_up", gemm.up_backward_weight, (given["dh"], case.x)),
    ):
        once = function(*args, case.dispatch, dw=torch.full_like(given[name], torch.nan, dtype=torch.float32))
        twice = function(*args, case.dispatch, dw=once.clone(), accumulate=True)
        torch.testing.assert_close(twice, 2 * once, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cluster", [2, 1])
def test_reductions_over_many_rows_are_shared(cluster: int) -> None:
    """One expert has two fifths of all rows: its tiles are made in partials by several CTAs, and summed in a fixed order."""
    config = gemm.TileConfig(cluster=cluster)
    case = make_case(Sizes(120_000, 264, 136, 6, 2), "zipf")
    given = evaluate(YARDSTICK, case)
    for product, name, operands in (
        ("down_backward_weight", "d_down", (case.d_out, given["a_scaled"])),
        ("up_backward_weight", "d_up", (given["dh"], case.x)),
    ):
        dw = torch.empty_like(given[name], dtype=torch.float32)
        elements = gemm.weight_workspace(product, dw, case.dispatch, config)
        units = elements // (2 * cluster * BM * config.tile_n)  # weight_schedule.cuh draws the workspace
        workspace = torch.empty(elements, device="cuda")
        function = partial(getattr(gemm, product), *operands, case.dispatch, workspace=workspace, config=config)

        once = function(dw=dw.fill_(torch.nan)).clone()
        assert (workspace[: 2 * units].view(torch.int32) >= 0).any(), "nothing was shared"
        assert torch.equal(function(dw=dw.fill_(torch.nan)), once)
        torch.testing.assert_close(function(dw=dw, accumulate=True), 2 * once, rtol=1e-6, atol=1e-6)

        exact = evaluate(EXACT, case, given)[name]
        # wgmma rounds every addition towards zero: 3000 of them, one a BK / 4 rows, 2^-24 each.
        assert torch.linalg.vector_norm(once - exact) < 3000 * 2**-24 * torch.linalg.vector_norm(exact)
        low = function(dw=torch.full_like(given[name], torch.nan))
        torch.testing.assert_close(low, once.to(torch.bfloat16), rtol=2**-8, atol=0)


def _same_bits(result: dict, other: dict) -> None:
    for name in result.keys() - {"fused", "dx_fused"}:  # which are added by atomics, as their names warn
        a, b = (torch.nan_to_num(r[name], nan=12345.0) for r in (result, other))
        assert torch.equal(a, b), f"{name} differs"


@EVERY_TILES
@pytest.mark.parametrize("shape", [Sizes(4096, 1536, 512, 40, 8), SMALL], ids=str)
def test_twenty_repeats_have_the_same_bits(kernels: None, shape: Sizes) -> None:
    case = make_case(shape, "zipf", biases=True)
    given = evaluate(YARDSTICK, case)
    first = run_kernels(case, given)
    for _ in range(20):
        _same_bits(run_kernels(case, given), first)


@EVERY_TILES
def test_delays_change_nothing(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sleeps around every barrier: what a race would get wrong."""
    case = make_case(Sizes(2000, 256, 384, 6, 2), "zipf", biases=True)
    given = evaluate(YARDSTICK, case)
    calm = run_kernels(case, given)
    monkeypatch.setattr(products, "DEBUG", ("INJECT_DELAYS",))
    for _ in range(3):
        _same_bits(run_kernels(case, given), calm)


@of(("hopper", {}))
def test_tickets_leave_the_bits_and_their_counters_as_they_are(kernels: None) -> None:
    """Twelve launches of each product, four streams at once, and a graph that is replayed meanwhile."""
    import cupy

    case = make_case(Sizes(2000, 1032, 264, 40, 2), "zipf", biases=True)
    given = evaluate(YARDSTICK, case)
    force(tickets=False)
    expected = run_kernels(case, given)
    force(tickets=True)
    captured = Captured(lambda: run_kernels(case, given))
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(3):
        captured.graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run_kernels(case, given))
    torch.cuda.synchronize()
    for result in (captured.results, *results):
        _same_bits(result, expected)
    of_device = tickets.counters(torch.cuda.current_device())
    memory = cupy.cuda.UnownedMemory(of_device.address, tickets.COUNTERS * 4, of_device)
    assert not cupy.ndarray(tickets.COUNTERS, "int32", cupy.cuda.MemoryPointer(memory, 0)).any()


@of(("hopper", {"tickets": False}), ("hopper", {"tickets": True}), ("ampere", {}))
def test_graph_replays_another_routing(kernels: None) -> None:
    """Captured once, replayed with other tokens and another routing written into the same arrays."""
    case, other = (
        make_case(SMALL, routing, biases=True, seed=seed) for seed, routing in enumerate(("uniform", "zipf"))
    )
    captured = Captured(lambda: run_kernels(case))
    for mine, its in zip(_tensors(case), _tensors(other), strict=True):
        mine.copy_(its)
    captured.graph.replay()
    _same_bits(captured.results, run_kernels(other))


def _tensors(case: Case) -> list[torch.Tensor]:
    """What the kernels read."""
    inputs = [case.x, case.up_proj, case.down_proj, case.scores, case.d_out, case.up_bias, case.down_bias]
    return [t for t in (*inputs, *case.dispatch.arrays.values()) if isinstance(t, torch.Tensor)]


@BACKENDS
def test_past_two_to_the_31_elements(kernels: None) -> None:
    """H has 2.2·10⁹ elements; the last rows, whose offsets need more than 32 bits, are checked."""
    tokens, d, n, experts, top_k = 270_336, 64, 1024, 4, 4
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    case = make_case(Sizes(tokens, d, n, experts, top_k), "same")
    assert tokens * top_k * 2 * n > 2**31
    dispatch, num_rows, last = case.dispatch, tokens * top_k, slice(-4096, None)
    row_options = {"dtype": torch.bfloat16, "device": "cuda"}
    h, act = torch.empty(num_rows, 2 * n, **row_options), torch.empty(num_rows, n, **row_options)
    gemm.up_forward(case.x, case.up_proj, dispatch, h=h, act=act)
    dh, a_scaled, d_scores = torch.empty_like(h), torch.empty_like(act), torch.empty_like(case.scores)
    workspace = torch.empty(gemm.score_partials(n), num_rows, device="cuda")
    gemm.down_backward_act(
        case.d_out,
        case.down_proj,
        h,
        case.scores,
        dispatch,
        dh=dh,
        a_scaled=a_scaled,
        d_scores=d_scores,
        workspace=workspace,
    )
    dx_rows = gemm.up_backward_act(dh, case.up_proj, dispatch, dx_rows=torch.empty(num_rows, d, **row_options))
    d_up = gemm.up_backward_weight(dh, case.x, dispatch, dw=torch.empty_like(case.up_proj))
    h_by_token = gemm.combine(h, dispatch, out=torch.empty(tokens, 2 * n, **row_options))

    tokens_of, pairs = case.row_token[last], case.row_pair[last]
    expert = int(case.row_expert[-1])
    x64, d_out64 = case.x[tokens_of].double(), case.d_out[tokens_of].double()
    h64 = h[last].double().requires_grad_()
    act64 = activate(h64, "swiglu")
    d_act64 = d_out64 @ case.down_proj[expert].double()
    dh64 = torch.autograd.grad(act64, h64, case.scores[pairs, None] * d_act64)[0]
    act64 = act64.detach()
    of_expert = slice(int(dispatch.expert_token_offsets[expert]), None)
    dh_of_expert, x_of_expert = dh[of_expert].T, case.x[case.row_token[of_expert]]
    score = case.scores[pairs, None]
    expected = {
        "h": (h[last], x64 @ case.up_proj[expert].double().T),
        "act": (act[last], act64),
        "dh": (dh[last], dh64),
        "a_scaled": (a_scaled[last], score * act64, score * act64.bfloat16()),
        "d_scores": (d_scores[pairs].bfloat16(), (d_act64 * act64).sum(dim=1)),
        "dx_rows": (dx_rows[last], dh[last].double() @ case.up_proj[expert].double()),
        "d_up": (d_up[expert], dh_of_expert.double() @ x_of_expert.double(), dh_of_expert @ x_of_expert),
        "combine": (
            h_by_token[-64:],
            h[dispatch.token_index_map[-64 * top_k :].long()].double().view(64, top_k, -1).sum(1),
        ),
    }
    pool = Pool()
    for name, (got, want, *yardstick) in expected.items():  # the yardstick: one rounding, if nothing else is said
        pool.add(name, got, (yardstick[0] if yardstick else want).bfloat16(), want)
    assert pool.failures() == []


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("top_k", TOP_KS)
def test_combine_widths(d: int, top_k: int) -> None:
    """Against fp32 in slot order, to the bit of the last rounding; with sentinels, in both numberings of the pairs."""
    shape, generator = Sizes(77, d, 8, 48, top_k), torch.Generator("cuda").manual_seed(d)
    for varying in (False, True):
        case = make_case(shape, sentinels=0.2, varying=varying)
        y = torch.randn(case.dispatch.num_rows, d, device="cuda", generator=generator).bfloat16()
        y[len(case.row_pair) :] = torch.nan
        for scores in (None, case.scores):
            out = gemm.combine(y, case.dispatch, scores=scores, out=torch.full_like(case.x, torch.nan))
            want = EXACT.over(case).combine(y[: len(case.row_pair)], scores)
            torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("width", [8, 72, 256, 2880])
def test_expert_row_sums(width: int) -> None:
    case = make_case(Sizes(3000, width, 8, 9, 3), "zipf", sentinels=0.1)
    dispatch, used = case.dispatch, len(case.row_pair)
    values = torch.randn(dispatch.num_rows, width, device="cuda").bfloat16()
    values[used:] = torch.nan
    by_row = gemm.expert_row_sum(values, dispatch, out=torch.full((9, width), torch.nan, device="cuda"))
    m = EXACT.over(case)
    want = m.expert_sum(values[:used])
    torch.testing.assert_close(by_row.double(), want, rtol=1e-5, atol=1e-4)
    twice = gemm.expert_row_sum(values, dispatch, out=by_row.clone(), accumulate=True)
    torch.testing.assert_close(twice, 2 * by_row)
    gathered = gemm.expert_row_sum(
        case.d_out, dispatch, gather=True, scores=case.scores, out=torch.empty(9, width, device="cuda")
    )
    want = m.expert_sum(m.of_rows(case.scores) * m.gather(case.d_out))
    torch.testing.assert_close(gathered.double(), want, rtol=1e-5, atol=1e-4)


@BACKENDS
@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
def test_nan_in_a_row_shows_in_what_is_made_of_it(kernels: None, activation: str) -> None:
    """And in no other row: an activation that compares must not lose it."""
    case = make_case(SMALL, activation=activation)
    case.x[5] = torch.nan
    h, act = gemm.up_forward(
        case.x,
        case.up_proj,
        case.dispatch,
        activation=activation,
        h=torch.zeros(case.dispatch.num_rows, case.up_proj.shape[1], device="cuda", dtype=torch.bfloat16),
        act=torch.zeros(case.dispatch.num_rows, case.down_proj.shape[2], device="cuda", dtype=torch.bfloat16),
    )
    of_token = case.row_token == 5
    dh, a_scaled, d_scores = (torch.zeros_like(t) for t in (h, act, case.scores))
    outputs = {"dh": dh, "a_scaled": a_scaled, "d_scores": d_scores}
    gemm.down_backward_act(case.d_out, case.down_proj, h, case.scores, case.dispatch, activation=activation, **outputs)
    for name, made in {"act": act, "a_scaled": a_scaled, "d_scores": d_scores[case.row_pair][:, None]}.items():
        assert made[of_token].isnan().all() and made[~of_token].isfinite().all(), name


# --- What saves the layer memory, to the bit, at shapes of their own: Y over act, and slices of columns ------------------


def rows_like(case: Case, width: int) -> torch.Tensor:
    """Random (R, width), with NaN in rows without a pair."""
    made = torch.randn(case.dispatch.num_rows, width, device="cuda").bfloat16()
    made[len(case.row_pair) :] = torch.nan
    return made


@BACKENDS
@pytest.mark.parametrize("width", [8, 136, 256])
@pytest.mark.parametrize("biases", [False, True])
def test_y_may_lie_over_act(kernels: None, width: int, biases: bool) -> None:
    """Where a tile has whole rows of both. At an expert's end a neighbour reads rows it writes, and makes nothing of them."""
    case = make_case(Sizes(9000, width, width, 37, 3), "zipf", biases=biases, sentinels=0.1)
    act, used = rows_like(case, width), len(case.row_pair)
    apart = gemm.down_forward(
        act, case.down_proj, case.dispatch, bias=case.down_bias, y=torch.full_like(act, torch.nan)
    )
    for _ in range(5):
        over = act.clone()
        gemm.down_forward(over, case.down_proj, case.dispatch, bias=case.down_bias, y=over)
        assert torch.equal(over[:used], apart[:used]) and over[used:].isnan().all()


SLICES = (range(512), range(512, 768), range(768, 1000)), (range(1000),), (range(8), range(8, 520), range(520, 1000))


@BACKENDS
@pytest.mark.parametrize("slices", SLICES, ids=len)
@pytest.mark.parametrize("biases", [False, True])
def test_slices_of_columns_are_the_whole(kernels: None, slices: tuple[range, ...], biases: bool) -> None:
    d, n = 1000, 136
    case = make_case(Sizes(2000, d, n, 11, 3), "zipf", biases=biases, sentinels=0.1)
    act, dh, used = rows_like(case, n), rows_like(case, 2 * n), len(case.row_pair)
    products = (
        lambda columns, out: gemm.down_forward(
            act, case.down_proj, case.dispatch, bias=case.down_bias, columns=columns, y=out
        ),
        lambda columns, out: gemm.up_backward_act(dh, case.up_proj, case.dispatch, columns=columns, dx_rows=out),
    )
    for product in products:
        whole = product(None, rows_like(case, d))
        out = gemm.combine(whole, case.dispatch, scores=case.scores, out=torch.full_like(case.x, torch.nan))
        by_slices = torch.full_like(out, torch.nan)
        for columns in slices:
            part = product(columns, rows_like(case, len(columns)))
            assert torch.equal(part[:used], whole[:used, columns.start : columns.stop])
            gemm.combine(part, case.dispatch, scores=case.scores, columns=columns, out=by_slices)
            assert by_slices[:, columns.stop :].isnan().all()
        assert torch.equal(by_slices, out)


KERNELS = [kernel for kernel in gemm.all_kernels() if kernel.arch is AMPERE]


@pytest.mark.parametrize("kernel", KERNELS, ids=[f"{index}-{kernel.entry}" for index, kernel in enumerate(KERNELS)])
def test_the_driver_leaves_no_local_memory(kernel: gemm.Kernel) -> None:
    """What runs may be compiled from PTX by the driver, whose register allocation is its own."""
    found = ctypes.c_int(-1)
    asked = ctypes.byref(found), LOCAL_SIZE_BYTES, ctypes.c_void_p(kernel.handle(0))
    assert ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(*asked) == 0 and found.value == 0
