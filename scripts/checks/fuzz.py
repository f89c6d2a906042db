"""Random layers on the GPU against the float64 oracle of blazeproto.lab: every product, alone and chained, and ``moe_mlp``;
in fp8 beside the torch backend, which quantizes alike, and both beside it in float64.

    python -m scripts.checks.fuzz --runs 1000 --seconds 120
    python -m scripts.checks.fuzz --seed 4711 --runs 1                      # one that failed, again
    python -m scripts.checks.fuzz --debug INJECT_DELAYS --debug SPIN_LIMIT=200000000

Each run draws widths, tokens from 0, experts, routing, activation, biases, pairs without a row, fewer rows than pairs, weights
that lie transposed, and low-rank terms of the products.
``moe_mlp`` runs on both backends; its save policy, its number of chunks, how experts are combined, the low-rank factors beside
its weights and which of the weights are frozen are drawn too. A failure prints its seed and the places
that are farthest off; the exit code is then 1. A run that doesn't end is given up after HANG_SECONDS.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from blazeproto import dispatch, gemm
from blazeproto.activations import ACTIVATIONS
from blazeproto.autograd import LowRank, quantize_weights
from blazeproto.autograd.policy import padded_rank
from blazeproto.gemm import Sizes, product
from blazeproto.gemm.compile import Kernel, compile_many
from blazeproto.gemm.product import Build, Variant
from blazeproto.gemm.registry import quantized_kernels
from blazeproto.gemm.tiles import CHOSEN, FORCED, PLAIN, force
from blazeproto.lab import calls
from blazeproto.lab.accuracy import FP32_NOISE, Pool, worst_mismatches
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import (
    EXACT,
    YARDSTICK,
    Arithmetic,
    Formulas,
    evaluate,
    evaluate_blocks,
    make_block_case,
    make_case,
    run_block_kernels,
    run_kernels,
    stray_writes,
)
from blazeproto.lab.same_bits import wrong_in_order, wrong_in_place
from blazeproto.runtime.arch import ARCHES, HOPPER, kernels_of
from scripts.checks.layers import (
    FP8_ACTIVATIONS,
    OTHERS,
    Layer,
    draw_experts,
    draw_products,
    draw_quantized,
    factors_in,
    make_layer,
    on_ampere,
    run_layer,
)
from scripts.command import argument_parser, need_kernels, positive, some_of

DEVICE = "cuda"
KERNELS = ("hopper", "ampere")  # backends that have some
BACKENDS = ["hopper", "torch"]  # of moe_mlp; with --backend ampere the first is another
OF_AMPERE = ("products", "experts")  # parts that ampere has kernels for
HANG_SECONDS = 60
MOST_FAILURES = 5
# A single run may be a handful of numbers, where the luck of rounding decides: its bounds are wider. All runs together are
# held to the true ones.
SINGLE_RUN_SLACK = {"products": 2.0, "blocks": 2.0, "chain": 4.0, "hopper": 4.0, "ampere": 4.0, "torch": 4.0}
# How wrong an fp32 output of a single run may be, if it has few elements, at the end of a chain: H and act before it are bf16, so
# that of 4000 single dS over 80 hidden units the yardstick itself misses a tenth by more than 0.011.
FP32_NOISE_OF_CHAINS = 2.0**-6
# Of a result's norm, how far a single run may be off the torch backend: a step of e4m3, should one number be most of it. That
# backend rounds dA' and act to bf16 before it makes dH and A' of them, the kernels do not, and their sums keep 14 bits: in 2 % of
# dH's and A''s elements and 0.5 % of H's and act's, the two lie on either side of where e4m3 rounds, nearly always a step apart.
# With the kernels' arithmetic on a CPU, dx, d_up and d_down are off by 0.012, the root mean square of runs, from T = 1 to 512; at
# most by 0.06 in 2400 runs of T up to 8 (d_scores by 0.08), by 0.02 in 28 of T = 64. Given the same H, act, dH and A', all but
# d_scores are off by less than 0.0025. All runs together are held to float64, with the torch backend as the yardstick.
FP8_OFF = 2.0**-3
# reglu's slope jumps at 0: sums of 14 bits put a gate near to it on the other side, which makes a zero of dH a large number, or
# the reverse. Of a unit without other tokens that is a whole row of dW_up: 44 times the row's size (at least 0.01 of the output's
# rms, as a `Pool` has it) in 19 runs of the kernels' arithmetic on a CPU, where the yardstick's worst is 0.2. act has no jump, so
# other results are pooled. Norms of single runs hold, rows of the pool do not, so these are not in it.
FP8_JUMPS = {("reglu", "dx"), ("reglu", "d_up")}
FP8_DS_NORM = 0.2  # norm of dS over sqrt(P d), below which its errors are not relative to it


# --- The products of blazeproto.gemm --------------------------------------------------------------------------------------


def kernels_of_shapes(layers: Iterable[Layer]) -> list[Kernel]:
    """Every kernel that the runs need, so that all cores compile them together before the first run."""
    arch, kernels = ARCHES[BACKENDS[0]], [*(gemm.all_kernels() if BACKENDS[0] == HOPPER.name else ())]
    for layer in layers:
        variant = Variant(False, *(layer.inputs[name] for name in ("transposed", "biases", "activation")))._replace(
            arch=arch
        )
        up, down = (variant._replace(rank=padded_rank(rank)) for rank in layer.ranks)
        sizes = layer.sizes._replace(K=0 if layer.inputs["varying"] else layer.sizes.K)
        for fused, entry in every({False, arch is HOPPER}, gemm.PRODUCTS.values()):
            low = down._replace(rank=0, fused=True) if fused else down
            kernels += entry.for_layer(sizes, up._replace(fused=fused), low)
    for activation, bias in every((*ACTIVATIONS, *OTHERS), (False, True)):  # with every tiles, whatever is drawn
        variant = Variant(activation=activation, bias=bias)
        for name, changes in every(CHOSEN, FORCED if arch is HOPPER else ()):
            config = replace(PLAIN[name], **changes)
            kernels += gemm.PRODUCTS[name].launches(Sizes(0, 8, 8, 1, 1), config, variant, Build())
    return kernels


def kernels_of_products(seeds: range) -> list[Kernel]:
    return kernels_of_shapes(map(draw_products, seeds))


def off_bounds(
    part: str,
    made: Mapping[str, Tensor],
    yardstick: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    noise: float,
    total: Pool,
) -> list[str]:
    """Lines that say which bounds of a single run do not hold, and where. Adds the run's errors to ``total``."""
    pool, lines = Pool(), list[str]()
    pool.add_all(made, yardstick, exact)
    total.merge(pool)
    for failure in pool.failures(SINGLE_RUN_SLACK[part], noise):
        output = failure.partition(":")[0]
        want = exact[output]
        lines += [f"{part}: {failure}", *worst_mismatches(made[output][: len(want)], want)]
    return lines


