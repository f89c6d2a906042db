"""Does this checkout compute what another one does, to the bit, and in which time? Each runs in processes of its own.

    git worktree add .base COMMIT
    python -m scripts.checks.compare --old .base                        # bits: all cases, in about three minutes
    python -m scripts.checks.compare --old .base --only "up_forward"    # of them those whose names have this
    python -m scripts.checks.compare --old .base --time                 # GPU time of MoE over module.json's 30 shapes
    python -m scripts.checks.compare --old .base --lora                 # and of the layer of scripts.bench.lora
    python -m scripts.checks.compare --old .base --router               # and of routers, from one token on

Bits: every product, dispatch and router operator, and random layers by ``moe_mlp`` and ``MoE`` (cases.py). Hashes of outputs and
gradients are compared, and refusals word for word. Outputs that are added in an order that varies (combine="fused", "fused_both")
are made several times on each side; two sides agree where their nearest outputs differ by no more than one side's differ from
each other, or by less than a rounding of fp32. A case that the old side does not have is told and fails nothing.

Time: a forward and a backward as a CUDA graph, replayed by the two sides in turn (A B B A), medians over the rounds.

--device cpu runs the cases of a few tokens on the twins and the torch backend, to try this script.
"""

# blazeproto is imported inside functions: a side's process takes it from its own checkout.
from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.checks import cases
from scripts.command import argument_parser, need_hopper, positive, refuse

Record = dict[str, Any]
SIDES = ("old", "new")
ROOT = Path(__file__).resolve().parents[2]
ROUNDING = 2.0**-24  # of an fp32 number: sums that lie nearer than that are the same sums in another order
CPU_TOKENS = 300  # of a case, at most, on a CPU
FUSED_RUNS = 4
WARM_TOKENS = 64
BURST_MS, MOST_CALLS = 20.0, 12  # how long a timed interval is, and the most calls in it
MOST_MEAN, MOST_RATIO, MOST_LORA = 1.01, 1.03, 1.01  # of the new side's time over the old one's
ROUTERS = ((32768, 2048, 8, 128, 8), (16384, 4096, 8, 512, 8))  # T, d, n, E, K; n does not matter
FEW_TOKENS = (1, 64, 1024)
MOST_ROUTER, MOST_FEW = 1.05, 1.2  # how much longer routers may take, on all tokens and on few

# --- A side's process ----------------------------------------------------------------------------------------------------

HERE = SimpleNamespace(package=None, device="", cases={}, step=None, graph=None)  # of a process


def load(root: Path, device: str, products: dict[str, cases.Product]) -> None:
    """Takes blazeproto from the checkout at ``root``, and makes its cases. ImportError if another one is found."""
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(ROOT)])  # of the processes that compile
    package = importlib.import_module("blazeproto")
    found = Path(package.__file__ or "").resolve().parents[1]
    if found != root:
        raise ImportError(f"expected blazeproto in {root}, got {found}'s")
    for room in ("activations", "dispatch", "gemm", "router"):
        importlib.import_module(f"blazeproto.{room}")
    HERE.package, HERE.device = package, device
    made = [*cases.product_cases(package, device, products)]
    made += [*cases.routing_cases(package, device), *cases.layer_cases(package, device)]
    HERE.cases = {case.name: case for case in made}
    if len(HERE.cases) < len(made):
        raise ValueError("cases: expected different names, one is there twice")


def names() -> list[str]:
    return [*HERE.cases]


def digest(value: Tensor | str) -> str:
    """sha256 of the bytes, with the shape and the dtype; a refusal is itself."""
    if isinstance(value, str):
        return value
    values = value.detach().contiguous().cpu()
    about = f"{values.dtype} {tuple(values.shape)} ".encode()
    data = values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return hashlib.sha256(about + data).hexdigest()


def run(name: str) -> Record:
    """``hashes`` of a case's outputs by name; of floats that vary, ``runs``: the values of several runs, in fp32. Or "error"."""
    try:
        return outputs_of(HERE.cases[name])
    except Exception as error:  # noqa: BLE001  one case that fails is no reason to lose the others
        return {"error": f"{type(error).__name__}: {error}"}


