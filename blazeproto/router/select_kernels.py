"""Each expert picks its highest-ranked tokens. Nothing is sorted, but for the digits of one threshold.

One selection serves all choices. A choice ranks (token, expert) pairs by an integer,

    bit 30    the token chose this expert       token rounding, capacity; nobody's in expert choice
    0 … 29    a code, larger is better          the score's bits (in [0, 1] they order as the score does), or K - 1 - slot

    scores (T, E), experts (T, K) --key_columns--> keys (E, T) --select_tokens--> bits (T / 32, E), load (E,)

A block of select_tokens has one expert and as many threads as a digit has values. It finds the key of the last token that
is in, digit by digit from the top: a histogram in shared memory of the keys that agree so far, and a scan over its bins.

    want 5 of   9 7 7 4 4 4 4 1        bins of the digit, from the top     9: 1   7: 2   4: 4   1: 1
                                       sums                                   1      3      7      8
                                       the fifth has digit 4: in are all above it, and the first 5 - 3 = 2 of those with it

Ties go to the lower token: a last pass in the order of the tokens counts them. Histograms are integer atomics, so that the
result is the same to the bit each time. Among equal codes ``score`` capacity looks for a second threshold, in the tokens'
largest scores.

Floor: bytes. 8·T·E (the scores read, and one word a pair written and read: columns are what a block can walk), 4·T·K. At T =
32768, E = 128, K = 8: 51 MB, 12 us. A column lies in L1 after the first pass; what takes time is atomics that meet in a bin.
"""

# As in dispatch/tiled.py, types come from the values.
# mypy: disable-error-code="no-untyped-def"
from typing import Any

from blazeproto.runtime.numba import cuda, float32, float64, int32, int64, uint32
from blazeproto.runtime.warp import ballot, block_scan, device, float_bits, group_of

CHOSEN = 1 << 30
CODE_BITS = 30
HIGHEST = CHOSEN - 1  # the code of NaN
ONE = 0x3F800000  # the code of 1.0
NOBODY = 0xFFFFFFFF  # above every key
TILE_TOKENS, TILE_EXPERTS = 32, 128  # of a block of key_columns
PAD = TILE_TOKENS + 1  # so that neither rows nor columns of the tile meet in a bank
BATCH = 8  # keys that a thread has under way


@device
def code_of(score):
    """A score in [0, 1] as 30 bits in the order of the scores. NaN is the largest."""
    return uint32(min(float_bits(score), uint32(HIGHEST)))


# --- 1. Keys, an expert's side by side ---------------------------------------------------------------------------------------


