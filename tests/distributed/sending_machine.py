"""Products that send rows while they multiply, of several ranks on the PTX machine, and the same products of rows that lie there.

Each rank's launches: up_forward, which brings x; down_backward_act, which brings dO; up_backward_act, behind which x comes again;
the sum over all ranks, which waits for that; and a kernel that reads the rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from blazeproto.dispatch import build_dispatch
from blazeproto.distributed.peer_memory import GROUPS, PROGRESS_BYTES, MemoryLayout, PeerMemory
from blazeproto.gemm import down_backward, linear, up
from blazeproto.gemm.sending import SENDING_RATE, TILE_RATE
from blazeproto.lab.target import Machine
from blazeproto.runtime import driver
from blazeproto.runtime.target import device_of
from ptxsim import Report
from tests.distributed.exchange_machine import COPY, bf16

HERE, BLOCKS, TOP_K, D, N = 3, 2, 2, 64, 32  # experts of a rank; blocks of an exchange's grid; widths
COPIERS, WARPS = 2, 12  # CTAs that copy their own rank's rows; warps of a CTA that move rows
NAN = 0x7FFF  # where no row has come
STEPS = 2 * 10**6
TILE = 2 * 128 * 256 * D / TILE_RATE  # seconds


class Sending:
    """One of so many ``tokens`` on each rank.

    ctas: that send.  sends: sendings before.  late: rounds of tiles without them.
    steps: the first so many of the three products; what follows comes with all three.
    """

    def __init__(
        self, tokens: Sequence[int], seed: int, ctas: int = 1, sends: int = 0, late: int = 0, steps: int = 3
    ) -> None:
        draw, self.tokens, self.ranks = np.random.default_rng(seed), tokens, len(tokens)
        most, experts, self.steps = max(tokens) + 1, HERE * self.ranks, steps
        self.layout = MemoryLayout(self.ranks, most, most * TOP_K, D)
        self.machine, self.ctas, self.sends, self.late = Machine(ctas + COPIERS, seed), ctas, sends, late
        self.ids = [np.array([draw.permutation(experts)[:TOP_K] for _ in range(n)]).reshape(n, TOP_K) for n in tokens]
        for of_rank in self.ids:
            of_rank[draw.random(of_rank.shape) < 0.2] = -1  # no expert
        normal = lambda *shape: bf16(draw.standard_normal(shape))  # noqa: E731
        self.given = {name: [normal(n, D) for n in tokens] for name in ("x", "d_out")}
        self.up_proj = [normal(HERE, 2 * N, D) for _ in tokens]
        self.down_proj = [normal(HERE, D, N) for _ in tokens]
        self.scores = [draw.random(self.ranks * most * TOP_K, np.float32) for _ in tokens]
        self.memory = [np.zeros(self.layout.size, np.uint8) for _ in tokens]
        for rank in range(self.ranks):
            self.section(rank, "rows", np.uint16)[:] = NAN
            counts = self.section(rank, "counts", np.uint32).reshape(self.ranks, GROUPS)
            counts[:], counts[rank] = sends * ctas * WARPS % 2**32, sends * 7 % 2**32
        self.dispatches = [self._dispatch(rank) for rank in range(self.ranks)]
        self.made: list[dict[str, np.ndarray]] = [{} for _ in tokens]
        self.bases = np.array([self.machine.address(one, f"rank {r}'s memory") for r, one in enumerate(self.memory)])

    def section(self, rank: int, name: str, dtype: Any) -> np.ndarray:
        begin, size = self.layout.sections[name]
        return self.memory[rank][begin : begin + size].view(dtype)

    def goes(self, rank: int, to: int) -> np.ndarray:
        """Whether each of a rank's tokens has an expert on rank ``to``."""
        return ((self.ids[rank] >= 0) & (self.ids[rank] // HERE == to)).any(1)

    def _dispatch(self, rank: int) -> Any:
        ids = np.full((self.ranks, self.layout.max_tokens, TOP_K), -1, np.int32)
        for other, of_rank in enumerate(self.ids):
            here = of_rank - rank * HERE
            ids[other, : len(of_rank)] = np.where((here >= 0) & (here < HERE), here, -1)
        return build_dispatch(ids.reshape(-1, TOP_K), HERE)

    def _line(self, rank: int) -> Any:
        """As sending.cuh has it: (token, slot), by the first group of the slot's rank that has an expert of the token."""
        slots = self.ranks - 1
        first = np.full((self.tokens[rank], slots), -1, np.int32)
        for token, slot in np.ndindex(*first.shape):
            here = self.ids[rank][token] - (rank + 1 + slot) % self.ranks * HERE
            here = here[(here >= 0) & (here < HERE)]
            group = int(here.min()).bit_length() if len(here) else 0  # the first groups are one expert long
            first[token, slot] = group * slots + slot if len(here) else -1
        return build_dispatch(first, GROUPS * slots)

    def rows(self, rank: int, name: str) -> np.ndarray:
        """Those that a rank's experts have, where they come; NaN elsewhere."""
        made = np.full((self.ranks, self.layout.max_tokens, D), NAN, np.uint16)
        for other, of_rank in enumerate(self.given[name]):
            made[other, : len(of_rank)][self.goes(other, rank)] = of_rank[self.goes(other, rank)]
        return made.reshape(-1, D)

    def products(self, rank: int, x: Any, d_out: Any, into: dict[str, np.ndarray], sendings: Sequence[Any]) -> None:
        dispatch, pairs = self.dispatches[rank], len(self.dispatches[rank].expert_pair_indices)
        widths = {"h": 2 * N, "act": N, "dh": 2 * N, "a_scaled": N, "dx_rows": D}
        into |= {name: self.machine.zeros((pairs, width), np.uint16) for name, width in widths.items()}
        into["d_scores"] = self.machine.zeros((pairs,), np.float32)
        shared = {"dispatch": dispatch, "transposed": False, "low": None, "config": None, "stream": None}
        options, shared = ("activation", "transposed", "config"), shared | {"activation": "swiglu", "bias": None} | into
        weights = {"up_proj": self.up_proj[rank], "down_proj": self.down_proj[rank]}
        calls = [
            (up.SPEC, partial(up.launch, sending=sendings[0]), {"x": x}),
            (
                down_backward.SPEC,
                partial(down_backward.launch, sending=sendings[1]),
                {"d_out": d_out, "scores": self.scores[rank], "workspace": None},
            ),
        ]
        for spec, launch, own in calls[: self.steps]:
            spec.run(launch, shared | weights | own, *options)
        if self.steps > 2:
            call = {"dh": into["dh"], "up_proj": self.up_proj[rank], "columns": None, "dx_rows": into["dx_rows"]}
            linear._checked_launch(
                linear._UP, shared | call, name="up_backward_act", transposed=True, sending=sendings[2]
            )

    def launch(self, rank: int) -> None:
        """A rank's launches."""
        address, words = self.machine.address, np.zeros(PROGRESS_BYTES // 4, np.uint32)
        words[4:6] = self.sends, self.sends * 7 % 2**32  # rows of its own, seven a sending
        progress, device = address(words, f"rank {rank}'s progress"), device_of(self.machine)
        places = address(self.bases, "bases"), progress, device, BLOCKS, 60.0, self.ctas
        end, line, n = PeerMemory(self.layout, rank, *places), self._line(rank), self.tokens[rank]
        lists = address(line.expert_pair_indices), address(line.expert_token_offsets)
        x, d_out = (address(self.given[name][rank]) for name in ("x", "d_out"))
        sendings = [end.sending(t, *lists, num_tokens=n, awaited=a) for t, a in ((x, True), (d_out, True), (x, False))]
        sendings = [each._replace(size=round(self.late * SENDING_RATE * TILE)) for each in sendings]
        rows = self.section(rank, "rows", np.uint16).reshape(-1, D)
        self.products(rank, rows, rows, self.made[rank], sendings)
        if self.steps < 3:
            return
        bits = [self.goes(rank, to).astype(np.int32) << to for to in range(self.ranks)]
        of_dx = address(self.made[rank]["dx_rows"]), 0, address(self.dispatches[rank].token_index_map), 0
        made = address(np.sum(bits, 0, dtype=np.int32)), address(self.machine.zeros((n, D), np.uint16))
        sizes = {"num_tokens": n, "top_k": TOP_K, "columns": range(D), "dropping": False, "stream": 0}
        driver.launch(*end.add_up(*of_dx, *made, **sizes))
        self.made[rank]["rows"] = kept = self.machine.zeros(rows.shape, np.uint16)
        driver.launch(COPY.handle(device), (1, 1), 64, 0, 0, (address(rows), address(kept), kept.nbytes // 16))

    def run(self) -> Report:
        """Raises what `Machine.together` does."""
        return self.machine.together([partial(self.launch, rank) for rank in range(self.ranks)], most=STEPS)

    def failures(self) -> list[str]:
        """Names of what differs from a product alone, of rows that lie there, and of rows that have not come, by rank."""
        wrong = []
        for rank in range(self.ranks):
            right: dict[str, np.ndarray] = {}
            x, d_out = self.rows(rank, "x"), self.rows(rank, "d_out")
            self.machine.together([partial(self.products, rank, x, d_out, right, (None,) * 3)], most=STEPS)
            if self.steps > 2:
                right["rows"], sent = x, x != NAN
                self.made[rank]["rows"][~sent] = NAN  # nobody reads the others
            wrong += [f"{name} of rank {rank}" for name in right if (self.made[rank][name] != right[name]).any()]
        return wrong
