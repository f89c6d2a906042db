"""How deep launches lie: frames of this package from `MoE.forward`, or from a node's backward, to the driver's launch.

Nothing is compiled or launched here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import blazeproto
from blazeproto.layer import MoE
from blazeproto.router import fallback, linear, ops
from blazeproto.router.router import ROUTERS
from blazeproto.runtime import arrays, driver
from blazeproto.runtime.numba_kernel import NumbaKernel

PACKAGE = Path(blazeproto.__file__).parent
SEVEN = {"finish_logits", "split_gradient", "topk_route", "topk_route_backward"}  # the other kernels: eight


class Launches:
    """Stands in for the driver, and for compiling."""

    CUDADriverError = RuntimeError

    def __init__(self) -> None:
        self.frames: list[tuple[str, list[str]]] = []

    def launchKernel(self, name: str, *_: object) -> None:
        frame, mine = sys._getframe(1), []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                mine.append(frame.f_code.co_name)
            frame = frame.f_back
        self.frames.append((name, mine[::-1]))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    made = Launches()

    def multiply(place: Any, call: dict[str, Any], x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    monkeypatch.setattr(NumbaKernel, "load", lambda kernel, device: SimpleNamespace(ptr=kernel.name))
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(ops, "has_dispatch_kernels", lambda *_: True)
    monkeypatch.setattr(linear, "_on_tensor_cores", lambda *_: True)
    monkeypatch.setattr(linear, "_product", lambda a, b: a.float() @ b.float())
    # Products of gemm, which tests/autograd/test_frames.py counts on a GPU.
    monkeypatch.setattr(linear, "multiply", multiply)
    monkeypatch.setattr(linear, "_rows_times", lambda a, matrix: a @ matrix)
    # What is not computed is any number, also where it would be an index.
    monkeypatch.setattr(fallback, "chosen_scores", lambda logits, experts, *_: logits[:, : experts.shape[1]])
    monkeypatch.setattr(arrays, "current_stream", lambda t: 0)
    return made


@pytest.mark.parametrize("name", ROUTERS)
def test_a_launch_is_at_most_seven_or_eight_frames_deep(name: str, launches: Launches, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "blazeproto.layer.MoE._experts", staticmethod(lambda x, *_, **__: x.float() * 0)
    )  # what is not filled is any number
    layer = MoE(64, 32, 8, 2, router=name, dtype=torch.bfloat16, backend="torch")
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(40) if name == "hash" else None
    layer(x, ids)
    routing = layer.router(x, ids)
    forward, launches.frames = launches.frames, []
    (routing.scores.sum() + sum(routing.aux_losses.values())).backward()
    for kernel, frames in forward:
        if frames[0] == "forward":
            assert frames[-1] == "launch" and len(frames) <= 8 - (kernel in SEVEN), (kernel, frames)
    for kernel, frames in launches.frames:
        assert frames[-1] == "launch" and len(frames) <= 8 - (kernel in SEVEN), (kernel, frames)
    seen = {kernel for kernel, _ in [*forward, *launches.frames]}
    assert {"split_gradient"} <= seen and (routing.pair_tokens is None or "list_pairs" in seen)
