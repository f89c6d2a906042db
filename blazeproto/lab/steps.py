"""The steps of one forward and backward of a layer: what each reads, writes, computes and keeps, by shapes alone.

Steps, in the order in which they run, with the bytes that each must move at the least, as `blazeproto.cost` counts them: every
input once, every output once, index lists in the products not at all. In chunks (``workspace_bytes``)
weights are read once a chunk, which is not counted. The products' steps are made of their specifications.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from math import prod
from typing import NamedTuple

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.gemm.arguments import Array
from blazeproto.gemm.e4m3 import scales_shape
from blazeproto.gemm.product import Variant
from blazeproto.gemm.recipe import FP8, Recipe
from blazeproto.gemm.tiles import E4M3
from blazeproto.lab.calls import BACKWARD, CALLS, LAYER, Call


class Traffic(NamedTuple):
    """An array that a step reads, writes or keeps: name, shape, bytes of an element; what shares a scale of it, quantized."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    scale: str = ""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.name.replace(' ', '_')}[{'×'.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Step:
    """One kernel, or a few that belong together. phase: "forward" or "backward".

    operations: a multiplication and an addition being two; None where they are not counted.
    keeps: what stays for backward after this step.  ms: measured alone; None where it wasn't.  rate: of operations, over bf16's.
    """

    phase: str
    name: str
    reads: tuple[Traffic, ...]
    writes: tuple[Traffic, ...]
    operations: float | None = 0.0
    keeps: tuple[Traffic, ...] = ()
    ms: float | None = None
    rate: float = 1.0

    @property
    def bytes_read(self) -> int:
        return sum(array.nbytes for array in self.reads)

    @property
    def bytes_written(self) -> int:
        return sum(array.nbytes for array in self.writes)

    @property
    def kept_bytes(self) -> int:
        return sum(array.nbytes for array in self.keeps)

    @property
    def floor_ms(self) -> float:
        """Least milliseconds on an H200, at its measured bandwidth and bf16 rate (`blazeproto.cost`)."""
        return cost.floor_ms((self.operations or 0.0) / self.rate, self.bytes_read + self.bytes_written)


EXPERTS = ("x", "up_proj", "up_bias", "down_proj", "down_bias", "router")
"""The gradients for which the experts have a backward, and keep something."""
SCORES = ("x", "router")
"""Those for which scores and logits need one, on the way."""
MADE_FOR = {
    "dh": ("x", "up_proj", "up_bias"),
    "a_scaled": ("down_proj",),
    "d_scores": SCORES,
    "d_up": ("up_proj",),
    "d_up_bias": ("up_bias",),
    "d_down": ("down_proj",),
    "d_down_bias": ("down_bias",),
    **dict.fromkeys(("dx_rows", "dx", "dx_fused"), ("x",)),
}
"""What backward makes, by the name that a `Call` has for it, and for which gradients."""


@dataclass(frozen=True)
class LayerCall:
    """The facts about one call of a layer on which its steps depend.

    sizes: K is 0 where it varies.  rows: pairs that are computed.  pairs, places: P and R, the lengths of the lists by pair and
    by row.  num_chunks: 1 for a whole batch.
    itemsize, weight_itemsize, router_itemsize, logit_itemsize: bytes of an element of x as the experts see it, of their weights,
    of the router's weight, of logits and scores.
    save, bias, shared: the call's save policy, whether the layer has biases, the shared expert's width or 0.
    fused, fused_backward: whether `down_forward_fused` and `up_backward_act_fused` sum a token's rows, and not `combine`.
    router: "top-k", "choice" (hashing, token rounding, ...) or "other" (a module of the user's).
    losses: whether an auxiliary loss has a coefficient.
    wanted: whether a gradient is made of x, up_proj, up_bias, down_proj, down_bias, router, shared_up and shared_down, if the
    layer has them.
    in_fp8: of quantized operands when weights are quantized: "each" order before its product, "both" in forward, or "before" the
    call; else "".  recipe: theirs.
    """

    sizes: Sizes
    rows: int
    pairs: int
    places: int
    num_chunks: int
    itemsize: int
    weight_itemsize: int
    router_itemsize: int
    logit_itemsize: int
    save: str
    fused: bool
    fused_backward: bool
    bias: bool
    shared: int
    router: str
    losses: bool
    wanted: Mapping[str, bool]
    in_fp8: str = ""
    recipe: Recipe = FP8

    def wants(self, *names: str) -> bool:
        """Whether any of these gradients is made."""
        return any(self.wanted.get(name, False) for name in names)

    @property
    def by_pair(self) -> tuple[int, ...]:
        """The shape of a list with an entry for each pair."""
        T, K = self.sizes.T, self.sizes.K
        return (T, K) if K and self.pairs == T * K else (self.pairs,)

    def arrays(self, *names: str, itemsize: int = 0) -> tuple[Traffic, ...]:
        """Those of `ARRAYS`. itemsize: in place of their own."""
        lengths = self.sizes.letters | {"places": self.places, "pairs": self.pairs, "chunks": self.num_chunks}
        lengths |= {
            "s": self.shared,
            "hs": self.sizes.halves * self.shared,
            "E+1": self.sizes.E + 1,
            "T+1": self.sizes.T + 1,
        }

        def array(name: str) -> Traffic:
            shape, of = ARRAYS[name]
            lies = self.by_pair if shape == "pair" else tuple(lengths[word] for word in shape.split())
            own = getattr(self, of) if of else cost.ID_BYTES
            return Traffic(name.replace("up_proj", self.shown("up_proj")), lies, itemsize or own)

        return tuple(map(array, names))

    def shown(self, name: str) -> str:
        """How a table calls an array."""
        up = "gate_up_proj" if self.sizes.halves == 2 else "up_proj"
        return PAPERS_NAMES.get(name) or {"up_proj": up, "d_up": f"d {up}", "d_down": "d down_proj"}.get(name, name)


