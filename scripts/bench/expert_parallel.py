"""Experts on several GPUs: a layer forward and backward, and the exchange alone, by dispatcher.

    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel             # -> the "ep" rows of results/h200/distributed.json
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --quick     # small, on CPUs too; rows are printed alone
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --layers qwen3,mixtral --tokens 8192
    python -m scripts.bench.expert_parallel --quick                          # the same with one rank

Any number of GPUs: rows of other numbers stay. The file is written after every row.

fwd_tflops, bwd_tflops: 6 T K n d and 12 T K n d operations of a rank's T tokens, over the time from x, ids and scores on each
rank to O, and from dO to dX, dS and dW; metadata in, router out. dispatch_gbps: from ids and scores at hand to rows that experts
read, index lists included; combine_gbps: from Y to O complete. Of both the payload is rows that leave the GPU, one a (token,
other rank). Ids are uniform without replacement, new for every replay. CUDA graphs, of the exchange eight in a row, behind a
barrier of all ranks, the slowest rank's time, medians; a dispatcher that no graph captures is timed as it runs, by events.
peak_MiB: forward and backward over what was there before, weights and gradients and the exchange's memory included; alone_MiB:
one GPU's with all experts. "vdev_2d" is torch's own exchange alone (`scripts.bench.torch_exchange`), or "absent": why not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.autograd.backends import backend_on
from blazeproto.autograd.chunks import WHOLE, chunks_of, dispatch
from blazeproto.dispatch import Dispatch
from blazeproto.distributed import AllToAll, Symmetric, expert_parallel
from blazeproto.gemm import Sizes
from blazeproto.router.router import Routing
from scripts.bench.common import REPOSITORY, begun, bench_parser, cfg_of, read_json, settled, stamped, write_json
from scripts.bench.distributed import TIMEOUT, Row, results_file
from scripts.command import need_hopper, some_of
from scripts.lm.ranks import Ranks, join, joined

MIB = 1 << 20
LAYERS = {  # d, n, E, K
    "qwen3": Sizes(8192, 2048, 768, 128, 8),
    "mixtral": Sizes(8192, 4096, 14336, 8, 2),
}
SMALL = Sizes(64, 64, 32, 8, 2)
DISPATCHERS = ("symmetric", "all_to_all", "capacity", "vdev_2d")
IN_A_ROW = 8  # exchanges of a graph
PATIENCE = 60  # seconds for torch's exchange
CAPACITY = 1.25  # rows over the mean, of "capacity": `Symmetric` with a row_capacity


class Given(nn.Module):
    """A router that gives what it was given."""

    def __init__(self, shape: Sizes, scores: Tensor, ids: Tensor) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.scores, self.ids = shape.E, shape.K, scores, ids

    def forward(self, x: Tensor) -> Routing:
        return Routing(self.scores, self.ids, self.scores, self.ids.new_zeros(self.num_experts), {})


class Inputs(NamedTuple):
    """x, scores: require gradients."""

    x: Tensor
    scores: Tensor
    ids: Tensor
    d_out: Tensor


def inputs_of(shape: Sizes, ranks: Ranks) -> Inputs:
    torch.manual_seed(100 + ranks.rank)
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    x, d_out = (torch.randn(shape.T, shape.d, device=ranks.device).to(dtype) for _ in range(2))
    scores = torch.rand(shape.T, shape.K, device=ranks.device)
    ids = torch.empty(shape.T, shape.K, dtype=torch.int32, device=ranks.device)
    draw_ids(ids, shape.E)
    return Inputs(x.requires_grad_(), scores.requires_grad_(), ids, d_out)


def draw_ids(ids: Tensor, num_experts: int) -> None:
    """Uniform without replacement, in place."""
    ids.copy_(torch.rand(len(ids), num_experts, device=ids.device).topk(ids.shape[1], sorted=False).indices)


def layer_of(shape: Sizes, given: Inputs, dispatcher: Any, options: dict[str, Any]) -> MoE:
    """Made on "meta", so that no rank has all experts; alone, with None for a dispatcher, it has."""
    router = Given(shape, given.scores, given.ids)
    layer = MoE(shape.d, shape.n, shape.E, shape.K, router=router, device="meta", dtype=given.x.dtype, **options)
    if dispatcher is not None:
        layer = expert_parallel(layer, dispatcher.group, dispatcher=dispatcher)
    layer = layer.to_empty(device=given.x.device)
    with torch.no_grad():
        for weight in layer.parameters():
            own: Any = weight.to_local() if hasattr(weight, "to_local") else weight
            own.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
    router.scores, router.ids = given.scores, given.ids  # which to_empty leaves alone
    return layer


class Timer:
    """Times calls on all ranks: GPU milliseconds behind a barrier, the slowest rank's, medians of rounds."""

    def __init__(self, ranks: Ranks, rounds: int) -> None:
        self.ranks, self.rounds = ranks, rounds

    def ms(self, *calls: Callable[[], object], before: Callable[[], object]) -> list[float]:
        """The times of calls that run one after another in every round."""
        taken: list[list[float]] = []
        for _ in range(self.rounds + 2):
            before()
            taken.append([self._once(call) for call in calls])
        slowest = torch.tensor(taken[2:], dtype=torch.float64, device=self.ranks.device)
        if self.ranks.size > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [statistics.median(column) for column in slowest.T.tolist()]

    def _once(self, call: Callable[[], object]) -> float:
        if self.ranks.device.type != "cuda":
            begun_at = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun_at)
        if self.ranks.size > 1:
            dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def graph_of(call: Callable[[], object]) -> tuple[Callable[[], object], object]:
    """A call's replay, and what it returned at the capture."""
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    torch.cuda.synchronize()
    return graph.replay, result


