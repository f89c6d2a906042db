"""One number to beat: a kernel's share of the floor's speed on a layer of a known model, after a check.

>>> bench = Workbench("up_forward", T=100, d=64, n=64, E=2, K=1)
>>> bench.edit("my_kernels")         # change my_kernels/up.cu, then
>>> bench.score()                    # on a Hopper GPU: checked and timed on a layer of Qwen3-30B-A3B
"""

from dataclasses import dataclass
from typing import Any

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.lab.times import Times
from blazeproto.lab.verdict import Verdict
from blazeproto.runtime import checks

MODELS = {
    "Qwen3-30B-A3B": Sizes(16384, 2048, 768, 128, 8),
    "Qwen3-Next": Sizes(16384, 2048, 512, 512, 10),
    "Mixtral 8x7B": Sizes(16384, 4096, 14336, 8, 2),
}
"""Layers by model: only the sizes are the models'."""
STORED_MS = {
    "Qwen3-30B-A3B": (1.1710, 0.5843, 0.7500, 1.1219),
    "Qwen3-Next": (1.1342, 0.6244, 0.8071, 1.2006),
    "Mixtral 8x7B": (11.5308, 5.1603, 6.1007, 11.0012),
}
"""The package's kernels of `STORED_PRODUCTS`, ms of a call: the fastest tiles of results/h200/tune.json, in a clone."""
STORED_PRODUCTS = ("up_forward", "down_forward", "down_backward_act", "up_backward_act")
STORED = "H200, 24 November 2026"
USUAL = {"activation": "swiglu", "routing": "uniform", "precision": "bf16", "config": None}  # of the stored times


@dataclass(frozen=True, repr=False)
class Score:
    """A check and a time on a model's layer. True if the kernel is right.

    verdict: on the model's layer; without a Hopper GPU on the workbench's own sizes.  times: None without a measurement.
    stored: the package's kernel on an H200, or None.  lacking: the reason for no times.
    """

    model: str
    verdict: Verdict
    times: Times | None
    stored: Times | None
    lacking: str = ""

    @property
    def share(self) -> float | None:
        """The share of the floor's speed, 1 being as fast as can be; None without times or rates of this GPU."""
        return self.times.share if self.times else None

    def __bool__(self) -> bool:
        return bool(self.verdict)

    def __repr__(self) -> str:
        share = "no share of the floor" if self.share is None else f"{self.share:.1%} of the floor's speed"
        lines = [f"score on a layer of {self.model}: {share}", self.verdict.summary]
        lines += [self.lacking] if self.lacking else []
        lines += [str(self.times)] if self.times else []
        lines += [f"to beat, stored and not measured here ({STORED}): {self.stored}"] if self.stored else []
        return "\n".join(lines)


def score(bench: Any, model: str) -> Score:
    """A workbench's score; see `Workbench.score`."""
    checks.one_of("model", model, tuple(MODELS))
    if bench.product not in PRODUCTS:
        raise NotImplementedError(f"score: expected a product of blazeproto.gemm.PRODUCTS, got {bench.product}")
    sizes, stored = MODELS[model], None
    if bench.product in STORED_PRODUCTS and all(getattr(bench, name) == usual for name, usual in USUAL.items()):
        ms = STORED_MS[model][STORED_PRODUCTS.index(bench.product)]
        stored = Times(bench.product, ms, cost.product_floor_ms(bench.product, sizes))
    if bench.lacking:
        needs = f"a time needs {bench.lacking}; this check ran on the bench's own sizes"
        return Score(model, bench.check(), None, stored, needs)
    same = {name: getattr(bench, name) for name in (*USUAL, "seed")}
    large = type(bench)(bench.product, *sizes[:5], **same)
    large.edited = bench.edited
    verdict = large.check()
    return Score(
        model, verdict, large.time() if verdict else None, stored, "" if verdict else "a wrong kernel is not timed"
    )
