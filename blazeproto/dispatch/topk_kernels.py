"""Top-k routing in one kernel: logits to the K best experts and their scores. And its backward.

One warp takes a token (fewer lanes, where E is small). Lane l holds the logits of experts l, l + 32, l + 64… in
registers, as integers that sort as the floats do, best first. Then K rounds of one question to all lanes:

    lane           0     1     2    …   31
    best         1.7   0.3   2.9  …   0.8      round 1: redux.max -> 2.9, of expert 2; lane 2 moves up
    second       0.9  -0.2   1.1  …   0.1      round 2: redux.max -> 1.7, of expert 0; lane 0 moves up
    …

`redux.sync` is one instruction where shuffles take ten. Numba has none, but inline PTX reaches it (warp.py), so this
is Numba.

The fast rounds put the expert's id, upside down, into the lowest bits of the integer (7 bits for E = 128), so that a
single number carries both and ties go to the lower id. Where two neighbours among the best K + 1 differ in no bit
above those, the order isn't certain: the warp then asks again with the whole number, and a redux.min for the lowest id
that has it. For normal fp32 logits that is one token in some hundreds; for bf16 never, since its lower 16 bits are
free.

Afterwards lane k holds choice k, reads its logit again (it is in the cache) and computes its score. A token with a NaN
or an infinite logit gets experts 0 … K-1 and NaN scores, and passes no gradient; no other token notices.

Floor: bytes. Forward T·E logits read, 8·T·K written; backward T·E read (softmax over all experts only), T·E and less
written. At T = 1 Mi, E = 128, K = 8 in fp32: 604 MB, 0.14 ms forward.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32

from blazeproto.dispatch.warp import (
    bits_float,
    device,
    fast_exp2,
    fast_reciprocal,
    float_bits,
    group_of,
    warp_barrier,
)

LOG2_E = math.log2(math.e)
TINY = 1e-20  # added to a sum of scores before dividing by it, as the router does
SOFTMAX_TOPK, TOPK_SOFTMAX, SIGMOID = "softmax_topk", "topk_softmax", "sigmoid"


def loader(half: bool) -> Any:
    """Reads an fp32 or bf16 (as uint16) value as fp32."""
    if half:

        @device
        def load(values, index):
            return bits_float(uint32(values[index]) << uint32(16))

    else:

        @device
        def load(values, index):
            return values[index]

    return load


def storer(half: bool) -> Any:
    """Writes fp32 to fp32 or bf16: to nearest, ties to even. Not for NaN."""
    if half:

        @device
        def store(values, index, value):
            bits = float_bits(float32(value))
            odd = (bits >> uint32(16)) & uint32(1)
            values[index] = uint16(uint32(bits + uint32(0x7FFF) + odd) >> uint32(16))

    else:

        @device
        def store(values, index, value):
            values[index] = value

    return store


@device
def sortable(value):
    """An integer that orders as fp32 values do, above 0 for every number; -0 equals +0."""
    bits = float_bits(float32(value + float32(0.0)))
    negative = uint32(int32(bits) >> int32(31))  # all ones or none
    return uint32(bits ^ uint32(negative | uint32(0x80000000)))


@device
def fast_sigmoid(value):
    return fast_reciprocal(float32(1.0) + fast_exp2(float32(value * float32(-LOG2_E))))


def topk_route(
    threads: int,
    lanes: int,
    num_experts: int,
    top_k: int,
    score: str,
    biased: bool,
    renormalize: bool,
    scale: float,
    half: bool,
) -> Any:
    """scores (T, K) fp32 and experts (T, K) int32 of logits (T, E), best first."""
    per_lane = -(-num_experts // lanes)
    depth = min(per_lane, top_k)  # a lane never needs more of its own
    groups, shift = threads // lanes, lanes.bit_length() - 1
    id_mask = (1 << (per_lane * lanes - 1).bit_length()) - 1
    exact = half and not biased and id_mask < 2**16  # bf16 leaves the lower half of a key free for the id
    maximum, minimum, total, any_of, any_nearby, leading, following = group_of(lanes, threads)
    load = loader(half)
    sum_all = score == SOFTMAX_TOPK and not renormalize
    sum_chosen = score == TOPK_SOFTMAX or renormalize

    @device
    def key_of(value, expert, bias):
        """What is ranked, as an integer; 0 for experts beyond E."""
        if biased:
            value = float32(fast_sigmoid(value) + bias[min(expert, num_experts - 1)])
        return sortable(value) if expert < num_experts else uint32(0)

    def topk_route(logits, bias, scores, experts, num_tokens, rounds):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & (lanes - 1))
        values = cuda.local.array(per_lane, float32)  # registers, and so the next
        keys = cuda.local.array(depth, uint32)
        whole_keys = cuda.local.array(depth, uint32)
        ids = cuda.local.array(depth, uint32)

        tokens = int32(num_tokens)
        first = int32(cuda.blockIdx.x * groups)  # the block's tokens: as many as it has groups
        while 0 <= first < tokens:  # below 0: past 2**31
            token = int32(min(int32(first + (thread >> shift)), int32(tokens - 1)))
            row = int64(token) * num_experts
            finite = float32(0.0)  # stays 0 unless a value is NaN or infinite
            for i in range(per_lane):
                expert = int32(i * lanes + lane)
                values[i] = load(logits, row + expert) if expert < num_experts else float32(0.0)
            for i in range(per_lane):
                finite += values[i] * float32(0.0)
            broken = any_of(finite != float32(0.0))

            # Fast: the id takes the key's lowest bits, upside down, so that lower ids are larger. One number to sort
            # by.
            for i in range(per_lane):
                expert = int32(i * lanes + lane)
                key = uint32(key_of(values[i], expert, bias) | uint32(id_mask)) ^ uint32(expert)
                for j in range(depth):
                    if j < i:
                        larger = keys[j] if keys[j] > key else key
                        key = key if keys[j] > key else keys[j]
                        keys[j] = larger
                    elif j == i:
                        keys[j] = key
            mine = uint32(0)  # lane k will hold choice k, and lane K the best that wasn't chosen
            for k in range(top_k + 1):
                best = maximum(keys[0])
                mine = best if lane == k else mine
                won = keys[0] == best
                for j in range(depth - 1):
                    keys[j] = keys[j + 1] if won else keys[j]
                keys[depth - 1] = uint32(0) if won else keys[depth - 1]
            choice = int32(uint32(mine & uint32(id_mask)) ^ uint32(id_mask))

            # Exact: where two neighbours differ at most in the bits that the id took, ask again with keys and ids
            # apart.
            if not exact:
                close = (mine ^ following(mine)) <= uint32(id_mask)
                if any_nearby(close and lane < top_k):
                    for i in range(per_lane):
                        expert = uint32(i * lanes + lane)
                        # Read again: this path's arrays may lie in local memory, those of the fast path must not.
                        value = load(logits, row + expert) if expert < num_experts else float32(0.0)
                        key = key_of(value, int32(expert), bias)
                        for j in range(depth):
                            if j < i:
                                # By id where equal, for what moved up over j - 1 sinks past equals of higher ids else.
                                sinks = (whole_keys[j] > key) | ((whole_keys[j] == key) & (ids[j] < expert))
                                better, worse = (whole_keys[j], key) if sinks else (key, whole_keys[j])
                                upper, lower = (ids[j], expert) if sinks else (expert, ids[j])
                                whole_keys[j], ids[j] = better, upper
                                key, expert = worse, lower
                            elif j == i:
                                whole_keys[j] = key
                                ids[j] = expert
                    for k in range(rounds):  # K, but unknown when compiling: this rare path stays a loop
                        best = maximum(whole_keys[0])
                        winner = minimum(ids[0] if whole_keys[0] == best else uint32(0xFFFFFFFF))
                        choice = int32(winner) if lane == k else choice
                        won = ids[0] == winner
                        for j in range(depth - 1):
                            whole_keys[j] = whole_keys[j + 1] if won else whole_keys[j]
                            ids[j] = ids[j + 1] if won else ids[j]
                        whole_keys[depth - 1] = uint32(0) if won else whole_keys[depth - 1]
                        # no winner's id, so that a lane whose logits are used up never wins again
                        ids[depth - 1] = uint32(0xFFFFFFFE) if won else ids[depth - 1]

            # Score: lane k reads the logit of choice k again; the best one bounds the exponentials.
            if broken or lane >= top_k:
                choice = min(lane, int32(top_k - 1))
            logit = load(logits, row + choice)
            if score == SIGMOID:
                result = float32(1.0) / (float32(1.0) + math.exp(-logit))
            else:
                top = leading(logit)
                result = math.exp(float32(logit - top))
                if sum_all:
                    exponentials = float32(0.0)
                    for i in range(per_lane):
                        term = fast_exp2(float32(values[i] * float32(LOG2_E) - top * float32(LOG2_E)))
                        exponentials += term if i * lanes + lane < num_experts else float32(0.0)
                    result = float32(result * fast_reciprocal(total(exponentials)))
            if sum_chosen:
                whole = float32(total(result if lane < top_k else float32(0.0)) + float32(TINY))
                result = float32(result * fast_reciprocal(whole))
            if lane < top_k and int32(first + (thread >> shift)) < tokens:
                at = int64(token) * top_k + lane
                experts[at] = choice
                scores[at] = float32(math.nan) if broken else float32(result * float32(scale))
            first = int32(first + cuda.gridDim.x * groups)

    return topk_route


def topk_route_backward(
    threads: int, lanes: int, num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, half: bool
) -> Any:
    """d_logits (T, E) from d_scores (T, K); the scores' sums are computed again from the logits.

    With g = scale·d_score and s = score/scale, in the order of the branches below:

        softmax over all, then top-k      d_logit[e] = p[e] (g[e] - Σ g p)         g is 0 where e isn't chosen
        softmax over the chosen           d_logit[e] = s[e] (g[e] - Σ g s)         so too the above, renormalised
        sigmoid σ                         d_logit[e] = σ (1 - σ) g[e]
        sigmoid, renormalised             d_logit[e] = σ (1 - σ) (g[e] - Σ g s) / Σ σ
    """
    per_lane = -(-num_experts // lanes)
    groups, shift = threads // lanes, lanes.bit_length() - 1
    group = group_of(lanes, threads)
    total, any_of, leading = group.total, group.any, group.first
    load, store = loader(half), storer(half)
    sum_all = score == SOFTMAX_TOPK and not renormalize

    def topk_route_backward(logits, experts, d_scores, d_logits, num_tokens):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & (lanes - 1))
        values = cuda.local.array(per_lane, float32)  # registers

        tokens = int32(num_tokens)
        first = int32(cuda.blockIdx.x * groups)
        while 0 <= first < tokens:
            token = int32(first + (thread >> shift))
            inside = token < tokens
            token = int32(min(token, int32(tokens - 1)))
            row = int64(token) * num_experts
            at = int64(token) * top_k + min(lane, int32(top_k - 1))
            mine = experts[at]
            gradient = float32(d_scores[at] * float32(scale)) if lane < top_k else float32(0.0)
            # The forward wrote valid ids; what didn't come from it must not reach beyond the row.
            mine = min(max(mine, int32(0)), int32(num_experts - 1))
            logit = load(logits, row + mine)

            # Every value: to know whether all are finite, and for the softmax over all.
            finite = float32(0.0)
            for i in range(per_lane):
                expert = int32(i * lanes + lane)
                values[i] = load(logits, row + expert) if expert < num_experts else logit
            for i in range(per_lane):
                finite += values[i] * float32(0.0)
            broken = any_of(finite != float32(0.0))

            if score == SIGMOID:
                sigma = float32(1.0) / (float32(1.0) + math.exp(-logit))
                slope = float32(sigma * (float32(1.0) - sigma))
                if renormalize:
                    whole = total(sigma if lane < top_k else float32(0.0)) + float32(TINY)
                    mean = total(float32(gradient * sigma)) / whole
                    mine_d = float32(slope * (gradient - mean) / whole)
                else:
                    mine_d = float32(slope * gradient)
            else:
                top = leading(logit)  # the first choice is the best
                share = math.exp(float32(logit - top))
                if sum_all:
                    exponentials = float32(0.0)
                    for i in range(per_lane):
                        values[i] = fast_exp2(float32(values[i] * float32(LOG2_E) - top * float32(LOG2_E)))
                        exponentials += values[i] if i * lanes + lane < num_experts else float32(0.0)
                    whole = total(exponentials)
                else:
                    whole = total(share if lane < top_k else float32(0.0))
                share = float32(share / whole)
                mean = total(float32(gradient * share))
                mine_d = float32(share * (gradient - mean))

            # First all experts as if not chosen, then the chosen ones over that.
            if inside:
                for i in range(per_lane):
                    expert = int32(i * lanes + lane)
                    if expert < num_experts:
                        other = float32(0.0)
                        if sum_all and not broken:
                            other = float32(-mean * (values[i] / whole))
                        store(d_logits, row + expert, other)
            warp_barrier()
            if inside and lane < top_k and not broken:
                store(d_logits, row + mine, mine_d)
            first = int32(first + cuda.gridDim.x * groups)
            warp_barrier()

    return topk_route_backward
