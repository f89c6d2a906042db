"""The router alone: its time by graph replay, and its accuracy against float64.

    python -m scripts.bench.router                     # both shapes -> results/h200/router.json
    python -m scripts.bench.router --quick             # the smaller shape, 7 rounds
    python -m scripts.bench.router --configs 2

`MoE.router` with topk_softmax scores, auxiliary loss 0.01 and z-loss 0.001, training mode, x in bf16, router weights in bf16 and
fp32. Forward: logits, scores, choice, load, both losses. Backward: from the scores and both losses to dX and dW. Times are
CUDA-graph replays, in turn (A B A B), medians. Errors, plain and under autocast to bf16, are the norm of the difference over the
norm of what float64 computes from the same x, weight and choice; those of bf16 gradients are compared with the error of rounding
the exact gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from blazeproto import MoE, cost
from blazeproto.gemm import Sizes
from blazeproto.router import Router
from scripts.bench.common import (
    begun,
    bench_parser,
    cfg_of,
    finished,
    in_turn,
    part_file,
    settled,
    stamped,
    write_json,
)  # fmt: skip
from scripts.bench.tables import TABLES
from scripts.bench.timing import gpu_ms, relative_difference
from scripts.command import need_hopper

AUX_LOSS, Z_LOSS = 0.01, 0.001
# Shape -> ms that forward, and forward + backward, may take with a bf16 weight; with an fp32 one twice that. n does not matter.
BOUNDS_MS = {
    Sizes(32768, 2048, 8, 128, 8): (0.15, 0.50),
    Sizes(16384, 4096, 8, 512, 8): (0.25, 0.90),
}
ROUTER_SHAPES = tuple(BOUNDS_MS)
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Largest errors against float64; `_of_rounding`: over the error of rounding the exact gradient to bf16.
LARGEST = {"logits": 1e-5, "dW": 2e-5, "dW_of_rounding": 1.05, "dX_of_rounding": 1.05}
CLOSE = 1e-4  # of the logits' rms: two keys that lie closer may be taken for each other
MOST_CLOSE = 0.005  # share of tokens whose K-th and next key do
REPEATS = 5


class Results(NamedTuple):
    """What a router computes of one x, and the gradients of its scores' and losses' sum."""

    scores: Tensor
    experts: Tensor
    logits: Tensor
    load: Tensor
    aux: Tensor
    z: Tensor
    dX: Tensor
    dW: Tensor


def make_case(shape: Sizes, dtype: torch.dtype, device: str = "cuda") -> tuple[Router, Tensor, Tensor]:
    """(router in training mode, x (T, d) bf16 that requires a gradient, gradient of the scores (T, K) fp32)."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    sizes = (shape.d, shape.n, shape.E, shape.K)
    options: dict[str, Any] = {"aux_loss": AUX_LOSS, "z_loss": Z_LOSS, "device": device, "dtype": dtype}
    router = cast(Router, MoE(*sizes, router="topk_softmax", **options).router)
    with torch.no_grad():
        router.weight.copy_(normal(shape.E, shape.d) * shape.d**-0.5)  # logits at unit scale
    return router, normal(shape.T, shape.d).to(torch.bfloat16).requires_grad_(), normal(shape.T, shape.K)


def run(router: Router, x: Tensor, d_scores: Tensor, autocast: bool = False) -> Results:
    """Forward and backward of one router."""
    with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
        routing = router(x)
    aux, z = routing.aux_losses["load_balancing"], routing.aux_losses["z"]
    gradients = torch.autograd.grad((routing.scores, aux, z), (x, router.weight), (d_scores, None, None))
    made = (routing.scores, routing.experts, routing.logits, routing.load, aux, z)
    return Results(*(tensor.detach() for tensor in made), *gradients)


# ---------------------------------------------------------------------------------------------------------- accuracy


