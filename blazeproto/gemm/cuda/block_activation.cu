// The experts' nonlinearity on a block-sparse H, block by block of act, and its derivative. MegaBlocks section 5.1. Memory-bound.
//
//   block_activate            act = f(gate) * g(up), or f(h) without a gate      H (G nnz, 128, 128) -> act (nnz, 128, 128)
//   block_activate_backward   dH of H and dact                                   G: 2 with a gate, else 1
//
// act's topology (blocks.cuh) says how many blocks there are, and, for gate and up in HALVES, where H has the two. Row r of act has
// w blocks from row_offsets[r] on, and row r of H twice as many from 2 row_offsets[r] on, gate's and then up's:
//
//   act, row r            b                       gate of b: b + row_offsets[r]
//   H,   row r    g g g g g   u u u u u           up of b:   b + row_offsets[r + 1]
//
// Where they alternate in the columns (layout.cuh), b is made of H's blocks 2 b and 2 b + 1.
//
// A thread has 8 neighbouring numbers of act, 16 bytes, and as many of gate and of up.
//
// Floor: 2 (G + 1) 128^2 bytes a block, backward 2 (2 G + 1) 128^2, / 4.24 TB/s.
//
// -D: those of activation.cuh and layout.cuh;  THREADS  threads in a CTA;  BM  rows and columns of a block
#include "layout.cuh"

constexpr int BLOCK = BM;
constexpr int BLOCK_ELEMENTS = BLOCK * BLOCK;
constexpr int PARTS = BLOCK_ELEMENTS / (THREADS * CHUNK);  // of a block: a CTA computes one at a time

static_assert(BLOCK_ELEMENTS % (THREADS * CHUNK) == 0, "whole parts");

DEVICE void load(float* x, const bf16* address) { unpack(x, *reinterpret_cast<const uint4*>(address)); }

DEVICE void store(bf16* address, const float* x) { *reinterpret_cast<uint4*>(address) = pack_chunk(x); }

// Where H has what a chunk of act is made of: one chunk without a gate, else two.
struct Places {
    int64_t first, second;
};

DEVICE Places places_in_h(int64_t block, int inside, const int* row_indices, const int* row_offsets) {
    if (!GATED) return {block * BLOCK_ELEMENTS + inside, 0};
    if (ALTERNATING) {
        const int row = inside / BLOCK, column = 2 * (inside % BLOCK);
        const int64_t place = (2 * block + column / BLOCK) * BLOCK_ELEMENTS + row * BLOCK + column % BLOCK;
        return {place, place + CHUNK};
    }
    const int row = __ldg(row_indices + block);
    return {(block + __ldg(row_offsets + row)) * BLOCK_ELEMENTS + inside,
            (block + __ldg(row_offsets + row + 1)) * BLOCK_ELEMENTS + inside};
}

// Gate i and up i of the 2 CHUNK numbers at the two places.
DEVICE int gate_at(int i) { return ALTERNATING ? 2 * i : i; }
DEVICE int up_at(int i) { return ALTERNATING ? 2 * i + 1 : CHUNK + i; }

// Calls work(block, inside) for each chunk of act that is this thread's.
template <class Work>
DEVICE void for_chunks(const int* row_offsets, int64_t rows, Work work) {
    const int64_t parts = int64_t(PARTS) * __ldg(row_offsets + rows);
    for (int64_t part = blockIdx.x; part < parts; part += gridDim.x)
        work(part / PARTS, (int(part % PARTS) * THREADS + int(threadIdx.x)) * CHUNK);
}

DEVICE void load_h(float (&h)[2 * CHUNK], const bf16* address, Places places) {
    load(h, address + places.first);
    if (GATED) load(h + CHUNK, address + places.second);
}

extern "C" __global__ void __launch_bounds__(THREADS)
block_activate(const bf16* h, const int* row_indices, const int* row_offsets, bf16* act, int64_t rows) {
    for_chunks(row_offsets, rows, [&](int64_t block, int inside) {
        float x[2 * CHUNK], y[CHUNK];
        load_h(x, h, places_in_h(block, inside, row_indices, row_offsets));
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const float value = nonlinearity(x[gate_at(i)]).value;
#if GATED
            y[i] = value * linear_half(x[up_at(i)]).value;
#else
            y[i] = value;
#endif
        }
        store(act + block * BLOCK_ELEMENTS + inside, y);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
block_activate_backward(const bf16* h, const bf16* d_act, const int* row_indices, const int* row_offsets, bf16* d_h,
                        int64_t rows) {
    for_chunks(row_offsets, rows, [&](int64_t block, int inside) {
        const Places places = places_in_h(block, inside, row_indices, row_offsets);
        float x[2 * CHUNK], dx[2 * CHUNK], dy[CHUNK];
        load_h(x, h, places);
        load(dy, d_act + block * BLOCK_ELEMENTS + inside);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const ValueAndSlope f = nonlinearity(x[gate_at(i)]);
#if GATED
            const ValueAndSlope g = linear_half(x[up_at(i)]);
            dx[gate_at(i)] = dy[i] * g.value * f.slope;
            dx[up_at(i)] = dy[i] * f.value * g.slope;
#else
            dx[i] = dy[i] * f.slope;
#endif
        }
        store(d_h + places.first, dx);
        if (GATED) store(d_h + places.second, dx + CHUNK);
    });
}
