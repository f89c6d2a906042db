"""Random layers on the GPU, every product and the whole forward and backward, against the float64 oracle of tests/gemm.

    python scripts/fuzz_products.py --runs 1000 --seconds 120
    python scripts/fuzz_products.py --seed 4711 --runs 1                      # one that failed, again
    python scripts/fuzz_products.py --debug INJECT_DELAYS --debug SPIN_LIMIT=200000000

Each run draws widths, tokens from 0, experts, routing, activation, biases, pairs without a row. A failure prints its seed and the
places that are farthest off; the exit code is then 1. A run that doesn't end is given up after HANG_SECONDS.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gemm"))

from accuracy import Pool, worst_mismatches
from oracle import EXACT, ROUTINGS, YARDSTICK, Shape, evaluate, make_case, run_kernels, stray_writes
from same_bits import wrong_in_order, wrong_in_place

from blazeproto import gemm
from blazeproto.gemm import rowops, unchecked
from blazeproto.gemm.compile import Kernel, compile_many
from blazeproto.reference import ACTIVATIONS

HANG_SECONDS = 60
MOST_FAILURES = 5
# A single run may be a handful of numbers, where the luck of rounding decides: its bounds are wider. All runs together are
# held to the true ones.
SINGLE_RUN_SLACK = {"products": 2.0, "chain": 4.0}


def draw(seed: int) -> tuple[Shape, dict[str, Any]]:
    """The layer of a seed, and the options of `make_case`."""
    rng = random.Random(seed)
    tokens = rng.choice([0, 1, *(rng.randint(2, 64),) * 3, *(rng.randint(65, 700),) * 4, rng.randint(701, 4000)])
    experts = rng.choice(
        [1, 2, rng.randint(3, 16), rng.randint(3, 16), rng.randint(17, 64), rng.choice([96, 128, 512])]
    )
    top_k = rng.choice([k for k in (1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 16, 20) if k <= experts])
    d, n = (8 * rng.choice([rng.randint(1, 12), rng.randint(8, 48), 8, 16, 32, 64]) for _ in range(2))
    options = {
        "routing": rng.choice(ROUTINGS),
        "activation": rng.choice([*ACTIVATIONS, "swiglu", "swiglu"]),
        "biases": rng.random() < 0.3,
        "sentinels": rng.choice([0.0, 0.0, 0.0, 0.1, 0.6]),
        "varying": rng.random() < 0.2,
        "unit_weights": rng.random() < 0.3,
    }
    if rng.random() < 0.15:
        n = d  # then Y may lie over act
    return Shape(tokens, d, n, experts, top_k), options


def kernels_of(seeds: range) -> list[Kernel]:
    """What the runs will meet, so that 16 cores compile it before the first run instead of one in between."""
    kernels = [*gemm.all_kernels(), *rowops.all_kernels()]
    for seed in seeds:
        shape, options = draw(seed)
        top_k = 0 if options["varying"] else shape.top_k
        kernels += [rowops.combine_kernel(shape.d, top_k, has_scores) for has_scores in (False, True)]
        kernels += [rowops.reduce_kernel(entry, top_k) for entry in ("bias_score_grad", "expert_row_sum")]
    return kernels


def check(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: lines that say what is wrong with it. Adds its errors to ``totals``."""
    shape, options = draw(seed)
    case = make_case(shape, **options, seed=seed)
    chained = evaluate(YARDSTICK, case)
    lines: list[str] = []
    for name, given in (
        ("products", chained),
        ("chain", None),
    ):  # each product by itself; then forward and backward whole
        result, exact = run_kernels(case, given), evaluate(EXACT, case, given)
        pool = Pool()
        pool.add_all(result, chained, exact)
        inputs = result if given is None else given
        again = [*wrong_in_order(case, inputs, result), *wrong_in_place(case, inputs, result)]
        lines += [f"{name}: {line}" for line in [*stray_writes(case, result), *again]]
        for failure in pool.failures(SINGLE_RUN_SLACK[name]):
            output = failure.partition(":")[0]
            want = exact[output]
            lines += [f"{name}: {failure}", *worst_mismatches(result[output][: len(want)], want)]
        totals[name].merge(pool)
    return [f"seed {seed}: {shape} {options}", *lines] if lines else []


def watchdog(seed: int) -> threading.Timer:
    """Ends the process when a run hangs: a kernel that never returns can't be interrupted otherwise."""

    def give_up() -> None:
        print(f"seed {seed}: no end after {HANG_SECONDS} s: {draw(seed)}", flush=True)
        os._exit(1)

    timer = threading.Timer(HANG_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time, compiling excluded")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument(
        "--debug", action="append", default=[], metavar="MACRO", help="compile the products with -DMACRO"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a CUDA device of compute capability 9.0")
        return 2

    if args.debug:
        unchecked.DEBUG = tuple(args.debug)
    seeds = range(args.seed, args.seed + args.runs)
    start = time.perf_counter()
    kernels = compile_many(kernels_of(seeds))
    print(f"{len({k.key for k in kernels})} kernels in {time.perf_counter() - start:.1f} s", flush=True)

    totals, failures, start = {"products": Pool(), "chain": Pool()}, 0, time.perf_counter()
    done = 0
    for seed in seeds:
        if time.perf_counter() - start > args.seconds or failures >= MOST_FAILURES:
            break
        timer = watchdog(seed)
        try:
            lines = check(seed, totals)
        except Exception:
            print(f"seed {seed}: {draw(seed)}", flush=True)
            raise
        finally:
            timer.cancel()
        failures += bool(lines)
        done += 1
        if lines:
            print("\n".join(lines), flush=True)
        if done % 100 == 0:
            print(f"{done} runs, {failures} failures, {time.perf_counter() - start:.1f} s", flush=True)

    together = [f"all runs, {name}: {line}" for name, pool in totals.items() for line in pool.failures()]
    print("\n".join([*together, f"{done} runs in {time.perf_counter() - start:.1f} s: {failures} failed"]))
    return 1 if failures or together else 0


if __name__ == "__main__":
    sys.exit(main())
