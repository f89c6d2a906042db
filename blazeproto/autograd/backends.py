"""The two backends, their protocol, and which of them runs: ``backend="auto" | "hopper" | "torch"``.

`backend_on` is asked inside the operators, where tensors are real, so that nothing of it is traced by torch.compile
and every operator of one layer answers alike.
"""

import importlib
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from blazeproto.autograd.low_rank import LowRows
from blazeproto.autograd.peers import AddUp
from blazeproto.dispatch.structures import Dispatch
from blazeproto.gemm.tiles import CHUNK, MAX_EXPERTS
from blazeproto.runtime import arch, optional


class Backend(Protocol):
    """The products of the expert MLP, in an order that `blazeproto.autograd.node` gives. A backend is a module with these
    functions: `hopper_backend`, `torch_backend`.

    Shapes: x (T, d), up_proj (E, G n, d), down_proj (E, d, n), scores (T, K) or (P,), H (R, G n), act (R, n); G is 2 for a gated
    activation, else 1. H is the up projection of each row's token, with its bias if there is one; act is the activation of H.
    ``rows`` is what the backend's ``rows_of`` made of the dispatch. ``low`` is what low-rank factors add to a product
    (`LowRows`); r is a multiple of 8. Accumulators are float32, or float64, and are added to and returned.
    """

    READS_ACT: bool
    """Whether `down_backward_act` reads act where it is there."""

    def build_dispatch(self, topk_experts: Tensor, num_experts: int, lists: tuple[Tensor, Tensor, Tensor]) -> None:
        """topk_experts (T, K) or (P,), int32 or int64 -> fills expert_pair_indices (R,), expert_token_offsets (E+1,) and
        token_index_map (P,). Where R < P, rows from R on are left out."""

    def rows_of(self, dispatch: Dispatch) -> Any:
        """The dispatch as the other functions take it; made once for all steps of an operator."""

    def forward_weight(
        self, weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None, place: Tensor | None = None
    ) -> Any:
        """A weight as the products of forward take it.  dtype: x's.  kept: the weight quantized before (`QuantizedWeights`).
        place: a record that gets its transpose, quantized."""

    def backward_weight(self, weight: Tensor, dtype: torch.dtype, rows: Any, kept: Tensor | None) -> Any:
        """The same for the products by rows of backward.  kept: what forward left in its place, too."""

    def low_rank_rows(
        self, a: Tensor, factor: Tensor, rows: Any, *, gather: bool, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """-> (R, r) in a's dtype, new or in the place given: each row of a times its expert's factor (E, r, m)^T, or with
        ``transposed`` (E, m, r).  a: (R, m) in expert order, or (T, m) with ``gather``."""

    def up_forward(
        self,
        x: Tensor,
        up_proj: Tensor,
        bias: Tensor | None,
        rows: Any,
        activation: str,
        low: LowRows | None = None,
        h: Tensor | None = None,
        act: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> H and act, new or in the places given. low: rows (R, r) and factor (E, G n, r); H gets rows factor^T before bias and
        activation."""

    def down_forward(
        self,
        act: Tensor,
        down_proj: Tensor,
        bias: Tensor | None,
        scores: Tensor,
        rows: Any,
        out: Tensor,
        combine: str,
        low: LowRows | None = None,
        *,
        overwrite_act: bool,
        add_up: AddUp | None = None,
    ) -> None:
        """-> out (T, d), in place. low: rows (R, r) and factor (E, d, r), for Y. overwrite_act: ``act`` may be written over.
        add_up: what sums a token's rows, where its experts are on several ranks."""

    def down_backward_act(
        self,
        needs: Sequence[bool],
        d_out: Tensor,
        h: Tensor,
        act: Tensor | None,
        scores: Tensor,
        down_proj: Tensor,
        bias: Tensor | None,
        rows: Any,
        activation: str,
        low: LowRows | None = None,
        *,
        overwrite_h: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """-> dH, d_scores and A' = S act (R, n), at least those needed. act: where it was saved.  bias: for d_scores.
        low: rows (R, r) and factor (E, r, n), for dA' before the score.  overwrite_h: dH may lie over H."""

    def up_backward_act(
        self,
        dh: Tensor,
        x: Tensor,
        up_proj: Tensor,
        rows: Any,
        low: LowRows | None = None,
        dx: Tensor | None = None,
        *,
        combine: str = "gather",
        add_up: AddUp | None = None,
    ) -> Tensor:
        """-> dX (T, d), new or in the place given. low: rows (R, r) and factor (E, r, d), for a row's dX before its token's
        sum.  add_up: as for `down_forward`."""

    def weight_gradient(
        self,
        left: Tensor,
        ordered: Tensor,
        like: Tensor,
        rows: Any,
        accumulator: Tensor | None = None,
        *,
        gather: bool,
        transposed: bool,
        factor: bool = False,
    ) -> Tensor:
        """The gradient of a weight or a low-rank factor, which lies as that does, ``like``, in its dtype; or the accumulator.

        -> (E, m, k), or with ``transposed`` (E, k, m): the sum over each expert's rows of left^T ordered; zeros for an expert
        without rows. left: (R, m) in expert order, or (T, m) with ``gather``.  ordered: (R, k).  factor: it is a factor.
        """

    def expert_row_sum(
        self, values: Tensor, num_experts: int, rows: Any, scores: Tensor | None, accumulator: Tensor | None = None
    ) -> Tensor:
        """A bias's gradient, float32 or float64: (E, m) sums over each expert's rows, of S values gathered from (T, m), or
        without scores of rows (R, m) as they are."""


@lru_cache(maxsize=1024)
def backend_on(
    name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int, precision: str = "bf16"
) -> Backend:
    """The backend for tensors of this device and dtype, E experts, d and n. ValueError: "hopper" was asked for and cannot
    run; it says what is missing."""
    missing = "" if name == "torch" else missing_for_hopper(device, dtype, num_experts, *widths)
    if missing and name == "hopper":
        raise ValueError(f'backend: expected one that can run here, got "hopper", which needs {missing}')
    if precision != "bf16":
        fp8 = importlib.import_module("blazeproto.autograd.fp8_backend")
        return cast(Backend, (fp8.Hopper if missing is None else fp8.Plain)())
    return _backend(hopper=missing is None)


def dispatch_backend(name: str, device: torch.device) -> Backend:
    """The backend that builds the dispatch of tensors on ``device``, whatever the products' dtype and widths."""
    return _backend(hopper=has_dispatch_kernels(name, device))


@cache
def _backend(*, hopper: bool) -> Backend:
    if hopper:
        return cast(Backend, importlib.import_module("blazeproto.autograd.hopper_backend"))
    return cast(Backend, importlib.import_module("blazeproto.autograd.torch_backend"))


def has_dispatch_kernels(backend: str, device: torch.device) -> bool:
    """Whether the Numba kernels of dispatch and top-k run for tensors on ``device``."""
    return backend != "torch" and device.type == "cuda" and _missing_on_device(device_index(device)) is None


def missing_for_hopper(device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> str | None:
    """What keeps the Hopper backend from running with this device, dtype, E and these widths (d, n); None if nothing."""
    if device.type != "cuda":
        return f"a CUDA GPU of {arch.WANTED}; the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"torch.bfloat16 tensors; they are {dtype}"
    if num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts; there are {num_experts}"
    for width in widths:
        if width % CHUNK:
            return f"d_model and d_expert that are multiples of {CHUNK} (16 bytes of bf16); one is {width}"
    return _missing_on_device(device_index(device))


def what_runs(name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> str:
    """What `backend_on` does, in words: "hopper", or "torch", or "nothing" where it raises; with what the kernels lack."""
    if name == "torch":
        return name
    missing = missing_for_hopper(device, dtype, num_experts, *widths)
    return "hopper" if missing is None else f"{'torch' if name == 'auto' else 'nothing'}: the kernels need {missing}"


def check_device(device: Any) -> None:
    """ValueError for a device that torch does not know, or that is not here. None is any."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # AssertionError: torch without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {str(device)!r} ({why})") from error


def device_index(device: torch.device) -> int:
    """The CUDA ordinal of a device, of the current one if it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _missing_on_device(index: int) -> str | None:
    if lacks := arch.missing(torch.cuda.get_device_capability(index), f"cuda:{index}"):
        return f"a GPU of {lacks}"
    for package in optional.KERNELS:
        if lacks := optional.missing(package):
            warnings.warn(f"backend: the kernels of Hopper GPUs need {lacks}", stacklevel=2)
            return lacks
    return None
