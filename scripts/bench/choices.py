"""What each named router takes, forward and with backward, beside plain top-k: graph replay of ``router(x)`` in training mode.

    python -m scripts.bench.choices                        # every name in ROUTERS at both shapes
    python -m scripts.bench.choices --names top_k,hash     # some of them (top_k is always measured)

bf16 x and bf16 router weight, at (T, d, E, K) = (32768, 2048, 128, 8) and (16384, 4096, 512, 8). All routers' graphs are
replayed in turn (A B A B), medians of 20 rounds. "over" is what a router takes more than top_k in the same run. With backward:
the gradients of the scores' sum of squares and the auxiliary losses in x and in the weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from blazeproto.router import ROUTERS, Router, make_router
from blazeproto.router.kinds import DRAWING_RULES
from scripts.bench.common import format_table, in_turn
from scripts.bench.markdown import number
from scripts.bench.timing import gpu_ms
from scripts.command import argument_parser, need_hopper, positive, some_of

SHAPES = ((32768, 2048, 128, 8), (16384, 4096, 512, 8))  # T, d, E, K
BASE = "top_k"


def calls_of(router: Router, x: torch.Tensor, ids: torch.Tensor | None) -> dict[str, Callable[[], object]]:
    """The forward, and the forward with its backward; each returns tensors, by which a replay is compared with a call.

    A rule that draws has another routing in each call: then these are its losses alone, which are of the token choice.
    """
    draws = getattr(router.choice, "rule", "") in DRAWING_RULES

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            routing = router(x, token_ids=ids)
        losses = tuple(routing.aux_losses.values())
        return losses if draws else (routing.scores, routing.load.float(), *losses)

    def both() -> tuple[torch.Tensor, ...]:
        routing = router(x, token_ids=ids)
        losses = tuple(routing.aux_losses.values())
        gradients = torch.autograd.grad(routing.scores.square().sum() + sum(losses), (x, router.weight))
        return losses if draws else gradients

    return {"forward": forward, "both": both}


def measure(shape: tuple[int, int, int, int], names: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds by name, then by part."""
    T, d, E, K = shape
    x = torch.randn(T, d, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(50000, (T,), device="cuda")
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "both": {}}
    for name in names:
        router = make_router(name, d, E, K, device="cuda", dtype=torch.bfloat16)
        for part, call in calls_of(router, x, ids if name == "hash" else None).items():
            calls[part][name] = call
    timed = {part: gpu_ms(by_name, names, rounds) for part, by_name in calls.items()}
    for part, times in timed.items():
        for name, why in times.refused.items():
            print(f"{name}, {part}: not captured, so kernel durations are summed: {why}")
    return {name: {part: times.ms[name] for part, times in timed.items()} for name in names}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.bench.choices", __doc__)
    parser.add_argument("--names", type=some_of(ROUTERS), default=[*ROUTERS], help="some of " + ", ".join(ROUTERS))
    parser.add_argument("--rounds", type=positive, default=20)
    options = parser.parse_args(words)
    options.names = list(dict.fromkeys([BASE, *options.names]))
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    for shape in in_turn(SHAPES):
        times = measure(shape, options.names, options.rounds)
        rows = []
        for name, ms in times.items():
            over = {part: ms[part] - times[BASE][part] for part in ms}
            rows.append([name, *(number(value, 3) for part in ms for value in (ms[part], over[part]))])
        print("T, d, E, K =", shape)
        print(format_table(["router", "forward ms", "over", "fwd + bwd ms", "over"], rows), flush=True)


if __name__ == "__main__":
    main()
