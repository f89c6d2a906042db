"""What the layer benchmark measures beside the shapes of the papers: bounded workspaces, four million tokens, skewed
routings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import MIB, TABLES, cfg_of, in_turn, stamped
from scripts.bench.peers import ours
from scripts.bench.timing import gpu_ms, interleaved_ms, peak_bytes

Row = dict[str, Any]

# workspace_bytes over T. Each token of a chunk takes 6 KiB in these shapes, so these make twelve chunks and four.
WORKSPACE_BYTES_A_TOKEN = (512, 1536)
LARGE_SHAPES = tuple(shape for shape in TABLES["moeblaze-2"] if shape.T >= 1 << 19)
FOUR_MILLION = Sizes(1 << 22, 256, 256, 128, 4)
SKEW_SHAPES = (
    Sizes(40960, 768, 256, 128, 8),
    Sizes(32768, 4096, 1024, 64, 4),
    Sizes(65536, 1024, 4096, 8, 2),
    Sizes(131072, 256, 256, 128, 4),
)
ROUTINGS = ("uniform", "zipf", "half_on_one")


def bounded_workspace(shape: Sizes, rounds: int) -> Row:
    """Ours in token chunks against ours whole and SonicMoE: time and peak, forward + backward."""
    inputs = peers.make_inputs(shape)
    bounds = {f"bounded_{share}": share * shape.T for share in WORKSPACE_BYTES_A_TOKEN}
    programs = {"blazeproto": ours.build(shape, inputs)}
    programs |= {name: ours.build(shape, inputs, workspace_bytes=bound) for name, bound in bounds.items()}
    if sonic := peers.if_it_runs("sonic", partial(peers.build, "sonic", shape, [inputs]), {}):
        programs["sonic"] = sonic[0]
    calls: dict[str, Callable[[], object]] = {name: p.forward_backward for name, p in programs.items()}
    for call in calls.values():
        call()
    peak = {name: peak_bytes(call) / MIB for name, call in calls.items()}
    eager = interleaved_ms(calls, rounds)
    gpu = gpu_ms(calls, list(calls), rounds)
    row: Row = {"cfg": cfg_of(shape), "programs": {}}
    for name in calls:
        row["programs"][name] = {
            "workspace_bytes": bounds.get(name),
            "fwdbwd_ms": round(eager[name], 3),
            "gpu_fwdbwd_ms": round(gpu.ms[name], 3),
            "gpu_method": gpu.method[name],
            "peak_fwdbwd_MiB": round(peak[name], 1),
            "time_to_unbounded": round(gpu.ms[name] / gpu.ms["blazeproto"], 3),
            "peak_to_sonic": round(peak[name] / peak["sonic"], 3) if "sonic" in peak else None,
        }
    return row


def four_million_tokens(rounds: int) -> Row:
    """Forward and backward of 4 Mi tokens: it fits, its gradients are finite, and what it takes."""
    inputs = peers.make_inputs(FOUR_MILLION)
    program = ours.build(FOUR_MILLION, inputs)
    _, gradients = program.forward_backward()
    finite = all(bool(part.isfinite().all()) for gradient in gradients for part in gradient.split(1 << 18))
    del gradients
    peak = peak_bytes(program.forward_backward)
    ms = interleaved_ms({"blazeproto": program.forward_backward}, min(rounds, 5))["blazeproto"]
    return {
        "cfg": cfg_of(FOUR_MILLION),
        "finite": finite,
        "fwdbwd_ms": round(ms, 2),
        "peak_fwdbwd_MiB": round(peak / MIB, 1),
        "gpu_MiB": round(torch.cuda.get_device_properties(0).total_memory / MIB),
    }


def skewed_routing(shape: Sizes, rounds: int) -> Row:
    """Time under skewed routings over the uniform one's: the same number of rows everywhere, so the same work."""
    programs = {kind: ours.build(shape, peers.make_inputs(shape, kind)) for kind in ROUTINGS}
    for program in programs.values():
        program.forward_backward()
    forward = gpu_ms({kind: p.forward for kind, p in programs.items()}, ROUTINGS, rounds)
    both = gpu_ms({kind: p.forward_backward for kind, p in programs.items()}, ROUTINGS, rounds)
    row: Row = {"cfg": cfg_of(shape), "gpu_method": both.method["uniform"]}
    for kind in ROUTINGS:
        row[kind] = {
            "gpu_fwd_ms": round(forward.ms[kind], 4),
            "gpu_fwdbwd_ms": round(both.ms[kind], 4),
            "fwd_to_uniform": round(forward.ms[kind] / forward.ms["uniform"], 3),
            "fwdbwd_to_uniform": round(both.ms[kind] / both.ms["uniform"], 3),
        }
    return row


def by_shape(measure: Callable[[Sizes, int], Row], shapes: Sequence[Sizes], rounds: int) -> list[Row]:
    """A row a shape, each printed."""
    rows = []
    for shape in in_turn(shapes):
        rows.append(stamped(measure, shape, rounds))
        print(rows[-1], flush=True)
    return rows


EXTRAS: dict[str, Callable[[int], Any]] = {
    "workspace": partial(by_shape, bounded_workspace, LARGE_SHAPES),
    "four_million_tokens": partial(stamped, four_million_tokens),
    "skew": partial(by_shape, skewed_routing, SKEW_SHAPES),
}
