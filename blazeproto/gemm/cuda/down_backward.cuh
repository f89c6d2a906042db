// What the down projection's backward has for every type of operands (down_backward.cu, down_backward_fp8.cu): H comes through the
// ring behind a tile's stages, UNITS hidden units a stage, in whose place dgate, dup and A' are made; all three are stored from there.
#pragma once
#include "activation.cuh"
#include "epilogue.cuh"
#include "varlen_m.cuh"

using Scheduler = TileScheduler<BN>;

// WHOLE: whether columns are whole stages.
template <int UNITS, bool WHOLE>
struct DownBackward : PlainEpilogue<Scheduler> {
    static constexpr int SMEM_BYTES = 0, PARTS = 0;
    static constexpr int PLANE_BYTES = BM * SWIZZLE_ROW;  // gate, up or A' of a stage
    static_assert(3 * PLANE_BYTES <= STAGE_BYTES, "gate, up and A' of a tile's rows in one stage");
    const RowsParams& p;
    uint32_t unreleased = 0;     // the empty barrier of the stage that is still being stored, or 0
    float token_scale[2];        // of quantized dO of this thread's rows
    float score[2], d_score[2];  // S and dS of this thread's rows
    RowTile tile;

    DEVICE explicit DownBackward(const RowsParams& params) : p(params) {}

    // The stages of H, behind a tile's stages of A and B.
    DEVICE static int ring_stages(const RowsParams& p, const RowTile& of) {
#if CLUSTER > 1
        return BN / UNITS;  // the same for every CTA of the cluster
#else
        return (min(BN, p.columns - of.column) + (WHOLE ? 0 : UNITS - 1)) / UNITS;
#endif
    }

    // The tile before is stored before its last stage is needed again: no stage would come otherwise.
    template <class SkipTile>
    DEVICE void skip(SkipTile skip_tile) {
        release_stored();
        skip_tile();
    }

   protected:
    // Waits until TMA has read the stage that was stored last, and releases it. One thread arrives for its consumer's four
    // warps.
    DEVICE void release_stored() {
        if (warpgroup_thread() == 0 && unreleased) {
            bulk_wait_group_read<0>();
#if CLUSTER > 1
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) mbarrier_arrive_cluster(unreleased, rank, WARPGROUP_WARPS);
#else
            mbarrier_arrive(unreleased, WARPGROUP_WARPS);
#endif
        }
        unreleased = 0;
    }

    // Of one hidden unit in row h. Adds to the row's sum of dS.
    DEVICE Unit of_unit(float gate, float up_value, float d_a, int h) {
        const auto [value, slope] = nonlinearity(gate);
        const auto [up, up_slope] = GATED ? linear_half(up_value) : ValueAndSlope{1.0f, 0.0f};
        const float act = value * up, d_a_scaled = score[h] * d_a;
        d_score[h] += d_a * act;
        return {d_a_scaled * up * slope, d_a_scaled * value * up_slope, score[h] * act};
    }

    // A row's sum over this tile's columns, in a fixed order: a thread's columns, then the four lanes of a row.
    DEVICE void store_score_gradient() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 1);
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 2);
            const int row = tile.row + strip_row(h);
            if (threadIdx.x % 4 == 0 && row < tile.row_end)
                p.reduction_out[int64_t(tile.column / BN) * p.rows + row] = d_score[h];
        }
    }
};
