// What every kernel of this folder begins with: its shared memory, its lane, and matrices in the place of tensor maps.
#pragma once
#include "params.cuh"

DEVICE uint8_t* shared_memory() {
    extern __shared__ __align__(1024) uint8_t smem[];
    return smem;
}

// A matrix, in the place that Hopper's kernels have a tensor map in. strides: bytes, of the dimensions beyond the innermost.
struct Matrix {
    const uint8_t* start;
    int64_t strides[4];
};

DEVICE const Matrix& matrix(const TensorMap& place) { return reinterpret_cast<const Matrix&>(place); }

DEVICE int lane_index() { return threadIdx.x % 32; }
