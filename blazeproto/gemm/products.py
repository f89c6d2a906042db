"""The six grouped products on the GPU (DESIGN of the layer: MoEBlaze Algorithm 1; SonicMoE Algorithms 2, 3 and 5).

Shapes: T tokens, d model width, n expert width, E experts, R rows in expert order, P pairs; G is 2 for a gated activation (h is
[gate, up]), else 1. Arrays are bf16 and contiguous, scores fp32, indices int32; anything :func:`blazeproto.arrays.view` takes.
Every function runs on the caller's current stream, returns its outputs, and allocates those that are not handed in. The
specification, for a CPU, is the function of the same name in `blazeproto.gemm.reference`.

Errors: TypeError or ValueError that names the argument, before anything is launched. d and n are multiples of 8 (TMA moves 16
bytes), pointers 16-byte aligned, E at most 512.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from blazeproto.arrays import DeviceArray, current_stream, empty, view
from blazeproto.gemm import rowops
from blazeproto.gemm.config import (
    BK,
    BM,
    DEFAULTS,
    
    MAX_EXPERTS,
    THREADS,
    TileConfig,
    is_gated,
    kernel_for,
)
from blazeproto.gemm.launch import Box, box_2d, box_3d, box_4d, launch

SLAB = 64  # rows and columns of an epilogue store (epilogue.cuh)
NARROW_SLAB = 32  # columns of one in down_backward.cu


class Rows(NamedTuple):
    """Who is in which row: the index arrays of `blazeproto.dispatch.Dispatch` that the products read (all int32).

    pair_indices (R,): the pair in each row.  offsets (E + 1,): where each expert's rows begin.
    token_index_map (P,): the row of each pair, -1 if it has none.  top_k: experts per token (pair // top_k is the token);
    None when they vary, and then pair_tokens (P,) and token_offsets (T + 1,) say who is whose.
    """

    pair_indices: Any
    offsets: Any
    token_index_map: Any
    top_k: int | None
    pair_tokens: Any = None
    token_offsets: Any = None

    def views(self) -> Rows:
        """The same with every array as a DeviceArray; done once a layer, it is free afterwards."""
        return Rows(
            _array("rows.pair_indices", self.pair_indices, "int32"),
            _array("rows.offsets", self.offsets, "int32"),
            _array("rows.token_index_map", self.token_index_map, "int32"),
            self.top_k,
            None if self.pair_tokens is None else _array("rows.pair_tokens", self.pair_tokens, "int32"),
            None if self.token_offsets is None else _array("rows.token_offsets", self.token_offsets, "int32"),
        )

    @property
    def num_experts(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def num_rows(self) -> int:
        return int(self.pair_indices.shape[0])

    @property
    def num_tokens(self) -> int:
        if self.top_k:
            return int(self.token_index_map.shape[0]) // self.top_k
        return int(self.token_offsets.shape[0]) - 1


# --- Checks ----------------------------------------------------------------------------------------------------------


def _array(name: str, array: Any, dtype: str, shape: tuple[int, ...] | None = None) -> DeviceArray:
    a = view(array, name)
    if a.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {a.dtype}")
    if shape is not None and a.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {a.shape}")
    if not a.is_contiguous:
        raise ValueError(f"{name}: expected a contiguous array, got strides {a.strides} for shape {a.shape}")
    if a.ptr % 16:
        raise ValueError(f"{name}: expected a 16-byte aligned pointer, got {a.ptr:#x}")
    return a


def _output(name: str, array: Any, dtype: str, shape: tuple[int, ...]) -> tuple[Any, DeviceArray]:
    array = empty(shape, dtype) if array is None else array
    return array, _array(name, array, dtype, shape)


def _weights(name: str, array: Any, experts: int, shape: tuple[int | None, int | None]) -> DeviceArray:
    w = _array(name, array, "bfloat16")
    expected = (experts, *shape)
    if len(w.shape) != 3 or any(want is not None and want != got for want, got in zip(expected, w.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name}: expected shape ({wanted}), got {w.shape}")
    for size in w.shape[1:]:
        if size % 8:
            raise ValueError(f"{name}: expected widths that are multiples of 8, got shape {w.shape}")
    if experts > MAX_EXPERTS:
        raise ValueError(f"{name}: expected at most {MAX_EXPERTS} experts, got {experts}")
    return w


def _matrix(name: str, array: Any, rows: int, columns: int | None = None) -> DeviceArray:
    a = _array(name, array, "bfloat16")
    if len(a.shape) != 2 or a.shape[0] != rows or (columns is not None and a.shape[1] != columns):
        raise ValueError(f"{name}: expected shape ({rows}, {'any' if columns is None else columns}), got {a.shape}")
    return a


@lru_cache(maxsize=None)
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def _grid(device: int, config: TileConfig, tiles_at_most: int) -> int:
    """CTAs of a persistent kernel: one a multiprocessor, fewer for less work, whole clusters."""
    count = min(_multiprocessors(device), tiles_at_most * config.cluster)
    return max(count // config.cluster, 1) * config.cluster


@lru_cache(maxsize=None)
def division(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == n * multiplier >> shift for 0 <= n < 2**31 and a 32-bit multiplier."""
    log2 = divisor.bit_length() - 1
    if divisor == 1 << log2:
        return 1 << 31, 31 + log2
    return (1 << 32 + log2) // divisor + 1, 32 + log2


def _pair_to_token(rows: Rows) -> tuple[int, int, int]:
    """gather.cuh: PairToToken, as three 8-byte words."""
    multiplier, shift = division(rows.top_k) if rows.top_k else (0, 0)
    return rows.pair_indices.ptr, rows.pair_tokens.ptr if rows.pair_tokens else 0, multiplier | shift << 32


# --- The row products: varlen_m.cuh ------------------------------------------------------------------------------------


def _rows_launch(
    kernel: Any,
    config: TileConfig,
    rows: Rows,
    *,
    a: DeviceArray,
    gathered: bool,
    weights: Box,
    columns: int,
    tile_columns: int,
    h: Box | None = None,
    out0: Box | None = None,
    out1: Box | None = None,
    out_pointers: tuple[int, int] = (0, 0),
    bias: int = 0,
    scores: int = 0,
    reduction_out: int = 0,
    stream: int,
) -> None:
    """Fill RowsParams and launch."""
    reduction = a.shape[1]
    a_box = None if gathered else box_2d(a.ptr, reduction, a.shape[0], (BK, BM))
    blocks_at_most = rows.num_rows // (BM * config.cluster) + min(rows.num_experts, rows.num_rows)
    launch(
        kernel,
        (a_box, weights, h, out0, out1),
        (
            a.ptr if gathered else 0,
            *_pair_to_token(rows),
            rows.offsets.ptr,
            *out_pointers,
            bias,
            scores,
            reduction_out,
        ),
        (rows.num_rows, rows.num_experts, reduction, columns),
        grid=_grid(a.device, config, blocks_at_most * -(-columns // tile_columns)),
        block=THREADS,
        stream=stream,
    )


def up_forward(
    x: Any,
    up_proj: Any,
    rows: Rows,
    *,
    activation: str = "swiglu",
    bias: Any = None,
    h: Any = None,
    act: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> tuple[Any, Any]:
    """h = x[token] W_up^T (+ bias), act = f(gate) up. x (T, d), up_proj (E, G n, d), bias (E, G n) → h (R, G n), act (R, n).

    MoEBlaze Algorithm 1, lines 3-9. act is computed from h as stored.
    """
    rows, halves = rows.views(), 2 if is_gated(activation) else 1
    w = _weights("up_proj", up_proj, rows.num_experts, (None, None))
    x_view = _matrix("x", x, rows.num_tokens, w.shape[2])
    if w.shape[1] % (8 * halves):
        raise ValueError(f"up_proj: expected {halves} x (a multiple of 8) rows an expert, got shape {w.shape}")
    d, n = w.shape[2], w.shape[1] // halves
    h, h_view = _output("h", h, "bfloat16", (rows.num_rows, halves * n))
    act, act_view = _output("act", act, "bfloat16", (rows.num_rows, n))
    if rows.num_rows == 0:
        return h, act
    b = None if bias is None else _array("bias", bias, "bfloat16", (rows.num_experts, halves * n))
    config = config or DEFAULTS["up_forward"]
    _rows_launch(
        kernel_for("up_forward", config, activation=activation, bias=b is not None),
        config,
        rows,
        a=x_view,
        gathered=True,
        weights=box_4d(w.ptr, (d, n, halves, rows.num_experts), (BK, config.tile_n // max(halves, config.cluster), 1, 1)),
        columns=n,
        tile_columns=config.tile_n // halves,
        out0=_h_box(h_view, n, halves, (SLAB, SLAB, 1)),
        out1=box_2d(act_view.ptr, n, rows.num_rows, (SLAB, SLAB)),
        out_pointers=(h_view.ptr, act_view.ptr),
        bias=b.ptr if b else 0,
        stream=current_stream(x_view) if stream is None else stream,
    )
    return h, act


def _h_box(h: DeviceArray, n: int, halves: int, box: tuple[int, int, int]) -> Box:
    """Of H, (R, G n), seen as (half, row, column): a box may hold gate and up of the same rows one after the other."""
    return Box(h.ptr, (n, h.shape[0], halves), (2 * n * halves, 2 * n), box)


def grouped_mm(
    a: Any,
    weights: Any,
    rows: Rows,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out[r] = a[r or its token] . W[e]^T (+ bias): the row products with nothing after them but a store.

    a (R, reduction), or (T, reduction) with ``gather``. weights (E, columns, reduction), or with ``transposed``
    (E, reduction, columns), which is read as it lies. bias (E, columns) → out (R, columns).
    """
    rows = rows.views()
    w = _weights("weights", weights, rows.num_experts, (None, None))
    columns, reduction = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    a_view = _matrix("a", a, rows.num_tokens if gather else rows.num_rows, reduction)
    out, out_view = _output("out", out, "bfloat16", (rows.num_rows, columns))
    if rows.num_rows == 0:
        return out
    b = None if bias is None else _array("bias", bias, "bfloat16", (rows.num_experts, columns))
    product = "up_backward_act" if transposed else "down_forward"
    config = config or DEFAULTS[product]
    _rows_launch(
        kernel_for(product, config, bias=b is not None, gather=gather),
        config,
        rows,
        a=a_view,
        gathered=gather,
        weights=_linear_weights(w, config, transposed),
        columns=columns,
        tile_columns=config.tile_n,
        out0=box_2d(out_view.ptr, columns, rows.num_rows, (SLAB, SLAB)),
        out_pointers=(out_view.ptr, 0),
        bias=b.ptr if b else 0,
        stream=current_stream(a_view) if stream is None else stream,
    )
    return out


def _linear_weights(w: DeviceArray, config: TileConfig, transposed: bool) -> Box:
    experts, outer, inner = w.shape
    if transposed:
        return box_3d(w.ptr, (inner, outer, experts), (SLAB, BK, 1))
    return box_4d(w.ptr, (inner, outer, 1, experts), (BK, config.tile_n // config.cluster, 1, 1))


def down_forward(
    act: Any,
    down_proj: Any,
    rows: Rows,
    *,
    bias: Any = None,
    y: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """y = act W_down^T (+ bias). act (R, n), down_proj (E, d, n), bias (E, d) → y (R, d). MoEBlaze Algorithm 1, line 10."""
    return grouped_mm(act, down_proj, rows, bias=bias, out=y, config=config, stream=stream)


def up_backward_act(
    dh: Any, up_proj: Any, rows: Rows, *, dx_rows: Any = None, config: TileConfig | None = None, stream: int | None = None
) -> Any:
    """dx_rows = dh W_up. dh (R, G n), up_proj (E, G n, d) → dx_rows (R, d). MoEBlaze Algorithm 1, line 30."""
    return grouped_mm(dh, up_proj, rows, transposed=True, out=dx_rows, config=config, stream=stream)


def down_forward_fused(
    act: Any,
    down_proj: Any,
    scores: Any,
    rows: Rows,
    *,
    bias: Any = None,
    out_f32: Any,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out_f32[token] += S y, the combination inside the product (MoEBlaze §3.1). Not deterministic: fp32 atomics.

    act (R, n), down_proj (E, d, n), scores (P,) or (T, K) fp32, out_f32 (T, d) fp32, zeroed by the caller.
    """
    rows = rows.views()
    w = _weights("down_proj", down_proj, rows.num_experts, (None, None))
    d, n = w.shape[1:]
    act_view = _matrix("act", act, rows.num_rows, n)
    out_view = _array("out_f32", out_f32, "float32", (rows.num_tokens, d))
    if rows.num_rows == 0:
        return out_f32
    b = None if bias is None else _array("bias", bias, "bfloat16", (rows.num_experts, d))
    config = config or DEFAULTS["down_forward"]
    _rows_launch(
        kernel_for("down_forward", config, bias=b is not None, fused=True),
        config,
        rows,
        a=act_view,
        gathered=False,
        weights=_linear_weights(w, config, False),
        columns=d,
        tile_columns=config.tile_n,
        bias=b.ptr if b else 0,
        scores=_scores(scores, rows).ptr,
        reduction_out=out_view.ptr,
        stream=current_stream(act_view) if stream is None else stream,
    )
    return out_f32


def _scores(scores: Any, rows: Rows) -> DeviceArray:
    s = _array("scores", scores, "float32")
    if s.size != rows.token_index_map.shape[0]:
        raise ValueError(f"scores: expected {rows.token_index_map.shape[0]} elements, one a pair, got shape {s.shape}")
    return s


def down_backward_act(
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    rows: Rows,
    *,
    activation: str = "swiglu",
    dh: Any = None,
    a_scaled: Any = None,
    d_scores: Any = None,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> tuple[Any, Any, Any]:
    """Through the down projection and the activation. MoEBlaze Algorithm 1, lines 20-28; SonicMoE appendix D.

    d_out (T, d), down_proj (E, d, n), h (R, G n), scores (P,) or (T, K) fp32 → dh (R, G n), a_scaled (R, n) = S act, and
    d_scores (P,) fp32, zero for pairs without a row. workspace: fp32, (score_partials(n), R).
    """
    rows, halves = rows.views(), 2 if is_gated(activation) else 1
    w = _weights("down_proj", down_proj, rows.num_experts, (None, None))
    d, n = w.shape[1:]
    d_out_view = _matrix("d_out", d_out, rows.num_tokens, d)
    h_view = _matrix("h", h, rows.num_rows, halves * n)
    s = _scores(scores, rows)
    dh, dh_view = _output("dh", dh, "bfloat16", (rows.num_rows, halves * n))
    a_scaled, a_view = _output("a_scaled", a_scaled, "bfloat16", (rows.num_rows, n))
    d_scores, ds_view = _output("d_scores", d_scores, "float32", (s.size,))
    if rows.num_rows == 0:
        return dh, a_scaled, d_scores
    config = config or DEFAULTS["down_backward_act"]
    _, partials = _output("workspace", workspace, "float32", (score_partials(n, config), rows.num_rows))
    stream = current_stream(d_out_view) if stream is None else stream
    _rows_launch(
        kernel_for("down_backward_act", config, activation=activation),
        config,
        rows,
        a=d_out_view,
        gathered=True,
        weights=_linear_weights(w, config, True),
        columns=n,
        tile_columns=config.tile_n,
        h=_h_box(h_view, n, halves, (NARROW_SLAB, SLAB, halves)),
        out0=_h_box(dh_view, n, halves, (NARROW_SLAB, SLAB, halves)),
        out1=box_2d(a_view.ptr, n, rows.num_rows, (NARROW_SLAB, SLAB)),
        out_pointers=(dh_view.ptr, a_view.ptr),
        scores=s.ptr,
        reduction_out=partials.ptr,
        stream=stream,
    )
    rowops.reduce_scores_grad(partials, rows.token_index_map, ds_view, stream=stream)
    return dh, a_scaled, d_scores


def score_partials(n: int, config: TileConfig | None = None) -> int:
    """Column tiles of the down backward product, each of which leaves one partial dS a row."""
    return -(-n // (config or DEFAULTS["down_backward_act"]).tile_n)


# --- The weight products: weight.cu -----------------------------------------------------------------------------------


def _weight_gradient(
    product: str,
    gathered: DeviceArray,
    ordered: DeviceArray,
    rows: Rows,
    dw: Any,
    shape: tuple[int, int, int],
    accumulate: bool,
    config: TileConfig | None,
    stream: int | None,
) -> Any:
    config = config or DEFAULTS[product]
    dw = empty(shape, "bfloat16") if dw is None else dw
    f32 = view(dw, "dw").dtype == "float32"
    dw_view = _array("dw", dw, "float32" if f32 else "bfloat16", shape)
    if accumulate and not f32:
        raise ValueError("accumulate: expected an fp32 dw to add to, got bfloat16")
    if shape[0] == 0 or shape[1] % 8 or shape[2] % 8:
        raise ValueError(f"dw: expected widths that are multiples of 8 and at least one expert, got shape {shape}")
    d, width = gathered.shape[1], ordered.shape[1]
    tiles = shape[0] * -(-d // (BM * config.cluster)) * -(-width // config.tile_n)
    ordered_box = box_2d(ordered.ptr, width, rows.num_rows, (SLAB, BK)) if rows.num_rows else None
    launch(
        kernel_for(product, config, f32=f32),
        (ordered_box, None if f32 else box_3d(dw_view.ptr, (shape[2], shape[1], shape[0]), (SLAB, SLAB, 1))),
        (
            gathered.ptr,
            ordered.ptr,
            *_pair_to_token(rows),
            rows.offsets.ptr,
            dw_view.ptr if f32 else 0,
        ),
        (rows.num_experts, d, width, accumulate),
        grid=_grid(dw_view.device, config, tiles),
        block=THREADS,
        stream=current_stream(dw_view) if stream is None else stream,
    )
    return dw


def down_backward_weight(
    d_out: Any,
    a_scaled: Any,
    rows: Rows,
    *,
    dw: Any = None,
    accumulate: bool = False,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of d_out[token]^T a_scaled. d_out (T, d), a_scaled (R, n) → dw (E, d, n), bf16, or fp32 if ``dw`` is.

    accumulate: add to an fp32 ``dw``. Experts without rows get zeros. MoEBlaze Algorithm 1, line 18.
    """
    rows = rows.views()
    gathered = _matrix("d_out", d_out, rows.num_tokens)
    ordered = _matrix("a_scaled", a_scaled, rows.num_rows)
    shape = (rows.num_experts, gathered.shape[1], ordered.shape[1])
    return _weight_gradient("down_backward_weight", gathered, ordered, rows, dw, shape, accumulate, config, stream)


def up_backward_weight(
    dh: Any,
    x: Any,
    rows: Rows,
    *,
    dw: Any = None,
    accumulate: bool = False,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of dh^T x[token]. dh (R, G n), x (T, d) → dw (E, G n, d), as :func:`down_backward_weight`.

    MoEBlaze Algorithm 1, line 29.
    """
    rows = rows.views()
    gathered = _matrix("x", x, rows.num_tokens)
    ordered = _matrix("dh", dh, rows.num_rows)
    shape = (rows.num_experts, ordered.shape[1], gathered.shape[1])
    return _weight_gradient("up_backward_weight", gathered, ordered, rows, dw, shape, accumulate, config, stream)