def key_columns(threads: int, kind: str) -> Any:
    """keys (E, T) of scores (T, E) and experts (T, K); a block turns a tile of 32 tokens and 128 experts.

    kind, and the code of a pair: "rounding", its score, and a NaN counts as 1 where it chose and 0 elsewhere; "score", its
    score, bit 30 being nobody's; "slot", for chosen pairs K - 1 - slot; "chosen", 0.
    """
    per_thread = TILE_TOKENS * TILE_EXPERTS // threads
    rounding, by_score, by_slot = kind == "rounding", kind == "score", kind == "slot"

    def key_columns(scores, experts, keys, num_tokens, num_experts, top_k):
        tile = cuda.shared.array(0, uint32)  # (128, 33)
        thread = int32(cuda.threadIdx.x)
        tiles = int32((num_experts + TILE_EXPERTS - 1) // TILE_EXPERTS)
        row = int32(cuda.blockIdx.x) // tiles
        first_expert = int32((int32(cuda.blockIdx.x) - row * tiles) * TILE_EXPERTS)
        first = int64(row) * TILE_TOKENS
        tokens = int32(min(num_tokens - first, int64(TILE_TOKENS)))
        experts_here = int32(min(int32(num_experts) - first_expert, int32(TILE_EXPERTS)))

        codes = cuda.local.array(per_thread, uint32)  # registers: all loads are in flight before the first is used
        for i in range(per_thread):
            place = int32(thread + i * threads)
            expert, token = int32(place & (TILE_EXPERTS - 1)), int32(place // TILE_EXPERTS)
            codes[i] = uint32(0)
            if (rounding or by_score) and expert < experts_here and token < tokens:
                codes[i] = code_of(scores[(first + token) * num_experts + first_expert + expert])
        for i in range(per_thread):
            place = int32(thread + i * threads)
            tile[int32((place & (TILE_EXPERTS - 1)) * PAD + place // TILE_EXPERTS)] = codes[i]
        cuda.syncthreads()

        if not by_score:
            pair = thread
            pairs = int32(tokens * int32(top_k))
            while pair < pairs:
                expert = int32(experts[first * top_k + pair] - first_expert)
                if 0 <= expert < experts_here:
                    token = int32(pair // int32(top_k))
                    place = int32(expert * PAD + token)
                    code = uint32(0)
                    if rounding:
                        code = tile[place]
                        code = uint32(ONE) if code == uint32(HIGHEST) else code
                    if by_slot:
                        code = uint32(int32(top_k) - 1 - (pair - token * int32(top_k)))
                    tile[place] = uint32(code | uint32(CHOSEN))
                pair = int32(pair + threads)
            cuda.syncthreads()

        for i in range(per_thread):
            place = int32(thread + i * threads)
            token, expert = int32(place & (TILE_TOKENS - 1)), int32(place // TILE_TOKENS)
            if expert < experts_here and token < tokens:
                key = tile[int32(expert * PAD + token)]
                if rounding:
                    key = uint32(0) if key == uint32(HIGHEST) else key
                keys[int64(first_expert + expert) * num_tokens + first + token] = key

    return key_columns


def largest_codes(threads: int) -> Any:
    """codes (T,) of each token's largest score. A warp has a token."""
    maximum = group_of(32).maximum

    def largest_codes(scores, codes, num_tokens, num_experts):
        thread = int32(cuda.threadIdx.x)
        lane = int32(thread & 31)
        token = int64(cuda.blockIdx.x) * (threads // 32) + (thread >> 5)
        row = min(token, num_tokens - 1) * num_experts
        largest = uint32(0)
        expert = lane
        while expert < num_experts:
            largest = max(largest, code_of(scores[row + expert]))
            expert = int32(expert + 32)
        largest = maximum(largest)
        if lane == 0 and token < num_tokens:
            codes[token] = largest

    return largest_codes


# --- 2. Select ---------------------------------------------------------------------------------------------------------------


def search_of(threads: int, code_bits: int, gated: bool) -> Any:
    """``search(keys, first, prefix, want, gates, gates_first, gate, shared, thread, num_tokens)`` for a block: the key of rank
    ``want`` among the keys[first : first + T] that have ``prefix`` above their lowest code_bits.

    gated: only tokens whose gates[gates_first + token] is ``gate``. Returns the key, how many tokens with this key are in, and
    how many have it. want >= 1. shared: int32, three places a thread, of which search uses four more.
    """
    digit_bits = threads.bit_length() - 1
    digits = -(-code_bits // digit_bits)
    found = 3 * threads

    @device
    def search(keys, first, prefix, want, gates, gates_first, gate, shared, thread, num_tokens):
        batch = cuda.local.array(BATCH, uint32)
        ties = int32(0)
        for digit in range(digits):
            shift = uint32((digits - 1 - digit) * digit_bits)
            shared[thread] = 0
            if thread < 3:
                shared[found + thread] = 0
            cuda.syncthreads()
            token = thread
            while token < num_tokens:
                for i in range(BATCH):
                    here = int32(token + i * threads)
                    batch[i] = keys[first + here] if here < num_tokens else uint32(NOBODY)
                if gated:
                    for i in range(BATCH):
                        here = int32(token + i * threads)
                        if here < num_tokens and gates[gates_first + here] != gate:
                            batch[i] = uint32(NOBODY)
                for i in range(BATCH):
                    above = uint32(batch[i] >> shift)
                    if uint32(above >> uint32(digit_bits)) == prefix:
                        cuda.atomic.add(shared, int32(above & uint32(threads - 1)), int32(1))
                token = int32(token + BATCH * threads)
            cuda.syncthreads()
            value = int32(threads - 1 - thread)  # the first thread has the highest digit
            here = shared[value]
            up_to, _, _, _ = block_scan(shared[threads:found], thread, threads, here, int32(0))
            if up_to - here < want <= up_to:
                shared[found] = value
                shared[found + 1] = int32(want - (up_to - here))
                shared[found + 2] = here
            cuda.syncthreads()
            prefix = uint32((prefix << uint32(digit_bits)) | uint32(shared[found]))
            want, ties = shared[found + 1], shared[found + 2]
            cuda.syncthreads()
        return prefix, want, ties

    return search


def select_tokens(threads: int, by: str, code_bits: int, masked: bool) -> Any:
    """bits (T / 32, E): bit t & 31 of word (t / 32, e) says that expert e takes token t; load (E,) counts them.

    by: a rule of token rounding, then ``size`` is the tile; or "expert_choice", "slot", "token", "score", then it is the number
    of tokens that an expert takes, at most. code_bits: of the keys' lowest bits, those that may differ.
    seconds (T,): `largest_codes`, for "score".  scores (T, E), draws (E,): for "nr_s", and draws for "sr_f".
    table (chunks, E): how many pairs of each chunk chose each expert (`dispatch.tiled.count_pairs`); not for "expert_choice".
    masked: T and ``size`` are limits[0] and limits[1]; the tokens from there on are masked, and nobody takes them.
    """
    digit_bits = threads.bit_length() - 1
    searched = -(-code_bits // digit_bits) * digit_bits
    counted = by != "expert_choice"
    rounds = counted and by not in ("slot", "token", "score")
    nearest, balanced, always_up = by == "nr_f", by == "balance_f", by == "up"
    by_count, by_scores = by == "sr_f", by == "nr_s"  # with what probability
    two_keys = by == "score"
    search = search_of(threads, code_bits, False)
    search_second = search_of(threads, CODE_BITS, True)

    @device
    def count_of(table, expert, num_chunks, num_experts):
        """The pairs of one expert, by one thread."""
        count = int32(0)
        for chunk in range(num_chunks):
            count = int32(count + table[chunk * num_experts + expert])
        return count

    @device
    def threshold(keys, first, count, rank, shared, thread, num_tokens):
        """The key of that rank (0: none has it), the number of equal keys that are in, and the number of equal keys.

        The tokens that chose the expert come first, and their number is known: that is the first bit.
        """
        key, want, ties = uint32(NOBODY), int32(0), int32(0)
        if rank > 0:
            chosen = rank <= count
            prefix = uint32(uint32(1 if chosen else 0) << uint32(CODE_BITS - searched))
            want = int32(rank if chosen else rank - count)
            key, want, ties = search(keys, first, prefix, want, keys, first, key, shared, thread, num_tokens)
            if searched == 0:
                ties = int32(count)
        return key, want, ties

    @device
    def total_of(sums, thread, value):
        """The sum over the block's threads, always in the same order. sums: float64 shared memory, a place a thread."""
        sums[thread] = value
        cuda.syncthreads()
        distance = threads // 2
        while distance > 0:
            if thread < distance:
                sums[thread] += sums[thread + distance]
            cuda.syncthreads()
            distance //= 2
        total = sums[0]
        cuda.syncthreads()
        return total

    def select_tokens(
        keys, seconds, scores, draws, table, limits, bits, load, num_tokens, num_experts, num_chunks, size
    ):
        shared = cuda.shared.array(0, int32)  # 3 * threads + 4: a histogram, a scan's scratch, what a search found
        scratch = shared[threads : 3 * threads]
        thread, expert = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        tokens, tile = int32(num_tokens), int32(size)
        if masked:
            tokens, tile = limits[0], limits[1]
        first = int64(expert) * num_tokens
        key, want, ties = uint32(NOBODY), int32(0), int32(0)
        rank = tile

        count = int32(0)
        if counted:
            chunk = int64(thread)
            while chunk < num_chunks:
                count = int32(count + table[chunk * num_experts + expert])
                chunk += threads
            _, count, _, _ = block_scan(scratch, thread, threads, count, int32(0))
            cuda.syncthreads()
            rank = min(count, tile)
        if rounds:
            floor = int32(count // tile * tile)
            ceil = int32((count + tile - 1) // tile * tile)
            up = always_up
            if nearest:
                up = ceil - count < count - floor
            if by_count:
                up = draws[expert] * float32(tile) < float32(count - floor)
            if balanced:
                # The running sum of the counts, of an expert that must round down its floor, to the nearest multiple.
                before = int32(0)
                other = int64(thread)
                while other < expert:
                    theirs = count_of(table, other, num_chunks, num_experts)
                    theirs_floor = int32(theirs // tile * tile)
                    must = int32((theirs + tile - 1) // tile * tile) > tokens
                    before = int32(before + (theirs_floor if must else theirs))
                    other += threads
                _, before, _, _ = block_scan(scratch, thread, threads, before, int32(0))
                cuda.syncthreads()
                half = int32((tile - 1) // 2)
                up = int32((before + count + half) // tile * tile) - int32((before + half) // tile * tile) > floor
            fits = ceil <= tokens
            rank = ceil if up and fits else floor
            if by_scores and fits and floor < ceil:
                # Both ends of the last tile; its scores, those of the tokens that chose the expert and the others'.
                low, low_want, low_ties = threshold(keys, first, count, floor, shared, thread, tokens)
                high, high_want, high_ties = threshold(keys, first, count, ceil, shared, thread, tokens)
                theirs, others = float64(0.0), float64(0.0)
                low_before, high_before = int32(0), int32(0)
                split_ties = low_want < low_ties or high_want < high_ties  # else all tokens at a threshold are in
                start = int32(0)
                while start < tokens:
                    token = int32(start + thread)
                    mine = keys[first + token] if token < tokens else uint32(0)
                    low_tie = int32(token < tokens and mine == low)
                    high_tie = int32(token < tokens and mine == high)
                    low_here, low_all, high_here, high_all = low_tie, int32(0), high_tie, int32(0)
                    if split_ties:
                        low_here, low_all, high_here, high_all = block_scan(scratch, thread, threads, low_tie, high_tie)
                        cuda.syncthreads()
                    in_low = mine > low or (low_tie == 1 and low_before + low_here <= low_want)
                    in_high = mine > high or (high_tie == 1 and high_before + high_here <= high_want)
                    if token < tokens and in_high and not in_low:
                        score = scores[int64(token) * num_experts + expert]
                        score = score if score == score else float32(0.0)
                        if mine >= uint32(CHOSEN):
                            theirs += score
                        else:
                            others += score
                    low_before, high_before = int32(low_before + low_all), int32(high_before + high_all)
                    start = int32(start + threads)
                sums = cuda.shared.array(0, float64)  # over the same memory
                theirs, others = total_of(sums, thread, theirs), total_of(sums, thread, others)
                up = draws[expert] * float32(theirs + others) < float32(theirs)
                rank = ceil if up else floor
                key = high if up else low
                want, ties = high_want if up else low_want, high_ties if up else low_ties
        if key == uint32(NOBODY):
            key, want, ties = threshold(keys, first, count, rank, shared, thread, tokens)
        second = uint32(NOBODY)
        if two_keys and want < ties:
            second, want, ties = search_second(
                seconds, int64(0), uint32(0), want, keys, first, key, shared, thread, tokens
            )

        # In the order of the tokens: all above the threshold, and of those at it the first.
        before = int32(0)
        start = int32(0)
        while start < num_tokens:
            token = int32(start + thread)
            inside = token < tokens
            mine = keys[first + token] if inside else uint32(0)
            above, tie = inside and mine > key, inside and mine == key
            if two_keys and second != uint32(NOBODY) and tie:
                above, tie = seconds[token] > second, seconds[token] == second
            if want < ties:
                here, all_here, _, _ = block_scan(scratch, thread, threads, int32(tie), int32(0))
                cuda.syncthreads()
                tie = tie and before + here <= want
                before = int32(before + all_here)
            word = ballot(shared, thread, above or tie)
            if token < num_tokens and thread & 31 == 0:
                bits[int64(token >> 5) * num_experts + expert] = word
            start = int32(start + threads)
        if thread == 0:
            load[expert] = rank

    return select_tokens
