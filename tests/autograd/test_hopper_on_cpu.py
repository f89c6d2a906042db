"""The Hopper backend's order of products, with the kernels' NumPy twins in their place, so that a CPU can run it.

In float64, and with every buffer that the twins do not write full of NaN. What is tested is which product gets which array,
not the kernels.
"""

import contextlib
import inspect
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import SavePolicy, chunks, hopper_backend, mlp, operators, private, steps
from blazeproto.autograd.call import Beside, ExpertsCall, How, Parameters
from blazeproto.autograd.options import Options
from blazeproto.autograd.ranks import EXCHANGES, PeersNamed
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import TWINS, down_backward, fused, linear, reduce, up, weight
from blazeproto.gemm.stored import Packed
from blazeproto.gemm.tiles import OF_AMPERE
from blazeproto.runtime.arch import AMPERE, HOPPER
from blazeproto.stored.weight import StoredWeight
from tests.autograd import test_grouped as grouped
from tests.autograd.cases import WEIGHTS, assert_same_bits
from tests.autograd.test_against_reference import ROUTINGS
from tests.refusals import refuses
from tests.stored.test_experts import FORMATS, stored_case


def as_numpy(value):
    if isinstance(value, Dispatch):
        return replace(value, **{name: as_numpy(t) for name, t in value.arrays.items()})
    if isinstance(value, Packed):
        how = f"{value.storage.format} {value.storage.rows} {value.storage.columns}"
        return StoredWeight(how, *value[:3]).decode(dtype=torch.float64).numpy()
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
def twins(monkeypatch, poisoned):
    """The launches are the twins, which see the dispatch instead of addresses; torch fills new memory with NaN."""

    def run(launch, twin, *args, **kwargs):
        inspect.signature(launch).bind(*args, **kwargs)  # the launch itself takes these arguments
        kwargs.pop("sending", None)  # where rows come from changes no bit
        twin(*map(as_numpy, args), **{key: as_numpy(value) for key, value in kwargs.items()})  # outputs share memory

    for module, name, twin in LAUNCHES:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _real=real, _twin=twin, **k: run(_real, _twin, *a, **k))
    monkeypatch.setattr(weight, "workspace_elements", lambda product, where, shape, config, arch: 24)
    monkeypatch.setattr(Dispatch, "where", (0, 0, 0), raising=False)
    monkeypatch.setattr(Dispatch, "arch", HOPPER, raising=False)
    monkeypatch.setattr(hopper_backend, "rows_of", lambda rows: rows)
    monkeypatch.setattr(steps, "backend_on", lambda *_, **__: hopper_backend)


COMBINES = ("gather", "fused", "fused_both")
near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # some sums are left in float32: fused ones, of biases


def transpose(case):
    """The weights lie the other way round."""
    for name in ("gate_up_proj", "down_proj"):
        weight_ = getattr(case, name)
        setattr(case, name, weight_.detach().mT.contiguous().mT.requires_grad_(weight_.requires_grad))


@pytest.fixture
def over(watch):
    """For each backward's launch, whether dH lies over H."""
    found = []
    watch(down_backward, "launch", lambda *args, dh, **_: found.append(dh.data_ptr() == args[2].data_ptr()))
    return found


CASES = [(activation, "minimal", "sentinels") for activation in (*ACTIVATIONS, clamped_swiglu(0.5, 1.3))]
CASES += [("swiglu", save.value, routing) for save in SavePolicy for routing in ("fixed", "varying")]


