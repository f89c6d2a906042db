"""Rows of tokens in the experts' padded order, and back: MegaBlocks §5.2, permutation with padding fused in.

x (T, d) --padded_gather--> (M, d) --experts--> (M, d) --padded_scatter--> (T, d)
dX       <--padded_scatter--       <--experts--        <--padded_gather-- dO, weighed by scores
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from blazeproto.blocksparse.topology import Padding
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm.arguments import Arguments, Array, TwinArguments
from blazeproto.gemm.blocks import BLOCK
from blazeproto.gemm.combine import launch as launch_combine
from blazeproto.gemm.specification import Specification
from blazeproto.gemm.tiles import CHUNK
from blazeproto.runtime import checks
from blazeproto.runtime.arrays import view
from blazeproto.runtime.numba_kernel import NumbaKernel

THREADS, WARP = 256, 32  # of a block; that share a line

# --- Arguments -----------------------------------------------------------------------------------------------------------


class PaddedArguments(Arguments):
    """The arrays of a call with a padding, checked. Letters: as of a dispatch, and M, rows."""

    def _known_sizes(self, call: Mapping[str, Any]) -> dict[str, int]:
        self.padding: Padding = call["padding"]
        checks.instance("padding", self.padding, Padding)
        sizes = super()._known_sizes(call)
        return sizes | {"M": BLOCK * (sizes["R"] // BLOCK + min(sizes["E"], sizes["R"]))}  # `topology_of`'s

    def lists(self) -> dict[str, Any]:
        """The dispatch's lists, checked, as the padding's are."""
        shapes = {"row_pairs": "M", "pair_rows": "P", "expert_row_offsets": str(self.sizes["E"] + 1)}
        for name, shape in shapes.items():
            self._checked(f"padding.{name}", getattr(self.padding, name), shape, "int32")
        return super().lists()


class TwinPaddedArguments(PaddedArguments, TwinArguments):
    """Those of a twin's call, NumPy's."""


@dataclass(frozen=True)
class PaddedSpecification(Specification):
    """For a function with a padding beside the dispatch."""

    arguments = PaddedArguments, TwinPaddedArguments


def _formula_gather(m: Any, x: Any, padding: Padding, scores: Any = None) -> Any:
    """rows_r = x_t, or S_p x_t; zeros in a row of no pair. m's rows are those of a pair, in the same order."""
    rows = np.zeros((len(padding.row_pairs), x.shape[1]), x.dtype)
    rows[padding.row_pairs >= 0] = m.gather(x) if scores is None else m.of_rows(scores) * m.gather(x)
    return rows


_SCORES = Array("scores", "P", "float32", optional=True)
_GATHER = PaddedSpecification((Array("x", "T d"), _SCORES), (Array("out", "M d"),), _formula_gather)
_SCATTER = PaddedSpecification(
    (Array("rows", "M d"), _SCORES),
    (Array("out", "T d"),),
    # out_t = Σ over a token's pairs of S_p rows_r, or of rows_r
    lambda m, rows, padding, scores=None: m.combine(rows[padding.row_pairs >= 0], scores),
)
_SCORE_GRAD = PaddedSpecification(
    (Array("d_out", "T d"), Array("rows", "M d")),
    (Array("out", "P", "float32"),),
    # dS_p = ⟨dO_t, rows_r⟩
    lambda m, d_out, rows, padding: m.by_pair(m.dot(m.gather(d_out), rows[padding.row_pairs >= 0])),
)


@_GATHER.public
def padded_gather(
    x: Any, padding: Padding, dispatch: Dispatch, scores: Any = None, *, out: Any = None, stream: int | None = None
) -> Any:
    """rows[r] = x[token of the pair in r], or scores[p] times that; zeros in a row of no pair. MegaBlocks §5.2.

    x (T, d) bf16, a padding (M rows) and its dispatch, scores (P,) or (T, K) fp32 or None → rows (M, d) bf16.

    With scores it is the backward of `padded_scatter`. Floor: 2 (R + M) d bytes / 4.24 TB/s.

    out: (M, d) bf16, to fill.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or ValueError names the
    argument, before anything is launched.
    """
    return _GATHER.run(_launch_gather, locals(), "padding")


