"""To fp8 (e4m3), and quantized rows transposed (cuda/quantize.cu): the launches. e4m3.py computes the same on a CPU."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from blazeproto.dispatch.structures import Addresses
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import BLOCK, Quantized, blocks
from blazeproto.gemm.product import build_of
from blazeproto.gemm.tiles import ALIGNMENT
from blazeproto.runtime import driver

THREADS = 128  # of a block that quantizes rows
WARPS = 8  # of one that looks at weights


def kernel(entry: str, sources: Path | None = None, *, floats: bool = False) -> Kernel:
    """entry: a function of quantize.cu.  floats: whether scales are float32. The same object for the same arguments."""
    return _kernel(entry, sources, floats)


@cache
def _kernel(entry: str, sources: Path | None, floats: bool) -> Kernel:
    return Kernel("quantize.cu", entry, {"BLOCK": BLOCK, **({"FLOAT_SCALES": 1} if floats else {})}, sources=sources)


def kernels(*, floats: bool = False) -> list[Kernel]:
    """All that a layer launches.  floats: whether forward's scales are float32; backward has tokens' powers of two."""
    of_weights = ("quantize_weights", "refresh_weights", "refresh_weights_f32")
    return [
        *(kernel(entry, floats=floats) for entry in ("quantize_rows", *of_weights)),
        *map(kernel, ("note_changes", "note_changes_f32", "dequantize_rows", *(("quantize_rows",) if floats else ()))),
        *transposing(),
    ]


def transposing() -> list[Kernel]:
    """Those that a weight gradient launches."""
    return list(map(kernel, ("block_offsets", "transpose_rows")))


class OnStream(NamedTuple):
    """The place of a launch that needs no dispatch: a CUDA ordinal, a raw cudaStream_t."""

    device: int
    stream: int


def _launch(
    entry: str, at: Addresses | OnStream, grid: tuple[int, int], threads: int, *words: int, floats: bool = False
) -> None:
    made = kernel(entry, build_of("quantize").sources, floats=floats)
    driver.launch(made.handle(at.device), grid, threads, 0, at.stream, words)


def launch_rows(x: Any, at: Addresses, out: Quantized) -> None:
    """x (T, width) bf16 -> values (T, width), scales (T,), or float32 ones (T, width / 128). Width: a multiple of 16; of 128."""
    count, width = x.shape
    if count:
        floats = len(out.scales.shape) == 2
        _launch("quantize_rows", at, (count, 1), THREADS, x.data_ptr(), *_at(out), width, floats=floats)


def launch_dequantize(rows: Quantized, at: Addresses, out: Any) -> None:
    """rows (R, width), scales (width / 128, R) -> out (R, width) bf16."""
    count, width = rows.values.shape
    if count:
        blocks_of_threads = -(-count * width // (THREADS * ALIGNMENT))
        _launch("dequantize_rows", at, (blocks_of_threads, 1), THREADS, *_at(rows), out.data_ptr(), count, width)


def launch_weights(
    weights: Any,
    at: Addresses | OnStream,
    out: Quantized | None,
    transposed: Quantized | None,
    *,
    scale_values: str = "power_of_two",
) -> None:
    """weights (E, m, k) bf16 -> values (E, m, k), scales (E, m / 128, k / 128); of the transpose with m and k exchanged. None:
    that order is not wanted. m, k: multiples of 16.  scale_values: of an `Operand`."""
    experts, m, k = weights.shape
    to = [part for order in (out, transposed) for part in ((0, 0) if order is None else _at(order))]
    grid, floats = (experts * blocks(m), blocks(k)), scale_values == "float32"
    _launch("quantize_weights", at, grid, 2 * THREADS, weights.data_ptr(), *to, m, k, floats=floats)


def launch_refresh(
    weights: Any,
    at: Addresses | OnStream,
    out: Quantized,
    transposed: Quantized,
    hashes: Any,
    call: int,
    *,
    f32: bool,
    scale_values: str = "power_of_two",
) -> None:
    """weights (E, m, k) bf16 or fp32 -> both orders, as `launch_weights` makes them, unless all that is looked at is as it was.
    hashes: (E (m / 128) (k / 128) + 1,) 32 bits.  call: greater than before, or 0 with hashes that are zero: all is made."""
    experts, m, k = weights.shape
    rows, columns, of, known = experts * blocks(m), blocks(k), "_f32" * f32, (hashes.data_ptr(), experts, call)
    lists = (weights.data_ptr(), *_at(out), *_at(transposed), m, k, *known)
    if call:
        _launch(f"note_changes{of}", at, (rows, -(-columns // WARPS)), 32 * WARPS, weights.data_ptr(), m, k, *known)
    _launch(f"refresh_weights{of}", at, (rows, columns), 2 * THREADS, *lists, floats=scale_values == "float32")


def most_blocks(num_rows: int, experts: int) -> int:
    """How many blocks of 128 rows experts may have together, the last one of each being short."""
    return num_rows // BLOCK + min(num_rows, experts)


def launch_block_offsets(at: Addresses, out: Any) -> None:
    """-> out (E + 1,) int32: how many blocks of 128 rows come before each expert's, and in all."""
    _launch("block_offsets", at, (1, 1), 32, at.expert_token_offsets, out.data_ptr(), at.num_experts)


def launch_transpose(
    rows: Quantized, at: Addresses, blocks_before: Any, columns: range, out: Quantized, *, gather: bool
) -> None:
    """rows (R, width), scales (width / 128, R), or with ``gather`` tokens (T, width), scales (T,) -> some columns' transpose
    (len(columns), 128 B), scales (len(columns) / 128, B), B being `most_blocks`. An expert's rows are filled up to whole blocks
    of 128 with zeros; 128 x 128 share a scale, the largest of their rows'. blocks_before: of `launch_block_offsets`."""
    width, count, made = rows.values.shape[1], blocks(len(columns)), most_blocks(at.num_rows, at.num_experts)
    pairs_at, tokens_at, division = at.pair_to_token
    if made and count:
        values, scales = rows.values.data_ptr() + columns.start, rows.scales.data_ptr()
        scales += 0 if gather else 4 * columns.start // BLOCK * at.num_rows
        lists = (pairs_at if gather else 0, tokens_at, division, at.expert_token_offsets, blocks_before.data_ptr())
        numbers = (at.num_experts, at.num_rows, width, len(columns), made)
        _launch("transpose_rows", at, (made, count), 2 * THREADS, values, scales, *lists, *_at(out), *numbers)


def _at(of: Quantized) -> tuple[int, int]:
    return of.values.data_ptr(), of.scales.data_ptr()