def check_products(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: lines that say what is wrong with it. Adds its errors to ``totals``."""
    layer = draw_products(seed)
    force(**FORCED[seed % len(FORCED)])
    case = make_case(layer.sizes, **layer.inputs, seed=seed, device=DEVICE)
    chained = evaluate(YARDSTICK, case)
    lines: list[str] = []
    # Each product by itself, on the yardstick's operands; then forward and backward as a whole.
    for name, given, noise in (("products", chained, FP32_NOISE), ("chain", None, FP32_NOISE_OF_CHAINS)):
        result, exact = run_kernels(case, given), evaluate(EXACT, case, given)
        inputs = result if given is None else given
        wrong = stray_writes(case, result) + wrong_in_order(case, inputs, result)
        wrong += [] if case.rank else wrong_in_place(case, inputs, result)
        lines += [f"{name}: {line}" for line in wrong]
        lines += off_bounds(name, result, chained, exact, noise, totals[name])
    return lines


# --- The whole of ``moe_mlp`` ------------------------------------------------------------------------------------------------


def kernels_of_experts(seeds: range) -> list[Kernel]:
    """The products' kernels; compiles the dispatches' kernels, which are Numba's, one after the other."""
    layers = [draw_experts(seed) for seed in seeds]
    for sizes, inputs in ((layer.sizes, layer.inputs) for layer in layers):
        tokens, top_k = (sizes.rows, 1) if inputs["varying"] else (sizes.T, sizes.K)
        dispatch.prepare_dispatch(tokens, top_k, sizes.E, row_capacity=inputs["row_capacity"])
    return kernels_of_shapes(layers)


class AdaptedFormulas(Formulas):
    """W + b a is not made: rows . a^T is a product by itself, whose rows are stored, and so is rows . b."""

    def __init__(self, arithmetic: "Adapted", case: Case) -> None:
        super().__init__(arithmetic, case)
        self.stores_products, beside = arithmetic.stores_products, arithmetic.factors
        self.beside = {id(getattr(case, f"{name}_proj")): pair for name, pair in beside.items()}

    def low_rows(self, rows: Tensor, factor: Tensor, *, transposed: bool) -> Tensor:
        return self.stored(super().product(rows, factor, transposed=transposed))

    def product(self, rows: Tensor, weights: Tensor, *, transposed: bool, **others: Any) -> Tensor:
        if (pair := self.beside.get(id(weights))) is None:
            made = super().product(rows, weights, transposed=transposed, **others)
            return self.stored(made) if self.stores_products else made
        first, second = (pair.b, pair.a) if transposed else pair
        low = (self.low_rows(rows, first, transposed=transposed), second)
        if not self.stores_products:
            return super().product(rows, weights, transposed=transposed, **others | {"low": low})
        added = super().product(*low, transposed=transposed, bias=others.get("bias"))
        return self.stored(self.stored(super().product(rows, weights, transposed=transposed)) + added)


@dataclass(frozen=True)
class Adapted(Arithmetic):
    """Arithmetic of weights with low-rank factors beside them, by name.

    stores_products: whether each is rounded before anything is made of it, dA' and what a low-rank term is added to as well, as
    in `blazeproto.autograd.torch_formulas`; else their sums go on as they are, as in the Hopper backend's kernels.
    """

    factors: Mapping[str, LowRank]
    stores_products: bool = False

    def over(self, case: Case) -> AdaptedFormulas:
        return AdaptedFormulas(self, case)

    @torch.no_grad()  # the factors are leaves: results with a graph would keep all of a run in the pool
    def evaluate(self, case: Case) -> dict[str, Tensor]:
        """All of `oracle.evaluate`, and the gradients of the factors."""
        made, m = evaluate(self, case), self.over(case)
        x, d_out = m.gather(case.x), m.gather(case.d_out)
        for name, (a, b) in self.factors.items():
            rows, gradient = {"up": (x, made["dh"]), "down": (made["act"], d_out)}[name]
            left, ahead = m.low_rows(gradient, b, transposed=True), m.low_rows(rows, a, transposed=False)
            if name == "down":
                rows, ahead = made["a_scaled"], m.stored(ahead * m.of_rows(case.scores))
            made[f"d_{name}_a"], made[f"d_{name}_b"] = m.stored(m.outer(left, rows)), m.stored(m.outer(gradient, ahead))
        return made


def check_experts(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run on both backends: lines that say what is wrong with it. Adds its errors to ``totals``."""
    layer, lines = draw_experts(seed), list[str]()
    layer = on_ampere(layer) if "ampere" in BACKENDS else layer
    force(**FORCED[seed % len(FORCED)])
    case, arrays = make_layer(layer, seed, DEVICE)
    factors = factors_in(arrays)
    exact = Adapted(**vars(EXACT), factors=factors).evaluate(case)
    for backend in BACKENDS:
        made = run_layer(layer, case, arrays, backend=backend)
        if made["d_scores"][case.dispatch.token_index_map < 0].any():
            lines.append(f"{backend}: d_scores: expected 0 of pairs without a row")
        yardstick = Adapted(**vars(YARDSTICK), factors=factors, stores_products=backend == "torch").evaluate(case)
        wanted = {name: exact[name] for name in made}
        lines += off_bounds(backend, made, yardstick, wanted, FP32_NOISE_OF_CHAINS, totals[backend])
    return lines


# --- ``moe_mlp`` in fp8 ------------------------------------------------------------------------------------------------------


def check_fp8(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: kernels beside the torch backend, and ways that give the same bits.

    Adds its errors to ``totals``: beside float64, quantized alike, with the torch backend as the yardstick.
    """
    layer, lines = draw_quantized(seed), list[str]()
    case, arrays = make_layer(layer, seed, DEVICE)
    made = run_layer(layer, case, arrays)
    ways: dict[str, dict[str, Any]] = {
        "another run": {},
        "keep_transposed=False": {"keep_transposed": False},
        "quantize_weights": {
            "quantized": quantize_weights(
                arrays["d_up"], arrays["d_down"], dtype=case.x.dtype, precision=layer.options["precision"]
            )
        },
    }
    for way, how in ways.items():
        again = run_layer(layer, case, arrays, **how)
        if others := [name for name in made if not torch.equal(made[name], again[name])]:
            lines.append(f"fp8: {way} gives other bits of {', '.join(others)}")
    yardstick = run_layer(layer, case, arrays, backend="torch")
    wide = {name: array.detach().double().requires_grad_(array.requires_grad) for name, array in arrays.items()}
    exact = run_layer(layer, case, wide, backend="torch")
    for name, right in exact.items():
        got, near = made[name].double(), yardstick[name]  # errors are e4m3's, whatever the dtype
        off, norm = float((got - near).norm()), float(right.norm())
        least = FP8_DS_NORM * (right.numel() * layer.sizes.d) ** 0.5 if name == "d_scores" else 0.0
        if not off <= FP8_OFF * max(norm, least):
            lines.append(f"fp8: {name}: expected at most {FP8_OFF} of {norm:.4g} off the torch backend, got {off:.4g}")
        if norm >= least and (case.activation, name) not in FP8_JUMPS:
            totals["fp8"].add(name, got, near, right)
    return lines


# --- Block-sparse products ---------------------------------------------------------------------------------------------------


def draw_blocks(seed: int) -> tuple[tuple[int, int], float, int, int]:
    """Numbers of blocks in rows and columns, the share of blocks in use, k and m of `make_block_case`."""
    rng = random.Random(f"blocks {seed}")
    shape = rng.randint(1, 12), rng.randint(1, 12)
    k, m = (8 * rng.choice([rng.randint(1, 40), 8, 64]) for _ in range(2))
    return shape, rng.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]), k, m


