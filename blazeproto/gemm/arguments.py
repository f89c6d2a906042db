"""The arrays of a product's call, and of its twin's, checked before anything is computed.

A product says once which arrays it takes (specification.py); a call is checked by an `Arguments`, a twin's by a `TwinArguments`.
So both refuse the same input in the same words, but for what only the kernels need: bf16, widths in multiples of 8, 16-byte
aligned addresses, at most 512 experts, the current GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any, NamedTuple

from blazeproto.dispatch.structures import Addresses, Dispatch, addresses
from blazeproto.gemm.e4m3 import BLOCK, Quantized, scales_shape
from blazeproto.gemm.recipe import FP8, Operand, Recipe
from blazeproto.gemm.tiles import CHUNK, E4M3, GATHERED_ELEMENTS, MAX_EXPERTS, TileConfig
from blazeproto.runtime import checks
from blazeproto.runtime.arrays import (
    DeviceArray,
    current_device,
    current_stream,
    empty,
    expect,
    numpy_output,
    numpy_view,
    overlap,
    view,
)


@dataclass(frozen=True)
class Array:
    """An input or an output of a product.

    name: as the public function calls it.
    shape: a letter for each dimension: T tokens, R rows in expert order, P pairs, E experts; d model width, n expert width,
    h = G n columns of H, G being 2 for a gated activation, else 1; any other word is a width of its own.
    gather, ordered, transposed: its shape in a call with ``gather``, with ``gather=False``, with ``transposed``.
    quantized: its shape in a call of quantized operands, whose reductions are contiguous.
    optional: an input that may be None.  fetched: an input of which a kernel fetches rows by index, where it has one a token.
    over: the input whose memory an output may take, element for element.
    added: an output that must be given, zeroed or with what it is added to.
    f32: an output that may be fp32 if it is given, as it must be to ``accumulate``.
    counted: an optional input that is among the least bytes all the same.
    tile: the lines and columns of an output that one CTA stores at a time, by tiles and G; None where no tiles are.
    operand: its name in a recipe, where that is another.
    """

    name: str
    shape: str
    dtype: str = "bfloat16"
    gather: str = ""
    ordered: str = ""
    transposed: str = ""
    quantized: str = ""
    optional: bool = False
    fetched: bool = False
    over: str = ""
    added: bool = False
    f32: bool = False
    counted: bool = False
    tile: Callable[[TileConfig, int], tuple[int, int]] | None = None
    operand: str = ""

    def operand_of(self, recipe: Recipe) -> Operand | None:
        """Its operand in a recipe; None if it stays bf16."""
        return recipe.operand(self.operand or self.name)

    @property
    def index(self) -> str:
        """The kind of thing that a line of it belongs to: "token", "row", "pair" or "expert"; "" for anything else."""
        return {"T": "token", "R": "row", "P": "pair", "E": "expert"}.get(self.shape[0], "")

    @property
    def scale(self) -> str:
        """The elements that share one of its scales with precision="fp8"; "" if it stays bf16."""
        operand = self.operand_of(FP8)
        return operand.scale if operand else ""

    @property
    def scales(self) -> str:
        """The name of its scales in errors and in the views of a call."""
        return f"{self.name}'s scales"

    def shape_in(self, call: Mapping[str, Any]) -> str:
        """Its shape with the options of a call."""
        gather, transposed, quantized = call.get("gather"), call.get("transposed"), call.get("quantized")
        shapes = (
            (self.quantized, quantized),
            (self.gather, gather),
            (self.ordered, gather is False),
            (self.transposed, transposed),
        )
        return next((shape for shape, holds in shapes if shape and holds), self.shape)


E4M3_NAN = 0x7F
Dtype = str | tuple[str, ...]  # the one that is taken, or those
LOW = ("low rows", "low factor")  # what errors call the arrays of a public function's ``low``


class LowRankTerm(NamedTuple):
    """A term that a product by rows adds to its reduction: rows (R, r) . factor, of rank r, a multiple of 8.

    factor: (E, columns, r), or (E, r, columns) where the weights lie MN-major.
    """

    rows: Any
    factor: Any


def low_arrays(low: Any) -> dict[str, Any]:
    """The arrays of a public function's ``low``, a pair or None, by the names that errors call them."""
    if low is None:
        return {}
    if not isinstance(low, tuple) or len(low) != 2:
        raise TypeError(f"low: expected (rows, factor) or None, got {type(low).__name__}")
    return dict(zip(LOW, low, strict=True))


