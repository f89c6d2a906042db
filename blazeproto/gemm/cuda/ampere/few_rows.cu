// Rows times frozen weights, where an expert has few rows: up.cu's product with an activation, linear.cu's without one. The bytes
// of the weights bound it, so they skip shared memory. They are mma.sync's A, 16 rows, and tokens are B: out^T = W x^T.
//
//   weights   global memory --16 bytes a lane, AHEAD under way--> codes --transposed in a quad, decoded--> A ---> mma.sync
//   tokens    global memory --cp.async, 2 stages--> shared memory of all warps --ldmatrix---------------> B --/
//
// A quad of lanes has rows g and g + 8 of A, and reads 64 neighbouring bytes of each. Of every 16 numbers lane t of it multiplies
// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. With 4 bits a lane's 16 bytes have them at t, t + 4, ...; with 8 bits at 2 t, 2 t + 1, ...:
//
//   lane 0 loads   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15      lane t has then, of each lane's load,  t | t + 4 | t + 8 | t + 12
//
// An output is one sum in ascending steps of 16, with the slots of mainloop.cuh: it has the bits of Hopper's kernels too.
// While a CTA multiplies a piece, PIECE of the reduction, it loads the next, be it another tile's. LOW_RANK follows in bf16.
//
// -D: BM, BN   rows of tokens, of weights in a tile     AHEAD   a lane's loads     CTAS   of a multiprocessor     others: mainloop.cuh
#include "matrix.cuh"
#include "swizzle.cuh"
#include "stored.cuh"
#ifdef GATED
#include "layout.cuh"
constexpr int HALVES = GATED && !ALTERNATING ? 2 : 1;
#else
constexpr int HALVES = 1;
constexpr bool ALTERNATING = false;
#endif

constexpr int WARP_ROWS = 16, WARPS = BN / WARP_ROWS, THREADS = 32 * WARPS;
constexpr int COLUMNS = BN / HALVES, BLOCKS = BM / 8;         // BLOCKS: of 8 rows of tokens
constexpr int LANE_NUMBERS = CHUNK_BYTES * 8 / BITS;          // of a load
constexpr int STEP = 4 * LANE_NUMBERS, GROUPS = STEP / RUN;   // numbers of a quad's load
constexpr int PIECE = AHEAD * STEP;
constexpr int ROW_BYTES = PIECE * OPERAND_BYTES, STAGE_BYTES = BM * ROW_BYTES, SCHEDULE_OFFSET = 2 * STAGE_BYTES;
static_assert(SCHEDULE_OFFSET + (MAX_EXPERTS + 1) * int(sizeof(int)) <= SMEM_LIMIT, "stages and schedule");
static_assert(THREADS == 8 * BM, "8 threads copy a row");

#include "schedule.cuh"

// acc[i][2 h + c]: column h of this lane (`column_of`), row 8 i + 2 (lane % 4) + c of the tile.
using Accumulators = float[BLOCKS][4];

// The output column of this lane's row h of weights, 0 or 1. Gate and up of a unit belong to the same lane.
DEVICE int column_of(const RowsParams& p, const RowTile& tile, int h) {
    const int first = tile.column + threadIdx.x / 32 * (WARP_ROWS / HALVES), g = lane_index() / 4;
    return HALVES == 2 ? first + g + h * p.columns : ALTERNATING ? first + 2 * g + h : first + g + 8 * h;
}

// Whether the output has it.
DEVICE bool has_column(const RowsParams& p, const RowTile& tile, int h) { return column_of(p, tile, HALVES == 2 ? 0 : h) < p.columns; }

// Both bf16 products at once. By a power of two they are exact.
DEVICE uint32_t times(uint32_t pair, uint32_t other) {
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(other), "r"(0x80008000));
    return product;
}

DEVICE void load_weights_16(uint32_t (&to)[4], const void* address) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(__cvta_generic_to_global(address)));
}

// Decodes 8 numbers of either row, which share a scale. shared_bits: of a scale, what lanes hand each other.
#if STORED == 1
// A table of the numbers times the scale would be more work than products by it.
struct QuadDecoder {
    const Decoder unscaled{1.0f, 0};
    uint32_t scales[2];  // each twice, in bf16

    DEVICE static uint32_t shared_bits(uint32_t bits) { return (bits ? bits << 7 : 0x40) * 0x10001; }
    DEVICE void set(int h, uint32_t bits, uint32_t) { scales[h] = bits; }
    DEVICE uint4 chunk(int h, const uint32_t* words, int i) const {
        const uint4 four = unscaled.chunk(words, i);
        return make_uint4(times(four.x, scales[h]), times(four.y, scales[h]), times(four.z, scales[h]), times(four.w, scales[h]));
    }
};
#else
struct QuadDecoder {
    Decoder decoders[2] = {{0.0f, 0}, {0.0f, 0}};

