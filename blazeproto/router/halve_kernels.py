"""Before a bf16 router's gradients: rows as fp16 numbers times powers of two, for products of one pass (gemm/logits.py).

Floor: bytes. dL is read, 4 bytes a number, and 2 are written: at T = 32768, E = 128, 25 MB, 6 us. The weight's are fewer.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def, import-untyped"
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from blazeproto.router.best import EIGHT
from blazeproto.runtime.numba import cuda, float32, int32, int64, uint32
from blazeproto.runtime.warp import bits_float, float_bits, group_of, load_eight


@intrinsic
def fp16_bits(typing_context, value):
    """The nearest fp16 number's, of an fp32 one."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [ir.FloatType()])
        return builder.call(ir.InlineAsm(kind, "cvt.rn.f16x2.f32 $0, 0f00000000, $1;", "=r,f"), arguments)

    return types.uint32(types.float32), codegen


# Of the largest number of a row: below these it has the scale that such an exponent has. A weight's scales multiply gradients.
LEAST_EXPONENT = {True: 15, False: 117}


def halve_rows(threads: int, lanes: int, columns: int, gradient: bool) -> Any:
    """made (R, columns) fp16 and scales (R,) fp32, powers of two: rows (R, columns) are made times scales, but for 2^-12 of a
    number and 2^-39 of a row's largest. columns is a multiple of 8, and rows and factors lie at multiples of 16 bytes.

    gradient: rows are fp32, and times factors (columns,) first; where logits (R, columns) are NaN, and from R to the next
    multiple of 64, scales and what is made are 0. Else rows are a weight's, bf16.
    """
    groups, shift, least = threads // lanes, lanes.bit_length() - 1, LEAST_EXPONENT[gradient]
    maximum, rounds, ones = group_of(lanes).maximum, -(-columns // (EIGHT * lanes)), (float32(1.0),) * EIGHT

    def halve_rows(rows, logits, factors, made, scales, num_rows):
        lane = int32(cuda.threadIdx.x & (lanes - 1))
        row, padded = int64(cuda.blockIdx.x) * groups + (cuda.threadIdx.x >> shift), num_rows + (-num_rows & 63)
        while row - (cuda.threadIdx.x >> shift) < padded:
            begin = int64(min(row, num_rows - 1) * columns)
            taken = row < num_rows and (not gradient or logits[begin] == logits[begin])
            largest = uint32(0)
            for i in range(rounds):
                column = int32(min(EIGHT * (i * lanes + lane), int32(columns - EIGHT)))
                eight, by = load_eight(rows, begin + column), load_eight(factors, column) if gradient else ones
                for j in range(EIGHT):
                    magnitude = uint32(float_bits(float32(eight[j] * by[j])) & uint32(0x7FFFFFFF))
                    largest = max(largest, magnitude if taken and magnitude < uint32(0x7F800000) else uint32(0))
            largest = uint32(maximum(largest))
            exponent = uint32(max(uint32(largest >> uint32(23)), uint32(least)))
            if lane == 0 and row < (padded if gradient else num_rows):
                scale = bits_float((exponent - uint32(14)) << uint32(23))
                scales[row] = scale if not gradient or largest > 0 else float32(0.0)
            raised = bits_float((uint32(268) - exponent) << uint32(23))
            for i in range(rounds):
                column = int32(EIGHT * (i * lanes + lane))
                if row < num_rows and column < columns:
                    eight, by = load_eight(rows, begin + column), load_eight(factors, column) if gradient else ones
                    for j in range(0, EIGHT, 2):
                        low = fp16_bits(float32(eight[j] * by[j]) * raised)
                        high = fp16_bits(float32(eight[j + 1] * by[j + 1]) * raised)
                        word = uint32(low | high << uint32(16))
                        made[(begin + column + j) >> 1] = word if taken else uint32(0)
            row = int64(row + int64(cuda.gridDim.x) * groups)

    return halve_rows