def layer_times(layer: MoE, given: Inputs, shape: Sizes, timer: Timer, *, captured: bool) -> tuple[float, float]:
    """Forward's and backward's ms."""
    wanted = (given.x, given.scores, *layer.parameters())
    kept: list[Any] = [None, None]

    def forward() -> None:
        kept[0] = layer(given.x)[0]

    def backward() -> None:
        kept[1] = torch.autograd.grad(kept[0], wanted, given.d_out)

    for _ in range(2):
        forward()
        backward()
    kept[:] = [None, None]
    calls: list[Callable[[], object]] = [forward, backward]
    if captured:
        calls = [graph_of(forward)[0], graph_of(backward)[0]]
    forward_ms, backward_ms = timer.ms(*calls, before=lambda: draw_ids(given.ids, shape.E))
    return forward_ms, backward_ms


def exchange_times(
    dispatcher: Symmetric, given: Inputs, shape: Sizes, timer: Timer, *, captured: bool
) -> tuple[float, float]:
    """ms of the way out with index lists, and of the way back: means of IN_A_ROW with ids of their own, in one graph."""
    exchange: Any = dispatcher._exchange
    experts_here = shape.E // dispatcher.ranks
    x, scores = given.x.detach(), given.scores.detach()
    routings = [torch.empty_like(given.ids) for _ in range(IN_A_ROW)]
    backend = backend_on("auto", x.device, x.dtype, experts_here, shape.d, shape.n)
    made = torch.empty_like(x)
    kept: list[Any] = []
    y = torch.randn(exchange.places * shape.K, shape.d, device=x.device).to(x.dtype)

    def draw() -> None:
        for ids in routings:
            draw_ids(ids, shape.E)

    def out() -> None:
        kept.clear()
        for ids in routings:
            choice = exchange.share(ids, scores, None, None, shape.T, experts_here)
            index = dispatch.kernel(choice.experts, experts_here, WHOLE, "auto")
            exchange.send(x, choice.token_ranks)
            kept.append((choice.token_ranks, index, choice.scores))

    def back() -> None:
        for token_ranks, index, weights in kept:
            pairs, offsets, index_map = index
            arrived = Dispatch(pairs, offsets[0], index_map, None, experts_here, shape.K, exchange.places)
            (chunk,) = chunks_of(arrived, WHOLE)
            exchange.add_up(token_ranks, y, backend.rows_of(chunk.dispatch), scores=weights, out=made)

    draw()
    for _ in range(2):
        out()
        back()
    calls: list[Callable[[], object]] = [out, back]
    if captured:
        calls = [graph_of(out)[0], graph_of(back)[0]]
    out_ms, back_ms = timer.ms(*calls, before=draw)
    return out_ms / IN_A_ROW, back_ms / IN_A_ROW


