"""What token rounding gains over plain top-k on the Hopper backend, in the configurations of SonicMoE's Figure 7.

    python -m scripts.bench.rounding                       # all configurations -> results/h200/rounding.json
    python -m scripts.bench.rounding --quick               # the smallest and the largest E of each subfigure
    python -m scripts.bench.rounding --subfigures top-right

SonicMoE (§6.3.2, configurations in appendix F) keeps T, d, n and K, hence the operations, and raises E. The paper gives
the ends of each range; in between stand powers of two:

    subfigure       T      d      n   K           E
    top-left    16384   1536    256   8   64 … 512        16384·K/E tokens an expert on average:
    top-right   16384   1536   1024   2   16 … 128        2048 down to 256 in each subfigure
    bottom-left 16384   4096    512   8   64 … 512
    bottom-right 16384  4096   1024   4   32 … 256

Every expert's last tile of 128 rows is half empty on average; token rounding (NR-f, tile 128, as the paper measures it)
makes the counts multiples of 128. Measured twice: the experts alone, and whole layers.

Experts alone: as in the paper neither router nor dispatch is timed. Whole layers: `MoE` with the routers top_k and
token_rounding, and with token_rounding_up and _down as bounds, auxiliary loss 0.01. All have the same weights, tokens and logits.
Model TFLOP/s are 6·R·n·d operations of forward and 12·R·n·d of backward over the time, R being each routing's own rows: T·K of
top-k, a little more or less after rounding. GPU time by CUDA-graph replay, in turn (A B A B), medians of 20 rounds.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

from blazeproto import MoE, cost
from blazeproto.autograd import moe_mlp
from blazeproto.dispatch import build_dispatch, build_dispatch_varying
from blazeproto.gemm import Sizes
from blazeproto.router import Routing
from scripts.bench import peers
from scripts.bench.common import (
    begun,
    bench_parser,
    cfg_of,
    finished,
    geometric_mean,
    in_turn,
    part_file,
    settled,
    stamped,
    write_json,
)
from scripts.bench.peers.modules import AUX_LOSS, router_weight
from scripts.bench.tables import TABLES
from scripts.bench.timing import gpu_ms
from scripts.command import need_hopper, some_of

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


def whole_layers(shape: Sizes, inputs: peers.LayerInputs, tile: int = TILE) -> dict[str, MoE]:
    """A layer for each of ROUTERS, all with the same weights."""
    layers = {}
    for name, router in ROUTERS.items():
        options: dict[str, Any] = {"aux_loss": AUX_LOSS, "device": inputs.x.device, "dtype": torch.bfloat16}
        options |= {"backend": "hopper" if inputs.x.is_cuda else "auto"} | ({"tile": tile} if name != "top_k" else {})
        layers[name] = MoE(shape.d, shape.n, shape.E, shape.K, router=router, **options)
        layers[name].gate_up_proj = nn.Parameter(inputs.gate_up_proj.detach())
        layers[name].down_proj = nn.Parameter(inputs.down_proj.detach())
        layers[name].router.weight = nn.Parameter(router_weight(shape, inputs))
    return layers


@torch.no_grad()
def routings(layers: dict[str, MoE], x: torch.Tensor) -> dict[str, Routing]:
    """Plain top-k of x, and the same rounded to tiles (SonicMoE Algorithm 4, NR-f)."""
    return {name: layers[name].router(x) for name in ("top_k", "rounded")}


def padded_rows(load: torch.Tensor, tile: int = TILE) -> int:
    """Rows of the tiles that cover load (E,) rows of each expert."""
    return int(((load + tile - 1) // tile * tile).sum())


def layer(shape: Sizes, inputs: peers.LayerInputs, routing: Routing) -> peers.Program:
    """The experts on a routing, its dispatch made beforehand."""
    scores = routing.scores.detach().requires_grad_()
    if routing.pair_tokens is None:
        dispatch = build_dispatch(routing.experts, shape.E)
    else:
        varying = (routing.experts, routing.pair_tokens, routing.token_offsets)
        dispatch = build_dispatch_varying(*varying, shape.E)
    weights = (inputs.gate_up_proj, inputs.down_proj)

    def forward() -> torch.Tensor:
        return moe_mlp(inputs.x, *weights, scores, num_experts=shape.E, backend="hopper", dispatch=dispatch)

    return peers.Program(forward, (inputs.x, *weights, scores), inputs.grad_output, weights)


def with_router(layer: MoE, inputs: peers.LayerInputs) -> peers.Program:
    """A whole layer, auxiliary loss included."""

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out, stats = layer(inputs.x)
        return out, torch.as_tensor(stats.aux_loss)

    ones = torch.ones((), device=inputs.x.device)
    return peers.Program(forward, (inputs.x, *layer.parameters()), (inputs.grad_output, ones), ())


# ------------------------------------------------------------------------------------------------------- measurement


def model_tflops(shape: Sizes, rows: int, forward_ms: float, both_ms: float) -> dict[str, float]:
    """Model TFLOP/s of forward, backward and both: operations on ``rows`` real rows, tiles' empty ones not counted."""
    forward, backward = cost.layer_operations(shape._replace(T=rows, K=1))
    parts = {
        "fwd": (forward, forward_ms),
        "bwd": (backward, both_ms - forward_ms),
        "fwdbwd": (forward + backward, both_ms),
    }
    return {f"{name}_tflops": round(1e-9 * operations / ms, 1) for name, (operations, ms) in parts.items()}


