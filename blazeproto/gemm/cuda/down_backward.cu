// Down projection, backward to the activations. MoEBlaze Algorithm 1, lines 20-28; SonicMoE Algorithm 3 and appendix D.
//
//   dA'[r] = dO[token(r)] . W_down[e]            dO (T, d) gathered, W_down (E, d, n) MN-major; stays in registers
//   act    = f(gate) * up, recomputed from H     H (R, 2n) or (R, n)
//   dS[p]  = <dA'[r], act>                       partial sums over this tile's columns, added in order by a later kernel
//   dH[r]  = S[p] dA'[r] times act's derivative  dH like H
//   A'[r]  = S[p] act                            the weight gradient's operand (R, n)
//
//   dO rows --gather--> A  \                        H slabs --TMA--> | gate | up |   (the next ones on their way all the while)
//                            wgmma -> acc = dA'  ->   ldmatrix, derivative, stmatrix in place
//   W_down  --TMA-----> B  /                                         | dgate | dup | + | A' |  --TMA--> dH, A'
//
// The slabs here are 64 rows x 32 columns (64-byte swizzle): half as wide as elsewhere, so that four of H fit beside 3 stages.
//
// Floor: max(2 n d R / 785 TFLOP/s, (2 d T + 2 n d E + 2 (2n + 2n + n) R) bytes / 4.24 TB/s) for a gated layer.
#include "activation.cuh"
#include "varlen_m.cuh"

static_assert(!DEFERRED, "measured slower: dA' stays in fp32, and what fits beside the next tile's accumulators gains nothing");
constexpr bool GATED = is_gated(ACTIVATION);

constexpr int SLAB_COLUMNS = 32;
constexpr int NARROW_ROW = SLAB_COLUMNS * 2;      // bytes
constexpr int NARROW_BYTES = STRIP * NARROW_ROW;

// As slab_address, for 64-byte rows: chunk c of row r at c ^ (r / 2 % 4).
DEVICE uint32_t narrow_address(uint32_t slab, int block) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
    const int row = warp * 16 + lane % 16, chunk = 2 * block + lane / 16;
    return slab + row * NARROW_ROW + ((chunk ^ (row >> 1 & 3)) << 4);
}

DEVICE void store_narrow_predicated(uint32_t slab, bf16* out, int64_t row_stride, int rows, int columns) {
    const int chunk = warpgroup_thread() % 4;
#pragma unroll
    for (int row = warpgroup_thread() / 4; row < 64; row += WARPGROUP / 4)
        if (row < rows && chunk * 8 < columns)
            *reinterpret_cast<uint4*>(out + row * row_stride + chunk * 8) =
                load_shared_16(slab + row * NARROW_ROW + ((chunk ^ (row >> 1 & 3)) << 4));
}

struct DownBackwardEpilogue {
    static constexpr int SLOTS = 4;  // slabs of H in shared memory
    static constexpr int H_BYTES = (GATED ? 2 : 1) * NARROW_BYTES;
    static constexpr int SMEM_BYTES = SLOTS * H_BYTES + 2 * NARROW_BYTES;
    static_assert(SLOTS * 8 <= EPILOGUE_BARRIER_BYTES, "a barrier a slot");
    static constexpr int PARTS = BN / SLAB_COLUMNS, EAGER = 0;
    static_assert(PARTS % SLOTS == 0, "a tile leaves every slot's barrier in the same phase");
    static constexpr bool PREFETCHES = true;
    const RowsParams& p;
    uint32_t h_phase = 0;
    float d_act[BN / 2];  // dA'
    float score[2], d_score[2];  // S and dS of this thread's rows
    Tile tile;

    DEVICE explicit DownBackwardEpilogue(const RowsParams& params) : p(params) {}

    DEVICE void init() {
        if (warpgroup_thread() != 0) return;
        for (int slot = 0; slot < SLOTS; ++slot) mbarrier_init(h_barrier(slot), 1);
        fence_mbarrier_init();
    }

    DEVICE static uint32_t h_slot(int index) { return epilogue_memory(SMEM_BYTES) + index % SLOTS * H_BYTES; }
    DEVICE static uint32_t a_slab(int index) { return epilogue_memory(SMEM_BYTES) + SLOTS * H_BYTES + index % 2 * NARROW_BYTES; }
    DEVICE static uint32_t h_barrier(int index) { return epilogue_barriers() + index % SLOTS * 8; }

    // Gate and up of slab `index` of a tile into its slot, by one thread.
    DEVICE void load_h(const Tile& of, int index) const {
        mbarrier_arrive_expect_tx(h_barrier(index), H_BYTES);
        tma_load_3d(h_slot(index), &p.h, h_barrier(index), of.column + index * SLAB_COLUMNS, of.row, 0);
    }

