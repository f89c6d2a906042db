"""Solution of `stable_rank`."""

from __future__ import annotations

from typing import Any

from numba import cuda, int32


def stable_rank(experts: Any, ranks: Any) -> None:
    chunk = cuda.shared.array(64, int32)
    thread = cuda.threadIdx.x
    pair = cuda.blockIdx.x * cuda.blockDim.x + thread
    expert = -1
    if pair < len(experts):
        expert = experts[pair]
    chunk[thread] = expert
    cuda.syncthreads()  # outside of the branches: every thread of the block must reach it
    rank = 0
    for earlier in range(thread):
        if chunk[earlier] == expert:
            rank += 1
    if pair < len(experts):
        ranks[pair] = rank if expert >= 0 else -1