class Arguments:
    """The arrays of one call of a product, checked; those that the caller gives no memory for are made.

    call: the parameters of the public function, by name.
    A shape is written as in the docstrings, "E h d" for (E, h, d). T, R, P and E are the dispatch's; any other word is a
    width, which the first array that has it decides; a number is itself. "P" alone is met by any shape of P elements. With
    an activation, n decides h = G n and h decides n.

    TypeError for a wrong dtype, ValueError for anything else, naming the argument, what was expected and what came.
    """

    multiple = CHUNK  # of which widths are one
    halves = 0  # G, where there is an activation
    recipe = FP8  # of a call of quantized operands

    def __init__(self, call: Mapping[str, Any]) -> None:
        checks.instance("config", call.get("config"), TileConfig, optional=True)
        self.stream: int | None = call["stream"]
        if self.stream is not None:
            checks.integer("stream", self.stream, least=0)
        self.arrays: dict[str, Any] = {}  # by name: the caller's, or new ones
        self.views: dict[str, Any] = {}  # of these, as a launch takes them; None for an optional one that was not given
        self.sizes = self._known_sizes(call)

    def _known_sizes(self, call: Mapping[str, Any]) -> dict[str, int]:
        """Those that no array decides."""
        self.dispatch: Dispatch = call["dispatch"]
        checks.instance("dispatch", self.dispatch, Dispatch)
        T = checks.integer("dispatch.num_tokens", self.dispatch.num_tokens, least=0)
        E = checks.integer("dispatch.num_experts", self.dispatch.num_experts, least=1)
        if self.dispatch.top_k is None:
            P = self._length("token_index_map")
        else:
            P = T * checks.integer("dispatch.top_k", self.dispatch.top_k, least=1)
        return {"T": T, "R": self._length("expert_pair_indices"), "P": P, "E": E}

    def read(self, array: Array, value: Any, shape: str = "") -> None:
        """An input, or an output that is there.  shape: in this call, where options change it."""
        name, shape = array.name, shape or array.shape
        gathered = array.fetched and shape[0] == "T"
        self.arrays[name] = value
        if isinstance(value, Quantized) and array.scale:
            self._read_quantized(array, value, shape, gathered)
        elif array.optional and value is None and name not in LOW:
            self.views[name] = None
        else:
            self.views[name] = self._checked(name, value, shape, array.dtype, gathered)

    def _read_quantized(self, array: Array, value: Quantized, shape: str, gathered: bool) -> None:
        """Rows are whole blocks, others whole chunks of 16 bytes."""
        scale = operand.scale if (operand := array.operand_of(self.recipe)) else ""
        whole = BLOCK if "1x128" in scale else CHUNK * E4M3.packing
        values = self._checked(array.name, value.values, shape, E4M3.dtypes, gathered)
        if values.shape[-1] % whole:
            raise ValueError(f"{array.name}: expected a width that is a multiple of {whole}, got shape {values.shape}")
        made = self._expected(array.scales, value.scales, "float32", scales_shape(scale, values.shape))
        self.views |= {array.name: values, array.scales: made}

    def write(
        self, array: Array, value: Any, shape: str = "", *, accumulate: bool = False, quantized: bool = False
    ) -> None:
        """An output or a workspace, whose lengths are known by now: a new one where ``value`` is None, unless it is added to.
        shape: as of `read`."""
        checks.require(value is not None or not accumulate, array.name, "an array to accumulate into", None)
        if value is None and not array.added:
            lengths: Any = self._lengths(shape or array.shape)
            scale = array.scale if quantized else ""
            value = self._new_quantized(lengths, scale) if scale else self._new(lengths, array.dtype)
        elif array.f32 and self._view(array.name, value).dtype == "float32":
            array = replace(array, dtype="float32")
        others = {name: seen for name, seen in self.views.items() if seen is not None}
        self.read(array, value, shape)
        over = {array.name: array.over, array.scales: f"{array.over}'s scales" if array.over else ""}
        for (mine, allowed), (name, seen) in every(over.items(), others.items()):
            a = self.views.get(mine)
            if a and overlap(a, seen) and not (name == allowed and (a.ptr, a.shape) == (seen.ptr, seen.shape)):
                allowed = f" or all of {array.over}" if array.over else ""
                raise ValueError(f"{mine}: expected memory of its own{allowed}, got some of {name}")

    def operands(self) -> dict[str, Any]:
        """The arrays by the names of a launch's parameters."""
        views = dict(self.views)
        for name in [name for name in views if f"{name}'s scales" in views]:
            views[name] = Quantized(views[name], views.pop(f"{name}'s scales"))
        rows, factor = (views.pop(name, None) for name in LOW)
        return views | ({"low": LowRankTerm(rows, factor)} if rows is not None else {})

    def lists(self) -> dict[str, Any]:
        """The dispatch's lists, checked."""
        P, T, E = (self.sizes[size] for size in "PTE")
        shapes = {"expert_pair_indices": "R", "expert_token_offsets": str(E + 1), "token_index_map": str(P)}
        by_token = {"pair_tokens": str(P), "token_offsets": str(T + 1)}
        if self.dispatch.top_k is None:
            shapes |= by_token
        for name in by_token.keys() - shapes:
            if getattr(self.dispatch, name) is not None:
                raise ValueError(f"dispatch.{name}: expected None beside top_k={self.dispatch.top_k}, got an array")
        if self.sizes["R"] > P:
            raise ValueError(
                f"dispatch.expert_pair_indices: expected at most {P} rows, one a pair, got {self.sizes['R']}"
            )
        return {
            name: self._checked(f"dispatch.{name}", getattr(self.dispatch, name), shape, "int32")
            for name, shape in shapes.items()
        }

    def located(self) -> Addresses:
        """The addresses of the dispatch's lists, which are checked too, with the current GPU and the stream to launch on,
        by default the first array's current one."""
        return addresses(replace(self.dispatch, **self.lists()), *self.place())

    def place(self) -> tuple[int, int]:
        """The device and the stream of a launch."""
        first = next(array for array in self.views.values() if array is not None)
        return first.device, current_stream(first) if self.stream is None else self.stream

    def _length(self, name: str) -> int:
        """The length of a list of the dispatch."""
        shape = self._view(f"dispatch.{name}", getattr(self.dispatch, name)).shape
        checks.require(len(shape) == 1, f"dispatch.{name}", "shape (any)", shape)
        return shape[0]

    def _lengths(self, shape: str) -> tuple[int | None, ...]:
        """None for one that no array has decided yet."""
        return tuple(int(word) if word.isdigit() else self.sizes.get(word) for word in shape.split())

    def _checked(self, name: str, array: Any, shape: str, dtype: Dtype, gathered: bool = False) -> DeviceArray:
        by_pair = shape == "P"
        a = self._expected(name, array, dtype, None if by_pair else self._lengths(shape))
        odd_widths = dtype == "bfloat16" and any(width % self.multiple for width in a.shape[1:])
        for wrong, expected in (
            (odd_widths, f"widths that are multiples of {self.multiple}"),
            (by_pair and a.size != self.sizes.get("P"), f"{self.sizes.get('P')} elements, one a pair"),
            *self._limits(a, shape[0], gathered),
        ):
            if wrong:
                raise ValueError(f"{name}: expected {expected}, got shape {a.shape}")
        if not by_pair:
            self.sizes.update(zip(shape.split(), a.shape, strict=True))
        self._relate(name)
        return a

    def _relate(self, name: str) -> None:
        """n and h, of which the array called ``name`` may have decided one."""
        if not self.halves:
            return
        if "h" in self.sizes and self.sizes["h"] % (self.multiple * self.halves):
            width, expected = self.sizes["h"], f"{self.halves} times a multiple of {self.multiple}"
            raise ValueError(f"{name}: expected {expected} rows an expert, got {width}")
        if "h" in self.sizes:
            self.sizes["n"] = self.sizes["h"] // self.halves
        elif "n" in self.sizes:
            self.sizes["h"] = self.sizes["n"] * self.halves

    # --- What a twin has otherwise -------------------------------------------------------------------------------

    def _view(self, name: str, array: Any) -> DeviceArray:
        return view(array, name)

    def _new(self, lengths: tuple[int, ...], dtype: str) -> Any:
        return empty(lengths, dtype, next((seen for seen in self.views.values() if seen is not None), None))

    def _new_quantized(self, lengths: tuple[int, ...], scale: str) -> Quantized:
        """In the dtype that the inputs hold e4m3 in."""
        held = next(seen.dtype for seen in self.views.values() if seen is not None and seen.dtype in E4M3.dtypes)
        return Quantized(self._new(lengths, held), self._new(scales_shape(scale, lengths), "float32"))

    def _expected(self, name: str, array: Any, dtype: Dtype, lengths: tuple[int | None, ...] | None) -> DeviceArray:
        a = expect(name, array, dtype, lengths)
        if a.device != (here := current_device()):
            raise ValueError(f"{name}: expected an array on the current GPU, cuda:{here}, got one on cuda:{a.device}")
        return a

    def _limits(self, a: DeviceArray, letter: str, gathered: bool) -> tuple[tuple[bool, str], ...]:
        """The kernels' limits: whether one is passed, and what was expected.  letter: of the first dimension."""
        weights = letter == "E" and len(a.shape) == 3
        return (
            (weights and not 1 <= a.shape[0] <= MAX_EXPERTS, f"1 to {MAX_EXPERTS} experts"),
            (gathered and a.size >= GATHERED_ELEMENTS, f"fewer than {GATHERED_ELEMENTS} elements to gather from"),
        )


