// The mainloop of every product on GPUs of compute capability 8.0 or later: the file to read first. All warps copy operands to
// shared memory, and all warps multiply. It uses neither TMA nor WGMMA, and no warp has a role of its own.
//
//   global memory --cp.async--> ring of STAGES in shared memory --ldmatrix--> registers --mma.sync--> accumulators
//
// A stage holds BK = 64 elements of the reduction: four steps of mma.sync. While a warp multiplies one step, it
// fetches the operands of the next into registers. The tensor cores still work on step 2 while the warps wait for each other:
//
//   step        copy                       fetch                       multiply
//   0                                      this stage, step 1          this stage, step 0
//   1                                      this stage, step 2          this stage, step 1
//   2                                      this stage, step 3          this stage, step 2
//   3           stage + STAGES             next stage, step 0          this stage, step 3
//               after cp.async.wait_group and __syncthreads: the next stage has landed, and every warp has fetched all of this one
//
// A tile's first stage is copied under the last stage of the tile before. With STAGES 2 and four stages a tile:
//
//   copies      | 0 | 1 | 2 | 3 | 0 |       | 1 | 2 | 3 | 0 |       | 1 ...    no stage is copied during a store: the slot of the
//   products        | 0 | 1 | 2 | 3 | store | 0 | 1 | 2 | 3 | store | 0 ...    stage multiplied last holds the strips
//
// A warp multiplies WARP_ROWS x 64 of a tile. A CTA is persistent: it takes the tiles blockIdx.x, blockIdx.x + gridDim.x, ...
//
//   tile of 128 x 256       columns   0    64   128   192
//                  rows  0          | w 0 | w 1 | w 2 | w 3 |
//                  rows 64          | w 4 | w 5 | w 6 | w 7 |
//
// A product is three types:
//
//   Scheduler   Params, Tile; tiles(), at(index), steps(tile): stages of a tile's reduction, 0 for an expert without rows
//   Loads       MN_A, MN_B: which operands lie MN-major
//               begin(tile): may start copies of its own, of indices say; they have landed when `copy` is called
//               copy(stage): this thread's part of the tile's next stage
//               STORED: load() loads a half of what is decoded of the next stage; `copy` decodes it and loads the other, and
//               finish(stage) decodes that
//               done(): whether the tile has no further stage
//   Epilogue    store(acc, tile, strip): stores the accumulators. strip: STRIP_BYTES of shared memory, for this warp alone
//               SEGMENT_STAGES: 0, or after how many stages add_segment(acc) adds the accumulators up and sets them to zero
//
// -D: BM, BN, BK, STAGES   as above     WARP_ROWS   64, or less where an epilogue needs registers beside the accumulators
//     MAX_EXPERTS          the experts that the schedule has room for     SMEM_LIMIT   bytes of shared memory that a CTA may have
#pragma once
#include "matrix.cuh"
#include "swizzle.cuh"

constexpr int WARP_COLUMNS = PANEL;
constexpr int WARPS_ACROSS = BN / WARP_COLUMNS, WARPS = BM / WARP_ROWS * WARPS_ACROSS;
constexpr int THREADS = 32 * WARPS;
constexpr int A_BYTES = BM * BK * OPERAND_BYTES, B_BYTES = BN * BK * OPERAND_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PANEL_BYTES = BK * SWIZZLE_ROW;  // of an MN-major operand: all BK rows of a stage, 64 columns each
constexpr int STRIP_BYTES = STAGE_BYTES / WARPS / 1024 * 1024;
constexpr int MMA_K = 16, STEPS = BK / MMA_K;

// Shared memory:  | stages, 48 KB each (BN 256) | schedule, 2 KB; in weight.cu two lists of 64 pairs |
constexpr int SCHEDULE_OFFSET = STAGES * STAGE_BYTES;
static_assert(BK == PANEL, "K-major, a row of a stage is a swizzled row");
static_assert(SCHEDULE_OFFSET + (MAX_EXPERTS + 1) * int(sizeof(int)) <= SMEM_LIMIT, "stages and schedule");

DEVICE uint32_t stage_at(int slot) { return smem_address(shared_memory()) + slot * STAGE_BYTES; }

#include "schedule.cuh"

DEVICE int warp_row() { return threadIdx.x / 32 / WARPS_ACROSS * WARP_ROWS; }
DEVICE int warp_column() { return threadIdx.x / 32 % WARPS_ACROSS * WARP_COLUMNS; }

// acc[i][j][2 h + c]: row 16 i + 8 h + lane / 4, column 8 j + 2 (lane % 4) + c of the warp's part. As WGMMA has them.
using Accumulators = float[WARP_ROWS / 16][WARP_COLUMNS / 8][4];

// The operands of one step, in registers.
template <bool MN_A, bool MN_B>
struct Fragments {
    uint32_t a[WARP_ROWS / 16][4], b[WARP_COLUMNS / 16][4];

    // Where in a stage the row begins that this lane names in the first ldmatrix. The other ldmatrix of a stage lie whole rows
    // further on, or 2, 4 or 6 chunks: since the swizzle is an XOR, that flips bits 5 and 6 of the address.
    struct Places {
        uint32_t a, b;

        DEVICE Places() {
            const int lane = lane_index(), row = warp_row(), column = warp_column();
            a = MN_A ? swizzled(row / PANEL * PANEL_BYTES, lane % 8 + lane / 16 * 8, lane / 8 % 2)
                     : swizzled(0, row + lane % 16, lane / 16);
            b = A_BYTES + (MN_B ? swizzled(column / PANEL * PANEL_BYTES, lane % 16, lane / 16)
                                : swizzled(0, column + lane % 8 + lane / 16 * 8, lane / 8 % 2));
        }
    };

