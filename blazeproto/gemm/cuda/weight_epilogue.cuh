// What weight gradients do with a tile: bf16 by slabs, or fp32, written or added. For a WeightScheduler, whose tiles have `expert`, `i`
// and `j`, a row and a column of the gradient, and WeightParams, which have `out`, `out_f32`, `gathered_width` and `ordered_width`, the
// gradient's rows and columns, and `accumulate`.
#pragma once
#include "epilogue.cuh"

struct WeightEpilogue : PlainEpilogue<WeightScheduler> {
    // A strip is staged whole where it fits beside the stages, else in parts of two slabs.
    static constexpr int STRIP_SLABS = BN / SLAB, STRIP_SLABS_BYTES = STRIP_SLABS * SLAB_BYTES;
    static constexpr bool FITS = EPILOGUE_OFFSET + CONSUMERS * STRIP_SLABS_BYTES <= WeightScheduler::SMEM_OFFSET;
    static constexpr int SLABS = FITS ? STRIP_SLABS : 2;
    static constexpr int SMEM_BYTES = SLABS * SLAB_BYTES, PARTS = OUT_F32 ? 0 : STRIP_SLABS / SLABS;
    const WeightParams& p;
    uint32_t out[BN / 4];
    WeightTile tile;

    DEVICE explicit WeightEpilogue(const WeightParams& params) : p(params) {}

    DEVICE void hold(const float (&acc)[BN / 2], const WeightTile& of, const Ring&) {
        tile = of;
        if constexpr (OUT_F32) {
            MARK(BEGIN, STORE);
            store_f32(acc);
            MARK(END, STORE);
            return;
        }
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) out[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }

    template <int INDEX>
    DEVICE void part() {
        const uint32_t slabs = shared_at(EPILOGUE_OFFSET + consumer_index() * SMEM_BYTES);
        skip_slab();  // what was stored last has been read
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            write_slab<TRANSPOSED>(slabs + slab * SLAB_BYTES, out + (INDEX * SLABS + slab) * PAIRS_IN_SLAB);
        MARK(BEGIN, STORE);
        fence_proxy_async();
        warpgroup_sync();
        if (warpgroup_thread() == 0) {
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const int i = tile.i, j = tile.j + (INDEX * SLABS + slab) * SLAB;
                if (i < p.gathered_width && j < p.ordered_width)
                    tma_store_3d(&p.out, slabs + slab * SLAB_BYTES, TRANSPOSED ? i : j, TRANSPOSED ? j : i, tile.expert);
            }
            bulk_commit_group();
        }
        MARK(END, STORE);
    }

    // weight_sum.cu reads it in the same order.
    DEVICE static void store_partial(const float (&acc)[BN / 2], float4* partial) {
        const int consumer = int(thread_index()) - WARPGROUP;
#pragma unroll
        for (int x = 0; x < BN / 2; x += 4)
            partial[x / 4 * CONSUMERS * WARPGROUP + consumer] = make_float4(acc[x], acc[x + 1], acc[x + 2], acc[x + 3]);
    }

    // One thread adds to an element, and launches run one after the other, so additions come in a fixed order. They are
    // reductions in memory, which no thread waits for; a load and a store would wait for memory once for each element.
    DEVICE void store_f32(const float (&acc)[BN / 2]) const {
        float* expert = p.out_f32 + int64_t(tile.expert) * p.gathered_width * p.ordered_width;
#pragma unroll
        for (int x = 0; x < BN / 2; x += 2) {  // a row, two neighbouring columns
            const int i = tile.i + strip_row(x / 2 % 2), j = tile.j + x / 4 * 8 + threadIdx.x % 4 * 2;
            if (i >= p.gathered_width || j >= p.ordered_width) continue;
            float* first = expert + (TRANSPOSED ? i + int64_t(j) * p.gathered_width : int64_t(i) * p.ordered_width + j);
            if (p.accumulate && TRANSPOSED) {
                reduce_add_f32(first, acc[x]);
                reduce_add_f32(first + p.gathered_width, acc[x + 1]);
            } else if (p.accumulate) {
                reduce_add_f32x2(first, acc[x], acc[x + 1]);
            } else if (TRANSPOSED) {
                first[0] = acc[x];
                first[p.gathered_width] = acc[x + 1];
            } else {
                *reinterpret_cast<float2*>(first) = make_float2(acc[x], acc[x + 1]);
            }
        }
    }
};
