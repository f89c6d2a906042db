"""Experts on several ranks: a *dispatcher*, which a layer asks, and an *exchange*, which the experts' operators ask.

A dispatcher takes tokens to the ranks of their experts and back (`mlp.dispatched_mlp`):

    x, S, ids ──dispatch──> rows that arrived, their S and local ids ──moe_mlp──> a partial sum a row ──combine──> out

Each rank computes its own experts by `moe_mlp`, on rows that came from all ranks: a row is a token there, whose other experts are
not here. So `moe_mlp` is also what a program calls that moves rows itself, with an id outside [0, E) or a varying number of
experts per row for what is not here; `grouped_experts` is that for rows sorted by expert.

A dispatcher may leave rows and sums to an exchange, and bring ids and scores alone. Then the tokens of an operator are the rank's
own, its pairs those that arrived, and rows and partial sums move inside it, in backward dO, X and dX~ likewise:

    x ──send──> rows of all ranks' tokens ──up, down──> Y ──add_up──> out

Operators take tensors, numbers and strings, so they are told an exchange by its name, as torch's own collective operators are
told a process group.
"""

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from blazeproto.autograd.low_rank import LowRank
from blazeproto.autograd.options import Options

AddUp = Callable[..., None]
"""(y, rows, *, scores=None, columns=None, out): what `blazeproto.gemm.combine.launch` is on one rank."""


class Exchange(Protocol):
    """All ranks call the same functions in the same order. The result of ``send`` holds until the next ``send``."""

    places: int
    """Tokens that may arrive, of all ranks."""

    backend: str
    """The name of the backend whose rows ``add_up`` takes."""

    by_products: bool
    """Whether bf16 products can send rows. Then it has ``sending(t, send_order, send_begins, *, awaited)``: of t (T, d) → what
    ``send`` gives, and the `Sending` of a product that brings it there while it multiplies.  awaited: whether that product
    gathers the rows; else the next ``add_up`` waits for them."""

    def send(self, t: Any, token_ranks: Tensor) -> Any:
        """t (T, d), this rank's own → (places, d), of all ranks' tokens those with an expert here; the other rows are anything.

        t: a tensor, or what the backend's ``quantized_tokens`` made. The result is of the same kind.
        token_ranks: (T,) int32: bit r of a token: it has an expert on rank r."""

    def add_up(
        self,
        token_ranks: Tensor,
        y: Tensor,
        rows: Any,
        *,
        scores: Tensor | None = None,
        columns: range | None = None,
        out: Tensor,
    ) -> None:
        """y (R, d), rows in expert order → out (T, d): the sums over a token's ranks of their partial sums, rounded each.

        rows: the arrived pairs' dispatch, of the backend's `rows_of`.  scores: of the arrived pairs.  columns: the columns of
        ``out`` that y has."""


EXCHANGES: MutableMapping[str, Exchange] = WeakValueDictionary()
"""Those that live, by name."""


class PeersNamed(NamedTuple):
    """An exchange in one call, as operators are told of it."""

    token_ranks: Tensor | None  # (T,) int32, as `Exchange.send` takes it
    exchange: str
    send_order: Tensor | None = None
    """(T (P - 1),) int32: the order in which products send rows (``line`` of gemm/cuda/sending.cuh)."""
    send_begins: Tensor | None = None
    """(6 (P - 1) + 1,) int32: where in it each group of experts begins, by rank."""

    @property
    def places(self) -> int | None:
        """Tokens that may arrive; None: as many as x has."""
        return EXCHANGES[self.exchange].places if self.exchange else None

    @property
    def backend(self) -> str:
        """The backend that the operators run on."""
        return EXCHANGES[self.exchange].backend


ALONE = PeersNamed(None, "")
"""Rows that have arrived, and no exchange."""


class Arrived(NamedTuple):
    """Rows that arrived at a rank, as `moe_mlp` takes tokens: R of them, with Q pairs, or K each."""

    x: Tensor  # (R, d)
    scores: Tensor  # (Q,) or (R, K), differentiable
    topk_experts: Tensor  # (Q,) or (R, K) int32, from the rank's first expert; outside [0, E / ranks): not here
    pair_tokens: Tensor | None  # (Q,) int32: the row of each pair; None with K pairs a row
    token_offsets: Tensor | None  # (R + 1,) int32: where each row's pairs begin
    route: Any  # the dispatcher's own: what `combine` needs to know of the way back
    peers: PeersNamed | None = None  # an exchange in the operators: x is then of this rank's own tokens


