"""Dispatch builders and router operators of `scripts.checks.compare`, as whichever package is given has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.checks.compare_cases import (
    FEW,
    NO_OR_YES,
    ROUTINGS,
    SMALL,
    Case,
    Draw,
    Outputs,
    Shape,
    attempt,
    combinations,
)

METHODS = ("tiled", "dense", "sort")
FIELDS = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "token_expert_indices", "overflow")
SCORES = ("softmax_topk", "topk_softmax", "sigmoid")
WAYS = ("nr_f", "sr_f", "nr_s", "balance_f", "up", "down", "expert_choice", "slot", "token", "score")
TOKENS, TILE = 777, 128


def dispatch_cases(package: ModuleType, device: str) -> Iterator[Case]:
    shapes = (SMALL, Shape(20_000, 8, 8, 130, 8), *FEW)
    for shape, routing, method in itertools.product(shapes, ROUTINGS, METHODS):
        name = f"dispatch: {shape}, {routing}, {method}"
        yield Case(name, partial(run_dispatch, package, device, name, shape, routing, method))


def run_dispatch(package: ModuleType, device: str, name: str, shape: Shape, routing: str, method: str) -> Outputs:
    """The index arrays, of int32 and of int64 ids."""
    made = Outputs()
    for dtype in (torch.int32, torch.int64):
        chosen = Draw(name, device).experts(shape, routing)
        chosen["experts"] = chosen["experts"].to(dtype)
        capacity = shape.T * shape.K * 2 // 3 if routing == "capacity" else None
        build = package.dispatch.build_dispatch if len(chosen) == 1 else package.dispatch.build_dispatch_varying
        dispatch = build(*chosen.values(), shape.E, row_capacity=capacity, method=method)
        lists = {field: getattr(dispatch, field) for field in FIELDS}
        made |= {f"{field} {dtype}": tensor for field, tensor in lists.items() if tensor is not None}
    return made


def router_cases(package: ModuleType, device: str) -> Iterator[Case]:
    """Every operator of the router, with logits that are finite and with some that are not."""
    operators = (run_topk, run_losses, run_choices, run_hash, run_logits)
    for run, (experts, top_k), finite in itertools.product(operators, ((7, 3), (128, 8), (520, 16)), (True, False)):
        if finite or run is not run_hash:
            name = f"router {run.__name__.removeprefix('run_')}: E{experts} K{top_k}{', NaN and inf' * (not finite)}"
            yield Case(name, partial(run, package.router, Draw(name, device), experts, top_k, finite), finite=finite)


def logits_of(draw: Draw, experts: int, finite: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = draw.normal(TOKENS, experts, dtype=dtype)
    logits[5, 1] = logits[5, 0]  # a tie
    if not finite:
        logits[3, 2], logits[70, 0], logits[71] = math.nan, math.inf, -math.inf
    return logits


def run_topk(router: ModuleType, draw: Draw, experts: int, top_k: int, finite: bool) -> Outputs:
    made, bias, d_scores = Outputs(), draw.normal(experts, dtype=torch.float32), draw.uniform(TOKENS, top_k)
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(draw, experts, finite, dtype)
        variants: dict[str, tuple[Any, ...]] = {
            "score": SCORES,
            "renormalize": (None, True, False),
            "scale": (1.0, 2.5),
        }
        for options in combinations(variants):
            if options["renormalize"] is None or options["scale"] == 1.0:
                for added in (None, bias) if options["score"] == "sigmoid" else (None,):
                    label = f"{dtype} {' '.join(map(str, options.values()))}{' bias' * (added is not None)}"

                    def call(logits: Any = logits, added: Any = added, options: Any = options) -> dict[str, Tensor]:
                        scores, chosen = router.topk_route(logits, top_k, bias=added, **options)
                        d_logits = router.topk_route_backward(logits, chosen, d_scores, **options)
                        return {"scores": scores, "experts": chosen, "d_logits": d_logits}

                    attempt(made, label, call)
    return made


def run_losses(router: ModuleType, draw: Draw, experts: int, top_k: int, finite: bool) -> Outputs:
    made, logits = Outputs(), logits_of(draw, experts, finite)
    chosen = draw.experts(Shape(TOKENS, 0, 0, experts, top_k), "sentinels")["experts"]
    d_balance, d_z = draw.uniform(1)[0], draw.uniform(1)[0]
    for options in combinations({"score": SCORES, "balance": NO_OR_YES, "z": NO_OR_YES}):

        def call(options: Any = options) -> dict[str, Tensor]:
            load, balance_loss, z_loss = router.routing_losses(logits, chosen, **options)
            d_logits = router.routing_losses_backward(logits, load, d_balance, d_z, top_k, **options)
            return {"load": load, "balance_loss": balance_loss, "z_loss": z_loss, "d_logits": d_logits}

        attempt(made, " ".join(map(str, options.values())), call)
    return made


def run_choices(router: ModuleType, draw: Draw, experts: int, top_k: int, finite: bool) -> Outputs:
    """Every way to choose, and the scores of what was chosen, forward and backward."""
    made, logits = Outputs(), logits_of(draw, experts, finite)
    draws, d_all = draw.uniform(experts), draw.uniform(TOKENS * experts)
    _, chosen = router.topk_route(logits, top_k, score="sigmoid")
    for by, room in itertools.product(WAYS, (TOKENS * top_k // 2, TOKENS * top_k + TILE * experts)):
        size = TILE if by in WAYS[:6] else max(1, TOKENS * top_k // experts)

        def call(by: str = by, room: int = room, size: int = size) -> dict[str, Tensor]:
            pairs = router.choose_pairs(logits.sigmoid(), chosen, by, size, room, draws=draws)
            return dict(zip(("pair_experts", "pair_tokens", "token_offsets", "load"), pairs, strict=True))

        attempt(made, f"{by} {room}", call)
    pair_experts, _, token_offsets, _ = router.choose_pairs(logits.sigmoid(), chosen, "score", 90, TOKENS * top_k)
    d_scores = d_all[: len(pair_experts)]
    for options in combinations({"score": SCORES, "renormalize": (None, True), "scale": (1.0, 2.5)}):

        def scored(options: Any = options) -> dict[str, Tensor]:
            listed = (logits, pair_experts, token_offsets)
            scores, d_logits = (
                router.score_pairs(*listed, **options),
                router.score_pairs_backward(*listed, d_scores, **options),
            )
            return {"scores": scores, "d_logits": d_logits}

        attempt(made, " ".join(map(str, options.values())), scored)
    return made


def run_hash(router: ModuleType, draw: Draw, experts: int, top_k: int, _: bool) -> Outputs:
    ids = (draw.uniform(TOKENS) * 2**40).long()
    return {f"seed {seed}": router.hash_route(ids, experts, top_k, seed=seed) for seed in (0, 7)}


def run_logits(router: ModuleType, draw: Draw, experts: int, _: int, finite: bool) -> Outputs:
    made, d_logits = Outputs(), draw.normal(TOKENS, experts, dtype=torch.float32)
    made["finish"] = logits = router.finish_logits(logits_of(draw, experts, finite))
    for parts in (2, 3):
        made[f"split {parts}"] = router.split_gradient(d_logits, logits, parts)
    return made
