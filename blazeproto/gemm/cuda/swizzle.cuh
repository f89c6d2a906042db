// The 128-byte swizzle: the order of the 16-byte chunks of 128-byte rows in shared memory. Chunk c of row r lies at chunk c ^ (r % 8),
// so ldmatrix and wgmma have no bank conflicts.
#pragma once
#include "ptx.cuh"

constexpr int SWIZZLE_ROW = 128;                    // bytes
constexpr int PANEL = SWIZZLE_ROW / OPERAND_BYTES;  // operands in a swizzled row
constexpr int CHUNKS_IN_ROW = SWIZZLE_ROW / CHUNK_BYTES;

// Where a chunk lies in a swizzled matrix that begins at `start`, which is 1024-byte aligned.
DEVICE uint32_t swizzled(uint32_t start, int row, int chunk) { return start + row * SWIZZLE_ROW + ((chunk ^ (row & 7)) << 4); }
