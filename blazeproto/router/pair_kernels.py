"""From the bits of a choice to a flat list of pairs, and the scores of such a list, forward and backward.

    bits (T / 32, E)      select_kernels.py: bit t & 31 of word (t / 32, e) says that expert e has token t
         |
    count_tokens          totals[chunk]: pairs of 32 tokens, or of some such groups where T is large
         |
    list_pairs            each block sums the totals before its own, turns its words (E words of 32 tokens each into E / 32
         |                words of 32 experts for each token), scans 32 tokens, and writes
         v
    pair_experts (P,), pair_tokens (P,), token_offsets (T + 1,)      by token, ascending expert; unused places hold -1 and 0
         |
    score_pairs           a warp has a token: its logits at the experts that it has

Floor: bytes. list_pairs reads the bits twice (T·E / 8 each) and writes 8·P + 4·T; score_pairs reads 4·P + 4·T·K of logits (T·E
where scores are a softmax over all experts) and writes 4·P; its backward writes 4·T·E. At T = 32768, E = 128, K = 8 (P =
262144): 3 MB, 3 MB and 19 MB; one, one and 5 us, beside which a launch counts.
"""

# As in dispatch/tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
import math
from typing import Any

from blazeproto.router.best import from_sortable, sortable
from blazeproto.router.scores import SCORES
from blazeproto.runtime.numba import cuda, float32, int32, int64, uint32
from blazeproto.runtime.warp import block_scan, device, group_of, warp_barrier

WORD = 32  # tokens, or experts


def count_tokens(threads: int) -> Any:
    """totals[chunk] = pairs in ``chunk_words`` words of the bits: all E words of some groups of 32 tokens."""

    def count_tokens(bits, totals, num_words, chunk_words):
        scratch = cuda.shared.array(0, int32)  # two places a thread
        thread, chunk = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        end = min((chunk + 1) * chunk_words, num_words)
        count = int32(0)
        word = chunk * chunk_words + thread
        while word < end:
            count = int32(count + int32(cuda.popc(bits[word])))
            word += threads
        _, count, _, _ = block_scan(scratch, thread, threads, count, int32(0))
        if thread == 0:
            totals[chunk] = count

    return count_tokens


