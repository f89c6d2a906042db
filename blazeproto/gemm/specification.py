"""A product's mathematics and arrays, stated once. The check of a call, new outputs and the twin are made from it.

The twin of a public function has its signature, and ``round_to`` beside. It takes NumPy arrays of any floating dtype (float64
makes an oracle, float32 a fair opponent), of any width and any number of experts, and refuses what its function refuses. Nothing
is rounded but what ``round_to="bf16"`` rounds: to bf16 whatever a kernel stores in bf16, before it is used again. (Weight
gradients and sums over an expert's rows that go to memory of the caller's stand for fp32 ones, and are left.) Rows of no pair
(from ``expert_token_offsets[E]`` on) are neither read nor written: in new arrays they are NaN. Outputs that are given are filled;
those that are not have the dtype that the inputs promote to. ``config``, ``stream`` and ``workspace`` change nothing.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar

import numpy as np

from blazeproto.activations import activation_named
from blazeproto.gemm.arguments import LOW, Arguments, Array, TwinArguments, low_arrays
from blazeproto.gemm.e4m3 import Quantized, from_e4m3, to_e4m3
from blazeproto.gemm.formulas import Namespace
from blazeproto.gemm.recipe import RECIPES, Recipe
from blazeproto.gemm.tiles import BF16, BM, E4M3, Element, TileConfig
from blazeproto.runtime import checks
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.rounding import to_bfloat16

F = TypeVar("F", bound=Callable[..., Any])


def by_tile(config: TileConfig, halves: int) -> tuple[int, int]:
    """Whole tiles."""
    return BM, config.tile_n


def low_rank(shape: str, transposed: str, quantized: str = "") -> tuple[Array, Array]:
    """The inputs of a public function's ``low``: rows, and a factor of this shape."""
    factor = Array(LOW[1], shape, transposed=transposed, quantized=quantized, optional=True)
    return Array(LOW[0], "R r", optional=True), factor


