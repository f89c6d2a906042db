"""What the layer benchmark measures beside the shapes of the papers: bounded workspaces, four million tokens, skewed
routings."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench import peers
from scripts.bench.common import MIB, TABLES, LayerShape
from scripts.bench.peers import ours
from scripts.bench.timing import gpu_ms, interleaved_ms, peak_bytes

# workspace_bytes over T. Each token of a chunk takes 6 KiB in these shapes, so these make twelve chunks and four.
WORKSPACE_BYTES_A_TOKEN = (512, 1536)
LARGE_SHAPES = tuple(shape for shape in TABLES["moeblaze-2"] if shape.T >= 1 << 19)
FOUR_MILLION = LayerShape(1 << 22, 256, 256, 128, 4)
SKEW_SHAPES = (
    LayerShape(40960, 768, 256, 128, 8),
    LayerShape(32768, 4096, 1024, 64, 4),
    LayerShape(65536, 1024, 4096, 8, 2),
    LayerShape(131072, 256, 256, 128, 4),
)
ROUTINGS = ("uniform", "zipf", "half_on_one")


def bounded_workspace(rounds: int) -> list[dict[str, Any]]:
    """Ours in token chunks against ours whole and SonicMoE: time and peak, forward + backward."""
    rows = []
    for shape in LARGE_SHAPES:
        inputs = peers.make_inputs(shape)
        bounds = {f"bounded_{share}": share * shape.T for share in WORKSPACE_BYTES_A_TOKEN}
        programs = {"blazeproto": ours.build(shape, inputs)}
        programs |= {name: ours.build(shape, inputs, workspace_bytes=bound) for name, bound in bounds.items()}
        try:
            programs["sonic"] = peers.build("sonic", shape, inputs)
            programs["sonic"].forward_backward()
        except Exception as error:  # noqa: BLE001  absent, as in the main table
            programs.pop("sonic", None)
            print(f"  sonic is absent: {error}", flush=True)
        calls: dict[str, Callable[[], object]] = {name: p.forward_backward for name, p in programs.items()}
        for call in calls.values():
            call()
        peak = {name: peak_bytes(call) / MIB for name, call in calls.items()}
        eager = interleaved_ms(calls, rounds)
        gpu = gpu_ms(calls, list(calls), rounds)
        row: dict[str, Any] = {"cfg": shape.dict(), "programs": {}}
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
        rows.append(row)
        print("workspace", row, flush=True)
        del inputs, programs, calls
        release()
    return rows


def four_million_tokens(rounds: int) -> dict[str, Any]:
    """Forward and backward of 4 Mi tokens: it fits, its gradients are finite, and what it takes."""
    inputs = peers.make_inputs(FOUR_MILLION)
    program = ours.build(FOUR_MILLION, inputs)
    _, gradients = program.forward_backward()
    finite = all(bool(part.isfinite().all()) for gradient in gradients for part in gradient.split(1 << 18))
    del gradients
    peak = peak_bytes(program.forward_backward)
    ms = interleaved_ms({"blazeproto": program.forward_backward}, min(rounds, 5))["blazeproto"]
    return {
        "cfg": FOUR_MILLION.dict(),
        "finite": finite,
        "fwdbwd_ms": round(ms, 2),
        "peak_fwdbwd_MiB": round(peak / MIB, 1),
        "gpu_MiB": round(torch.cuda.get_device_properties(0).total_memory / MIB),
    }


def skewed_routing(rounds: int) -> list[dict[str, Any]]:
    """Time under skewed routings over the uniform one's: the same number of rows everywhere, so the same work."""
    rows = []
    for shape in SKEW_SHAPES:
        programs = {kind: ours.build(shape, peers.make_inputs(shape, kind)) for kind in ROUTINGS}
        for program in programs.values():
            program.forward_backward()
        forward = gpu_ms({kind: p.forward for kind, p in programs.items()}, ROUTINGS, rounds)
        both = gpu_ms({kind: p.forward_backward for kind, p in programs.items()}, ROUTINGS, rounds)
        row: dict[str, Any] = {"cfg": shape.dict(), "gpu_method": both.method["uniform"]}
        for kind in ROUTINGS:
            row[kind] = {
                "gpu_fwd_ms": round(forward.ms[kind], 4),
                "gpu_fwdbwd_ms": round(both.ms[kind], 4),
                "fwd_to_uniform": round(forward.ms[kind] / forward.ms["uniform"], 3),
                "fwdbwd_to_uniform": round(both.ms[kind] / both.ms["uniform"], 3),
            }
        rows.append(row)
        print("skew", row, flush=True)
        del programs
        release()
    return rows


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


EXTRAS: dict[str, Callable[[int], Any]] = {
    "workspace": bounded_workspace,
    "four_million_tokens": four_million_tokens,
    "skew": skewed_routing,
}
