"""What is saved for backward, as an enum a reader can see through, and the types that the operators pass around."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import NamedTuple

from torch import Tensor

from blazeproto.reference import is_gated


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


SAVED_H, SAVED_ACT = ("minimal", "paper"), ("paper",)
"""The policies that save them."""


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
) -> int:
    """Bytes that one call of :func:`blazeproto.autograd.moe_mlp` keeps for backward, weights excluded.

    ``num_chunks`` is above 1 with ``workspace_bytes``: each chunk has a dispatch, so offsets, of its own.
    """
    save = SavePolicy(save)
    pairs = num_tokens * top_k
    up_width = 2 * d_expert if is_gated(activation) else d_expert
    elements = num_tokens * d_model
    if save in SAVED_H:
        elements += pairs * up_width
    if save in SAVED_ACT:
        elements += pairs * d_expert
    scores_and_two_lists = 3 * 4 * pairs
    return elements * itemsize + scores_and_two_lists + 4 * (num_experts + 1) * num_chunks


class Rows(NamedTuple):
    """Which pair is in which row: the fields of ``blazeproto.gemm.Rows``, as torch tensors."""

    pair_indices: Tensor  # (R,) int32: the pair in each row, -1 past the last row
    offsets: Tensor  # (E+1,) int32: where each expert's rows begin
    token_index_map: Tensor  # (P,) int32: the row of each pair, -1 for a pair without one
    top_k: int | None  # None when experts per token vary, and then:
    pair_tokens: Tensor | None = None  # (P,) int32: the token of each pair
    token_offsets: Tensor | None = None  # (T+1,) int32: where each token's pairs begin


class Options(NamedTuple):
    """What a call of ``moe_mlp`` asked for. Operators take tensors, numbers and strings, so it travels as one string."""

    activation: str
    save: str
    combine: str
    backend: str
    weight_grads: str  # "weight" (the dtype of the weight) or "float32"

    def encode(self) -> str:
        return "/".join(self)

    @staticmethod
    @cache
    def decode(options: str) -> Options:
        return Options(*options.split("/"))


PARAMETERS = "Tensor x, Tensor up_proj, Tensor? up_bias, Tensor down_proj, Tensor? down_bias, Tensor scores"
"""How the arguments of the operators with a derivative begin."""

ROWS_AND_OPTIONS = (
    "Tensor pair_indices, Tensor offsets, Tensor token_index_map, int top_k, "
    "Tensor? pair_tokens, Tensor? token_offsets, str options"
)
"""How the arguments of every operator of the expert MLP end (top_k is 0 for None); :func:`decode_tail` reads them."""


def decode_tail(
    pair_indices: Tensor,
    offsets: Tensor,
    token_index_map: Tensor,
    top_k: int,
    pair_tokens: Tensor | None,
    token_offsets: Tensor | None,
    options: str,
) -> tuple[Rows, Options]:
    rows = Rows(pair_indices, offsets, token_index_map, top_k or None, pair_tokens, token_offsets)
    return rows, Options.decode(options)


Needs = Sequence[bool]
"""Which gradients are wanted: of (x, up_proj, up_bias) from the up projection's backward, of (h, scores, down_proj, down_bias)
from the down projection's."""

UpGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
DownGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