    DEVICE static uint32_t shared_bits(uint32_t bits) { return SCALE_BYTES == 1 ? (bits ? bits << 23 : 1 << 22) : SCALE_BYTES == 2 ? bits << 16 : bits; }
    DEVICE uint4 chunk(int h, const uint32_t* words, int i) const { return decoders[h].chunk(words, i); }
#if STORED == 4
    DEVICE void set(int h, uint32_t bits, uint32_t) { decoders[h].scale = __uint_as_float(bits); }
#else
    float own[4];  // each lane of a quad makes four entries of the table, for all: their numbers, before zero point and scale

    DEVICE QuadDecoder() {
#pragma unroll
        for (int code = 0; code < 16; ++code)
            if (lane_index() % 4 == code / 4) own[code % 4] = Decoder::number(code);
    }

    DEVICE void set(int h, uint32_t bits, uint32_t zero) {
        const float scale = __uint_as_float(bits), less = STORED == 3 ? 0.0f : HAS_ZEROS ? float(zero) : 8.0f;
        const uint32_t first = pack_bf16((own[0] - less) * scale, (own[1] - less) * scale);
        const uint32_t second = pack_bf16((own[2] - less) * scale, (own[3] - less) * scale);
        const uint32_t lows = prmt(first, second, 0x6420), highs = prmt(first, second, 0x7531);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            decoders[h].low[i] = __shfl_sync(~0u, lows, i, 4);
            decoders[h].high[i] = __shfl_sync(~0u, highs, i, 4);
        }
    }
#endif
};
#endif

// A value that stays in a register: the compiler would make it anew at each use.
DEVICE uint32_t kept(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Which bytes of two words a lane keeps, and which another lane gets: with a lane 2 further, then with its neighbour.
struct Transpose {
    static constexpr uint32_t LOW[2] = {BITS == 4 ? 0x5410 : 0x3210, BITS == 4 ? 0x6420 : 0x5410};
    static constexpr uint32_t HIGH[2] = {BITS == 4 ? 0x7632 : 0x7654, BITS == 4 ? 0x7531 : 0x7632};
    uint32_t keep[2], send[2];
    bool upper[2];

    DEVICE Transpose() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            upper[i] = lane_index() & 2 >> i;
            keep[i] = kept(upper[i] ? HIGH[i] : LOW[i]);
            send[i] = kept(upper[i] ? LOW[i] : HIGH[i]);
        }
    }

    DEVICE void exchange(int i, uint32_t first, uint32_t second, uint32_t& of_lower, uint32_t& of_upper) const {
        const uint32_t own = prmt(first, second, keep[i]), other = __shfl_xor_sync(~0u, prmt(first, second, send[i]), 2 >> i);
        of_lower = upper[i] ? other : own;
        of_upper = upper[i] ? own : other;
    }

    // v: word i of it has what this lane multiplies of lane i's load.
    DEVICE void run(const uint32_t (&words)[4], uint32_t (&v)[4]) const {
        uint32_t half[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) exchange(0, words[2 * i], words[2 * i + 1], half[0][i], half[1][i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) exchange(1, half[i][0], half[i][1], v[2 * i], v[2 * i + 1]);
    }
};

// What a lane has loaded of a row of weights.
struct Codes {
    uint32_t words[4], scale, zeros;
};

// The next piece: this lane's rows of weights, and the row of tokens that this thread copies.
struct Source {
    static constexpr bool EVEN = PIECE % BLOCK_COLUMNS == 0 && (STEP % BLOCK_COLUMNS == 0 || BLOCK_COLUMNS % STEP == 0);
    const RowsParams& p;
    const int tiles = before_expert()[p.experts] * ((p.columns + COLUMNS - 1) / COLUMNS);
    int index = blockIdx.x;
    int left, row_left;  // elements of the reduction, from this lane's first on
    RowTile tile;
    const uint8_t *values[2], *scales[2], *row;  // scales: where blocks are not EVEN, of the whole row
    const int* zeros[2];

    DEVICE explicit Source(const RowsParams& params) : p(params) { begin(); }  // then `find_row`

    DEVICE bool any() const { return index < tiles; }