def figures(
    shape: Sizes, programs: dict[str, peers.Program], loads: dict[str, torch.Tensor], rounds: int
) -> dict[str, dict[str, Any]]:
    """Rows, GPU times and model TFLOP/s by name, of programs and the experts' loads."""
    names = list(programs)
    forward = gpu_ms({name: program.forward for name, program in programs.items()}, names, rounds)
    both = gpu_ms({name: program.forward_backward for name, program in programs.items()}, names, rounds)
    found: dict[str, dict[str, Any]] = {}
    for name, load in loads.items():
        rows = int(load.sum())
        found[name] = {
            "rows": rows,
            "padded_rows": padded_rows(load),
            "gpu_fwd_ms": round(forward.ms[name], 4),
            "gpu_fwdbwd_ms": round(both.ms[name], 4),
            "gpu_method": f"{forward.method[name]}/{both.method[name]}",
            **model_tflops(shape, rows, forward.ms[name], both.ms[name]),
        }
        if refused := forward.refused.get(name) or both.refused.get(name):
            found[name]["not_captured"] = refused
    return found


def gains(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Model TFLOP/s with token rounding over those of plain top-k."""
    return {
        f"{part}_gain": round(found["rounded"][f"{part}_tflops"] / found["top_k"][f"{part}_tflops"], 4)
        for part in ("fwd", "bwd", "fwdbwd")
    }


def measure(subfigure: str, shape: Sizes, rounds: int) -> dict[str, Any]:
    """One row of the results: the experts alone on both routings of one configuration, and under "layers" whole layers."""
    inputs = peers.make_inputs(shape)
    whole = whole_layers(shape, inputs)
    routed = routings(whole, inputs.x)
    calls = {name: layer(shape, inputs, routing) for name, routing in routed.items()}
    experts = figures(shape, calls, {name: routing.load for name, routing in routed.items()}, rounds)
    loads = {name: one(inputs.x)[1].load for name, one in whole.items()}
    layers = figures(shape, {name: with_router(one, inputs) for name, one in whole.items()}, loads, rounds)
    row: dict[str, Any] = {"subfigure": subfigure, "cfg": cfg_of(shape)} | experts | gains(experts)
    return row | {"layers": layers | gains(layers)}


def print_tables(record: dict[str, Any]) -> None:
    """Those of the documentation, and the gains' geometric means."""
    print(f"{TABLES['rounding'](record)}\n\n{TABLES['rounding_layers'](record)}\n")
    for what, rows in (("experts alone", record["rows"]), ("whole layers", [row["layers"] for row in record["rows"]])):
        means = [geometric_mean([row[f"{part}_gain"] for row in rows]) for part in ("fwd", "bwd", "fwdbwd")]
        print(
            f"geometric mean of the gain, {what}: forward {means[0]:.3f}, backward {means[1]:.3f}, both {means[2]:.3f}"
        )


# -------------------------------------------------------------------------------------------------------------- main


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("rounding", __doc__, quick="least and most experts of each, 7 rounds")
    what = "some of " + ", ".join(SUBFIGURES)
    parser.add_argument("--subfigures", type=some_of(SUBFIGURES), default=[*SUBFIGURES], help=what)
    options = settled(parser.parse_args(words), "rounding", rounds=20)
    shapes = {name: SUBFIGURES[name][:: 3 if options.quick else 1] for name in options.subfigures}
    options.configs = [(name, shape) for name, group in shapes.items() for shape in group]
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    record = begun("rounding", __doc__, 2, tile=TILE, rule="nr_f")
    for subfigure, shape in in_turn(options.configs):
        row = stamped(measure, subfigure, shape, options.rounds)
        record["rows"].append(row)
        write_json(options.out or part_file("rounding"), record)
        both, whole = row["fwdbwd_gain"], row["layers"]["fwdbwd_gain"]
        print(f"{shape}: forward + backward x {both} of the experts, x {whole} of whole layers", flush=True)
    print_tables(record)
    print("wrote", options.out or finished("rounding", whole=set(options.subfigures) == SUBFIGURES.keys()))


if __name__ == "__main__":
    main()
