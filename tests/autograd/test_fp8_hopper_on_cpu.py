"""The Hopper backend's order of launches in fp8, with the products' twins for the kernels, so that a CPU can run it.

As in test_hopper_on_cpu.py: what is tested is which launch gets which array, not the kernels.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto.autograd import hopper_backend, mlp, quantize_weights, steps
from blazeproto.autograd.ranks import EXCHANGES, PeersNamed
from blazeproto.autograd.records import quantized_weight
from blazeproto.dispatch import Dispatch
from blazeproto.distributed import exchanges
from blazeproto.distributed.exchanges import PeerExchange
from blazeproto.distributed.peer_memory import MemoryLayout
from blazeproto.gemm import TWINS, down_backward, linear, quantize, reduce, up, weight, weight_fp8
from blazeproto.gemm.e4m3 import BLOCK, Quantized, from_e4m3, to_e4m3
from blazeproto.gemm.recipe import RECIPES
from blazeproto.runtime.arch import HOPPER
from tests.autograd.test_fp8 import BESIDE, formula
from tests.autograd.test_hopper_on_cpu import as_numpy, expert_row_sum, weight_gradient
from tests.autograd.test_rollout import as_stored, run

SIZES = (137, 528, 128, 5, 3)  # a gradient of W_down in three slices of columns


def experts_of(at: Dispatch) -> Iterator[tuple[int, slice, Tensor]]:
    """Each expert with its rows, and their pairs."""
    for expert, ends in enumerate(pairwise(at.expert_token_offsets.tolist())):
        yield expert, slice(*ends), at.expert_pair_indices[slice(*ends)].long()


def store(to: Quantized, made: Quantized, rows: slice = slice(None)) -> None:
    to.values[rows].copy_(made.values), to.scales[..., rows].copy_(made.scales)


def launch_rows(x: Tensor, at: Dispatch, out: Quantized) -> None:
    x_of = RECIPES["fp8" if out.scales.dim() == 1 else "fp8_rollout"].x
    made = to_e4m3(torch, x, *x_of[1:])
    out.values.copy_(made.values), out.scales.copy_(made.scales)


def launch_dequantize(rows: Quantized, at: Dispatch, out: Tensor) -> None:
    out.copy_(from_e4m3(torch, rows, "1x128"))


def launch_weights(
    weights: Tensor, at: Any, out: Quantized | None, transposed: Quantized | None, *, scale_values: str = ""
) -> None:
    values, scales = to_e4m3(torch, weights, "128x128", scale_values)
    for to, made in ((out, Quantized(values, scales)), (transposed, Quantized(values.mT, scales.mT))):
        if to is not None:
            store(to, made)


def launch_block_offsets(at: Dispatch, out: Tensor) -> None:
    counts = [-(-len(pairs) // BLOCK) for _, _, pairs in experts_of(at)]
    out.copy_(torch.tensor([0, *counts]).cumsum(0))


def launch_transpose(
    rows: Quantized, at: Dispatch, blocks_before: Tensor, columns: range, out: Quantized, *, gather: bool
) -> None:
    """Each block with the largest scale of its rows."""
    wide = from_e4m3(torch, rows, "token") if gather else from_e4m3(torch, rows, "1x128")
    for expert, of_expert, _ in experts_of(at):
        begin, end = blocks_before[expert : expert + 2].tolist()
        for block in range(begin, end):
            at_rows = torch.arange(of_expert.start, of_expert.stop)[(block - begin) * BLOCK :][:BLOCK]
            at_rows = at.expert_pair_indices[at_rows].long() // at.top_k if gather else at_rows
            scales = rows.scales[at_rows].expand(rows.values.shape[1], -1) if gather else rows.scales[:, at_rows]
            shared = scales.amax(1) if gather else scales.amax(1).repeat_interleave(BLOCK)
            made = torch.zeros(len(columns), BLOCK)
            made[:, : len(at_rows)] = (wide[at_rows] / shared).T[columns.start : columns.stop]
            out.values[:, block * BLOCK : (block + 1) * BLOCK].copy_(made.to(torch.float8_e4m3fn))
            out.scales[:, block] = shared[columns.start : columns.stop : BLOCK]


def launch_weight(
    name: str,
    left: Quantized,
    right: Quantized,
    at: Dispatch,
    blocks_before: Tensor,
    *,
    dw: Tensor,
    first: tuple[int, int] = (0, 0),
    f32: bool = False,
    accumulate: bool = False,
) -> None:
    wide = [
        from_e4m3(torch, Quantized(of.values[None], of.scales[None]), "128x128")[0].double() for of in (left, right)
    ]
    for expert, ends in enumerate(pairwise((blocks_before * BLOCK).tolist())):
        made = wide[0][:, slice(*ends)] @ wide[1][:, slice(*ends)].T
        dw[expert, first[0] : first[0] + made.shape[0], first[1] : first[1] + made.shape[1]] = made


def on_numpy(value: Any) -> Any:
    """As a twin takes it, of the same memory."""
    if isinstance(value, Quantized):
        return Quantized(value.values.view(torch.uint8).numpy(), value.scales.numpy())
    return as_numpy(value)


def by_twin(twin: Callable[..., Any]) -> Callable[..., None]:
    def launch(*given: Any, **named: Any) -> None:
        if isinstance(given[1], Quantized):
            named.pop("transposed", None)  # of quantized weights the one that is read
        twin(*map(on_numpy, given), **{key: on_numpy(value) for key, value in named.items()})

    return launch


def grouped_mm(a: Any, weights: Any, at: Dispatch, *, name: str = "", **named: Any) -> None:
    """If operands are quantized: the down projection plus what the factors add."""
    if not isinstance(a, Quantized):
        TWINS["grouped_mm"](a, weights, at, **named)
        return
    columns, low, out = named["columns"], named.pop("low"), named.pop("out")
    TWINS["down_forward"](a, weights, at, y=out, **{key: named.get(key) for key in ("bias", "columns")})
    if low is not None:
        used = at.expert_token_offsets[-1]
        out[:used] += TWINS["grouped_mm"](*low, at, columns=columns)[:used]


LAUNCHES = (
    *(
        (quantize, each.__name__, each)
        for each in (launch_rows, launch_block_offsets, launch_transpose, launch_dequantize)
    ),
    (up, "launch", by_twin(TWINS["up_forward"])),
    (linear, "launch", by_twin(grouped_mm)),
    (down_backward, "launch", by_twin(TWINS["down_backward_act"])),
    (weight_fp8, "launch", launch_weight),
    (weight, "launch", by_twin(weight_gradient)),
    (reduce, "launch_expert_row_sum", by_twin(expert_row_sum)),
    (reduce, "launch_bias_score_grad", by_twin(TWINS["bias_score_grad"])),
    (hopper_backend, "launch_combine", by_twin(TWINS["combine"])),
    (hopper_backend, "quantize_weights", launch_weights),
)


@pytest.fixture
def quantized_orders(monkeypatch, poisoned):
    """What is quantized of weights, in order: forward's order, the transpose. torch fills new memory with NaN."""
    orders: list[tuple[bool, bool]] = []

    def stand_in(real: Any, launch: Any) -> Any:
        def run(*given: Any, **named: Any) -> None:
            inspect.signature(real).bind(*given, **named)  # the launch itself takes these arguments
            assert named.pop("sending", None) is None  # which bf16 has
            launch(*given, **named)
            if launch is launch_weights:
                orders.append((given[2] is not None, given[3] is not None))

        return run

    for module, name, launch in LAUNCHES:
        monkeypatch.setattr(module, name, stand_in(getattr(module, name), launch))
    monkeypatch.setattr(Dispatch, "arch", HOPPER, raising=False)
    monkeypatch.setattr(Dispatch, "num_rows", property(lambda self: len(self.expert_pair_indices)), raising=False)
    monkeypatch.setattr(hopper_backend, "rows_of", lambda dispatch: dispatch)
    monkeypatch.setattr(hopper_backend, "current_stream", lambda _: 0)
    for module in (steps, mlp):
        monkeypatch.setattr(module, "backend_on", lambda *_, **__: hopper_backend)
    return orders