    DEVICE void fetch(const Places& places, uint32_t stage, int step) {
        constexpr int BLOCK = 16 * SWIZZLE_ROW;  // 16 rows
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i) {
            if constexpr (MN_A) ldmatrix_x4_trans(a[i], ((stage + places.a) ^ i << 5) + step * BLOCK);
            else ldmatrix_x4(a[i], ((stage + places.a) ^ step << 5) + i * BLOCK);
        }
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 16; ++j) {
            if constexpr (MN_B) ldmatrix_x4_trans(b[j], ((stage + places.b) ^ j << 5) + step * BLOCK);
            else ldmatrix_x4(b[j], ((stage + places.b) ^ step << 5) + j * BLOCK);
        }
    }

    DEVICE void multiply(Accumulators& acc) const {
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; ++j) mma_m16n8k16(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
};

// Copies stages, tile after tile.
template <class Scheduler, class Loads>
struct Copier {
    const Scheduler& scheduler;
    Loads loads;
    int index = blockIdx.x;

    DEVICE Copier(const typename Scheduler::Params& p, const Scheduler& of) : scheduler(of), loads(p) { find_tile(); }

    // The next tile with a reduction, from `index` on.
    DEVICE void find_tile() {
        for (; index < scheduler.tiles(); index += gridDim.x) {
            loads.begin(scheduler.at(index));
            if (!loads.done()) return;
        }
    }

    // Ahead of `copy`, by half a stage where that is possible: the loads of what it decodes.
    DEVICE void load() {
#ifdef STORED
        if (index < scheduler.tiles()) loads.load();
#endif
    }

    // Behind `copy` by half a stage: the rest of it.
    DEVICE void finish(int slot) {
#ifdef STORED
        loads.finish(stage_at(slot));
#endif
    }

    // One stage, a group of copies; an empty one after the last.
    DEVICE void copy(int slot) {
        if (index < scheduler.tiles()) {
            loads.copy(stage_at(slot));
            if (loads.done()) {
                index += gridDim.x;
                find_tile();
            }
        }
        cp_async_commit_group();
    }
};

// The slot of the ring before this one: the stage that was multiplied last.
DEVICE int before(int slot) { return slot == 0 ? STAGES - 1 : slot - 1; }

template <class Scheduler, class Loads, class Epilogue>
DEVICE void run(const typename Scheduler::Params& p) {
    using Operands = Fragments<Loads::MN_A, Loads::MN_B>;
    const Scheduler scheduler(p);
    Copier<Scheduler, Loads> copier(p, scheduler);
    Epilogue epilogue(p);
    cp_async_commit_group();  // what `begin` has copied for the first stage
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int slot = 0; slot < STAGES - 1; ++slot) {
        copier.load();
        copier.copy(slot);
        copier.finish(slot);
    }
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    const typename Operands::Places places;
    Operands operands[2];
    int slot = 0;
    for (int index = blockIdx.x; index < scheduler.tiles(); index += gridDim.x) {
        Accumulators acc = {};
        const int steps = scheduler.steps(scheduler.at(index));
        if (steps > 0) {
            copier.load();
            copier.copy(before(slot));  // the strips of the tile before lay there
        }
        operands[0].fetch(places, stage_at(slot), 0);  // anew, so that the tile before was stored without them in its registers
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const int next = slot + 1 == STAGES ? 0 : slot + 1;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step + 1 < STEPS) {
                    if (step == STEPS / 2 - 1) {
                        copier.finish(before(slot));
                        if (k + 1 < steps) copier.load();
                    }
                    operands[(step + 1) % 2].fetch(places, stage_at(slot), step + 1);
                } else {
                    cp_async_wait_group<STAGES - 2>();
                    __syncthreads();
                    if (k + 1 < steps) copier.copy(slot);
                    operands[0].fetch(places, stage_at(next), 0);
                }
                operands[step % 2].multiply(acc);
            }
            slot = next;
            if constexpr (Epilogue::SEGMENT_STAGES > 0) {
                if ((k + 1) % Epilogue::SEGMENT_STAGES == 0 && k + 1 < steps) epilogue.add_segment(acc);
            }
        }
        epilogue.store(acc, scheduler.at(index), stage_at(before(slot)) + threadIdx.x / 32 * STRIP_BYTES);
        __syncthreads();
    }
}

// ---- strips: rows of a warp's part, on their way to global memory ---------------------------------------------------------
constexpr int STRIP_PLANE = 16 * SWIZZLE_ROW;  // bytes of 16 rows of 64 columns

// Where a pair of accumulators, 2 h and 2 h + 1 of block j of 8 columns, lies in a plane.
DEVICE uint32_t pair_place(uint32_t plane, int h, int j) {
    const int lane = lane_index();
    return swizzled(plane, h * 8 + lane / 4, j) + lane % 4 * 4;
}

DEVICE void put_pair(uint32_t plane, int h, int j, uint32_t pair) { store_shared_4(pair_place(plane, h, j), pair); }

// A plane's rows [0, rows), of ROWS, and first CHUNKS chunks of 8 columns to `out`, 16 bytes a lane. columns: of `out`, from there on.
template <int CHUNKS, int ROWS = 16>
DEVICE void store_plane(uint32_t plane, bf16* out, int64_t row_stride, int rows, int columns, int first_chunk = 0) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; ++i) {
        const int row = (i * 32 + lane_index()) / CHUNKS, chunk = lane_index() % CHUNKS;
        if (row < rows && chunk * CHUNK < columns)
            *reinterpret_cast<uint4*>(out + row * row_stride + chunk * CHUNK) =
                load_shared_16(swizzled(plane, row, first_chunk + chunk));
    }
}
