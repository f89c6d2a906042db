"""`expert_parallel` on four and eight gloo ranks (ep_ranks.py); and on one: refusals, other dispatchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ep_ranks import ANY_NUMBER, CASES, EIGHT, TOKENS, batch, build, run_rank, step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from blazeproto import MoE
from blazeproto.autograd import Arrived, Options
from blazeproto.blocksparse import dMoE
from blazeproto.distributed import AllToAll, Symmetric, clip_grad_norm_, expert_parallel
from blazeproto.lab import explain
from blazeproto.lab.views import view


def test_four_ranks(tmp_path: Path) -> None:
    mp.start_processes(run_rank, args=(tmp_path, TOKENS, CASES), nprocs=len(TOKENS), start_method="spawn")


@pytest.mark.full
def test_eight_ranks(tmp_path: Path) -> None:
    """An expert on each, or two with two copies."""
    mp.start_processes(run_rank, args=(tmp_path, EIGHT, ANY_NUMBER), nprocs=len(EIGHT), start_method="spawn")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Here:
    """A dispatcher for one rank: tokens stay."""

    def check(self, options: Options) -> None:
        self.checked = options

    def dispatch(self, *given: Any) -> Arrived:
        x, scores, *lists = given
        self.tokens = len(x)
        return Arrived(x, scores, *lists, route="stays")

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        assert arrived.route == "stays"
        return partial


def test_any_dispatcher_with_the_protocol_serves(group: dist.ProcessGroup) -> None:
    here, alone = Here(), build()
    layer = expert_parallel(build(), group, dispatcher=here)
    got, expected = step(layer, 0), step(alone, 0)
    assert here.tokens == len(got["out"]) and here.checked is layer.options
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(layer.down_proj.grad.full_tensor(), alone.down_proj.grad)


def test_fp8_goes_through_all_to_all_and_is_refused_by_symmetric(group: dist.ProcessGroup) -> None:
    """Rows are quantized where they arrive."""
    made = []
    for parallel in (False, True):
        torch.manual_seed(0)
        layer = MoE(64, 128, 4, 2, precision="fp8")
        layer = expert_parallel(layer, group) if parallel else layer
        x = torch.randn(20, 64, requires_grad=True)
        out = layer(x)[0]
        made.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    layer = MoE(64, 128, 4, 2, precision="fp8")
    symmetric = Symmetric(group, 4, d_model=64, max_tokens=20, max_pairs=40, device="cpu")
    with pytest.raises(ValueError, match="precision: expected 'bf16' with Symmetric, got 'fp8'"):
        expert_parallel(layer, group, dispatcher=symmetric)


def test_refusals(group: dist.ProcessGroup) -> None:
    layer = expert_parallel(build(), group)
    with pytest.raises(ValueError, match=r"moe: expected one without a dispatcher, got one with AllToAll\(ranks=1"):
        expert_parallel(layer, group)
    with pytest.raises(TypeError, match="moe: expected a MoE, got Linear"):
        expert_parallel(nn.Linear(2, 2), group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="moe: expected a layer whose experts moe_mlp computes, got dMoE"):
        expert_parallel(dMoE(16, 128, 4, 2), group)
    with pytest.raises(ValueError, match=r"mesh_or_group: expected a mesh of one dimension or \(dp, ep\), got 3"):
        expert_parallel(build(), DeviceMesh("cpu", [[[0]]]))
    with pytest.raises(ValueError, match=r"mesh_or_group: expected one for cpu, where moe is, got one for meta"):
        expert_parallel(build(), DeviceMesh("meta", [0], _init_backend=False))
    with pytest.raises(TypeError, match="group: expected a ProcessGroup that this rank is in, got str"):
        AllToAll("world", 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_experts: expected an int, got str"):
        AllToAll(group, "4")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"prepare: expected a layer on one rank, got one with AllToAll"):
        layer.prepare(4)
    with pytest.raises(RuntimeError, match="saved_bytes: expected a layer on one rank"):
        layer.saved_bytes(4)
    with pytest.raises(RuntimeError, match="explain: expected a layer on one rank"):
        explain(layer, batch(0)[0])
    assert "save" not in view(layer).facts
    with pytest.raises(ValueError, match="max_norm: expected a finite number, at least 0, got -1"):
        clip_grad_norm_(layer.parameters(), -1)


@pytest.mark.parametrize("option", ["row_capacity", "workspace_bytes"])
def test_bounds_are_refused_then_and_later(group: dist.ProcessGroup, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: expected None with AllToAll, got 4096"):
        expert_parallel(build(**{option: 4096}), group)
    layer = expert_parallel(build(), group)
    setattr(layer, option, 4096)
    with pytest.raises(ValueError, match=f"{option}: expected None with AllToAll, got 4096"):
        layer(batch(0)[0])


def test_no_double_backward(group: dist.ProcessGroup) -> None:
    x = batch(0)[0].requires_grad_()
    (dx,) = torch.autograd.grad(expert_parallel(build(), group)(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_a_layer_on_meta_becomes_its_slice(group: dist.ProcessGroup) -> None:
    layer = expert_parallel(build(device="meta"), group).to_empty(device="cpu")
    assert layer.down_proj.to_local().device.type == "cpu"


def test_torch_compile_breaks_its_graph_there(group: dist.ProcessGroup) -> None:
    layer, x = expert_parallel(build(), group), batch(0)[0]
    assert torch.equal(torch.compile(layer, backend="eager")(x)[0], layer(x)[0])
