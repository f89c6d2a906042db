"""Experts on several GPUs: a layer forward and backward, and the exchange alone, by dispatcher.

    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel             # -> the "ep" rows of results/h200/distributed.json
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --quick     # small -> distributed-quick.json
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --layers qwen3,mixtral
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --parts fp8 # bf16 and fp8 -> results/h200/fp8_ranks.json
    torchrun --nproc-per-node 2 -m scripts.bench.expert_parallel --cpu       # small, on CPUs
    python -m scripts.bench.expert_parallel --cpu                            # the same with one rank

Any number of GPUs: rows of other numbers stay. The file is written after every row.

fwd_tflops, bwd_tflops: 6 T K n d and 12 T K n d operations of a rank's T tokens, over the time from x, ids and scores on each
rank to O, and from dO to dX, dS and dW; metadata in, router out. dispatch_gbps: from ids and scores at hand to rows that experts
read, index lists included; combine_gbps: from Y to O complete. The payload of both is rows that leave the GPU, one a (token,
other rank). Ids are without replacement, uniform or, "zipf", by a law of Zipf of exponent 1, new for every replay. CUDA graphs,
of the exchange eight in a row, behind a barrier of all ranks, the slowest rank's time, medians; a dispatcher that no graph
captures is timed as it runs, by events.
peak_MiB: forward and backward over what was there before, weights and gradients and the exchange's memory included; alone_MiB:
one GPU's with all experts. "vdev_2d" is torch's own exchange alone (`scripts.bench.torch_exchange`), or "absent": why not.
--parts fp8: a layer with `Symmetric` in bf16 and in fp8, replayed in turn. bf16_apart, fp8_apart: the norm of the difference from
one GPU's results in the same precision, over their norm; that GPU has all experts and all ranks' tokens.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from itertools import islice
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
from scripts.bench.common import MIB, REPOSITORY, cfg_of, free_memory
from scripts.bench.rank_memory import CAPACITY
from scripts.bench.running import TIMEOUT, Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row
from scripts.command import some_of
from scripts.lm.ranks import Ranks, join

LAYERS = {  # d, n, E, K
    "qwen3": Sizes(8192, 2048, 768, 128, 8),
    "mixtral": Sizes(8192, 4096, 14336, 8, 2),
}
SMALL = Sizes(64, 64, 32, 8, 2)
RESULTS = ("out", "dx", "d_scores", "d_up", "d_down")
IN_FP8 = Sizes(8192, 4096, 1536, 128, 8)
IN_A_ROW = 8  # exchanges of a graph
PATIENCE = 60  # seconds for torch's exchange
Call = Callable[[], object]


class Spread(NamedTuple):
    """A case: a layer over the ranks. shape: T of a rank."""

    layer: str
    shape: Sizes
    dispatcher: str

    @property
    def key(self) -> Row:
        return {"cfg": cfg_of(self.shape), "dispatcher": self.dispatcher}


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
    exponent: float = 0.0


def inputs_of(shape: Sizes, ranks: Ranks, exponent: float = 0.0) -> Inputs:
    """exponent: of a law of Zipf that ids follow, 0 for a uniform one."""
    torch.manual_seed(100 + ranks.rank)
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    x, d_out = (torch.randn(shape.T, shape.d, device=ranks.device).to(dtype) for _ in range(2))
    scores = torch.rand(shape.T, shape.K, device=ranks.device)
    ids = torch.empty(shape.T, shape.K, dtype=torch.int32, device=ranks.device)
    draw_ids(ids, shape.E, exponent)
    return Inputs(x.requires_grad_(), scores.requires_grad_(), ids, d_out, exponent)


def draw_ids(ids: Tensor, num_experts: int, exponent: float = 0.0) -> None:
    """Without replacement, in place: expert e with a weight of 1 / (1 + e)^exponent."""
    weights = torch.arange(1, num_experts + 1, device=ids.device) ** -exponent
    waits = torch.empty(len(ids), num_experts, device=ids.device).exponential_() / weights
    ids.copy_(waits.topk(ids.shape[1], largest=False, sorted=False).indices)


def layer_of(shape: Sizes, given: Inputs, dispatcher: Any, options: dict[str, Any]) -> MoE:
    """Made on "meta", so that no rank has all experts; alone, with None for a dispatcher, it has."""
    router = Given(shape, given.scores, given.ids)
    layer = MoE(shape.d, shape.n, shape.E, shape.K, router=router, device="meta", dtype=given.x.dtype, **options)
    if dispatcher is not None:
        layer = expert_parallel(layer, dispatcher.group, dispatcher=dispatcher)
    layer = layer.to_empty(device=given.x.device)
    with torch.no_grad():
        for weight in layer.parameters():
            own(weight).uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
    router.scores, router.ids = given.scores, given.ids  # which to_empty leaves alone
    return layer


def own(weight: Any) -> Any:
    """A rank's part of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def once_ms(call: Call, machine: Machine) -> float:
    if not machine.on_gpu:
        return 1e3 * timeit.timeit(call, number=1)
    if machine.ranks.size > 1:
        dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def replayed(call: Call) -> Call:
    """A call as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    torch.cuda.synchronize()
    return graph.replay


def timed(calls: list[Call], kept: list[Any], machine: Machine, *, before: Call, captured: bool) -> list[float]:
    """ms of calls that run one after another in every round: behind a barrier, the slowest rank's, medians of rounds.

    kept: what the calls leave for each other.  before: what each round begins with.  captured: the calls run as graphs.
    """
    before()
    for call in calls * 2:
        call()
    kept.clear()
    wanted = [replayed(call) for call in calls] if captured else calls
    taken = []
    for _ in range(machine.rounds + 2):
        before()
        taken.append([once_ms(call, machine) for call in wanted])
    # The first ones warm up.
    return [statistics.median(machine.largest(each)) for each in zip(*taken[2:], strict=True)]


def layer_times(given: Inputs, shape: Sizes, machine: Machine, *layers: MoE, captured: bool) -> list[float]:
    """Forward's and backward's ms, of each layer in turn."""
    kept: list[Any] = []

    def forward(layer: MoE) -> None:
        kept[:] = [layer(given.x)[0]]

    def backward(layer: MoE) -> None:
        kept[1:] = [gradients(layer, kept[0], given)]

    calls: list[Call] = [partial(step, layer) for layer in layers for step in (forward, backward)]
    return timed(calls, kept, machine, before=lambda: draw_ids(given.ids, shape.E, given.exponent), captured=captured)


def gradients(layer: MoE, out: Tensor, given: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (given.x, given.scores, *layer.parameters()), given.d_out)


def exchange_row(
    send: Callable[[Tensor], Any],
    back: Callable[[Any], object],
    given: Inputs,
    shape: Sizes,
    machine: Machine,
    *,
    captured: bool,
) -> Row:
    """Figures of the ways out and back of an exchange: means of IN_A_ROW with ids of their own, in one graph if ``captured``.

    send: sends rows by ids (T, K), and returns what ``back`` takes.
    """
    routings = [torch.empty_like(given.ids) for _ in range(IN_A_ROW)]
    kept: list[Any] = []

    def draw() -> None:
        for ids in routings:
            draw_ids(ids, shape.E)

    def all_out() -> None:
        kept.clear()
        kept.extend(map(send, routings))

    def all_back() -> None:
        for each in kept:
            back(each)

    ms = timed([all_out, all_back], kept, machine, before=draw, captured=captured)
    of_rank, ranks = given.ids // (shape.E // machine.ranks.size), machine.ranks
    others = [(of_rank == other).any(1).sum() for other in range(ranks.size) if other != ranks.rank]
    leaves = int(sum(others)) * shape.d * given.x.element_size()  # of this GPU
    row: Row = {"payload_MiB": round(leaves / MIB, 2)}
    for way, each in zip(("dispatch", "combine"), ms, strict=True):
        row |= {f"{way}_ms": round(each / IN_A_ROW, 4), f"{way}_gbps": round(leaves / each * IN_A_ROW / 1e6, 1)}
    return row


def our_exchange(dispatcher: Symmetric, given: Inputs, shape: Sizes, machine: Machine) -> Row:
    """Figures of the exchange alone."""
    exchange: Any = dispatcher._exchange
    experts_here, x, scores = shape.E // dispatcher.ranks, given.x.detach(), given.scores.detach()
    backend = backend_on("auto", x.device, x.dtype, experts_here, shape.d, shape.n)
    made = torch.empty_like(x)
    y = torch.randn(exchange.places * shape.K, shape.d, device=x.device).to(x.dtype)

    def send(ids: Tensor) -> tuple[Any, ...]:
        choice = exchange.share(ids, scores, None, None, shape.T, experts_here)
        index = dispatch.kernel(choice.experts, experts_here, WHOLE, "auto")
        exchange.send(x, choice.token_ranks)
        return choice.token_ranks, index, choice.scores

    def back(sent: tuple[Any, ...]) -> None:
        token_ranks, (pairs, offsets, index_map), weights = sent
        arrived = Dispatch(pairs, offsets[0], index_map, None, experts_here, shape.K, exchange.places)
        (chunk,) = chunks_of(arrived, WHOLE)
        exchange.add_up(token_ranks, y, backend.rows_of(chunk.dispatch), scores=weights, out=made)

    return exchange_row(send, back, given, shape, machine, captured=machine.on_gpu)


def peak_mib(layer: MoE, given: Inputs, machine: Machine, *, beside: int) -> float:
    """The peak of forward and backward, gradients included, and ``beside`` bytes and the layer's weights; the largest rank's."""

    def step() -> tuple[Tensor, ...]:
        return gradients(layer, layer(given.x)[0], given)

    free_memory()
    weights = sum(own(weight).nbytes for weight in layer.parameters())
    (peak,) = machine.largest([machine.peak_bytes(step) + weights + beside])
    return round(peak / MIB, 1)


def dispatcher_of(case: Spread, ranks: Ranks) -> Any:
    shape, world = case.shape, dist.group.WORLD
    assert world is not None
    if case.dispatcher == "all_to_all":
        return AllToAll(world, shape.E)
    sizes: Any = {"d_model": shape.d, "max_tokens": shape.T, "max_pairs": shape.rows, "device": ranks.device}
    return Symmetric(world, shape.E, **sizes)


def measure(case: Spread, machine: Machine) -> Row:
    _, shape, name = case
    ranks = machine.ranks
    given = inputs_of(shape, ranks, exponent=float(name == "zipf"))
    dispatcher = dispatcher_of(case, ranks)
    options = {"row_capacity": int(CAPACITY * shape.rows)} if name == "capacity" else {}
    layer = layer_of(shape, given, dispatcher, options)
    most_rows = options.get("row_capacity", ranks.size * shape.rows)  # of a rank
    row: Row = {"ranks": ranks.size, "row_counts": [most_rows]}
    with torch.cuda.stream(torch.cuda.Stream()) if machine.on_gpu else torch.enable_grad():
        beside = dispatcher.layout.size if isinstance(dispatcher, Symmetric) else 0
        row["peak_MiB"] = peak_mib(layer, given, machine, beside=beside)
        ms = layer_times(given, shape, machine, layer, captured=machine.on_gpu and name != "all_to_all")
        for part, operations, each in zip(("fwd", "bwd"), (6 * shape.rows, 12 * shape.rows), ms, strict=True):
            row |= {f"{part}_ms": round(each, 4)}
            row |= {f"{part}_tflops": round(operations * shape.n * shape.d / each / 1e9, 1)}
        if name == "symmetric":
            row |= our_exchange(dispatcher, given, shape, machine)
            del layer
            row["alone_MiB"] = peak_mib(layer_of(shape, given, None, {}), given, machine, beside=0)
    return row


def measure_fp8(case: Spread, machine: Machine) -> Row:
    """`Symmetric` in both precisions."""
    shape, ranks = case.shape, machine.ranks
    given, dispatcher = inputs_of(shape, ranks), dispatcher_of(case, ranks)
    row: Row = {"ranks": ranks.size, "row_counts": [ranks.size * shape.rows], "several_sizes": True}  # alone too
    with torch.cuda.stream(torch.cuda.Stream()) if machine.on_gpu else torch.enable_grad():
        layers = {name: layer_of(shape, given, dispatcher, {"precision": name}) for name in ("bf16", "fp8")}
        for name, layer in layers.items():
            row[f"{name}_apart"] = apart(layer, given, shape, machine)
            free_memory()
        ms = iter(layer_times(given, shape, machine, *layers.values(), captured=machine.on_gpu))
    for name in layers:
        forward, backward = islice(ms, 2)
        row |= {f"{name}_fwd_ms": round(forward, 4), f"{name}_fwdbwd_ms": round(forward + backward, 4)}
    return row


def apart(layer: MoE, given: Inputs, shape: Sizes, machine: Machine) -> dict[str, float]:
    """The distance of a layer's results from one GPU's, over their norm, on the rank where it is largest."""
    x, scores, ids, d_out = map(of_all_ranks, given[:4])
    whole = Inputs(x, scores, ids, d_out)
    alone = layer_of(shape, whole, None, {"precision": layer.precision})
    with torch.no_grad():
        for to, weight in zip(alone.parameters(), layer.parameters(), strict=True):
            to.copy_(of_all_ranks(own(weight)))
    whole.x.requires_grad_(), whole.scores.requires_grad_()
    ours, theirs = results(layer, given), results(alone, whole)
    found = []
    for mine, all_of_it in zip(ours, theirs, strict=True):
        expected = all_of_it.detach().chunk(machine.ranks.size)[machine.ranks.rank].float()
        found.append(float((own(mine).detach().float() - expected).norm() / expected.norm()))
    return {name: float(f"{each:.3g}") for name, each in zip(RESULTS, machine.largest(found), strict=True)}


def results(layer: MoE, given: Inputs) -> list[Tensor]:
    """`RESULTS`."""
    out = layer(given.x)[0]
    return [out, *gradients(layer, out, given)]


def of_all_ranks(t: Tensor) -> Tensor:
    """One behind the other."""
    made = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(made, t.detach())
    return torch.cat(made)


def measure_torchs(case: Spread, machine: Machine) -> Row:
    """torch's exchange in a process for each rank: symmetric memory is of one backend in a process, and what fails there ends
    there."""
    ranks = machine.ranks
    if not machine.on_gpu:
        return {"absent": {"vdev_2d": f"needs GPUs, got ranks on {ranks.device.type}"}}
    folder = ranks.told(tempfile.mkdtemp() if ranks.first else "")
    spec = {"shape": case.shape[:5], "rounds": machine.rounds, "store": f"{folder}/store", "rank": ranks.rank}
    spec |= {"ranks": ranks.size, "gpu": torch.cuda.current_device()}
    found = ranks.of_each(partial(ended, "scripts.bench.torch_exchange", json.dumps(spec)))
    if ranks.first:
        shutil.rmtree(folder, ignore_errors=True)
    reasons = sorted((each["absent"] for each in found if "absent" in each), key=SILENT.__eq__)
    return {"absent": {"vdev_2d": reasons[0]}} if reasons else found[0]


SILENT = f"no end within {PATIENCE} s"  # of a rank that waits for another, which has a better reason


def ended(*words: str) -> Row:
    """The last line that ``python -m`` with these words prints, as JSON; or under "absent" the last line of its errors."""
    environment = os.environ | {"NVSHMEM_DISABLE_NVLS": "1"}
    options: Any = {"env": environment, "cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": PATIENCE}
    try:
        done = subprocess.run([sys.executable, "-m", *words], check=True, **options)
        return {} | json.loads(next(line for line in reversed(done.stdout.split("\n")) if line.startswith("{")))
    except subprocess.TimeoutExpired:
        return {"absent": SILENT}
    except subprocess.CalledProcessError as error:
        lines = [f"exit {error.returncode}", *filter(str.strip, error.stderr.split("\n"))]
        return {"absent": lines[-1].strip()[:200]}
    except (OSError, ValueError, StopIteration) as error:
        return {"absent": f"{type(error).__name__}: {error}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=some_of(LAYERS), default=["qwen3"], help=f"of {', '.join(LAYERS)}")


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    if not dist.is_initialized():
        join(ranks.device, TIMEOUT)


def spread(dispatchers: tuple[str, ...], measure: Callable[[Spread, Machine], Row]) -> Item:
    places = [(name, shape._replace(T=tokens)) for name, shape in LAYERS.items() for tokens in (8192, 65536)]
    cases = [Spread(*place, dispatcher) for place in places for dispatcher in dispatchers]
    short = [Spread("", SMALL, dispatcher) for dispatcher in dispatchers]
    return Item(measure, cases, short, short, of_case, file="distributed", part="ep", rounds=30)


SHORT = [Spread("", SMALL._replace(n=128), "symmetric")]
BENCH = Bench(
    "expert_parallel",
    __doc__,
    {
        "layers": spread(("symmetric", "all_to_all", "capacity", "zipf"), measure),
        "torch": spread(("vdev_2d",), measure_torchs),
        "fp8": Item(measure_fp8, [Spread("", IN_FP8, "symmetric")], SHORT, SHORT, of_case, file="fp8_ranks", rounds=30),
    },
    options=add_options,
    asked=lambda options, case: case.layer in ("", *options.layers),
    prepare=prepare,
    ranks=True,
)

if __name__ == "__main__":
    run(BENCH)