class Dispatcher(Protocol):
    """Takes tokens to the ranks of their experts, and partial sums back. ``MoE.dispatcher`` is one, or None on one rank.

    It may say what it was made for: ``num_experts`` of all ranks, ``ranks``, their ``group``, ``d_model``, ``device``. Each of
    these is compared with the layer's by `check_dispatcher`.

    All ranks call `dispatch` and `combine`, and run their backward, as often and in the same order, those without a token too.
    Gradients travel the way back: of x and scores through `dispatch`, of the partial sums through `combine`. ValueError is raised
    by `check` alone.
    """

    def check(self, options: Options) -> None:
        """Raises ValueError that names an option of ``options`` which has no meaning here. Called before anything runs."""

    def dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        topk_experts: Tensor,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
    ) -> Arrived:
        """Tokens go out: the arguments are `moe_mlp`'s, with ids of all ranks' experts, checked before.

        x: (T, d) of the dtype that is computed in.  scores: (T, K) or (P,) float32, or float64 with x.
        topk_experts: (T, K) or (P,), int32 or int64.  pair_tokens, token_offsets: (P,) and (T+1,) int32, or None.
        """

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        """Partial sums come back: partial (R, d), one of x's dtype for each row of ``arrived``, → (T, d), their sums by token."""

    def overflow(self, arrived: Arrived, row_capacity: int) -> Tensor:
        """(1,) int32: the pairs of all ranks, of the call of ``arrived``, that a ``row_capacity`` on each leaves out. Asked where
        `check` lets one pass."""


def check_dispatcher(
    dispatcher: Any, options: Options, num_experts: int, experts_here: int, d_model: int, mesh: Any = None
) -> None:
    """Raises TypeError unless ``dispatcher`` has a `Dispatcher`'s functions, ValueError unless it was made for these experts.

    experts_here: of ``num_experts``, those whose weights this rank has.  mesh: a DeviceMesh whose last dimension shares them.
    ``dispatcher.check`` is asked too.
    """
    functions = [getattr(dispatcher, name, None) for name in ("check", "dispatch", "combine")]
    if isinstance(dispatcher, type) or not all(map(callable, functions)):
        got = f"the class {dispatcher.__name__}" if isinstance(dispatcher, type) else repr(dispatcher)
        raise TypeError(f"dispatcher: expected an object with check, dispatch and combine, as AllToAll, got {got}")
    dispatcher.check(options)
    for name, value in (("num_experts", num_experts), ("d_model", d_model)):
        if getattr(dispatcher, name, value) != value:
            raise ValueError(f"dispatcher: expected one for {name}={value}, as the layer has, got {dispatcher}")
    if experts_here * getattr(dispatcher, "ranks", num_experts // experts_here) != num_experts:
        expected = f"one whose ranks have {experts_here} of {num_experts} experts each, as this one has"
        raise ValueError(f"dispatcher: expected {expected}, got {dispatcher}")
    from torch.distributed import ProcessGroup, get_process_group_ranks, is_initialized

    if mesh is None or not is_initialized():  # a group of one rank that has gone is not missed
        return

    own, group = mesh.get_group(mesh.ndim - 1), getattr(dispatcher, "group", None)
    if isinstance(group, ProcessGroup) and group is not own:
        ranks, others = map(get_process_group_ranks, (own, group))
        if ranks != others:
            raise ValueError(
                f"dispatcher: expected one of ranks {ranks}, which share the experts, got one of ranks {others}"
            )
    device = getattr(dispatcher, "device", None)
    if device is not None and torch.device(device).type != mesh.device_type:
        raise ValueError(f"dispatcher: expected one on {mesh.device_type}, where the experts are, got one on {device}")


def refuse_ranks(dispatcher: Dispatcher | None, what: str) -> None:
    """RuntimeError from ``what`` of a layer that has a dispatcher: how many rows come to a rank is not known beforehand."""
    if dispatcher is not None:
        raise RuntimeError(f"{what}: expected a layer on one rank, got one with {dispatcher}")


def local(weight: Any) -> Any:
    """This rank's part of a weight. Over ranks that hold copies of it (data parallel), its gradients are summed."""
    if not hasattr(weight, "placements"):
        return weight
    from torch.distributed.tensor import Partial

    # To where it lies already: nothing moves, but backward takes the gradient there, and that is what sums it.
    there = weight.redistribute(placements=weight.placements)
    return there.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in weight.placements])


def own_factors(factors: LowRank | None, weight: Any) -> LowRank | None:
    """The slice of this rank's experts. weight: of the experts, sharded over E, or all of them."""
    if factors is None or not hasattr(weight, "device_mesh"):
        return factors
    mesh, last = weight.device_mesh, weight.device_mesh.ndim - 1
    a, b = (t.chunk(mesh.size(last))[mesh.get_local_rank(last)] for t in factors)
    return LowRank(a, b)
