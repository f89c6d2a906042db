"""``Symmetric``: tokens to the ranks of their experts and back by stores to the other GPUs' memory, without a wait of the host.

    share      ids and scores go to all ranks                     in `dispatch`
    send       a token's row goes once to each rank that has an expert of it; inside the experts' operators, for x and dO;
               with precision="fp8" quantized, with its scale
    add_up     one partial sum a (token, rank) comes back, and a token's are added in order of ranks: O, and dX
    send_back  the gradients of scores                            in backward

Every rank has room for all tokens of all ranks, so nothing has to be counted beforehand, and a CUDA graph captures it. Rows lie
there until the next call of `send`, for this layer or another: what backward needs of them is sent again, and none is saved.
"""

from __future__ import annotations

import platform
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blazeproto.autograd.backends import check_device, missing_for_kernels
from blazeproto.autograd.private import in_backward
from blazeproto.autograd.ranks import EXCHANGES, Arrived, PeersNamed
from blazeproto.distributed.all_to_all import Moved, OverRanks
from blazeproto.distributed.exchanges import GatheredExchange, PeerExchange
from blazeproto.distributed.peer_memory import MAX_RANKS, MemoryLayout
from blazeproto.gemm.tiles import CHUNK
from blazeproto.runtime import checks

_NUMBERS = count()


class Symmetric(OverRanks):
    """The dispatcher over NVLink, by torch's symmetric memory. DeepSeek-V3 §3.2 (a row once a rank, one partial sum back).

    All ranks make it, with the same arguments; one serves all layers of a model that have as many experts. On a CPU, and with
    ``device="cpu"``, its twin through torch.distributed takes its place, for tests.

    Args:
        group: a process group, of whose P ranks, at most 32, each holds E / P experts, in order; with GPUs all on one host.
        num_experts: E; on a GPU E / P is at most 512, as the products of a rank's experts need.
        d_model: d, a multiple of 8.
        max_tokens: the most tokens of a rank in one call, on any rank. Those of one call may differ between ranks.
        max_pairs: the most pairs of a rank in one call: max_tokens K, or for a number of experts that varies its bound.
        overflow: what `check_overflow` does where a layer's ``row_capacity`` has left out pairs: "raise" or "drop".
        timeout: seconds that a kernel waits for another rank before it ends the program.
        device: of the layers; default: the current GPU with NCCL, else the CPU.

    On a GPU layers run on the Hopper backend, and x is bf16. With ``precision="fp8"`` x and dO are sent as e4m3 with one scale a
    token, d + 4 bytes in place of 2 d. A token's scale depends on that token alone, so this changes no bit. With low-rank
    factors, a down bias or "fp8_rollout" they are sent in bf16.

    A rank's memory for the exchange: 2 (2 P - 1) max_tokens d bytes, and 12 P + 4 a pair. The options ``workspace_bytes``,
    ``combine="fused"`` and ``"fused_both"`` are refused. With a ``row_capacity`` a rank computes at most that many of the rows
    that arrive there; default: all of them.

    Raises TypeError or ValueError for an argument that does not fit; it is named, with what was expected and what came.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        d_model: int,
        max_tokens: int,
        max_pairs: int,
        overflow: str = "raise",
        timeout: float = 300.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(group, num_experts, workspace_bytes=(None,), combine=("gather",))
        checks.require(self.ranks <= MAX_RANKS, "group", f"at most {MAX_RANKS} ranks", self.ranks)
        for name, size in {"d_model": d_model, "max_tokens": max_tokens, "max_pairs": max_pairs}.items():
            self.sizes[name] = checks.integer(name, size, least=1)
        checks.require(d_model % CHUNK == 0, "d_model", f"a multiple of {CHUNK}", d_model)
        self.d_model = self.sizes["d_model"]
        checks.number("timeout", timeout, least=0)
        checks.one_of("overflow", overflow, ("raise", "drop"))
        self.overflow_is, self.layout = overflow, MemoryLayout(self.ranks, max_tokens, max_pairs, d_model)
        on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)
        check_device(device)
        self.device = torch.device(device or ("cuda" if on_gpu else "cpu"))
        checks.require(self.device.type in ("cpu", "cuda"), "device", "cpu or cuda", self.device)
        self._exchange: PeerExchange | GatheredExchange
        if self.device.type == "cuda":
            if (hosts := len(hosts_of(group))) > 1:
                raise ValueError(f"group: expected ranks of one host, got ranks of {hosts} hosts, which AllToAll takes")
            current = torch.device("cuda", torch.cuda.current_device())
            checks.require(
                self.device in (current, torch.device("cuda")), "device", f"the current one, {current}", self.device
            )
            self.device, self.takes["backend"] = current, ("auto", "hopper")
            self._exchange = PeerExchange(group, self.layout, self.device, timeout)
        else:
            self._exchange = GatheredExchange(group, self.layout)
        self._overflow = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.name = f"symmetric{next(_NUMBERS)}"
        EXCHANGES[self.name] = self._exchange

    def dispatch(
        self,
        x: Tensor,
        scores: Tensor,
        topk_experts: Tensor,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
    ) -> Arrived:
        """x (T, d), scores (T, K) or (P,) float, topk_experts (T, K) or (P,) integer → an `Arrived` with x, and all ranks' pairs.

        pair_tokens, token_offsets: (P,) and (T+1,) int32, with pairs by token; None with K a token.
        ValueError for more tokens or pairs than the memory holds, another width, device or dtype: on this rank alone, before
        anything is sent.
        """
        self._check_tokens(x, topk_experts)
        exchange, here, shape = self._exchange, self.num_experts // self.ranks, scores.shape
        choice = exchange.share(topk_experts, scores.detach(), pair_tokens, token_offsets, len(x), here)
        arrived = (choice.experts >= 0) & (choice.experts < here)
        lists = choice.scores, choice.pair_tokens, choice.token_offsets
        own: Any = [t if t is None else t.clone() for t in lists]  # which a next exchange would write over
        choice = choice._replace(scores=own[0], pair_tokens=own[1], token_offsets=own[2])

        def back(gradient: Tensor) -> Tensor:
            made = exchange.send_back(gradient.contiguous(), arrived)
            return made[: shape.numel()].view(shape).clone()

        moved = Moved.apply(scores, lambda _: choice.scores, back)  # type: ignore[no-untyped-call]
        peers = PeersNamed(choice.token_ranks, self.name, choice.send_order, choice.send_begins)
        return Arrived(x, moved, choice.experts, choice.pair_tokens, choice.token_offsets, choice, peers)

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        """partial (T, d), of x's dtype, of ``arrived``, as it is: the experts' operators have added up."""
        return partial

    def overflow(self, arrived: Arrived, row_capacity: int) -> Tensor:
        """(1,) int32: the pairs of all ranks that a ``row_capacity`` on each leaves out in the call of ``arrived``."""
        here = self.num_experts // self.ranks
        ids = arrived.topk_experts.flatten() + self.group.rank() * here
        ranks = torch.where((ids >= 0) & (ids < self.num_experts), ids // here, self.ranks)
        pairs = torch.zeros(self.ranks + 1, dtype=torch.int32, device=ids.device)
        pairs.index_add_(0, ranks, torch.ones_like(ranks))
        made = (pairs[:-1] - row_capacity).clamp_min(0).sum(0, keepdim=True, dtype=torch.int32)
        if not in_backward():  # a checkpoint's second forward pass
            self._overflow += made
        return made

    def take_overflow(self, group: dist.ProcessGroup | None = None) -> int:
        """The pairs left out on all ranks, and on the ranks of ``group``, since it was last asked; waits for the device."""
        found = self._overflow.clone()
        self._overflow.zero_()
        if group is not None:
            found *= self.group.rank() == 0  # all ranks of a dispatcher have the same count
            dist.all_reduce(found, group=group)
        return int(found)

    def _check_tokens(self, x: Tensor, experts: Tensor) -> None:
        layout = self.layout
        if x.shape[1] != layout.d_model:
            raise ValueError(
                f"x: expected shape (T, {layout.d_model}), as the dispatcher's d_model, got {tuple(x.shape)}"
            )
        if len(x) > layout.max_tokens:
            raise ValueError(f"x: expected at most max_tokens={layout.max_tokens} tokens, got {len(x)}")
        most = min(layout.max_pairs, layout.max_tokens * experts.shape[1]) if experts.dim() == 2 else layout.max_pairs
        if experts.numel() > most or (experts.dim() == 2 and layout.max_tokens * experts.shape[1] > layout.max_pairs):
            got = tuple(experts.shape)
            raise ValueError(
                f"topk_experts: expected K with max_tokens K at most max_pairs={layout.max_pairs}, got {got}"
            )
        if x.device != self.device:
            raise ValueError(f"x: expected on {self.device} as the dispatcher is, got {x.device}")
        here, needs = self.num_experts // self.ranks, ("symmetric",)
        if self.device.type == "cuda" and (
            lacks := missing_for_kernels(x.device, x.dtype, here, layout.d_model, needs=needs)
        ):
            raise ValueError(f"x: expected what runs on the Hopper backend, which on a rank needs {lacks}")


def hosts_of(group: dist.ProcessGroup) -> set[str]:
    """The hosts of a group's ranks, by name and boot; all of them call this, and wait for each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # names repeat
    own = f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
    hosts = [own] * group.size()
    dist.all_gather_object(hosts, own, group=group)
    return {*hosts}


