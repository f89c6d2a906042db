// Clusters of two CTAs that share weights: what varlen_m.cuh adds with CLUSTER 2. It pays where an expert has few row blocks and
// wide weights (gemm/tiles.py).
//
// The unit of a cluster is two row blocks of an expert and a column block. Each CTA loads half of the weights' part of a stage and
// multicasts it to both, which halves what weights cost in L2 bandwidth. The last row block, where their number is odd, has no
// partner: both CTAs compute it, on two column blocks, and each loads its own weights. So no tile is wasted on rows that are not
// there, but for the last column block where that number is odd too.
//
//                    column 0   column 1   column 2   column 3           unit     CTA 0    CTA 1
//   row block 0    |    0     |    1     |    2     |    3     |         0 .. 3   row 0    row 1, the same columns: shared
//   row block 1    |    0     |    1     |    2     |    3     |         4        row 2,   row 2,
//   row block 2    |    4     |    4     |    5     |    5     |                  column 0 column 1: each its own
//
// A stage is free when the consumers of both CTAs have read it, since either may write to both.
#pragma once
#include "tiles.cuh"

DEVICE void tma_load_3d_multicast(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, uint16_t ctas) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(ctas) : "memory");
}

// `count` arrivals at the same barrier of CTA `rank`; like mbarrier_arrive_cluster_if it publishes no write.
DEVICE void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank, uint32_t count) {
    maybe_delay();
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n}\n"
                 ::"r"(barrier), "r"(rank), "r"(count) : "memory");
}

// One half of the B part of a stage: to every CTA of the cluster, or to this one alone.
template <int COLUMNS>
DEVICE void load_half_of_weights(const TensorMap& weights, const Ring& ring, const RowTile& tile, int k, int half, bool shared) {
    constexpr uint16_t EVERY_CTA = (1 << CLUSTER) - 1;
    if constexpr (B_MN) {
#pragma unroll
        for (int i = 0; i < BN / PANEL / 2; ++i) {
            const int panel = half * (BN / PANEL / 2) + i;
            const uint32_t dst = ring.b() + panel * PANEL_BYTES;
            const int column = tile.column + panel * PANEL % COLUMNS, of_two = panel * PANEL / COLUMNS;
            if constexpr (COLUMNS == BN) {
                if (shared) tma_load_3d_multicast(dst, &weights, ring.full_barrier(), column, k, tile.expert, EVERY_CTA);
                else tma_load_3d(dst, &weights, ring.full_barrier(), column, k, tile.expert);
            } else {
                if (shared)
                    tma_load_4d_multicast(dst, &weights, ring.full_barrier(), column, k, of_two, tile.expert, EVERY_CTA);
                else tma_load_4d(dst, &weights, ring.full_barrier(), column, k, of_two, tile.expert);
            }
        }
    } else {
        const uint32_t dst = ring.b() + half * (B_BYTES / 2);
        const int column = COLUMNS == BN ? tile.column + half * (BN / 2) : tile.column, of_two = COLUMNS == BN ? 0 : half;
        if (shared) tma_load_4d_multicast(dst, &weights, ring.full_barrier(), k, column, of_two, tile.expert, EVERY_CTA);
        else tma_load_4d(dst, &weights, ring.full_barrier(), k, column, of_two, tile.expert);
    }
}

template <int COLUMNS>
DEVICE void load_weights(const TensorMap& weights, const Ring& ring, const RowTile& tile, int k, bool shared) {
    if (shared) {
        load_half_of_weights<COLUMNS>(weights, ring, tile, k, blockIdx.x % CLUSTER, true);
    } else {
#pragma unroll
        for (int half = 0; half < CLUSTER; ++half) load_half_of_weights<COLUMNS>(weights, ring, tile, k, half, false);
    }
}