class TwinArguments(Arguments):
    """The arrays of one call of a twin: NumPy's, of any floating dtype, any width and any number of experts.

    Those that are made have the dtype that the arrays read so far promote to, and are full of NaN.
    """

    multiple = 1
    FLOATS = ("float16", "float32", "float64")

    def write(
        self, array: Array, value: Any, shape: str = "", *, accumulate: bool = False, quantized: bool = False
    ) -> None:
        if isinstance(value, Quantized):
            numpy_output(array.name, value.values, "uint8", None)
            numpy_output(array.scales, value.scales, "float32", None)
        elif value is not None:
            numpy_output(array.name, value, self._dtypes(array.dtype), None)
        super().write(array, value, shape, accumulate=accumulate, quantized=quantized)

    def _view(self, name: str, array: Any) -> DeviceArray:
        return numpy_view(array, name)

    def _new(self, lengths: tuple[int, ...], dtype: str) -> Any:
        import numpy

        if dtype == "uint8":
            return numpy.full(lengths, E4M3_NAN, dtype)
        read = [array for array in self.arrays.values() if not (array is None or isinstance(array, Quantized))]
        return numpy.full(lengths, numpy.nan, numpy.result_type(*read) if read else "float32")

    def _new_quantized(self, lengths: tuple[int, ...], scale: str) -> Quantized:
        import numpy

        scales = numpy.full(scales_shape(scale, lengths), numpy.nan, "float32")
        return Quantized(self._new(lengths, "uint8"), scales)

    def _expected(self, name: str, array: Any, dtype: Dtype, lengths: tuple[int | None, ...] | None) -> DeviceArray:
        return expect(name, numpy_view(array, name), self._dtypes(dtype), lengths, alignment=1)

    def _limits(self, a: DeviceArray, letter: str, gathered: bool) -> tuple[tuple[bool, str], ...]:
        return ()

    def _dtypes(self, dtype: Dtype) -> tuple[str, ...]:
        return ("uint8",) if dtype == E4M3.dtypes else ("int32",) if dtype == "int32" else self.FLOATS
