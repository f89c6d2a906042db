"""The exchange between GPUs that see each other's memory (cuda/exchange.cu, cuda/add_up.cu): where what lies, and the launches.

Each rank has one piece of memory that all ranks store to, laid out alike on all:

    flags | flags of parts | ids | scores | pair_tokens, token_offsets | gradients of scores | rows | partial sums
            (P, parts)       (P, pairs of a rank)                        (pairs of a rank)     (P, T, d)  (P - 1, T, d)

P ranks; T tokens of a rank at the most. Rows and partial sums are the most of it: 2 (2 P - 1) T d bytes. All layers of a model
share it. Rows in e4m3 take half of their section: values (P, T, d), then scales (P, T) fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.sending import Sending
from blazeproto.gemm.tiles import BF16, CHUNK, E4M3

SOURCES = "../../distributed/cuda"  # seen from gemm/cuda, whose headers these kernels include
MAX_RANKS = 32  # meeting.cuh
THREADS = 256
BLOCKS = 4  # of a grid, a multiprocessor; as many as have registers at once
GROUP = 4  # pairs of a token whose rows are in flight together in add_up
PART = 4  # tokens between two flags of add_up
SENDERS = 2  # of this many blocks of add_up, one sends partial sums
SECTION = 256  # bytes that a section of the memory begins at a multiple of
FLAGS = 2 * MAX_RANKS * 4
PROGRESS_BYTES = 32  # meeting.cuh: Progress
SENDING_CTAS = 16  # of a product, which send rows before they multiply
GROUPS = 6  # of a rank's experts (sending.cuh)


@dataclass(frozen=True)
class MemoryLayout:
    """The offset of each section in a rank's memory, in bytes, and the total length.

    ranks: P.  max_tokens, max_pairs: of a rank.  d_model: d, a multiple of 8.
    """

    ranks: int
    max_tokens: int
    max_pairs: int
    d_model: int
    sections: dict[str, tuple[int, int]] = field(init=False)  # by name: begin, bytes
    size: int = field(init=False)

    def __post_init__(self) -> None:
        tokens, pairs, row = self.ranks * self.max_tokens, 4 * self.ranks * self.max_pairs, BF16.bytes * self.d_model
        sizes = {
            "flags": FLAGS,
            "part_flags": 4 * self.ranks * -(-self.max_tokens // PART),
            "counts": 4 * self.ranks * GROUPS,
            "experts": pairs,
            "scores": pairs,
            "pair_tokens": pairs,
            "token_offsets": 4 * (tokens + 1),
            "values": 4 * self.max_pairs,
            "rows": tokens * row,
            "sums": (self.ranks - 1) * self.max_tokens * row,
        }
        *begins, size = accumulate((-(-size // SECTION) * SECTION for size in sizes.values()), initial=0)
        object.__setattr__(self, "sections", dict(zip(sizes, zip(begins, sizes.values(), strict=True), strict=True)))
        object.__setattr__(self, "size", size)

    def at(self, name: str) -> int:
        return self.sections[name][0]


def kernel(entry: str, sources: str = SOURCES) -> Kernel:
    """ "share", "send" or "send_back" of exchange.cu. sources: the folder of the .cu, seen from gemm's."""
    return _kernel(f"{sources}/exchange.cu", entry, ())


