"""Weight gradients of quantized operands (cuda/weight_fp8.cu): both are transposed by a kernel (quantize.py), with new scales."""

from functools import lru_cache
from typing import Any

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm import quantize
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import BLOCK, Quantized, scales_shape
from blazeproto.gemm.launch import Box, Params, Plan, dense_box, persistent_grid
from blazeproto.gemm.product import PACKAGE, PLAIN, SHAPES, Build, Variant, build_of, quantized_kernel
from blazeproto.gemm.recipe import FP8
from blazeproto.gemm.rows import scales
from blazeproto.gemm.tiles import BF16, BK, BM, E4M3, QUANTIZED, SLAB, TileConfig
from blazeproto.runtime import driver
from blazeproto.runtime.arrays import empty, view

PARAMS = Params(
    "WeightParams",
    "weight_fp8.cu",
    maps=("left", "right", "out"),
    words=("offsets", "out_f32", "a_scales", "b_scales"),
    numbers=("experts", "gathered_width", "ordered_width", "accumulate", "rows", "blocks"),
)


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: f32, arch."""
    macros = {"TRANSPOSED": 0, "OUT_F32": variant.f32}
    variant = Variant(arch=variant.arch)
    return quantized_kernel("weight_fp8.cu", "weight_gradient_fp8", config, build, macros, variant, gather=False)


@lru_cache(maxsize=SHAPES)
def _plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    part: tuple[int, int],
    f32: bool,
    accumulate: bool,
    config: TileConfig,
    build: Build,
) -> Plan:
    """shape: of the gradient.  part: rows and columns of it that are made."""
    (num_rows, experts, device), (_, outer, inner), (rows, columns) = where, shape, part
    made = quantize.most_blocks(num_rows, experts)
    turned = [
        dense_box((made * BLOCK // E4M3.packing, width), (BK, tile), E4M3) if made else None
        for width, tile in ((rows, BM), (columns, config.tile_n))
    ]
    strides = (BF16.bytes * inner, BF16.bytes * inner * outer)
    out = None if f32 else Box((columns, rows, experts), strides, (SLAB, SLAB, 1))
    return Plan(
        kernel(config, Variant(f32=f32), build),
        PARAMS,
        (*turned, out),
        (experts, rows, columns, int(accumulate), 1, made),
        grid=persistent_grid(device, 1, experts * -(-rows // BM) * -(-columns // config.tile_n)),
        device=device,
    )


def launch(
    name: str,
    left: Quantized,
    right: Quantized,
    at: Addresses,
    blocks_before: Any,
    *,
    dw: Any,
    first: tuple[int, int] = (0, 0),
    f32: bool = False,
    accumulate: bool = False,
    config: TileConfig | None = None,
) -> None:
    """dw[e], from row and column ``first`` on, = left right^T over an expert's blocks of rows; operands of `launch_transpose`.

    left (rows, 128 B), right (columns, 128 B) -> dw (E, m, k) bf16, or fp32 with ``f32``, then all of it; zeros without rows.
    name: of the product.
    """
    part = (left.values.shape[0], right.values.shape[0])
    plan = _plan(at.where, tuple(dw.shape), part, f32, accumulate, config or QUANTIZED, build_of(name))
    to = dw.data_ptr() + BF16.bytes * (first[0] * dw.shape[2] + first[1])
    maps = ((left.values.data_ptr(), right.values.data_ptr()) if at.num_rows else ()) + (() if f32 else (to,))
    addresses = (blocks_before.data_ptr(), dw.data_ptr() if f32 else 0)
    driver.launch(*plan.fill(maps, addresses + scales(left, right)), at.stream)


def launch_all(
    name: str, tokens: Quantized, ordered: Quantized, at: Addresses, *, transposed: bool, dw: Any, **options: Any
) -> None:
    """A whole gradient of checked operands: tokens by row, their transposes in new memory.  transposed: dW_up."""
    length = quantize.most_blocks(at.num_rows, at.num_experts) * BLOCK
    before = view(empty((at.num_experts + 1,), "int32", tokens.values))
    quantize.launch_block_offsets(at, before)

    def turned(of: Quantized, gather: bool) -> Quantized:
        shape = (of.values.shape[1], length)
        sizes = (shape, of.values.dtype), (scales_shape(FP8.of_dw.scale, shape), "float32")
        out = Quantized(*(view(empty(lengths, dtype, of.values)) for lengths, dtype in sizes))
        quantize.launch_transpose(of, at, before, range(shape[0]), out, gather=gather)
        return out

    gathered, rows = turned(tokens, True), turned(ordered, False)
    left, right = (rows, gathered) if transposed else (gathered, rows)
    launch(name, left, right, at, before, dw=dw, **options)
