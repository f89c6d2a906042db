"""FSDP2 on two gloo ranks: weights are sharded, gathered, freed and gathered again, and an expert idle on one rank hangs
nobody."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blazeproto.layer import MoE

RANKS, D_MODEL, EXPERTS, TOP_K = 2, 16, 6, 2
IDLE_ON_RANK_0 = 3


class FixedRouting(torch.nn.Module):
    """Experts by the token's number; on rank 0 nobody goes to IDLE_ON_RANK_0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, EXPERTS * D_MODEL).view(EXPERTS, D_MODEL))

    def forward(self, x):
        from blazeproto.router.router import Routing

        experts = (torch.arange(x.shape[0])[:, None] + torch.arange(TOP_K)) % EXPERTS
        if self.rank == 0:
            experts = torch.where(experts == IDLE_ON_RANK_0, EXPERTS + 1, experts)  # a sentinel
        logits = x @ self.weight.t()
        scores = logits.sigmoid().gather(1, experts.clamp_max(EXPERTS - 1))
        load = torch.bincount(experts.flatten(), minlength=EXPERTS)[:EXPERTS]
        return Routing(scores, experts.int(), logits, load, {})


def build(rank: int) -> MoE:
    torch.manual_seed(1)
    return MoE(D_MODEL, 24, EXPERTS, TOP_K, router=FixedRouting(rank), bias=True)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(12, D_MODEL, generator=torch.Generator().manual_seed(10 * step + rank))


def train_sharded(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=RANKS)
    layer = build(rank)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(2):
        layer(batch(rank, step))[0].square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()

    # The same on one rank: gradients are the mean over the ranks' batches.
    whole = build(0)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(2):
        for other in range(RANKS):
            whole.router.rank = other
            (whole(batch(other, step))[0].square().sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, sharded), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), expected, msg=lambda m, name=name: f"{name}: {m}")
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive


def test_fully_shard_with_an_idle_expert_on_one_rank():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.start_processes(train_sharded, args=(port,), nprocs=RANKS, start_method="spawn")