def steps_of(layer: LayerCall) -> list[Step]:
    """All steps of a forward and a backward. A kernel that makes more than is needed writes all of it."""
    return [*_forward(layer), *_backward(layer)]


# --- The products ----------------------------------------------------------------------------------------------------------

PAPERS_NAMES = {  # arrays, where the papers have other names
    "h": "H",
    "dh": "dH",
    "y": "Y",
    "dx_rows": "dX~",
    "a_scaled": "A'",
    "dx": "dX",
    "d_out": "dO",
    "fused": "out",
    "dx_fused": "dX",
    "scores": "S",
    "d_scores": "dS",
    "up_bias": "bias",
    "down_bias": "bias",
    "d_up_bias": "bias",
    "d_down_bias": "bias",
}


MADE_BEFORE = {name for name, times in Counter(name for call in LAYER for name in call.made).items() if times > 1}
"""What one product makes and another adds to."""


def product_calls(s: LayerCall, phase: str) -> dict[str, Call]:
    """The calls of products that a layer makes, by their steps' names, in order."""
    up, down = (Variant(bias=s.bias, fused=fused) for fused in (s.fused_backward, s.fused))
    calls = [
        call
        for call in LAYER
        if (phase == "backward") == bool(BACKWARD & call.inputs.keys())
        and not call.f32
        and any(name not in MADE_FOR or s.wants(*MADE_FOR[name]) for name in call.made)
        and not (call.product == "combine" and (s.fused if "scores" in call.inputs else s.fused_backward))
        and call.entry.in_layer is not None
        and any(True for _ in call.entry.in_layer(s.sizes, up, down))
    ]
    times = Counter(call.product for call in calls)
    names = (
        f"{c.product} of {PAPERS_NAMES[next(iter(c.inputs))]}" if times[c.product] > 1 else c.product for c in calls
    )
    return dict(zip(names, calls, strict=True))


def _product(s: LayerCall, call: Call, phase: str, name: str, keeps: tuple[Traffic, ...] = ()) -> Iterator[Step]:
    """A product, and what quantizes its operands. Scores are those of the pairs that are computed, their gradients of all. An
    array that is added to is read too, if it was made."""
    quantized = bool(s.in_fp8) and call.entry.spec.quantized
    letters = s.sizes.letters | {"R": s.rows, "P": s.rows}
    if "d_out" in call.inputs and "h" in call.inputs["d_out"].shape:  # as wide as it is
        letters["h"] = s.sizes.d

    def array(name: str, operand: Array, made: bool = False) -> Traffic:
        if operand.index == "pair":
            return Traffic(PAPERS_NAMES[name], s.by_pair if made else (s.rows,), s.logit_itemsize)
        of_weights = operand.index == "expert" and (made or name.endswith("_bias"))
        itemsize = s.weight_itemsize if of_weights else 4 if operand.dtype == "float32" else s.itemsize
        shape = tuple(letters[x] for x in operand.shape_in(call.options).split())
        of = operand.operand_of(s.recipe)
        return Traffic(s.shown(name), shape, itemsize, of.scale if quantized and of else "")

    reads = [array(*named) for named in call.inputs.items() if s.bias or not named[0].endswith("_bias")]
    writes = [array(*named, made=True) for named in call.made.items()]
    added = [array(*named, made=True) for named in call.made.items() if named[1].added and named[0] in MADE_BEFORE]
    sizes = s.sizes._replace(K=s.rows / max(s.sizes.T, 1))  # type: ignore[arg-type]  # K in the mean
    step = Step(phase, name, (*reads, *added), tuple(writes), PRODUCTS[call.product].operations(sizes), keeps)
    if s.in_fp8 and "dh" in call.inputs and not quantized:
        rows = (reads[0]._replace(scale=FP8.dh.scale),)
        yield replace(
            step, name=f"dequantize {rows[0].name}", reads=(*stored(rows),), writes=(reads[0],), operations=0.0
        )
    yield from _in_fp8(s, step) if quantized else (step,)


