"""The router alone: its time by graph replay, and its accuracy against float64.

    python -m scripts.bench.router                     # both shapes -> results/h200/router.json on an H200
    python -m scripts.bench.router --quick             # the smaller shape, fewer rounds
    python -m scripts.bench.router --configs 2

`MoE.router` with topk_softmax scores, auxiliary loss 0.01 and z-loss 0.001, training mode, x in bf16, router weights in bf16 and
fp32. Forward: logits, scores, choice, load, both losses. Backward: from the scores and both losses to dX and dW. Times are
CUDA-graph replays, in turn (A B A B), medians. Errors, plain and under autocast to bf16, are the norm of the difference over the
norm of what float64 computes from the same x, weight and choice; errors of bf16 gradients are compared with the error of rounding
the exact gradient.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto import MoE, cost
from blazeproto.gemm import Sizes
from blazeproto.router import Router
from scripts.bench.common import cfg_of
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, relative_difference

AUX_LOSS, Z_LOSS = 0.01, 0.001
# Shape -> ms that forward, and forward + backward, may take with a bf16 weight; with an fp32 one twice that. n does not matter.
BOUNDS_MS = {
    Sizes(32768, 2048, 8, 128, 8): (0.15, 0.50),
    Sizes(16384, 4096, 8, 512, 8): (0.25, 0.90),
}
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Largest errors against float64; `_of_rounding`: over the error of rounding the exact gradient to bf16.
LARGEST = {"logits": 1e-5, "dW": 2e-5, "dW_of_rounding": 1.05, "dX_of_rounding": 1.05}
CLOSE = 1e-4  # of the logits' rms: two keys that lie closer may be taken for each other
MOST_CLOSE = 0.005  # share of tokens whose K-th and next key do
REPEATS = 5


Results = dict[str, Tensor]
"""A router's results for one x, and the gradients of its scores' and losses' sum."""


