"""Whether a token's bits depend on what else is in its batch: random layers on the kernels (docs/batch_invariance.md).

    python -m scripts.checks.batch_invariance --cases 500 --out results/h200/batch_invariance.json
    python -m scripts.checks.batch_invariance --seed 4711 --cases 1            # one that failed, again
    python -m scripts.checks.batch_invariance --backend ampere --cases 200     # those of mma.sync, a router's logits too

A case draws a layer, its tokens and a gradient for each. The whole batch runs once. Then the same tokens run in another order,
cut into several batches, each of them in a way of its own: another save policy, in chunks, among masked tokens, without
gradients, as a CUDA graph, compiled. Ids, scores, outputs and dx of every token must be the same bits. Every fourth case runs
`moe_mlp` on ids of which some are no expert's here. The exit code is 1 if a token differs.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor

from blazeproto import MoE, moe_mlp
from blazeproto.runtime.arch import ARCHES, kernels_of
from scripts.bench.common import in_turn, of_kernels, write_json
from scripts.bench.identity import launched
from scripts.checks.cases import Draw
from scripts.command import argument_parser, need_kernels, positive

WIDTHS = (512, 768, 2048, 2880, 4096, 7168)
EXPERTS = {8: 2, 64: 6, 128: 8, 512: 10}  # E: K
ROUTERS = ("top_k", "topk_softmax", "aux_free")
ODDS = {"eager": 6, "paper": 4, "recompute": 4, "chunks": 4, "masked": 4, "no_grad": 2, "graph": 2}
WAYS = (*ODDS, "compiled")
COMPILED = 11  # one case in so many is compiled, all of its batches: compiling takes a quarter of a minute
LARGEST = 2**31  # bytes of all experts' weights
OUTPUTS = ("ids", "scores", "out", "dx")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One layer and its tokens."""

    seed: int
    T: int
    d: int
    n: int
    E: int
    K: int
    router: str
    f32_router: bool
    d_shared: int
    bias: bool
    elsewhere: bool  # no layer but `moe_mlp`, on ids of which some are no expert's here

    @classmethod
    def drawn(cls, seed: int) -> Self:
        draw = random.Random(seed)
        d, E = draw.choice(WIDTHS), draw.choice(tuple(EXPERTS))
        widths = [n for n in (64, 136, 256, 768) if 6 * E * n * d <= LARGEST]
        T = draw.choice((1, 2, draw.randint(3, 130), draw.randint(131, 1500), draw.randint(1501, 6000)))
        router, shared = draw.choice(ROUTERS), draw.choice((0, 0, 64, 200))
        flags = draw.random() < 0.5, draw.random() < 0.3
        return cls(seed, T, d, draw.choice(widths), E, EXPERTS[E], router, flags[0], shared, flags[1], seed % 4 == 3)


