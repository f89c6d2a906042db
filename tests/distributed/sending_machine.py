"""Products that send rows while they multiply, of several ranks on the PTX machine, and the same products of rows that lie there.

Each rank's launches: up_forward, which brings x; down_backward_act, which brings dO; up_backward_act, behind which x comes again;
a combine over all ranks, which waits for it; and a kernel that reads the rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from blazeproto.dispatch import build_dispatch
from blazeproto.distributed.peer_memory import GROUPS, PROGRESS_BYTES, MemoryLayout, PeerMemory
from blazeproto.gemm import down_backward, up
from blazeproto.gemm.linear import _UP, _checked_launch
from blazeproto.lab.target import Machine
from blazeproto.runtime import driver
from blazeproto.runtime.target import device_of
from ptxsim import Report
from tests.distributed.exchange_machine import COPY, bf16

HERE, BLOCKS, TOP_K, D, N = 3, 2, 2, 64, 32  # experts of a rank; blocks of an exchange's grid; widths
NAN = 0x7FFF


class Sending:
    """One of so many ``tokens`` on each rank.  ctas: that send.  sends: of the memory before."""

    def __init__(self, tokens: Sequence[int], seed: int, ctas: int = 1, sends: int = 0, patience: float = 60.0) -> None:
        draw, self.tokens, self.ranks = np.random.default_rng(seed), tokens, len(tokens)
        most, experts = max(tokens) + 1, HERE * self.ranks
        self.layout = MemoryLayout(self.ranks, most, most * TOP_K, D)
        self.machine, self.ctas, self.sends, self.patience = Machine(ctas + 2, seed), ctas, sends, patience
        ids = [
            np.array([draw.permutation(experts)[:TOP_K] for _ in range(n)], np.int32).reshape(n, TOP_K) for n in tokens
        ]
        for of_rank in ids:
            of_rank[draw.random(of_rank.shape) < 0.2] = -1
        self.ids = ids
        self.given = {name: [self._normal(draw, n, D) for n in tokens] for name in ("x", "d_out")}
        self.up_proj = [self._normal(draw, HERE, 2 * N, D) for _ in tokens]
        self.down_proj = [self._normal(draw, HERE, D, N) for _ in tokens]
        self.scores = [draw.random(self.ranks * most * TOP_K, np.float32) for _ in tokens]
        self.memory = [np.zeros(self.layout.size, np.uint8) for _ in tokens]
        for rank in range(self.ranks):
            self.section(rank, "rows", np.uint16)[:] = NAN
            counts = self.section(rank, "counts", np.uint32).reshape(self.ranks, GROUPS)
            counts[:], counts[rank] = 12 * sends * ctas, 12 * sends * 2  # two CTAs copy
        self.dispatches = [self._dispatch(rank) for rank in range(self.ranks)]
        self.made: list[dict[str, np.ndarray]] = [{} for _ in tokens]
        self.right: list[dict[str, np.ndarray]] = [{} for _ in tokens]
        self.bases = np.array([self.machine.address(one, f"rank {r}'s memory") for r, one in enumerate(self.memory)])

    @staticmethod
    def _normal(draw: np.random.Generator, *shape: int) -> np.ndarray:
        return bf16(draw.standard_normal(shape))

    def section(self, rank: int, name: str, dtype: Any) -> np.ndarray:
        begin, size = self.layout.sections[name]
        return self.memory[rank][begin : begin + size].view(dtype)

    def _dispatch(self, rank: int) -> Any:
        ids = np.full((self.ranks, self.layout.max_tokens, TOP_K), -1, np.int32)
        for other, of_rank in enumerate(self.ids):
            ids[other, : len(of_rank)] = of_rank - rank * HERE
        ids[(ids < 0) | (ids >= HERE)] = -1
        return build_dispatch(ids.reshape(-1, TOP_K), HERE)

    def _line(self, rank: int) -> Any:
        """By what sending.cuh says of it: (token, slot), by the first expert that the slot's rank has of the token."""
        slots = self.ranks - 1
        first = np.full((self.tokens[rank], slots), -1, np.int32)
        for token, slot in np.ndindex(*first.shape):
            here = self.ids[rank][token] - (rank + 1 + slot) % self.ranks * HERE
            here = here[(here >= 0) & (here < HERE) & (self.ids[rank][token] >= 0)]
            first[token, slot] = here.min() * slots + slot if len(here) else -1
        return build_dispatch(first, HERE * slots)

    def rows(self, rank: int, name: str) -> np.ndarray:
        """Those that come to a rank; NaN elsewhere."""
        most, made = self.layout.max_tokens, np.full((self.ranks, self.layout.max_tokens, D), NAN, np.uint16)
        for other, of_rank in enumerate(self.given[name]):
            goes = ((self.ids[other] // HERE == rank) & (self.ids[other] >= 0)).any(1)
            made[other, : len(of_rank)][goes] = of_rank[goes]
        return made.reshape(self.ranks * most, D)

    def products(self, rank: int, rows: Any, into: dict[str, np.ndarray], sendings: Sequence[tuple[int, ...]]) -> None:
        """The three products.  rows: of x and of dO."""
        machine, dispatch = self.machine, self.dispatches[rank]
        pairs = len(dispatch.expert_pair_indices)
        for name, shape in {
            "h": (pairs, 2 * N),
            "act": (pairs, N),
            "dh": (pairs, 2 * N),
            "a_scaled": (pairs, N),
            "dx": (pairs, D),
        }.items():
            into[name] = machine.zeros(shape, np.uint16)
        into["d_scores"] = machine.zeros((pairs,), np.float32)
        own = {"dispatch": dispatch, "transposed": False, "low": None, "config": None, "stream": None}
        call = own | {"x": rows[0], "up_proj": self.up_proj[rank], "bias": None, "activation": "swiglu"}
        call |= {name: into[name] for name in ("h", "act")}
        options = ("activation", "transposed", "config")
        up.SPEC.run(partial(up.launch, sending=sendings[0]), call, *options)
        call = own | {"d_out": rows[1], "down_proj": self.down_proj[rank], "h": into["h"], "scores": self.scores[rank]}
        call |= {"activation": "swiglu", "workspace": None} | {
            name: into[name] for name in ("dh", "a_scaled", "d_scores")
        }
        down_backward.SPEC.run(partial(down_backward.launch, sending=sendings[1]), call, *options)
        call = {
            "dh": into["dh"],
            "up_proj": self.up_proj[rank],
            "dispatch": dispatch,
            "columns": None,
            "dx_rows": into["dx"],
        }
        call |= {"config": None, "stream": None}
        _checked_launch(_UP, call, name="up_backward_act", transposed=True, sending=sendings[2])

    def launch(self, rank: int) -> None:
        """A rank's launches."""
        address = self.machine.address
        words = np.zeros(PROGRESS_BYTES // 4, np.uint32)
        words[4] = self.sends
        places = (
            address(self.bases, "bases"),
            address(words, f"rank {rank}'s progress"),
            device_of(self.machine),
            BLOCKS,
        )
        end = PeerMemory(self.layout, rank, *places, self.patience, self.ctas)
        line, given = self._line(rank), [self.given[name][rank] for name in ("x", "d_out")]
        lists = address(line.expert_pair_indices), address(line.expert_token_offsets)
        x, d_out = map(address, given)
        how = {"num_tokens": self.tokens[rank]}
        sendings = [end.sending(t, *lists, awaited=awaited, **how) for t, awaited in ((x, 1), (d_out, 1), (x, 0))]
        rows = self.section(rank, "rows", np.uint16).reshape(-1, D)
        self.products(rank, (rows, rows), self.made[rank], sendings)
        token_ranks = sum(
            ((self.ids[rank] // HERE == r) & (self.ids[rank] >= 0)).any(1).astype(np.int32) << r
            for r in range(self.ranks)
        )
        out = self.machine.zeros((self.tokens[rank], D), np.uint16)
        of_dx = (address(self.made[rank]["dx"]), 0, address(self.dispatches[rank].token_index_map), 0)
        sizes = {"num_tokens": self.tokens[rank], "top_k": TOP_K, "columns": range(D), "dropping": False, "stream": 0}
        driver.launch(*end.add_up(*of_dx, address(token_ranks.astype(np.int32)), address(out), **sizes))
        self.made[rank]["rows"] = kept = self.machine.zeros(rows.shape, np.uint16)
        driver.launch(
            COPY.handle(device_of(self.machine)), (1, 1), 64, 0, 0, (address(rows), address(kept), kept.nbytes // 16)
        )

    def run(self) -> Report:
        return self.machine.together([partial(self.launch, rank) for rank in range(self.ranks)], most=2 * 10**6)

    def failures(self) -> list[str]:
        """Names of what is not as it is alone, by rank."""
        wrong = []
        for rank in range(self.ranks):
            rows, right = [self.rows(rank, name) for name in ("x", "d_out")], self.right[rank]
            alone = lambda rank=rank, rows=rows, right=right: self.products(rank, rows, right, (None, None, None))  # noqa: E731
            self.machine.together([alone], most=2 * 10**6)
            right["rows"] = rows[0]
            sent = rows[0] != NAN
            for name, values in right.items():
                made = self.made[rank][name]
                # Rows of the second sending lie beside those of the first alone where both came.
                equal = np.array_equal(made[sent], values[sent]) if name == "rows" else np.array_equal(made, values)
                wrong += [] if equal else [f"{name} of rank {rank}"]
        return wrong
