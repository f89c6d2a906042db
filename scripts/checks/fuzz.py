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

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blazeproto import dispatch, gemm
from blazeproto.activations import ACTIVATIONS, activation_named, with_parameters
from blazeproto.autograd import LowRank, SavePolicy, moe_mlp, quantize_weights
from blazeproto.autograd.policy import padded_rank
from blazeproto.gemm import Sizes, product
from blazeproto.gemm.compile import Kernel, compile_many
from blazeproto.gemm.product import TRANSPOSED, Build, Variant
from blazeproto.gemm.registry import quantized_kernels
from blazeproto.gemm.tiles import CHOSEN, FORCED, PLAIN, force
from blazeproto.lab.accuracy import FP32_NOISE, Pool, worst_mismatches
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import (
    EXACT,
    ROUTINGS,
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
from scripts.command import argument_parser, need_hopper, positive

HANG_SECONDS = 60
MOST_FAILURES = 5
# A single run may be a handful of numbers, where the luck of rounding decides: its bounds are wider. All runs together are
# held to the true ones.
SINGLE_RUN_SLACK = {"products": 2.0, "chain": 4.0, "hopper": 4.0, "torch": 4.0}
# How wrong an fp32 output of a single run may be, if it has few elements, at the end of a chain: H and act before it are bf16, so
# that of 4000 single dS over 80 hidden units the yardstick itself misses a tenth by more than 0.011.
FP32_NOISE_OF_CHAINS = 2.0**-6
# Other parameters than the table's. Few values are near to these limits: the slope jumps there, and a rounded value may lie on
# the other side than the exact one.
OTHERS = [
    with_parameters(name, **{p.name: factor * p.value if p.above_zero else drift * p.value for p in row.parameters})
    for name, row in ((name, activation_named(name)) for name in ACTIVATIONS if "(" not in name)
    for factor, drift in ((1.3, 1.0), (0.36, 0.76), (0.57, -0.41))
    if row.parameters
]
OTHERS += ["alternating(swiglu)", "alternating(geglu_tanh)"]  # gate and up in turn
BACKENDS = ["hopper", "torch"]  # of moe_mlp
# (E, K) of ``moe_mlp``: few, for Numba compiles the dispatch's kernels for each. K > E: most experts are elsewhere.
EXPERTS = [(1, 1), (1, 8), (2, 1), (2, 20), (3, 6), (5, 3), (8, 2), (13, 5), (16, 16), (64, 8), (128, 4), (512, 10)]

RANKS = [0, 0, 0, 3, 8, 20, 64, 136]  # of factors; 0: none

FP8_ACTIVATIONS = [
    name for name in ACTIVATIONS if activation_named(name).gated and activation_named(name).layout == "HALVES"
]
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


def draw_layer(rng: random.Random, experts: int, top_k: int) -> tuple[Sizes, dict[str, Any]]:
    """A layer of ``experts`` experts, and the options of `make_case`."""
    tokens = rng.choice([0, 1, *(rng.randint(2, 64),) * 3, *(rng.randint(65, 700),) * 4, rng.randint(701, 4000)])
    d, n = (8 * rng.choice([rng.randint(1, 12), rng.randint(8, 48), 8, 16, 32, 64]) for _ in range(2))
    pairs = tokens * top_k
    options = {
        "routing": rng.choice(ROUTINGS),
        "activation": rng.choice([*ACTIVATIONS, "swiglu", "swiglu", *OTHERS]),
        "biases": rng.random() < 0.3,
        "sentinels": rng.choice([0.0, 0.0, 0.0, 0.1, 0.6]),
        "varying": rng.random() < 0.2,
        "unit_weights": rng.random() < 0.3,
        "row_capacity": rng.choice([*[None] * 5, 0, pairs // 8, pairs // 2, max(0, pairs - 1), 2 * pairs]),
    }
    if rng.random() < 0.15:
        n = d  # then Y may lie over act
    more = random.Random(f"{tokens} {d} {n} {experts} {top_k}")
    share = 1.0 if options["activation"] in TRANSPOSED else 0.1  # of all others there would be thousands of kernels
    options["transposed"] = more.random() < 0.5 * share
    options["rank"] = more.choice([8, 24, 64, 136]) if more.random() < 0.8 * share else 0
    return Sizes(tokens, d, n, experts, top_k), options


def draw_products(seed: int) -> tuple[Sizes, dict[str, Any]]:
    """The layer of a seed, and the options of `make_case`."""
    rng = random.Random(seed)
    experts = rng.choice(
        [1, 2, rng.randint(3, 16), rng.randint(3, 16), rng.randint(17, 64), rng.choice([96, 128, 512])]
    )
    elsewhere = experts <= 16 and rng.random() < 0.2  # most experts are: K may be larger than E
    top_k = rng.choice([k for k in (1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 16, 20) if elsewhere or k <= experts])
    return draw_layer(rng, experts, top_k)


def kernels_of_shapes(drawn: Iterable[tuple[Sizes, dict[str, Any], tuple[int, int]]]) -> list[Kernel]:
    """Every kernel that the runs need, so that all cores compile them together before the first run. The last of what is drawn:
    the ranks of the low-rank terms of the up and the down products."""
    kernels = [*gemm.all_kernels()]
    for sizes, options, (up_rank, down_rank) in drawn:
        sizes = sizes._replace(K=0 if options["varying"] else sizes.K)
        up = Variant(False, options["transposed"], options["biases"], options["activation"], up_rank)
        for down in (up._replace(rank=down_rank), up._replace(rank=0, fused=True)):
            for entry in gemm.PRODUCTS.values():
                kernels += entry.for_layer(sizes, up._replace(fused=down.fused), down)
    for activation in (*ACTIVATIONS, *OTHERS):  # with every tiles, whatever is drawn
        for bias in (False, True):
            variant = Variant(activation=activation, bias=bias)
            for name, changes in itertools.product(CHOSEN, FORCED):
                config = replace(PLAIN[name], **changes)
                kernels += gemm.PRODUCTS[name].launches(Sizes(0, 8, 8, 1, 1), config, variant, Build())
    return kernels


def kernels_of_products(seeds: range) -> list[Kernel]:
    drawn = (draw_products(seed) for seed in seeds)
    return kernels_of_shapes((sizes, options, (options["rank"], options["rank"])) for sizes, options in drawn)


def check_products(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: lines that say what is wrong with it. Adds its errors to ``totals``."""
    shape, options = draw_products(seed)
    force(**FORCED[seed % len(FORCED)])
    case = make_case(shape, **options, seed=seed)
    chained = evaluate(YARDSTICK, case)
    lines: list[str] = []
    # Each product by itself, on the yardstick's operands; then forward and backward as a whole.
    for name, given in (("products", chained), ("chain", None)):
        result, exact = run_kernels(case, given), evaluate(EXACT, case, given)
        pool = Pool()
        pool.add_all(result, chained, exact)
        inputs = result if given is None else given
        again = wrong_in_order(case, inputs, result)
        again += [] if case.rank else wrong_in_place(case, inputs, result)
        lines += [f"{name}: {line}" for line in [*stray_writes(case, result), *again]]
        noise = FP32_NOISE if given else FP32_NOISE_OF_CHAINS
        for failure in pool.failures(SINGLE_RUN_SLACK[name], noise):
            output = failure.partition(":")[0]
            want = exact[output]
            lines += [f"{name}: {failure}", *worst_mismatches(result[output][: len(want)], want)]
        totals[name].merge(pool)
    return lines


# --- The whole of ``moe_mlp`` ------------------------------------------------------------------------------------------------


class Training(NamedTuple):
    """ranks: of the factors beside up_proj and down_proj, 0 for none.  frozen: gradients that aren't asked for."""

    ranks: tuple[int, int]
    frozen: tuple[str, ...]


def draw_experts(seed: int) -> tuple[Sizes, dict[str, Any], dict[str, Any], Training]:
    """The layer of a seed, the options of `make_case` and of ``moe_mlp``, and what is trained."""
    rng = random.Random(f"experts {seed}")
    shape, options = draw_layer(rng, *rng.choice(EXPERTS))
    options["rank"] = 0  # of products alone
    ranks = (rng.choice(RANKS), rng.choice(RANKS))
    up, down = map(padded_rank, ranks)
    # About what a chunk needs, with float32 sums of a single expert's rows.
    bytes_per_token = 2 * shape.K * (3 * shape.n + shape.d + 2 * up + 5 * down) + 2 * shape.d
    chunks = rng.choice([None, 2, 3, 7])
    workspace_bytes = None if chunks is None or options["varying"] else bytes_per_token * (shape.T // chunks + 1)
    how = {"save": rng.choice([*SavePolicy]).value, "workspace_bytes": workspace_bytes}
    drawn = 1.0 if ranks[1] else rng.random()
    how["combine"] = "fused_both" if drawn < 0.15 else "fused" if drawn < 0.3 else "gather"
    frozen = tuple(name for name in ("d_up", "d_down", "d_up_bias", "d_down_bias") if rng.random() < 0.3)
    return shape, options, how, Training(ranks, frozen)


def kernels_of_experts(seeds: range) -> list[Kernel]:
    """The products' kernels; compiles the dispatches' kernels, which are Numba's, one after the other."""
    drawn = [draw_experts(seed) for seed in seeds]
    for shape, options, _, _ in drawn:
        tokens, top_k = (shape.T * shape.K, 1) if options["varying"] else (shape.T, shape.K)
        dispatch.prepare_dispatch(tokens, top_k, shape.E, row_capacity=options["row_capacity"])
    ranks = ((padded_rank(up), padded_rank(down)) for _, _, _, ((up, down), _) in drawn)
    return kernels_of_shapes((shape, options, each) for (shape, options, _, _), each in zip(drawn, ranks, strict=True))


def make_factors(case: Case, ranks: tuple[int, int], seed: int) -> dict[str, LowRank]:
    """By the name of the weight that they are beside; b a is of the size of a weight at 1/√fan-in."""
    generator, made = torch.Generator(case.x.device).manual_seed(seed), {}
    for (name, weight), rank in zip({"up": case.up_proj, "down": case.down_proj}.items(), ranks, strict=True):
        if rank:
            E, width_out, width_in = weight.shape
            a, b = (
                torch.randn(shape, device=weight.device, generator=generator).mul_(shape[2] ** -0.5).bfloat16()
                for shape in ((E, rank, width_in), (E, width_out, rank))
            )
            made[name] = LowRank(a, b)
    return made


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


class AdaptedFormulas(Formulas):
    """W + b a is not made: rows . a^T is a product by itself, whose rows are stored, and so is rows . b."""

    def __init__(self, arithmetic: Adapted, case: Case) -> None:
        super().__init__(arithmetic, case)
        self.stores_products = arithmetic.stores_products
        weights = {"up": case.up_proj, "down": case.down_proj}
        self.beside = {id(weights[name]): pair for name, pair in arithmetic.factors.items()}

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


def routing_of(case: Case, row_capacity: int | None) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Scores, expert ids and options of ``moe_mlp`` for the layer of a case."""
    made = case.dispatch
    shape = (len(case.x), made.top_k) if made.top_k else (-1,)
    options = {"pair_tokens": made.pair_tokens, "token_offsets": made.token_offsets, "num_experts": made.num_experts}
    options |= {"activation": case.activation, "row_capacity": row_capacity}
    return case.scores.view(shape), made.token_expert_indices.view(shape), options


def check_experts(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run on both backends: lines that say what is wrong with it. Adds its errors to ``totals``."""
    shape, case_options, options, training = draw_experts(seed)
    force(**FORCED[seed % len(FORCED)])
    lies = case_options["transposed"]  # to ``moe_mlp`` a view, to the formulas nothing
    case = make_case(shape, **case_options | {"transposed": False}, seed=seed)
    factors = make_factors(case, training.ranks, seed)
    exact = Adapted(**vars(EXACT), factors=factors).evaluate(case)
    scores, ids, of_routing = routing_of(case, case_options["row_capacity"])
    up, down = (w.mT.contiguous().mT if lies else w for w in (case.up_proj, case.down_proj))
    tensors: dict[str, Tensor | None] = {"dx": case.x, "d_up": up, "d_down": down, "d_scores": scores}
    tensors |= {"d_up_bias": case.up_bias, "d_down_bias": case.down_bias}
    tensors |= {f"d_{name}_{side}": t for name, pair in factors.items() for side, t in pair._asdict().items()}
    leaves = {
        name: t.detach().requires_grad_(name not in training.frozen) for name, t in tensors.items() if t is not None
    }
    options |= of_routing | {f"{name}_bias": leaves.get(f"d_{name}_bias") for name in ("up", "down")}
    options |= {f"{name}_factors": LowRank(leaves[f"d_{name}_a"], leaves[f"d_{name}_b"]) for name in factors}
    x, up, down, scores = (leaves[name] for name in ("dx", "d_up", "d_down", "d_scores"))
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    lines: list[str] = []
    for backend in BACKENDS:
        out = moe_mlp(x, up, down, scores, ids, backend=backend, **options)
        gradients = torch.autograd.grad(out, [*trained.values()], case.d_out)
        result = {"out": out.detach(), **dict(zip(trained, gradients, strict=True))}
        result["d_scores"] = result["d_scores"].flatten()
        if result["d_scores"][case.dispatch.token_index_map < 0].any():
            lines.append(f"{backend}: d_scores: expected 0 of pairs without a row")
        yardstick = Adapted(**vars(YARDSTICK), factors=factors, stores_products=backend == "torch").evaluate(case)
        pool = Pool()
        pool.add_all(result, yardstick, {name: exact[name] for name in result})
        for failure in pool.failures(SINGLE_RUN_SLACK[backend], FP32_NOISE_OF_CHAINS):
            output = failure.partition(":")[0]
            lines += [f"{backend}: {failure}", *worst_mismatches(result[output], exact[output])]
        totals[backend].merge(pool)
    return lines


# --- ``moe_mlp`` in fp8 ------------------------------------------------------------------------------------------------------


def draw_fp8(seed: int) -> tuple[Sizes, dict[str, Any], dict[str, Any]]:
    """The layer of a seed, the options of `make_case` and of ``moe_mlp``."""
    rng = random.Random(f"fp8 {seed}")
    shape, options = draw_layer(rng, *rng.choice(EXPERTS))
    options |= {
        "activation": rng.choice(FP8_ACTIVATIONS),
        "biases": False,
        "transposed": False,
        "rank": 0,
        "unit_weights": False,
    }
    how = {"precision": "fp8", "save": rng.choice(["minimal", "recompute"])}
    return shape._replace(d=16 * rng.randint(1, 40), n=128 * rng.randint(1, 5)), options, how


def check_fp8(seed: int, totals: dict[str, Pool]) -> list[str]:
    """One run: kernels beside the torch backend, and ways that give the same bits. Every other one has weights in float32.

    Adds its errors to ``totals``: beside float64, quantized alike, with the torch backend as the yardstick.
    """
    shape, case_options, options = draw_fp8(seed)
    case = make_case(shape, **case_options, seed=seed)
    scores, ids, of_routing = routing_of(case, case_options["row_capacity"])
    dtype = (torch.bfloat16, torch.float32)[seed % 2]
    tensors = {"dx": case.x, "d_up": case.up_proj.to(dtype), "d_down": case.down_proj.to(dtype), "d_scores": scores}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}

    def run(of: Mapping[str, Tensor] = leaves, **way: Any) -> dict[str, Tensor]:
        given: tuple[Any, ...] = (*of.values(), ids)
        out = moe_mlp(*given, **options | of_routing | way)
        gradients = torch.autograd.grad(out, [*of.values()], case.d_out.to(out.dtype))
        return {"out": out.detach(), **dict(zip(of, gradients, strict=True))}

    made, lines = run(), list[str]()
    ways: dict[str, dict[str, Any]] = {
        "another run": {},
        "keep_transposed=False": {"keep_transposed": False},
        "quantize_weights": {"quantized": quantize_weights(leaves["d_up"], leaves["d_down"], dtype=case.x.dtype)},
    }
    for way, how in ways.items():
        again = run(**how)
        if others := [name for name in made if not torch.equal(made[name], again[name])]:
            lines.append(f"fp8: {way} gives other bits of {', '.join(others)}")
    yardstick = run(backend="torch")
    exact = run({name: t.detach().double().requires_grad_() for name, t in leaves.items()}, backend="torch")
    for name, results in {name: [each[name] for each in (made, yardstick, exact)] for name in made}.items():
        of_scores = name == "d_scores"
        got, near, right = (t.flatten() if of_scores else t for t in results)
        got = got.double()  # errors are e4m3's, whatever the dtype
        off, norm = float((got - near).norm()), float(right.norm())
        least = FP8_DS_NORM * (scores.numel() * shape.d) ** 0.5 if of_scores else 0.0
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
    made, pool = run_block_kernels(case), Pool()
    again = run_block_kernels(case)
    lines = [
        f"blocks: {name}: another run gives other bits" for name in made if not torch.equal(made[name], again[name])
    ]
    pool.add_all(made, *(evaluate_blocks(arithmetic, case) for arithmetic in (YARDSTICK, EXACT)))
    totals["blocks"].merge(pool)
    return lines + [f"blocks: {failure}" for failure in pool.failures(SINGLE_RUN_SLACK["products"], FP32_NOISE)]


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
    "experts": Part(draw_experts, kernels_of_experts, check_experts, (*BACKENDS,)),
    "blocks": Part(draw_blocks, lambda seeds: gemm.all_kernels(), check_blocks, ("blocks",)),
    "fp8": Part(
        draw_fp8, lambda seeds: [k for name in FP8_ACTIVATIONS for k in quantized_kernels(name)], check_fp8, ("fp8",)
    ),
}


def watchdog(drawn: str) -> threading.Timer:
    """Ends the process when a run hangs: a kernel that never returns can't be interrupted otherwise."""

    def give_up() -> None:
        print(f"{drawn}: no end after {HANG_SECONDS} s", flush=True)
        os._exit(1)

    timer = threading.Timer(HANG_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    return timer


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
        drawn = f"{name}, seed {seed}: {' '.join(map(str, part.draw(seed)))}"
        timer = watchdog(drawn)
        try:
            lines = part.check(seed, totals)
        except Exception:
            print(drawn, flush=True)
            raise
        finally:
            timer.cancel()
        failures += bool(lines)
        done += 1
        if lines:
            print("\n".join([drawn, *lines]), flush=True)
        if done % 100 == 0:
            print(f"{done} runs, {failures} failures, {time.perf_counter() - start:.1f} s", flush=True)

    together = [f"all runs, {pool}: {line}" for pool, total in totals.items() for line in total.failures()]
    print("\n".join([*together, f"{name}: {done} runs in {time.perf_counter() - start:.1f} s: {failures} failed"]))
    return failures + len(together)


def main() -> int:
    parser = argument_parser("scripts.checks.fuzz", __doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--runs", type=positive, default=1000, help="of each part")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop a part after this time, compiling excluded")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument(
        "--debug", action="append", default=[], metavar="MACRO", help="compile the products with -DMACRO"
    )
    args = parser.parse_args()
    names = args.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    need_hopper()

    if args.debug:
        product.DEBUG = tuple(args.debug)
    seeds = range(args.seed, args.seed + args.runs)
    return 1 if sum(run(name, seeds, args.seconds) for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
