"""Collective operations of the threads of a block, each helper in one form for the GPU and one for Numba's simulator.

The simulator has no warp intrinsics: there, a value goes through shared memory and barriers, so every thread of a
block must call, and call equally often. `inclusive_scan` needs none and is one function. Helpers are inlined by Numba: compiled
as functions of their own they would ask for a device.
"""

# mypy: disable-error-code="no-untyped-def, no-redef, import-untyped"
from typing import Any, NamedTuple

import numpy as np

from blazeproto.runtime.numba import cuda, float64, int32, uint32
from blazeproto.runtime.target import in_simulator

device = cuda.jit(device=True, inline="always")
WARP = 32
FULL = 0xFFFFFFFF  # all lanes of a warp


@device
def inclusive_scan(scratch, thread, threads, stride, value):
    """Sum of ``value`` over this thread and those before it in strides of ``stride``; and where in ``scratch`` all sums begin.

    scratch: int32 shared memory, two places a thread. ``threads`` is the block's size, and every thread calls;
    log2(threads / stride) + 1 barriers. The caller puts a barrier between this and its next use of ``scratch``.

        value       3  1  4  1  5        Hillis and Steele, here for stride 1: each round adds what lies 1, 2, 4… to the
        after 1     3  4  5  5  6        left, reading one half of the scratch and writing the other, so a round needs
        after 2     3  4  8  9 11        one barrier.
        after 4     3  4  8  9 14
    """
    read = int32(0)
    scratch[thread] = value
    cuda.syncthreads()
    distance = int32(stride)
    while distance < threads:
        if thread >= distance:
            value = int32(value + scratch[read + thread - distance])
        read = int32(threads - read)
        scratch[read + thread] = value
        cuda.syncthreads()
        distance = int32(distance * 2)
    return value, read


if in_simulator():

    @device
    def float_bits(value):
        return uint32(np.float32(value).view(np.uint32))

    @device
    def bits_float(bits):
        return np.uint32(bits).view(np.float32)

    @device
    def fast_exp2(value):
        with np.errstate(over="ignore", under="ignore"):
            return np.exp2(np.float32(value))

    @device
    def fast_reciprocal(value):
        return np.float32(1) / np.float32(value)

    @device
    def load_eight(values, index):
        eight = values[index : index + 8]
        return (eight.astype(np.uint32) << 16).view(np.float32) if eight.dtype == np.uint16 else eight

    @device
    def warp_barrier():
        cuda.syncthreads()

    @device
    def of_block(value):
        """Reduces one value of each thread of the block. Two barriers."""
        scratch = cuda.shared.array(int(cuda.blockDim.x), float64)  # which holds int32, uint32, fp32 and bool exactly
        scratch[cuda.threadIdx.x] = value
        cuda.syncthreads()
        values = [type(value)(one) for one in scratch]
        cuda.syncthreads()
        return values

    @device
    def block_scan(scratch, thread, threads, first, second):
        """For each of two values: the sum over the block's threads up to and with this one, and over all of them.

        scratch: int32 shared memory, two places a thread. ``threads`` is the block's size, a constant. One barrier on the GPU,
        after a scan in each warp's registers; the caller puts another before its next use of ``scratch``.
        """
        firsts, seconds = of_block(first), of_block(second)
        results = (firsts[: thread + 1], firsts, seconds[: thread + 1], seconds)
        return tuple(int32(sum(values)) for values in results)

    @device
    def ballot(scratch, thread, value):
        """A bit for each lane of the warp: whether it brings True. Two barriers here, none on the GPU."""
        first = thread // WARP * WARP
        return uint32(sum(int(bit) << lane for lane, bit in enumerate(of_block(value)[first : first + WARP])))

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    def _bitcast(result: Any, argument: Any, llvm_result: Any) -> Any:
        @intrinsic
        def cast(typing_context, value):
            def codegen(context, builder, signature, arguments):
                return builder.bitcast(arguments[0], llvm_result)

            return result(argument), codegen

        return cast

    float_bits = _bitcast(types.uint32, types.float32, ir.IntType(32))  # the bits of an fp32 value
    bits_float = _bitcast(types.float32, types.uint32, ir.FloatType())  # and back

    def _approximate(instruction: str) -> Any:
        """One instruction of the special-function unit: 2 ulp, denormals count as 0."""

        @intrinsic
        def approximate(typing_context, value):
            def codegen(context, builder, signature, arguments):
                kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
                return builder.call(ir.InlineAsm(kind, f"{instruction}.approx.ftz.f32 $0, $1;", "=f,f"), arguments)

            return types.float32(types.float32), codegen

        return approximate

    fast_exp2, fast_reciprocal = _approximate("ex2"), _approximate("rcp")

    @intrinsic
    def load_eight(typing_context, values, index):
        """Eight neighbouring fp32 values, or bf16 (as uint16) as fp32, that begin at a multiple of 16 bytes.

        One load of 16 bytes for bf16, two for fp32, where Numba alone would make eight.
        """
        fp32, words = ir.FloatType(), ir.VectorType(ir.IntType(32), 4)

        def codegen(context, builder, signature, arguments):
            half = values.dtype == types.uint16
            first = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), words.as_pointer())
            found = []
            for load in range(1 if half else 2):
                four = builder.load(builder.gep(first, [ir.IntType(32)(load)]), align=16)
                for i in range(4):
                    word = builder.extract_element(four, ir.IntType(32)(i))
                    if half:
                        found.append(builder.shl(word, word.type(16)))
                        found.append(builder.and_(word, word.type(0xFFFF0000)))
                    else:
                        found.append(word)
            return context.make_tuple(builder, signature.return_type, [builder.bitcast(word, fp32) for word in found])

        return types.UniTuple(types.float32, 8)(values, types.int64), codegen

    @device
    def warp_barrier():
        cuda.syncwarp()

    @device
    def block_scan(scratch, thread, threads, first, second):
        for step in range(5):
            first_left = cuda.shfl_up_sync(FULL, first, 1 << step)
            second_left = cuda.shfl_up_sync(FULL, second, 1 << step)
            if thread & 31 >= 1 << step:
                first = int32(first + first_left)
                second = int32(second + second_left)
        warps = threads // WARP
        if thread & 31 == 31:
            scratch[thread >> 5] = first
            scratch[warps + (thread >> 5)] = second
        cuda.syncthreads()
        first_total, second_total = int32(0), int32(0)
        for warp in range(warps):
            if warp == thread >> 5:
                first = int32(first + first_total)
                second = int32(second + second_total)
            first_total = int32(first_total + scratch[warp])
            second_total = int32(second_total + scratch[warps + warp])
        return first, first_total, second, second_total

    @device
    def ballot(scratch, thread, value):
        return uint32(cuda.ballot_sync(FULL, value))


