"""The balancing bias: its values through casts, moves and checkpoints, and what a step of it takes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from blazeproto.router import Router
from blazeproto.router.router import updated_bias

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


DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("use", ["step", "forward", "state_dict", "cast", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_whose_data_is_a_rounded_copy(dtype: torch.dtype, use: str) -> None:
    """FSDP1's ``buffer_dtype`` and the like assign it past the module's own casts."""
    router, x = biased(), torch.randn(20, 16)
    expected, steps = router(x), int(use == "step")
    for buffer in router.buffers():
        buffer.data = buffer.data.to(dtype)
    if use == "step":
        router.update_bias(torch.tensor([1, 1, 1, 1, 1, 1, 1, 9]))
    elif use == "forward":
        torch.testing.assert_close(router(x), expected, rtol=0, atol=0)
    elif use == "state_dict":
        assert torch.equal(router.state_dict()["expert_bias"], BIAS)
    elif use == "cast":
        router = copy.deepcopy(router).bfloat16()
    else:
        torch.compiler.reset()
        compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
        router.state_dict()
    bias = router.expert_bias
    assert bias is not None and bias.dtype == torch.float32
    signs = torch.ones(8).index_fill(0, torch.tensor(7), -1)
    torch.testing.assert_close(bias, BIAS + 1e-3 * steps * signs, rtol=0, atol=1e-9)


def test_what_is_written_to_a_rounded_copy_is_kept() -> None:
    router, written = biased(), torch.arange(8) % 2 == 0
    router.expert_bias.data = router.expert_bias.data.bfloat16()
    router.expert_bias[written] = 0.75
    router.update_bias(torch.full((8,), 3))
    assert torch.equal(router.expert_bias, torch.where(written, 0.75, BIAS))


def test_another_bias_of_a_functional_call_leaves_the_routers_own() -> None:
    router, other = biased(), torch.full((8,), 0.5)
    x, before = torch.randn(20, 16), biased().expert_bias
    for bias in (other, other.bfloat16()):
        torch.func.functional_call(router, {"expert_bias": bias}, (x,))
        assert torch.equal(bias.float(), other)
    router.expert_bias.data = router.expert_bias.data.bfloat16()
    router(x)
    assert torch.equal(router.expert_bias, before)


def test_mixed_precision_of_fsdp1(tmp_path: Path) -> None:
    """Buffers in bf16, as Lightning and accelerate ask for in bf16 training; from 0.5 on a step of 1e-3 is lost in bf16."""
    start = torch.tensor([0.7, 0.3, -0.6, 0.1])
    store = dist.FileStore(str(tmp_path / "meeting"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        router = Router(16, 4, 2, score="sigmoid", bias_update_rate=1e-3)
        router.expert_bias.copy_(start)
        policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = FullyShardedDataParallel(
            torch.nn.Sequential(router), mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        assert torch.equal(model.state_dict()["0.expert_bias"], start)
        for _ in range(3):
            model(torch.randn(5, 16))
            router.update_bias(torch.tensor([0, 1, 2, 1]))
        expected = start + 3e-3 * torch.tensor([1.0, 0, -1, 0])
        torch.testing.assert_close(router.expert_bias, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(model.state_dict()["0.expert_bias"], expected, rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()


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
    ("load", "error", "message"),
    [
        (torch.ones(1), ValueError, r"load: expected shape \(8,\), one count an expert, got \(1,\)"),
        (torch.ones(4, 8), ValueError, r"load: expected shape \(8,\), one count an expert, got \(4, 8\)"),
        (torch.ones(9), ValueError, r"load: expected shape \(8,\)"),
        (torch.tensor(3), ValueError, r"load: expected shape \(8,\), one count an expert, got \(\)"),
        (
            torch.ones(8, dtype=torch.bool),
            TypeError,
            "load: expected an integer or floating-point tensor, got torch.bool",
        ),
        (torch.ones(8, dtype=torch.complex64), TypeError, "load: expected an integer or floating-point tensor"),
        (torch.ones(8, device="meta"), ValueError, "load: expected device cpu .*, got meta"),
        ([1] * 8, TypeError, "load: expected a .*ensor, got list"),
        (np.ones(8), TypeError, "load: expected a .*ensor, got ndarray"),
    ],
)
def test_loads_that_are_refused(load: Any, error: type[Exception], message: str) -> None:
    router = biased()
    without_a_rate = Router(16, 8, 2, score="sigmoid")
    for step in (router.update_bias, without_a_rate.update_bias):
        with pytest.raises(error, match=message):
            step(load)
    assert router.expert_bias is not None and torch.equal(router.expert_bias, BIAS)