def add_up_kernel(columns: int, top_k: int, has_scores: bool, sources: str = SOURCES) -> Kernel:
    """add_up.cu for this many columns, a multiple of 8, and top_k pairs a token (0 if they vary)."""
    lanes = min((256, 128, 64, 32), key=lambda lanes: -(-columns // CHUNK // lanes) * lanes)  # the most of the best
    group = min(top_k or GROUP, GROUP)
    sizes = {
        "LANES": lanes,
        "VARYING": int(not top_k),
        "GROUP": group,
        "HAS_SCORES": int(has_scores),
        "PART": PART,
        "SENDERS": SENDERS,
        "BLOCKS_PER_SM": BLOCKS,
    }
    return _kernel(f"{sources}/add_up.cu", "add_up", tuple(sizes.items()))


@cache
def _kernel(file: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(file, entry, {"THREADS": THREADS, **dict(defines)})


@dataclass(frozen=True)
class PeerMemory:
    """A rank's end of the exchange, by addresses. Its functions give the arguments of `driver.launch`.

    layout: of all ranks' memory.  rank: this one.  bases: address of int64 (P,), on the device: where each rank's memory begins.
    progress: address of `PROGRESS_BYTES` zeros that outlive all launches.  device: a CUDA ordinal, or a target's.
    blocks: of a grid; the same on all ranks.  patience: seconds that a kernel waits for another rank before it ends the program.
    sending_ctas: CTAs of a product that send; the same on all ranks.
    """

    layout: MemoryLayout
    rank: int
    bases: int
    progress: int
    device: int
    blocks: int
    patience: float
    sending_ctas: int = SENDING_CTAS

    @property
    def meeting(self) -> tuple[int, ...]:
        """As meeting.cuh has it."""
        return self.bases, self.progress, self.layout.ranks, self.rank, int(1e9 * self.patience)

    def launch(self, made: Kernel, stream: int, words: Sequence[int]) -> tuple[Any, ...]:
        return made.handle(self.device), (self.blocks, 1), THREADS, 0, stream, (*self.meeting, *words)

    def share(
        self,
        experts: int,
        scores: int,
        pair_tokens: int,
        token_offsets: int,
        token_ranks: int,
        first_needed: int = 0,
        *,
        num_tokens: int,
        num_pairs: int,
        top_k: int,
        experts_here: int,
        stream: int,
    ) -> tuple[Any, ...]:
        """Ids and scores to all ranks, and the ranks that each token goes to. If top_k is 0, the lists of tokens too."""
        arrays = (experts, scores, pair_tokens, token_offsets, token_ranks, first_needed)
        sizes = (num_tokens, num_pairs, self.layout.max_tokens, self.pairs_of_rank(top_k), top_k, experts_here)
        places = map(self.layout.at, ("experts", "scores", "pair_tokens", "token_offsets"))
        return self.launch(kernel("share"), stream, (*arrays, *sizes, *places))

    def send(self, rows: int, scales: int, token_ranks: int, *, num_tokens: int, stream: int) -> tuple[Any, ...]:
        """Rows of d to the ranks of ``token_ranks``: e4m3 with scales (num_tokens,), or, with scales 0, bf16."""
        row_bytes = (E4M3 if scales else BF16).bits * self.layout.d_model // 8
        words = (rows, scales, token_ranks, num_tokens, self.layout.max_tokens, row_bytes, self.layout.at("rows"))
        return self.launch(kernel("send"), stream, words)

    def sending(self, rows: int, line: int, begins: int, *, num_tokens: int, awaited: bool) -> Sending:
        """Rows of d, bf16, that a product sends while it multiplies (gemm/cuda/sending.cuh).

        line, begins: of the dispatch of `share`'s first_needed.  awaited: whether the product gathers what comes."""
        row_bytes, places = BF16.bytes * self.layout.d_model, map(self.layout.at, ("rows", "counts"))
        sizes = (num_tokens, row_bytes, self.layout.max_tokens, *places, self.blocks, int(awaited))
        words = (*self.meeting, rows, line, begins, *sizes, self.sending_ctas)
        others, experts = self.layout.ranks - 1, self.layout.max_pairs / self.layout.max_tokens  # of a token
        share = 1 - (others / self.layout.ranks) ** experts  # of tokens that go to a rank, if experts are drawn evenly
        return Sending(words, round(others * share * num_tokens * row_bytes))

    def send_back(self, values: int, here: int, *, top_k: int, stream: int) -> tuple[Any, ...]:
        """One number of each pair that arrived and has its expert here."""
        return self.launch(
            kernel("send_back"), stream, (values, here, self.pairs_of_rank(top_k), self.layout.at("values"))
        )

    def add_up(
        self,
        y: int,
        scores: int,
        token_index_map: int,
        token_offsets: int,
        token_ranks: int,
        out: int,
        *,
        num_tokens: int,
        top_k: int,
        columns: range,
        dropping: bool,
        stream: int,
    ) -> tuple[Any, ...]:
        """Partial sums to the tokens' ranks, and their sums to columns of out, (num_tokens, d). scores 0: none."""
        first, width = BF16.bytes * columns.start, self.layout.d_model
        arrays = (y, scores, token_index_map, token_offsets, token_ranks, out + first)
        sizes = (num_tokens, self.layout.max_tokens, top_k, len(columns), width, int(dropping))
        places = (self.layout.at("sums") + first, self.layout.at("part_flags"))
        return self.launch(add_up_kernel(len(columns), top_k, bool(scores)), stream, (*arrays, *sizes, *places))

    def pairs_of_rank(self, top_k: int) -> int:
        """From one rank's pairs to the next one's."""
        return self.layout.max_tokens * top_k or self.layout.max_pairs
