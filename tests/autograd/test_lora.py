"""``moe_mlp`` with low-rank factors computes what experts of W + B A compute, and gradients for what is trained.

On the Hopper backend the yardstick is that of test_hopper.py: the torch backend in bfloat16 on the same inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from blazeproto.activations import ACTIVATIONS, clamped_swiglu
from blazeproto.autograd import LowRank, SavePolicy, chunks, moe_mlp, saved_bytes, steps, torch_backend
from blazeproto.dispatch import Dispatch
from blazeproto.reference import moe_mlp as reference_mlp
from tests.autograd.comparison import assert_as_good_as

WEIGHTS = ("gate_up_proj", "down_proj", "up_bias", "down_bias")
POLICIES = [policy.value for policy in SavePolicy]
ADAPTED = {"both": (True, True), "up": (True, False), "down": (False, True), "neither": (False, False)}
SHAPE = (8192, 2048, 768, 128, 8)  # whose H and Y are smaller than down_proj


@dataclass
class Adapted:
    """A case of conftest.py with factors; its weights and biases are trained where they require a gradient."""

    case: object
    up: LowRank | None
    down: LowRank | None

    @property
    def parameters(self) -> list[Tensor]:
        """x, scores, the factors that there are, a and b of up, then of down, and the weights and biases that are trained."""
        return [self.case.x, self.case.scores, *(self.up or ()), *(self.down or ()), *self.trained.values()]

    @property
    def trained(self) -> dict[str, Tensor]:
        weights = {name: getattr(self.case, name) for name in WEIGHTS}
        return {name: t for name, t in weights.items() if t is not None and t.requires_grad}

    @property
    def arguments(self) -> dict:
        case = self.case
        options = {**case.options, **case.varying}
        weights = {"gate_up_proj": case.gate_up_proj, "down_proj": case.down_proj}
        biases = {"up_bias": case.up_bias, "down_bias": case.down_bias}
        inputs = {"x": case.x, "scores": case.scores, "topk_experts": case.topk_experts}
        return {**inputs, **weights, **biases, "up_factors": self.up, "down_factors": self.down, **options}

    def forward(self, **options) -> Tensor:
        return moe_mlp(**{**self.arguments, **options})

    def run(self, **options) -> list[Tensor]:
        out = self.forward(**options)
        return [out.detach(), *torch.autograd.grad(out, self.parameters, self.case.d_out)]

    def function(self, *parameters: Tensor, **options) -> Tensor:
        """`forward` of other parameters."""
        x, scores, *rest = parameters
        factors = {}
        for name, there in (("up_factors", self.up), ("down_factors", self.down)):
            factors[name] = None if there is None else LowRank(*rest[:2])
            rest = rest if there is None else rest[2:]
        return self.forward(x=x, scores=scores, **factors, **dict(zip(self.trained, rest, strict=True)), **options)

    def reference(self) -> list[Tensor]:
        """The oracle on W + b a, in float64, with gradients of float64 copies."""
        case = self.case
        copies = [t.detach().double().requires_grad_() for t in self.parameters]
        x, scores, *rest = copies
        factors = [rest.pop(0) for _ in range(2 * ((self.up is not None) + (self.down is not None)))]
        named = {name: t if t is None else t.double() for name in WEIGHTS for t in [getattr(case, name)]}
        named |= dict(zip(self.trained, rest, strict=True))
        weights = []
        for name, there in (("gate_up_proj", self.up), ("down_proj", self.down)):
            a, b = (factors.pop(0), factors.pop(0)) if there is not None else (None, None)
            weights.append(named[name] if a is None else named[name] + b @ a)
        biases = {"up_bias": named["up_bias"], "down_bias": named["down_bias"]}
        varying = {"pair_tokens": case.varying.get("pair_tokens")}
        out = reference_mlp(x, *weights, scores, case.topk_experts, **biases, **varying, **case.options)
        return [out.detach(), *torch.autograd.grad(out, copies, case.d_out.double())]


class Shapes(TorchDispatchMode):
    """The shapes of what is allocated."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if operator.name().startswith(("aten::empty", "aten::zeros", "aten::new_")) and isinstance(made, Tensor):
            self.shapes.add(tuple(made.shape))
        return made


