"""The steps of a layer with precision="fp8", made of those in bf16.

Operands have a byte an element, and scales; steps that quantize and transpose them are added; dW_down comes last. docs/fp8.md has
the recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from blazeproto.gemm import PRODUCTS
from blazeproto.gemm.e4m3 import scales_shape
from blazeproto.gemm.recipe import FP8
from blazeproto.lab.steps import Step, Traffic

TOKENS = {"x": FP8.x, "dO": FP8.d_out}
ROWS = {"H": FP8.h, "act": FP8.act, "dH": FP8.dh, "A'": FP8.a_scaled}
WEIGHTS = {"gate_up_proj": FP8.weights, "down_proj": FP8.weights}
TRANSPOSED = dict.fromkeys(TOKENS | ROWS, FP8.of_dw) | WEIGHTS
OPERANDS = TOKENS | ROWS | WEIGHTS | {f"{name}^T": operand for name, operand in TRANSPOSED.items()}
BY_ROWS = ("up_forward", "down_forward", "down_backward_act", "up_backward_act")
RATE = 2.0  # of e4m3's operations over bf16's


def stored(arrays: Iterable[Traffic]) -> Iterator[Traffic]:
    """Operands in fp8, each before its scales; other arrays as they are."""
    for array in arrays:
        yield array._replace(itemsize=1) if array.name in OPERANDS else array
        if array.name in OPERANDS:
            scales = scales_shape(OPERANDS[array.name].scale, array.shape)
            yield array._replace(name=f"{array.name}'s scales", shape=scales, itemsize=4)


def in_fp8(steps: Sequence[Step], weights: str) -> Iterator[Step]:
    """weights: when they are quantized: "each" order before its product, "both" in forward, or "before" the call."""
    last: list[Step] = []
    for step in steps:
        if last and step.name not in {*PRODUCTS, "dX to x's dtype"}:
            yield from last
            last = []
        if step.name.removesuffix(" again") in BY_ROWS:
            yield from (*_tokens(step), *_weights(step, weights), _by_rows(step))
        elif step.name == "down_backward_weight":
            last = [*_tokens(step), *_gradient(step)]
        elif step.name == "up_backward_weight":
            yield from (*_tokens(step), *_gradient(step))
        elif step.name != "weights to x's dtype" or weights != "before":
            yield step
    yield from last


def _quantize(of: Step, array: Traffic, *orders: Traffic, keeps: Iterable[Traffic] = ()) -> Step:
    """orders: of the array, those that are made."""
    return replace(
        of,
        name=f"quantize {orders[0].name}",
        reads=(array,),
        writes=tuple(stored(orders)),
        operations=0.0,
        keeps=tuple(stored(keeps)),
    )


def _tokens(of: Step) -> Iterator[Step]:
    return (_quantize(of, array, array) for array in of.reads if array.name in TOKENS)


def _transposed(weight: Traffic) -> Traffic:
    return weight._replace(name=f"{weight.name}^T", shape=(weight.shape[0], *weight.shape[:0:-1]))


def _weights(of: Step, weights: str) -> Iterator[Step]:
    """In the order that a product wants, or in both."""
    backward = "backward" in of.name
    for array in (array for array in of.reads if array.name in WEIGHTS):
        if weights == "each":
            yield _quantize(of, array, _transposed(array) if backward else array)
        elif weights == "both" and not backward:
            yield _quantize(of, array, array, _transposed(array), keeps=(_transposed(array),))


def _by_rows(step: Step) -> Step:
    """x is kept as it came. Backward's products read weights' transposes."""
    reads = (_transposed(array) if array.name in WEIGHTS and "backward" in step.name else array for array in step.reads)
    keeps = (each for array in step.keeps for each in ((array,) if array.name in TOKENS else stored((array,))))
    return replace(step, reads=tuple(stored(reads)), writes=tuple(stored(step.writes)), keeps=tuple(keeps), rate=RATE)


def _gradient(step: Step) -> Iterator[Step]:
    """A weight's gradient, and what transposes its operands, in blocks of 128 rows and columns."""
    rows = next(array.shape[0] for array in step.reads if array.name in ROWS)
    turned = tuple(stored(a._replace(name=f"{a.name}^T", shape=(a.shape[1], rows)) for a in step.reads))
    names = ", ".join(array.name for array in step.reads)
    yield replace(step, name=f"transpose {names}", reads=tuple(stored(step.reads)), writes=turned, operations=0.0)
    yield replace(step, reads=turned, rate=RATE)
