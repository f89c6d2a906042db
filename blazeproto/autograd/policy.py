"""Tensors saved for backward: by which policy, which they are, and how many bytes they take."""

from enum import StrEnum
from typing import Any, NamedTuple

from blazeproto.activations import activation_named
from blazeproto.autograd.records import new_rows, new_weights, row_bytes, weight_bytes
from blazeproto.gemm.recipe import Recipe, name_of
from blazeproto.gemm.tiles import CHUNK
from blazeproto.runtime.checks import boolean, integer, number, one_of


class SavePolicy(StrEnum):
    """The tensors that the expert MLP keeps between forward and backward.

    ============  ========================================  ====================  ==========================
    policy        saved                                     bytes/token (bf16)    backward recomputes
    ============  ========================================  ====================  ==========================
    minimal       X, H, S, two index lists, offsets         2d + 4nK + 12K        SiLU, act
    paper         X, A, B (= H), act, S, index lists        2d + 6nK + 12K        SiLU
    recompute     X, S, index lists                         2d + 12K              the up projection too
    ============  ========================================  ====================  ==========================

    and 4 (E + 1) bytes of offsets; weights are the caller's and not counted. "paper" is MoEBlaze's Algorithm 1.
    On the Hopper backend it is there to be measured: that kernel recomputes act from H in registers, which is
    cheaper than reading it, so the act that "paper" saves is never read. It is saved for the down projection's gradient, so
    if that weight and the factors beside it are frozen, "paper" is "minimal". If the up projection and its factors are frozen,
    only "recompute" saves X.

    Low-rank factors of rank r add X A_up^T and act A_down^T, 2rK bytes each, wherever H is saved; "recompute" makes both again
    with H. r counts as the next multiple of 8.

    With ``precision="fp8"`` H has a byte an element and 4 for each 128 of a row; where x needs a gradient, ``keep_transposed``
    adds what weights take in fp8, a byte an element and 4 for each 128 x 128, to whole 16 of an expert.
    """

    MINIMAL = "minimal"
    PAPER = "paper"
    RECOMPUTE = "recompute"


class Saved(NamedTuple):
    """The tensors that forward leaves for backward, None for each that the save policy leaves out. R rows in expert order."""

    h: Any = None  # (R, G n): A and B of Algorithm 1
    act: Any = None  # (R, n): Y_swi
    xa: Any = None  # (R, r): X A_up^T of a row's token
    act_a: Any = None  # (R, r): act A_down^T
    up_t: Any = None  # a record of W_up^T, with ``keep_transposed``
    down_t: Any = None  # likewise, of W_down^T


def places(call: Any) -> Saved:
    """Uninitialised, for what an `ExpertsCall` saves."""
    p, how, num_rows = call.p, call.how, call.dispatch.expert_pair_indices.shape[0]
    if how.save == SavePolicy.RECOMPUTE:
        return Saved()
    xa, act_a = (None if a is None else p.x.new_empty(num_rows, a.shape[1]) for a in (p.up_a, p.down_a))
    if call.quantized:
        shapes = (
            (len(p.down_proj), call.up_width, p.x.shape[1]),
            p.down_proj.shape,
        )  # up_proj may be the gate's rows alone
        weights = (new_weights(p.x, shape, 1) if how.keep_transposed else None for shape in shapes)
        return Saved(new_rows(p.x, num_rows, call.up_width), None, xa, act_a, *weights)
    h = p.x.new_empty(num_rows, call.up_width)
    act = p.x.new_empty(num_rows, p.down_proj.shape[2]) if how.save == SavePolicy.PAPER else None
    return Saved(h, act, xa, act_a)


def padded_rank(rank: int) -> int:
    """The rank that low-rank factors have with the zeros that fill 16 bytes of bf16, which kernels read at once."""
    return -(-rank // CHUNK) * CHUNK


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
    up_rank: int = 0,
    down_rank: int = 0,
    precision: str | Recipe = "bf16",
    keep_transposed: bool = True,
    trains_up: bool = True,
) -> int:
    """Bytes that one call of `blazeproto.autograd.moe_mlp` keeps for backward; weights, factors and `QuantizedWeights` excluded.

    save, activation: as in `moe_mlp`.  num_tokens, d_model, d_expert, num_experts, top_k: T, d, n, E, K.
    itemsize: bytes of an element of x as the experts see it, so of 2 under autocast to bf16; scores have 4, or 8 with float64.
    num_chunks: above 1 with ``workspace_bytes``; each chunk has a dispatch, so offsets, of its own.
    row_capacity: as in `moe_mlp`; it bounds the rows of a whole batch.
    varying_pairs: P, the places for pairs where the number of experts per token varies; then top_k does not count, and
        ``pair_tokens`` and ``token_offsets`` are kept too.
    up_rank, down_rank: of low-rank factors; 0 for none.  precision, keep_transposed: as in `moe_mlp`.
    trains_up: whether the up projection's weight or factor needs a gradient, which reads X.

    ValueError for an unknown policy, activation or precision, TypeError or ValueError for another value that does not fit.
    """
    optional = {"row_capacity": row_capacity, "varying_pairs": varying_pairs}
    number("top_k", top_k, least=0)  # no int where it is a mean
    counts = {"num_tokens": num_tokens, "up_rank": up_rank, "down_rank": down_rank, **optional}
    sizes = {"d_model": d_model, "d_expert": d_expert, "num_experts": num_experts, "itemsize": itemsize}
    for least, given in ((0, counts), (1, sizes | {"num_chunks": num_chunks})):
        for name, size in given.items():
            integer(name, 0 if size is None and name in optional else size, least)
    boolean("keep_transposed", keep_transposed)
    boolean("trains_up", trains_up)
    one_of("save", save, [policy.value for policy in SavePolicy])
    policy, halves = SavePolicy(save), activation_named(activation).halves
    saves_h, of_h = policy is not SavePolicy.RECOMPUTE, d_expert * halves
    of_row = padded_rank(up_rank) + padded_rank(down_rank)  # elements that go with H
    pairs = num_tokens * top_k if varying_pairs is None else varying_pairs
    rows = pairs if row_capacity is None or num_chunks > 1 else min(row_capacity, pairs)
    lists = 4 * (pairs + rows) + 4 * (num_experts + 1) * num_chunks
    if varying_pairs is not None:
        lists += 4 * (pairs + num_tokens + 1)
    if name_of(precision) == "bf16":
        of_row, copies = of_row + of_h + d_expert * (policy is SavePolicy.PAPER), 0
    else:
        copies = keep_transposed * (weight_bytes(d_model, of_h) + weight_bytes(d_expert, d_model))
        copies = rows * row_bytes(of_h) + num_experts * copies
    of_rows = saves_h * (itemsize * rows * of_row + copies)
    of_x = itemsize * num_tokens * d_model * (trains_up or policy is SavePolicy.RECOMPUTE)
    return of_x + of_rows + max(itemsize, 4) * pairs + lists