class Group(NamedTuple):
    """Collective operations of groups of neighbouring threads, a power of two up to a warp. Each thread gets the result."""

    maximum: Any  # of uint32
    minimum: Any  # of uint32
    total: Any  # of float32
    any: Any  # of bool
    any_nearby: Any  # of bool, in the whole warp (in the simulator: the block): for loops that hold such calls
    first: Any  # the first lane's float32
    partner: Any  # (value, distance): the uint32 of lane ^ distance


def group_of(lanes: int) -> Group:
    """The functions for groups of ``lanes``."""
    steps = lanes.bit_length() - 1

    if in_simulator():

        def reduction(combine: Any) -> Any:
            @device
            def reduce(value):
                first = cuda.threadIdx.x // lanes * lanes
                return combine(of_block(value)[first : first + lanes])

            return reduce

        @device
        def any_nearby(value):
            return any(of_block(value))

        @device
        def partner(value, distance):
            return of_block(value)[cuda.threadIdx.x ^ distance]

        return Group(
            maximum=reduction(max),
            minimum=reduction(min),
            total=reduction(sum),
            any=reduction(any),
            any_nearby=any_nearby,
            first=reduction(lambda values: values[0]),
            partner=partner,
        )

    @device
    def partner(value, distance):
        return uint32(cuda.shfl_xor_sync(FULL, int32(value), distance))

    def reduction(combine: Any) -> Any:
        @device
        def reduce(value):
            for step in range(steps):
                value = combine(value, partner(value, 1 << step))
            return value

        return reduce

    @device
    def some(value):
        mine = ((1 << lanes) - 1) << (cuda.laneid & ~(lanes - 1))
        return (cuda.ballot_sync(FULL, value) & mine) != 0

    @device
    def total(value):
        for step in range(steps):
            value += cuda.shfl_xor_sync(FULL, value, 1 << step)
        return value

    @device
    def any_nearby(value):
        return cuda.any_sync(FULL, value) != 0

    @device
    def leading(value):
        return cuda.shfl_sync(FULL, value, cuda.laneid & ~(lanes - 1))

    return Group(
        maximum=reduction(max),
        minimum=reduction(min),
        total=total,
        any=some,
        any_nearby=any_nearby,
        first=leading,
        partner=partner,
    )
