"""Processes that train a small model, started by `test_composition.py`: four with FSDP2, expert parallelism, fp8, torch.compile
and activation checkpointing together; two with pipeline parallelism."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from blazeproto import MoE
from blazeproto.distributed import Symmetric, clip_grad_norm_, expert_parallel

D, N, E, K = 16, 128, 8, 2
TOKENS, STEPS = (13, 5, 30, 8), 20  # TOKENS: of each rank, in every step
RANKS = len(TOKENS)


class Run(NamedTuple):
    """dispatcher: of tokens.  factor: what FSDP divides experts' gradients by; RANKS is right."""

    dispatcher: str = "all_to_all"
    factor: int = RANKS


class Made(NamedTuple):
    """losses: of all steps.  calls, graphs: of each block: how often it was computed, and how many graphs were compiled."""

    losses: list[float]
    calls: list[int]
    graphs: list[int]


class Block(nn.Module):
    """x + experts(norm(x)), x (T, D). shortened: compiled, and computed again in backward."""

    def __init__(self, precision: str, *, shortened: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, dtype=torch.float64)
        self.moe = MoE(D, N, E, K, dtype=torch.float64, precision=precision)
        self.shortened, self.calls, self.graphs = shortened, 0, 0
        self.compiled: Any = torch.compile(self.body, backend=self.compile_graph)

    def compile_graph(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def body(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.moe(torch.tanh(self.norm(x)))[0]
        return out

    def counted(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.compiled(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.counted, x, use_reentrant=False) if self.shortened else self.body(x)
        return out


def built(precision: str = "fp8", *, shortened: bool = False) -> nn.Sequential:
    """Two blocks."""
    torch.manual_seed(1)
    torch._dynamo.reset()
    return nn.Sequential(*(Block(precision, shortened=shortened) for _ in range(2)))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, wanted = (torch.randn(TOKENS[rank], D, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, wanted


def train(model: nn.Module, ranks: range) -> list[float]:
    """The losses of all steps: means over the batches of ``ranks``. The mean's gradient is clipped."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for rank in ranks:
            x, wanted = batch(rank, step)
            loss = (model(x) - wanted).square().mean()
            (loss / len(ranks)).backward()
            total += loss.detach() / len(ranks)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def sharded(model: nn.Sequential, run: Run) -> nn.Sequential:
    """Experts over two ranks, two copies of them over dp; all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "ep"))
    everyone = init_device_mesh("cpu", (RANKS,))
    symmetric = Symmetric(mesh.get_group("ep"), E, d_model=D, max_tokens=max(TOKENS), max_pairs=max(TOKENS) * K)
    dispatcher = symmetric if run.dispatcher == "symmetric" else None
    block: Any
    for block in model:
        expert_parallel(block.moe, mesh["ep"], dispatcher=dispatcher)
        fully_shard(block.moe.router, mesh=everyone)
        fully_shard(block.moe, mesh=mesh["dp"])
        block.moe.set_gradient_divide_factor(run.factor)
        fully_shard(block, mesh=everyone)
    return model


def join(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def leave() -> None:
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive


def run_rank(rank: int, folder: Path, runs: tuple[Run, ...]) -> None:
    """Rank 0 leaves a `Made` of each run in ``folder / "made"``, with the means of the ranks' losses."""
    join(rank, RANKS, folder)
    made = []
    for run in runs:
        model = sharded(built(shortened=True), run)
        losses = torch.tensor(train(model, range(rank, rank + 1)), dtype=torch.float64)
        dist.all_reduce(losses)
        blocks: list[Any] = [*model]
        made.append(((losses / RANKS).tolist(), [b.calls for b in blocks], [b.graphs for b in blocks]))
    if rank == 0:
        torch.save(made, folder / "made")
    leave()


def run_stage(rank: int, folder: Path) -> None:
    """A block of two on each rank, two micro-batches: losses and gradients of the whole model on one process."""
    join(rank, 2, folder)
    (x, wanted), whole, parts = batch(2, 0), built("bf16"), built("bf16")
    right = []
    for part, of_part in zip(x.chunk(2), wanted.chunk(2), strict=True):
        right.append((whole(part) - of_part).square().mean())
        right[-1].backward()
    losses: list[Tensor] = []
    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, of_part: (out - of_part).square().mean(), scale_grads=False)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=wanted, losses=losses)
        torch.testing.assert_close(losses, right)
    for (name, got), of_whole in zip(parts[rank].named_parameters(), whole[rank].parameters(), strict=True):
        assert of_whole.grad is not None and of_whole.grad.any(), name
        torch.testing.assert_close(got.grad, of_whole.grad)
    leave()
