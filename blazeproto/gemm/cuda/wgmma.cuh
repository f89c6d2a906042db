// wgmma: D (64 x N fp32, registers) += A (64 x 16 bf16, shared) * B (16 x N bf16, shared), and its matrix descriptors. With FP16,
// operands are fp16.
//
// Both operands lie in shared memory in rows of 128 bytes with the 128-byte swizzle (16-byte chunk c of row r at c ^ (r % 8)):
//
//   K-major   a row is 64 consecutive k of one m (or n); groups of 8 rows follow each other (SBO = 1024 bytes)
//   MN-major  a row is 64 consecutive m (or n) of one k; every 64 m take a panel of BK rows; panels lie LBO apart
//
// Accumulators of lane l in warp w of the warpgroup's four: d[4j + 2h + i] is row 16 w + 8 h + l / 4, column 8 j + 2 (l %
// 4) + i.
#pragma once
#include "swizzle.cuh"

constexpr int WGMMA_M = 64;
constexpr int WGMMA_K = 32 / OPERAND_BYTES;

// The low half of a matrix descriptor. It counts in 16 bytes, so the descriptor of what lies `bytes` further on is bytes / 16
// greater. The mask drops the CTA's rank, which an address in a cluster has in its high bits.
DEVICE uint32_t descriptor_low(uint32_t address, uint32_t leading_bytes) {
    return leading_bytes >> 4 << 16 | (address & 0x3FFFF) >> 4;
}

DEVICE uint64_t matrix_descriptor(uint32_t low) {
    constexpr uint64_t SWIZZLE_128B = 1ull << 62;
    constexpr uint64_t STRIDE = uint64_t(8 * SWIZZLE_ROW >> 4) << 32;
    return SWIZZLE_128B | STRIDE | low;
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses of the accumulators across this point, above all reads above the wait before it.
template <int COUNT>
DEVICE void pin_registers(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Accumulators as operands of an instruction, and their places in its text.
#define ACC8(how, i) \
    how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define ACC32_FROM(how, i) ACC8(how, i), ACC8(how, i + 8), ACC8(how, i + 16), ACC8(how, i + 24)
#define ACC32(how) ACC32_FROM(how, 0)
#define ACC64(how) ACC32(how), ACC32_FROM(how, 32)
#define ACC96(how) ACC64(how), ACC32_FROM(how, 64)
#define ACC128(how) ACC96(how), ACC32_FROM(how, 96)
#define PLACES32                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES64                                                                              \
    PLACES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "  \
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES96                                                                              \
    PLACES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "  \
    "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES128                                                                             \
    PLACES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "   \
    "%109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "    \
    "%123, %124, %125, %126, %127"

#if FP16
#define MULTIPLIED ".f16.f16"
#else
#define MULTIPLIED ".bf16.bf16"
#endif

// TRANSPOSE_A, TRANSPOSE_B: 1 where that operand lies MN-major. accumulate: 0 starts from zero instead of d.
// COUNT: accumulators of a thread, half as many as columns; further numbers are the places of the other operands.
#define WGMMA(COLUMNS, COUNT, A, B, ACCUMULATE, T_A, T_B)                                                            \
    template <int TRANSPOSE_A, int TRANSPOSE_B>                                                                      \
    DEVICE void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {                                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32" MULTIPLIED " {" PLACES##COUNT "}, %" #A  \
                     ", %" #B ", p, 1, 1, %" #T_A ", %" #T_B ";\n}\n"                                                \
                     : ACC##COUNT("+f")                                                                              \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B));                         \
    }
WGMMA(64, 32, 32, 33, 34, 35, 36)
WGMMA(128, 64, 64, 65, 66, 67, 68)
WGMMA(192, 96, 96, 97, 98, 99, 100)
WGMMA(256, 128, 128, 129, 130, 131, 132)
