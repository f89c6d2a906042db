"""The K best of many keys in one thread's registers: sorted lists, and nothing but `min` and `max`.

Keys come in eights. Eight are sorted, then merged into the list of the best so far, which is sorted too:

    best      9  7  6  4        max of a pair stays:      9  7  6  8      min of a pair is lost:  1  2  5  4
    eight     8  5  2  1        (9,1) (7,2) (6,5) (4,8)   it falls, then rises; ordering the pairs at
                                                          distance 2, then 1, sorts it:             9  8  7  6

That is Batcher's bitonic merge (Knuth, The Art of Computer Programming 3, 5.3.4) without its lower half. The keys' values
never decide what is executed, so threads of a warp never part, and ptxas makes each min and max one instruction.

The two best keys of each group of experts are kept likewise, with the keys as they are, so that their sum is exact but for one
rounding: DeepSeek-V3 §2.1.2 ranks groups by it.
"""

# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

from blazeproto.runtime.numba import cuda, float32, int32, uint32
from blazeproto.runtime.warp import bits_float, device, float_bits

EIGHT = 8  # keys


@device
def sortable(value):
    """An integer that orders as fp32 values do, above 0 for every number; -0 equals +0."""
    bits = float_bits(value + float32(0.0))
    negative = uint32(int32(bits) >> int32(31))  # all ones or none
    return uint32(bits ^ (negative | uint32(0x80000000)))


@device
def from_sortable(key):
    """The value that `sortable` made this of."""
    positive = uint32(int32(key) >> int32(31))
    return bits_float(uint32(key ^ (~positive | uint32(0x80000000))))


@device
def order(keys, i, j):
    """The larger to place i, the smaller to place j."""
    larger, smaller = max(keys[i], keys[j]), min(keys[i], keys[j])
    keys[i], keys[j] = larger, smaller


@device
def sort_eight(keys):
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


@device
def two_best(first, second, other_first, other_second):
    """The two largest of two pairs, in each of which the larger comes first."""
    return max(first, other_first), max(min(first, other_first), max(second, other_second))


def best_groups_of(num_groups: int, top_groups: int, size: int, lanes: int, per_lane: int, partner: Any) -> Any:
    """``best_groups(values, lane)``: a bit for each of a lane's values, whether it is of one of the token's ``top_groups`` best
    of ``num_groups`` groups.

    A group is ``size`` experts. Groups rank by the sum of their two largest values, ties to the lower group. Each group has a
    lane, which learns the group's sum and compares it with the other groups'.
    values: a lane has ``per_lane`` of the token's, at most 32, as topk_kernels.py spreads them.  partner: of `warp.group_of`.
    """
    unit = math.gcd(size, EIGHT)  # neighbours in a lane that are of one group, whichever lane it is
    units, steps = per_lane // unit, lanes.bit_length() - 1

    @device
    def best_groups(values, lane):
        groups = cuda.local.array(units, int32)  # registers, and so the next
        firsts = cuda.local.array(units, uint32)
        seconds = cuda.local.array(units, uint32)
        for u in range(units):
            groups[u] = int32((u * unit // EIGHT * lanes + lane) * EIGHT + u * unit % EIGHT) // size
            firsts[u], seconds[u] = sortable(values[u * unit]), uint32(0)
            for i in range(1, unit):
                firsts[u], seconds[u] = two_best(firsts[u], seconds[u], sortable(values[u * unit + i]), uint32(0))
        own = uint32(0)
        for g in range(num_groups):
            first, second = uint32(0), uint32(0)
            for u in range(units):
                inside = uint32(0xFFFFFFFF) if groups[u] == g else uint32(0)
                first, second = two_best(first, second, uint32(firsts[u] & inside), uint32(seconds[u] & inside))
            for step in range(steps):
                first, second = two_best(first, second, partner(first, 1 << step), partner(second, 1 << step))
            both = from_sortable(first)
            if size > 1:
                both += from_sortable(second)
            own = sortable(both) if lane == g else own
        better = int32(0)
        for distance in range(1, lanes):
            other = partner(own, distance)
            better += int32((other > own) | ((other == own) & (lane ^ distance < lane)))
        kept = uint32(better < top_groups) << uint32(lane)
        for step in range(steps):
            kept |= partner(kept, 1 << step)
        mine = uint32(0)
        for u in range(units):
            bits = uint32(((1 << unit) - 1) << (u * unit))
            mine |= bits if uint32(kept >> uint32(min(groups[u], num_groups - 1))) & uint32(1) else uint32(0)
        return mine

    return best_groups