@pytest.fixture
def adapted(make_case):
    """``adapted(num_tokens, …, which="both", rank=8, factor_dtype=…, trained=(), other options of make_case)`` -> Adapted.
    trained: names of weights and biases; the others are frozen."""

    def make(*shape, which="both", rank=8, factor_dtype=None, trained=(), **options) -> Adapted:
        case = make_case(*shape, **options)
        for name in WEIGHTS:
            if name not in trained and (frozen := getattr(case, name)) is not None:
                setattr(case, name, frozen.detach())

        def factors(weight: Tensor) -> LowRank:
            num_experts, width_out, width_in = weight.shape
            a = torch.randn(num_experts, rank, width_in) * width_in**-0.5
            b = torch.randn(num_experts, width_out, rank) * rank**-0.5
            dtype = factor_dtype or weight.dtype
            return LowRank(*(t.to(weight.device, dtype).requires_grad_() for t in (a, b)))

        up, down = ADAPTED[which]
        return Adapted(case, factors(case.gate_up_proj) if up else None, factors(case.down_proj) if down else None)

    return make


def assert_close(got, expected, tolerance):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"output {index} of shape {tuple(b.shape)} is off by {error:.2e}"


# ---- right answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("which", ADAPTED)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sentinels", [False, True])
def test_agrees_with_the_oracle_of_the_summed_weights(adapted, activation, which, bias, sentinels):
    layer = adapted(activation=activation, which=which, bias=bias, sentinels=sentinels, idle=(2,))
    assert_close(layer.run(), layer.reference(), 1e-13)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize("which", ADAPTED)
def test_gradcheck(adapted, activation, which):
    layer = adapted(5, 4, 3, 4, 2, activation=activation, which=which, rank=3, bias=True, sentinels=which == "up")
    assert torch.autograd.gradcheck(layer.function, layer.parameters, fast_mode=True)


@pytest.mark.parametrize("which", ["both", "up", "down"])
def test_float32_as_dense_weights_with_autograd(adapted, which):
    """`moe_mlp` of W + b a, through which autograd goes to a and b."""
    layer = adapted(64, 32, 48, 6, 3, which=which, bias=True, dtype=torch.float32)
    case, frozen = layer.case, (layer.case.gate_up_proj, layer.case.down_proj)
    pairs = zip(frozen, (layer.up, layer.down), strict=True)
    dense = [weight if factors is None else weight + factors.b @ factors.a for weight, factors in pairs]
    biases = {"up_bias": case.up_bias, "down_bias": case.down_bias}
    out = moe_mlp(case.x, *dense, case.scores, case.topk_experts, **biases, **case.options)
    assert_close(layer.run(), [out.detach(), *torch.autograd.grad(out, layer.parameters, case.d_out)], 2e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("shape", [(64, 32, 48, 6, 2), (50, 21, 13, 4, 4), (1, 8, 8, 1, 1), (33, 1, 1, 3, 2)])
@pytest.mark.parametrize("rank", [1, 8, 20])
def test_other_dtypes_widths_and_ranks(adapted, dtype, tolerance, shape, rank):
    layer = adapted(*shape, rank=rank, dtype=dtype, bias=True, sentinels=True)
    results = layer.run()
    assert_close(results, layer.reference(), tolerance)
    assert [(t.shape, t.dtype) for t in results[1:]] == [(p.shape, p.dtype) for p in layer.parameters]


def test_float32_factors_of_bf16_experts(adapted):
    """Their gradients are float32 sums that were never rounded to bf16."""
    layer = adapted(64, 32, 48, 6, 2, dtype=torch.bfloat16, factor_dtype=torch.float32)
    results = layer.run()
    assert_close(results, layer.reference(), 1.5e-2)
    for gradient in results[3:]:
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float())


def test_two_ranks(adapted):
    layer, other = adapted(rank=8), adapted(rank=24)
    layer.down = other.down
    assert_close(layer.run(), layer.reference(), 1e-13)


