"""The balancing bias: its values through casts, moves and checkpoints, and what a step of it takes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from blazeproto.router import Router
from blazeproto.router.router import updated_bias
from tests.refusals import refuses

BIAS = torch.linspace(-0.1, 0.1, 8) + 1e-4  # no value is a bf16 or fp16 number


def biased() -> Router:
    router = Router(16, 8, 2, score="sigmoid", bias_update_rate=1e-3)
    with torch.no_grad():
        assert router.expert_bias is not None
        router.expert_bias.copy_(BIAS)
    return router


def saved_and_loaded(router: Router) -> Router:
    file = io.BytesIO()
    torch.save(router, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CASTS: dict[str, Callable[[Router], Any]] = {
    "bf16": lambda r: r.to(torch.bfloat16),
    "half": lambda r: r.half(),
    "device and dtype": lambda r: r.to("cpu", torch.float16),
    "like": lambda r: r.to(torch.zeros(1, dtype=torch.bfloat16)),
    "inside a model": lambda r: torch.nn.Sequential(r).bfloat16()[0],
    "double": lambda r: r.double(),
    "there and back": lambda r: r.bfloat16().float().half().double(),
    "deepcopy": lambda r: copy.deepcopy(r.half()),
    "save": lambda r: saved_and_loaded(r.half()),
    "share_memory": lambda r: r.bfloat16().share_memory(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_leaves_the_bias_as_it_is(cast: Callable[[Router], Router]) -> None:
    bias = cast(biased()).expert_bias
    assert bias is not None and bias.dtype == torch.float32 and torch.equal(bias, BIAS)


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_bias_is_fp32(assign: bool) -> None:
    router = biased().bfloat16()
    state = biased().state_dict()
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS)
    state["expert_bias"] = BIAS.bfloat16()
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, BIAS.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_from_the_meta_device(dtype: torch.dtype) -> None:
    router = Router(16, 8, 2, score="sigmoid", device="meta").to(dtype)
    assert router.expert_bias is not None
    assert router.expert_bias.is_meta and router.expert_bias.dtype == torch.float32
    router.to_empty(device="cpu").reset_parameters()
    assert torch.equal(router.expert_bias, torch.zeros(8)) and router.weight.dtype == dtype
    router.load_state_dict(biased().state_dict())
    assert torch.equal(router.expert_bias, BIAS)
    assert biased().bfloat16().to("meta").expert_bias.is_meta


def test_a_step_by_integers_and_floating_point_in_inference_mode_too() -> None:
    loads = torch.tensor([9, 1, 0, 6, 4, 4, 4, 4])
    signs = torch.tensor([-1.0, 1, 1, -1, 0, 0, 0, 0])
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float64):
        router = biased().half()
        with torch.inference_mode():
            router.update_bias(loads.to(dtype))
        assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS + 1e-3 * signs)


def test_the_mean_load_is_exact() -> None:
    """2**24 pairs and more an expert, of which fp32 knows every second: the odd one out moves, and the others too."""
    load = torch.full((8,), 2**24)
    assert not updated_bias(BIAS, load, 1e-3).sub(BIAS).any()
    load[3] += 1
    moved = updated_bias(torch.zeros(8), load, 1.0)
    assert moved.tolist() == [1, 1, 1, -1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (torch.ones(1), ValueError),
        (torch.ones(4, 8), ValueError),
        (torch.ones(9), ValueError),
        (torch.tensor(3), ValueError),
        (torch.ones(8, dtype=torch.bool), TypeError),
        (torch.ones(8, dtype=torch.complex64), TypeError),
        (torch.ones(8, device="meta"), ValueError),
        ([1] * 8, TypeError),
        (np.ones(8), TypeError),
    ],
)
def test_loads_that_are_refused(load: Any, error: type[Exception]) -> None:
    router = biased()
    for each in (router, Router(16, 8, 2, score="sigmoid")):  # of which one has no rate
        refuses(lambda: each.update_bias(load), "load", error)  # noqa: B023
    assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS)


def test_a_checkpoint_that_is_assigned_stays_as_it_is() -> None:
    state = {"weight": torch.randn(8, 16).bfloat16(), "expert_bias": torch.randn(8).bfloat16()}
    router = Router(16, 8, 2, score="sigmoid", device="meta")
    router.load_state_dict(state, assign=True)
    assert state["expert_bias"].dtype == torch.bfloat16 and router.expert_bias.dtype == torch.float32
    assert torch.equal(router.expert_bias, state["expert_bias"].float())
    given = torch.randn(8).bfloat16()
    torch.func.functional_call(biased(), {"expert_bias": given}, torch.randn(3, 16))
    assert given.dtype == torch.bfloat16


@pytest.mark.parametrize("choose", ["top_k", "capacity", "token_rounding"])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "top_groups": 2}], ids=["plain", "groups"])
def test_an_infinite_bias_switches_an_expert_off(choose: str, groups: dict[str, int]) -> None:
    """And no token is broken by it."""
    options: dict[str, Any] = {"capacity_factor": 100.0} if choose == "capacity" else {}
    router = Router(16, 8, 2, score="sigmoid", choose=choose, **options, **groups)
    assert router.expert_bias is not None
    router.expert_bias[7] = -torch.inf
    load = router(torch.randn(512, 16)).load
    assert load[7] == 0 and (load[: 6 if groups else 7] > 0).all()  # 7 takes 6, its group's other, with it
