"""Wrong solutions of the Numba exercises, each by one mistake that people make."""

from numba import cuda, int32


def racing(experts, counts):
    """Two threads read a count before either has written it."""
    for pair in range(cuda.threadIdx.x, len(experts), cuda.blockDim.x):
        if 0 <= experts[pair] < len(counts):
            counts[experts[pair]] += 1


def once_a_thread(experts, counts):
    """Pairs beyond the first block of threads are not counted."""
    pair = cuda.threadIdx.x
    if pair < len(experts) and 0 <= experts[pair] < len(counts):
        cuda.atomic.add(counts, experts[pair], 1)


def out_of_bounds(experts, counts):
    """Ids that are not here are counted beside the array."""
    for pair in range(cuda.threadIdx.x, len(experts), cuda.blockDim.x):
        cuda.atomic.add(counts, experts[pair], 1)


def itself_too(experts, ranks):
    """The first pair of an expert has rank 1."""
    pair = cuda.grid(1)
    if pair < len(experts):
        rank = 0
        for earlier in range(cuda.blockIdx.x * cuda.blockDim.x, pair + 1):
            if experts[earlier] == experts[pair]:
                rank += 1
        ranks[pair] = rank if experts[pair] >= 0 else -1


def within_the_warp(experts, ranks):
    """Earlier warps of the block are forgotten."""
    pair = cuda.grid(1)
    if pair < len(experts):
        rank = 0
        for earlier in range(pair // 32 * 32, pair):
            if experts[earlier] == experts[pair]:
                rank += 1
        ranks[pair] = rank if experts[pair] >= 0 else -1


def without_a_barrier(experts, ranks):
    """Threads read what others have not written yet."""
    chunk = cuda.shared.array(64, int32)
    pair = cuda.grid(1)
    if pair < len(experts):
        chunk[cuda.threadIdx.x] = experts[pair]
        rank = 0
        for earlier in range(cuda.threadIdx.x):
            if chunk[earlier] == chunk[cuda.threadIdx.x]:
                rank += 1
        ranks[pair] = rank if chunk[cuda.threadIdx.x] >= 0 else -1


def without_syncthreads(experts, ranks):
    """The solution but for its barrier: a thread reads what those before it may not have written."""
    chunk = cuda.shared.array(64, int32)
    pair = cuda.grid(1)
    expert = -1
    if pair < len(experts):
        expert = experts[pair]
    chunk[cuda.threadIdx.x] = expert
    rank = 0
    for earlier in range(cuda.threadIdx.x):
        if chunk[earlier] == expert:
            rank += 1
    if pair < len(experts):
        ranks[pair] = rank if expert >= 0 else -1


WRONG = {
    "expert_histogram": (racing, once_a_thread, out_of_bounds),
    "stable_rank": (itself_too, within_the_warp, without_a_barrier, without_syncthreads),
}
