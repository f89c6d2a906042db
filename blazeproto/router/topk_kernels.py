"""Top-k routing in one kernel: logits to the K best experts and their scores. And its backward.

A few lanes share a token, up to 32 experts each (E = 128: four lanes, so a warp takes eight tokens). A lane reads eight
neighbouring logits at once, and makes integers of them that sort as the floats do:

    lane 0                 lane 1                 lane 2                 lane 3
    experts 0 … 7          8 … 15                 16 … 23                24 … 31        sorted (best.py)
    experts 32 … 39        40 … 47                48 … 55                56 … 63        sorted, merged into the list
    …
    its K best             its K best             its K best             its K best
         └─────── merge ────────┘                      └─────── merge ────────┘         over shuffles: now both of a
                └────────────────────── merge ──────────────────────┘                   pair, now all hold the same K

An integer carries the expert's id, upside down, in its lowest bits (7 for E = 128), so that only one number must be
sorted, and ties go to the lower id. If two neighbours among the best K + 1 differ in no bit above those, the order
isn't certain: the warp then asks again, for each choice that isn't, which whole number comes after the one before. For
normal fp32 logits that is one token in 1700 (E = 128, K = 8); for bf16 never, since its lower 16 bits are free.

With groups (DeepSeek-V3 §2.1.2) the best of them are found first, of the values as they are, and an expert of another group
counts as one beyond E.

Afterwards the lanes share the K choices: each reads its logits again (they are in the cache) and computes their scores.
A token with a NaN or an infinite logit gets experts 0 … K-1 and NaN scores, and passes no gradient; no other token
notices.

All of it is Numba's, but for two things that warp.py asks LLVM for: loads of 16 bytes and the special-function unit.

Floor: bytes. Forward T·E logits read, 8·T·K written; backward T·E read (softmax over all experts only), T·E and less
written. At T = 1 Mi, E = 128, K = 8 in fp32: 604 MB, 0.14 ms forward.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

from blazeproto.router.best import EIGHT, best_groups_of, from_sortable, merge_of, sort_eight, sortable
from blazeproto.router.scores import LOG2_E, SCORES, sums_to_one
from blazeproto.runtime.numba import cuda, float32, int32, int64, uint16, uint32
from blazeproto.runtime.warp import (
    bits_float,
    device,
    fast_exp2,
    fast_reciprocal,
    float_bits,
    group_of,
    load_eight,
    warp_barrier,
)


def loader(half: bool) -> Any:
    """Reads an fp32 or bf16 (as uint16) value as fp32."""

    @device
    def load(values, index):
        return bits_float(uint32(values[index]) << uint32(16)) if half else values[index]

    return load


def storer(half: bool) -> Any:
    """Writes fp32 to fp32 or bf16: to nearest, ties to even. Not for NaN."""

    @device
    def store(values, index, value):
        if half:
            bits = float_bits(float32(value))
            odd = (bits >> uint32(16)) & uint32(1)
            values[index] = uint16(uint32(bits + uint32(0x7FFF) + odd) >> uint32(16))
        else:
            values[index] = value

    return store


@device
def depth_of(value):
    """How far a logit lies below 0, as an integer that orders as the depth does."""
    return float_bits(abs(min(float32(value), float32(0.0))))


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
    aligned: bool,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Any:
    """scores (T, K) fp32 and experts (T, K) int32 of logits (T, E), best first.

    aligned: rows of logits begin at multiples of 16 bytes and hold whole eights.
    """
    eights = -(-num_experts // (lanes * EIGHT))  # a lane's
    per_lane = eights * EIGHT
    size = 1 << (top_k - 1).bit_length()  # of the lists of best keys,
    used = min(top_k + 1, size)  # and how many are wanted: K, and one more to know whether the last of them is certain
    slots = -(-top_k // lanes)  # a lane's choices, when they are shared
    tokens_per_block, shift = threads // lanes, lanes.bit_length() - 1
    id_mask = (1 << (eights * lanes * EIGHT - 1).bit_length()) - 1
    grouped = num_groups > 1
    by_value = biased or (grouped and SCORES[score].elementwise)  # experts are ranked, not by logit
    certain = half and not by_value and id_mask < 2**16  # bf16 leaves the lower half of a key free for the id
    maximum, minimum, total, any_of, any_nearby, leading, partner = group_of(lanes)
    load, merge = loader(half), merge_of(size, used)
    best_groups = best_groups_of(num_groups, top_groups, num_experts // num_groups, lanes, per_lane, partner)
    elementwise, sum_chosen = SCORES[score].elementwise, sums_to_one(score, renormalize)
    sum_all = not (elementwise or sum_chosen)
    fast_value, _, fast_scaled, *_ = SCORES[score].on_device()

    @device
    def ranked(value, expert, bias):
        """The number by which experts are chosen."""
        number = fast_value(value) if by_value else value
        return number + bias[min(expert, num_experts - 1)] if biased else number

    @device
    def key_of(number, expert):
        """That as an integer; 0 for experts beyond E."""
        return sortable(number) if expert < num_experts else uint32(0)

    @device
    def place_key(number, expert, place, kept):
        """The same for one of a lane's places, of which a bit says whether its group is ``kept``: else 0."""
        key = key_of(number, expert)
        if grouped:
            key = key if uint32(kept >> uint32(place)) & uint32(1) else uint32(0)
        return key

    @device
    def id_of(key):
        return int32(uint32(key & uint32(id_mask)) ^ uint32(id_mask))

    def topk_route(logits, bias, scores, experts, num_tokens):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & (lanes - 1))
        values = cuda.local.array(per_lane, float32)  # registers, and so the next
        keys = cuda.local.array(EIGHT, uint32)
        best = cuda.local.array(size, uint32)
        theirs = cuda.local.array(size, uint32)
        choices = cuda.local.array(slots, int32)
        results = cuda.local.array(slots, float32)

        tokens = int32(num_tokens)
        first = int32(cuda.blockIdx.x * tokens_per_block)
        while 0 <= first < tokens:  # below 0: past 2**31
            token = int32(min(int32(first + (thread >> shift)), int32(tokens - 1)))
            row = int64(token) * num_experts
            for j in range(eights):
                expert = int32((j * lanes + lane) * EIGHT)
                if aligned:
                    eight = load_eight(logits, row + min(expert, int32(num_experts - EIGHT)))
                    for i in range(EIGHT):
                        values[j * EIGHT + i] = eight[i] if expert < num_experts else float32(0.0)
                else:
                    for i in range(EIGHT):
                        inside = expert + i < num_experts
                        values[j * EIGHT + i] = load(logits, row + expert + i) if inside else float32(0.0)
            finite = float32(0.0)  # stays 0 unless a value is NaN or infinite
            for i in range(per_lane):
                finite += values[i] * float32(0.0)
            broken = any_of(finite != float32(0.0))
            if by_value:  # here, for with this in its body LLVM wouldn't unroll the next loop
                for i in range(per_lane):
                    values[i] = ranked(values[i], (i // EIGHT * lanes + lane) * EIGHT + i % EIGHT, bias)
            kept = uint32(0)
            if grouped:
                kept = best_groups(values, lane)

            # Fast: the id takes the key's lowest bits, upside down, so that lower ids are larger. One number to sort
            # by.
            unchosen = uint32(0)  # the best key that a full list lost
            for i in range(size):
                best[i] = uint32(0)
            for j in range(eights):
                for i in range(EIGHT):
                    expert = int32((j * lanes + lane) * EIGHT + i)
                    key = place_key(values[j * EIGHT + i], expert, j * EIGHT + i, kept)
                    keys[i] = uint32(key | uint32(id_mask)) ^ uint32(expert)
                sort_eight(keys)
                if j == 0:
                    for i in range(min(used, EIGHT)):
                        best[i] = keys[i]
                else:
                    unchosen = max(unchosen, merge(best, keys, min(size, EIGHT)))
                if size < EIGHT:
                    unchosen = max(unchosen, keys[min(size, EIGHT - 1)])
            for step in range(shift):
                for i in range(size):
                    theirs[i] = partner(best[i], 1 << step)
                lost = merge(best, theirs, size)
                unchosen = max(max(unchosen, partner(unchosen, 1 << step)), lost)

            # Where two neighbours differ at most in the bits that the id took, ask for each of them again: for the best
            # whole number, and the lowest id that has it, after the choice before it. The row is read again, so that
            # this rare path takes no registers.
            if not certain:
                unsure = uint32(0)  # choices, a bit each
                for k in range(top_k):
                    following = best[min(k + 1, size - 1)] if k + 1 < size else unchosen
                    unsure |= uint32(3 << k) if uint32(best[k] ^ following) <= uint32(id_mask) else uint32(0)
                unsure = uint32(0) if broken else uint32(unsure & uint32((1 << top_k) - 1))
                while any_nearby(unsure != uint32(0)):
                    k = int32(cuda.popc(uint32(uint32(~unsure) & uint32(unsure - uint32(1)))))  # the first of them
                    last, last_id = uint32(0xFFFFFFFF), int32(-1)
                    for j in range(top_k - 1):
                        last_id = id_of(best[j]) if j + 1 == k else last_id
                    if last_id >= 0:
                        last = key_of(ranked(load(logits, row + last_id), last_id, bias), last_id)
                    mine, mine_id = uint32(0), uint32(0xFFFFFFFF)
                    for j in range(eights):
                        for i in range(EIGHT):
                            expert = int32((j * lanes + lane) * EIGHT + i)
                            value = load(logits, row + min(expert, int32(num_experts - 1)))
                            key = place_key(ranked(value, expert, bias), expert, j * EIGHT + i, kept)
                            after_last = (key < last) | ((key == last) & (expert > last_id))
                            mine_id = uint32(expert) if after_last & (key > mine) else mine_id
                            mine = key if after_last & (key > mine) else mine
                    winner = minimum(mine_id if mine == maximum(mine) else uint32(0xFFFFFFFF))
                    for j in range(top_k):
                        best[j] = uint32(winner ^ uint32(id_mask)) if j == k else best[j]
                    unsure &= uint32(unsure - uint32(1))

            for s in range(slots):
                choices[s] = int32(0)
            for k in range(top_k):
                choices[k // lanes] = id_of(best[k]) if lane == k % lanes else choices[k // lanes]

            # Scores: the best logit bounds the exponentials.
            for s in range(slots):
                k = int32(s * lanes + lane)
                if broken or k >= top_k:
                    choices[s] = min(k, int32(top_k - 1))
                results[s] = load(logits, row + choices[s])
            top = leading(results[0])
            # Elementwise scores that will be divided by their sum are scaled first, so that they cannot all underflow.
            depth, one = float32(0.0), float32(1.0)
            if elementwise and renormalize:
                least = uint32(0xFFFFFFFF)
                for s in range(slots):
                    least = min(least, depth_of(results[s])) if s * lanes + lane < top_k else least
                depth = bits_float(minimum(least))
                one = math.exp(-depth)
            chosen = float32(0.0)
            for s in range(slots):
                if elementwise:
                    results[s] = fast_scaled(results[s], depth, one)
                else:
                    results[s] = math.exp(results[s] - top)
                chosen += results[s] if s * lanes + lane < top_k else float32(0.0)
            factor = float32(1.0)
            if sum_all:
                exponentials = float32(0.0)
                for j in range(eights):
                    for i in range(EIGHT):
                        term = fast_exp2((values[j * EIGHT + i] - top) * float32(LOG2_E))
                        inside = (j * lanes + lane) * EIGHT + i < num_experts
                        exponentials += term if inside else float32(0.0)
                factor = fast_reciprocal(total(exponentials))
            if sum_chosen:
                factor = fast_reciprocal(total(chosen))
            factor = float32(math.nan) if broken else factor * float32(scale)
            if int32(first + (thread >> shift)) < tokens:
                for s in range(slots):
                    k = int32(s * lanes + lane)
                    if k < top_k:
                        at = int64(token) * top_k + k
                        experts[at] = choices[s]
                        scores[at] = results[s] * factor
            first = int32(first + cuda.gridDim.x * tokens_per_block)

    return topk_route


def topk_route_backward(
    threads: int, lanes: int, num_experts: int, top_k: int, score: str, renormalize: bool, scale: float, half: bool
) -> Any:
    """d_logits (T, E) from d_scores (T, K); the scores' sums are computed again from the logits.

    With g = scale·d_score and s = score/scale, in the order of the branches below:

        softmax over all, then top-k      d_logit[e] = p[e] (g[e] - Σ g p)         g is 0 where e isn't chosen
        softmax over the chosen           d_logit[e] = s[e] (g[e] - Σ g s)         so too the above, renormalised
        elementwise f                     d_logit[e] = f' g[e]
        elementwise, renormalised         d_logit[e] = f' (g[e] - Σ g s) / Σ f
    """
    per_lane = -(-num_experts // lanes)
    groups, shift = threads // lanes, lanes.bit_length() - 1
    maximum, minimum, total, any_of, *_ = group_of(lanes)
    load, store = loader(half), storer(half)
    elementwise = SCORES[score].elementwise
    sum_all = not (elementwise or sums_to_one(score, renormalize))
    _, scaled, *_, slope_by_value, _, _ = SCORES[score].on_device()

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
            gradient = d_scores[at] * float32(scale) if lane < top_k else float32(0.0)
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

            if elementwise:
                depth, one = float32(0.0), float32(1.0)
                if renormalize:  # as in the forward
                    depth = bits_float(minimum(depth_of(logit)))
                    one = math.exp(-depth)
                value = scaled(logit, depth, one)
                slope = value * slope_by_value(logit, value, one)
                if renormalize:
                    whole = total(value if lane < top_k else float32(0.0))
                    mean = total(gradient * value) / whole
                    mine_d = slope * (gradient - mean) / whole
                else:
                    mine_d = slope * gradient
            else:
                # The largest of all that is summed. With a balancing bias the first choice may be far below it.
                top = logit
                if sum_all:
                    for i in range(per_lane):
                        top = max(top, values[i])
                top = from_sortable(maximum(sortable(top)))
                share = math.exp(logit - top)
                if sum_all:
                    exponentials = float32(0.0)
                    for i in range(per_lane):
                        values[i] = fast_exp2((values[i] - top) * float32(LOG2_E))
                        exponentials += values[i] if i * lanes + lane < num_experts else float32(0.0)
                    whole = total(exponentials)
                else:
                    whole = total(share if lane < top_k else float32(0.0))
                share /= whole
                mean = total(gradient * share)
                mine_d = share * (gradient - mean)

            # First all experts as if not chosen, then the chosen ones over that.
            if inside:
                for i in range(per_lane):
                    expert = int32(i * lanes + lane)
                    if expert < num_experts:
                        other = float32(0.0)
                        if sum_all and not broken:
                            other = -mean * (values[i] / whole)
                        store(d_logits, row + expert, other)
            warp_barrier()
            if inside and lane < top_k and not broken:
                store(d_logits, row + mine, mine_d)
            first = int32(first + cuda.gridDim.x * groups)
            warp_barrier()

    return topk_route_backward