def check_overflow(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """The pairs that row capacities have left out on all ranks, in all layers of ``module``, since it was last asked.

    group: the ranks of several dispatchers, where experts are copied, as with a mesh (dp, ep): all of them call this, and their
    counts are summed. Default: each dispatcher's ranks.

    To be called before an optimizer's step. The count is the same on all ranks, so that all raise or none; it waits for the
    device. A forward pass that a checkpoint runs again counts once.

    Raises OverflowError where a dispatcher with overflow="raise" has left out any: then no rank's optimizer has stepped.
    TypeError or ValueError for an argument that does not fit, as a ``group`` without some of a dispatcher's ranks.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup that this rank is in, or None, got {type(group).__name__}")
    found = {id(d): d for each in module.modules() if isinstance(d := getattr(each, "dispatcher", None), Symmetric)}
    for dispatcher in found.values() if group is not None else ():
        ranks, among = map(dist.get_process_group_ranks, (dispatcher.group, group))
        if not {*ranks} <= {*among}:  # its count might be of a rank that is not asked
            raise ValueError(f"group: expected one with ranks {ranks}, of {dispatcher}, got ranks {among}")
    counts = {dispatcher: dispatcher.take_overflow(group) for dispatcher in found.values()}
    for dispatcher, pairs in counts.items():
        if pairs and dispatcher.overflow_is == "raise":
            raise OverflowError(
                f"row_capacity: expected a row for every pair, got {pairs} pairs without one on the ranks of {dispatcher}"
            )
    return sum(counts.values())
