"""What the threads of a block do together. The simulator has no warp intrinsics, so shared memory and barriers do it."""

from __future__ import annotations

from numba import cuda, int32


@cuda.jit(device=True, inline="always")
def inclusive_scan(scratch, thread, width, value):
    """Sum of ``value`` over the block's threads up to and with this one, for the first ``width`` threads.

    scratch: int32 shared memory, two places a thread. Every thread of the block calls; log2(width) + 1 barriers.
    The caller puts a barrier between this and its next use of ``scratch``.

        value       3  1  4  1  5        Hillis and Steele: each round adds what lies 1, 2, 4… to the left, reading one
        after 1     3  4  5  5  6        half of the scratch and writing the other, so a round needs one barrier.
        after 2     3  4  8  9 11
        after 4     3  4  8  9 14
    """
    half = int32(cuda.blockDim.x)
    read = int32(0)
    scratch[thread] = value
    cuda.syncthreads()
    distance = int32(1)
    while distance < width:
        if thread >= distance:
            value = int32(value + scratch[read + thread - distance])
        read = int32(half - read)
        scratch[read + thread] = value
        cuda.syncthreads()
        distance = int32(distance * 2)
    return value