def in_float64(x: Tensor, weight: Tensor, experts: Tensor, d_scores: Tensor) -> Results:
    """The same on the same choice, plainly, in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    logits = wide[0] @ wide[1].t()
    num_experts, pairs = logits.shape[1], experts.numel()
    scores = logits.gather(1, experts.long()).softmax(dim=1)
    load = torch.bincount(experts.flatten().long(), minlength=num_experts)
    aux = AUX_LOSS * num_experts * (load / pairs * logits.softmax(dim=1).mean(dim=0)).sum()
    z = Z_LOSS * logits.logsumexp(dim=1).square().mean()
    gradients = torch.autograd.grad((scores * d_scores.double()).sum() + aux + z, wide)
    made = (scores, experts, logits, load, aux, z)
    return Results(*(tensor.detach() for tensor in made), *gradients)


def error_of_torch(router: Router, x: Tensor) -> float:
    """The error of logits that torch computes of x and the weight in fp32, without TF32."""
    x, weight = x.detach(), router.weight.detach()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return relative_difference(x.float() @ weight.float().t(), x.double() @ weight.double().t())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def choices(experts: Tensor, logits: Tensor) -> dict[str, int]:
    """How experts (T, K) compare with the K largest of float64 logits (T, E).

    close_tokens: whose K-th and next logit lie within CLOSE of the logits' rms; other_tokens: of another choice;
    wrong_tokens: of another choice and not close.
    """
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    ranked = logits.topk(min(top_k + 1, num_experts), dim=1)
    other = (ranked.indices[:, :top_k].sort(dim=1).values != experts.long().sort(dim=1).values).any(dim=1)
    close = torch.zeros_like(other)
    if top_k < num_experts:
        close = ranked.values[:, top_k - 1] - ranked.values[:, top_k] < CLOSE * logits.square().mean().sqrt()
    counts = {"close_tokens": close, "other_tokens": other, "wrong_tokens": other & ~close}
    return {name: int(found.sum()) for name, found in counts.items()} | {"tokens": num_tokens}


def accuracy(router: Router, x: Tensor, d_scores: Tensor, autocast: bool) -> dict[str, Any]:
    """Errors against float64, what was chosen, and whether repeats agree to the bit."""
    made = run(router, x, d_scores, autocast)
    same = True
    for _ in range(REPEATS):
        again = run(router, x, d_scores, autocast)
        same = same and all(torch.equal(a, b) for a, b in zip(made, again, strict=True))
    exact = in_float64(x, router.weight, made.experts, d_scores)
    found: dict[str, Any] = {
        name: relative_difference(getattr(made, name), getattr(exact, name))
        for name in ("logits", "scores", "aux", "z", "dX", "dW")
    }
    for name, gradient, wide in (("dX", made.dX, exact.dX), ("dW", made.dW, exact.dW)):
        if gradient.dtype == torch.bfloat16:
            found[f"{name}_of_rounding"] = found[name] / relative_difference(wide.bfloat16(), wide)
    found |= choices(made.experts, exact.logits)
    return found | {"load_exact": bool(torch.equal(made.load.long(), exact.load)), "bit_identical": same}


# ------------------------------------------------------------------------------------------------------- measurement


def times(shape: Sizes, rounds: int) -> dict[str, dict[str, Any]]:
    """By weight's dtype: forward, and forward + backward, by graph replay where it captures."""
    calls: dict[str, Callable[[], object]] = {}
    for name, dtype in WEIGHTS.items():
        router, x, d_scores = make_case(shape, dtype)

        def forward(router: Router = router, x: Tensor = x) -> object:
            routing = router(x)
            return routing.scores, routing.logits, *routing.aux_losses.values()

        def both(router: Router = router, x: Tensor = x, d_scores: Tensor = d_scores) -> object:
            return tuple(tensor for tensor in run(router, x, d_scores) if tensor.is_floating_point())

        calls |= {f"{name} fwd": forward, f"{name} fwdbwd": both}
    for call in calls.values():  # a capture can't compile
        call()
    found = gpu_ms(calls, (), rounds)
    rows: dict[str, dict[str, Any]] = {
        name: {"not_captured": found.refused} if found.refused else {} for name in WEIGHTS
    }
    for label, ms in found.ms.items():
        name, part = label.split()
        rows[name] |= {f"{part}_ms": round(ms, 4), f"{part}_method": found.method[label]}
    return rows


