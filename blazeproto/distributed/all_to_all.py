"""``AllToAll``: tokens to the ranks of their experts and back, by torch.distributed, in arrays of the exact sizes.

    rank 0's tokens   0: e0 e3    1: e2 e3    2: e0 e1              4 experts on 2 ranks

    pairs by rank     (0, e0) (2, e0) (2, e1) | (0, e3) (1, e2) (1, e3)
    rows              0       2               | 0       1            a token once a rank
    local id, row     (0, 0)  (0, 1)  (1, 1)  | (1, 0)  (0, 1)  (1, 1)

First the numbers of rows and pairs go to each rank, and the host waits for them: once, in forward. Then go the pairs' local
ids and rows, their scores, and the rows. A rank sends back one partial sum a row. A token's are added in order of ranks, in
float32, and rounded: its bits depend on no other token. Backward goes the same ways with gradients, and needs no counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blazeproto.autograd.options import Options
from blazeproto.autograd.ranks import Arrived
from blazeproto.runtime import checks


class OverRanks:
    """A dispatcher over a process group, of whose ranks each holds as many experts, in order."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, **takes: tuple[object, ...]) -> None:
        """takes: options that have a meaning for some values alone, and these."""
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a ProcessGroup that this rank is in, got {type(group).__name__}")
        self.group, self.ranks, self.takes = group, group.size(), takes
        self.num_experts = checks.integer("num_experts", num_experts, least=1)
        checks.require(
            num_experts % self.ranks == 0, "num_experts", f"a multiple of the group's {self.ranks} ranks", num_experts
        )
        self.sizes = {"ranks": self.ranks, "num_experts": self.num_experts}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    def __deepcopy__(self, _: Any) -> OverRanks:
        """Itself, which a copy of a layer shares: the process group is the ranks'."""
        return self

    def check(self, options: Options) -> None:
        """Raises ValueError for ``options`` that have no meaning here."""
        for name, taken in self.takes.items():
            if (got := getattr(options, name)) not in taken:
                expected = " or ".join(map(repr, taken))
                raise ValueError(f"{name}: expected {expected} with {type(self).__name__}, got {got!r}")


