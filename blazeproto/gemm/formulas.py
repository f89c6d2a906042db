"""The operations that the products' formulas are written in, and NumPy's: with them a formula is the twin of a product.

A formula calls its namespace ``m``, of this class or like it, and uses its methods and ``*``; it writes to no array. So one
serves NumPy here, and torch where torch is imported.

Shapes: T tokens, E experts, P pairs; R rows in expert order, in a namespace those in use or all: what a row of no pair holds is
never read.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from blazeproto import activations
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.e4m3 import in_e4m3


class Namespace:
    """Operations on NumPy arrays, for one dispatch. Rows are those in use. torch's have the same names and parameters.

    stored: ``values`` as a kernel stores them before they are used again, rounded or left as they are; outputs are rounded
    without it.  blocks: whether `outer` quantizes its operands, in blocks of 128 rows of an expert and 128 columns.
    """

    def __init__(self, dispatch: Dispatch, stored: Callable[[Any], Any], *, blocks: bool = False) -> None:
        self.dispatch, self.stored, self.blocks = dispatch, stored, blocks
        offsets = dispatch.expert_token_offsets
        self.counts = np.diff(offsets)
        self.experts = [slice(*rows) for rows in pairwise(offsets.tolist())]
        self.pairs = dispatch.expert_pair_indices[: offsets[-1]]
        self.tokens = self.pairs // dispatch.top_k if dispatch.top_k else dispatch.pair_tokens[self.pairs]

    def gather(self, values: Any) -> Any:
        """(T, m) → (R, m): for each row, what its token has."""
        return values[self.tokens]

    def of_rows(self, scores: Any) -> Any:
        """(P,) or (T, K) → (R, 1): for each row, what its pair has."""
        return scores.reshape(-1)[self.pairs, None]

    def product(
        self,
        rows: Any,
        weights: Any,
        *,
        transposed: bool,
        bias: Any = None,
        low: tuple[Any, Any] | None = None,
        columns: range | None = None,
    ) -> Any:
        """(R, k) → (R, m): rows[r] W[e]^T + low[0][r] low[1][e]^T + bias[e], e being the expert of r.

        weights (E, m, k), low (R, r) and (E, m, r), bias (E, m).  transposed: weights (E, k, m), low[1] (E, r, m).
        columns: of the m, those that are made.
        """
        some = slice(None) if columns is None else slice(columns.start, columns.stop)

        def multiplied(rows: Any, matrices: Any) -> Any:
            matrices = (matrices if transposed else matrices.swapaxes(1, 2))[..., some]
            return np.concatenate([rows[r] @ matrix for r, matrix in zip(self.experts, matrices, strict=True)])

        made = multiplied(rows, weights)
        made = made if low is None else made + multiplied(*low)
        return made if bias is None else made + np.repeat(bias[:, some], self.counts, axis=0)

    def outer(self, left: Any, right: Any) -> Any:
        """(R, m), (R, k) → (E, m, k): the sum over an expert's rows of left[r]^T right[r]; zeros where it has none."""
        if self.blocks:
            left, right = (np.concatenate([in_e4m3(np, v[r], "128x128") for r in self.experts]) for v in (left, right))
        return np.stack([left[r].T @ right[r] for r in self.experts])

    def expert_sum(self, values: Any) -> Any:
        """(R, m) → (E, m): the sum over an expert's rows; zeros where it has none."""
        return np.stack([values[r].sum(axis=0) for r in self.experts])

    def combine(self, values: Any, scores: Any = None) -> Any:
        """(R, m) → (T, m): the sum over a token's pairs, in slot order, of scores[p] values[row of p], or of values alone.
        A pair without a row adds nothing."""
        weighted, by_pair = values if scores is None else self.of_rows(scores) * values, np.argsort(self.pairs)
        total = np.zeros((self.dispatch.num_tokens, values.shape[1]), weighted.dtype)
        np.add.at(total, self.tokens[by_pair], weighted[by_pair])
        return total

    def dot(self, left: Any, right: Any) -> Any:
        """(R, m), (R, m) → (R, 1)."""
        return (left * right).sum(axis=1, keepdims=True)

    def dot_expert(self, rows: Any, vectors: Any) -> Any:
        """(R, m), (E, m) → (R, 1): the product of each row with the vector of its expert."""
        return np.concatenate([rows[r] @ vector for r, vector in zip(self.experts, vectors, strict=True)])[:, None]

    def by_pair(self, values: Any) -> Any:
        """(R, 1) → (P,): zero for a pair without a row."""
        made = np.zeros(self.dispatch.num_pairs, values.dtype)
        made[self.pairs] = values[:, 0]
        return made

    def activate(self, h: Any, activation: str) -> Any:
        """(R, G n) → (R, n)."""
        return activations.activate(h, activation)

    def activate_backward(self, h: Any, d_act: Any, activation: str) -> Any:
        """(R, G n) and the gradient of act (R, n) → the gradient of h."""
        return activations.activate_backward(h, d_act, activation)
