"""``grouped_experts`` is ``moe_mlp`` of one expert a token and scores of 1: any activation, biases, both layouts, factors.
And beside a loop over experts, of rows that lie by expert already."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blazeproto import autograd
from blazeproto.activations import ACTIVATIONS, activation_named, clamped_swiglu
from blazeproto.autograd import LowRank, Options, SavePolicy, moe_mlp
from blazeproto.lab.accuracy import Pool
from tests.refusals import refuses

E, D, N, RANK = 4, 16, 24, 5
COUNTS = [5, 0, 20, 9]
PLACES = [
    pytest.param("cpu", torch.float64, "torch", id="cpu"),
    pytest.param("cuda", torch.bfloat16, "hopper", id="gpu", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, "ampere", id="gpu-ampere", marks=pytest.mark.gpu),
]
BOUNDS = {torch.float64: 1e-13, torch.bfloat16: 0.0}


def tensors_by_name(
    activation: str, *, bias: bool, factors: bool, transposed: bool, device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """x, the weights, and what else there is, by the names of `arguments`."""
    width = N * activation_named(activation).halves
    shapes = {"x": (sum(COUNTS), D), "gate_up_proj": (E, width, D), "down_proj": (E, D, N)}
    if bias:
        shapes |= {"up_bias": (E, width), "down_bias": (E, D)}
    if factors:
        shapes |= {"up_a": (E, RANK, D), "up_b": (E, width, RANK), "down_a": (E, RANK, N), "down_b": (E, D, RANK)}
    made = {name: torch.randn(shape).mul_(shape[-1] ** -0.5).to(device, dtype) for name, shape in shapes.items()}
    if transposed:
        made |= {name: made[name].mT.contiguous().mT for name in ("gate_up_proj", "down_proj")}
    return {name: t.requires_grad_() for name, t in made.items()}


def arguments(tensors: dict[str, Tensor]) -> dict:
    rest = dict(tensors)
    for name in ("up", "down"):
        if f"{name}_a" in rest:
            rest[f"{name}_factors"] = LowRank(rest.pop(f"{name}_a"), rest.pop(f"{name}_b"))
    return rest


@pytest.mark.parametrize(("device", "dtype", "backend"), PLACES)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_agrees_with_moe_mlp(activation, bias, transposed, factors, device, dtype, backend):
    given = tensors_by_name(activation, bias=bias, factors=factors, transposed=transposed, device=device, dtype=dtype)
    counts = torch.tensor(COUNTS, device=device)
    ids = torch.arange(E, device=device).repeat_interleave(counts)[:, None]
    scores = torch.ones(len(ids), 1, device=device)
    d_out = torch.randn(len(ids), D).to(device, dtype)
    options = {"activation": activation, "backend": backend}
    expected = moe_mlp(**arguments(given), scores=scores, topk_experts=ids, num_experts=E, **options)
    wanted = [expected, *torch.autograd.grad(expected, list(given.values()), d_out)]
    for save in SavePolicy:
        out = autograd.grouped_experts(**arguments(given), counts=counts, save=save, **options)
        got = [out, *torch.autograd.grad(out, list(given.values()), d_out)]
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= BOUNDS[dtype] * b.norm()
        assert [t.stride() for t in got[1:]] == [t.stride() for t in given.values()]


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_apart_are_the_joined_weight(bias):
    given = tensors_by_name("swiglu", bias=bias, factors=True, transposed=False, device="cpu", dtype=torch.float64)
    counts, d_out = torch.tensor(COUNTS), torch.randn(sum(COUNTS), D, dtype=torch.float64)
    joined = autograd.grouped_experts(**arguments(given), counts=counts)
    wanted = torch.autograd.grad(joined, list(given.values()), d_out)
    halves = tuple(half.detach().clone().requires_grad_() for half in given["gate_up_proj"].chunk(2, dim=1))
    for save in SavePolicy:
        out = autograd.grouped_experts(**{**arguments(given), "gate_up_proj": halves}, counts=counts, save=save)
        others = [t for name, t in given.items() if name != "gate_up_proj"]
        d_gate, d_up, *got = torch.autograd.grad(out, [*halves, *others], d_out)
        assert torch.equal(out, joined) and torch.equal(torch.cat((d_gate, d_up), dim=1), wanted[1])
        rest = (wanted[0], *wanted[2:])
        assert all(torch.equal(a, b) for a, b in zip(got, rest, strict=True))


@pytest.mark.parametrize("activation", ["relu", "alternating(clamped_swiglu)"])
def test_a_pair_needs_a_gate_and_halves_that_lie_apart(activation):
    given = arguments(
        tensors_by_name("swiglu", bias=False, factors=False, transposed=False, device="cpu", dtype=torch.float64)
    )
    halves = tuple(given.pop("gate_up_proj").detach().chunk(2, dim=1))
    for weights, named in ((halves, activation), ((*halves, halves[0]), "swiglu"), ((), "swiglu")):
        call = partial(
            autograd.grouped_experts, gate_up_proj=weights, counts=torch.tensor(COUNTS), activation=named, **given
        )
        refuses(call, "gate_up_proj")


def test_options_in_one_object():
    given = arguments(
        tensors_by_name("relu", bias=False, factors=False, transposed=False, device="cpu", dtype=torch.float64)
    )
    counts, options = torch.tensor(COUNTS), Options(activation="relu", save="recompute")
    expected = autograd.grouped_experts(**given, counts=counts, activation="relu")
    assert torch.equal(autograd.grouped_experts(**given, counts=counts, options=options), expected)
    changed = autograd.grouped_experts(**given, counts=counts, options=options, activation="relu2")
    assert torch.equal(changed, autograd.grouped_experts(**given, counts=counts, activation="relu2"))


# --- Gate and up apart, beside a loop over experts; on a GPU within the bounds of kernels --------------------------------


NAMES = ("out", "x", "w1", "w3", "w2")


def inputs(counts: list[int], padding: int = 0, d: int = D, n: int = N) -> tuple[list[Tensor], Tensor, Tensor]:
    """x, w1, w3, w2; the counts; the output's gradient. Padding is NaN wherever there may be some."""
    rows, experts = sum(counts), len(counts)
    tensors = [torch.randn(rows, d), *(torch.randn(experts, *s) * s[1] ** -0.5 for s in ((n, d), (n, d), (d, n)))]
    nothing = torch.full((padding, d), torch.nan)
    tensors[0] = torch.cat((tensors[0], nothing))
    return tensors, torch.tensor(counts), torch.cat((torch.randn(rows, d), nothing))


