// One PTX instruction per function, named as in the PTX ISA manual. Nothing here knows about experts or tiles.
//
// Two debugging switches reach into the waits:
//   SPIN_LIMIT      trap after this many polls of one barrier instead of hanging the GPU
//   INJECT_DELAYS   sleep a pseudo-random time around every barrier, so that a race shows as a wrong answer
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

// The operands' element type. Kernels only move, pack and unpack it; their arithmetic is fp32.
using bf16 = uint16_t;
constexpr int OPERAND_BYTES = sizeof(bf16);
constexpr int CHUNK_BYTES = 16;                     // of a thread's widest load or store, of a cp.async, of TMA's alignment
constexpr int CHUNK = CHUNK_BYTES / OPERAND_BYTES;  // operands in one

struct alignas(64) TensorMap {
    uint8_t opaque[128];
};

#define DEVICE __device__ __forceinline__

// ---- addresses ------------------------------------------------------------------------------------------------
DEVICE uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// threadIdx.x, read anew at every call: with the built-in variable the compiler would compute what follows from it once, and
// keep the results in registers during a mainloop that has none to spare.
DEVICE uint32_t thread_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// ---- delays (debugging) ---------------------------------------------------------------------------------------
DEVICE void maybe_delay() {
#ifdef INJECT_DELAYS
    uint32_t clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    const uint32_t hash = (clock ^ (blockIdx.x * 0x9E3779B9u) ^ (threadIdx.x / 32 * 0x85EBCA6Bu)) * 0xC2B2AE35u;
    if ((hash >> 29) == 0) __nanosleep(hash >> 22 & 1023);
#endif
}

// ---- mbarrier -------------------------------------------------------------------------------------------------
DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint32_t barrier, int arrivals = 1) {
    maybe_delay();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Only threads whose `wanted` is true arrive. A predicate decides, not a branch: divergence would cost more than the arrival.
DEVICE void mbarrier_arrive_if(bool wanted, uint32_t barrier) {
    maybe_delay();
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n"
                 ::"r"(barrier), "r"(int(wanted)) : "memory");
}

DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The same on the barrier at the same shared-memory offset of CTA `rank` of the cluster. It has no .release.cluster, which
// would cost a GPU-wide memory barrier a stage: the arrival says that wgmma has read a stage, and so publishes no write.
DEVICE void mbarrier_arrive_cluster_if(bool wanted, uint32_t barrier, uint32_t rank) {
    maybe_delay();
    asm volatile("{\n.reg .pred p;\n.reg .b32 remote;\nsetp.ne.b32 p, %2, 0;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "@p mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n"
                 ::"r"(barrier), "r"(rank), "r"(int(wanted)) : "memory");
}

DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// Whether the phase is over. Does not wait.
DEVICE bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    maybe_delay();
#ifdef SPIN_LIMIT
    for (int polls = 0; !mbarrier_try_wait(barrier, parity); ++polls)
        if (polls > SPIN_LIMIT) __trap();
#else
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#endif
}

// ---- clusters, named barriers, registers ----------------------------------------------------------------------
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
}

DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int REGISTERS>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

constexpr int ROW_EDGE = 1 << 30;  // of maps whose copies may end at any row (gemm/launch.py: rows_box)

// ---- counters that CTAs share ------------------------------------------------------------------------------------------
DEVICE uint32_t load_acquire_gpu(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
}

DEVICE void add_release_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// ---- TMA: tensor tiles between global and shared memory ---------------------------------------------------------
DEVICE void tma_load_2d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

DEVICE void tma_load_3d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

DEVICE void tma_load_4d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Writes the same offset of, and completes on the same barrier in, every CTA of `ctas` (a bit mask).
DEVICE void tma_load_4d_multicast(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                  uint16_t ctas) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(dst), "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
                 : "memory");
}

DEVICE void tma_store_2d(const TensorMap* map, uint32_t src, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(reinterpret_cast<uint64_t>(map)), "r"(src), "r"(c0), "r"(c1) : "memory");
}