def test_adapters_together_are_their_factors_side_by_side(adapted):
    layer, other = adapted(rank=8), adapted(rank=4)
    side_by_side = [
        LowRank(torch.cat((one.a, two.a), 1), torch.cat((one.b, two.b), 2))
        for one, two in ((layer.up, other.up), (layer.down, other.down))
    ]
    case = layer.case
    dense = [case.gate_up_proj, case.down_proj]
    for index, (one, two) in enumerate(((layer.up, other.up), (layer.down, other.down))):
        dense[index] = dense[index] + one.b @ one.a + two.b @ two.a
    expected = reference_mlp(case.x, *dense, case.scores, case.topk_experts, **case.options)
    out = layer.forward(up_factors=side_by_side[0], down_factors=side_by_side[1])
    parameters = [*layer.parameters, *other.parameters[2:]]
    gradients = (torch.autograd.grad(made, parameters, case.d_out) for made in (out, expected))
    assert_close([out, *next(gradients)], [expected, *next(gradients)], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_tokens_get_zeros(adapted, dtype):
    idle = [0, 2, 3, 5, 6, 7]
    layer = adapted(num_experts=8, top_k=2, idle=tuple(idle), dtype=dtype)
    results = layer.run()
    assert_close(results, layer.reference(), 1e-5)
    for gradient in results[3:]:
        assert gradient[idle].abs().max() == 0 and gradient[[1, 4]].abs().min() > 0


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_few_tokens(adapted, num_tokens, dtype):
    layer = adapted(num_tokens, dtype=dtype, bias=True)
    results = layer.run()
    assert [t.shape for t in results[1:]] == [p.shape for p in layer.parameters]
    assert_close(results, layer.reference(), 1e-13 if dtype == torch.float64 else 2e-2)


def test_pairs_that_are_not_here(adapted):
    """A sentinel's score may be anything: nothing is read for the pair and its gradient is zero."""
    layer = adapted(sentinels=True, bias=True)
    away = (layer.case.topk_experts < 0) | (layer.case.topk_experts >= 5)
    clean = layer.run()
    with torch.no_grad():
        layer.case.scores[away] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(layer.run(), clean, strict=True))
    assert (clean[2][away] == 0).all() and (clean[2][~away] != 0).all()


def test_a_dispatch_built_before(adapted):
    layer = adapted(sentinels=True)
    expected = layer.run()
    pair_indices, offsets, token_index_map = torch.ops.blazeproto.dispatch(layer.case.topk_experts, 5, 0, "torch")
    made = Dispatch(pair_indices, offsets[0], token_index_map, None, num_experts=5, top_k=3, num_tokens=37)
    layer.case.topk_experts = None
    assert all(torch.equal(a, b) for a, b in zip(layer.run(dispatch=made), expected, strict=True))


@pytest.mark.parametrize("save", POLICIES)
def test_a_varying_number_of_experts_a_token(adapted, save):
    layer = adapted(varying=True, trained=WEIGHTS, bias=True)
    assert_close(layer.run(save=save), layer.reference(), 1e-13)
    case, expected = layer.case, layer.run()
    pair_indices, offsets, token_index_map = torch.ops.blazeproto.dispatch(case.topk_experts, 5, 0, "torch")
    lists = dict(case.varying)
    made = Dispatch(pair_indices, offsets[0], token_index_map, None, 5, None, 37, **lists)
    case.varying = {}
    assert all(torch.equal(a, b) for a, b in zip(layer.run(dispatch=made, topk_experts=None), expected, strict=True))


def test_autocast(adapted):
    layer = adapted(96, 32, 48, 6, 3, dtype=torch.float32, bias=True)
    expected, layer.case.d_out = layer.reference(), layer.case.d_out.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *gradients = layer.run()
    assert out.dtype == torch.bfloat16 and {g.dtype for g in gradients} == {torch.float32}
    assert_close((out, *gradients), expected, 2e-2)


