"""The experts' nonlinearity on the blocks of H, and its derivative (cuda/block_activation.cu). MegaBlocks §5.1. Memory-bound.

A row of act has w blocks, a row of H G w: of a gated activation the w of gate and then the w of up. So block b of act, in row
r, is made of H's blocks b + row_offsets[r] and b + row_offsets[r + 1]; where gate and up alternate in the columns, of 2 b and
2 b + 1.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from blazeproto import activations
from blazeproto.activations import activation_named
from blazeproto.gemm.arguments import Arguments, Array
from blazeproto.gemm.blocks import BLOCK, SQUARE, BlockArguments, Blocks, BlockSpecification
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.product import build_of
from blazeproto.gemm.tiles import CHUNK
from blazeproto.runtime import driver

THREADS = 256  # of a CTA
MAX_BLOCKS = 132 * 16


def _settle(given: Arguments, call: Mapping[str, Any], outputs: tuple[Array, ...]) -> tuple[Array, ...]:
    """The outputs. Letter A: how many blocks H has room for, G times act's B."""
    blocks, wanted = given.sizes["A"], given.halves * given.sizes["B"]
    if blocks != wanted:
        raise ValueError(f"h: expected {wanted} blocks, {given.halves} for each of the topology, got {blocks}")
    return outputs


def blocks_of(m: Blocks, activation: str) -> Any:
    """(blocks, G): H's blocks of each of act."""
    offsets, chosen = np.array(m.lines[0][0]), activation_named(activation)
    sizes, index = np.diff(offsets), np.arange(offsets[-1])
    if chosen.layout == "ALTERNATING" or not chosen.gated:
        return chosen.halves * index[:, None] + np.arange(chosen.halves)
    return np.stack([index + np.repeat(ends, sizes) for ends in (offsets[:-1], offsets[1:])], axis=1)


def _read(m: Blocks, h: Any, activation: str) -> Any:
    """(blocks, 128, G 128): H for each block of act."""
    index = blocks_of(m, activation)
    return h[index].swapaxes(1, 2).reshape(len(index), BLOCK, index.shape[1] * BLOCK)


def formula(m: Blocks, h: Any, *, activation: str) -> Any:
    """act = f(gate) g(up), or f(h)."""
    return activations.activate(_read(m, h, activation), activation)


def formula_backward(m: Blocks, h: Any, d_act: Any, *, activation: str) -> Any:
    """dH of H and dact."""
    index = blocks_of(m, activation)
    d_h = activations.activate_backward(_read(m, h, activation), d_act[: len(index)], activation)
    by_act = d_h.reshape(len(index), BLOCK, index.shape[1], BLOCK).swapaxes(1, 2).reshape(-1, BLOCK, BLOCK)
    return by_act[index.reshape(-1).argsort()]


_H = Array("h", f"A {SQUARE}")
_FORWARD = BlockSpecification((_H,), (Array("out", f"B {SQUARE}"),), formula, _settle)
_BACKWARD = BlockSpecification(
    (_H, Array("d_act", f"B {SQUARE}")), (Array("out", f"A {SQUARE}"),), formula_backward, _settle
)


@_FORWARD.public
def block_activate(
    h: Any, topology: Any, *, activation: str = "swiglu", out: Any = None, stream: int | None = None
) -> Any:
    """act = f(gate) g(up), or f(h) without a gate, for the blocks in use. MegaBlocks §5.1.

    h (G B, 128, 128) bf16, G being 2 for a gated activation, else 1, and act's topology of B blocks → act (B, 128, 128) bf16, of
    which those beyond the blocks in use stay as they were.

    h lies as SDD makes it with a topology whose rows have G times the blocks: an expert's columns of gate, then of up.
    Computed in fp32. Floor: 2 (G + 1) 128^2 bytes a block in use / 4.24 TB/s.

    activation: a name of `blazeproto.activations`.  out: memory for act.  stream: a raw cudaStream_t; default: the caller's
    current one. TypeError or ValueError names the argument, before anything is launched.
    """
    return _launch("block_activate", activation, _FORWARD.check(locals()))


@_BACKWARD.public
def block_activate_backward(
    h: Any, d_act: Any, topology: Any, *, activation: str = "swiglu", out: Any = None, stream: int | None = None
) -> Any:
    """Computes h's gradient from act's, for the blocks in use. MegaBlocks §5.1.

    h (G B, 128, 128), d_act (B, 128, 128), both bf16, and act's topology of B blocks → d_h (G B, 128, 128) bf16, of which those
    beyond the blocks in use stay as they were.

    Computed in fp32. Floor: 2 (2 G + 1) 128^2 bytes a block in use / 4.24 TB/s.

    activation: as in `block_activate`.  out: memory for d_h.  stream: a raw cudaStream_t; default: the caller's current one.
    TypeError or ValueError names the argument, before anything is launched.
    """
    return _launch("block_activate_backward", activation, _BACKWARD.check(locals()))


def _launch(entry: str, activation: str, given: BlockArguments) -> Any:
    lists, (device, stream) = given.lists(), given.place()
    *addresses, out = (array.data_ptr() for array in given.views.values())
    places = [lists[name].data_ptr() for name in ("row_indices", "row_offsets")]
    if blocks := min(given.sizes["B"] * BLOCK * BLOCK // (THREADS * CHUNK), MAX_BLOCKS):
        words = (*addresses, *places, out, given.sizes["rows"] - 1)
        made = kernel(entry, activation, build_of(entry).sources)
        driver.launch(made.handle(device), (blocks, 1), THREADS, 0, stream, words)
    return given.arrays["out"]


@cache
def kernel(entry: str, activation: str = "swiglu", sources: Path | None = None) -> Kernel:
    """entry: of block_activation.cu."""
    macros = {**activation_named(activation).macros, "THREADS": THREADS, "BM": BLOCK}
    return Kernel("block_activation.cu", entry, macros, sources=sources)
