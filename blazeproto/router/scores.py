"""The kinds of scores, an object each: what torch computes, and the device functions that kernels are made of.

softmax_topk    softmax over all experts, then the K largest    MoEBlaze §2.1; Switch Transformer eq. 1
topk_softmax    softmax over the K largest logits               Shazeer et al. 2017 eq. 3; Mixtral §2.1
sigmoid         sigmoid of each logit                           DeepSeek-V3 §2.1.2, eq. 15

A score whose token's sum to one is a softmax over its chosen experts: of their logits, or of the logarithms of their elementwise
scores. So it is computed, never by dividing scores by a sum, which underflows where the chosen logits lie far below 0.

A score costs an object in `SCORES`. Neither torch nor Numba is imported here before a method needs it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blazeproto.runtime import checks

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = math.log2(math.e)


class DeviceFunctions(NamedTuple):
    """An elementwise score f of a logit x, in fp32, as Numba's device functions. "fast" ones may use the special-function unit.

    A token's f(x) may all underflow where its logits lie far below 0. ``scaled`` is f(x) times a factor that keeps it
    from underflowing, a function of ``depth`` alone: how far the token's largest chosen logit lies below 0. ``one`` is
    exp(-depth).
    """

    fast_value: Any  # (x): f(x), by which experts are ranked under a balancing bias
    scaled: Any  # (x, depth, one)
    fast_scaled: Any  # (x, depth, one)
    logarithm: Any  # (x): log f(x)
    fast_logarithm: Any  # (x)
    slope_by_value: Any  # (x, scaled, one): the slope of log f at x
    slope_by_logit: Any  # (x): the same
    slope_by_logarithm: Any  # (log f(x)): the same


@dataclass(frozen=True)
class ScoreFunction:
    """A kind of scores. This class: a softmax over a token's logits, all or with ``over_chosen`` its chosen experts' alone."""

    name: str
    over_chosen: bool = False
    elementwise: bool = False  # a function of one logit, to which a balancing bias can be added
    renormalized: bool = False  # unless asked otherwise, a token's scores are divided by their sum

    def value(self, logits: "Tensor") -> "Tensor":
        """Every expert's score in [0, 1] for every token, (T, E)."""
        return logits.softmax(dim=1)

    def logarithm(self, logits: "Tensor") -> "Tensor":
        """Logarithms of scores, but for a term that all experts of a token share. Their softmax over any of a token's experts is
        those experts' scores divided by their sum, exact also where the scores themselves underflow."""
        return logits

    def on_device(self) -> DeviceFunctions:
        """The functions that kernels call for a softmax: logarithms and their slopes. A score's logarithm is the logit, as
        above."""
        from blazeproto.runtime.numba import float32
        from blazeproto.runtime.warp import device

        logit, one = device(lambda x: x), device(lambda x: float32(1.0))
        return DeviceFunctions(None, None, None, logit, logit, None, one, one)


class Sigmoid(ScoreFunction):
    """1 / (1 + exp(-x)). ``scaled`` is 1 / (exp(-depth) + exp(-depth - x)): exp(depth) times as large."""

    def value(self, logits: "Tensor") -> "Tensor":
        return logits.sigmoid()

    def logarithm(self, logits: "Tensor") -> "Tensor":
        from torch.nn.functional import logsigmoid

        return logsigmoid(logits)

    def on_device(self) -> DeviceFunctions:
        from blazeproto.runtime.numba import float32
        from blazeproto.runtime.warp import device, fast_exp2, fast_reciprocal

        functions: list[Callable[..., Any]] = [
            lambda x: fast_reciprocal(float32(1.0) + fast_exp2(float32(x * float32(-LOG2_E)))),
            lambda x, depth, one: float32(1.0) / (one + math.exp(float32(-depth - x))),
            lambda x, depth, one: fast_reciprocal(float32(one + math.exp(float32(-depth - x)))),
            lambda x: float32(min(x, float32(0.0)) - math.log1p(math.exp(float32(-abs(x))))),
            lambda x: float32(min(x, float32(0.0)) - math.log(float32(float32(1.0) + math.exp(float32(-abs(x)))))),
            lambda x, scaled, one: float32(1.0) - one * scaled,
            lambda x: float32(float32(1.0) / float32(float32(1.0) + math.exp(float32(x)))),
            lambda logarithm: float32(float32(1.0) - math.exp(logarithm)),
        ]
        return DeviceFunctions(*map(device, functions))


SCORES = {
    score.name: score
    for score in (
        ScoreFunction("softmax_topk"),
        ScoreFunction("topk_softmax", over_chosen=True),
        Sigmoid("sigmoid", elementwise=True, renormalized=True),
    )
}
if TYPE_CHECKING:
    Score = str
else:
    Score = Literal[tuple(SCORES)]


def score_named(name: str) -> ScoreFunction:
    """The score of this name. ValueError, with the nearest name, for an unknown one."""
    checks.one_of("score", name, tuple(SCORES))
    return SCORES[name]


def renormalizes(score: str, renormalize: bool | None, top_k: int | None = None) -> bool:
    """Whether a token's scores are divided by their sum: as asked for; where nothing is asked, as the score does by itself,
    and never with one expert a token, whose score would be 1 and its gradient 0."""
    return score_named(score).renormalized and top_k != 1 if renormalize is None else bool(renormalize)


def sums_to_one(score: str, renormalize: bool | None, top_k: int | None = None) -> bool:
    """Whether a token's scores sum to one before scaling."""
    return score_named(score).over_chosen or renormalizes(score, renormalize, top_k)
