// Weight gradients: for every expert, the gathered rows of one matrix against the expert-ordered rows of another.
//
//   TRANSPOSED 0   dW_down[e] (d, n)  = sum_r dO[token(r)]^T A'[r]    MoEBlaze Algorithm 1, line 18; SonicMoE Algorithm 3
//   TRANSPOSED 1   dW_up[e]   (2n, d) = sum_r dH[r]^T x[token(r)]     Algorithm 1, line 29; SonicMoE Algorithm 5
//
//   gathered rows, 64 at a time --cp.async--> A (64 x BM)  \      (GATHER 0: rows that lie in order already, by TMA)
//                                                            wgmma, both operands MN-major -> acc (BM x BN)
//   ordered rows,  64 at a time --TMA-------> B (64 x BN)  /      acc[i, j] = sum_r gathered[r, i] ordered[r, j]
//
// The gathered matrix (d wide) is always A. So dW_up is computed transposed, and stmatrix transposes it back on its way to
// memory.
//
// The last 64 rows of an expert may include rows of the next expert, or rows that were never written. Both operands get
// zeros there, for 0 x NaN is NaN: in that block the producer copies the ordered rows too by cp.async, which writes zeros
// past the expert's end.
//
// weight_schedule.cuh assigns the work. Some of it may be partial tiles, which are left in fp32 for weight_sum.cu to add.
//
// FP16 1: the ordered rows are fp16, and each has a scale that its gathered row is multiplied by (fp16.cuh): a router's dW.
//
// OUT_F32 1 writes fp32, and with `accumulate` adds to what is there.
//
// Floor: max(2 d width R / 785 TFLOP/s, 2 (d T + width R + d width E) bytes / 4.24 TB/s).
#include "epilogue.cuh"
#include "weight_schedule.cuh"

constexpr int A_PANELS = BM / PANEL, B_PANELS = BN / PANEL;
static_assert(B_PANELS % CLUSTER == 0, "the CTAs of a cluster share them");
constexpr int PASSES = BK / PASS_ROWS;
constexpr int NUMBERED_STEPS = NUMBERED_ROWS / BK;  // steps for which the producer holds row numbers

// ---- producer --------------------------------------------------------------------------------------------------------
struct WeightProducer {
    static constexpr int MN_A = 1, MN_B = 1;
    static constexpr int WARPS = WARPGROUP_WARPS;

    template <class Epilogue>
    DEVICE static void produce(const WeightParams& params, const WeightScheduler& scheduler) {
        WeightProducer producer(params);
        int next_pair = GATHER ? producer.first_pair(scheduler, 0) : -1;
        for (int position = 0; position < scheduler.count(); ++position) {
            MARK(AT, TILE);
            if (GATHER) producer.produce_gathered(scheduler, position, next_pair);
            else producer.produce_in_order(scheduler.at(position));
        }
    }

   private:
    const WeightParams& p;
    uint32_t offset = gather_offset();
    Ring ring;

    DEVICE explicit WeightProducer(const WeightParams& params) : p(params) {}

    // This CTA's part of the B stage, to every CTA of the cluster.
    DEVICE void load_ordered(int tile_column, int row) const {
        constexpr int OWN_PANELS = B_PANELS / CLUSTER;
        constexpr uint16_t EVERY_CTA = (1 << CLUSTER) - 1;
#pragma unroll
        for (int i = 0; i < OWN_PANELS; ++i) {
            const int panel = WeightScheduler::rank() * OWN_PANELS + i, column = tile_column + panel * PANEL;
            const uint32_t dst = ring.b() + panel * PANEL_BYTES;
            if constexpr (CLUSTER == 1) tma_load_2d(dst, &p.ordered, ring.full_barrier(), column, row);
            else tma_load_2d_multicast(dst, &p.ordered, ring.full_barrier(), column, row, EVERY_CTA);
        }
    }

