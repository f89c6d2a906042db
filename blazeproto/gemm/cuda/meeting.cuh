// How the launches of one exchange on all ranks meet: each rank launches the same kernel, with the same grid, on its own GPU.
//
//   rank 0   [kernels that read what came] --> started 7 ........ stores to rank 1's memory, arrived += 1 a block
//                                                 \ /                                  |
//   rank 1   [kernels that read what came] --> started 7 ........ waits until rank 0's arrived is 7 blocks --> reads
//
// Exchanges are numbered by an epoch, which each launch takes from the device's memory, so that a CUDA graph can be replayed. A
// rank stores to another's memory once that rank has started the same epoch: by the order of its stream it has then read
// what came before. Flags only grow, so none is ever reset, and differences of epochs count modulo 2^32.
//
// A plain store to a peer's memory is seen there behind a release of system scope by the thread that made it, or by one that met it
// at a barrier since, and an acquire of what was released.
#pragma once
#include "ptx.cuh"

constexpr int MAX_RANKS = 32;  // bits of a token's mask of ranks

// The beginning of each rank's memory: words that the other ranks write.
struct Flags {
    uint32_t started[MAX_RANKS];  // the epoch that a rank has come to
    uint32_t arrived[MAX_RANKS];  // blocks of a rank, of all epochs, whose stores are here
};

// In the device's own memory.
struct Progress {
    uint32_t epoch;  // of the last exchange that has ended
    uint32_t ended;  // blocks of this launch
    uint32_t tickets[2];
    uint32_t sends, rows;  // sendings (sending.cuh) whose rows tiles wait for: how many have begun, and this rank's own rows of them
};

struct Meeting {
    const uint64_t* bases;  // (ranks,) where each rank's memory begins, as this device sees it
    Progress* progress;
    int64_t ranks;
    int64_t rank;         // this one
    int64_t patience_ns;  // a wait that is longer ends the program

    DEVICE char* at(int peer, int64_t offset) const { return reinterpret_cast<char*>(bases[peer]) + offset; }
    DEVICE Flags* flags(int peer) const { return reinterpret_cast<Flags*>(bases[peer]); }
};

// ---- instructions ------------------------------------------------------------------------------------------------
DEVICE uint32_t load_acquire_sys(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
}

DEVICE void store_release_sys(uint32_t* address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

DEVICE void add_release_sys(uint32_t* address, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// What this thread has done, or others that it met at a barrier since, is before what follows the last of these.
DEVICE uint32_t increment_acq_rel(uint32_t* address, uint32_t last) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(__cvta_generic_to_global(address)), "r"(last) : "memory");
    return before;
}

DEVICE uint64_t globaltimer() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

DEVICE void store_16(void* address, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Of what peers stored during this launch: not through the cache for what nobody writes.
DEVICE uint4 load_16(const void* address) {
    uint4 v;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(address)) : "memory");
    return v;
}

// ---- the meeting -------------------------------------------------------------------------------------------------
DEVICE void wait_until(const uint32_t* flag, uint32_t value, int64_t patience_ns) {
    if (int(load_acquire_sys(flag) - value) >= 0) return;
    const uint64_t begin = globaltimer();
    while (int(load_acquire_sys(flag) - value) < 0) {
        if (int64_t(globaltimer() - begin) > patience_ns) __trap();
        __nanosleep(32);
    }
}

// All ranks have come to this epoch, and what this rank stores in their memory overwrites nothing that is still to be read.
DEVICE uint32_t begin_exchange(const Meeting& m) {
    const uint32_t epoch = m.progress->epoch + 1;
    if (threadIdx.x < m.ranks) {
        if (blockIdx.x == 0) store_release_sys(&m.flags(threadIdx.x)->started[m.rank], epoch);
        wait_until(&m.flags(m.rank)->started[threadIdx.x], epoch, m.patience_ns);
    }
    __syncthreads();
    return epoch;
}

// This block has stored all it has for other ranks. With `wait` block 0 stays until all blocks of all ranks have, so that the
// kernels behind this one read what came.
DEVICE void end_exchange(const Meeting& m, uint32_t epoch, bool wait) {
    __syncthreads();
    if (threadIdx.x < m.ranks) {
        add_release_sys(&m.flags(threadIdx.x)->arrived[m.rank], 1);
        if (wait && blockIdx.x == 0)
            wait_until(&m.flags(m.rank)->arrived[threadIdx.x], epoch * gridDim.x, m.patience_ns);
    }
    if (threadIdx.x == 0 && increment_acq_rel(&m.progress->ended, gridDim.x - 1) == gridDim.x - 1) {
        m.progress->tickets[0] = m.progress->tickets[1] = 0;
        m.progress->epoch = epoch;
    }
}
