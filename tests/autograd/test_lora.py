"""Low-rank factors of ``moe_mlp``: float32 ones, frozen weights beside them, what they save, count and refuse. That they compute
what experts of W + b a compute is tested with all else in test_against_reference.py and test_hopper.py.
And what backward runs where one tensor is trained."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from blazeproto.autograd import LowRank, SavePolicy, chunks, saved_bytes, steps, torch_backend
from tests.autograd.cases import WEIGHTS, assert_close
from tests.refusals import refuses


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
    """`make_case` with factors of both projections and frozen weights, where nothing else is said."""
    return partial(make_case, factors="both", trained=())


def test_float32_factors_of_bf16_experts(adapted):
    """Their gradients are float32 sums that were never rounded to bf16."""
    case = adapted(64, 32, 48, 6, 2, dtype=torch.bfloat16, factor_dtype=torch.float32)
    results = case.run()
    assert_close(results, case.reference(), 1.5e-2)
    for gradient in results[3:]:
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())


def test_two_ranks(adapted):
    case, other = adapted(rank=8), adapted(rank=24)
    case.down_a, case.down_b = other.down_a, other.down_b
    assert_close(case.run(), case.reference(), 1e-13)


FREELY = [(), WEIGHTS, ("gate_up_proj",), ("down_proj",), ("down_bias", "gate_up_proj"), ("up_bias",)]


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("factors", [None, "both", "up", "down"])
@pytest.mark.parametrize("trained", FREELY)
def test_policies_chunks_capacity_and_trained_weights(adapted, save, workspace_bytes, capacity, factors, trained):
    case = adapted(factors=factors, bias=True, sentinels=True, capacity=capacity, trained=trained, rank=5)
    assert_close(case.run(save=save, workspace_bytes=workspace_bytes), case.reference(), 1e-13)


@pytest.mark.parametrize("save", SavePolicy)
def test_transient_rows_of_factors_are_within_the_workspace(adapted, save, watch):
    case, seen = adapted(200, dtype=torch.float32, rank=3), []
    per_row = 4 * (48 + 24 + 8 + 5 * 8)  # in the down backward: H, A', X A^T; what act A^T and dO B take
    watch(torch_backend, "low_rank_rows", lambda a, factors, rows, **_: seen.append(rows.num_rows))
    case.run(save=save, workspace_bytes=per_row * 3 * 40)
    assert max(seen) <= 3 * 40 and len(seen) >= 4 * 5
    needed = refuses(lambda: case.run(save=save, workspace_bytes=3 * per_row - 1), "workspace_bytes").expected
    assert needed.startswith(f"at least {3 * per_row}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("trains_down", [False, True])
def test_saved_bytes(adapted, bytes_saved_by, dtype, save, trains_down):
    """X, S, the indices, H, XA and act A_down^T, whose rank is the padded one; act for a down weight or factor alone."""
    num_tokens, d, n, num_experts, top_k, rank = 96, 32, 48, 6, 3, 8
    trained = ("down_proj",) if trains_down else ()
    case = adapted(num_tokens, d, n, num_experts, top_k, rank=rank, dtype=dtype, trained=trained)
    case.down_a.requires_grad_(trains_down)
    known = (case.gate_up_proj, case.down_proj, case.up_a, case.up_b, case.down_a, case.down_b)
    of_row = {"minimal": 2 * n + 2 * rank, "paper": (2 + trains_down) * n + 2 * rank, "recompute": 0}[save]
    expected = num_tokens * (dtype.itemsize * (d + of_row * top_k) + 12 * top_k) + 4 * (num_experts + 1)
    assert bytes_saved_by(lambda: case.forward(save=save), known) == expected
    sizes = {"num_tokens": num_tokens, "d_model": d, "d_expert": n, "num_experts": num_experts, "top_k": top_k}
    policy = save if trains_down or save != "paper" else "minimal"
    assert saved_bytes(policy, **sizes, itemsize=dtype.itemsize, up_rank=rank - 3, down_rank=rank) == expected


@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("trained", FREELY)
def test_a_frozen_tensor_has_nothing_made_for_it(adapted, trained, workspace_bytes):
    """A backward allocates nothing of its shape. The last test says what it runs."""
    case = adapted(64, dtype=torch.float32, bias=True, trained=trained)
    shapes = {tuple(getattr(case, name).shape): name for name in WEIGHTS}
    out = case.forward(workspace_bytes=workspace_bytes)
    with Shapes() as seen:
        case.gradients(out)
    assert {name for shape, name in shapes.items() if shape in seen.shapes} <= set(trained)


def test_operations_are_counted(adapted):
    """For a row: two for a frozen weight, three of a factor's for each of its products: rows, their gradient, its own."""
    case = adapted(64, 32, 48, 6, 2, rank=8, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        case.forward().backward(case.d_out)
    weights, factors = (32 * 96 + 48 * 32), (8 * (32 + 96) + 8 * (48 + 32))
    assert counter.get_total_flops() == 2 * 128 * (2 * weights + 3 * factors)


def pair(*shapes, dtype=torch.float32):
    return LowRank(*(torch.ones(shape, dtype=dtype) for shape in shapes))


BAD = {  # what no wrong value of tests/test_wrong_arguments.py is
    "another dtype": ("down_factors.a", {"down_factors": pair((5, 8, 24), (5, 16, 8), dtype=torch.bfloat16)}),
    "two dimensions": ("up_factors.a", {"up_factors": pair((40, 16), (48, 40))}),
    "another width": ("down_factors.a", {"down_factors": pair((5, 8, 16), (5, 16, 8))}),
    "no rank": ("up_factors.a", {"up_factors": pair((5, 0, 16), (5, 48, 0))}),
    "two ranks": ("up_factors.b", {"up_factors": pair((5, 8, 16), (5, 48, 16))}),
    "the halves of a gate": ("up_factors.b", {"up_factors": pair((5, 8, 16), (5, 24, 8))}),
    "a sum on the fly": ("combine", {"combine": "fused"}),
    "both sums on the fly": ("combine", {"combine": "fused_both"}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_by_name(adapted, monkeypatch, what):
    case, (argument, replaced) = adapted(dtype=torch.float32), BAD[what]
    for module, name in ((chunks, "dispatch_backend"), (steps, "backend_on")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was launched"))
    refuses(lambda: case.forward(**replaced), argument)


def test_float64_wants_float64_factors(adapted):
    refuses(adapted(factor_dtype=torch.float32).forward, "up_factors.a")


def test_transforms_are_refused(adapted):
    case = adapted()
    with pytest.raises(RuntimeError, match="moe_mlp: expected a call outside"):
        torch.func.grad(lambda a: case.forward(up_factors=LowRank(a, case.up_b)).sum())(case.up_a)


# --- What backward runs where one tensor is trained ----------------------------------------------------------------------


REDUCED, UP_ROWS = "low_rank_rows d_out b", "low_rank_rows dh b"
DH, DOWN = ("down_backward_act dh", REDUCED), "down_backward_act a_scaled"
STEPS = {  # the one tensor that is trained -> what backward runs for it where H was saved
    "x": {*DH, UP_ROWS, "up_backward_act", "cast up_proj"},
    "scores": {"down_backward_act d_scores bias", REDUCED},
    "gate_up_proj": {*DH, "weight_gradient"},
    "up_bias": {*DH, "expert_row_sum"},
    "up_a": {*DH, UP_ROWS, "weight_gradient"},
    "up_b": {*DH, "weight_gradient"},
    "down_proj": {DOWN, REDUCED, "weight_gradient"},
    "down_bias": {"expert_row_sum"},
    "down_a": {DOWN, REDUCED, "weight_gradient"},
    "down_b": {"weight_gradient"},
}
AGAIN = {"up_forward", "low_rank_rows x a", "cast up_proj"}


@pytest.mark.parametrize("save", SavePolicy)
@pytest.mark.parametrize("workspace_bytes", [None, 40_000])
@pytest.mark.parametrize("trained", STEPS)
def test_backward_runs_what_the_one_trained_tensor_needs(make_case, watch, trained, save, workspace_bytes):
    case, seen = make_case(64, dtype=torch.float32, bias=True, factors="both"), set()
    for name, parameter in case.trained.items():
        parameter.requires_grad_(name == trained)

    def shown(name, args, options):
        if name == "low_rank_rows":
            kinds = {(True, False): "x a", (False, False): "act a", (True, True): "d_out b", (False, True): "dh b"}
            return f"{name} {kinds[options['gather'], options['transposed']]}"
        if name == "down_backward_act":
            step, needs, *_ = args
            made = [each for each, need in zip(("dh", "d_scores", "a_scaled"), needs, strict=True) if need]
            return " ".join((name, *made, *["bias"] * (step.bias is not None)))
        return name

    def look_for_cast(t, dtype):
        if t is not None and t.data_ptr() == case.gate_up_proj.data_ptr():
            seen.add("cast up_proj")

    out = case.forward(save=save, workspace_bytes=workspace_bytes)
    for name in (
        "up_forward",
        "low_rank_rows",
        "down_backward_act",
        "up_backward_act",
        "weight_gradient",
        "expert_row_sum",
    ):
        watch(torch_backend, name, lambda *args, _name=name, **options: seen.add(shown(_name, args, options)))
    watch(steps, "cast", look_for_cast)
    out.backward(case.d_out)
    again = AGAIN | ({"low_rank_rows act a"} if trained == "down_b" else set())
    assert seen == STEPS[trained] | (again if save == "recompute" and trained != "down_bias" else set())
