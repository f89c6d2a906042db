// Sums of rows, 16-byte chunk by chunk: combine.cu's, and those of distributed/cuda/add_up.cu. Behind ptx.cuh.

// A chunk of a row, or zeros. volatile, so that the compiler keeps all loads before the sums. (L1::no_allocate, which would
// suit a row that is read once, was measured to cost 4 to 10 %.)
DEVICE uint4 load_chunk(const bf16* address, bool wanted) {
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(address)), "r"(int(wanted)));
    return v;
}

DEVICE void add(float (&sum)[CHUNK], uint4 y, float weight) {
    const uint32_t two_columns[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] += weight * bf16_low(two_columns[i]);
        sum[2 * i + 1] += weight * bf16_high(two_columns[i]);
    }
}
