"""What the block-sparse products (`gemm.BLOCK_PRODUCTS`) are compared with: dense products of masked matrices, in torch.

A `BlockCase` is a topology and random operands. `evaluate` gives every product of MegaBlocks §5.1 by its name there, in float64
or as bf16 with fp32 sums (`blazeproto.lab.oracle.Arithmetic`), `run_kernels` the same by the kernels, on a CPU by their twins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.blocksparse import Topology
from blazeproto.gemm.blocks import BLOCK
from blazeproto.lab.oracle import Arithmetic


@dataclass(frozen=True)
class BlockCase:
    """S (M, N) with values (B, 128, 128), all B in use; dense matrices of k and m columns. bf16."""

    topology: Topology
    values: Tensor
    x: Tensor  # (M, k)
    w: Tensor  # (k, N)
    right: Tensor  # (N, m)
    left: Tensor  # (M, m)

    def dense(self, values: Tensor) -> Tensor:
        """(B, 128, 128) → (M, N), zeros where no block is."""
        M, N = self.topology.shape
        made = values.new_zeros(M // BLOCK, N // BLOCK, BLOCK, BLOCK)
        made[self.topology.row_indices.long(), self.topology.column_indices.long()] = values
        return made.transpose(1, 2).reshape(M, N)

    def blocks(self, matrix: Tensor) -> Tensor:
        """(M, N) → (B, 128, 128)."""
        M, N = self.topology.shape
        parts = matrix.view(M // BLOCK, BLOCK, N // BLOCK, BLOCK).transpose(1, 2)
        return parts[self.topology.row_indices.long(), self.topology.column_indices.long()]


def make_block_case(mask: np.ndarray, k: int, m: int, *, device: str = "cuda", seed: int = 0) -> BlockCase:
    """mask (M / 128, N / 128) bool: which blocks there are.  k, m: multiples of 8. Random data at unit scale, w and what is
    summed over N or M at 1/√fan-in."""
    host = Topology.of_blocks(mask)
    arrays = {
        name: torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for name, v in vars(host).items()
    }
    generator, (M, N) = torch.Generator(device).manual_seed(seed), host.shape

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, generator=generator).mul_(1 / math.sqrt(max(fan_in, 1))).bfloat16()

    values = normal(int(host.row_offsets[-1]), BLOCK, BLOCK)
    topology = Topology(**cast(Any, arrays))
    return BlockCase(
        topology, values, normal(M, k), normal(k, N, fan_in=k), normal(N, m, fan_in=N), normal(M, m, fan_in=M)
    )


def evaluate(arithmetic: Arithmetic, case: BlockCase) -> dict[str, Tensor]:
    """Results by the products' names."""
    S = case.dense(case.values)

    def times(a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda and arithmetic.rounds and a.numel() and b.numel():
            made: Tensor = torch.mm(a, b, out_dtype=arithmetic.dtype)
        else:
            made = a.to(arithmetic.dtype) @ b.to(arithmetic.dtype)
        return made.bfloat16() if arithmetic.rounds else made

    sampled, ahead, back = case.blocks(times(case.x, case.w)), times(S, case.right), times(S.T, case.left)
    return {
        "SDD": sampled,
        "SDD^T": sampled,
        "DSD": ahead,
        "DSD^T": ahead,
        "DS^TD": back,
        "DS^TD^T": back,
        "DDS": back.T,
        "DD^TS": back.T,
        "DDS^T": ahead.T,
        "DD^TS^T": ahead.T,
    }


CALLS: dict[str, tuple[str, tuple[str, str], dict[str, bool]]] = {
    "SDD": ("sdd", ("x", "w"), {}),
    "SDD^T": ("sdd", ("x", "w^T"), {"transpose_b": True}),
    "DSD": ("dsd", ("values", "right"), {}),
    "DSD^T": ("dsd", ("values", "right^T"), {"transpose_b": True}),
    "DS^TD": ("dsd", ("values", "left"), {"transpose_s": True}),
    "DS^TD^T": ("dsd", ("values", "left^T"), {"transpose_s": True, "transpose_b": True}),
    "DDS": ("dds", ("left^T", "values"), {}),
    "DD^TS": ("dds", ("left", "values"), {"transpose_a": True}),
    "DDS^T": ("dds", ("right^T", "values"), {"transpose_s": True}),
    "DD^TS^T": ("dds", ("right", "values"), {"transpose_s": True, "transpose_a": True}),
}
"""By the products' names: function, arrays of a case, and options."""


def operands(case: BlockCase, name: str) -> tuple[Tensor, ...]:
    """The arrays of a product, in memory as it takes them."""
    given = [(getattr(case, array.removesuffix("^T")), array.endswith("^T")) for array in CALLS[name][1]]
    return tuple(array.T.contiguous() if transposed else array for array, transposed in given)


def calls(case: BlockCase) -> dict[str, tuple[Any, tuple[Tensor, ...], dict[str, bool]]]:
    """Function, arrays and options by the products' names."""
    return {
        name: (getattr(gemm, function), operands(case, name), options) for name, (function, _, options) in CALLS.items()
    }


def run_kernels(case: BlockCase) -> dict[str, Tensor]:
    """Results by the products' names, in memory poisoned with NaN."""
    made = {}
    for name, (function, arrays, options) in calls(case).items():
        out = torch.full_like(function(*arrays, case.topology, **options), math.nan)
        made[name] = function(*arrays, case.topology, **options, out=out)
    return made
