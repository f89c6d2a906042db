"""What a product refuses, and what it says then. Addresses stand in for arrays: no GPU is needed, and nothing is launched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from blazeproto import gemm
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import arguments, weight
from blazeproto.runtime import driver
from tests.gemm.test_current_gpu import bf16, f32, on_gpu_0

T, K, D, N, E = 64, 2, 128, 64, 4
R = T * K
DISPATCH = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", E + 1), on_gpu_0("int32", R), None, E, K, T)
UP = {"x": bf16(T, D), "up_proj": bf16(E, 2 * N, D), "h": bf16(R, 2 * N), "act": bf16(R, N)}
SUM = {"y": bf16(R, D), "out": bf16(T, D)}
WEIGHT = {"d_out": bf16(T, D), "a_scaled": bf16(R, N), "dw": bf16(E, D, N), "workspace": f32(0)}
MANY = Dispatch(on_gpu_0("int32", R), on_gpu_0("int32", 601), on_gpu_0("int32", R), None, 600, K, T)

BAD = [
    (
        "up_forward",
        UP | {"x": None},
        TypeError,
        "x: expected a device array (torch, CuPy, Numba, DLPack), got NoneType",
    ),
    ("up_forward", UP | {"x": f32(T, D)}, TypeError, "x: expected dtype bfloat16, got float32"),
    ("up_forward", UP | {"x": bf16(T, D + 8)}, ValueError, "x: expected shape (64, 128), got (64, 136)"),
    ("up_forward", UP | {"h": bf16(R, N)}, ValueError, "h: expected shape (128, 128), got (128, 64)"),
    ("up_forward", UP | {"up_proj": bf16(E + 1, 2 * N, D)}, ValueError, "up_proj: expected shape (4, any, any), got"),
    (
        "up_forward",
        UP | {"up_proj": bf16(E, 2 * N, 12)},
        ValueError,
        "up_proj: expected widths that are multiples of 8, got shape (4, 128, 12)",
    ),
    (
        "up_forward",
        UP | {"up_proj": bf16(E, 24, D)},
        ValueError,
        "up_proj: expected 2 times a multiple of 8 rows an expert, got 24",
    ),
    (
        "up_forward",
        UP | {"up_proj": bf16(600, 2 * N, D), "dispatch": MANY},
        ValueError,
        "up_proj: expected 1 to 512 experts, got shape (600, 128, 128)",
    ),
    (
        "down_backward_weight",
        WEIGHT | {"dw": bf16(600, D, N), "dispatch": MANY},
        ValueError,
        "dw: expected 1 to 512 experts, got shape (600, 128, 64)",
    ),
    (
        "up_forward",
        UP | {"x": bf16(2**28, 128), "dispatch": replace(DISPATCH, num_tokens=2**28)},
        ValueError,
        "x: expected fewer than 34359738368 elements to gather from, got shape (268435456, 128)",
    ),
    (
        "up_forward",
        UP | {"config": gemm.TileConfig(cluster=2)},
        ValueError,
        "config: expected cluster=1 for up_forward, got TileConfig(",
    ),
    (
        "up_forward",
        UP | {"dispatch": replace(DISPATCH, token_index_map=on_gpu_0("int32", R + 2))},
        ValueError,
        "dispatch.token_index_map: expected shape (128), got (130,)",
    ),
    (
        "up_forward",
        UP | {"dispatch": replace(DISPATCH, top_k=None)},
        TypeError,
        "dispatch.pair_tokens: expected a device array",
    ),
    (
        "combine",
        SUM | {"scores": f32(R + 8)},
        ValueError,
        "scores: expected 128 elements, one a pair, got shape (136,)",
    ),
    ("combine", SUM | {"columns": range(64)}, ValueError, "columns: expected as many as y has, 128, got range(0, 64)"),
    ("combine", SUM | {"columns": range(D), "out": None}, TypeError, "out: expected a device array"),
    ("down_backward_weight", WEIGHT | {"accumulate": True}, ValueError, "accumulate: expected an fp32 dw to add to"),
    (
        "expert_row_sum",
        {"values": bf16(R, D), "accumulate": True},
        ValueError,
        "out: expected an array to accumulate into, got None",
    ),
]


@pytest.fixture(autouse=True)
def _gpu_0_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "current_device", lambda: 0)
    monkeypatch.setattr(arguments, "current_stream", lambda array: 0)
    monkeypatch.setattr(weight, "weight_workspace", lambda *_: 0)
    monkeypatch.setattr(driver, "launch", lambda *_: pytest.fail("something was launched"))


@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD)
def test_bad_input_is_named(function: str, arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(gemm, function)(**{"dispatch": DISPATCH} | arguments)


@pytest.mark.parametrize(("width", "offset"), [(512, 0), (256, 16)])
def test_an_output_may_lie_over_the_rows_only_where_a_tile_has_them_whole(width: int, offset: int) -> None:
    """Another tile may not have read yet what this one overwrites."""
    act, down_proj = bf16(R, width), bf16(E, width, width)
    with pytest.raises(ValueError, match=r"y: expected memory of its own( or all of act)?, got some of act"):
        gemm.down_forward(act, down_proj, DISPATCH, y=act._replace(ptr=act.ptr + offset))
