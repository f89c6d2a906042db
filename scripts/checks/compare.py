"""Does this checkout compute what another one does, to the bit, and in which time? Each runs in processes of its own.

    git worktree add .base COMMIT
    python -m scripts.checks.compare --old .base                        # bits: all cases
    python -m scripts.checks.compare --old .base --only "dispatch: "    # of them those whose names have this
    python -m scripts.checks.compare --old .base --time                 # GPU time of MoE over module.json's 30 shapes
    python -m scripts.checks.compare --old .base --models               # and over models' layers, evenly routed and by a Zipf law
    python -m scripts.checks.compare --old .base --lora                 # and of the layer of scripts.bench.lora
    python -m scripts.checks.compare --old .base --router               # and of routers, from one token on

Bits: every dispatch and router operator, and random layers by their products, ``moe_mlp`` and ``MoE`` (cases.py). Each side draws
layers with its own blazeproto.lab. Hashes of outputs and gradients are compared. Sums in an order that varies (combine="fused",
"fused_both") are left to `scripts.checks.fuzz`. A case that the old side does not have is told and fails nothing.

Time: a forward and a backward as a CUDA graph, replayed by the two sides in turn (A B B A), medians over the rounds.

--device cpu runs the cases of a few tokens on the twins and the torch backend, to try this script.
"""

# blazeproto, and what imports it, is imported inside functions: a side's process takes it from its own checkout.
import argparse
import gc
import hashlib
import importlib
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.command import argument_parser, need_kernels, positive, refuse, some_of

Record = dict[str, Any]
SIDES = ("old", "new")
ROOT = Path(__file__).resolve().parents[2]
CPU_TOKENS = 300  # of a layer, at most, on a CPU
ROUNDS = 7  # of times
FITS_TWICE = 2e9  # d n E of a layer, on a GPU of 141 GB
BURST_MS, MOST_CALLS = 20.0, 12  # how long a timed interval is, and the most calls in it
MOST_MEAN, MOST_RATIO, MOST_LORA = 1.01, 1.03, 1.01  # of the new side's time over the old one's
ROUTERS = ((32768, 2048, 8, 128, 8), (16384, 4096, 8, 512, 8))  # T, d, n, E, K; n does not matter
FEW_TOKENS = (1, 64, 1024)
MOST_ROUTER, MOST_FEW = 1.05, 1.2  # how much longer routers may take, on all tokens and on few

# --- A side's process ----------------------------------------------------------------------------------------------------

HERE = SimpleNamespace(device="", cases={}, step=None, graph=None)  # of a process


def load(root: Path, device: str) -> None:
    """Takes blazeproto from the checkout at ``root``, and makes its cases. ImportError if another one is found."""
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(ROOT)])  # of the processes that compile
    found = Path(importlib.import_module("blazeproto").__file__ or "").resolve().parents[1]
    if found != root:
        raise ImportError(f"expected blazeproto in {root}, got {found}'s")
    from scripts.checks.cases import all_cases

    made = [case for case in all_cases(device) if device == "cuda" or case.tokens <= CPU_TOKENS]
    HERE.device, HERE.cases = device, {case.name: case for case in made}
    if len(HERE.cases) < len(made):
        raise ValueError("cases: expected different names, one is there twice")


def names() -> list[str]:
    return [*HERE.cases]


def digest(value: Tensor) -> str:
    """sha256 of the bytes, with the shape and the dtype."""
    values = value.detach().contiguous().cpu()
    about = f"{values.dtype} {tuple(values.shape)} ".encode()
    data = values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return hashlib.sha256(about + data).hexdigest()


def run(name: str) -> Record:
    """The hashes of a case's outputs by name; or "error", where it fails or makes outputs that are not finite."""
    case = HERE.cases[name]
    try:
        made = case.run()
        floats = [output for output, value in made.items() if value.is_floating_point()]
        if case.finite and (wrong := [output for output in floats if not made[output].isfinite().all()]):
            return {"error": f"{', '.join(wrong)}: expected finite values"}
        return {output: digest(value) for output, value in made.items()}
    except Exception as error:  # noqa: BLE001  one case that fails is no reason to lose the others
        return {"error": f"{type(error).__name__}: {error}"}