class AllToAll(OverRanks):
    """The dispatcher that runs anywhere: NCCL, gloo. MegaBlocks §5.3 (expert parallelism), DeepSeek-V3 §3.2 (one row a rank).

    group: a process group, of whose P ranks each holds E / P experts, in order.
    num_experts: E.

    A token goes once to each rank that has any of its experts, with ids and scores of those. The options ``workspace_bytes`` and
    ``row_capacity`` are refused; with ``combine="fused"`` a rank's partial sum is fused, with ``"fused_both"`` dX's too, and the
    sums over ranks are as ever.

    Raises TypeError or ValueError for an argument that does not fit; it is named, with what was expected and what came.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        # How many rows arrive is known after they have left.
        super().__init__(group, num_experts, row_capacity=(None,), workspace_bytes=(None,))

    def dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        topk_experts: Tensor,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
    ) -> Arrived:
        """x (T, d) of any dtype, scores (T, K) or (P,) float, topk_experts (T, K) or (P,) integer → an `Arrived` with Q pairs.

        pair_tokens, token_offsets: (P,) and (T+1,) int32, with pairs by token; None with K a token.
        RuntimeError in a CUDA-graph capture, for the host waits for the counts.
        """
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{type(self).__name__}: expected no CUDA-graph capture, as the host waits for counts")
        here, ids = self.num_experts // self.ranks, topk_experts.flatten()
        known = (ids >= 0) & (ids < self.num_experts)
        rank, pairs = torch.where(known, ids // here, self.ranks).long().sort(stable=True)  # those of no expert last
        tokens = pairs // topk_experts.shape[1] if pair_tokens is None else pair_tokens.long()[pairs]
        begins = torch.ones_like(known)  # whether a pair is the first of its row
        begins[1:] = (rank[1:] != rank[:-1]) | (tokens[1:] != tokens[:-1])
        counts = rank.new_zeros(self.ranks + 1, 2)
        counts.index_add_(0, rank, torch.stack((begins, torch.ones_like(begins)), 1).long())
        sent = counts[:-1]
        arriving = self._exchange(sent, [1] * self.ranks, [1] * self.ranks)
        (rows_out, pairs_out), (rows_in, pairs_in) = torch.stack((sent.T, arriving.T)).tolist()  # the host waits

        number = sum(pairs_out)
        rank, pairs, tokens = rank[:number], pairs[:number], tokens[:number]
        row = begins[:number].cumsum(0) - 1
        place = row - _starts(sent[:, 0])[rank]  # among the rows that go to this rank
        told = torch.stack((ids[pairs] - rank * here, place), 1).int()
        local, place = self._exchange(told, pairs_out, pairs_in).unbind(1)
        begin = _starts(arriving[:, 0]).repeat_interleave(arriving[:, 1], output_size=sum(pairs_in))
        arrived_row = (place + begin).int()
        bounds = torch.arange(sum(rows_in) + 1, dtype=torch.int32, device=x.device)
        offsets = torch.searchsorted(arrived_row, bounds, out_int32=True)

        of_rows = tokens.new_zeros(sum(rows_out)).scatter_(0, row, tokens)  # each pair of a row has the same token
        route = Route(self._exchange, len(x), scores.shape, of_rows, rows_out, rows_in, pairs, pairs_out, pairs_in)
        moved = Moved.apply(scores, route.send_scores, route.return_scores)  # type: ignore[no-untyped-call]
        rows = Moved.apply(x, route.send, route.add_up)  # type: ignore[no-untyped-call]
        return Arrived(rows, moved, local.contiguous(), arrived_row, offsets, route)

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        """partial (R, d), of any float dtype, one for each row of ``arrived`` → (T, d), the sums of each token's."""
        made: Tensor = Moved.apply(partial, arrived.route.add_up, arrived.route.send)  # type: ignore[no-untyped-call]
        return made

    def overflow(self, arrived: Arrived, row_capacity: int) -> Tensor:
        """Not for any ``arrived``: `check` refuses a ``row_capacity``."""
        raise NotImplementedError

    def _exchange(self, t: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The first sent[0] rows of t go to rank 0, the next sent[1] to rank 1, ...; what received[...] count comes, by rank."""
        made = t.new_empty(sum(received), *t.shape[1:])
        dist.all_to_all_single(made, t.contiguous(), received, sent, group=self.group)
        return made


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts


@dataclass(frozen=True)
class Route:
    """The way of one batch: its functions are linear, ``send`` and ``add_up`` each other's transpose, and likewise the functions
    of scores.

    A rank's tokens are T, its pairs P, as they are given; rows and pairs that it sends are sorted by rank.
    """

    exchange: Callable[[Tensor, list[int], list[int]], Tensor]
    num_tokens: int
    shape: torch.Size  # of scores: (T, K) or (P,)
    tokens: Tensor  # int64: the token of each row that is sent
    rows_out: list[int]  # to each rank
    rows_in: list[int]  # from each rank
    pairs: Tensor  # int64: the pairs that are sent
    pairs_out: list[int]
    pairs_in: list[int]

    def send(self, t: Tensor) -> Tensor:
        """(T, d) → the rows that arrive here."""
        return self.exchange(t[self.tokens], self.rows_out, self.rows_in)

    def add_up(self, rows: Tensor) -> Tensor:
        """Rows that arrived here go back → (T, d): a token's are added in order of ranks, rounded once."""
        back = self.exchange(rows, self.rows_in, self.rows_out)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = back.new_zeros(self.num_tokens, back.shape[1], dtype=wide)
        for tokens, part in zip(self.tokens.split(self.rows_out), back.split(self.rows_out), strict=True):
            total.index_add_(0, tokens, part.to(wide))  # one rank's tokens are distinct: no order matters
        return total.to(rows.dtype)

    def send_scores(self, t: Tensor) -> Tensor:
        """(T, K) or (P,) → the scores of the pairs that arrive here."""
        return self.exchange(t.flatten()[self.pairs], self.pairs_out, self.pairs_in)

    def return_scores(self, arrived: Tensor) -> Tensor:
        """Back to (T, K) or (P,); zero for a pair that went nowhere."""
        made = arrived.new_zeros(self.shape.numel())
        made[self.pairs] = self.exchange(arrived, self.pairs_in, self.pairs_out)
        return made.view(self.shape)


class Moved(torch.autograd.Function):
    """A tensor by a linear function ``there``, its gradient by the transpose of that, ``back``."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(t)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
