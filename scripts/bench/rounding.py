"""Whole layers with token rounding against plain top-k on the Hopper backend, in the configurations of SonicMoE's Figure 7.

    python -m scripts.bench.rounding                       # all configurations -> results/h200/rounding.json on an H200
    python -m scripts.bench.rounding --quick               # the smallest and the largest E of each subfigure
    python -m scripts.bench.rounding --configs 5-8         # top-right

SonicMoE (§6.3.2, configurations in appendix F) keeps T, d, n and K, hence the operations, and raises E. The paper gives
the ends of each range; in between stand powers of two:

    subfigure       T      d      n   K           E
    top-left    16384   1536    256   8   64 … 512        16384·K/E tokens an expert on average:
    top-right   16384   1536   1024   2   16 … 128        2048 down to 256 in each subfigure
    bottom-left 16384   4096    512   8   64 … 512
    bottom-right 16384  4096   1024   4   32 … 256

Every expert's last tile of 128 rows is half empty on average; token rounding (NR-f, tile 128, as the paper measures it)
makes the counts multiples of 128. The experts alone, as the paper times them: `scripts.bench.paper sonicmoe-rounding`.

`MoE` with the routers top_k and token_rounding, and with token_rounding_up and _down as bounds, auxiliary loss 0.01. All have the
same weights, tokens and logits. Model TFLOP/s are 6·R·n·d operations of forward and 12·R·n·d of backward over the time, R being
each routing's own rows: T·K of top-k, a little more or less after rounding. GPU time by CUDA-graph replay, in turn (A B A B),
medians of 20 rounds.
"""

from dataclasses import replace

import torch

from blazeproto import MoE, cost
from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.gemm import Sizes
from blazeproto.router import Routing
from scripts.bench import peers
from scripts.bench.common import cfg_of
from scripts.bench.peers import LayerInputs, Program
from scripts.bench.peers.layers import ours
from scripts.bench.peers.modules import AUX_LOSS, moe, program_of
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, step_times

TILE = 128  # M_tile of the paper's measurement, and the rows of the products' tiles
ROUTERS = {
    "top_k": "top_k",
    "rounded": "token_rounding",
    "down": "token_rounding_down",
    "up": "token_rounding_up",
}  # name in results -> MoE's


