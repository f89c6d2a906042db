// What each warp of one CTA does and when, recorded by clock reads that are compiled in only on demand. `blazeproto.lab.timeline`
// launches such a kernel, reads the records and draws them.
//
//   -DTIMELINE   MARK(BEGIN, MMA) ... MARK(END, MMA)   a span of this warp: what it did from one clock to the other; spans nest
//                MARK(AT, TILE)                        a moment: here the warp goes on to its next tile
//   without it   MARK(...) is nothing at all: no instruction, no register, no byte of shared memory
//
// Lane 0 of a warp writes a record, (clock, what). So a MARK stands where lane 0 is among the threads that run, and it may
// stand where no other is. A warp has a region of RECORDS records and a word of shared memory that says where its next
// record goes:
//
//   records, in global memory   | warp 0: unused, record 1, record 2, ... | warp 1: unused, record 1, ... | ...
//   places, in shared memory    | warp 0's | warp 1's | ...    in bytes. A multiple of a region's size: no more is recorded
//
// What is full, and what is not to be recorded at all, so look alike, and one test does for both.
#pragma once
#include "ptx.cuh"

#ifdef TIMELINE

namespace timeline {

constexpr uint32_t WARPS = 16, RECORDS = 4096, RECORD_BYTES = 8;
constexpr uint32_t REGION_BYTES = RECORDS * RECORD_BYTES;

// blazeproto.lab.timeline has the same numbers.
enum Edge : uint32_t { BEGIN = 0x100, END = 0x200, AT = 0x300 };
enum What : uint32_t {
    TILE = 1,   // the next tile
    PRODUCER,   // roles: all that a warp does
    CONSUMER,
    EPILOGUE,
    SCHEDULE,   // finding tiles
    WAIT_FULL,  // for a stage, or for slabs, to be filled
    WAIT_EMPTY,
    TMA,        // issuing TMA loads
    COPY,       // issuing cp.async
    MMA,        // from the first wgmma of a tile to the end of its last
    HAND_OVER,  // accumulators to registers, slabs, epilogue warps
    STORE,
};

// Module-global, so that a launch's arguments are the same with and without them. By CuPy: Module.get_global_var.
extern "C" {
__device__ uint2 timeline_records[WARPS * RECORDS];
__device__ int timeline_cta = -1;  // whose warps are recorded; -1: none's
}

}  // namespace timeline

constexpr int TIMELINE_BYTES = int(timeline::WARPS) * 4;  // at the end of shared memory
constexpr int TIMELINE_OFFSET = SMEM_LIMIT - TIMELINE_BYTES;

DEVICE uint32_t shared_at(int offset);  // mainloop.cuh

namespace timeline {

static_assert(WARPGROUP * 4 <= WARPS * 32, "a region for every warp");

DEVICE uint32_t place_of(uint32_t thread) { return shared_at(TIMELINE_OFFSET) + thread / 32 * 4; }

// By every thread, before a barrier of the CTA.
DEVICE void start() {
    const uint32_t thread = thread_index(), warp = thread / 32;
    const uint32_t first = int(blockIdx.x) == timeline_cta ? warp * REGION_BYTES + RECORD_BYTES : 0;
    if (thread % 32 == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(place_of(thread)), "r"(first) : "memory");
}

// Predicates decide, not branches: divergence would cost more than the record.
DEVICE void mark(Edge edge, What what) {
    const uint32_t thread = thread_index();
    asm volatile(
        "{\n"
        ".reg .pred first, records;\n"
        ".reg .b32 now, place, rest;\n"
        ".reg .b64 at;\n"
        "mov.u32 now, %%clock;\n"
        "ld.shared.u32 place, [%0];\n"
        "and.b32 rest, place, %4;\n"
        "setp.eq.u32 first, %1, 0;\n"
        "setp.ne.and.u32 records, rest, 0, first;\n"
        "cvt.u64.u32 at, place;\n"
        "add.u64 at, at, %2;\n"
        "add.u32 place, place, %5;\n"
        "@records st.global.v2.u32 [at], {now, %3};\n"
        "@records st.shared.u32 [%0], place;\n"
        "}\n" ::"r"(place_of(thread)),
        "r"(thread % 32), "l"(__cvta_generic_to_global(timeline_records)), "r"(uint32_t(edge) | uint32_t(what)),
        "n"(REGION_BYTES - 1), "n"(RECORD_BYTES)
        : "memory");
}

}  // namespace timeline

#define MARK(edge, what) timeline::mark(timeline::edge, timeline::what)
#define START_TIMELINE() timeline::start()

#else

constexpr int TIMELINE_BYTES = 0;
#define MARK(edge, what)
#define START_TIMELINE()

#endif
