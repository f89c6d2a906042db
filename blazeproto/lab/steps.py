"""The steps of one forward and backward of a layer: what each reads, writes, computes and keeps, by shapes alone.

Steps, in the order in which they run, with the bytes that each must move at the least, as `blazeproto.cost` counts them: every
input once, every output once, index lists in the products not at all. Scores are counted wherever they are read or made, which
`blazeproto.gemm.PRODUCTS` leaves out of `down_backward_act`. Where the layer runs in chunks (``workspace_bytes``)
weights are read once a chunk, which is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from blazeproto import cost
from blazeproto.gemm import PRODUCTS, Sizes


class Array(NamedTuple):
    """name, shape, bytes of an element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.name.replace(' ', '_')}[{'×'.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Step:
    """One kernel, or a few that belong together. phase: "forward" or "backward".

    operations: a multiplication and an addition being two; None where nobody counts them.
    keeps: what stays for backward after this step.  ms: measured alone; None where it wasn't.
    """

    phase: str
    name: str
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    operations: float | None = 0.0
    keeps: tuple[Array, ...] = ()
    ms: float | None = None

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
        return cost.floor_ms(self.operations or 0.0, self.bytes_read + self.bytes_written)


@dataclass(frozen=True)
class Shape:
    """What a layer's steps depend on. All sizes are of one call.

    T, d, n, E, halves: tokens, widths, experts, 2 with a gate.  rows: pairs that are computed.  pairs, places: P and R, the
    lengths of the lists by pair and by row.  top_k: None where it varies.  num_chunks: 1 for a whole batch.
    itemsize, weight_itemsize, router_itemsize, logit_itemsize: bytes of an element of x as the experts see it, of their weights,
    of the router's weight, of logits and scores.
    save, fused, bias, shared: the save policy, combine="fused", whether there are biases, the shared expert's width or 0.
    router: "top_k", "choice" (hashing, token rounding, ...) or "other" (a module of the user's).
    losses: whether an auxiliary loss has a coefficient.
    """

    T: int
    d: int
    n: int
    E: int
    halves: int
    rows: int
    pairs: int
    places: int
    top_k: int | None
    num_chunks: int
    itemsize: int
    weight_itemsize: int
    router_itemsize: int
    logit_itemsize: int
    save: str
    fused: bool
    bias: bool
    shared: int
    router: str
    losses: bool


def steps_of(shape: Shape) -> list[Step]:
    """All steps of a forward and a backward in which x, the weights and the router's weight want gradients."""
    return [*_forward(shape), *_backward(shape)]


class _Arrays:
    """The arrays of a layer by name."""

    def __init__(self, s: Shape) -> None:
        b, w, f, i = s.itemsize, s.weight_itemsize, s.logit_itemsize, cost.ID_BYTES
        width, up = s.halves * s.n, "gate_up_proj" if s.halves == 2 else "up_proj"
        by_pair = (s.T, s.top_k) if s.top_k is not None and s.T * s.top_k == s.pairs else (s.pairs,)
        self.x, self.d_x = Array("x", (s.T, s.d), b), Array("dX", (s.T, s.d), b)
        self.out, self.d_out = Array("out", (s.T, s.d), b), Array("dO", (s.T, s.d), b)
        self.out_f32 = Array("out", (s.T, s.d), 4)
        self.logits, self.d_logits = Array("logits", (s.T, s.E), f), Array("dlogits", (s.T, s.E), f)
        self.router = Array("router.weight", (s.E, s.d), s.router_itemsize)
        self.d_router = self.router._replace(name="d router.weight")
        self.experts, self.load = Array("experts", by_pair, i), Array("load", (s.E,), i)
        self.scores, self.d_scores = Array("S", by_pair, f), Array("dS", by_pair, f)
        self.scores_read = Array("S", (s.rows,), f)  # those of computed pairs
        self.lists = (
            Array("expert_pair_indices", (s.places,), i),
            Array("expert_token_offsets", (s.num_chunks, s.E + 1), i),
            Array("token_index_map", (s.pairs,), i),
        )
        self.of_pairs = (Array("pair_tokens", (s.pairs,), i), Array("token_offsets", (s.T + 1,), i))
        self.up, self.down = Array(up, (s.E, width, s.d), b), Array("down_proj", (s.E, s.d, s.n), b)
        self.masters = (self.up._replace(itemsize=w), self.down._replace(itemsize=w))
        self.d_up = Array(f"d {up}", (s.E, width, s.d), w)
        self.d_down = Array("d down_proj", (s.E, s.d, s.n), w)
        self.up_bias, self.down_bias = (Array("bias", (s.E, m), w) for m in (width, s.d))
        self.h, self.d_h = Array("H", (s.rows, width), b), Array("dH", (s.rows, width), b)
        self.act, self.a_scaled = Array("act", (s.rows, s.n), b), Array("A'", (s.rows, s.n), b)
        self.y, self.dx_rows = Array("Y", (s.rows, s.d), b), Array("dX~", (s.rows, s.d), b)
        self.kept_h = self.h._replace(shape=(s.places, width))
        self.kept_act = self.act._replace(shape=(s.places, s.n))
        self.shared = tuple(
            Array(f"shared {name}", size, w)
            for name, size in ((up, (s.halves * s.shared, s.d)), ("down", (s.d, s.shared)))
        )


def _operations(s: Shape, name: str) -> float:
    sizes = Sizes(s.T, s.d, s.n, s.E, s.rows / max(s.T, 1), s.halves)  # type: ignore[arg-type]  # K in the mean
    return PRODUCTS[name].operations(sizes)


def _choice(s: Shape) -> str:
    return "top-k" if s.router == "top_k" else "choice"


def _cast_weights(s: Shape, a: _Arrays, phase: str) -> Iterator[Step]:
    if s.weight_itemsize != s.itemsize:
        yield Step(phase, "weights to x's dtype", a.masters, (a.up, a.down))


def _up_forward(s: Shape, a: _Arrays, phase: str, name: str, keeps: tuple[Array, ...]) -> Step:
    reads = (a.x, a.up, *([a.up_bias] if s.bias else []))
    return Step(phase, name, reads, (a.h, a.act), _operations(s, "up_forward"), keeps)


def _forward(s: Shape) -> Iterator[Step]:
    a, phase = _Arrays(s), "forward"
    if s.router == "other":
        yield Step(phase, "router", (a.x,), (a.scores, a.experts), None)
    else:
        yield Step(phase, "router product", (a.x, a.router), (a.logits,), 2.0 * s.T * s.d * s.E, (a.logits,))
        chosen = (a.scores, a.experts, *(a.of_pairs if s.top_k is None else ()))
        yield Step(phase, _choice(s), (a.logits,), chosen, 0.0, (a.experts,))
        if s.losses or s.top_k is not None:
            yield Step(phase, "load and losses", (a.logits, a.experts), (a.load,), 0.0, (a.load,) if s.losses else ())
    kept_lists = (*a.lists, *(a.of_pairs if s.top_k is None else ()))
    yield Step(phase, "dispatch", (a.experts,), a.lists, 0.0, kept_lists)
    yield from _cast_weights(s, a, phase)
    kept_h = () if s.save == "recompute" else (a.kept_h, a.kept_act) if s.save == "paper" else (a.kept_h,)
    yield _up_forward(s, a, phase, "up_forward", (a.x, *kept_h))
    reads = (a.act, a.down, *([a.down_bias] if s.bias else []))
    if s.fused:
        name = "down_forward_fused"
        yield Step(phase, name, (*reads, a.scores_read), (a.out_f32,), _operations(s, name), (a.scores,))
        yield Step(phase, "out to x's dtype", (a.out_f32,), (a.out,))
    else:
        yield Step(phase, "down_forward", reads, (a.y,), _operations(s, "down_forward"))
        yield Step(phase, "combine", (a.y, a.scores_read), (a.out,), 0.0, (a.scores,))
    if s.shared:
        yield Step(phase, "shared expert", (a.x, *a.shared, a.out), (a.out,), _shared_operations(s))


def _shared_operations(s: Shape) -> float:
    return 2.0 * s.T * s.d * s.shared * (s.halves + 1)


def _backward(s: Shape) -> Iterator[Step]:
    a, phase = _Arrays(s), "backward"
    if s.shared:
        d_shared = tuple(array._replace(name=f"d {array.name}") for array in a.shared)
        reads = (a.d_out, a.x, *a.shared)
        yield Step(phase, "shared expert", reads, (a.d_x, *d_shared), 2 * _shared_operations(s))
    yield from _cast_weights(s, a, phase)
    if s.save == "recompute":
        yield _up_forward(s, a, phase, "up_forward again", ())
    name, reads = "down_backward_act", (a.d_out, a.down, a.h, a.scores_read)
    yield Step(phase, name, reads, (a.d_h, a.a_scaled, a.d_scores), _operations(s, name))
    if s.bias:
        yield Step(phase, "bias_score_grad", (a.d_out, a.down_bias, a.d_scores), (a.d_scores,))
    name = "down_backward_weight"
    yield Step(phase, name, (a.a_scaled, a.d_out), (a.d_down,), _operations(s, name))
    if s.bias:
        yield Step(phase, "expert_row_sum of dO", (a.y._replace(name="dO rows"), a.scores_read), (a.down_bias,))
    name = "up_backward_act"
    yield Step(phase, name, (a.d_h, a.up), (a.dx_rows,), _operations(s, name))
    yield Step(phase, "combine", (a.dx_rows,), (a.d_x,))
    name = "up_backward_weight"
    yield Step(phase, name, (a.d_h, a.x), (a.d_up,), _operations(s, name))
    if s.bias:
        yield Step(phase, "expert_row_sum of dH", (a.d_h,), (a.up_bias,))
    if s.router == "other":
        yield Step(phase, "router", (a.x, a.d_scores), (a.d_x,), None)
    else:
        yield Step(phase, _choice(s), (a.logits, a.experts, a.d_scores), (a.d_logits,))
        if s.losses:
            yield Step(phase, "load and losses", (a.logits, a.load), (a.d_logits,))
            yield Step(phase, "sum of dlogits", (a.d_logits, a.d_logits), (a.d_logits,))
        reads = (a.d_logits, a.x, a.router)
        yield Step(phase, "router product", reads, (a.d_x, a.d_router), 4.0 * s.T * s.d * s.E)
    yield Step(phase, "sum of dX", (a.d_x, a.d_x), (a.d_x,))
