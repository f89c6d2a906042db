"""An exchange of several ranks on the PTX machine, one GPU each, and what it should bring, in NumPy.

Each rank's launches: share, send of bf16 rows, send of e4m3 rows with scales, add_up with scores, add_up without
them in two slices of columns, send_back. Behind what comes to a rank's memory a kernel reads it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blazeproto.distributed.exchanges import NOWHERE
from blazeproto.distributed.peer_memory import PROGRESS_BYTES, MemoryLayout, PeerMemory
from blazeproto.gemm.compile import Kernel
from blazeproto.lab.target import Machine
from blazeproto.runtime import driver
from blazeproto.runtime.target import device_of
from ptxsim import Report

HERE, BLOCKS = 3, 2  # experts of a rank, blocks of a grid
COPY = Kernel(str(Path(__file__).with_name("copy.cu")), "copy")
SECTIONS = {
    "experts": np.int32,
    "scores": np.float32,
    "pair_tokens": np.int32,
    "token_offsets": np.int32,
    "values": np.float32,
}


def bf16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest, of two the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Exchange:
    """One of so many ``tokens`` on each rank. The numbers that scores weigh are small, so that their sums are exact; those of the
    sums without scores are not, so that these tell the order.

    d: columns.  top_k: experts a token, or the most of them where they vary.  varying: whether they do.  capacities: rows that
    each rank has, of the pairs that arrive there; the pairs beyond have none.  patience: seconds, of which each is 10**9 of the
    machine's instructions.  epoch: of the exchange before.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seed: int,
        varying: bool = False,
        capacities: Sequence[int] | None = None,
        patience: float = 60.0,
        d: int = 16,
        top_k: int = 2,
        epoch: int = 0,
    ) -> None:
        draw, self.tokens, self.ranks, self.varying = np.random.default_rng(seed), tokens, len(tokens), varying
        most, K, D, experts, self.epoch = max(tokens) + 1, top_k, d, HERE * self.ranks, epoch
        self.layout = layout = MemoryLayout(self.ranks, most, most * K + 3, D)
        self.pairs_of_rank, self.top_k = layout.max_pairs if varying else most * K, 0 if varying else K
        self.machine = Machine(multiprocessors=1, seed=seed)
        self.memory = [np.zeros(layout.size, np.uint8) for _ in tokens]
        for rank in range(self.ranks):
            self.section(rank, "token_offsets", np.int32)[-1] = self.ranks * layout.max_pairs
            started, arrived = self.section(rank, "flags", np.uint32).reshape(2, -1)
            started[:], arrived[:] = epoch, epoch * BLOCKS % 2**32
            self.section(rank, "part_flags", np.uint32)[:] = epoch
            self.section(rank, "sums", np.uint16)[:] = 0xFFFF  # NaN: what nobody sends is not read
        self.counts = [draw.integers(0, K + 1, n) if varying else np.full(n, K) for n in tokens]
        ids = [[draw.permutation(experts)[:n] for n in counts] for counts in self.counts]
        self.ids = [np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32) for rows in ids]
        for of_rank in self.ids:
            of_rank[draw.random(len(of_rank)) < 0.2] = -1  # no expert
        self.given = [np.where((i < 0) & (draw.random(len(i)) < 0.5), experts, i).astype(np.int32) for i in self.ids]
        self.scores = [draw.choice(np.float32([0.5, 1, 2]), len(of_rank)) for of_rank in self.ids]
        self.x = [
            [(draw.integers(0, 2**16, (n, D), np.uint16),) for n in tokens]
        ]  # by turn and rank: rows, their scales
        self.x += [[(draw.integers(0, 2**8, (n, D), np.uint8), draw.random(n, np.float32)) for n in tokens]]
        self.y, self.dx, self.index_map, self.values, self.here = ([None] * self.ranks for _ in range(5))  # type: Any
        for rank in range(self.ranks):
            arrived = self.arrived_ids(rank)
            self.here[rank] = (arrived >= 0) & (arrived < HERE)
            rows = np.cumsum(self.here[rank]) - 1
            kept = self.here[rank] & (rows < (capacities[rank] if capacities else len(arrived)))
            self.index_map[rank] = np.where(kept, rows, -1).astype(np.int32)
            self.y[rank] = draw.integers(-8, 9, (len(arrived), D)).astype(np.float32)
            # Two that cancel leave the third or nothing, by the order.
            self.dx[rank] = bf16(draw.choice(np.float32([2**30, -(2**30), 1, 3]), (len(arrived), D)))
            self.values[rank] = draw.random(len(arrived), np.float32)
        self.dropping, self.patience = capacities is not None, patience
        self.bases = np.array([self.machine.address(one, f"rank {r}'s memory") for r, one in enumerate(self.memory)])
        self.token_ranks = [np.zeros(n, np.int32) for n in tokens]
        self.first_needed = [np.zeros((n, self.ranks - 1), np.int32) for n in tokens]
        self.out, self.sums = ([np.zeros((n, D), np.uint16) for n in tokens] for _ in range(2))
        self.seen: list[dict[str, np.ndarray]] = [{} for _ in tokens]

    def section(self, rank: int, name: str, dtype: Any) -> np.ndarray:
        begin, size = self.layout.sections[name]
        return self.memory[rank][begin : begin + size].view(dtype)

    # --- What should come --------------------------------------------------------------------------------------------------

    def arrived_ids(self, rank: int) -> np.ndarray:
        made = np.full((self.ranks, self.pairs_of_rank), NOWHERE, np.int32)
        for other, ids in enumerate(self.ids):
            made[other, : len(ids)] = np.where(ids >= 0, ids - rank * HERE, NOWHERE)
        return made.reshape(-1)

    def pairs(self, rank: int) -> list[list[int]]:
        """Numbers of the pairs of each of a rank's tokens."""
        ends = np.cumsum(self.counts[rank])
        return [list(range(end - count, end)) for end, count in zip(ends, self.counts[rank], strict=True)]

    def goes(self, rank: int, token: int) -> set[int]:
        return {int(self.ids[rank][pair]) // HERE for pair in self.pairs(rank)[token] if self.ids[rank][pair] >= 0}

    def failures(self) -> list[str]:
        """Names of what did not come as it should, by rank."""
        wrong = []
        for rank in range(self.ranks):
            for name, right in self.right(rank).items():
                own = {"out": self.out[rank], "sums": self.sums[rank], "first_needed": self.first_needed[rank]}
                got = own[name] if name in own else self.seen[rank][name][: right.size].reshape(right.shape)
                if not np.array_equal(got, right):
                    wrong.append(f"{name} of rank {rank}")
        return wrong

    def right(self, rank: int) -> dict[str, np.ndarray]:
        most, right = self.layout.max_tokens, {"experts": self.arrived_ids(rank)}
        scores = np.zeros((self.ranks, self.pairs_of_rank), np.float32)
        for other in range(self.ranks):
            scores[other, : len(self.ids[other])] = self.scores[other]
        right["scores"] = scores.reshape(-1)
        if self.varying:
            begins = [
                np.append(np.cumsum(counts) - counts, [counts.sum()] * (most - len(counts))) for counts in self.counts
            ]
            offsets = np.array([other * self.pairs_of_rank + begins[other] for other in range(self.ranks)])
            right["token_offsets"] = np.append(offsets, self.ranks * self.layout.max_pairs)
            owners = np.repeat(np.arange(self.ranks) * most, self.pairs_of_rank).reshape(self.ranks, -1)
            for other, counts in enumerate(self.counts):
                owners[other, : counts.sum()] += np.repeat(np.arange(len(counts)), counts)
            right["pair_tokens"] = owners.reshape(-1)
        D = self.layout.d_model
        rows, places = np.zeros(self.layout.sections["rows"][1], np.uint8), self.ranks * most
        values, scales = np.split(rows, [places * D])
        sections = [(rows.view(np.uint16),), (values, scales[: 4 * places].view(np.float32))]
        for turn, parts in enumerate(sections):
            for other, token in (
                (r, t) for r, n in enumerate(self.tokens) for t in range(n) if rank in self.goes(r, t)
            ):
                for part, given in zip(parts, self.x[turn][other], strict=True):
                    part.reshape(places, -1)[other * most + token] = given[token]
            right[f"rows {turn}"] = rows.copy()
        out, values = np.zeros((self.tokens[rank], D), np.float32), np.zeros(self.layout.max_pairs, np.float32)
        parts = np.zeros((self.ranks, self.tokens[rank], D), np.float32)
        for token, pairs in enumerate(self.pairs(rank)):
            for pair in pairs:
                place, owner = rank * self.pairs_of_rank + pair, int(self.ids[rank][pair]) // HERE
                if self.ids[rank][pair] >= 0:
                    values[pair] = self.values[owner][place]
                    row = self.index_map[owner][place]
                    out[token] += self.scores[rank][pair] * self.y[owner][row] if row >= 0 else 0
                    parts[owner, token] += wide(self.dx[owner][row]) if row >= 0 else 0
        sums = np.zeros_like(out)
        for part in parts:
            sums += wide(bf16(part))
        first = np.array([self.first_of(rank, token) for token in range(self.tokens[rank])], np.int32)
        right["first_needed"] = first.reshape(self.tokens[rank], self.ranks - 1)
        return right | {"out": bf16(out), "sums": bf16(sums), "values": values}

    def first_of(self, rank: int, token: int) -> list[int]:
        """By slot, as `exchange.cu` has it; the first groups are one expert long."""
        made, slots = [], self.ranks - 1
        for slot in range(slots):
            ids = [
                int(self.ids[rank][pair]) - (rank + 1 + slot) % self.ranks * HERE for pair in self.pairs(rank)[token]
            ]
            here = [each for each in ids if 0 <= each < HERE]
            made.append(min(here).bit_length() * slots + slot if here else -1)
        return made

    # --- Launches ----------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Raises what `Machine.together` does."""
        return self.machine.together([partial(self.launch, rank) for rank in range(self.ranks)], most=10**6)

    def _read(self, rank: int, section: str, name: str, dtype: Any) -> None:
        """The kernel behind an exchange."""
        begin, size = self.layout.sections[section]
        kept = self.machine.zeros((-(-size // 16) * 16 // np.dtype(dtype).itemsize,), dtype)
        self.seen[rank][name], address = kept, self.machine.address
        words = (address(self.memory[rank]) + begin, address(kept), kept.nbytes // 16)
        driver.launch(COPY.handle(device_of(self.machine)), (1, 1), 64, 0, 0, words)

    def launch(self, rank: int) -> None:
        """A rank's launches."""
        address, tokens, layout = self.machine.address, self.tokens[rank], self.layout
        words = np.zeros(PROGRESS_BYTES // 4, np.uint32)
        words[0] = self.epoch
        progress = address(words, f"rank {rank}'s progress")
        places = address(self.bases, "bases"), progress, device_of(self.machine), BLOCKS, self.patience
        end = PeerMemory(layout, rank, *places)
        counts, begin = self.counts[rank], layout.sections["token_offsets"][0]
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        of_pairs = np.repeat(np.arange(tokens, dtype=np.int32), counts)
        ids, scores, ranks = (address(array[rank]) for array in (self.given, self.scores, self.token_ranks))
        lists = (address(of_pairs), address(offsets)) if self.varying else (0, 0)
        sizes = {"num_tokens": tokens, "num_pairs": len(self.ids[rank]), "top_k": self.top_k, "experts_here": HERE}
        first = address(self.first_needed[rank])
        driver.launch(*end.share(ids, scores, *lists, ranks, first, **sizes, stream=0))
        for name in ("experts", "scores", "pair_tokens", "token_offsets"):
            self._read(rank, name, name, SECTIONS[name])
        for turn in range(2):
            rows, *scales = map(address, self.x[turn][rank])
            driver.launch(*end.send(rows, sum(scales), ranks, num_tokens=tokens, stream=0))
            self._read(rank, "rows", f"rows {turn}", np.uint8)
        D = self.layout.d_model
        slices = (range(8), range(8, D))
        scores = address(np.ascontiguousarray(self._arrived_scores()))
        calls = [(bf16(self.y[rank]), scores, self.out[rank], range(D))]
        calls += [(np.ascontiguousarray(self.dx[rank][:, one]), 0, self.sums[rank], one) for one in slices]
        for y, weights, out, columns in calls:
            added = end.add_up(
                *(address(y), weights, address(self.index_map[rank])),
                address(self.memory[rank]) + begin if self.varying else 0,
                *map(address, (self.token_ranks[rank], out)),
                num_tokens=tokens,
                top_k=self.top_k,
                columns=columns,
                dropping=self.dropping,
                stream=0,
            )
            driver.launch(*added)
        back = end.send_back(*map(address, (self.values[rank], self.here[rank])), top_k=self.top_k, stream=0)
        driver.launch(*back)
        self._read(rank, "values", "values", np.float32)

    def _arrived_scores(self) -> np.ndarray:
        made = np.zeros((self.ranks, self.pairs_of_rank), np.float32)
        for other, scores in enumerate(self.scores):
            made[other, : len(scores)] = scores
        return made