    DEVICE void begin() {
        left = row_left = 0;
        if (!any()) return;
        tile = row_tile_at(p, index, COLUMNS);
        const int own = lane_index() % 4 * LANE_NUMBERS, block = EVEN ? own / BLOCK_COLUMNS : 0;
        const Expert of(p, tile.expert);
        left = p.reduction - own;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = int(p.first_column) + (has_column(p, tile, h) ? column_of(p, tile, h) : 0);
            values[h] = of.values + int64_t(p.blocks_in_row) * at * (BLOCK_COLUMNS * BITS / 8) + own * BITS / 8;
            scales[h] = of.scales + (at / BLOCK_ROWS * p.blocks_in_row + block) * SCALE_BYTES;
            zeros[h] = of.zeros + (at / 8 * p.blocks_in_row + block);
        }
    }

    // The row of tokens. It takes two loads, one after the other.
    DEVICE void find_row() {
        if (!any()) return;
        const int of_tokens = tile.row + threadIdx.x / 8;
        if (of_tokens < tile.row_end) row_left = p.reduction - threadIdx.x % 8 * CHUNK;
        const int64_t from = row_left <= 0 ? 0 : GATHER ? p.pairs.token(__ldg(p.pairs.pair_indices + of_tokens)) : of_tokens;
        const uint8_t* const all = GATHER ? reinterpret_cast<const uint8_t*>(p.source) : matrix(p.a).start;
        row = all + from * p.reduction * OPERAND_BYTES + threadIdx.x % 8 * CHUNK_BYTES;
    }

    // last: whether the piece was its tile's last.
    DEVICE void advance(bool last) {
        left -= PIECE;
        row_left -= PIECE;
        row += PIECE * OPERAND_BYTES;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            values[h] += PIECE * BITS / 8;
            if (EVEN) scales[h] += PIECE / BLOCK_COLUMNS * SCALE_BYTES;
            if (EVEN && HAS_ZEROS) zeros[h] += PIECE / BLOCK_COLUMNS;
        }
        if (!last) return;
        index += gridDim.x;
        begin();
        find_row();
    }

    // Step `step` of the piece. A lane past the end of the reduction keeps old codes, which are finite: the tokens are zeros there.
    DEVICE void load(Codes (&codes)[2], int step) const {
        if (step * STEP >= left) {
            if (BITS == 8) codes[0] = codes[1] = {};  // may be NaN
            return;
        }
        const int block = (EVEN ? step * STEP : p.reduction - left + step * STEP) / BLOCK_COLUMNS;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            load_weights_16(codes[h].words, values[h] + step * STEP * BITS / 8);
            const uint8_t* const scale = scales[h] + block * SCALE_BYTES;
            if (SCALE_BYTES == 1) codes[h].scale = load_u8(scale);
            else codes[h].scale = SCALE_BYTES == 2 ? load_u16(scale) : load_s32(reinterpret_cast<const int*>(scale));
            if (HAS_ZEROS) codes[h].zeros = load_s32(zeros[h] + block);
        }
    }

    // The tokens' part; what lies past the reduction or the expert becomes zeros. Each 8 chunks of a stage's row are swizzled.
    DEVICE void copy(uint32_t stage) const {
        const int at = threadIdx.x / 8;
        const uint32_t place = smem_address(shared_memory()) + stage + at * ROW_BYTES + ((threadIdx.x ^ at) % 8 << 4);
        if (!any()) return;
#pragma unroll
        for (int i = 0; i < ROW_BYTES / SWIZZLE_ROW; ++i)
            cp_async_16(place + i * SWIZZLE_ROW, row + i * SWIZZLE_ROW, i * PANEL < row_left);
    }
};

// 32 numbers of the reduction: A of rows g and g + 8, and B from shared memory. place: of this lane's row in a stage.
DEVICE void multiply(Accumulators& acc, uint4 first, uint4 second, uint32_t place, int group, int rows) {
    place ^= group % 2 << 6;
    const uint32_t a[2][4] = {{first.x, second.x, first.y, second.y}, {first.z, second.z, first.w, second.w}};
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        if (i > 0 && i * 8 >= rows) break;
        uint32_t b[4];
        ldmatrix_x4(b, place + group / 2 * SWIZZLE_ROW + i * 8 * ROW_BYTES);
        mma_m16n8k16(acc[i], a[0], b[0], b[1]);
        mma_m16n8k16(acc[i], a[1], b[2], b[3]);
    }
}

// The low-rank term. rows: of the tile.
DEVICE void add_low_rank(const RowsParams& p, Accumulators& acc, const RowTile& tile, int rows) {
    const Matrix &low = matrix(p.low_rows), &factor = matrix(p.low_weights);
    const int pair = lane_index() % 4 * 2;
    const auto load = [&](const uint8_t* from, int k) {
        return k < p.rank ? load_bf16x2(reinterpret_cast<const bf16*>(from) + k + pair) : 0;
    };
    const uint8_t *weights[2], *tokens[BLOCKS];
#pragma unroll
    for (int h = 0; h < 2; ++h)
        weights[h] = factor.start + tile.expert * factor.strides[2] + (has_column(p, tile, h) ? column_of(p, tile, h) : 0) * factor.strides[0];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) tokens[i] = low.start + min(tile.row + i * 8 + lane_index() / 4, tile.row_end - 1) * low.strides[0];
