"""The load and the auxiliary losses of a batch in two kernels, and their backward in one.

    logits (T, E), experts (T, K)
        │  routing_partials: each block sums over its tokens
        ▼
    load (B, E), probabilities (B, E), logsumexp² (B,)           B blocks, each with neighbouring tokens
        │  routing_sums: over the blocks
        ▼
    load (E,), the balancing loss and the z-loss

Sums have a fixed order, so that a repetition has the same bits: a few lanes share a token, each with its experts; each lane adds
up its experts' probabilities over the tokens that its group sees; groups are added in order, then blocks.

masked: a token whose first expert is negative has no part in the sums, and T is the number of the others, at least 1: the sum of
the load over K. Its logits are NaN, so that its gradient is zero.

Floor: bytes. Forward T·E logits read; backward T·E read and written. At T = 32768, E = 128: 17 MB, 4 us from memory; right after
the product that made them the logits lie in L2.
"""

# As in tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

from blazeproto.router.best import from_sortable, sortable
from blazeproto.router.scores import LOG2_E, SCORES
from blazeproto.runtime.numba import cuda, float32, int32, int64
from blazeproto.runtime.warp import device, fast_exp2, group_of


def softmax_of(num_experts: int, lanes: int, per_lane: int, group: Any) -> Any:
    """``softmax(values, lane, powers)``: fills ``powers`` with exp(value - largest) and returns the largest and their sum, over
    the token's lanes. A NaN among the values makes all of it NaN."""

    maximum, total = group.maximum, group.total

    @device
    def softmax(values, lane, powers):
        top = values[0]  # every lane's first expert exists, or repeats another
        for i in range(per_lane):
            top = max(top, values[i]) if i * lanes + lane < num_experts else top
        top = from_sortable(maximum(sortable(top)))
        mine = float32(0.0)
        for i in range(per_lane):
            powers[i] = fast_exp2((values[i] - top) * float32(LOG2_E))
            mine += powers[i] if i * lanes + lane < num_experts else float32(0.0)
        return top, total(mine)

    return softmax


