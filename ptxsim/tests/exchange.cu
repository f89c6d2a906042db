// A small exchange between GPUs: out = x of this rank + x of every other, a chunk of THREADS 16-byte words a block.
//
// Ranks store their chunks to each other's inbox and signal; who has read a chunk says so, and the next epoch waits for that
// before it stores there again. Chunks are handed out by tickets; epochs are counted in device memory.
typedef unsigned int u32;
constexpr int THREADS = 64, MOST = 4;

struct Peers {
    uint4* inbox[MOST];  // (ranks, chunks, THREADS) each
    u32* arrived[MOST];  // (ranks, chunks) each: the epoch of what lies in the inbox
    u32* taken[MOST];    // (ranks, chunks) each: the epoch that rank r has read of what this one sent
};

struct State {
    u32 epoch, ticket, ended;
};

__device__ void wait(const u32* flag, u32 value) {
    u32 found;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    } while (int(found - value) < 0);
}

__device__ void signal(u32* flag) { asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(flag) : "memory"); }

extern "C" __global__ void exchange(const __grid_constant__ Peers p, const uint4* x, uint4* out, State* state,
                                    int rank, int ranks, int chunks) {
    __shared__ u32 drawn;
    const u32 epoch = state->epoch + 1, thread = threadIdx.x;
    while (true) {
        if (thread == 0) drawn = atomicAdd(&state->ticket, 1u);
        __syncthreads();
        const int chunk = int(drawn);
        __syncthreads();
        if (chunk >= chunks) break;
        const uint4 mine = x[chunk * THREADS + thread];

        if (thread < ranks && thread != rank) wait(p.taken[rank] + thread * chunks + chunk, epoch - 1);
        __syncthreads();
        for (int peer = 0; peer < ranks; ++peer)
            if (peer != rank) p.inbox[peer][(rank * chunks + chunk) * THREADS + thread] = mine;
        __syncthreads();
        if (thread < ranks && thread != rank) signal(p.arrived[thread] + rank * chunks + chunk);

        if (thread < ranks && thread != rank) wait(p.arrived[rank] + thread * chunks + chunk, epoch);
        __syncthreads();
        uint4 sum = mine;
        for (int peer = 0; peer < ranks; ++peer) {
            if (peer == rank) continue;
            const uint4 theirs = p.inbox[rank][(peer * chunks + chunk) * THREADS + thread];
            sum.x += theirs.x, sum.y += theirs.y, sum.z += theirs.z, sum.w += theirs.w;
        }
        out[chunk * THREADS + thread] = sum;
        __syncthreads();
        if (thread < ranks && thread != rank) signal(p.taken[thread] + rank * chunks + chunk);
    }
    u32 before;
    if (thread == 0) {
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(&state->ended), "r"(gridDim.x - 1)
                     : "memory");
        if (before == gridDim.x - 1) state->ticket = 0, state->epoch = epoch;
    }
}