class Second(PeerExchange):
    """Rank 1 of 2 by itself: its rows go to its own places, on a CPU."""

    def __init__(self, tokens: int, d_model: int) -> None:
        self.layout, self.places, self.sent = MemoryLayout(2, tokens, 1, d_model), 2 * tokens, 0
        self.plain = 0
        self.memory = torch.full((self.layout.size,), 0xFF, dtype=torch.uint8)
        self.end = SimpleNamespace(send=self.store)

    def send(self, t: Tensor | Quantized, token_ranks: Tensor) -> Tensor | Quantized:
        """In place of bf16 rows, float32 ones."""
        if isinstance(t, Quantized):
            return super().send(t, token_ranks)
        self.plain += 1
        return torch.cat((torch.full_like(t, torch.nan), t))

    def store(self, rows: int, scales: int, _: int, *, num_tokens: int, stream: int) -> tuple[()]:
        """As cuda/exchange.cu does."""
        to, tokens, d_model = (
            self.memory.data_ptr() + self.layout.at("rows"),
            self.layout.max_tokens,
            self.layout.d_model,
        )
        ctypes.memmove(to + tokens * d_model, rows, num_tokens * d_model)
        ctypes.memmove(to + 2 * tokens * d_model + 4 * tokens, scales, 4 * num_tokens)
        self.sent += 1
        return ()

    def add_up(self, _: Any, y: Tensor, rows: Any, *, out: Tensor, columns: Any = None, **named: Any) -> None:
        made = out.new_empty(self.places, out.shape[1])
        hopper_backend.launch_combine(y, rows, out=made, columns=columns, **named)
        out[:, columns] = made[self.layout.max_tokens :, columns]


