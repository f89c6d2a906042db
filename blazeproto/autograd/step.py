"""The products of the expert MLP: their signatures, `Backend`, and what one is told, `BackendStep` and `OuterSum`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from blazeproto.autograd.low_rank import LowRows
from blazeproto.autograd.ranks import AddUp
from blazeproto.dispatch.structures import Dispatch


class BackendStep(NamedTuple):
    """The arguments of a backend's product beside the rows that it reads and the places that it fills."""

    rows: Any
    """The dispatch, as the backend's ``rows_of`` made it."""

    weight: Any
    """Of x's dtype, or as the backend's ``quantized_weight`` made it, in backward the transpose."""

    bias: Tensor | None = None
    low: LowRows | None = None
    """What low-rank factors add: rows (R, r), r a multiple of 8, and the factor that they meet."""

    scores: Any = None  # (T, K) or (P,)
    activation: str = "swiglu"
    combine: str = "gather"
    add_up: AddUp | None = None
    """What sums a token's rows, where its experts are on several ranks."""


class OuterSum(NamedTuple):
    """The gradient of a weight or a low-rank factor: left^T ordered, summed over each expert's rows."""

    left: Any  # (R, m) in expert order, or (T, m) with ``gather``
    ordered: Any  # (R, k)
    like: Tensor
    """The weight or factor: where its gradient lies, and in which dtype."""

    accumulator: Tensor | None
    """Float32 or float64: is added to and returned."""

    gather: bool
    transposed: bool
    """Whether the gradient is (E, k, m) in place of (E, m, k)."""

    factor: bool = False


class Backend(Protocol):
    """The products of the expert MLP, in an order that `blazeproto.autograd.node` gives. A backend is a module with these
    functions: `hopper_backend`, `torch_backend`.

    Shapes: x (T, d), up_proj (E, G n, d), down_proj (E, d, n), scores (T, K) or (P,), H (R, G n), act (R, n); G is 2 for a gated
    activation, else 1. H is the up projection of each row's token, with its bias if there is one; act is the activation of H.
    """

    READS_ACT: bool
    """Whether `down_backward_act` reads act where it is there and no record."""

    def build_dispatch(self, topk_experts: Tensor, num_experts: int, lists: tuple[Tensor, Tensor, Tensor]) -> None:
        """topk_experts (T, K) or (P,), int32 or int64 -> fills expert_pair_indices (R,), expert_token_offsets (E+1,) and
        token_index_map (P,). Where R < P, rows from R on are left out."""

    def rows_of(self, dispatch: Dispatch) -> Any:
        """The dispatch as the other functions take it; made once for all steps of an operator."""

    def quantized_tokens(self, t: Tensor, rows: Any) -> Any:
        """With ``precision="fp8"``: x or dO (T, d) as the products take it. H, act, dH and A' are records then (`records`)."""

    def quantized_weight(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        rows: Any,
        kept: Tensor | None,
        place: Tensor | None = None,
        *,
        transposed: bool = False,
    ) -> Any:
        """A weight, or its transpose, likewise.  dtype: x's, to which it is rounded first.  kept: a record that has it already.
        place: a record that gets the transpose, too."""

    def kept_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """-> a record of both orders, for `QuantizedWeights`."""

    def low_rank_rows(
        self, a: Tensor, factor: Tensor, rows: Any, *, gather: bool, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """-> (R, r) in a's dtype, new or in the place given: each row of a times its expert's factor (E, r, m)^T, or with
        ``transposed`` (E, m, r).  a: (R, m) in expert order, or (T, m) with ``gather``."""

    def up_forward(self, step: BackendStep, x: Tensor, h: Tensor | None, act: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> H and act, new or in the places given. step.low: rows (R, r) and factor (E, G n, r); H gets rows factor^T before
        bias and activation."""

    def down_forward(self, step: BackendStep, act: Tensor, out: Tensor, *, overwrite_act: bool) -> None:
        """-> out (T, d), in place. step.low: rows (R, r) and factor (E, d, r), for Y. overwrite_act: ``act`` may be written
        over."""

    def down_backward_act(
        self,
        step: BackendStep,
        needs: Sequence[bool],
        d_out: Tensor,
        h: Tensor,
        act: Tensor | None,
        *,
        overwrite_h: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """-> dH, d_scores and A' = S act (R, n), at least those needed. act: where it was saved.  step.bias: for d_scores.
        step.low: rows (R, r) and factor (E, r, n), for dA' before the score.  overwrite_h: dH may lie over H."""

    def up_backward_act(self, step: BackendStep, dh: Tensor, dx: Tensor) -> None:
        """-> dX (T, d), in place. step.low: rows (R, r) and factor (E, r, d), for a row's dX before its token's sum."""

    def weight_gradient(self, rows: Any, of: OuterSum) -> Tensor:
        """-> (E, m, k), or with ``of.transposed`` (E, k, m), lying as the weight does, in its dtype, zeros for an expert without
        rows; or the accumulator."""

    def expert_row_sum(
        self, values: Tensor, num_experts: int, rows: Any, scores: Tensor | None, accumulator: Tensor | None
    ) -> Tensor:
        """A bias's gradient, float32 or float64: (E, m) sums over each expert's rows, of S values gathered from (T, m), or
        without scores of rows (R, m) as they are; new, or added to the accumulator."""
