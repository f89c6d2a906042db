"""Hash routing in one kernel: each token id to the K experts with the largest pseudo-random weights.

A warp has a token; lane l has experts l, l + 32, … A weight has 24 bits, and takes the number of the expert within its lane,
upside down, below: largest first, ties to the lower expert. K times the warp asks for its largest, and the lowest lane that has
it gives that up.

Floor: bytes, 8·T read and 4·T·K written: less than a launch takes. The work is integers, some 12 operations a (token, expert)
for the hash and 30 a choice: at T = 32768, E = 128, K = 8 about 8 million instructions of a warp, 9 us.
"""

# As in dispatch/tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from typing import Any

from blazeproto.router.kinds import GOLDEN
from blazeproto.runtime.numba import cuda, int32, int64, uint32
from blazeproto.runtime.warp import device, group_of

WARP = 32


@device
def mix(x):
    """A bijection of 32-bit words that scatters them; `choices.Hash` has the same in torch."""
    x = uint32((x ^ (x >> uint32(16))) * uint32(0x21F0AAAD))
    x = uint32((x ^ (x >> uint32(15))) * uint32(0x735A2D97))
    return uint32(x ^ (x >> uint32(15)))


def hash_route(threads: int, num_experts: int, top_k: int) -> Any:
    """experts (T, K) int32 of token_ids (T,) int64; start: a word that the seed decides. K <= 32, E <= 1024."""
    per_lane = -(-num_experts // WARP)  # at most 32: five bits below a weight's 24
    warps = threads // WARP
    maximum, minimum, *_ = group_of(WARP)

    def hash_route(token_ids, experts, start, num_tokens):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & 31)
        keys = cuda.local.array(per_lane, uint32)  # registers
        first = int64(cuda.blockIdx.x) * warps
        while first < num_tokens:
            token = min(first + (thread >> 5), num_tokens - 1)
            word = mix(uint32((token_ids[token] & 0xFFFFFFFF) + uint32(start)))
            for i in range(per_lane):
                expert = uint32(i * WARP + lane)
                weight = uint32(mix(uint32(word + uint32(GOLDEN) * expert)) >> uint32(8))
                key = uint32((weight << uint32(5)) | uint32(WARP - 1 - i))
                keys[i] = uint32(key + uint32(1)) if i * WARP + lane < num_experts else uint32(0)  # 0: there is none

            mine, best = int32(0), uint32(0)
            for i in range(per_lane):
                best = max(best, keys[i])
            for k in range(top_k):
                largest = maximum(best)
                winner = minimum(uint32(lane if best == largest else WARP))
                number = uint32(WARP - 1) - uint32((largest - uint32(1)) & uint32(WARP - 1))
                mine = int32(number * uint32(WARP) + winner) if lane == k else mine
                if uint32(lane) == winner:  # its next one; its keys differ
                    best = uint32(0)
                    for i in range(per_lane):
                        best = max(best, keys[i] if keys[i] < largest else uint32(0))
            if lane < top_k and first + (thread >> 5) < num_tokens:
                experts[token * top_k + lane] = mine
            first += int64(cuda.gridDim.x) * warps

    return hash_route