def begin(kind: str, sizes: tuple[int, ...]) -> int:
    """Make a layer and capture its step; the bytes of a step's peak over what lies there before."""
    from blazeproto import gemm
    from scripts.bench.timing import capture, peak_bytes
    from scripts.checks.cases import step_of

    gemm.prepare(*sizes[1:])
    with torch.cuda.stream(torch.cuda.Stream()):  # `capture` says why all of it
        HERE.step = step_of(kind, gemm.Sizes(*sizes), HERE.device)
        HERE.step(), HERE.step()
        peak = peak_bytes(HERE.step)
        HERE.graph = capture(HERE.step, torch.cuda.graph_pool_handle())
    return peak


def replay() -> float:
    """Milliseconds a step, by replay of the graph."""
    from blazeproto.lab.times import elapsed_ms

    once = elapsed_ms(HERE.graph.replay, 1, queued=True)
    calls = max(1, min(MOST_CALLS, math.ceil(BURST_MS / max(once, 1e-3))))
    return elapsed_ms(HERE.graph.replay, calls, queued=True)


def end() -> None:
    """Give back the layer's memory."""
    HERE.step = HERE.graph = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# --- Bits ----------------------------------------------------------------------------------------------------------------


def sides(options: argparse.Namespace, jobs: int) -> dict[str, ProcessPoolExecutor]:
    """A pool of processes for each checkout."""
    spawn = multiprocessing.get_context("spawn")
    return {
        side: ProcessPoolExecutor(jobs, spawn, initializer=load, initargs=(root, options.device))
        for side, root in zip(SIDES, (options.old, ROOT), strict=True)
    }


def difference(old: Record, new: Record) -> str:
    """The outputs that differ between two records of a case; "" if none does."""
    both = zip(SIDES, (old, new), strict=True)
    errors = [f"{side} failed: {made['error']}" for side, made in both if "error" in made]
    return "; ".join(errors) or ", ".join(name for name in old | new if old.get(name) != new.get(name))


def compare_bits(options: argparse.Namespace) -> Record:
    """The record of a comparison; prints it."""
    start, running = time.monotonic(), {}
    pools = sides(options, options.jobs)
    with pools["old"], pools["new"]:
        for side, pool in pools.items():
            every = pool.submit(names).result()
            listed = [name for name in every if not options.only or any(text in name for text in options.only)]
            running[side] = zip(listed, pool.map(run, listed), strict=True)
        old, new = (dict(running[side]) for side in SIDES)
    differing = {name: text for name in old if name in new and (text := difference(old[name], new[name]))}
    differing |= {name: "the new side does not have it" for name in old if name not in new}
    for name, text in differing.items():
        print(f"{name}: {text}")
    if alone := [name for name in new if name not in old]:
        print(f"{len(alone)} cases on the new side alone, the first of them {alone[0]!r}")
    differ = f"{len(differing) or 'none'} of which differ{'s' * (len(differing) == 1)}"
    print(f"{len(old)} cases, {differ}; {time.monotonic() - start:.0f} s")
    return {"cases": len(old), "differing": differing, "holds": bool(old) and not differing}


# --- Time ----------------------------------------------------------------------------------------------------------------


def compare_times(options: argparse.Namespace, kind: str, shapes: list[tuple[int, ...]]) -> list[Record]:
    """A row a shape: milliseconds and peaks of both sides."""
    from scripts.bench.common import in_turn

    rows, pools = list[Record](), sides(options, 1)
    with pools["old"], pools["new"]:
        for shape in in_turn(shapes, options.time_budget):
            peaks = {side: pools[side].submit(begin, kind, shape).result() for side in SIDES}
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for index in range(ROUNDS + 1):  # the first is thrown away
                for side in SIDES if index % 2 else reversed(SIDES):
                    times[side].append(pools[side].submit(replay).result())
            for side in SIDES:
                pools[side].submit(end).result()
            row: Record = {"layer": kind, "cfg": dict(zip("TdnEK", shape, strict=True))}
            row |= {f"{side}_ms": round(statistics.median(times[side][1:]), 5) for side in SIDES}
            row |= {f"{side}_peak_MiB": round(peaks[side] / 2**20, 2) for side in SIDES}
            rows.append(row | {"ratio": round(row["new_ms"] / row["old_ms"], 5)})
            print("  ".join(cells(rows[-1])), flush=True)
    return rows


