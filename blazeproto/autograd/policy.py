"""What is saved for backward, as an enum a reader can see through, and the options of a call in one object."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from blazeproto.activations import ACTIVATIONS, activation_named


class SavePolicy(str, Enum):
    """What the expert MLP keeps between forward and backward.

    ============  ========================================  ====================  ==========================
    policy        saved                                     bytes/token (bf16)    backward recomputes
    ============  ========================================  ====================  ==========================
    minimal       X, H, S, two index lists, offsets         2d + 4nK + 12K        SiLU, act
    paper         X, A, B (= H), act, S, index lists        2d + 6nK + 12K        SiLU
    recompute     X, S, index lists                         2d + 12K              the up projection too
    ============  ========================================  ====================  ==========================

    and 4 (E + 1) bytes of offsets; weights are the caller's and not counted. "paper" is MoEBlaze's Algorithm 1.
    On the Hopper backend it is there to be measured: that kernel recomputes act from H in registers, which is
    cheaper than reading it, so the act that "paper" saves is never read.
    """

    MINIMAL = "minimal"
    PAPER = "paper"
    RECOMPUTE = "recompute"


CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ACTIVATIONS,
    "save": tuple(policy.value for policy in SavePolicy),
    "backend": ("auto", "hopper", "torch"),
    "combine": ("gather", "fused"),
}


def check_options(**options: Any) -> None:
    """ValueError for an option of `moe_mlp` that isn't one of its choices; it is named, with what there is."""
    for name, value in options.items():
        if name == "activation":
            activation_named(value)
        elif value not in CHOICES[name]:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, CHOICES[name]))}, got {value!r}")


class Options(NamedTuple):
    """What a call of ``moe_mlp`` asked for. Operators take tensors, numbers and strings, so it travels as one string."""

    activation: str
    save: str
    combine: str
    backend: str

    @property
    def saves_h(self) -> bool:
        return self.save != "recompute"

    @property
    def saves_act(self) -> bool:
        return self.save == "paper"

    def encode(self) -> str:
        return "/".join(self)

    @staticmethod
    @cache
    def decode(options: str) -> Options:
        return Options(*options.split("/"))


def saved_bytes(
    save: SavePolicy | str,
    *,
    num_tokens: int,
    d_model: int,
    d_expert: int,
    num_experts: int,
    top_k: int,
    activation: str = "swiglu",
    itemsize: int = 2,
    num_chunks: int = 1,
    row_capacity: int | None = None,
    varying_pairs: int | None = None,
) -> int:
    """Bytes that one call of `blazeproto.autograd.moe_mlp` keeps for backward, weights excluded.

    save, activation: as in `moe_mlp`.  num_tokens, d_model, d_expert, num_experts, top_k: T, d, n, E, K.
    itemsize: bytes of an element of x as the experts see it, so of 2 under autocast to bf16; scores have 4, or 8 with float64.
    num_chunks: above 1 with ``workspace_bytes``; each chunk has a dispatch, so offsets, of its own.
    row_capacity: as in `moe_mlp`; it bounds the rows of a whole batch.
    varying_pairs: P, the places for pairs where the number of experts per token varies; then top_k does not count, and
        ``pair_tokens`` and ``token_offsets`` are kept too.

    ValueError for an unknown policy or activation.
    """
    options = Options(activation, SavePolicy(save).value, "gather", "auto")
    widths = (
        options.saves_h * activation_named(activation).halves + options.saves_act
    )  # of what is kept of a pair, in n
    pairs = num_tokens * top_k if varying_pairs is None else varying_pairs
    rows = pairs if row_capacity is None or num_chunks > 1 else min(row_capacity, pairs)
    lists = 4 * (pairs + rows) + 4 * (num_experts + 1) * num_chunks
    if varying_pairs is not None:
        lists += 4 * (pairs + num_tokens + 1)
    return itemsize * (num_tokens * d_model + rows * d_expert * widths) + max(itemsize, 4) * pairs + lists
