// Numbers of 4 bits. A run's codes stand for at most 16 numbers: these are made once, by the reference's arithmetic, and then
// looked up, four at a time, by prmt.
//
//   codes    8 in a word      -> 16 bits of indices     -> low bytes of 4 numbers  \
//                                                       -> high bytes of 4 numbers -> two words of two numbers
#pragma once
#include "ptx.cuh"

constexpr int BITS = 4;

// MIRRORED: codes from 8 on are the first eight numbers with the sign changed.  HIGH_FIRST: a byte's high half is the first number.
template <bool MIRRORED, bool HIGH_FIRST>
struct Codebook {
    static constexpr int SIZE = MIRRORED ? 8 : 16;
    uint32_t low[SIZE / 4], high[SIZE / 4];  // bytes of the numbers, four in a word

    DEVICE void set(const float (&numbers)[SIZE]) {
#pragma unroll
        for (int i = 0; i < SIZE / 4; ++i) {
            const float* four = numbers + 4 * i;
            const uint32_t first = pack_bf16(four[0], four[1]), second = pack_bf16(four[2], four[3]);
            low[i] = prmt(first, second, 0x6420);
            high[i] = prmt(first, second, 0x7531);
        }
    }

    DEVICE uint4 chunk(const uint32_t* words, int i) const {
        const uint32_t codes = words[i], moved = codes << 4, indices = codes & 0x77777777;
        const uint2 first = look_up(indices, prmt(codes, moved, 0x9D8C)), second = look_up(indices >> 16, prmt(codes, moved, 0xBFAE));
        return make_uint4(first.x, first.y, second.x, second.y);
    }

   private:
    // upper: a byte of ones for each code from 8 on.
    DEVICE uint2 look_up(uint32_t indices, uint32_t upper) const {
        uint32_t lows = prmt(low[0], low[1], indices), highs = prmt(high[0], high[1], indices);
        if constexpr (MIRRORED) {
            highs |= upper & 0x80808080;
        } else {
            lows = (lows & ~upper) | (prmt(low[2], low[3], indices) & upper);
            highs = (highs & ~upper) | (prmt(high[2], high[3], indices) & upper);
        }
        return make_uint2(prmt(lows, highs, HIGH_FIRST ? 0x4051 : 0x5140), prmt(lows, highs, HIGH_FIRST ? 0x6273 : 0x7362));
    }
};