def payload(given: Inputs, shape: Sizes, ranks: Ranks) -> int:
    """Bytes of rows that leave this GPU."""
    of_rank = given.ids // (shape.E // ranks.size)
    others = [(of_rank == other).any(1).sum() for other in range(ranks.size) if other != ranks.rank]
    return int(sum(others)) * shape.d * given.x.element_size()


def peak_mib(layer: MoE, given: Inputs, ranks: Ranks, *, beside: int) -> float:
    """The peak of forward and backward, gradients included, and ``beside`` bytes and the layer's weights; the largest rank's."""
    if ranks.device.type != "cuda":
        return 0.0
    weights = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in layer.parameters())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(layer(given.x)[0], (given.x, given.scores, *layer.parameters()), given.d_out)
    torch.cuda.synchronize()
    del gradients
    peak = torch.tensor([torch.cuda.max_memory_allocated() - before + weights + beside], device=ranks.device)
    if ranks.size > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak) / MIB


def measure(name: str, shape: Sizes, ranks: Ranks, timer: Timer) -> Row:
    given = inputs_of(shape, ranks)
    on_gpu = ranks.device.type == "cuda"
    dispatcher: Any
    if name == "all_to_all":
        dispatcher = AllToAll(dist.group.WORLD, shape.E)  # type: ignore[arg-type]
    else:
        sizes = {"d_model": shape.d, "max_tokens": shape.T, "max_pairs": shape.T * shape.K}
        dispatcher = Symmetric(dist.group.WORLD, shape.E, device=ranks.device, **sizes)  # type: ignore[arg-type]
    options = {"row_capacity": int(CAPACITY * shape.T * shape.K)} if name == "capacity" else {}
    layer = layer_of(shape, given, dispatcher, options)
    captured = on_gpu and name != "all_to_all"
    row: Row = {"cfg": cfg_of(shape), "gpus": ranks.size, "dispatcher": name}
    row |= {
        "ranks": ranks.size,
        "row_counts": [options.get("row_capacity", ranks.size * shape.rows)],
    }  # of a rank at most
    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else torch.enable_grad()
    with stream:
        beside = dispatcher.layout.size if isinstance(dispatcher, Symmetric) else 0
        row["peak_MiB"] = round(peak_mib(layer, given, ranks, beside=beside), 1)
        operations = 6 * shape.T * shape.K * shape.n * shape.d
        forward, backward = layer_times(layer, given, shape, timer, captured=captured)
        row |= {"fwd_ms": round(forward, 4), "bwd_ms": round(backward, 4)}
        row |= {
            "fwd_tflops": round(operations / forward / 1e9, 1),
            "bwd_tflops": round(2 * operations / backward / 1e9, 1),
        }
        if name == "symmetric":
            out, back = exchange_times(dispatcher, given, shape, timer, captured=captured)
            leaves = payload(given, shape, ranks)
            row |= {"dispatch_ms": round(out, 4), "combine_ms": round(back, 4), "payload_MiB": round(leaves / MIB, 2)}
            row |= {"dispatch_gbps": round(leaves / out / 1e6, 1), "combine_gbps": round(leaves / back / 1e6, 1)}
            del layer
            alone = layer_of(shape, given, None, {})
            row["alone_MiB"] = round(peak_mib(alone, given, ranks, beside=0), 1)
    return row