    // next_pair: on entry, of the row of this tile whose number this thread computes first; on return, of the next tile's.
    DEVICE void produce_gathered(const WeightScheduler& scheduler, int position, int& next_pair) {
        const WeightTile tile = scheduler.at(position);
        const int column = tile.i + gather_column();
        const uint4* chunks = reinterpret_cast<const uint4*>(p.gathered_rows + column);
        uint32_t own_start = NO_ROW;
        int numbered = 0;  // steps that own_start still has rows for
        for (int row = tile.row; row < tile.row_end; row += BK) {
            if (numbered == 0) {
                own_start = row_start(p.pairs, next_pair, p.gathered_width);
                const int ahead = row + NUMBERED_ROWS;  // the pairs are loaded so many rows before they are used
                next_pair = ahead < tile.row_end ? load_pair(p.pairs, ahead, tile.row_end) : first_pair(scheduler, position + 1);
                numbered = NUMBERED_STEPS;
            }
            const RowChunks<PASSES> rows(chunks, own_start, (NUMBERED_STEPS - numbered--) * PASSES);
            const bool tail = row + BK > tile.row_end;
            ring.wait_until_empty();
            if (threadIdx.x == 0) {
                MARK(BEGIN, TMA);
                if (tail) {
                    mbarrier_arrive(ring.full_barrier());
                } else {
                    mbarrier_arrive_expect_tx(ring.full_barrier(), B_BYTES);
                    load_ordered(tile.j, row);
                }
                MARK(END, TMA);
            }
            MARK(BEGIN, COPY);
            if (tail) {
                copy_rows<A_PANELS, false, PASSES>(ring.a() + offset, rows, p.gathered_width - column);
                copy_tail<B_PANELS>(ring.b(), p.ordered_rows, p.ordered_width, tile.j + gather_column(), row, tile.row_end);
            } else {
                copy_rows<A_PANELS, true, PASSES>(ring.a() + offset, rows, p.gathered_width - column);
            }
            cp_async_mbarrier_arrive(ring.full_barrier());
            MARK(END, COPY);
            ring.advance();
        }
        // For an expert without rows the loop has not loaded the next tile's pairs.
        if (tile.row == tile.row_end) next_pair = first_pair(scheduler, position + 1);
    }

    DEVICE int first_pair(const WeightScheduler& scheduler, int position) const {
        if (position >= scheduler.count()) return -1;
        const WeightTile tile = scheduler.at(position);
        return load_pair(p.pairs, tile.row, tile.row_end);
    }

    // GATHER 0. One thread issues TMA loads; all threads copy the block that includes rows past the expert's end.
    DEVICE void produce_in_order(const WeightTile& tile) {
        const bool loads = threadIdx.x < 32;
        int row = tile.row;
        for (; row + BK <= tile.row_end; row += BK) {
            if (loads) ring.wait_until_empty();
            if (threadIdx.x == 0) {
                MARK(BEGIN, TMA);
                mbarrier_arrive_expect_tx(ring.full_barrier(), STAGE_BYTES);
                load_ordered(tile.j, row);
#pragma unroll
                for (int panel = 0; panel < A_PANELS; ++panel)
                    tma_load_2d(ring.a() + panel * PANEL_BYTES, &p.in_order, ring.full_barrier(), tile.i + panel * PANEL, row);
                MARK(END, TMA);
            }
            ring.advance();
        }
        if (row == tile.row_end) return;
        if (loads) ring.wait_until_empty();
        __syncwarp();
        named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);
        MARK(BEGIN, COPY);
        copy_tail<A_PANELS>(ring.a(), p.gathered_rows, p.gathered_width, tile.i + gather_column(), row, tile.row_end);
        copy_tail<B_PANELS>(ring.b(), p.ordered_rows, p.ordered_width, tile.j + gather_column(), row, tile.row_end);
        cp_async_wait_all();
        MARK(END, COPY);
        fence_proxy_async();
        named_barrier_sync(PRODUCER_BARRIER, WARPGROUP);
        if (threadIdx.x == 0) mbarrier_arrive(ring.full_barrier());
        ring.advance();
    }

    // BK rows of `matrix` from `row` on, with zeros from `row_end` on.
    template <int PANELS>
    DEVICE void copy_tail(uint32_t stage, const bf16* matrix, int width, int column, int row, int row_end) const {
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + pass * PASS_ROWS + gather_row();
            const uint32_t dst = stage + pass * PASS_ROWS * SWIZZLE_ROW + offset;
            const bf16* src = matrix + int64_t(min(r, row_end - 1)) * width + column;
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                cp_async_16(dst + panel * PANEL_BYTES, src + panel * PANEL, r < row_end && column + panel * PANEL < width);
        }
    }
};

#include "weight_epilogue.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(PTXAS_THREADS, 1)
    weight_gradient(const __grid_constant__ WeightParams p) {
    run<WeightScheduler, WeightProducer, WeightEpilogue>(p);
}