class Layer:
    """A case's layer: runs any of its tokens in any way."""

    def __init__(self, case: Case, backend: str) -> None:
        self.case, self.backend, self.draw = case, backend, Draw(f"batch {case.seed}", "cuda")
        options: dict[str, Any] = {"router": case.router, "bias": case.bias, "d_shared": case.d_shared, "aux_loss": 0.0}
        options |= {"dtype": torch.bfloat16, "device": "cuda", "backend": backend}
        module: Any = MoE(case.d, case.n, case.E, case.K, **options)
        if case.f32_router:
            module.router.float()
        self.module = self.draw.fill(module)
        self.compiled: dict[Any, Any] = {
            called: torch.compile(called, fullgraph=True) for called in (moe_mlp, module)
        }  # what compiles when it is called
        self.x, self.d_out = (self.draw.normal(case.T, case.d).bfloat16() for _ in range(2))
        self.ids = (self.draw.uniform(case.T, case.E + 8).topk(case.K).indices - 4).int()
        self.scores = self.draw.uniform(case.T, case.K)

    def run(self, places: Tensor, way: str) -> Results:
        """The results of the tokens at these places; without dx where no gradients are made."""
        given, mask = self._padded(places) if way == "masked" else (places, None)
        x, d_out = self.x[given], self.d_out[given]
        if mask is not None:
            x[~mask] = torch.nan
        x.requires_grad_(way != "no_grad")

        def step() -> list[Tensor]:
            with torch.set_grad_enabled(x.requires_grad):
                made = self._forward(x, given, mask, way)
            dx = torch.autograd.grad(made[-1], x, d_out) if x.requires_grad else ()
            return [value.detach() for value in (*made, *dx)]

        found = zip(OUTPUTS, replayed(step, x) if way == "graph" else step(), strict=False)
        return {name: value if mask is None else value[mask] for name, value in found}

    def _forward(self, x: Tensor, given: Tensor, mask: Tensor | None, way: str) -> tuple[Tensor, ...]:
        layer, case = self.module, self.case
        experts, whole = (self.compiled.get(each if way == "compiled" else None, each) for each in (moe_mlp, layer))
        of_token = 2 * case.K * (3 * case.n + case.d)  # bytes, at least what one needs
        options: dict[str, Any] = {"save": way} if way in ("paper", "recompute") else {}
        options |= {"workspace_bytes": of_token * -(-len(given) // 4)} if way == "chunks" else {}
        if case.elsewhere:
            ids, scores = self.ids[given], self.scores[given]
            if mask is not None:
                ids, x = ids.masked_fill(~mask[:, None], -1), torch.where(mask[:, None], x, 0)
            weights = (layer.up_proj_weight, layer.down_proj, scores, ids)
            return ids, scores, experts(x, *weights, num_experts=case.E, backend=self.backend, **options)
        chosen: list[Any] = []
        hook = (
            layer.router.register_forward_hook(lambda *given: chosen.append(given[-1])) if way != "compiled" else None
        )
        with patch.object(layer, "options", replace(layer.options, **options)), hook or nullcontext():
            out, _ = whole(x) if mask is None else whole(x, mask=mask)
            routing = chosen[0] if chosen else layer.router(x)
        return routing.experts, routing.scores, out

    def _padded(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The places with tokens of the same batch before, between and behind them, and the mask: which tokens count."""
        count = len(places) + 1 + len(places) // 3
        mask = torch.zeros(count, dtype=torch.bool, device="cuda")
        mask[self.draw.uniform(count).argsort()[: len(places)]] = True
        given = (self.draw.uniform(count) * self.case.T).long().clamp_max_(self.case.T - 1)
        given[mask] = places
        return given, mask


def replayed(step: Callable[[], list[Tensor]], x: Tensor) -> list[Tensor]:
    """A CUDA graph's results, captured with other tokens than those that it is replayed with."""
    tokens = x.detach().clone()
    x.data.copy_(tokens.flip(0) * 0.5)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    with torch.cuda.graph(graph, stream=stream):
        made = step()
    x.data.copy_(tokens)
    graph.replay()
    torch.cuda.synchronize()
    return made


def batches(case: Case, chosen: list[str]) -> Iterator[tuple[Tensor, str]]:
    """The tokens in another order, cut into up to seven batches; each with how it runs, one of the ``chosen`` ways."""
    draw = random.Random(f"{case.seed} batches")
    order = torch.randperm(case.T, generator=torch.Generator().manual_seed(case.seed))
    if draw.random() < 0.3:
        order = order.sort().values
    cuts = sorted({0, case.T, *(draw.randint(0, case.T) for _ in range(draw.randint(0, 5)))})
    if case.T > 1 and draw.random() < 0.5:
        cuts = sorted({*cuts, 1})  # one token alone
    drawn = [way for way in chosen if way in ODDS]
    compiled = "compiled" in chosen and (not drawn or case.seed % COMPILED == 0)
    for begin, end in pairwise(cuts):
        way = "compiled" if compiled else draw.choices(drawn, [ODDS[way] for way in drawn])[0]
        yield order[begin:end].cuda(), way


def differing(whole: Results, part: Results, places: Tensor) -> dict[str, int]:
    """How many tokens differ in each output; NaN differs from all."""
    return {
        name: int((value != whole[name][places]).reshape(len(places), -1).any(dim=1).sum())
        for name, value in part.items()
    }


def run_case(case: Case, chosen: list[str], ways: Counter[str], backend: str = "hopper") -> list[str]:
    """The differences, a line each."""
    layer = Layer(case, backend)
    whole = layer.run(torch.arange(case.T, device="cuda"), "eager")
    lines = []
    for places, way in batches(case, chosen):
        ways[way] += 1
        found = differing(whole, layer.run(places, way), places)
        if wrong := {name: count for name, count in found.items() if count}:
            lines.append(f"{case}: {way}, {len(places)} tokens: {wrong}")
    return lines


def main() -> int:
    parser = argument_parser("scripts.checks.batch_invariance", __doc__)
    parser.add_argument("--cases", type=positive, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--backend", choices=tuple(ARCHES), default="hopper", help="whose kernels")
    parser.add_argument("--out", type=Path, help="file of results to write")
    options = parser.parse_args()
    need_kernels(options.backend)
    ways, lines, done = Counter[str](), list[str](), 0
    with launched() as kernels, kernels_of(options.backend):  # a router's logits too
        for seed in in_turn(range(options.seed, options.seed + options.cases), options.seconds):
            found = run_case(Case.drawn(seed), [*WAYS], ways, options.backend)
            for line in found:
                print(line, flush=True)
            lines, done = lines + found, done + 1
            torch.compiler.reset()
    print(
        f"{options.backend}: {done} of {options.cases} cases, {len(lines)} batches differ ({dict(sorted(ways.items()))})"
    )
    if options.out:
        record = {"of": of_kernels(kernels), "seeds": [options.seed, options.seed + done - 1], "batches": dict(ways)}
        write_json(options.out, record | {"cases": done, "differing": lines})
    return 1 if lines or done < options.cases else 0


if __name__ == "__main__":
    sys.exit(main())