def test_tensors_that_are_not_contiguous(adapted):
    layer = adapted()
    expected = layer.run()
    scattered = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for t in (*layer.up, *layer.down)]
    assert not any(t.is_contiguous() for t in scattered)
    layer.up, layer.down = (LowRank(*(t.requires_grad_() for t in pair)) for pair in (scattered[:2], scattered[2:]))
    assert_close(layer.run(), expected, 1e-14)


FREELY = [(), WEIGHTS, ("gate_up_proj",), ("down_proj",), ("down_bias", "gate_up_proj"), ("up_bias",)]


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("which", ADAPTED)
@pytest.mark.parametrize("trained", FREELY)
def test_policies_chunks_capacity_and_trained_weights(adapted, save, workspace_bytes, capacity, which, trained):
    layer = adapted(which=which, bias=True, sentinels=True, capacity=capacity, trained=trained, rank=5)
    assert_close(layer.run(save=save, workspace_bytes=workspace_bytes), layer.reference(), 1e-13)


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 2_000])
def test_gradcheck_of_policies_and_chunks(adapted, save, workspace_bytes):
    layer = adapted(5, 4, 3, 4, 2, rank=3, bias=True, trained=WEIGHTS)

    def function(*parameters):
        return layer.function(*parameters, save=save, workspace_bytes=workspace_bytes)

    assert torch.autograd.gradcheck(function, layer.parameters, fast_mode=True)


@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_agree_to_the_bit(adapted, workspace_bytes, dtype):
    layer = adapted(64, 32, 48, 6, 3, dtype=dtype, bias=True, trained=WEIGHTS)
    first, *others = (layer.run(save=save, workspace_bytes=workspace_bytes) for save in POLICIES)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("save", POLICIES)
def test_transient_rows_of_factors_are_within_the_workspace(adapted, save, monkeypatch):
    layer, seen = adapted(200, dtype=torch.float32, rank=3), []
    per_row = 4 * (48 + 24 + 8 + 5 * 8)  # in the down backward: H, A', X A^T; what act A^T and dO B take
    real = torch_backend.low_rank_rows
    monkeypatch.setattr(
        torch_backend, "low_rank_rows", lambda a, f, rows, **k: seen.append(rows.num_rows) or real(a, f, rows, **k)
    )
    layer.run(save=save, workspace_bytes=per_row * 3 * 40)
    assert max(seen) <= 3 * 40 and len(seen) >= 4 * 5
    with pytest.raises(ValueError, match=f"workspace_bytes: expected at least {3 * per_row}"):
        layer.run(save=save, workspace_bytes=3 * per_row - 1)