@pytest.mark.parametrize(("activation", "save", "routing"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_the_oracle(make_case, activation, save, routing, bias):
    case = make_case(40, activation=activation, bias=bias, idle=(2,), **ROUTINGS[routing])
    expected = case.reference()
    for combine in COMBINES:
        for workspace_bytes in (None,) if routing == "varying" else (None, 20_000):
            near(case.run(save=save, combine=combine, workspace_bytes=workspace_bytes), expected)


@pytest.mark.parametrize(
    ("arch", "config", "over"),
    [
        (HOPPER, None, True),
        (AMPERE, None, True),
        (AMPERE, OF_AMPERE[128], True),
        (AMPERE, replace(OF_AMPERE[128]), False),
    ],
)
def test_y_lies_over_act_where_the_launchs_tiles_have_whole_rows(make_case, monkeypatch, watch, arch, config, over):
    """128 columns that `tune` chose become 256 there; a user's own entry stays."""
    monkeypatch.setattr(Dispatch, "arch", arch)
    monkeypatch.setitem(arch.tiles, "down_forward", config or arch.tiles["down_forward"])
    found = []
    watch(linear, "launch", lambda act, *_, out, **__: found.append(out.data_ptr() == act.data_ptr()))
    case = make_case(8, 256, 256, 4, 2)
    near(case.run(), case.reference())
    assert found == [over, False]


class Sends:
    """Rank 1 of 2 by itself, of an exchange whose rows products send."""

    backend, by_products = "hopper", True

    def __init__(self, tokens):
        self.places, self.told, self.plain, self.sent = 2 * tokens, [], 0, []

    def sending(self, t, order, begins, *, awaited):
        assert t.is_contiguous() and (len(order), len(begins)) == (2, 3)
        self.told.append(awaited)
        told = SimpleNamespace(number=len(self.told), rows=t.clone())
        self.sent.append(weakref.ref(told.rows))
        return self.arrived(t), told

    def send(self, t, token_ranks):
        self.plain += 1
        return self.arrived(t)

    def arrived(self, t):
        return torch.cat((torch.full_like(t, torch.nan), t))

    def add_up(self, _, y, rows, *, out, columns=None, **named):
        made = out.new_empty(self.places, out.shape[1])
        hopper_backend.launch_combine(y, rows, out=made, columns=columns, **named)
        out[:, columns] = made[len(out) :, columns]


@pytest.mark.parametrize(
    ("options", "told", "products"),
    [
        ({}, [True, True, False], ["up", "down_backward", "linear"]),
        ({"save": "recompute"}, [True, True, True, False], ["up", "up", "down_backward", "linear"]),
        ({"frozen": "gate_up_proj"}, [True, True], ["up", "down_backward"]),
    ],
)
def test_products_send_rows(make_case, monkeypatch, options, told, products):
    """x in forward; dO, and x again behind up_backward_act, in backward, with the first of two slices of columns. What a
    product has sent is freed before the next product."""
    case, found, options = make_case(40, sentinels=True, idle=(2,)), [], dict(options)
    if frozen := options.pop("frozen", None):
        getattr(case, frozen).requires_grad_(False)
    halves = range(case.x.shape[1] // 2), range(case.x.shape[1] // 2, case.x.shape[1])
    monkeypatch.setattr(hopper_backend, "column_slices", lambda *_: halves)
    EXCHANGES["sends"] = exchange = Sends(len(case.x))
    for module in (up, down_backward, linear):

        def launch(*given, _launch=module.launch, _name=module.__name__.rsplit(".", 1)[1], sending=None, **named):
            found.append((_name, sending and sending.number))
            assert sending or all(rows() is None for rows in exchange.sent[: len(told) - 1])
            _launch(*given, sending=sending, **named)

        monkeypatch.setattr(module, "launch", launch)
    expected = case.run(**options)
    assert all(number is None for _, number in found)
    found.clear()
    ids = torch.cat((torch.full_like(case.topk_experts, -1), case.topk_experts))
    scores = torch.cat((torch.zeros(case.topk_experts.shape), case.scores))
    lists = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    peers = PeersNamed(torch.full((len(case.x),), 2, dtype=torch.int32), "sends", *lists)
    made = case.run(topk_experts=ids, scores=scores, peers=peers, **options)
    assert exchange.told == told and exchange.plain == 0
    assert [name for name, number in found if number] == products
    assert [number for _, number in found if number] == [*range(1, 1 + len(told))]
    assert all(map(torch.equal, made, expected))


def test_which_layers_products_send_rows(make_case, monkeypatch):
    """Not of quantized or stored weights, nor beside factors, nor on one rank."""
    case, t = make_case(8), torch.zeros(1, dtype=torch.int32)
    EXCHANGES["sends"] = exchange = Sends(len(case.x))
    parameters = Parameters(case.x, case.gate_up_proj, None, None, None, case.down_proj, None, None, None, case.scores)
    dispatch = Dispatch(t, t, t, t, 4, 2, 2 * len(case.x))

    def sends(precision="bf16", order=t, **changed):
        how = How(Options(backend="hopper", precision=precision), exchange="sends")
        call = ExpertsCall(
            parameters._replace(**changed), Beside(token_ranks=t, send_order=order, send_begins=t), dispatch, how
        )
        made = steps.Steps(call, chunks.Chunk(None, None, dispatch), hopper_backend, None, None, None, False)
        return bool(made.by_products)

    assert sends() and sends(up_bias=t, down_bias=t)
    assert not sends("fp8") and not sends(order=None) and not sends(up_a=t) and not sends(down_a=t)
    assert not sends(up_proj=object.__new__(StoredWeight)) and not sends(down_proj=object.__new__(StoredWeight))
    exchange.by_products = False
    assert not sends()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_stored_weights_are_given_to_products_as_they_lie(watch, format, workspace_bytes, monkeypatch):
    seen = set()
    monkeypatch.setattr(
        hopper_backend, "_readers", lambda weight, rows: rows
    )  # here a dispatch, which has no architecture
    for module in (up, linear, down_backward):
        watch(module, "launch", lambda a, of, *_, **__: seen.add(of.values.data_ptr() if isinstance(of, Packed) else 0))
    case, plain = stored_case(format, bias=True, sentinels=True, dtype=torch.float64)
    near(case.run(workspace_bytes=workspace_bytes), plain.reference())
    assert {case.gate_up_proj.values.data_ptr(), case.down_proj.values.data_ptr()} <= seen
    refuses(lambda: case.forward(down_proj=replace(case.down_proj, how=f"{format} 1 48")), "weight")


@pytest.mark.parametrize("activation", ["swiglu", "alternating(swiglu)", "relu2"])
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
def test_transposed_weights_are_read_where_they_lie(make_case, watch, activation, combine, workspace_bytes):
    """And their gradients lie likewise."""
    case, seen = make_case(40, activation=activation, bias=True, sentinels=True), set()
    expected = case.reference()
    transpose(case)
    for module, name in (
        (up, "launch"),
        (linear, "launch"),
        (fused, "launch"),
        (fused, "launch_dx"),
        (down_backward, "launch"),
    ):
        watch(module, name, lambda a, weights, *args, **kwargs: seen.add(weights.data_ptr()))
    results = case.run(combine=combine, workspace_bytes=workspace_bytes)
    near(results, expected)
    assert seen == {case.gate_up_proj.data_ptr(), case.down_proj.data_ptr()}
    assert all(got.stride() == t.stride() for got, t in zip(results[2:4], case.parameters[1:3], strict=True))


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
    near(case.run(workspace_bytes=workspace_bytes), case.reference())
    assert asked == {(True, 16, case.gate_up_proj.nbytes)} and len(parts) >= 4


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24), (264, 264)])
def test_y_is_written_over_act_where_a_tile_has_whole_rows_of_both(make_case, watch, save, workspace_bytes, widths):
    """And where act is not saved."""
    case, found = make_case(40, *widths), []

    def look(a, *args, out, transposed=False, **kwargs):
        if not transposed:
            found.append(out.data_ptr() == a.data_ptr())

    watch(linear, "launch", look)
    near(case.run(save=save, workspace_bytes=workspace_bytes and workspace_bytes * widths[1] // 16), case.reference())
    assert set(found) == {widths == (16, 16) and save != "paper"}
    assert (len(found) == 1) == (workspace_bytes is None)


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
    case.gradients(out)
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
    make_case, monkeypatch, over, save, workspace_bytes, watched
):
    case = make_case(40)
    if watched == "names missing":  # those of torch's private ones that would tell
        monkeypatch.setattr(private, "AVAILABLE", False)
    with contextlib.ExitStack() as watching:
        if watched == "hooks":
            watching.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        if watched == "profiler":
            watching.enter_context(torch.profiler.profile())
        out = case.forward(save=save, workspace_bytes=workspace_bytes)
    once = case.gradients(out, retain_graph=watched == "kept graph")
    assert set(over) == {watched is None or save == "recompute"}
    near(once, case.reference())
    if watched == "kept graph":
        assert_same_bits(case.gradients(out), once)
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
            case.gradients(out)
    with pytest.raises(RuntimeError, match="second time"):
        case.gradients(out)


@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("routing", ["fixed", "varying", "elsewhere"])
def test_a_capacity(make_case, watch, capacity, routing):
    """H has so many rows, and what lies beyond is not computed; ``elsewhere``: K > E."""
    sizes = {"num_experts": 2, "top_k": 9} if routing == "elsewhere" else {}
    case, rows = make_case(40, **sizes, bias=True, varying=routing == "varying", capacity=capacity), set()
    watch(up, "launch", lambda *args, h, **kwargs: rows.add(h.shape[0]))
    expected = case.reference()
    for options in [{}, {"save": "recompute"}, {"combine": "fused"}, {"combine": "fused_both"}]:
        near(case.run(**options), expected)
    assert rows == {min(case.options["row_capacity"], case.topk_experts.numel())}
    if routing != "varying":
        near(case.run(workspace_bytes=40_000), expected)


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
    with operators.gpu_of(x):
        assert made_current == 2 * entered


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
def test_rows_that_lie_by_expert(over, save, padding):
    """As torchtitan has them; dH lies over H there too."""
    tensors, counts, d_out = grouped.inputs([5, 0, 20, 9], padding)
    given = [tensor.double() for tensor in tensors], counts, d_out.double()
    got = grouped.results(grouped.gate_and_up_apart, *given, save=save)
    wanted = grouped.results(grouped.by_loop, *given)
    wanted["x"][34:] = 0
    grouped.close(got, wanted)
    assert over == [True]


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 30_000])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("routing", ["sentinels", "varying", "capacity", "transposed"])
def test_low_rank_factors(make_case, watch, over, save, workspace_bytes, trained, routing):
    """The gradients are those of W + b a; dH lies over H on the same terms, and a frozen weight has no gradient launched."""
    if routing == "varying" and workspace_bytes:
        pytest.skip("chunks need a fixed K")
    capacity, gradients = 0.6 if routing == "capacity" else None, []
    options = {"factors": "both", "capacity": capacity, "trained": WEIGHTS if trained else WEIGHTS[2:]}
    case = make_case(40, bias=True, **options, **ROUTINGS.get(routing, {}))
    expected = case.reference()
    if routing == "transposed":
        transpose(case)
    watch(weight, "launch", lambda *args, dw, **kwargs: gradients.append(dw.shape[1:]))
    near(case.run(save=save, workspace_bytes=workspace_bytes), expected)
    assert set(over) == {True} and len(gradients) == (6 if trained else 4) * len(over)


@pytest.mark.parametrize("workspace_bytes", [None, 30_000])
@pytest.mark.parametrize("transposed", [False, True])
def test_low_rank_factors_of_a_sum_on_the_fly(make_case, workspace_bytes, transposed):
    """Beside up_proj, as with "fused"."""
    case = make_case(40, bias=True, sentinels=True, factors="up")
    expected = case.reference()
    if transposed:
        transpose(case)
    for combine in COMBINES:
        near(case.run(combine=combine, workspace_bytes=workspace_bytes), expected)