def measure(shape: Sizes, rounds: int) -> list[dict[str, Any]]:
    """A row for each dtype of the weight."""
    rows = []
    timed = times(shape, rounds)
    floors = cost.router_floor_ms(shape)
    floor = {"floor_fwd_ms": round(floors[0], 4), "floor_fwdbwd_ms": round(sum(floors), 4)}
    for name, dtype in WEIGHTS.items():
        case = make_case(shape, dtype)
        found = {how: accuracy(*case, autocast=how == "autocast") for how in ("plain", "autocast")}
        cfg = {key: value for key, value in cfg_of(shape).items() if key != "n"}
        made = {"accuracy": found, "torch_fp32_logits": error_of_torch(*case[:2])}
        rows.append({"cfg": cfg, "weight": name, **timed[name], **floor, **made})
    return rows


def may_take(row: dict[str, Any]) -> tuple[float, float] | None:
    """ms for forward, and forward + backward; None for a shape without bounds."""
    wanted = next((ms for shape, ms in BOUNDS_MS.items() if row["cfg"].items() <= cfg_of(shape).items()), None)
    factor = 2 if row["weight"] == "fp32" else 1
    return None if wanted is None else (factor * wanted[0], factor * wanted[1])


def failures(row: dict[str, Any]) -> list[str]:
    """What of a row does not hold, in words."""
    failed = []
    for part, most in zip(("fwd", "fwdbwd"), may_take(row) or (), strict=False):
        if not (row[f"{part}_ms"] <= most and row[f"{part}_method"] == "graph"):
            failed.append(f"{part} at most {most} ms by graph")
    for how, found in row["accuracy"].items():
        for name, most in LARGEST.items():
            if name == "dW" and "dW_of_rounding" in found:
                continue
            if name in found and not found[name] <= most:
                failed.append(f"{how} {name} at most {most}")
        if found["wrong_tokens"] or found["close_tokens"] > MOST_CLOSE * found["tokens"]:
            failed.append(f"{how} ids")
        failed += [f"{how} {name}" for name in ("load_exact", "bit_identical") if not found[name]]
    return failed


def print_verdicts(record: dict[str, Any]) -> None:
    """The table of the documentation, and of each row what does not hold."""
    print(TABLES["router"](record))
    for row in record["rows"]:
        failed = failures(row)
        print(f"{'FAILS' if failed else 'holds'}  {row['cfg']} {row['weight']}: {'; '.join(failed) or 'all bounds'}")
        for how, found in row["accuracy"].items():
            print(f"       {how}: {', '.join(f'{name} {value:.4g}' for name, value in found.items())}")
        if "not_captured" in row:
            print(f"       not captured: {row['not_captured']}")


# -------------------------------------------------------------------------------------------------------------- main


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    quick = "the second shape, 7 rounds -> router-quick.json"
    parser = bench_parser("router", __doc__, quick=quick, configs=ROUTER_SHAPES)
    options = settled(parser.parse_args(words), "router", rounds=20)
    options.configs = options.configs or list(ROUTER_SHAPES[1:] if options.quick else ROUTER_SHAPES)
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    record = begun("router", __doc__)
    for shape in in_turn(options.configs):
        record["rows"] += stamped(measure, shape, options.rounds)
        write_json(options.out or part_file("router"), record)
    print("wrote", options.out or finished("router", whole=set(options.configs) == set(ROUTER_SHAPES)))
    print_verdicts(record)


if __name__ == "__main__":
    main()
