"""The steps before and after a router's products: NaN logits for broken tokens, and gradients split in two bf16 parts.

An fp32 number is the sum of two bf16 numbers but for 2^-16 of it, and tensor cores multiply bf16 numbers without an error. So

    logits = x W^T           x bf16;  W = high + low   →  x high^T + x low^T  --finish_logits-->  NaN throughout in a broken row
    dX     = dL W            dL = high + low           →  [high | low] [W; W]
    dW     = dL^T x                                    →  [high | low]^T x = (2 E, d)

where dL, the gradient of the logits, is split by `split_gradient`. For a bf16 weight on a Hopper GPU halve_kernels.py has what
comes before these gradients.

Floor: bytes. `finish_logits` reads T·E fp32 numbers; `split_gradient` reads as many and writes as many bf16 ones a part. At
T = 32768, E = 128: 17 MB, 4 us.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

from blazeproto.runtime.numba import cuda, float32, int32, int64, uint16, uint32
from blazeproto.runtime.warp import bits_float, device, float_bits, group_of


def finish_logits(threads: int, lanes: int, num_experts: int) -> Any:
    """logits (T, E) fp32, in place: a token with a NaN or infinite one gets NaN throughout; only such tokens are written."""
    per_lane, groups, shift = -(-num_experts // lanes), threads // lanes, lanes.bit_length() - 1
    any_of = group_of(lanes).any

    def finish_logits(logits, num_tokens):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & (lanes - 1))
        first = int64(cuda.blockIdx.x) * groups
        while first < num_tokens:
            token = int64(first + (thread >> shift))
            inside = token < num_tokens
            row = int64(token * num_experts)
            finite = float32(0.0)
            for i in range(per_lane):
                expert = int32(min(int32(i * lanes + lane), int32(num_experts - 1)))
                if inside:
                    finite += logits[row + expert] * float32(0.0)
            broken = any_of(finite != float32(0.0))
            if inside and broken:
                for i in range(per_lane):
                    expert = int32(i * lanes + lane)
                    if expert < num_experts:
                        logits[row + expert] = float32(math.nan)
            first = int64(first + int64(cuda.gridDim.x) * groups)

    return finish_logits


@device
def bf16_bits(value):
    """The nearest bf16 number, ties to even, as the upper half of an fp32 number; NaN stays NaN."""
    bits = float_bits(float32(value))
    odd = uint32(bits >> uint32(16)) & uint32(1)
    rounded = uint32((bits + uint32(0x7FFF) + odd) & uint32(0xFFFF0000))
    return rounded if value == value else uint32(0x7FFF0000)


def split_gradient(threads: int, num_experts: int, parts: int) -> Any:
    """split (T, parts, E) bf16 of d_logits (T, E) fp32: what is nearest to it, the rest, and for three parts the first again.

    A token whose logits (T, E) are NaN gets zeros. For an even E a thread takes two neighbours, whose bf16 parts fill a word.
    """
    pairs = num_experts % 2 == 0
    width = 2 if pairs else 1
    columns = num_experts // width

    def split_gradient(d_logits, logits, split, num_tokens):
        at = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        values = cuda.local.array(2, float32)  # registers, and so the next
        while at < num_tokens * columns:
            token, column = int64(at // columns), int32(at % columns)
            first = logits[token * num_experts]
            high, low = uint32(0), uint32(0)
            for i in range(width):
                values[i] = d_logits[at * width + i] if first == first else float32(0.0)
                nearest = bf16_bits(values[i])
                rest = bf16_bits(values[i] - bits_float(nearest))
                # the first of two neighbours is the lower half of a word
                high = uint32(high | (nearest if i == 1 else uint32(nearest >> uint32(16))))
                low = uint32(low | (rest if i == 1 else uint32(rest >> uint32(16))))
            for part in range(parts):
                bits = low if part == 1 else high
                place = int64((token * parts + part) * columns + column)
                split[place] = bits if pairs else uint16(bits)
            at = int64(at + int64(cuda.gridDim.x) * threads)

    return split_gradient