# ---- the node ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ADAPTED)
def test_any_subset_of_gradients(adapted, which):
    layer = adapted(which=which, bias=True)
    _, *everything = layer.run()
    count = len(everything)
    for wanted in ([i == j for i in range(count)] for j in range(count)):
        for parameter, want in zip(layer.parameters, wanted, strict=True):
            parameter.requires_grad_(want)
        [mine], [expected] = (
            [t for t, want in zip(of, wanted, strict=True) if want] for of in (layer.parameters, everything)
        )
        (gradient,) = torch.autograd.grad(layer.forward(), mine, layer.case.d_out)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_no_gradient_of_a_frozen_tensor(adapted):
    layer = adapted(bias=True)
    layer.forward().backward(layer.case.d_out)
    case = layer.case
    assert all(t.grad is None for t in (case.gate_up_proj, case.down_proj, case.up_bias, case.down_bias))
    assert all(t.grad is not None for t in layer.parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("trains_down", [False, True])
def test_saved_bytes(adapted, bytes_saved_by, dtype, save, trains_down):
    """X, S, the indices, H, XA and act A_down^T, whose rank is the padded one; act for a down weight or factor alone."""
    num_tokens, d, n, num_experts, top_k, rank = 96, 32, 48, 6, 3, 8
    trained = ("down_proj",) if trains_down else ()
    layer = adapted(num_tokens, d, n, num_experts, top_k, rank=rank, dtype=dtype, trained=trained)
    layer.down.a.requires_grad_(trains_down)
    known = (layer.case.gate_up_proj, layer.case.down_proj, *layer.up, *layer.down)
    of_row = {"minimal": 2 * n + 2 * rank, "paper": (2 + trains_down) * n + 2 * rank, "recompute": 0}[save]
    expected = num_tokens * (dtype.itemsize * (d + of_row * top_k) + 12 * top_k) + 4 * (num_experts + 1)
    assert bytes_saved_by(lambda: layer.forward(save=save), known) == expected
    sizes = {"num_tokens": num_tokens, "d_model": d, "d_expert": n, "num_experts": num_experts, "top_k": top_k}
    policy = save if trains_down or save != "paper" else "minimal"
    assert saved_bytes(policy, **sizes, itemsize=dtype.itemsize, up_rank=rank - 3, down_rank=rank) == expected


@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("trained", FREELY)
def test_a_frozen_tensor_has_nothing_made_for_it(adapted, monkeypatch, trained, workspace_bytes):
    """No gradient, by either kind of sum; and a backward allocates nothing of its shape."""
    layer, made = adapted(64, dtype=torch.float32, bias=True, trained=trained), []
    shapes = {tuple(getattr(layer.case, name).shape): name for name in WEIGHTS}

    def watch(name):
        real = getattr(torch_backend, name)

        def counted(*args, **kwargs):
            result = real(*args, **kwargs)
            made.append(shapes.get(tuple(result.shape)))
            return result

        monkeypatch.setattr(torch_backend, name, counted)

    watch("weight_gradient")
    watch("expert_row_sum")
    out = layer.forward(workspace_bytes=workspace_bytes)
    with Shapes() as seen:
        torch.autograd.grad(out, layer.parameters, layer.case.d_out)
    assert {name for name in made if name} == set(trained)
    assert {name for shape, name in shapes.items() if shape in seen.shapes} <= set(trained)


def test_nothing_is_saved_without_gradients(adapted):
    layer = adapted()
    expected = layer.forward()
    with torch.no_grad():
        out = layer.forward()
    assert out.grad_fn is None and torch.equal(out, expected)


def test_a_graph_that_is_kept(adapted):
    layer = adapted(bias=True)
    out = layer.forward()
    first = torch.autograd.grad(out, layer.parameters, layer.case.d_out, retain_graph=True)
    second = torch.autograd.grad(out, layer.parameters, layer.case.d_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_double_backward_is_refused(adapted):
    layer = adapted()
    (dx,) = torch.autograd.grad(layer.forward().square().sum(), layer.case.x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dx.sum().backward()


def test_gradient_of_stride_zero(adapted):
    layer = adapted()
    expanded = torch.autograd.grad(layer.forward().sum(), layer.parameters)
    layer.case.d_out = torch.ones_like(layer.case.d_out)
    assert all(torch.equal(a, b) for a, b in zip(expanded, layer.run()[1:], strict=True))


@pytest.mark.parametrize("which", ADAPTED)
def test_compiles_without_a_break(adapted, which):
    layer = adapted(which=which, rank=5, bias=True, sentinels=True)
    expected = layer.run()
    torch.compiler.reset()
    compiled = torch.compile(layer.function, fullgraph=True, backend="aot_eager")
    out = compiled(*layer.parameters)
    got = (out, *torch.autograd.grad(out, layer.parameters, layer.case.d_out))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_operations_are_counted(adapted):
    """For a row: two for a frozen weight, three of a factor's for each of its products: rows, their gradient, its own."""
    layer = adapted(64, 32, 48, 6, 2, rank=8, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        layer.forward().backward(layer.case.d_out)
    weights, factors = (32 * 96 + 48 * 32), (8 * (32 + 96) + 8 * (48 + 32))
    assert counter.get_total_flops() == 2 * 128 * (2 * weights + 3 * factors)


# ---- refused -------------------------------------------------------------------------------------------------------


def pair(*shapes, dtype=torch.float32):
    return LowRank(*(torch.ones(shape, dtype=dtype) for shape in shapes))


BAD = {
    "a tuple": ({"up_factors": (1, 2)}, TypeError, r"up_factors: expected a LowRank or None, got tuple"),
    "a number": ({"up_factors": 3}, TypeError, r"up_factors: expected a LowRank or None, got int"),
    "no tensor": (
        {"down_factors": LowRank([1.0], [1.0])},
        TypeError,
        r"down_factors\.a: expected a torch\.Tensor, got list",
    ),
    "integers": (
        {"up_factors": pair((5, 8, 16), (5, 48, 8), dtype=torch.int32)},
        TypeError,
        r"up_factors\.a: expected dtype .*, got torch\.int32",
    ),
    "another dtype": (
        {"down_factors": pair((5, 8, 24), (5, 16, 8), dtype=torch.bfloat16)},
        ValueError,
        r"down_factors\.a: expected dtype torch\.float32 .*, got torch\.bfloat16",
    ),
    "another device": (
        {"up_factors": LowRank(torch.ones(5, 8, 16, device="meta"), torch.ones(5, 48, 8))},
        ValueError,
        r"up_factors\.a: expected on cpu as x is, got meta",
    ),
    "two dimensions": (
        {"up_factors": pair((40, 16), (48, 40))},
        ValueError,
        r"up_factors\.a: expected shape \(E, r, in\) = \(5, r, 16\), r >= 1, got \(40, 16\)",
    ),
    "other experts": (
        {"up_factors": pair((4, 8, 16), (4, 48, 8))},
        ValueError,
        r"up_factors\.a: expected shape \(E, r, in\) = \(5, r, 16\), r >= 1, got \(4, 8, 16\)",
    ),
    "another width": (
        {"down_factors": pair((5, 8, 16), (5, 16, 8))},
        ValueError,
        r"down_factors\.a: expected shape \(E, r, in\) = \(5, r, 24\), r >= 1, got \(5, 8, 16\)",
    ),
    "no rank": (
        {"up_factors": pair((5, 0, 16), (5, 48, 0))},
        ValueError,
        r"up_factors\.a: expected shape \(E, r, in\) = \(5, r, 16\), r >= 1, got \(5, 0, 16\)",
    ),
    "two ranks": (
        {"up_factors": pair((5, 8, 16), (5, 48, 16))},
        ValueError,
        r"up_factors\.b: expected shape \(E, out, r\) = \(5, 48, 8\), got \(5, 48, 16\)",
    ),
    "the halves of a gate": (
        {"up_factors": pair((5, 8, 16), (5, 24, 8))},
        ValueError,
        r"up_factors\.b: expected shape \(E, out, r\) = \(5, 48, 8\), got \(5, 24, 8\)",
    ),
    "an unknown activation": ({"activation": "swish"}, ValueError, r"activation: expected"),
    "an unknown backend": ({"backend": "cuda"}, ValueError, r"backend: expected one of"),
    "another shape of x": ({"x": torch.ones(37, 8)}, ValueError, r"down_proj: expected shape"),
    "no choice": ({"topk_experts": None}, ValueError, r"topk_experts: expected \(T, K\) expert ids, or dispatch="),
    "no Dispatch": ({"topk_experts": None, "dispatch": 3}, TypeError, r"dispatch: expected a Dispatch, got int"),
    **{
        combine: ({"combine": combine}, ValueError, f"combine: expected 'gather' with down_factors, got '{combine}'")
        for combine in ("fused", "fused_both")
    },
    "hopper on a CPU": ({"backend": "hopper"}, ValueError, r'got "hopper", which needs'),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name(adapted, monkeypatch, what):
    layer = adapted(dtype=torch.float32)

    def refuse(*args, **kwargs):
        raise AssertionError("something was launched")

    monkeypatch.setattr(chunks, "dispatch_backend", refuse)
    monkeypatch.setattr(steps, "backend_on", refuse)
    replaced, error, message = BAD[what]
    with pytest.raises(error, match=message):
        layer.forward(**replaced)


def test_float64_wants_float64_factors(adapted):
    layer = adapted(factor_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"up_factors\.a: expected dtype torch\.float64 .*, got torch\.float32"):
        layer.forward()


def test_transforms_are_refused(adapted):
    layer = adapted()
    with pytest.raises(RuntimeError, match="moe_mlp: expected a call outside"):
        torch.func.grad(lambda a: layer.forward(up_factors=LowRank(a, layer.up.b)).sum())(layer.up.a)


# ---- the Hopper backend --------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_adapted(adapted):
    return lambda *shape, **options: adapted(*shape, **{"dtype": torch.bfloat16, "device": "cuda", **options})


def check_on_hopper(layer, **options):
    got = layer.run(backend="hopper", **options)
    assert_as_good_as(got, layer.run(backend="torch", **options), layer.reference())
    assert [t.dtype for t in got[1:]] == [p.dtype for p in layer.parameters]
    return got


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [*ACTIVATIONS, clamped_swiglu(0.5, 1.3)])
@pytest.mark.parametrize(("bias", "sentinels"), [(False, True), (True, False)])
@pytest.mark.parametrize("which", ADAPTED)
def test_hopper_agrees_with_the_oracle(gpu_adapted, poisoned, activation, bias, sentinels, which):
    options = {"activation": activation, "bias": bias, "sentinels": sentinels, "which": which}
    check_on_hopper(gpu_adapted(3500, 72, 40, 7, 3, rank=16, idle=(2,), **options))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(64, 64, 64, 1, 1), (37, 72, 40, 5, 3), (4096, 512, 2048, 4, 1), (2048, 256, 256, 128, 4)]
)
@pytest.mark.parametrize("rank", [1, 8, 16, 32, 72])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32])
def test_hopper_shapes_and_ranks(gpu_adapted, poisoned, shape, rank, factor_dtype):
    check_on_hopper(gpu_adapted(*shape, rank=rank, factor_dtype=factor_dtype))


