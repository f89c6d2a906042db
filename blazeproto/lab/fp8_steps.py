"""The steps of a layer with precision="fp8", made of those in bf16.

Operands have a byte an element, and scales; steps that quantize and transpose them are added; dW_down comes last. docs/fp8.md has
the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blazeproto.gemm.quantize import BLOCK, blocks

if TYPE_CHECKING:
    from blazeproto.lab.steps import Step, Traffic

TOKENS, ROWS, WEIGHTS = ("x", "dO"), ("H", "act", "dH", "A'"), ("gate_up_proj", "down_proj")
RATE = 2.0  # of e4m3's operations over bf16's


def stored(array: Traffic) -> tuple[Traffic, ...]:
    """An operand in fp8 and its scales; another array as it is."""
    length, width = array.shape[0], array.shape[-1]
    if array.name in TOKENS:
        scales: tuple[int, ...] = (length,)
    elif array.name in ROWS:
        scales = (width // BLOCK, length)
    elif array.name.removesuffix("^T") in WEIGHTS:
        scales = (length, *map(blocks, array.shape[1:]))
    else:
        return (array,)
    return array._replace(itemsize=1), array._replace(name=f"{array.name}'s scales", shape=scales, itemsize=4)


def in_fp8(steps: Sequence[Step], weights: str) -> Iterator[Step]:
    """weights: when they are quantized: "each" order before its product, "both" in forward, or "before" the call."""
    last: list[Step] = []
    for step in steps:
        product = step.name.removesuffix(" again")
        if step.name == "weights to x's dtype" and weights == "before":
            continue
        if product not in (
            "up_forward",
            "down_forward",
            "down_backward_act",
            "up_backward_act",
        ) and not product.endswith("_weight"):
            yield step
            continue
        to_fp8 = [_quantize(step, array) for array in step.reads if array.name in TOKENS]
        if product.endswith("_weight"):
            made = [*to_fp8, *_gradient(step)]
            if product.startswith("down"):
                last += made
            else:
                yield from (*made, *last)
            continue
        yield from to_fp8
        for array in step.reads:
            if array.name in WEIGHTS and weights != "before" and not (weights == "both" and "backward" in product):
                yield _weight(step, array, weights)
        reads = (each for array in step.reads for each in stored(array))
        writes = (each for array in step.writes for each in stored(array))
        keeps = (each for array in step.keeps for each in (stored(array) if array.name in ROWS else (array,)))
        yield replace(step, reads=tuple(reads), writes=tuple(writes), keeps=tuple(keeps), rate=RATE)


def _quantize(of: Step, array: Traffic) -> Step:
    return replace(of, name=f"quantize {array.name}", reads=(array,), writes=stored(array), operations=0.0, keeps=())


def _weight(of: Step, array: Traffic, weights: str) -> Step:
    """In the order that a product wants, or in both."""
    transposed = array._replace(name=f"{array.name}^T", shape=(array.shape[0], *array.shape[:0:-1]))
    if weights == "both" and not of.name.endswith("again"):
        step = _quantize(of, array)
        return replace(step, writes=(*step.writes, *stored(transposed)), keeps=stored(transposed))
    if "backward" not in of.name:
        return _quantize(of, array)
    return replace(_quantize(of, transposed), reads=(array,))


def _gradient(step: Step) -> Iterator[Step]:
    """A weight's gradient, and what transposes its operands, in blocks of 128 rows and columns."""
    rows = next(array.shape[0] for array in step.reads if array.name in ROWS)
    turned: list[Traffic] = []
    for array in step.reads:
        width = array.shape[1]
        turned.append(array._replace(name=f"{array.name}^T", shape=(width, rows), itemsize=1))
        scales = (blocks(width), blocks(rows))
        turned.append(array._replace(name=f"{array.name}^T's scales", shape=scales, itemsize=4))
    reads = tuple(each for array in step.reads for each in stored(array))
    name = f"transpose {', '.join(array.name for array in step.reads)}"
    yield replace(step, name=name, reads=reads, writes=tuple(turned), operations=0.0)
    yield replace(step, reads=tuple(turned), rate=RATE)