OWN, TURNED, BOTH = (True, False), (False, True), (True, True)
WAYS = {
    "both orders at once": ({}, [BOTH, BOTH]),
    "each before its product": ({"keep_transposed": False}, [OWN, OWN, TURNED, TURNED]),
    "recompute": ({"save": "recompute"}, [OWN, OWN, OWN, TURNED, TURNED]),
    "quantize_weights": ({}, []),
}


@pytest.mark.parametrize("precision", ["fp8", "fp8_rollout"])
@pytest.mark.parametrize(
    ("way", "beside"),
    [*product(WAYS, ["weights alone"]), *product(["both orders at once", "recompute"], ["biases", "factors"])],
)
def test_it_is_the_formula_and_quantizes_no_weight_twice(make_case, quantized_orders, way, beside, precision):
    sizes = SIZES if precision == "fp8" else (137, 512, *SIZES[2:])
    case, (options, orders) = make_case(*sizes, sentinels=True, idle=(2,), **BESIDE[beside]), WAYS[way]
    if way == "quantize_weights":
        options = {"quantized": quantize_weights(case.gate_up_proj, case.down_proj, precision=precision)}
        assert quantized_orders == [BOTH, BOTH]
        quantized_orders.clear()
    made = case.run(precision=precision, **options)
    assert quantized_orders == orders
    for name, got, expected in zip(("out", *case.trained), made, formula(case, precision), strict=True):
        if name in ("gate_up_proj", "down_proj"):  # whose operands are scaled anew
            assert 0 < (got - expected).norm() < 0.02 * expected.norm()
        elif precision == "fp8_rollout":  # float32 rounds numbers before a few of them are rounded to another e4m3
            assert (got - expected).norm() < 2e-3 * expected.norm(), name
        else:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "beside", "sent"),
    [
        ("fp8", "weights alone", (4, 0)),
        ("fp8", "biases", (0, 4)),
        ("fp8", "factors", (0, 4)),
        ("fp8_rollout", "weights alone", (0, 4)),
    ],
)
def test_an_exchange_brings_rows(make_case, quantized_orders, monkeypatch, precision, beside, sent):
    """The bits of one rank, whose tokens they are. x is sent in forward; dO, x and dO again in backward.
    sent: how many times quantized rows, and others."""
    case = make_case(137, 512, *SIZES[2:], sentinels=True, idle=(2,), **BESIDE[beside])
    EXCHANGES["second"] = second = Second(*case.x.shape)
    monkeypatch.setattr(exchanges, "driver", SimpleNamespace(launch=lambda *_: None))
    monkeypatch.setattr(exchanges, "current_stream", lambda _: 0)
    expected = case.run(precision=precision)
    of_rank_0 = torch.full_like(case.topk_experts, -1)
    ids, scores = torch.cat((of_rank_0, case.topk_experts)), torch.cat((torch.zeros(of_rank_0.shape), case.scores))
    peers = PeersNamed(torch.full((len(case.x),), 2, dtype=torch.int32), "second")
    made = case.run(precision=precision, topk_experts=ids, scores=scores, peers=peers)
    assert (second.sent, second.plain) == sent
    assert all(map(torch.equal, made, expected))


