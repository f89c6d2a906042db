"""From MoE.forward, and from the node's backward, to the driver: at most seven Python frames of ours, eager, gradients on;
eight for what a router launches beside top-k, and for the dispatch."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from blazeproto import MoE
from blazeproto.runtime import driver
from tests.autograd.frames import MOST_FRAMES, frames_here, kernel_of, names_of

pytestmark = pytest.mark.gpu

LAYERS = {
    "top_k": {"bias": True},
    "aux_free": {"activation": "geglu", "combine": "fused"},
    "token_rounding": {"combine": "fused_both"},
    "expert_choice": {},
    "hash": {},
    "chunks": {"router": "top_k", "workspace_bytes": 4_000_000, "save": "recompute"},
    "capacity": {"router": "top_k", "row_capacity": 4000},
    "losses": {"router": "top_k", "aux_loss": 0.01, "z_loss": 0.001},
}


class Counted:
    """Stands in for the driver: counts, then launches."""

    def __init__(self, real: object) -> None:
        self.real, self.seen = real, defaultdict(list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def launchKernel(self, *arguments: object) -> None:
        frames = frames_here()
        self.seen[kernel_of(frames)].append(names_of(frames))
        self.real.launchKernel(*arguments)


def allowed(room: str, kernel: str) -> int:
    """topk.py and logits.py are of every router. Below dispatch lie its methods, and below a row capacity another."""
    of_all = room == "gemm" or "topk" in kernel
    return MOST_FRAMES if of_all else MOST_FRAMES + (2 if room == "dispatch" else 1)


@pytest.mark.parametrize("name", LAYERS)
def test_frames_to_a_launch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    options = {"router": name, **LAYERS[name]}
    layer = MoE(256, 128, 16, 4, backend="hopper", dtype=torch.bfloat16, **options).cuda()
    x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = (torch.arange(2048, device="cuda") % 100,) if name == "hash" else ()

    def step() -> None:
        out, stats = layer(x, *ids)
        (out.float().square().sum() + stats.aux_loss).backward()

    step()  # compiles
    counted = Counted(driver._driver())
    monkeypatch.setattr(driver, "_driver", lambda: counted)
    step()
    torch.cuda.synchronize()
    assert sum(room == "gemm" for room, _ in counted.seen) >= 6, "the products are seen"
    for (room, kernel), stacks in sorted(counted.seen.items()):
        deepest = max(stacks, key=len)
        print(f"{len(deepest):3} {room:10} {kernel:32} {' > '.join(deepest)}")
    deep = {
        f"{room}: {kernel}": s
        for (room, kernel), of in counted.seen.items()
        for s in of
        if len(s) > allowed(room, kernel)
    }
    assert not deep
