"""The two ends of `Symmetric`: an exchange through the GPUs' memory, and its twin through torch.distributed, for a CPU.

They compute the same: places of rows, ids and scores, and the sums, in the order of the ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blazeproto.autograd.chunks import WHOLE, dispatch
from blazeproto.autograd.operators import narrow_ids, ready
from blazeproto.autograd.records import quantized_in
from blazeproto.autograd.torch_formulas import outputs
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.distributed.peer_memory import BLOCKS, GROUPS, PROGRESS_BYTES, SENDING_CTAS, MemoryLayout, PeerMemory
from blazeproto.gemm.combine import SPEC as COMBINE
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.recipe import FP8
from blazeproto.gemm.sending import Sending
from blazeproto.runtime import driver
from blazeproto.runtime.arrays import current_stream

NOWHERE = -(1 << 30)  # exchange.cu


class SharedChoice(NamedTuple):
    """The result of `share`: all ranks' pairs, at addresses that hold until the next call."""

    experts: Tensor  # (P T, K) or (P max_pairs,) int32, counted from this rank's first; NOWHERE: of no rank
    scores: Tensor  # the same, float
    pair_tokens: Tensor | None  # (P max_pairs,) int32
    token_offsets: Tensor | None  # (P T + 1,) int32
    token_ranks: Tensor  # (T of this rank,) int32, new
    send_order: Tensor | None = None  # of `PeersNamed`, new
    send_begins: Tensor | None = None


