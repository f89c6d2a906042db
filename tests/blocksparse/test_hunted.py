"""What a hunt for bugs found, so that it stays mended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blazeproto import MoE, gemm
from blazeproto.blocksparse import Topology, dMoE, dmoe
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm.blocks import BLOCK
from blazeproto.lab.target import Machine
from blazeproto.router import Routing
from blazeproto.runtime.target import launches_on
from tests.refusals import refuses

D, N = 24, 128


class Given(nn.Module):
    """A router that chooses what it is given."""

    def __init__(self, experts: Tensor, scores: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.scores, self.num_experts, self.top_k = experts, scores, num_experts, experts.shape[1]

    def forward(self, x: Tensor) -> Routing:
        load = torch.zeros(self.num_experts, dtype=torch.int32)
        return Routing(self.scores, self.experts, x @ x.T, load, {})


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_widths_is_refused() -> None:
    """As many hidden units in all, but other experts': they were dealt out wrongly, without a word."""
    given = MoE(D, 256, 3, 1, backend="torch").state_dict()
    layer = dMoE(D, [256, 128, 384], 3, 1)
    before = layer.down_proj.clone()
    with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj"):
        layer.load_state_dict(given)
    assert torch.equal(layer.down_proj, before)


def test_weights_that_are_assigned_are_contiguous() -> None:
    layer = dMoE(D, N, 1, 1)
    layer.load_state_dict(MoE(D, N, 1, 1, backend="torch").state_dict(), assign=True)
    assert layer.down_proj.is_contiguous()


# --- The layer -------------------------------------------------------------------------------------------------------


def test_a_dtype_that_moe_refuses_is_refused() -> None:
    """It was rounded to x's, without a word."""
    layer = dMoE(D, N, 2, 1, dtype=torch.float64)
    refuses(lambda: layer(torch.zeros(3, D, dtype=torch.bfloat16)), "x")


def test_what_the_kernels_get_is_contiguous_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse anything else; slices of x, of scores and of ids are normal input."""
    seen: list[Tensor] = []

    class Experts:
        @staticmethod
        def apply(*arrays: Any) -> Tensor:
            seen.extend(arrays[:4])
            return arrays[0]

    def dispatch_of(ids: Tensor, num_experts: int) -> Any:
        seen.append(ids)
        return build_dispatch(ids, num_experts)

    monkeypatch.setattr(dmoe, "BlockExperts", Experts)
    monkeypatch.setattr(dmoe, "build_dispatch", dispatch_of)
    monkeypatch.setattr(dMoE, "runs_on", lambda self, dtype=None: "hopper")
    sorted_ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    router = Given(sorted_ids[:, :1], torch.rand(3, 2)[:, :1], 2)
    layer = dMoE(D, N, 2, 1, router=router, dtype=torch.bfloat16)
    layer.down_proj = nn.Parameter(layer.down_proj.detach().t().contiguous().t())
    for x in (torch.randn(3, 2 * D)[:, :D].bfloat16(), torch.zeros(3 * D + 1).bfloat16()[1:].view(3, D)):
        layer(x if x.is_contiguous() else torch.cat([x, x], 1)[:, :D])
    assert len(seen) == 10 and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in seen)


@pytest.mark.parametrize("router", ["topk_softmax", "hash", "expert_choice"])
def test_prepare_without_gradients_and_for_any_router(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = dMoE(D, N, 2, 1, router=router), []
    # The check says that the kernels run; the products are torch's all the same.
    monkeypatch.setattr(dMoE, "runs_on", lambda self, dtype=None: "torch" if dtype else "hopper")
    by_formulas = dmoe.by_formulas

    def watched(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.dtype)
        return by_formulas(x, *rest)

    monkeypatch.setattr(dmoe, "by_formulas", watched)
    with torch.no_grad():
        layer.prepare(5)
    layer.requires_grad_(False).prepare(0)
    assert seen == [torch.bfloat16] * 2


def test_compiled_it_breaks_once_at_the_experts() -> None:
    """Nothing of the dispatch, its NumPy arrays and its launches is traced."""
    layer = dMoE(D, N, 2, 1, router="topk_softmax")
    x = torch.randn(9, D)
    right = layer(x)[0]
    torch._dynamo.reset()
    counted = CompileCounter()
    torch.testing.assert_close(torch.compile(layer, backend=counted)(x)[0], right)
    assert counted.frame_count <= 3


# --- Hostile and empty input ------------------------------------------------------------------------------------------

ONE = Topology.of_blocks(np.ones((1, 1), bool))


def test_a_dense_matrix_of_no_columns() -> None:
    assert gemm.dsd(np.zeros((1, BLOCK, BLOCK)), np.zeros((BLOCK, 0)), ONE).shape == (BLOCK, 0)
    assert gemm.dds(np.zeros((0, BLOCK)), np.zeros((1, BLOCK, BLOCK)), ONE).shape == (0, BLOCK)


def test_room_for_blocks_in_a_matrix_of_no_rows() -> None:
    """A tensor map of no rows can't be made."""
    nothing = Topology.of_blocks(np.zeros((0, 1), bool))
    indices: dict[str, Any] = {
        name: np.full(1, -1, np.int32) for name in ("row_indices", "column_indices", "block_offsets_t")
    }
    roomy = replace(nothing, tiles=np.full((1, 4), -1, np.int32), **indices)
    machine = Machine()
    with launches_on(machine):
        gemm.sdd(np.zeros((0, 8), np.uint16), np.zeros((8, BLOCK), np.uint16), roomy)
    assert not machine.reports
