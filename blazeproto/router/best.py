"""The K best of many keys in one thread's registers: sorted lists, and nothing but `min` and `max`.

Keys come in groups of eight. A group is sorted, then merged into the list of the best so far, which is sorted too:

    best      9  7  6  4        max of a pair stays:      9  7  6  8      min of a pair is lost:  1  2  5  4
    group     8  5  2  1        (9,1) (7,2) (6,5) (4,8)   it falls, then rises; ordering the pairs at
                                                          distance 2, then 1, sorts it:             9  8  7  6

That is Batcher's bitonic merge (Knuth, The Art of Computer Programming 3, 5.3.4) without its lower half. What the keys
are never decides what is executed, so threads of a warp never part, and ptxas makes each min and max one instruction.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

from blazeproto.runtime.numba import uint32
from blazeproto.runtime.warp import device

GROUP = 8  # keys


@device
def order(keys, i, j):
    """The larger to place i, the smaller to place j."""
    larger, smaller = max(keys[i], keys[j]), min(keys[i], keys[j])
    keys[i], keys[j] = larger, smaller


@device
def sort_group(keys):
    """Eight keys, largest first, by Batcher's odd-even merge sort (Knuth 3, 5.3.4): pairs, merged to fours, merged to eight.

    19 pairs are ordered, the fewest that can do.
    """
    order(keys, 0, 1)
    order(keys, 2, 3)
    order(keys, 4, 5)
    order(keys, 6, 7)

    order(keys, 0, 2)
    order(keys, 1, 3)
    order(keys, 4, 6)
    order(keys, 5, 7)
    order(keys, 1, 2)
    order(keys, 5, 6)

    order(keys, 0, 4)
    order(keys, 1, 5)
    order(keys, 2, 6)
    order(keys, 3, 7)
    order(keys, 2, 4)
    order(keys, 3, 5)
    order(keys, 1, 2)
    order(keys, 3, 4)
    order(keys, 5, 6)


def merge_of(size: int, used: int) -> Any:
    """``merge(best, keys, count)`` for a list of ``size`` keys, a power of two, of which ``used`` are wanted: see above.

    Both sorted; ``count`` of the keys, a constant, are looked at. The places after the ``used`` ones are 0 before and
    after, which spares the pairs that only they would need. Returns the largest key that ``best`` lost to ``keys``, or 0.
    """
    rounds = size.bit_length() - 1

    @device
    def merge(best, keys, count):
        lost = uint32(0)
        for i in range(count):
            lost = max(lost, min(best[size - 1 - i], keys[i]))
            best[size - 1 - i] = max(best[size - 1 - i], keys[i])
        for step in range(rounds):
            distance = size >> (step + 1)
            for i in range(size):
                if i & distance == 0:
                    order(best, i, i + distance)
        for i in range(used, size):
            best[i] = uint32(0)
        return lost

    return merge