DEVICE void tma_store_3d(const TensorMap* map, uint32_t src, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(reinterpret_cast<uint64_t>(map)), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

DEVICE void tma_store_4d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(reinterpret_cast<uint64_t>(map)), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

DEVICE void tma_store_5d(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(reinterpret_cast<uint64_t>(map)), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most PENDING bulk groups of this thread have yet to finish *reading* shared memory.
template <int PENDING>
DEVICE void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

template <int PENDING>
DEVICE void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's ordinary shared-memory accesses (cp.async and stmatrix too) before later TMA and wgmma ones.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- cp.async: 16 bytes a thread. Where `wanted` is false it writes zeros and does not read `src` ------------------
DEVICE void cp_async_16(uint32_t dst, const void* src, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(dst), "l"(__cvta_generic_to_global(src)), "r"(wanted ? 16 : 0) : "memory");
}

DEVICE void cp_async_4(uint32_t dst, const void* src, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(dst), "l"(__cvta_generic_to_global(src)), "r"(wanted ? 4 : 0) : "memory");
}

// The barrier gets an arrival once all earlier cp.async of this thread have landed; the thread does not wait for that. The
// arrival is one of those that the barrier was initialised with (.noinc).
DEVICE void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// This thread's copies since the last call are a group.
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING groups of this thread, the latest, have yet to land.
template <int PENDING>
DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- matrix fragments between registers and shared memory -------------------------------------------------------
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(src) : "memory");
}

DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t src) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(src) : "memory");
}

DEVICE void stmatrix_x4(uint32_t dst, const uint32_t* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(dst), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

DEVICE void stmatrix_x4_trans(uint32_t dst, const uint32_t* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(dst), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// D (16 x 8 fp32) += A (16 x 16 bf16) * B (16 x 8 bf16), all in the registers of one warp.
DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE uint4 load_shared_16(uint32_t src) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(src));
    return v;
}

DEVICE uint32_t load_shared_4(uint32_t src) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(src));
    return v;
}

DEVICE uint2 load_shared_8(uint32_t src) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(src));
    return v;
}

DEVICE void store_shared_4(uint32_t dst, uint32_t v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(v) : "memory"); }

DEVICE void store_shared_8(uint32_t dst, uint2 v) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(dst), "r"(v.x), "r"(v.y) : "memory");
}

DEVICE void store_shared_16(uint32_t dst, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ---- arithmetic -----------------------------------------------------------------------------------------------
DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Each byte of the result is one of the eight of `low` and `high`, by a digit of the selector; 8 more: that byte's sign, in all bits.
DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

DEVICE float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }
DEVICE float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xFFFF0000u); }

// A chunk, of CHUNK numbers.
DEVICE uint4 pack_chunk(const float* x) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

DEVICE void unpack(float* x, uint4 packed) {
    const uint32_t two_columns[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = bf16_low(two_columns[i]);
        x[2 * i + 1] = bf16_high(two_columns[i]);
    }
}

// Loads, and below special functions, that are volatile so that the compiler leaves them where they are written. If it
// moved many to one place, their results would take many registers at once; if it moved a load to its use, the thread would
// wait for it.
DEVICE uint32_t load_bf16x2(const bf16* pair) {
    uint32_t packed;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(packed) : "l"(__cvta_generic_to_global(pair)));
    return packed;
}

DEVICE void load_16(uint32_t* to, const void* address) {
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(__cvta_generic_to_global(address)));
}

DEVICE uint32_t load_u8(const void* address) {
    uint32_t value;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

DEVICE uint32_t load_u16(const void* address) {
    uint32_t value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

DEVICE int load_s32(const int* address) {
    int value;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

// `instead`, where the address is null: without a branch.
DEVICE int load_s32_or(const int* address, int instead) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %1, 0;\n@p ld.global.nc.s32 %0, [%1];\n}"
                 : "+r"(instead) : "l"(__cvta_generic_to_global(address)));
    return instead;
}

DEVICE float load_f32(const float* address) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(address)));
    return value;
}

DEVICE float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal_approx(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float tanh_approx(float x) {  // relative error below 2^-11
    float y;
    asm volatile("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE void reduce_add_f32(float* address, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}

DEVICE void reduce_add_f32x2(float* address, float a, float b) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(address)), "f"(a), "f"(b) : "memory");
}
