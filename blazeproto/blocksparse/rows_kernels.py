"""The kernels of rows.py: a warp has a padded row, or a pair, and takes it in chunks of 16 bytes, one a lane at a time.

    row_pairs    5  2  -  -        rows    x[5 // K]  x[2 // K]  0  0        padded_gather
    pair_rows    …  -  1  …        d_scores   …  0  <d_out[3 // K], rows[1]>  …    score_grad

The way back, from rows to tokens, is gemm/cuda/combine.cu.
"""

# As in dispatch/tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def, import-untyped"
from typing import Any

from llvmlite import ir
from numba.cuda.extending import intrinsic

from blazeproto.router.logits_kernels import bf16_bits
from blazeproto.runtime.numba import cuda, float32, int64, types, uint32
from blazeproto.runtime.warp import WARP, bits_float, device, group_of, load_eight

_WORD, _WORDS = ir.IntType(32), ir.VectorType(ir.IntType(32), 4)
CHUNK = 8  # numbers in 16 bytes


@intrinsic
def load_words(typing_context, words, index):
    """Four neighbouring words, which begin at a multiple of 16 bytes, by one load."""

    def codegen(context, builder, signature, arguments):
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), _WORDS.as_pointer())
        four = builder.load(place, align=16)
        found = [builder.extract_element(four, _WORD(i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.uint32, 4)(words, types.int64), codegen


@intrinsic
def store_words(typing_context, words, index, a, b, c, d):
    """Stores four such words, by one store."""

    def codegen(context, builder, signature, arguments):
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), _WORDS.as_pointer())
        four = _WORDS(ir.Undefined)
        for i in range(4):
            four = builder.insert_element(four, arguments[2 + i], _WORD(i))
        builder.store(four, place, align=16)
        return context.get_dummy_value()

    return types.void(words, types.int64, *[types.uint32] * 4), codegen


@device
def weighed(word, weight):
    """Both bf16 numbers of a word times weight, each rounded."""
    low, high = bits_float(uint32(word << uint32(16))), bits_float(uint32(word & uint32(0xFFFF0000)))
    return uint32(uint32(bf16_bits(low * weight) >> uint32(16)) | bf16_bits(high * weight))


def padded_gather(threads: int, weighted: bool) -> Any:
    """Bf16 numbers are taken two at a time, as words.  top_k: 0 where it varies: then pair_tokens is read."""
    warps = threads // WARP

    def padded_gather(x, row_pairs, pair_tokens, scores, rows, num_rows, chunks, top_k):
        lane = int64(cuda.threadIdx.x & (WARP - 1))
        row = int64(cuda.blockIdx.x) * warps + (cuda.threadIdx.x >> 5)
        if row >= num_rows:
            return
        pair, token = int64(row_pairs[row]), int64(0)
        if pair >= 0:
            token = pair // top_k if top_k > 0 else int64(pair_tokens[pair])
        weight = scores[pair] if weighted and pair >= 0 else float32(1.0)
        for chunk in range(lane, chunks, WARP):
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if pair >= 0:
                a, b, c, d = load_words(x, 4 * (token * chunks + chunk))
                if weighted:
                    a, b, c, d = weighed(a, weight), weighed(b, weight), weighed(c, weight), weighed(d, weight)
            store_words(rows, 4 * (row * chunks + chunk), a, b, c, d)

    return padded_gather


def score_grad(threads: int) -> Any:
    """Products of bf16 numbers are exact in fp32; a lane adds its own in order, then the lanes' sums are added."""
    warps = threads // WARP
    total_of = group_of(WARP).total

    def score_grad(d_out, rows, pair_rows, pair_tokens, d_scores, num_pairs, chunks, top_k):
        lane = int64(cuda.threadIdx.x & (WARP - 1))
        pair = int64(cuda.blockIdx.x) * warps + (cuda.threadIdx.x >> 5)
        if pair >= num_pairs:
            return
        row, total = int64(pair_rows[pair]), float32(0.0)
        if row >= 0:
            token = pair // top_k if top_k > 0 else int64(pair_tokens[pair])
            for chunk in range(lane, chunks, WARP):
                left = load_eight(d_out, CHUNK * (token * chunks + chunk))
                right = load_eight(rows, CHUNK * (row * chunks + chunk))
                for i in range(CHUNK):
                    total += left[i] * right[i]
        total = total_of(total)
        if lane == 0:
            d_scores[pair] = total

    return score_grad