def check_blocks(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: lines that say what is wrong with it. Adds its errors to ``totals``."""
    shape, share, k, m = draw_blocks(seed)
    case = make_block_case(np.random.default_rng(seed).random(shape) < share, k, m, seed=seed)
    made, again = run_block_kernels(case), run_block_kernels(case)
    lines = [
        f"blocks: {name}: another run gives other bits" for name in made if not torch.equal(made[name], again[name])
    ]
    yardstick, exact = (evaluate_blocks(arithmetic, case) for arithmetic in (YARDSTICK, EXACT))
    return lines + off_bounds("blocks", made, yardstick, exact, FP32_NOISE, totals["blocks"])


# --- All parts -------------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of the package that is fuzzed together. A seed says all about a run.

    draw: what a run does, to be printed.  kernels: those that runs need.  check: one run, as `check_products`.
    pools: names in ``totals``.
    """

    draw: Callable[[int], Any]
    kernels: Callable[[range], list[Kernel]]
    check: Callable[[int, dict[str, Pool]], list[str]]
    pools: tuple[str, ...]


PARTS = {
    "products": Part(draw_products, kernels_of_products, check_products, ("products", "chain")),
    "experts": Part(draw_experts, kernels_of_experts, check_experts, (*KERNELS, "torch")),
    "blocks": Part(draw_blocks, lambda seeds: gemm.all_kernels(), check_blocks, ("blocks",)),
    "fp8": Part(
        draw_quantized,
        lambda seeds: [
            k for name in FP8_ACTIVATIONS for of in ("fp8", "fp8_rollout") for k in quantized_kernels(name, of)
        ],
        check_fp8,
        ("fp8",),
    ),
}


def give_up(drawn: str) -> None:
    """Ends the process: a kernel that never returns can't be interrupted otherwise."""
    print(f"{drawn}: no end after {HANG_SECONDS} s", flush=True)
    os._exit(1)


def checked(name: str, seed: int, totals: dict[str, Pool]) -> bool:
    """Whether a run fails, which is then printed, as one that raises or does not end."""
    drawn = f"{name}, seed {seed}: {PARTS[name].draw(seed)}"
    timer = threading.Timer(HANG_SECONDS, give_up, [drawn])
    timer.daemon = True
    timer.start()
    try:
        lines = PARTS[name].check(seed, totals)
    except Exception:
        print(drawn, flush=True)
        raise
    finally:
        timer.cancel()
    if lines:
        print("\n".join([drawn, *lines]), flush=True)
    return bool(lines)


def run(name: str, seeds: range, seconds: float) -> int:
    """The runs of a part; how many failed, and bounds that all of them together break."""
    part, totals = PARTS[name], {pool: Pool() for pool in PARTS[name].pools}
    start = time.perf_counter()
    kernels = compile_many(part.kernels(seeds))
    print(f"{len({k.key for k in kernels})} kernels in {time.perf_counter() - start:.1f} s", flush=True)

    done, failures, start = 0, 0, time.perf_counter()
    for seed in seeds:
        if time.perf_counter() - start > seconds or failures >= MOST_FAILURES:
            break
        failures += checked(name, seed, totals)
        done += 1
    together = [f"all runs, {pool}: {line}" for pool, total in totals.items() for line in total.failures()]
    print("\n".join([*together, f"{name}: {done} runs in {time.perf_counter() - start:.1f} s: {failures} failed"]))
    return failures + len(together)


def main() -> int:
    parser = argument_parser("scripts.checks.fuzz", __doc__)
    parser.add_argument("--parts", type=some_of(PARTS), help=f"some of {', '.join(PARTS)}; default: all of the backend")
    parser.add_argument("--backend", choices=KERNELS, default="hopper", help="whose kernels")
    parser.add_argument("--runs", type=positive, default=1000, help="of each part")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop a part after this time, compiling excluded")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument(
        "--debug", action="append", default=[], metavar="MACRO", help="compile the products with -DMACRO"
    )
    args = parser.parse_args()
    parts = OF_AMPERE if args.backend == "ampere" else (*PARTS,)
    if missing := {*(args.parts or parts)} - {*parts}:
        parser.error(
            f"--parts: expected some of {', '.join(parts)} with --backend {args.backend}, got {', '.join(missing)}"
        )
    need_kernels(args.backend)

    if args.debug:
        product.DEBUG = tuple(args.debug)
    seeds = range(args.seed, args.seed + args.runs)
    BACKENDS[0] = args.backend
    products = [call for call in calls.LAYER if args.backend == "hopper" or "fused" not in call.product]
    with kernels_of(args.backend), patch.object(calls, "LAYER", products):
        return 1 if sum(run(name, seeds, args.seconds) for name in args.parts or parts) else 0


if __name__ == "__main__":
    sys.exit(main())