def gate_and_up_apart(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """`grouped_experts` of a gate and an up apart, as torchtitan has them."""
    return autograd.grouped_experts(x, (w1, w3), w2, counts, **options)


def by_loop(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
    """The same, expert by expert."""
    parts = x[: counts.sum()].split(counts.tolist())
    made = [(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w3, w2 in zip(parts, w1, w3, w2, strict=True)]
    return torch.cat((*made, x.new_zeros(len(x) - int(counts.sum()), x.shape[1])))


def results(function: Callable[..., Tensor], tensors: list[Tensor], *args: Tensor, **options: Any) -> dict[str, Tensor]:
    """Results of function(*tensors, counts): the output and the gradients, by name."""
    counts, d_out = args
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*tensors, counts, **options)
    gradients = torch.autograd.grad(out, tensors, d_out.to(out.dtype))
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("counts", "save"),
    [
        *((COUNTS, save) for save in SavePolicy),
        *((few, "minimal") for few in ([0, 0, 0, 0], [0, 0, 3, 0], [1], [40, 1])),
    ],
)
@pytest.mark.parametrize("padding", [0, 7])
def test_equals_a_loop(counts: list[int], save: str, padding: int) -> None:
    given = inputs(counts, padding)
    got, wanted = results(gate_and_up_apart, *given, save=save), results(by_loop, *given)
    wanted["x"][sum(counts) :] = 0
    close(got, wanted)
    assert not got["out"][sum(counts) :].any() and not got["x"][sum(counts) :].any()


def test_rows_that_are_counted_and_not_there() -> None:
    tensors, counts, d_out = inputs(COUNTS)
    tensors[0], d_out = tensors[0][:30], d_out[:30]
    wanted = results(by_loop, tensors, torch.tensor([5, 0, 20, 5]), d_out)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        close(results(gate_and_up_apart, tensors, counts, d_out), wanted)
    [offsets] = [t.tolist() for t in saved if t.shape == (5,)]
    assert offsets == [0, 5, 5, 25, 30], "a kernel would read past the end"


def test_float64() -> None:
    tensors, counts, d_out = inputs(COUNTS)
    given = [tensor.double() for tensor in tensors], counts.int(), d_out.double()
    close(results(gate_and_up_apart, *given), results(by_loop, *given), 1e-12)


def test_float32_weights_get_gradients_that_were_not_rounded() -> None:
    (x, *weights), counts, d_out = inputs(COUNTS)
    got = results(gate_and_up_apart, [x.bfloat16(), *weights], counts, d_out)
    assert got["out"].dtype == got["x"].dtype == torch.bfloat16
    for name in ("w1", "w3", "w2"):
        values = got[name][got[name] != 0]
        assert values.dtype == torch.float32 and (values.bfloat16().float() == values).float().mean() < 0.1


@pytest.mark.parametrize("frozen", [("x",), ("w1",), ("w1", "w3"), ("x", "w1", "w3"), ("w2",)])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[str, ...]) -> None:
    tensors, counts, d_out = inputs(COUNTS)
    wanted = results(by_loop, tensors, counts, d_out)
    named = {n: t.requires_grad_(n not in frozen) for n, t in zip(NAMES[1:], tensors, strict=True)}
    gate_and_up_apart(*tensors, counts).backward(d_out)
    assert all(named[name].grad is None for name in frozen)
    close({n: t.grad for n, t in named.items() if n not in frozen}, {n: wanted[n] for n in named if n not in frozen})