def _doubling(T: int, d: int, n: int, K: int, first: int, last: int) -> tuple[Sizes, ...]:
    experts = [first << step for step in range((last // first).bit_length())]
    return tuple(Sizes(T, d, n, E, K) for E in experts)


SUBFIGURES: dict[str, tuple[Sizes, ...]] = {
    "top-left": _doubling(16384, 1536, 256, 8, 64, 512),
    "top-right": _doubling(16384, 1536, 1024, 2, 16, 128),
    "bottom-left": _doubling(16384, 4096, 512, 8, 64, 512),
    "bottom-right": _doubling(16384, 4096, 1024, 4, 32, 256),
}


# ------------------------------------------------------------------------------------------------ layers and routings


def whole_layers(shape: Sizes, inputs: LayerInputs, tile: int = TILE) -> dict[str, MoE]:
    """A layer for each of ROUTERS, all with the same weights."""
    return {
        name: moe(shape, inputs, router, aux_loss=AUX_LOSS, **({} if router == "top_k" else {"tile": tile}))
        for name, router in ROUTERS.items()
    }


def tile_on(machine: Machine) -> int:
    return TILE if machine.on_gpu else 16


@torch.no_grad()
def routings(layers: dict[str, MoE], x: torch.Tensor) -> dict[str, Routing]:
    """Each layer's of x: plain top-k, and rounded to tiles (SonicMoE Algorithm 4, NR-f)."""
    return {name: layer.router(x) for name, layer in layers.items()}


def padded_rows(load: torch.Tensor, tile: int = TILE) -> int:
    """Rows of the tiles that cover load (E,) rows of each expert."""
    return int(((load + tile - 1) // tile * tile).sum())


def on_routing(shape: Sizes, inputs: LayerInputs, routing: Routing) -> Program:
    """The experts on a routing, its dispatch made beforehand."""
    if routing.pair_tokens is None:
        dispatch = build_dispatch(routing.experts, shape.E)
    else:
        dispatch = build_dispatch_varying(routing.experts, routing.pair_tokens, routing.token_offsets, shape.E)
    return ours(shape, replace(inputs, scores=routing.scores.detach().requires_grad_()), dispatch=dispatch)


def with_router(layer: MoE, inputs: LayerInputs) -> Program:
    """A whole layer, auxiliary loss included."""

    module = program_of(layer, inputs.x, inputs.grad_output)
    return Program(module.forward, (inputs.x, *layer.parameters()), (module.grad_output, module.grad_loss), ())


# ------------------------------------------------------------------------------------------------------- measurement


def parts_of(forward: float, both: float) -> Row:
    """Forward, backward and both, of milliseconds or operations."""
    return {"fwd": forward, "bwd": both - forward, "fwdbwd": both}


def model_tflops(shape: Sizes, rows: int, forward_ms: float, both_ms: float) -> dict[str, float]:
    """Model TFLOP/s of forward, backward and both: operations on ``rows`` real rows, tiles' empty ones not counted."""
    forward, backward = cost.layer_operations(shape._replace(T=rows, K=1))
    operations, ms = parts_of(forward, forward + backward), parts_of(forward_ms, both_ms)
    return {f"{part}_tflops": round(1e-9 * operations[part] / ms[part], 1) for part in ms}


def figures(
    shape: Sizes, made: dict[str, Program], routed: dict[str, Routing], machine: Machine, prefix: str = "gpu_"
) -> dict[str, Row]:
    """Rows, GPU times and model TFLOP/s by name, of programs and their routings."""
    found, refused = step_times({name: [program] for name, program in made.items()}, machine, tuple(made), prefix)
    for name, row in found.items():
        rows = int(routed[name].load.sum())
        row |= {"rows": rows, "padded_rows": padded_rows(routed[name].load, tile_on(machine))}
        row |= model_tflops(shape, rows, row[f"{prefix}fwd_ms"], row[f"{prefix}fwdbwd_ms"])
        row |= {"not_captured": refused[name]} if name in refused else {}
    return found


def row_counts(routed: dict[str, Routing]) -> Row:
    """For how many rows each routing has room, by which products choose their tiles: a rounded one, for more than T K."""
    return {"row_counts": sorted({routing.experts.numel() for routing in routed.values()})}


def gains(found: dict[str, Row], prefix: str = "gpu_") -> dict[str, float]:
    """Model TFLOP/s with token rounding over plain top-k's."""
    rounded, plain = found["rounded"], found["top_k"]
    ms, plain_ms = (parts_of(row[f"{prefix}fwd_ms"], row[f"{prefix}fwdbwd_ms"]) for row in (rounded, plain))
    return {f"{part}_gain": round(rounded["rows"] / ms[part] / plain["rows"] * plain_ms[part], 4) for part in ms}


def measure(case: tuple[str, Sizes], machine: Machine) -> Row:
    _, shape = case
    inputs = peers.make_inputs(shape, device=machine.device)
    whole = whole_layers(shape, inputs, tile_on(machine))
    routed = routings(whole, inputs.x)
    found = figures(shape, {name: with_router(layer, inputs) for name, layer in whole.items()}, routed, machine)
    return row_counts(routed) | found | gains(found)


CASES = [(name, shape) for name, shapes in SUBFIGURES.items() for shape in shapes]
ENDS = [case for case in CASES if case[1].rows // case[1].E in (2048, 256)]  # the fewest and the most experts of each
SMALL = [("small", Sizes(600, 32, 16, 8, 2))]
BENCH = Bench(
    "rounding",
    __doc__,
    {"rows": Item(measure, CASES, SMALL, ENDS, lambda case: {"subfigure": case[0], "cfg": cfg_of(case[1])})},
    head={"tile": TILE, "rule": "nr_f"},
    paragraphs=2,
)

if __name__ == "__main__":
    run(BENCH)