def routing_partials(
    threads: int, lanes: int, num_experts: int, score: str, balance: bool, z: bool, masked: bool
) -> Any:
    """Each block's part of the load, and of the sums that ``balance`` and ``z`` ask for.

    load (B, E) int32; probabilities (B, E) fp32: the softmax, or elementwise scores over their sum; squares (B,) fp32, logsumexp²
    A block has ``tokens`` tokens. Experts beyond a lane's last repeat the last expert of all, and count nothing.
    """
    per_lane, groups, shift = -(-num_experts // lanes), threads // lanes, lanes.bit_length() - 1
    softmax = softmax_of(num_experts, lanes, per_lane, group_of(lanes))
    elementwise, logarithm = SCORES[score].elementwise, SCORES[score].on_device().fast_logarithm
    num_sums = groups * num_experts if balance else 1

    def routing_partials(logits, experts, load, probabilities, squares, num_tokens, top_k, tokens):
        thread, block = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        lane, mine = int32(thread & (lanes - 1)), int32(thread >> shift)
        counts = cuda.shared.array(num_experts, int32)
        sums = cuda.shared.array(num_sums, float32)
        square_sums = cuda.shared.array(groups, float32)
        values = cuda.local.array(per_lane, float32)  # registers, and so the next
        powers = cuda.local.array(per_lane, float32)
        added = cuda.local.array(per_lane, float32)

        for e in range(thread, num_experts, threads):
            counts[e] = int32(0)
        cuda.syncthreads()
        first = int64(block * tokens)
        end = int64(min(first + tokens, num_tokens))
        for pair in range(first * top_k + thread, end * top_k, threads):
            expert = experts[pair]
            if 0 <= expert < num_experts:
                cuda.atomic.add(counts, expert, int32(1))

        if balance or z:
            square = float32(0.0)
            for i in range(per_lane):
                added[i] = float32(0.0)
            while first < end:
                token = int64(min(first + mine, end - 1))
                inside = first + mine < end
                if masked:
                    inside = inside and experts[token * top_k] >= 0
                row = int64(token * num_experts)
                for i in range(per_lane):
                    values[i] = logits[row + min(int32(i * lanes + lane), int32(num_experts - 1))]
                if z:
                    top, whole = softmax(values, lane, powers)
                    log_sum = top + math.log(whole)
                    square += log_sum * log_sum if inside else float32(0.0)
                if balance:
                    for i in range(per_lane):
                        values[i] = logarithm(values[i])
                    if elementwise or not z:
                        top, whole = softmax(values, lane, powers)
                    share = float32(1.0) / whole if inside else float32(0.0)
                    for i in range(per_lane):
                        added[i] += powers[i] * share if inside else float32(0.0)
                first = int64(first + groups)
            if balance:
                for i in range(per_lane):
                    expert = int32(i * lanes + lane)
                    if expert < num_experts:
                        sums[mine * num_experts + expert] = added[i]
            if z and lane == 0:
                square_sums[mine] = square
        cuda.syncthreads()

        for e in range(thread, num_experts, threads):
            load[block * num_experts + e] = counts[e]
            if balance:
                total = float32(0.0)
                for g in range(groups):
                    total += sums[g * num_experts + e]
                probabilities[block * num_experts + e] = total
        if z and thread == 0:
            total = float32(0.0)
            for g in range(groups):
                total += square_sums[g]
            squares[block] = total

    return routing_partials


def routing_sums(threads: int, columns: int, num_experts: int, balance: bool, z: bool, masked: bool) -> Any:
    """load (E,) int32 and the losses, an fp32 number each, from the parts of all blocks; one block.

    balance_loss is E Σ f P / T with f = load / (T K), z_loss the sum of logsumexp² over T; 0 where one is not asked for.
    ``columns`` is a power of two, of at least E: as many threads add up the experts of every ``threads / columns``-th block.
    """
    strides = threads // columns
    halvings = threads.bit_length() - 1

    def routing_sums(loads, probabilities, squares, load, balance_loss, z_loss, num_blocks, num_tokens, top_k):
        thread = int32(cuda.threadIdx.x)
        expert, stride = int32(thread & (columns - 1)), int32(thread // columns)
        counts = cuda.shared.array(threads, int32)
        sums = cuda.shared.array(threads, float32)
        square_sums = cuda.shared.array(threads, float32)
        count, total = int32(0), float32(0.0)
        if expert < num_experts:
            for block in range(stride, num_blocks, strides):
                count += loads[block * num_experts + expert]
                if balance:
                    total += probabilities[block * num_experts + expert]
        counts[thread] = count
        sums[thread] = total
        cuda.syncthreads()
        if thread < columns:
            for s in range(1, strides):
                count += counts[s * columns + thread]
                total += sums[s * columns + thread]
            if thread < num_experts:
                load[thread] = count
        cuda.syncthreads()

        square, share = float32(0.0), float32(0.0)
        if z:
            for block in range(thread, num_blocks, threads):
                square += squares[block]
        if balance and thread < num_experts:
            share = float32(count) * total if masked else float32(count) / float32(num_tokens * top_k) * total
        sums[thread] = share
        square_sums[thread] = square
        if masked:
            counts[thread] = count if thread < num_experts else int32(0)
        cuda.syncthreads()
        for step in range(halvings):  # in pairs, then fours, ...: the order is fixed
            distance = int32(threads >> (step + 1))
            if thread < distance:
                sums[thread] += sums[thread + distance]
                square_sums[thread] += square_sums[thread + distance]
                if masked:
                    counts[thread] += counts[thread + distance]
            cuda.syncthreads()
        if thread == 0:
            tokens, total = float32(num_tokens), sums[0]
            if masked:
                pairs = max(counts[0], int32(top_k))
                tokens, total = float32(pairs // int32(top_k)), total / float32(pairs)
            balance_loss[0] = total * float32(num_experts) / tokens
            z_loss[0] = square_sums[0] / tokens

    return routing_sums


def routing_losses_backward(
    threads: int, lanes: int, num_experts: int, score: str, balance: bool, z: bool, masked: bool
) -> Any:
    """d_logits (T, E) from the gradients of the two losses.

    With p a token's probabilities, c = d_balance E f / T, q the softmax of its logits and l their logsumexp:

        softmax    d_logit[e] = p[e] (c[e] - Σ c p)                        + d_z 2 l q[e] / T
        f(logit)   d_logit[e] = p[e] (c[e] - Σ c p) (log f)'(logit[e])     + the same

    A token with a NaN or infinite logit gets zeros.
    """
    per_lane, groups, shift = -(-num_experts // lanes), threads // lanes, lanes.bit_length() - 1
    group = group_of(lanes)
    total, any_of = group.total, group.any
    softmax = softmax_of(num_experts, lanes, per_lane, group)
    elementwise, of_score = SCORES[score].elementwise, SCORES[score].on_device()
    logarithm, slope_of = of_score.fast_logarithm, of_score.slope_by_logarithm

    def routing_losses_backward(logits, load, d_balance, d_z, d_logits, num_tokens, top_k):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & (lanes - 1))
        values = cuda.local.array(per_lane, float32)  # registers, and so the next
        powers = cuda.local.array(per_lane, float32)
        slopes = cuda.local.array(per_lane, float32)
        weights = cuda.local.array(per_lane, float32)

        tokens, pairs = float32(num_tokens), float32(num_tokens * top_k)
        if masked:
            pairs = float32(0.0)
            for i in range(per_lane):
                expert = int32(i * lanes + lane)
                pairs += float32(load[expert]) if expert < num_experts else float32(0.0)
            pairs = max(total(pairs), float32(top_k))
            tokens = pairs / float32(top_k)
        if balance:
            factor = d_balance[0] * float32(num_experts) / tokens
            for i in range(per_lane):
                count = load[min(int32(i * lanes + lane), int32(num_experts - 1))]
                weights[i] = factor * (float32(count) / pairs)
        first = int64(cuda.blockIdx.x) * groups
        while first < num_tokens:
            token = int64(min(first + (thread >> shift), num_tokens - 1))
            row = int64(token * num_experts)
            finite = float32(0.0)
            for i in range(per_lane):
                values[i] = logits[row + min(int32(i * lanes + lane), int32(num_experts - 1))]
                finite += values[i] * float32(0.0)
                slopes[i] = float32(0.0)
            broken = any_of(finite != float32(0.0))
            if z:
                top, whole = softmax(values, lane, powers)
                log_sum = top + math.log(whole)
                factor = float32(2.0) * d_z[0] * log_sum / tokens / whole
                for i in range(per_lane):
                    slopes[i] = factor * powers[i]
            if balance:
                for i in range(per_lane):
                    values[i] = logarithm(values[i])
                if elementwise or not z:
                    top, whole = softmax(values, lane, powers)
                mean = float32(0.0)
                for i in range(per_lane):
                    powers[i] /= whole
                    mean += weights[i] * powers[i] if i * lanes + lane < num_experts else float32(0.0)
                mean = total(mean)
                for i in range(per_lane):
                    slopes[i] += powers[i] * (weights[i] - mean) * slope_of(values[i])
            if first + (thread >> shift) < num_tokens:
                for i in range(per_lane):
                    expert = int32(i * lanes + lane)
                    if expert < num_experts:
                        d_logits[row + expert] = float32(0.0) if broken else slopes[i]
            first = int64(first + int64(cuda.gridDim.x) * groups)

    return routing_losses_backward