def measure_torchs(name: str, shape: Sizes, ranks: Ranks, timer: Timer) -> Row:
    """torch's exchange in a process for each rank: symmetric memory is of one backend in a process, and what fails there ends
    there."""
    row: Row = {"cfg": cfg_of(shape), "gpus": ranks.size, "dispatcher": name}
    if ranks.device.type != "cuda":
        return row | {"absent": f"needs GPUs, got ranks on {ranks.device.type}"}
    folder = ranks.told(tempfile.mkdtemp() if ranks.first else "")
    words = [
        "--shape",
        ",".join(map(str, cfg_of(shape).values())),
        "--rounds",
        timer.rounds,
        "--store",
        f"{folder}/store",
    ]
    words += ["--rank", ranks.rank, "--ranks", ranks.size, "--gpu", torch.cuda.current_device()]
    found = [ended("scripts.bench.torch_exchange", *map(str, words))] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(found, found[0])
    if ranks.first:
        shutil.rmtree(folder, ignore_errors=True)
    reasons = sorted((each for each in found if "absent" in each), key=lambda each: each["absent"] == SILENT)
    return row | (reasons or found)[0]


SILENT = f"no end within {PATIENCE} s"  # of a rank that waits for another, which has a better reason


def ended(*words: str) -> Row:
    """What ``python -m`` and these words print last, as JSON; or under "absent" the last line of its errors."""
    command, environment = [sys.executable, "-m", *words], os.environ | {"NVSHMEM_DISABLE_NVLS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode:
            lines = done.stderr.split("\n")
            return {
                "absent": next(
                    (line.strip()[:200] for line in reversed(lines) if line.strip()), f"exit {done.returncode}"
                )
            }
        made: Row = json.loads(next(line for line in reversed(done.stdout.split("\n")) if line.startswith("{")))
        return made
    except subprocess.TimeoutExpired:
        return {"absent": SILENT}
    except (OSError, ValueError, StopIteration) as error:
        return {"absent": f"{type(error).__name__}: {error}"}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("expert_parallel", __doc__, quick="one small layer, a few rounds")
    parser.add_argument("--layers", type=some_of(LAYERS), default=["qwen3"], help=f"of {', '.join(LAYERS)}")
    parser.add_argument(
        "--tokens", type=lambda text: [int(t) for t in text.split(",")], default=[8192, 65536], help="of a rank"
    )
    parser.add_argument(
        "--dispatchers", type=some_of(DISPATCHERS), default=list(DISPATCHERS), help=f"of {', '.join(DISPATCHERS)}"
    )
    parser.add_argument("--device", help="cpu or cuda [default cuda where there is one, else cpu]")
    return settled(parser.parse_args(words), "distributed", rounds=30, quick_rounds=2)


def main(words: list[str] | None = None) -> None:
    options = arguments(words)
    if not options.quick:
        need_hopper()
    shapes = (
        [SMALL] if options.quick else [LAYERS[name]._replace(T=T) for name in options.layers for T in options.tokens]
    )
    with joined(options.device, TIMEOUT) as ranks:
        out, timer = options.out or (None if options.quick else results_file()), Timer(ranks, options.rounds)
        if not dist.is_initialized():
            join(ranks.device, TIMEOUT)
        record = read_json(out) if out and ranks.first and out.exists() else {}
        if ranks.first:
            record |= {
                name: value
                for name, value in begun("expert_parallel", __doc__).items()
                if name not in ("rows", "protocol")
            }
        for shape in shapes:
            for name in options.dispatchers:
                row = stamped(measure_torchs if name == "vdev_2d" else measure, name, shape, ranks, timer)
                torch.cuda.empty_cache()
                if ranks.first:
                    print({field: value for field, value in row.items() if field != "of"}, flush=True)
                    same = [row[field] for field in ("cfg", "gpus", "dispatcher")]
                    rows = [r for r in record.get("ep", ()) if [r[f] for f in ("cfg", "gpus", "dispatcher")] != same]
                    record["ep"] = [*rows, row]
                    if out:
                        write_json(out, record)


if __name__ == "__main__":
    main()