@pytest.mark.gpu
def test_hopper_two_ranks(gpu_adapted, poisoned):
    layer = gpu_adapted(1000, 128, 96, 8, 3, rank=8)
    layer.down = gpu_adapted(1000, 128, 96, 8, 3, rank=48).down
    check_on_hopper(layer)


@pytest.mark.gpu
def test_hopper_gradients_of_float32_factors_are_not_rounded(gpu_adapted, poisoned):
    for gradient in gpu_adapted(1000, 128, 96, 8, 3, factor_dtype=torch.float32).run(backend="hopper")[3:]:
        assert not torch.equal(gradient, gradient.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_hopper_few_tokens(gpu_adapted, num_tokens):
    layer = gpu_adapted(num_tokens, 64, 64, 5, 3, bias=True)
    results = layer.run(backend="hopper")
    assert [t.shape for t in results[1:]] == [p.shape for p in layer.parameters]
    assert all(t.isfinite().all() for t in results)
    assert num_tokens or not any(t.any() for t in results)


@pytest.mark.gpu
def test_hopper_experts_without_tokens_get_zeros(gpu_adapted, poisoned):
    idle = [0, 2, 3, 5, 6, 7]
    layer = gpu_adapted(500, 64, 64, 8, 2, idle=tuple(idle))
    for gradient in check_on_hopper(layer)[3:]:
        assert gradient[idle].abs().max() == 0 and gradient[[1, 4]].abs().max() > 0


@pytest.mark.gpu
def test_hopper_a_varying_number_of_experts_a_token(gpu_adapted, poisoned):
    check_on_hopper(gpu_adapted(3500, 72, 40, 7, 3, varying=True, rank=16, trained=WEIGHTS, bias=True))


@pytest.mark.gpu
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("workspace_bytes", [None, 2_000_000])
@pytest.mark.parametrize("trained", [(), WEIGHTS, ("down_proj",)])
def test_hopper_policies_chunks_and_capacity(gpu_adapted, poisoned, save, capacity, workspace_bytes, trained):
    layer = gpu_adapted(3500, 72, 40, 7, 3, rank=16, bias=True, sentinels=True, capacity=capacity, trained=trained)
    got = check_on_hopper(layer, save=save, workspace_bytes=workspace_bytes)
    again = layer.run(backend="hopper", save="minimal", workspace_bytes=workspace_bytes)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("combine", ["fused", "fused_both"])
@pytest.mark.parametrize("rank", [8, 32, 72])
@pytest.mark.parametrize("workspace_bytes", [None, 2_000_000])
def test_hopper_sums_on_the_fly(gpu_adapted, poisoned, combine, rank, workspace_bytes):
    """Beside factors of the up projection alone."""
    layer = gpu_adapted(3500, 72, 40, 7, 3, rank=rank, which="up", bias=True, sentinels=True)
    check_on_hopper(layer, combine=combine, workspace_bytes=workspace_bytes)


@pytest.mark.gpu
def test_hopper_repeats_to_the_bit(gpu_adapted):
    layer = gpu_adapted(3000, 128, 96, 8, 3, rank=16, bias=True, sentinels=True)
    first = layer.run(backend="hopper")
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, layer.run(backend="hopper"), strict=True))