def stored(arrays: Iterable[Traffic]) -> Iterator[Traffic]:
    """Quantized arrays, each before its scales; others as they are."""
    for array in arrays:
        yield array._replace(itemsize=1) if array.scale else array
        if array.scale:
            yield Traffic(f"{array.name}'s scales", scales_shape(array.scale, array.shape), 4)


def _in_fp8(s: LayerCall, step: Step) -> Iterator[Step]:
    """A product of quantized operands behind what makes them. x is kept as it came; backward's products by rows read weights'
    transposes, and a weight's gradient its operands', in blocks of 128 rows and columns."""

    def made(name: str, read: Iterable[Traffic], of: Iterable[Traffic], keeps: Iterable[Traffic] = ()) -> Step:
        return replace(step, name=name, reads=(*read,), writes=(*stored(of),), operations=0.0, keeps=(*stored(keeps),))

    def plain(array: Traffic) -> Traffic:
        return array._replace(scale="")

    backward, reads = "backward" in step.name, list[Traffic]()
    for array in (array for array in step.reads if array.scale.startswith("token")):
        yield made(f"quantize {array.name}", [plain(array)], [array])
    for array in step.reads:
        if array.scale == FP8.weights.scale:
            back = array._replace(name=f"{array.name}^T", shape=(array.shape[0], *array.shape[:0:-1]))
            mine = back if backward else array
            if s.in_fp8 == "each":
                yield made(f"quantize {mine.name}", [plain(array)], [mine])
            elif s.in_fp8 == "both" and not backward:
                yield made(f"quantize {array.name}", [plain(array)], [array, back], [back])
            array = mine
        reads.append(array)
    if step.name.endswith("_weight"):
        rows = next(array.shape[0] for array in reads if array.scale == FP8.h.scale)
        turned = [a._replace(name=f"{a.name}^T", shape=(a.shape[1], rows), scale=FP8.of_dw.scale) for a in reads]
        yield made(f"transpose {', '.join(array.name for array in reads)}", stored(reads), turned)
        reads = turned
    keeps = (plain(array) if array.scale.startswith("token") else array for array in step.keeps)
    kept, rate = tuple(stored(keeps)), E4M3.rate
    yield replace(step, reads=tuple(stored(reads)), writes=tuple(stored(step.writes)), keeps=kept, rate=rate)


# --- A layer ---------------------------------------------------------------------------------------------------------------


ARRAYS = {
    name: (shape, of)
    for of, shapes in {
        "itemsize": {"x": "T d", "dX": "T d", "out": "T d", "dO": "T d", "up_proj": "E h d", "down_proj": "E d n"}
        | {"H": "places h", "act": "places n"},
        "weight_itemsize": {"shared up_proj": "hs d", "shared down": "d s"}
        | {"d shared up_proj": "hs d", "d shared down": "d s"},
        "router_itemsize": {"router.weight": "E d", "d router.weight": "E d"},
        "logit_itemsize": {"logits": "T E", "dlogits": "T E", "S": "pair", "dS": "pair"},
        "": {"expert_pair_indices": "places", "expert_token_offsets": "chunks E+1", "token_index_map": "pairs"}
        | {"pair_tokens": "pairs", "token_offsets": "T+1", "experts": "pair", "load": "E"},
    }.items()
    for name, shape in shapes.items()
}
"""The arrays of a layer beside those of its products: shape, and the field of a `LayerCall` with the bytes of an element, "" for
indices. hs, s: rows and columns of the shared expert."""
KEPT: dict[str, tuple[str, ...]] = {"recompute": (), "minimal": ("H",), "paper": ("H", "act")}  # by save policy


def _cast_weights(s: LayerCall, phase: str, *which: bool) -> Iterator[Step]:
    """which: whether up, whether down."""
    if s.weight_itemsize != s.itemsize and any(which) and s.in_fp8 != "before":
        names = tuple(compress(("up_proj", "down_proj"), which))
        masters = s.arrays(*names, itemsize=s.weight_itemsize)
        yield Step(phase, "weights to x's dtype", masters, s.arrays(*names))