class PeerExchange:
    """Between GPUs of one host, by kernels that store to the other GPUs' memory: torch's symmetric memory, without multicast.

    group: its ranks have one GPU each, of one kind, in NVLink's reach.  See `Symmetric` for the rest.
    """

    backend = "hopper"
    by_products = True  # where a grid has more CTAs than send

    def __init__(self, group: dist.ProcessGroup, layout: MemoryLayout, device: torch.device, timeout: float) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.layout, self.places, self.device = layout, layout.ranks * layout.max_tokens, device
        self.memory = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self.memory, group)
        offset = self.memory.data_ptr() - self._handle.buffer_ptrs[group.rank()]
        bases = [address + offset for address in self._handle.buffer_ptrs]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._progress = torch.zeros(PROGRESS_BYTES, dtype=torch.uint8, device=device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        blocks, self.by_products = BLOCKS * multiprocessors, multiprocessors >= 2 * SENDING_CTAS
        pointers = (self._bases.data_ptr(), self._progress.data_ptr(), device.index, blocks, timeout)
        self.end = PeerMemory(layout, group.rank(), *pointers)
        self.memory[: layout.at("experts")].zero_()  # flags
        self._section("token_offsets", torch.int32)[-1] = layout.ranks * layout.max_pairs
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody stores before all have zeroed

    def _section(self, name: str, dtype: torch.dtype) -> Tensor:
        begin, size = self.layout.sections[name]
        return self.memory[begin : begin + size].view(dtype)

    def share(
        self,
        experts: Tensor,
        scores: Tensor,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
        num_tokens: int,
        experts_here: int,
    ) -> SharedChoice:
        experts, scores, top_k = narrow_ids(experts).contiguous(), scores.contiguous(), _top_k(experts)
        others, token_ranks = self.layout.ranks - 1, experts.new_empty(num_tokens)
        first_needed = experts.new_empty(num_tokens, others) if others else None
        given = [t if t is None else t.contiguous() for t in (pair_tokens, token_offsets)]
        addresses = [0 if t is None else t.data_ptr() for t in (experts, scores, *given, token_ranks, first_needed)]
        sizes = {"num_tokens": num_tokens, "num_pairs": experts.numel(), "top_k": top_k, "experts_here": experts_here}
        driver.launch(*self.end.share(*addresses, **sizes, stream=current_stream(scores)))
        order = begins = None
        if first_needed is not None:
            order, begins, _ = dispatch.kernel(first_needed, GROUPS * others, WHOLE, self.backend)
        pairs = self.layout.ranks * self.end.pairs_of_rank(top_k)
        ids, weights = self._section("experts", torch.int32)[:pairs], self._section("scores", torch.float32)[:pairs]
        if top_k:
            return SharedChoice(ids.view(-1, top_k), weights.view(-1, top_k), None, None, token_ranks, order, begins)
        tokens, offsets = (self._section(name, torch.int32) for name in ("pair_tokens", "token_offsets"))
        return SharedChoice(ids, weights, tokens, offsets, token_ranks, order, begins)

    def sending(self, t: Tensor, order: Tensor, begins: Tensor, *, awaited: bool) -> tuple[Tensor, Sending]:
        """t: bf16.  order, begins: of `PeersNamed`."""
        t, places = ready(t), self._section("rows", torch.bfloat16).view(self.places, self.layout.d_model)
        addresses = (t.data_ptr(), order.data_ptr(), begins.data_ptr())
        return places, self.end.sending(*addresses, num_tokens=len(t), awaited=awaited)._replace(rows=t)

    def send(self, t: Tensor | Quantized, token_ranks: Tensor) -> Tensor | Quantized:
        """t: bf16, or quantized by token."""
        # A copy of rows that are not aligned lives until the launch is in the stream.
        rows, scales = t if isinstance(t, Quantized) else (ready(t), None)
        addresses = (rows.data_ptr(), 0 if scales is None else scales.data_ptr(), token_ranks.data_ptr())
        driver.launch(*self.end.send(*addresses, num_tokens=len(rows), stream=current_stream(rows)))
        if scales is None:
            return self._section("rows", torch.bfloat16).view(self.places, self.layout.d_model)
        return quantized_in(self._section("rows", torch.uint8), FP8.x.scale, self.places, self.layout.d_model)

    def add_up(
        self,
        token_ranks: Tensor,
        y: Tensor,
        rows: Addresses,
        *,
        scores: Tensor | None = None,
        columns: range | None = None,
        out: Tensor,
    ) -> None:
        driver.launch(
            *self.end.add_up(
                *(y.data_ptr(), 0 if scores is None else scores.data_ptr(), rows.token_index_map, rows.token_offsets),
                *(token_ranks.data_ptr(), out.data_ptr()),
                num_tokens=len(out),
                top_k=rows.top_k,
                columns=columns or range(out.shape[1]),
                dropping=rows.num_rows < rows.num_pairs,
                stream=rows.stream,
            )
        )

    def send_back(self, values: Tensor, here: Tensor) -> Tensor:
        """values (P pairs,) float32 of the pairs that arrived, bool here: their experts are here → (pairs,), of this rank's own
        pairs, in the exchange's memory."""
        made = self._section("values", torch.float32)
        made.zero_()  # pairs of no expert
        driver.launch(
            *self.end.send_back(values.data_ptr(), here.data_ptr(), top_k=_top_k(values), stream=current_stream(values))
        )
        return made


class GatheredExchange:
    """The twin: every rank gathers what all ranks have, by torch.distributed, and takes what `PeerExchange` would have stored.

    For any device and dtype, gloo and NCCL; it moves P times as much. Elements that nobody would have stored are NaN. In fp8 it
    is sent the torch backend's quantized tokens: e4m3 values times their scales, in x's dtype.
    """

    backend, by_products = "torch", False

    def __init__(self, group: dist.ProcessGroup, layout: MemoryLayout) -> None:
        self.group, self.rank, self.layout = group, group.rank(), layout
        self.places = layout.ranks * layout.max_tokens

    def _gathered(self, t: Tensor, length: int, fill: float) -> Tensor:
        """t (n, ...) of each rank, filled up to ``length`` → (P, length, ...)."""
        padded = t.new_full((length, *t.shape[1:]), fill)
        padded[: len(t)] = t
        made = [torch.empty_like(padded) for _ in range(self.layout.ranks)]
        dist.all_gather(made, padded, group=self.group)
        return torch.stack(made)

    def share(
        self,
        experts: Tensor,
        scores: Tensor,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
        num_tokens: int,
        experts_here: int,
    ) -> SharedChoice:
        experts, layout = narrow_ids(experts), self.layout
        known = (experts >= 0) & (experts < experts_here * layout.ranks)
        ranks = torch.where(known, experts // experts_here, layout.ranks).long()
        tokens = torch.arange(num_tokens)[:, None].expand(ranks.shape) if pair_tokens is None else pair_tokens.long()
        goes = torch.zeros(num_tokens, layout.ranks + 1, dtype=torch.int32, device=experts.device)
        goes[tokens.to(goes.device).flatten(), ranks.flatten()] = 1
        token_ranks = (goes[:, :-1] << torch.arange(layout.ranks, device=goes.device)).sum(1, dtype=torch.int32)
        length = layout.max_tokens if pair_tokens is None else layout.max_pairs
        ids = self._gathered(torch.where(known, experts, NOWHERE), length, NOWHERE).flatten(0, 1)
        ids = torch.where(ids == NOWHERE, NOWHERE, ids - self.rank * experts_here)
        weights = self._gathered(scores, length, 0).flatten(0, 1)
        if pair_tokens is None or token_offsets is None:
            return SharedChoice(ids, weights, None, None, token_ranks)
        of_rank = torch.arange(layout.ranks, dtype=torch.int32, device=experts.device)[:, None]
        places = self._gathered(pair_tokens, length, 0) + of_rank * layout.max_tokens
        begins = self._gathered(token_offsets[:-1], layout.max_tokens, len(pair_tokens)) + of_rank * length
        ends = torch.full_like(of_rank[:1, 0], layout.ranks * length)
        return SharedChoice(ids, weights, places.flatten(), torch.cat((begins.flatten(), ends)), token_ranks)

    def send(self, t: Tensor, token_ranks: Tensor) -> Tensor:
        ranks = self._gathered(token_ranks, self.layout.max_tokens, 0)
        rows = self._gathered(t, self.layout.max_tokens, torch.nan)
        return rows.masked_fill(((ranks >> self.rank) & 1 == 0)[..., None], torch.nan).flatten(0, 1)

    def add_up(
        self,
        token_ranks: Tensor,
        y: Tensor,
        rows: Dispatch,
        *,
        scores: Tensor | None = None,
        columns: range | None = None,
        out: Tensor,
    ) -> None:
        partial = outputs(COMBINE, rows, y.dtype, y=y, scores=scores)
        of_ranks = self._gathered(partial, self.places, 0).unflatten(1, (self.layout.ranks, -1))[
            :, self.rank, : len(out)
        ]
        total = torch.zeros(out.shape, dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        for rank, part in enumerate(of_ranks):
            total += part.masked_fill(((token_ranks >> rank) & 1 == 0)[:, None], 0)
        out.copy_(total)

    def send_back(self, values: Tensor, here: Tensor) -> Tensor:
        of_ranks = self._gathered(values.masked_fill(~here, 0).flatten(), values.numel(), 0)
        return of_ranks.unflatten(1, (self.layout.ranks, -1))[:, self.rank].sum(0)  # one of them is not zero


def _top_k(experts: Tensor) -> int:
    return experts.shape[1] if experts.dim() == 2 else 0