    // The last tile's stores have to be out of the slots before this tile's H comes in: a short wait, with a stage under way.
    DEVICE void prefetch(const Tile& next) {
        if (warpgroup_thread() != 0) return;
        bulk_wait_group_read<0>();
        for (int index = 0; index < SLOTS; ++index) load_h(next, index);
    }

    DEVICE void hold(const float (&acc)[BN / 2], const Tile& of) {
        tile = of;
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) d_act[i] = acc[i];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile.row + strip_row(h);
            score[h] = row < tile.row_end ? __ldg(p.scores + __ldg(p.pairs.pair_indices + row)) : 0.0f;
            d_score[h] = 0.0f;
        }
    }

    // One 16-column block in place: gate, up -> dgate, dup, and A'. Adds to the row sums of dS.
    DEVICE void differentiate(const float* d_acts, uint32_t gates_at, uint32_t scaled_at) {
        uint32_t gates[4], ups[4], scaled[4];
        ldmatrix_x4(gates, gates_at);
        if (GATED) ldmatrix_x4(ups, gates_at + NARROW_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrices 0, 2: rows l / 4; 1, 3: rows 8 + l / 4
            const int h = i % 2;
            float d_gate[2], d_up[2], a[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const auto [value, slope] = nonlinearity<ACTIVATION>(j ? bf16_high(gates[i]) : bf16_low(gates[i]));
                const float up = GATED ? (j ? bf16_high(ups[i]) : bf16_low(ups[i])) : 1.0f;
                const float d_a = d_acts[2 * i + j], act = value * up, d_a_scaled = score[h] * d_a;
                d_gate[j] = d_a_scaled * up * slope;
                d_up[j] = d_a_scaled * value;
                a[j] = score[h] * act;
                d_score[h] += d_a * act;
            }
            gates[i] = pack_bf16(d_gate[0], d_gate[1]);
            ups[i] = pack_bf16(d_up[0], d_up[1]);
            scaled[i] = pack_bf16(a[0], a[1]);
        }
        stmatrix_x4(gates_at, gates);
        if (GATED) stmatrix_x4(gates_at + NARROW_BYTES, ups);
        stmatrix_x4(scaled_at, scaled);
    }

    DEVICE void store_tail(int index, int column) const {
        const int64_t stride = (GATED ? 2 : 1) * p.columns;
        const int rows = tile.row_end - tile.row, columns = p.columns - column;
        bf16* dh = p.out0_rows + tile.row * stride + column;
        store_narrow_predicated(h_slot(index), dh, stride, rows, columns);
        if (GATED) store_narrow_predicated(h_slot(index) + NARROW_BYTES, dh + p.columns, stride, rows, columns);
        store_narrow_predicated(a_slab(index), p.out1_rows + int64_t(tile.row) * p.columns + column, p.columns, rows, columns);
        fence_proxy_async();  // TMA writes the slot next
    }

    // A row's sum over this tile's columns, in a fixed order: a thread's columns, then the four lanes of a row.
    DEVICE void store_score_gradient() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 1);
            d_score[h] += __shfl_xor_sync(~0u, d_score[h], 2);
            const int row = tile.row + strip_row(h);
            if (threadIdx.x % 4 == 0 && row < tile.row_end)
                p.reduction_out[int64_t(tile.column / TILE_COLUMNS) * p.rows + row] = d_score[h];
        }
    }

    template <int INDEX>
    DEVICE void part() {
        const int column = tile.column + INDEX * SLAB_COLUMNS;
        const bool whole = tile.row + STRIP <= tile.row_end;
        mbarrier_wait(h_barrier(INDEX), h_phase);
        if (INDEX % SLOTS == SLOTS - 1) h_phase ^= 1;
#pragma unroll
        for (int block = 0; block < SLAB_COLUMNS / 16; ++block)
            differentiate(d_act + INDEX * (SLAB_COLUMNS / 2) + block * 8, narrow_address(h_slot(INDEX), block),
                          narrow_address(a_slab(INDEX), block));
        fence_proxy_async();
        if (warpgroup_thread() == 0) bulk_wait_group_read<0>();  // the slab before is out: its slot and its A' are free
        warpgroup_sync();
        if (warpgroup_thread() == 0) {
            if (INDEX > 0 && INDEX + SLOTS - 1 < PARTS) load_h(tile, INDEX + SLOTS - 1);
            if (whole) {
                tma_store_3d(&p.out0, h_slot(INDEX), column, tile.row, 0);
                tma_store_2d(&p.out1, a_slab(INDEX), column, tile.row);
                bulk_commit_group();
            }
        }
        if (!whole) store_tail(INDEX, column);
        if (INDEX == PARTS - 1) {
            store_score_gradient();
            if (!whole) warpgroup_sync();  // everybody has read the last slabs before the next tile's H comes
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    down_backward(const __grid_constant__ RowsParams p) {
    varlen_m<DownBackwardEpilogue>(p);
}