@pytest.mark.gpu
def test_hopper_a_kept_graph_and_a_compiled_one_have_the_same_bits(gpu_adapted):
    """There dH has a place of its own."""
    layer = gpu_adapted(3000, 128, 96, 8, 3, rank=16, bias=True)
    expected = layer.run(backend="hopper")
    out = layer.forward(backend="hopper")
    for keep in (True, True, False):
        got = torch.autograd.grad(out, layer.parameters, layer.case.d_out, retain_graph=keep)
        assert all(torch.equal(a, b) for a, b in zip(got, expected[1:], strict=True))
    torch.compiler.reset()
    out = torch.compile(layer.function, fullgraph=True, backend="aot_eager")(*layer.parameters)
    got = (out, *torch.autograd.grad(out, layer.parameters, layer.case.d_out))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_hopper_in_a_graph_without_host_synchronisation(gpu_adapted):
    layer = gpu_adapted(3000, 128, 96, 8, 3, rank=16, bias=True)
    expected = layer.run(backend="hopper")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer.run(backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layer.run(backend="hopper")
    for result in captured:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def gpu_step():
    """Forward and backward at SHAPE with r = 16; its down_proj."""
    num_tokens, d, n, num_experts, top_k = SHAPE
    torch.manual_seed(0)

    def normal(*shape, trained=False):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).div_(shape[-1] ** 0.5).requires_grad_(trained)

    up_proj, down_proj = normal(num_experts, 2 * n, d), normal(num_experts, d, n)
    up = LowRank(normal(num_experts, 16, d, trained=True), normal(num_experts, 2 * n, 16, trained=True))
    down = LowRank(normal(num_experts, 16, n, trained=True), normal(num_experts, d, 16, trained=True))
    x, d_out = normal(num_tokens, d, trained=True), normal(num_tokens, d)
    ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices
    scores = torch.rand(num_tokens, top_k, device="cuda", requires_grad=True)
    options = {"num_experts": num_experts, "up_factors": up, "down_factors": down, "backend": "hopper"}

    def step():
        out = moe_mlp(x, up_proj, down_proj, scores, ids, **options)
        return torch.autograd.grad(out, (x, scores, *up, *down), d_out)

    return step, down_proj


@pytest.mark.gpu
def test_hopper_allocates_nothing_as_large_as_a_weight():
    """The largest allocation of a step is Y or dX~, 268 MB, where down_proj has 403."""
    step, down_proj = gpu_step()
    step()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        step()
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [event["size"] for trace in traces for event in trace if event["action"] == "alloc"]
    of_h = 2 * 8192 * 8 * 2 * 768
    assert of_h <= max(sizes) < down_proj.nbytes, "H is the least that has to be seen"


@pytest.mark.gpu
def test_hopper_has_no_loop_over_experts():
    """Fewer kernels than experts."""
    step, _ = gpu_step()
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    kernels = [event.name for event in profile.events() if event.device_type == device]
    assert 5 < len(kernels) < 64, kernels
