"""What goes in and out of the operators of the expert MLP (`node`), in their order."""

from typing import Any, NamedTuple


class Parameters(NamedTuple):
    """The differentiable arguments. None: a bias or a factor that is not there; in a backward also what it does not read."""

    x: Any  # (T, d)
    up_proj: Any  # (E, G n, d)
    up_bias: Any  # (E, G n)
    up_a: Any  # (E, r, d)
    up_b: Any  # (E, G n, r)
    down_proj: Any  # (E, d, n)
    down_bias: Any  # (E, d)
    down_a: Any  # (E, r, n)
    down_b: Any  # (E, d, r)
    scores: Any  # (T, K) or (P,)


class Saved(NamedTuple):
    """What forward leaves for backward, None for what the save policy leaves out. R rows in expert order."""

    h: Any  # (R, G n)
    act: Any  # (R, n)
    xa: Any  # (R, r): X A_up^T of a row's token
    act_a: Any  # (R, r): act A_down^T
    up_t: Any  # a record of W_up^T, with ``keep_transposed``
    down_t: Any  # likewise, of W_down^T


class Made(NamedTuple):
    """What backward makes, and as booleans what is needed of it; gradients in the order of `Parameters`."""

    dh: Any  # the end of a whole batch's first call
    xa: Any  # likewise, where it was not saved
    a_scaled: Any  # likewise, where a third call makes dW_down
    x: Any
    up_proj: Any
    up_bias: Any
    up_a: Any
    up_b: Any
    down_proj: Any
    down_bias: Any
    down_a: Any
    down_b: Any
    scores: Any


UP, DOWN = slice(0, 5), slice(5, 10)  # of `Parameters`: those of the up and of the down projection
WEIGHTS = Made._fields[4:-1]
"""Whose gradients are sums over tokens."""
TAIL = (
    "Tensor? up_kept, Tensor? down_kept, Tensor expert_pair_indices, Tensor expert_token_offsets, Tensor token_index_map, "
    "int top_k, Tensor? pair_tokens, Tensor? token_offsets, SymInt chunk_tokens, Tensor? token_ranks, str exchange, str options"
)
"""How the operators' arguments end: records of weights that were quantized before (`QuantizedWeights`), a `Dispatch`, or one
for each chunk (offsets (chunks, E+1)), what `peers_of` takes, and the options."""
OF_DOWN = "Tensor down_proj, Tensor? down_bias, Tensor? down_a, Tensor? down_b, Tensor scores"
