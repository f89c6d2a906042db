"""``row_capacity``: a dispatch of at most R rows. One small kernel cuts off what a method wrote.

For R = 4, the example of §4.1:

    expert_token_offsets    0 3 5 7 10              0 3 4 4 4               at most R
    token_index_map         5 7  0 3   1 8 …        -1 -1  0 3   1 -1 …     -1 for a pair whose row is R or beyond
    expert_pair_indices     2 4 8 3 6 0 7 1 5 9     2 4 8 3                 the first R, copied
    overflow                                        6                       rows that are not there

Bytes: 4 of token_index_map read a pair, and written where it changes; 8 a row that stays.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from collections.abc import Sequence
from typing import Any, NamedTuple

from blazeproto.runtime.memory import part
from blazeproto.runtime.numba import cuda, int64
from blazeproto.runtime.numba_kernel import NumbaKernel

THREADS = 256


def limit_rows(threads: int) -> Any:
    """A thread has at most one pair, one row and one expert."""

    def limit_rows(
        all_pairs,
        expert_pair_indices,
        expert_token_offsets,
        token_index_map,
        overflow,
        num_pairs,
        num_experts,
        capacity,
    ):
        index = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if index < num_pairs and token_index_map[index] >= capacity:
            token_index_map[index] = -1
        if index < capacity:
            expert_pair_indices[index] = all_pairs[index]
        if index <= num_experts:
            row = expert_token_offsets[index]
            expert_token_offsets[index] = min(row, capacity)
            if index == num_experts:
                overflow[0] = max(row - capacity, 0)

    return limit_rows


KERNEL = NumbaKernel(limit_rows, "int32* int32* int32* int32* int32* int64 int64 int64", threads=THREADS)


class Limited(NamedTuple):
    """A method (build.py) for a dispatch of at most ``capacity`` rows."""

    method: Any
    capacity: int

    def workspace_bytes(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """The method's, behind a list of all pairs."""
        needed: int = self.method.workspace_bytes(num_tokens, top_k, num_experts)
        return 4 * num_tokens * top_k + needed

    def kernels(self, num_tokens: int, top_k: int, num_experts: int, ids: str) -> tuple[NumbaKernel, ...]:
        """The method's, then the kernel."""
        return (*self.method.kernels(num_tokens, top_k, num_experts, ids), KERNEL)

    def run(
        self,
        ids: Any,
        lists: Sequence[Any],
        workspace: Any,
        num_tokens: int,
        top_k: int,
        num_experts: int,
        device: int,
        stream: int,
    ) -> None:
        """The method's run, then the kernel. In ``lists``, expert_pair_indices has ``capacity`` entries, at most a pair each."""
        *lists, overflow = lists
        num_pairs = num_tokens * top_k
        all_pairs = part(workspace, 0, num_pairs, "int32")
        rest = part(workspace, 4 * num_pairs, self.method.workspace_bytes(num_tokens, top_k, num_experts), "uint8")
        self.method.run(ids, [all_pairs, *lists[1:]], rest, num_tokens, top_k, num_experts, device, stream)
        blocks, sizes = -(-max(num_pairs, num_experts + 1) // THREADS), (num_pairs, num_experts, self.capacity)
        KERNEL.launch(device, stream, blocks, 0, all_pairs, *lists[:3], overflow, *sizes)
