"""Low-rank factors of ``moe_mlp``: float32 ones, frozen weights beside them, what they save, count and refuse. That they compute
what experts of W + b a compute is tested with all else in test_against_reference.py and test_hopper.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from blazeproto.autograd import LowRank, SavePolicy, chunks, saved_bytes, steps, torch_backend
from tests.autograd.cases import WEIGHTS
from tests.autograd.comparison import assert_close
from tests.refusals import refuses

POLICIES = [policy.value for policy in SavePolicy]


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
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, gradient.bfloat16().float())


def test_two_ranks(adapted):
    case, other = adapted(rank=8), adapted(rank=24)
    case.down_a, case.down_b = other.down_a, other.down_b
    assert_close(case.run(), case.reference(), 1e-13)


FREELY = [(), WEIGHTS, ("gate_up_proj",), ("down_proj",), ("down_bias", "gate_up_proj"), ("up_bias",)]


@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("workspace_bytes", [None, 20_000])
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("factors", [None, "both", "up", "down"])
@pytest.mark.parametrize("trained", FREELY)
def test_policies_chunks_capacity_and_trained_weights(adapted, save, workspace_bytes, capacity, factors, trained):
    case = adapted(factors=factors, bias=True, sentinels=True, capacity=capacity, trained=trained, rank=5)
    assert_close(case.run(save=save, workspace_bytes=workspace_bytes), case.reference(), 1e-13)


@pytest.mark.parametrize("save", POLICIES)
def test_transient_rows_of_factors_are_within_the_workspace(adapted, save, monkeypatch):
    case, seen = adapted(200, dtype=torch.float32, rank=3), []
    per_row = 4 * (48 + 24 + 8 + 5 * 8)  # in the down backward: H, A', X A^T; what act A^T and dO B take
    real = torch_backend.low_rank_rows
    monkeypatch.setattr(
        torch_backend, "low_rank_rows", lambda a, f, rows, **k: seen.append(rows.num_rows) or real(a, f, rows, **k)
    )
    case.run(save=save, workspace_bytes=per_row * 3 * 40)
    assert max(seen) <= 3 * 40 and len(seen) >= 4 * 5
    needed = refuses(lambda: case.run(save=save, workspace_bytes=3 * per_row - 1), "workspace_bytes").expected
    assert needed.startswith(f"at least {3 * per_row}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("save", POLICIES)
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
    """A backward allocates nothing of its shape. test_frozen.py says what it runs."""
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
    case = adapted(dtype=torch.float32)

    def launched(*args, **kwargs):
        raise AssertionError("something was launched")

    monkeypatch.setattr(chunks, "dispatch_backend", launched)
    monkeypatch.setattr(steps, "backend_on", launched)
    argument, replaced = BAD[what]
    refuses(lambda: case.forward(**replaced), argument)


def test_float64_wants_float64_factors(adapted):
    refuses(adapted(factor_dtype=torch.float32).forward, "up_factors.a")


def test_transforms_are_refused(adapted):
    case = adapted()
    with pytest.raises(RuntimeError, match="moe_mlp: expected a call outside"):
        torch.func.grad(lambda a: case.forward(up_factors=LowRank(a, case.up_b)).sum())(case.up_a)
