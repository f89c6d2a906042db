// A becomes fp16 in its stage, in kernels compiled with FP16 and CONVERTS: bf16 rows, MN-major, times the scales that were taken from
// the rows of fp16 that they are multiplied with. fp16 has three bits more than bf16 and far fewer exponents.
//
//   sum_r  b[r] a[r]^T  =  1 / f  sum_r  half(b[r] / s[r])  half(f s[r] a[r])^T        s, f powers of two
//
// Each warp has an f for the columns of A that its accumulators are rows of. It falls where a stage would else overflow, and the
// accumulators with it, so that at most 2^-32 of the largest s a is cut off. A consumer converts its strip of the next stage while the
// tensor cores multiply.
#pragma once
#include "mainloop.cuh"

struct ConvertedFp16 { static constexpr bool SCALED = false, CONVERTED = true; };

constexpr int LANES = 32, LANE_ROWS = BK / LANES, WARP_CHUNKS = CHUNKS_IN_ROW / WARPGROUP_WARPS;
constexpr float FP16_LIMIT = 32768.0f;  // values stay below it
constexpr int FP16_EXPONENT = 7;        // of the largest value, where f has just been chosen

DEVICE float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }
DEVICE float largest_of(uint32_t pair) { return fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair))); }

DEVICE uint32_t to_fp16(uint32_t pair, float factor) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(bf16_high(pair) * factor), "f"(bf16_low(pair) * factor));
    return packed;
}

DEVICE void store_shared_16(uint32_t dst, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Converts this warp's columns of a strip of A, at `panel`. Returns by how much f's exponent falls. scale: of this lane's rows.
DEVICE int convert_strip(uint32_t panel, const float (&scale)[LANE_ROWS], int& exponent) {
    const int lane = thread_index() % LANES, first = thread_index() / LANES % WARPGROUP_WARPS * WARP_CHUNKS;
    uint4 chunks[LANE_ROWS * WARP_CHUNKS];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_ROWS * WARP_CHUNKS; ++i) {
        const uint4 v = chunks[i] = load_shared_16(swizzled(panel, i / WARP_CHUNKS * LANES + lane, first + i % WARP_CHUNKS));
        const float of_chunk = fmaxf(fmaxf(largest_of(v.x), largest_of(v.y)), fmaxf(largest_of(v.z), largest_of(v.w)));
        if (scale[i / WARP_CHUNKS] > 0.0f) largest = fmaxf(largest, of_chunk * scale[i / WARP_CHUNKS]);  // 0 times infinity
    }
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));
    const int before = exponent;
    if (__uint_as_float(bits) * power_of_two(exponent) >= FP16_LIMIT) exponent = FP16_EXPONENT + 127 - int(bits >> 23);
#pragma unroll
    for (int i = 0; i < LANE_ROWS * WARP_CHUNKS; ++i) {
        const uint4 v = chunks[i];
        const float f = fminf(scale[i / WARP_CHUNKS] * power_of_two(exponent), power_of_two(126));  // finite, for zeros too
        store_shared_16(swizzled(panel, i / WARP_CHUNKS * LANES + lane, first + i % WARP_CHUNKS),
                        make_uint4(to_fp16(v.x, f), to_fp16(v.y, f), to_fp16(v.z, f), to_fp16(v.w, f)));
    }
    return before - exponent;
}

// acc (this consumer's strip, STRIP x BN) = A * B over `steps` stages. scales: of the rows, from the first on.
template <class Producer>
DEVICE void multiply(float (&acc)[BN / 2], Ring& ring, int strip, int steps, const float* scales) {
    static_assert(Producer::MN_A && !GATHER, "a strip is a panel");
    int exponent = 126;  // of f
    MARK(BEGIN, MMA);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] = 0.0f;
    float scale[LANE_ROWS];
    const auto load_scales = [&](int stage) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; ++r) scale[r] = load_f32(scales + stage * BK + r * LANES + thread_index() % LANES);
    };
    load_scales(0);
#pragma unroll 1
    for (int stage = 0; stage < steps; ++stage) {
        ring.wait_until_full();
        const int fall = convert_strip(ring.a() + strip * PANEL_BYTES, scale, exponent);
        fence_proxy_async();
        named_barrier_sync(CONSUMER_BARRIER + strip, WARPGROUP);
        wgmma_wait_group<0>();
        pin_registers(acc);
        if (stage > 0) ring.before(1).release();
#pragma unroll
        for (int i = 0; i < BN / 2 && fall > 0; ++i) acc[i] *= power_of_two(-min(fall, 126));
        multiply_stage<Producer, true>(acc, ring, strip);
        ring.advance();
        if (stage + 1 < steps) load_scales(stage + 1);
    }
    wgmma_wait_group<0>();
    pin_registers(acc);
    MARK(END, MMA);
    ring.before(1).release();
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) acc[i] *= power_of_two(-exponent);
}