def test_autocast_changes_nothing() -> None:
    given = inputs(COUNTS)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(gate_and_up_apart, *given)
    close(got, results(by_loop, *given))


@pytest.mark.parametrize("save", SavePolicy)
def test_nothing_saved_is_a_copy_of_the_weights(save: str) -> None:
    """Or a layer that FSDP has sharded again would keep its weights until backward."""
    tensors, counts, _ = inputs(COUNTS)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gate_and_up_apart(*tensors, counts, save=save)
    weights = {tensor.data_ptr() for tensor in tensors[1:]}
    assert {t.data_ptr() for t in saved if t.dim() == 3} == weights


def test_a_kept_graph_can_be_used_again() -> None:
    tensors, counts, d_out = inputs(COUNTS)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    out = gate_and_up_apart(*tensors, counts)
    first = torch.autograd.grad(out, tensors, d_out, retain_graph=True)
    second = torch.autograd.grad(out, tensors, d_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    once = torch.autograd.grad(gate_and_up_apart(*tensors, counts), tensors, d_out, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad(once[1].sum(), tensors)


def test_compiles_without_a_graph_break() -> None:
    given = inputs(COUNTS, padding=2)
    torch._dynamo.reset()
    compiled = torch.compile(gate_and_up_apart, backend="aot_eager", fullgraph=True)
    close(results(compiled, *given), results(gate_and_up_apart, *given))


def test_operations_are_counted() -> None:
    tensors, counts, d_out = inputs(COUNTS)
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    with forward:
        out = gate_and_up_apart(*tensors, counts)
    with backward:
        out.backward(d_out)
    once = 6 * sum(COUNTS) * D * N
    assert (forward.get_total_flops(), backward.get_total_flops()) == (once, 2 * once)


@pytest.mark.parametrize(
    ("changed", "argument", "error"),
    [
        ({"x": [[1.0]]}, "x", TypeError),
        ({"x": torch.ones(3, D, dtype=torch.int64)}, "x", TypeError),
        ({"x": torch.ones(3)}, "x", ValueError),
        ({"w1": torch.ones(4, N, D + 1)}, "gate_up_proj[0]", ValueError),
        ({"w3": torch.ones(4, N + 1, D)}, "gate_up_proj[1]", ValueError),
        ({"w2": torch.ones(4, N, D)}, "down_proj", ValueError),
        ({"w2": torch.ones(4, D, N).half()}, "down_proj", ValueError),
        ({"x": torch.ones(3, D).bfloat16(), "w3": torch.ones(4, N, D).bfloat16()}, "gate_up_proj[1]", ValueError),
        (
            {
                "w1": torch.ones(0, N, D),
                "w3": torch.ones(0, N, D),
                "w2": torch.ones(0, D, N),
                "counts": torch.ones(0).int(),
            },
            "down_proj",
            ValueError,
        ),
        ({"counts": torch.ones(5).long()}, "counts", ValueError),
        ({"counts": torch.ones(4, 1).long()}, "counts", ValueError),
        ({"counts": torch.ones(4)}, "counts", TypeError),
        ({"w2": torch.ones(4, D, N, device="meta")}, "down_proj", ValueError),
        ({"save": "all"}, "save", ValueError),
        ({"backend": "hopper"}, "backend", ValueError),
        ({"row_capacity": 3}, "row_capacity", ValueError),
        ({"workspace_bytes": 3}, "workspace_bytes", ValueError),
    ],
)
def test_input_that_is_refused(changed: dict[str, Any], argument: str, error: type[Exception]) -> None:
    tensors, counts, _ = inputs(COUNTS)
    given = {**dict(zip(NAMES[1:], tensors, strict=True)), "counts": counts, **changed}
    refuses(lambda: gate_and_up_apart(**given), argument, error)


# --- On a GPU ------------------------------------------------------------------------------------------------------------


def gpu_inputs(counts: list[int], padding: int, d: int, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
    tensors, tokens, d_out = inputs(counts, padding, d, n)
    return [tensor.bfloat16().cuda() for tensor in tensors], tokens.cuda(), d_out.bfloat16().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 333])
@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("wide", [False, True])
def test_kernels_are_as_good_as_torch(poisoned: None, padding: int, save: str, wide: bool, backend: str) -> None:
    """wide: with float32 weights."""
    counts = [700, 0, 1300, 1, 129, 2048, 5, 900]
    tensors, tokens, d_out = gpu_inputs(counts, padding, 256, 136)
    if wide:
        tensors = [tensors[0], *(weight.float() for weight in tensors[1:])]
    rows, pool = sum(counts), Pool()
    got = results(gate_and_up_apart, tensors, tokens, d_out, backend=backend, save=save)
    assert not got["out"][rows:].any() and not got["x"][rows:].any()
    yardstick = results(gate_and_up_apart, tensors, tokens, d_out, backend="torch", save=save)
    exact = results(by_loop, [tensor.double() for tensor in tensors], tokens, d_out)
    for name in NAMES:
        used = slice(None, rows) if name in ("out", "x") else slice(None)
        pool.add(name, got[name][used], yardstick[name][used], exact[name][used])
    assert not pool.failures()


@pytest.mark.gpu
def test_policies_and_repeats_agree_to_the_bit(poisoned: None, backend: str) -> None:
    given = gpu_inputs([700, 0, 1300, 129], 50, 256, 128)
    first, *others = [
        results(gate_and_up_apart, *given, backend=backend, save=save) for save in (*SavePolicy, "minimal")
    ]
    assert all(torch.equal(other[name], first[name]) for other in others for name in NAMES)


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
def test_rows_that_are_counted_and_not_there_on_a_gpu(poisoned: None) -> None:
    tensors, counts, d_out = gpu_inputs([700, 0, 1300, 129], 0, 256, 128)
    tensors[0], d_out = tensors[0][:2050], d_out[:2050]
    got = results(gate_and_up_apart, tensors, counts, d_out)
    counts[3] = 50
    wanted = results(gate_and_up_apart, tensors, counts, d_out)
    assert all(torch.equal(got[name], wanted[name]) for name in NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 9])