def list_pairs(threads: int, num_experts: int) -> Any:
    """pair_experts (P,), pair_tokens (P,) and token_offsets (T + 1,) of bits (T / 32, E) and the totals of all chunks.

    Block c has chunk c of ``chunk_groups`` groups of 32 tokens. Pairs beyond P are left out.
    """
    words = -(-num_experts // WORD)  # of a token
    turned = 2 * threads  # where in shared memory the bits by token begin: word (j, token) has experts 32 j … 32 j + 31
    starts = turned + words * WORD

    def list_pairs(
        bits, totals, pair_experts, pair_tokens, token_offsets, num_tokens, num_chunks, chunk_groups, max_pairs
    ):
        shared = cuda.shared.array(0, int32)
        words_of = cuda.shared.array(0, uint32)  # the same memory
        scratch = shared[:turned]
        thread, chunk = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)

        earlier, everything = int32(0), int32(0)
        other = int64(thread)
        while other < num_chunks:
            pairs = totals[other]
            everything = int32(everything + pairs)
            earlier = int32(earlier + (pairs if other < chunk else int32(0)))
            other += threads
        _, before, _, in_all = block_scan(scratch, thread, threads, earlier, everything)
        cuda.syncthreads()

        group = chunk * chunk_groups
        last = min(group + chunk_groups, (num_tokens + WORD - 1) // WORD)
        while group < last:
            place = thread
            while place < words * WORD:
                token, first = int32(place & (WORD - 1)), int32(place // WORD * WORD)
                row = uint32(0)
                for i in range(WORD):
                    if first + i < num_experts:
                        bit = uint32((bits[group * num_experts + first + i] >> uint32(token)) & uint32(1))
                        row |= uint32(bit << uint32(i))
                words_of[turned + place] = row
                place = int32(place + threads)
            cuda.syncthreads()
            pairs = int32(0)
            if thread < WORD:
                for j in range(words):
                    pairs = int32(pairs + int32(cuda.popc(words_of[turned + j * WORD + thread])))
            up_to, here, _, _ = block_scan(scratch, thread, threads, pairs, int32(0))
            token = int64(group * WORD + thread)
            if thread < WORD:
                shared[starts + thread] = int32(before + up_to - pairs)
                if token < num_tokens:
                    token_offsets[token] = int32(min(int64(before + up_to - pairs), max_pairs))
            cuda.syncthreads()

            place = thread
            while place < words * WORD:
                row = words_of[turned + place]
                pair = shared[starts + int32(place & (WORD - 1))]
                for j in range(place // WORD):
                    pair = int32(pair + int32(cuda.popc(words_of[turned + j * WORD + int32(place & (WORD - 1))])))
                while row != uint32(0):
                    lowest = uint32((row & (~row + uint32(1))) - uint32(1))  # the ones below the lowest one
                    if pair < max_pairs:
                        pair_experts[pair] = int32(place // WORD * WORD + int32(cuda.popc(lowest)))
                        pair_tokens[pair] = int32(group * WORD + (place & (WORD - 1)))
                    row &= uint32(row - uint32(1))
                    pair = int32(pair + 1)
                place = int32(place + threads)
            before = int32(before + here)
            group += 1
            cuda.syncthreads()

        if thread == 0 and chunk == cuda.gridDim.x - 1:
            token_offsets[num_tokens] = int32(min(int64(in_all), max_pairs))
        unused = int64(in_all) + chunk * threads + thread
        while unused < max_pairs:
            pair_experts[unused] = -1
            pair_tokens[unused] = 0
            unused += int64(cuda.gridDim.x) * threads

    return list_pairs


# --- Scores ------------------------------------------------------------------------------------------------------------------


def softmax_of(threads: int, num_experts: int, score: str, together: bool) -> Any:
    """Two functions of a warp, whose token has the pairs ``begin`` to ``end``.

    ``softmax(logits, row, pair_experts, begin, end, lane)``: the largest and the sum of a softmax's exponentials.
    ``share_of(logit, largest, sum)``: the score of one of its logits, before scaling.

    together: over the token's pairs, of logits or of logarithms of elementwise scores; else over all experts of the row. The
    largest is NaN where a logit is.
    """
    group, of_score = group_of(WORD), SCORES[score].on_device()
    maximum, total, any_of = group.maximum, group.total, group.any
    logarithm, scaled, alone = of_score.logarithm, of_score.scaled, SCORES[score].elementwise and not together

    @device
    def value_of(logits, row, pair_experts, place):
        return logarithm(logits[row + (pair_experts[place] if together else int32(place))])

    @device
    def share_of(logit, top, whole):
        if alone:
            return float32(scaled(logit, float32(0.0), float32(1.0)))
        return math.exp(logarithm(logit) - top) / whole

    @device
    def softmax(logits, row, pair_experts, begin, end, lane):
        first, last = (begin, end) if together else (int32(0), int32(num_experts))
        top, broken = float32(-math.inf), False
        place = int32(first + lane)
        while place < last:
            value = value_of(logits, row, pair_experts, place)
            broken = broken or value != value
            top = max(top, value)
            place = int32(place + WORD)
        top = from_sortable(maximum(sortable(top)))
        whole = float32(0.0)
        place = int32(first + lane)
        while place < last:
            whole += math.exp(value_of(logits, row, pair_experts, place) - top)
            place = int32(place + WORD)
        whole = total(whole)
        return top, float32(math.nan) if any_of(broken) else whole

    return softmax, share_of


def score_pairs(threads: int, num_experts: int, score: str, together: bool, scale: float) -> Any:
    """scores (P,) of logits (T, E) and a list of pairs; 0 in unused places. A warp has a token.

    together: a token's scores sum to one before scaling.
    """
    softmax, share_of = softmax_of(threads, num_experts, score, together)
    warps, summed = threads // WORD, together or not SCORES[score].elementwise

    def score_pairs(logits, pair_experts, token_offsets, scores, num_tokens, max_pairs):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & 31)
        first = int64(cuda.blockIdx.x) * warps
        while first < num_tokens:
            token = min(first + (thread >> 5), num_tokens - 1)
            row = token * num_experts
            begin, end = token_offsets[token], token_offsets[token + 1]
            top, whole = float32(0.0), float32(1.0)
            if summed:
                top, whole = softmax(logits, row, pair_experts, begin, end, lane)
            if first + (thread >> 5) < num_tokens:
                pair = int32(begin + lane)
                while pair < end:
                    share = share_of(logits[row + pair_experts[pair]], top, whole)
                    scores[pair] = share * float32(scale)
                    pair = int32(pair + WORD)
            first += int64(cuda.gridDim.x) * warps
        unused = int64(token_offsets[num_tokens]) + int64(cuda.blockIdx.x) * threads + thread
        while unused < max_pairs:
            scores[unused] = float32(0.0)
            unused += int64(cuda.gridDim.x) * threads

    return score_pairs


def score_pairs_backward(threads: int, num_experts: int, score: str, together: bool, scale: float) -> Any:
    """d_logits (T, E) from d_scores (P,); the scores are computed again. A warp has a token.

    With g = scale·d_score and s the score before scaling, both 0 for experts that the token has not:

        together, softmax     d_logit[e] = s[e] (g[e] - Σ g s)
        together, of f        d_logit[e] = s[e] (g[e] - Σ g s) (log f)'(logit[e])
        softmax over all      d_logit[e] = p[e] (g[e] - Σ g p)
        elementwise f         d_logit[e] = f' g[e]

    A token with a NaN among the logits that count gets zeros.
    """
    softmax, share_of = softmax_of(threads, num_experts, score, together)
    total, of_score, warps = group_of(WORD).total, SCORES[score].on_device(), threads // WORD
    logarithm, slope_at, slope_by_value = of_score.logarithm, of_score.slope_by_logit, of_score.slope_by_value
    over_all = not (SCORES[score].elementwise or together)
    summed = together or over_all

    def score_pairs_backward(logits, pair_experts, token_offsets, d_scores, d_logits, num_tokens):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & 31)
        first = int64(cuda.blockIdx.x) * warps
        while first < num_tokens:
            inside = first + (thread >> 5) < num_tokens
            token = min(first + (thread >> 5), num_tokens - 1)
            row = token * num_experts
            begin, end = token_offsets[token], token_offsets[token + 1]
            top, whole, mean = float32(0.0), float32(1.0), float32(0.0)
            if summed:
                top, whole = softmax(logits, row, pair_experts, begin, end, lane)
                pair = int32(begin + lane)
                while pair < end:
                    value = logarithm(logits[row + pair_experts[pair]])
                    mean += d_scores[pair] * float32(scale) * math.exp(value - top)
                    pair = int32(pair + WORD)
                mean = total(mean) / whole
            broken = whole != whole

            # First all experts as if the token had none of them, then those that it has over that.
            if inside:
                expert = lane
                while expert < num_experts:
                    other = float32(0.0)
                    if over_all and not broken:
                        other = -mean * share_of(logits[row + expert], top, whole)
                    d_logits[row + expert] = other
                    expert = int32(expert + WORD)
            warp_barrier()
            if inside and not broken:
                pair = int32(begin + lane)
                while pair < end:
                    logit = logits[row + pair_experts[pair]]
                    gradient = d_scores[pair] * float32(scale)
                    share = share_of(logit, top, whole)
                    if summed:
                        made = share * (gradient - mean) * slope_at(logit)
                    else:
                        made = gradient * share * slope_by_value(logit, share, float32(1.0))
                        made = made if made == made else float32(0.0)
                    d_logits[row + pair_experts[pair]] = made
                    pair = int32(pair + WORD)
            warp_barrier()
            first += int64(cuda.gridDim.x) * warps

    return score_pairs_backward