#pragma unroll 1
    for (int k = 0; k < p.rank; k += 16) {
        const uint32_t a[4] = {load(weights[0], k), load(weights[1], k), load(weights[0], k + 8), load(weights[1], k + 8)};
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
            if (i * 8 < rows) mma_m16n8k16(acc[i], a, load(tokens[i], k), load(tokens[i], k + 8));
    }
}

DEVICE void store(const RowsParams& p, const Accumulators& acc, const RowTile& tile) {
    const int columns[2] = {column_of(p, tile, 0), column_of(p, tile, 1)};
    const bool has[2] = {has_column(p, tile, 0), has_column(p, tile, 1)};
    const bf16* const biases = p.bias + int64_t(tile.expert) * p.bias_stride;
    uint32_t bias = 0;
    if (HAS_BIAS) bias = (has[0] ? __ldg(biases + columns[0]) : 0) | (has[1] ? __ldg(biases + columns[1]) : 0) << 16;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        const int row = tile.row + i / 2 * 8 + lane_index() % 4 * 2 + i % 2;
        if (row >= tile.row_end) continue;
        const uint32_t both = pack_biased(acc[i / 2][i % 2], acc[i / 2][2 + i % 2], bias);
#ifdef GATED
        const float low = bf16_low(both), high = bf16_high(both);
        const uint32_t acts = GATED ? pack_bf16(act_of(low, high), 0) : pack_bf16(act_of(low, 0), act_of(high, 0));
        bf16* const act = p.out1_rows + int64_t(row) * (ALTERNATING ? p.columns / 2 : p.columns);
#endif
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!has[h]) continue;
            p.out0_rows[int64_t(row) * HALVES * p.columns + columns[h]] = bf16(both >> 16 * h);
#ifdef GATED
            if (!GATED || h == 0) act[ALTERNATING ? columns[h] / 2 : columns[h]] = bf16(acts >> 16 * h);
#endif
        }
    }
}

#ifdef GATED
#define ENTRY up_forward
#else
#define ENTRY linear
#endif
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ENTRY(const __grid_constant__ RowsParams p) {
    const int* offsets = p.offsets;
    sum_before_experts(p.experts, [=](int e) { return (offsets[e + 1] - offsets[e] + BM - 1) / BM; });
    Source next(p);
    Codes codes[AHEAD][2] = {};
    QuadDecoder decoder;
    const Transpose transpose;
    const int lane_row = lane_index() % 8;
    const uint32_t lane_place = kept(smem_address(shared_memory()) + lane_row * ROW_BYTES + ((lane_index() / 8 ^ lane_row) << 4));
    uint32_t stage = 0;  // its offset: 0 or STAGE_BYTES
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) next.load(codes[step], step);
    next.find_row();
    next.copy(stage);
    cp_async_commit_group();
    while (next.any()) {
        const int index = next.index, rows = next.tile.row_end - next.tile.row;
        int in_word[2];  // of zero points
#pragma unroll
        for (int h = 0; h < 2; ++h) in_word[h] = (int(p.first_column) + column_of(p, next.tile, h)) % 8 * 4;
        Accumulators acc = {};
#pragma unroll 1
        for (int k = 0; k < p.reduction; k += PIECE) {
            cp_async_wait_group<0>();
            __syncthreads();  // this piece has landed, and every warp has multiplied the one before
            next.advance(k + PIECE >= p.reduction);
            next.copy(stage ^ STAGE_BYTES);
            cp_async_commit_group();
#pragma unroll
            for (int step = 0; step < AHEAD; ++step) {
                if (k + step * STEP >= p.reduction) {
                    next.load(codes[step], step);
                    continue;
                }
                uint32_t v[2][4], scale[2], zeros[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    transpose.run(codes[step][h].words, v[h]);
                    scale[h] = QuadDecoder::shared_bits(codes[step][h].scale);
                    zeros[h] = HAS_ZEROS ? codes[step][h].zeros >> in_word[h] & 15 : 0;
                }
                next.load(codes[step], step);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    uint4 numbers[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int owner = group * (4 / GROUPS);  // the lane that has loaded the block's scale
                        if (STEP % BLOCK_COLUMNS && BLOCK_COLUMNS % STEP || group * RUN % BLOCK_COLUMNS == 0)
                            decoder.set(h, __shfl_sync(~0u, scale[h], owner, 4), HAS_ZEROS ? __shfl_sync(~0u, zeros[h], owner, 4) : 0);
                        numbers[h] = decoder.chunk(h, v[h], group);
                    }
                    multiply(acc, numbers[0], numbers[1], stage + lane_place, step * GROUPS + group, rows);
                }
            }
            stage ^= STAGE_BYTES;
        }
        const RowTile tile = row_tile_at(p, index, COLUMNS);  // anew, for want of registers
        if (LOW_RANK) add_low_rank(p, acc, tile, rows);
        store(p, acc, tile);
    }
}