def _operations(s: LayerCall, width: int, products: int = 1) -> float:
    """products: of (T, d) by (d, width)."""
    return 2.0 * s.sizes.T * s.sizes.d * width * products


def _forward(s: LayerCall) -> Iterator[Step]:
    a, experts, scores, phase = s.arrays, s.wants(*EXPERTS), s.wants(*SCORES), "forward"
    by_experts = experts and (s.wants("up_proj") or s.save == "recompute")  # x is kept

    def kept(by: bool, *names: str) -> tuple[Traffic, ...]:
        return a(*names) if by else ()

    of_pairs = kept(not s.sizes.K, "pair_tokens", "token_offsets")
    if s.router == "other":
        yield Step(phase, "router", a("x"), a("S", "experts"), None)
    else:
        keeps = kept(s.wants("router") and not by_experts, "x") + kept(scores, "logits")
        yield Step(phase, "router product", a("x", "router.weight"), a("logits"), _operations(s, s.sizes.E), keeps)
        yield Step(phase, s.router, a("logits"), a("S", "experts") + of_pairs, 0.0, kept(scores, "experts"))
        if s.losses or s.sizes.K:
            keeps = kept(s.losses and scores, "load")
            yield Step(phase, "load and losses", a("logits", "experts"), a("load"), 0.0, keeps)
    lists = a("expert_pair_indices", "expert_token_offsets", "token_index_map")
    yield Step(phase, "dispatch", a("experts"), lists, 0.0, lists + of_pairs if experts else ())
    yield from _cast_weights(s, phase, True, True)
    of_up = (array._replace(scale=FP8.h.scale if s.in_fp8 else "") for array in kept(experts, *KEPT[s.save]))
    by_product = dict.fromkeys(("down_forward_fused", "combine"), kept(experts, "S"))
    by_product["up_forward"] = (*kept(by_experts, "x"), *of_up)
    for name, call in product_calls(s, phase).items():
        yield from _product(s, call, phase, name, by_product.get(name, ()))
    if s.fused:
        yield Step(phase, "out to x's dtype", a("out", itemsize=4), a("out"))
    if s.shared:
        reads = a("x", "shared up_proj", "shared down", "out")
        yield Step(phase, "shared expert", reads, a("out"), _operations(s, s.shared, s.sizes.halves + 1))


def _backward(s: LayerCall) -> Iterator[Step]:
    a, phase, x, router, scores = s.arrays, "backward", s.wants("x"), s.wants("router"), s.wants(*SCORES)
    up, down, through = s.wants("shared_up"), s.wants("shared_down"), s.wants("x", "shared_up")
    if s.shared and (through or down):
        reads = compress(("dO", "x", "shared up_proj", "shared down"), (True, up, x, through))
        writes = compress(("dX", "d shared up_proj", "d shared down"), (x, up, down))
        products = through + down + s.sizes.halves * (up + x)
        yield Step(phase, "shared expert", a(*reads), a(*writes), _operations(s, s.shared, products))
    calls, again = product_calls(s, phase), s.wants(*EXPERTS) and s.save == "recompute"
    yield from _cast_weights(s, phase, x or again, "down_backward_act" in calls)
    if again:
        yield from _product(s, CALLS["up_forward"], phase, "up_forward again")
    for name, call in sorted(calls.items(), key=lambda item: bool(s.in_fp8) and item[0] == "down_backward_weight"):
        yield from _product(s, call, phase, name)  # quantized, W_down's gradient is the last
    if s.fused_backward and x:
        yield Step(phase, "dX to x's dtype", a("dX", itemsize=4), a("dX"))
    if s.router == "other" and scores:
        yield Step(phase, "router", a("x", "dS"), a("dX") * x, None)
    elif scores:
        yield Step(phase, s.router, a("logits", "experts", "dS"), a("dlogits"))
        if s.losses:
            yield Step(phase, "load and losses", a("logits", "load"), a("dlogits"))
            yield Step(phase, "sum of dlogits", a("dlogits", "dlogits"), a("dlogits"))
        reads = compress(("dlogits", "x", "router.weight"), (True, router, x))
        writes = compress(("dX", "d router.weight"), (x, router))
        yield Step(phase, "router product", a(*reads), a(*writes), _operations(s, s.sizes.E, x + router))
    if x:
        yield Step(phase, "sum of dX", a("dX", "dX"), a("dX"))