def make_case(shape: Sizes, dtype: torch.dtype, device: str = "cuda") -> tuple[Router, Tensor, Tensor]:
    """(router in training mode, x (T, d) bf16 that requires a gradient, gradient of the scores (T, K) fp32)."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    options: dict[str, Any] = {"aux_loss": AUX_LOSS, "z_loss": Z_LOSS, "device": device, "dtype": dtype}
    router = MoE(*shape[1:5], router="topk_softmax", **options).router
    with torch.no_grad():
        router.weight.copy_(normal(shape.E, shape.d) * shape.d**-0.5)  # logits at unit scale
    return router, normal(shape.T, shape.d).to(torch.bfloat16).requires_grad_(), normal(shape.T, shape.K)


def step(router: Router, x: Tensor, d_scores: Tensor, autocast: bool = False) -> Results:
    """Forward and backward of one router."""
    with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
        routing = router(x)
    losses = {"aux": routing.aux_losses["load_balancing"], "z": routing.aux_losses["z"]}
    gradients = torch.autograd.grad((routing.scores, *losses.values()), (x, router.weight), (d_scores, None, None))
    made = {name: getattr(routing, name) for name in ("scores", "experts", "logits", "load")} | losses
    return {name: tensor.detach() for name, tensor in made.items()} | dict(zip(("dX", "dW"), gradients, strict=True))


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
    made = {"scores": scores, "logits": logits, "load": load, "aux": aux, "z": z}
    return {name: tensor.detach() for name, tensor in made.items()} | dict(zip(("dX", "dW"), gradients, strict=True))


def error_of_torch(router: Router, x: Tensor) -> float:
    """The error of logits that torch computes of x and the weight in fp32, as by default without TF32."""
    x, weight = x.detach(), router.weight.detach()
    return relative_difference(x.float() @ weight.float().t(), x.double() @ weight.double().t())


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
    made = step(router, x, d_scores, autocast)
    repeats = (step(router, x, d_scores, autocast) for _ in range(REPEATS))
    same = all(torch.equal(made[name], tensor) for again in repeats for name, tensor in again.items())
    exact = in_float64(x, router.weight, made["experts"], d_scores)
    found: dict[str, Any] = {
        name: relative_difference(made[name], exact[name]) for name in ("logits", "scores", "aux", "z", "dX", "dW")
    }
    for name in ("dX", "dW"):
        if made[name].dtype == torch.bfloat16:
            found[f"{name}_of_rounding"] = found[name] / relative_difference(exact[name].bfloat16(), exact[name])
    found |= choices(made["experts"], exact["logits"])
    return found | {"load_exact": torch.equal(made["load"].long(), exact["load"]), "bit_identical": same}


# ------------------------------------------------------------------------------------------------------- measurement


def forward(router: Router, x: Tensor) -> tuple[Tensor, ...]:
    routing = router(x)
    return routing.scores, routing.logits, *routing.aux_losses.values()


def both(router: Router, x: Tensor, d_scores: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in step(router, x, d_scores).values() if tensor.is_floating_point())


def measure(shape: Sizes, machine: Machine) -> list[Row]:
    """A row for each dtype of the weight."""
    cases = {name: make_case(shape, dtype, machine.device) for name, dtype in WEIGHTS.items()}
    calls: dict[str, Callable[[], object]] = {}
    for name, case in cases.items():
        calls |= {f"{name} fwd": partial(forward, *case[:2]), f"{name} fwdbwd": partial(both, *case)}
    for call in calls.values():  # a capture can't compile
        call()
    timed, floors = machine.times(calls), cost.router_floor_ms(shape)
    rows = []
    for name, case in cases.items():
        row: Row = {"weight": name} | ({"not_captured": timed.refused} if timed.refused else {})
        for part, floor in (("fwd", floors[0]), ("fwdbwd", sum(floors))):
            label = f"{name} {part}"
            row |= {f"{part}_ms": round(timed.ms[label], 4), f"{part}_method": timed.method[label]}
            row[f"floor_{part}_ms"] = round(floor, 4)
        row["accuracy"] = {how: accuracy(*case, autocast=how == "autocast") for how in ("plain", "autocast")}
        rows.append(row | {"torch_fp32_logits": error_of_torch(*case[:2])})
    return rows


def without_n(shape: Sizes) -> Row:
    return {"cfg": {key: value for key, value in cfg_of(shape).items() if key != "n"}}


def failures(row: Row) -> list[str]:
    """The bounds that a row breaks, in words."""
    failed = []
    most_ms = next((ms for shape, ms in BOUNDS_MS.items() if row["cfg"] == without_n(shape)["cfg"]), ())
    for part, ms in zip(("fwd", "fwdbwd"), most_ms, strict=False):
        most = 2 * ms if row["weight"] == "fp32" else ms
        if not (row[f"{part}_ms"] <= most and row[f"{part}_method"] == "graph"):
            failed.append(f"{part} at most {most} ms by graph")
    for how, found in row["accuracy"].items():
        wanted = LARGEST.keys() & found.keys() - ({"dW"} if "dW_of_rounding" in found else set())
        failed += [
            f"{how} {name} at most {LARGEST[name]}" for name in sorted(wanted) if not found[name] <= LARGEST[name]
        ]
        if found["wrong_tokens"] or found["close_tokens"] > MOST_CLOSE * found["tokens"]:
            failed.append(f"{how} ids")
        failed += [f"{how} {name}" for name in ("load_exact", "bit_identical") if not found[name]]
    return failed


def bounds(record: Row) -> list[tuple[str, bool]]:
    """The bounds that each row breaks, in words, and whether all hold."""
    failed = [(f"{row['cfg']} {row['weight']}", failures(row)) for row in record["rows"]]
    return [(f"{what}: {'; '.join(wrong) or 'all bounds'}", not wrong) for what, wrong in failed]


SMALL = Sizes(300, 32, 8, 8, 2)
BENCH = Bench(
    "router", __doc__, {"rows": Item(measure, [*BOUNDS_MS], (SMALL,), [*BOUNDS_MS][1:], without_n)}, bounds=bounds
)

if __name__ == "__main__":
    run(BENCH)