def cells(row: Record) -> list[str]:
    times = [f"{row['old_ms']:.4f}", f"{row['new_ms']:.4f}", f"{row['ratio']:.4f}"]
    return [row["layer"], *map(str, row["cfg"].values()), *times, *(f"{row[f'{side}_peak_MiB']:.1f}" for side in SIDES)]


def judge_times(rows: list[Record], mean_bound: float, bound: float, *, peaks: bool = True) -> bool:
    """Prints a table and whether the bounds hold.  peaks: whether one that is higher counts."""
    from scripts.bench.common import format_table, geometric_mean

    ratios = [row["ratio"] for row in rows]
    higher = [row["cfg"] for row in rows if row["new_peak_MiB"] > row["old_peak_MiB"]]
    mean, worst = geometric_mean(ratios), max(ratios, default=float("nan"))
    header = ["layer", *"TdnEK", "old ms", "new ms", "new/old", "old MiB", "new MiB"]
    print(format_table(header, [cells(row) for row in rows]))
    print(f"new / old: geometric mean {mean:.4f}, at most {mean_bound}; most {worst:.4f}, at most {bound}")
    print(f"peaks that are higher: {higher or 'none'}")
    return mean <= mean_bound and worst <= bound and not (peaks and higher)


# --- Command line --------------------------------------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    from scripts.bench.models.shapes import BY_NAME

    parser = argument_parser("scripts.checks.compare", __doc__)
    parser.add_argument("--old", type=lambda word: Path(word).resolve(), required=True, help="the other checkout")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--time", action="store_true", help="time MoE")
    parser.add_argument(
        "--models",
        type=some_of(BY_NAME),
        nargs="?",
        const=[*BY_NAME],
        help="time these that fit twice, by default all",
    )
    parser.add_argument("--lora", action="store_true", help="time experts with low-rank factors")
    parser.add_argument("--router", action="store_true", help="time routers")
    parser.add_argument(
        "--time-budget", type=float, default=math.inf, metavar="SECONDS", help="begin no shape after it"
    )
    parser.add_argument("--jobs", type=positive, default=7, help="processes a side that compute bits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file of results to write")
    options = parser.parse_args(words)
    if not (options.old / "blazeproto" / "__init__.py").is_file():
        parser.error(f"--old: expected a folder that blazeproto/ is in, got {options.old}")
    return options


def main() -> int:
    from scripts.bench import lora
    from scripts.bench.common import MODULE_SHAPES, now, write_json
    from scripts.bench.models.shapes import BY_NAME

    options = arguments()
    if options.device == "cuda":
        need_kernels()
    elif options.time or options.models or options.lora or options.router:
        refuse("--time, --models, --lora and --router need a GPU; nothing was run")
    record: Record = {"benchmark": "compare", "measured": now(), "old": options.old.name}
    holds = []
    if options.time:
        record["rows"] = compare_times(options, "module", [shape[:5] for shape in MODULE_SHAPES])
        holds.append(judge_times(record["rows"], MOST_MEAN, MOST_RATIO))
    models: list[tuple[int, ...]] = [
        BY_NAME[name][:5] for name in options.models or () if math.prod(BY_NAME[name][1:4]) < FITS_TWICE
    ]
    for kind in ("module", "zipf") if options.models else ():
        record[f"{kind}_rows"] = compare_times(options, kind, models)
        holds.append(judge_times(record[f"{kind}_rows"], MOST_MEAN, MOST_RATIO))
    if options.lora:
        record["lora_rows"] = compare_times(options, "lora", [lora.SHAPE[:5]])
        holds.append(judge_times(record["lora_rows"], MOST_LORA, MOST_LORA))
    if options.router:
        few = [(tokens, *shape[1:]) for shape in ROUTERS for tokens in FEW_TOKENS]
        record["router_rows"] = rows = compare_times(options, "router", [*ROUTERS, *few])
        holds.append(judge_times(rows[: len(ROUTERS)], MOST_ROUTER, MOST_ROUTER, peaks=False))
        holds.append(judge_times(rows[len(ROUTERS) :], MOST_FEW, MOST_FEW, peaks=False))
    if not holds:
        record["bits"] = compare_bits(options)
        holds.append(record["bits"]["holds"])
    if options.out:
        write_json(options.out, record)
    print("holds" if all(holds) else "FAILS")
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