def outputs_of(case: cases.Case) -> Record:
    """As `run`. ValueError where outputs are not finite."""
    made = case.run()
    for output, value in made.items() if case.finite else ():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{output}: expected finite values")
    runs: dict[str, list[Any]] = {}
    if case.varies:
        every = [made, *(case.run() for _ in range(FUSED_RUNS - 1))]
        for output, value in made.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                runs[output] = [each[output].detach().float().cpu() for each in every]  # type: ignore[union-attr]
    return {"hashes": {output: digest(made[output]) for output in made if output not in runs}, "runs": runs}


def warm(kind: str, sizes: tuple[int, ...]) -> None:
    """Compile what a shape needs, on a few of its tokens."""
    tokens, d, n, experts, top_k = sizes
    HERE.package.gemm.prepare(d, n, experts, top_k)
    HERE.package.dispatch.prepare_dispatch(tokens, top_k, experts)
    cases.STEPS[kind](HERE.package, HERE.device, cases.Shape(WARM_TOKENS, *sizes[1:]))()


def begin(kind: str, sizes: tuple[int, ...]) -> int:
    """Make a layer and capture its step; the bytes of a step's peak over what lies there before."""
    from scripts.bench.timing import capture, peak_bytes

    HERE.step = cases.STEPS[kind](HERE.package, HERE.device, cases.Shape(*sizes))
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