@_SCATTER.public
def padded_scatter(
    rows: Any, padding: Padding, dispatch: Dispatch, scores: Any = None, *, out: Any = None, stream: int | None = None
) -> Any:
    """out[t] = Σ over a token's pairs, in slot order, of scores[p] rows[row of p]; without scores a plain sum. MegaBlocks §5.2.

    rows (M, d) bf16, a padding (M rows) and its dispatch, scores (P,) or (T, K) fp32 or None → out (T, d) bf16.

    Sums are fp32, rounded once; a pair without a row adds nothing. Without scores it is the backward of `padded_gather`. The
    kernel is `blazeproto.gemm.combine`'s. Floor: 2 (R + T) d bytes / 4.24 TB/s.

    out: (T, d) bf16, to fill.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or ValueError names the
    argument, before anything is launched.
    """
    return _SCATTER.run(_launch_scatter, locals(), "padding")


@_SCORE_GRAD.public
def score_grad(
    d_out: Any, rows: Any, padding: Padding, dispatch: Dispatch, *, out: Any = None, stream: int | None = None
) -> Any:
    """d_scores[p] = ⟨d_out[token of p], rows[row of p]⟩: the scores' gradient, where `padded_scatter` weighed ``rows``.

    d_out (T, d), rows (M, d), both bf16, a padding (M rows) and its dispatch → d_scores (P,) fp32; 0 for a pair without a row.

    Sums are fp32, in an order that d decides. Floor: 4 R d bytes / 4.24 TB/s.

    out: (P,) fp32, to fill.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or ValueError names the
    argument, before anything is launched.
    """
    return _SCORE_GRAD.run(_launch_score_grad, locals(), "padding")


# --- Launches ------------------------------------------------------------------------------------------------------------


@cache
def kernel(name: str, **constants: bool) -> NumbaKernel:
    """name: of rows_kernels.py.  constants: ``weighted``, of padded_gather."""
    from blazeproto.blocksparse import rows_kernels

    parameters = {
        "padded_gather": "uint32* int32* int32* float32* uint32* int64 int64 int64",
        "score_grad": "uint16* uint16* int32* int32* float32* int64 int64 int64",
    }
    return NumbaKernel(getattr(rows_kernels, name), parameters[name], threads=THREADS, **constants)


def _launch(made: NumbaKernel, at: Addresses, lines: int, columns: int, *addresses: int) -> None:
    """A warp a line of this many columns."""
    if lines:
        made.launch(at.device, at.stream, -(-lines * WARP // THREADS), 0, *addresses, lines, columns // CHUNK, at.top_k)


def _launch_gather(x: Any, at: Addresses, *, padding: Padding, scores: Any, out: Any) -> None:
    made, (num_rows, d) = kernel("padded_gather", weighted=scores is not None), out.shape
    row_pairs, weights = view(padding.row_pairs).ptr, 0 if scores is None else scores.data_ptr()
    _launch(made, at, num_rows, d, x.data_ptr(), row_pairs, at.pair_to_token[1], weights, out.data_ptr())


def _launch_scatter(rows: Any, at: Addresses, *, padding: Padding, scores: Any, out: Any) -> None:
    launch_combine(rows, at._replace(token_index_map=view(padding.pair_rows).ptr), scores=scores, out=out)


def _launch_score_grad(d_out: Any, rows: Any, at: Addresses, *, padding: Padding, out: Any) -> None:
    inputs = (d_out.data_ptr(), rows.data_ptr(), view(padding.pair_rows).ptr, at.pair_to_token[1])
    _launch(kernel("score_grad"), at, at.num_pairs, d_out.shape[1], *inputs, out.data_ptr())