def test_no_rows_on_a_gpu(poisoned: None, padding: int, backend: str) -> None:
    got = results(gate_and_up_apart, *gpu_inputs([0, 0, 0], padding, 64, 64), backend=backend)
    assert not any(tensor.any() for tensor in got.values())


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
def test_a_graph_takes_counts_as_they_come_and_the_host_does_not_wait() -> None:
    tensors, counts, d_out = gpu_inputs([700, 0, 1300, 129], 50, 256, 128)
    tensors[0], d_out = tensors[0].nan_to_num(), d_out.nan_to_num()
    results(gate_and_up_apart, tensors, counts, d_out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(gate_and_up_apart, tensors, counts, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results(gate_and_up_apart, tensors, counts, d_out)
    for others in ([1, 2000, 0, 100], [700, 0, 1300, 129]):
        counts.copy_(torch.tensor(others))
        graph.replay()
        wanted = results(gate_and_up_apart, tensors, counts, d_out)
        assert all(torch.equal(replayed[name], wanted[name]) for name in NAMES)


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
def test_h_is_written_over_in_backward() -> None:
    """Peak memory of a backward beside what is there: A', and dX~ or the joined weights, but no second H."""
    rows, d, n = 65536, 256, 512
    tensors, counts, d_out = gpu_inputs([rows // 4] * 4, 0, d, n)
    results(gate_and_up_apart, tensors, counts, d_out)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    out = gate_and_up_apart(*tensors, counts)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(d_out)
    h_bytes = 2 * rows * 2 * n
    assert torch.cuda.max_memory_allocated() - before < h_bytes, "dH has a place of its own"
