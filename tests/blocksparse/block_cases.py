"""Every block-sparse product of MegaBlocks §5.1 with whole numbers, whose sums are exact, and its result by dense matrices."""

from typing import Any

import numpy as np

from blazeproto.blocksparse import Topology
from blazeproto.gemm import dds, dsd, sdd
from blazeproto.gemm.blocks import BLOCK
from blazeproto.runtime.rounding import bfloat16_bits

MASKS = {
    "diagonal": np.kron(np.eye(2), np.ones((2, 3))) > 0,
    "random": np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]) > 0,
    "empty": np.zeros((2, 2), bool),
    "one": np.ones((1, 1), bool),
}
M_WIDTH, K_WIDTH = 72, 136


def bits(values: np.ndarray) -> np.ndarray:
    return bfloat16_bits(np.ascontiguousarray(values, np.float32))


def drawn(*shape: int, seed: int) -> np.ndarray:
    """Whole numbers, whose sums are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float64)


def dense(values: np.ndarray, topology: Topology) -> np.ndarray:
    made = np.zeros((topology.shape[0] // BLOCK, BLOCK, topology.shape[1] // BLOCK, BLOCK))
    for value, row, column in zip(values, topology.row_indices, topology.column_indices, strict=True):
        made[row, :, column] = value
    return made.reshape(topology.shape)


def blocks(matrix: np.ndarray, topology: Topology) -> np.ndarray:
    parts = matrix.reshape(topology.shape[0] // BLOCK, BLOCK, -1, BLOCK).swapaxes(1, 2)
    return parts[topology.row_indices, topology.column_indices]


def cases(
    topology: Topology, m: int = M_WIDTH, k: int = K_WIDTH
) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, bool], np.ndarray]]:
    """Function, arrays, options and the result of each product of MegaBlocks §5.1. m: of the dense matrix.  k: of SDD's sums."""
    (M, N), B = topology.shape, len(topology.row_indices)
    x, w, s = drawn(M, k, seed=0), drawn(k, N, seed=1), drawn(B, BLOCK, BLOCK, seed=2)
    right, left = drawn(N, m, seed=3), drawn(M, m, seed=4)
    S, t = dense(s, topology), np.ascontiguousarray
    return {
        "SDD": (sdd, (x, w), {}, blocks(x @ w, topology)),
        "SDD^T": (sdd, (x, t(w.T)), {"transpose_b": True}, blocks(x @ w, topology)),
        "DSD": (dsd, (s, right), {}, S @ right),
        "DSD^T": (dsd, (s, t(right.T)), {"transpose_b": True}, S @ right),
        "DS^TD": (dsd, (s, left), {"transpose_s": True}, S.T @ left),
        "DS^TD^T": (dsd, (s, t(left.T)), {"transpose_s": True, "transpose_b": True}, S.T @ left),
        "DDS": (dds, (t(left.T), s), {}, left.T @ S),
        "DD^TS": (dds, (left, s), {"transpose_a": True}, left.T @ S),
        "DDS^T": (dds, (t(right.T), s), {"transpose_s": True}, right.T @ S.T),
        "DD^TS^T": (dds, (right, s), {"transpose_s": True, "transpose_a": True}, right.T @ S.T),
    }