@dataclass(frozen=True)
class Specification:
    """inputs: in the order in which they are checked: the first that has a letter decides it.  outputs: in the order of results.
    formula: ``formula(m, **arrays and options of the call)``, m a `blazeproto.gemm.formulas.Namespace`: the outputs, or the one
    output; what is added, where an output is added to.
    settle: ``settle(given, call, outputs)`` gives the outputs that are left to check, where ``columns`` changes them.
    workspace: lengths of the fp32 workspace, by letters and tiles; () for none, as where "quantized" is among them.
    by_pair: what else of four bytes a pair a call reads that is bound by memory: lists of a dispatch, what is added to.
    quantized: whether the arrays that `blazeproto.gemm.recipe.FP8` names may be `Quantized`, all of them or none.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    formula: Callable[..., Any]
    settle: Callable[[Arguments, Mapping[str, Any], tuple[Array, ...]], tuple[Array, ...]] | None = None
    workspace: Callable[[Mapping[str, int], TileConfig | None], tuple[int, ...]] | None = None
    by_pair: tuple[str, ...] = ()
    quantized: bool = False
    arguments: ClassVar[tuple[type[Arguments], type[Arguments]]] = (Arguments, TwinArguments)  # of a call, of a twin's

    def element(self, call: Mapping[str, Any]) -> Element:
        """The type of a call's operands. TypeError where some are quantized and others not, ValueError for options that quantized
        ones have not."""
        operands = (call.get(array.name) for array in self.inputs if array.scale)
        if not self.quantized or not any(isinstance(value, Quantized) for value in operands):
            return BF16
        for array in (*self.inputs, *self.outputs):
            value = call.get(array.name)
            made = array in self.outputs and value is None
            if array.scale and not (made or isinstance(value, Quantized)):
                raise TypeError(
                    f"{array.name}: expected a Quantized, as other operands are, got {type(value).__name__}"
                )
        if call.get("transposed"):
            raise ValueError("transposed: expected False with quantized operands, got True")
        activation = activation_named(call.get("activation", "swiglu"))
        if not activation.gated or activation.layout != "HALVES":
            expected = "one whose gate and up are halves of H, with quantized operands"
            raise ValueError(f"activation: expected {expected}, got {call['activation']!r}")
        return E4M3

    def recipe(self, call: Mapping[str, Any]) -> Recipe:
        """The recipe of a call of quantized operands. Several scales for a token of x: the one with float32 scales."""
        several = getattr(getattr(call.get("x"), "scales", None), "ndim", 1) == 2
        return RECIPES["fp8_rollout" if several else "fp8"]

    def public(self, function: F) -> F:
        """Decorates the public function of device arrays: it then takes arrays of any library; in host memory the twin runs."""
        return any_library(self.twin_of(function), {array.name: array.dtype for array in self.outputs})(function)

    def shape_in(self, array: Array, call: Mapping[str, Any]) -> str:
        """An array's shape with the options of a call."""
        return array.shape_in(call)

    def operations(self, call: Mapping[str, Any], stored: Callable[[Any], Any]) -> Any:
        """The formula's ``m`` in a call of NumPy arrays.  stored: as of a `Namespace`."""
        return Namespace(call["dispatch"], stored, blocks=self.element(call) is not BF16)

    def check(self, call: Mapping[str, Any], *, twin: bool = False) -> Any:
        """The `Arguments` of a call, the public function's parameters by name, or of its twin's. Raises what these raise."""
        given = self.arguments[twin](call)
        if "activation" in call:
            given.halves = activation_named(call["activation"]).halves
        quantized = self.element(call) is not BF16
        given.recipe = self.recipe(call)
        call = {**call, "quantized": quantized}
        arrays = {**call, **low_arrays(call.get("low"))}
        for array in self.inputs:
            if array.name in arrays:
                given.read(array, arrays[array.name], self.shape_in(array, call))
        for array in self.settle(given, call, self.outputs) if self.settle else self.outputs:
            options = {"accumulate": call.get("accumulate", False), "quantized": quantized}
            given.write(array, arrays[array.name], self.shape_in(array, call), **options)
        if self.workspace is not None and not twin:
            lengths = self.workspace(given.sizes | {"quantized": quantized}, call.get("config"))
            if lengths or call["workspace"] is not None:
                given.write(Array("workspace", " ".join(map(str, lengths or (0,))), "float32"), call["workspace"])
        return given

    def run(self, launch: Callable[..., None], call: Mapping[str, Any], *options: str) -> Any:
        """The outputs of a call, once they are checked and launched.  options: what ``launch`` takes beside arrays and place."""
        given = self.check(call)
        launch(**given.operands(), at=given.located(), **{option: call[option] for option in options})
        return self.results(given)

    def results(self, given: Arguments) -> Any:
        """The outputs of a call whose arrays are checked."""
        made = tuple(given.arrays[array.name] for array in self.outputs)
        return made if len(made) > 1 else made[0]

    def twin_of(self, function: F) -> F:
        """The twin of a public function."""
        signature = inspect.signature(function)
        round_to = inspect.Parameter("round_to", inspect.Parameter.KEYWORD_ONLY, default=None)
        names = list(inspect.signature(self.formula).parameters)[1:]

        @wraps(function)
        def twin(*args: Any, round_to: str | None = None, **options: Any) -> Any:
            checks.require(round_to in (None, "bf16"), "round_to", "None or 'bf16'", repr(round_to))
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            call = bound.arguments
            given = self.check(call, twin=True)
            given.lists()
            stored: Any = to_bfloat16 if round_to else lambda values: values
            m, taken = self.operations(call, stored), dict(call)
            for array in self.inputs:
                value = call.get(array.name)
                operand = array.operand_of(given.recipe)
                if isinstance(value, Quantized) and operand:
                    value = from_e4m3(np, value, operand.scale)
                    taken[array.name] = value = value.swapaxes(1, 2) if array.quantized else value
                if self.shape_in(array, call)[0] == "R" and value is not None:
                    taken[array.name] = value[: len(m.pairs)]
            if call.get("low") is not None:
                rows, factor = call["low"]
                turned = self.inputs[-1].quantized and self.element(call) is E4M3
                taken["low"] = rows[: len(m.pairs)], factor.swapaxes(1, 2) if turned else factor
            values = self.formula(m, **{name: taken[name] for name in names if name in taken})
            for array, value in zip(self.outputs, values if isinstance(values, tuple) else (values,), strict=True):
                self._store(array, value, given, call, stored)
            return self.results(given)

        twin.__signature__ = signature.replace(parameters=[*signature.parameters.values(), round_to])  # type: ignore[attr-defined]
        return twin  # type: ignore[return-value]

    def _store(
        self, array: Array, value: Any, given: Arguments, call: Mapping[str, Any], stored: Callable[[Any], Any]
    ) -> None:
        """A value of the formula in the lines in use of its output, rounded unless that stands for an fp32 one."""
        out, operand = given.arrays[array.name], array.operand_of(given.recipe)
        if isinstance(out, Quantized) and operand:
            made = to_e4m3(np, stored(value), *operand[1:])
            out.values[: len(value)], out.scales[:, : len(value)] = made.values, made.scales
            return
        out = out.reshape(-1) if array.index == "pair" else out[: len(value)]
        if out.shape != value.shape:  # some columns of a wider output
            out = out[:, call["columns"].start : call["columns"].stop]
        if array.added or (array.f32 and call["accumulate"]):
            out[...] = out + value
        elif array.dtype == "bfloat16" and not (array.f32 and call[array.name] is not None):
            out[...] = stored(value)
        else:
            out[...] = value