def test_stored_weights_are_multiplied_as_they_are(make_case, quantized_orders):
    case = make_case(137, 512, *SIZES[2:], dtype=torch.float32)
    expected = run(case)
    quantized_orders.clear()
    got = run(case, gate_up_proj=as_stored(case.gate_up_proj), down_proj=as_stored(case.down_proj))
    assert not quantized_orders and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_weights_are_read_in_a_dtype_that_the_kernel_has(quantized_orders, monkeypatch, dtype):
    """It rounds float32 itself; under autocast there are others."""
    given: list[Any] = []
    monkeypatch.setattr(
        quantize, "launch_refresh", lambda *values, **named: given.extend((values[0].dtype, named["f32"]))
    )
    weight = torch.ones(2, 256, 256, dtype=dtype)
    hopper_backend.refresh_weights(weight, torch.bfloat16, None, None, None, 1, scale_values="float32")
    assert given == ([torch.float32, True] if dtype == torch.float32 else [torch.bfloat16, False])


def test_weights_are_rounded_to_the_dtype_of_x_first(quantized_orders):
    weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))

    from_f32, from_bf16, exact = (
        quantized_weight(hopper_backend.quantize_weights, of, dtype, None, None)
        for of, dtype in ((weight, torch.bfloat16), (weight.bfloat16(), torch.bfloat16), (weight, weight.dtype))
    )
    assert all(map(torch.equal, from_f32, from_bf16)) and not torch.equal(from_f32.values, exact.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])  # autocast takes all
def test_the_kernel_that_looks_at_weights_can_read_them(quantized_orders, monkeypatch, dtype):
    read = []
    monkeypatch.setattr(quantize, "launch_refresh", lambda of, *_, f32, **__: read.append((of.dtype, f32)))
    weight = torch.ones(1, 128, 128, dtype=dtype)
    hopper_backend.refresh_weights(weight, torch.bfloat16, None, None, None, 1, scale_values="")
    assert read == [(torch.float32, True) if dtype == torch.float32 else (torch.bfloat16, False)]


def test_dh_lies_over_h_which_nobody_else_reads(make_case, quantized_orders, watch):
    over = []
    watch(
        down_backward,
        "launch",
        lambda _, __, h, *___, dh, **____: over.append(dh.values.data_ptr() == h.values.data_ptr()),
    )
    make_case(*SIZES).run(precision="fp8")
    assert over == [True]


@pytest.mark.parametrize("trained", [True, False])
def test_no_transpose_waits_where_x_needs_no_gradient(make_case, quantized_orders, trained):
    """Nothing reads W_up's; of a layer that is not trained either, none."""
    case = make_case(*SIZES)
    expected = case.run(precision="fp8")
    case.x = case.x.detach()
    leaves = [t.requires_grad_(trained) for t in (case.gate_up_proj, case.down_proj, case.scores)]
    quantized_orders.clear()
    out = case.forward(precision="fp8")
    gradients = torch.autograd.grad(out, leaves, case.d_out) if trained else ()
    assert quantized_orders == [OWN, OWN, *[TURNED] * trained]
    assert all(map(torch.equal, (out, *gradients), (expected[0], *expected[2:])))