@contextmanager
def sides(options: argparse.Namespace, jobs: int) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """A pool of processes for each checkout."""
    from blazeproto import gemm

    products = cases.products_of(gemm)
    with ExitStack() as stack:
        pools = {}
        for side, root in zip(SIDES, (options.old, ROOT), strict=True):
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(jobs, spawn, initializer=load, initargs=(root, options.device, products))
            pools[side] = stack.enter_context(pool)
        yield pools


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether --only has it, and on a CPU, whether it is a case of a few tokens."""
    words = [word for word in name.replace(",", " ").split() if word[0] == "T" and word[1:].isdecimal()]
    few = options.device == "cuda" or not words or int(words[0][1:]) <= CPU_TOKENS
    return few and (not options.only or any(text in name for text in options.only))


def too_far(old: list[Any], new: list[Any]) -> str:
    """For outputs that vary: "" if the nearest of two sides are as near as the farthest of one, or nearer than a rounding."""
    from scripts.bench.timing import relative_difference

    own = max(relative_difference(*pair) for runs in (old, new) for pair in itertools.combinations(runs, 2))
    nearest = min(relative_difference(*pair) for pair in itertools.product(old, new))
    return "" if nearest <= max(own, ROUNDING) else f" ({nearest:.3g} apart, {own:.3g} from run to run)"


def difference(old: Record, new: Record) -> str:
    """The outputs that differ between two records of a case; "" if none does."""
    both = zip(SIDES, (old, new), strict=True)
    if errors := [f"{side} failed: {made['error']}" for side, made in both if "error" in made]:
        return "; ".join(errors)
    wrong = []
    for name in dict.fromkeys((*old["hashes"], *new["hashes"])):
        before, after = old["hashes"].get(name), new["hashes"].get(name)
        if before != after:
            refused = [text for text in (before, after) if text is None or ":" in text]
            wrong.append(f"{name}{f' (old {before}, new {after})' if refused else ''}")
    for name, runs in new["runs"].items():
        if name not in old["runs"]:
            wrong.append(f"{name} (varies on the new side alone)")
        elif far := too_far(old["runs"][name], runs):
            wrong.append(name + far)
    return ", ".join(wrong)


def compare_bits(options: argparse.Namespace) -> Record:
    """The record of a comparison; prints it."""
    start, made = time.monotonic(), {side: Record() for side in SIDES}
    with sides(options, options.jobs) as pools:
        listed = {
            side: [name for name in pools[side].submit(names).result() if wanted(name, options)] for side in SIDES
        }
        running = {side: pools[side].map(run, listed[side]) for side in SIDES}
        for side in SIDES:
            made[side] = dict(zip(listed[side], running[side], strict=True))
    old, new = made["old"], made["new"]
    differing = {name: text for name in old if name in new and (text := difference(old[name], new[name]))}
    differing |= {name: "the new side does not have it" for name in old if name not in new}
    for name, text in differing.items():
        print(f"{name}: {text}")
    if alone := [name for name in new if name not in old]:
        print(f"{len(alone)} cases on the new side alone, the first of them {alone[0]!r}")
    hashes = [value for record in new.values() for value in record.get("hashes", {}).values()]
    refused = sum(":" in value for value in hashes)
    kinds = ", ".join(
        f"{count} {kind}" for kind, count in Counter(name.split(" ", 1)[0].rstrip(":") for name in old).items()
    )
    print(f"{kinds}: {len(hashes) - refused} outputs, {refused} refusals")
    differ = f"{len(differing) or 'none'} of which differ{'s' * (len(differing) == 1)}"
    print(f"{len(old)} cases, {differ}; {time.monotonic() - start:.0f} s")
    return {"cases": len(old), "differing": differing, "holds": bool(old) and not differing}


# --- Time ----------------------------------------------------------------------------------------------------------------


def compare_times(options: argparse.Namespace, kind: str, shapes: list[tuple[int, ...]]) -> list[Record]:
    """A row a shape: milliseconds and peaks of both sides."""
    with sides(options, options.jobs) as pools:  # which fill the compile cache
        for done in [pools[side].submit(warm, kind, shape) for shape in shapes for side in SIDES]:
            done.result()
    start, rows = time.monotonic(), list[Record]()
    with sides(options, 1) as pools:
        for shape in shapes:
            if time.monotonic() - start > options.time_budget:
                print(f"{shape} and what follows: left out, the time is over")
                break
            peaks = {side: pools[side].submit(begin, kind, shape).result() for side in SIDES}
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            for index in range(options.rounds + 1):  # the first is thrown away
                for side in SIDES if index % 2 else reversed(SIDES):
                    times[side].append(pools[side].submit(replay).result())
            for side in SIDES:
                pools[side].submit(end).result()
            row: Record = {"layer": kind, "cfg": cases.Shape(*shape)._asdict()}
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
    parser = argument_parser("scripts.checks.compare", __doc__)
    parser.add_argument("--old", type=lambda word: Path(word).resolve(), required=True, help="the other checkout")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases with this in their names")
    parser.add_argument("--time", action="store_true", help="time MoE")
    parser.add_argument("--lora", action="store_true", help="time experts with low-rank factors")
    parser.add_argument("--router", action="store_true", help="time routers")
    parser.add_argument("--shapes", default="", help="of --time: numbers such as 1-3,27; default: all")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--jobs", type=positive, default=7, help="processes a side that compile, and that compute bits")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file of results to write")
    options = parser.parse_args(words)
    if not (options.old / "blazeproto" / "__init__.py").is_file():
        parser.error(f"--old: expected a folder that blazeproto/ is in, got {options.old}")
    return options


def main() -> int:
    from scripts.bench import lora
    from scripts.bench.common import MODULE_SHAPES, now, parse_shapes, write_json

    options = arguments()
    if options.device == "cuda":
        need_hopper()
    elif options.time or options.lora or options.router:
        refuse("--time, --lora and --router need a GPU; nothing was run")
    record: Record = {"benchmark": "compare", "measured": now(), "old": options.old.name}
    holds = []
    if options.time:
        shapes = parse_shapes(options.shapes, MODULE_SHAPES) if options.shapes else MODULE_SHAPES
        record["rows"] = compare_times(options, "module", [shape[:5] for shape in shapes])
        holds.append(judge_times(record["rows"], MOST_MEAN, MOST_RATIO))
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
