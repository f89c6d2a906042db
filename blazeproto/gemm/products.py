"""The six grouped products on the GPU (DESIGN of the layer: MoEBlaze Algorithm 1; SonicMoE Algorithms 2, 3 and 5).

Shapes: T tokens, d model width, n expert width, E experts, R rows in expert order, P pairs; G is 2 for a gated activation (h is
[gate, up]), else 1. Arrays are bf16 and contiguous, scores fp32, indices int32; anything :func:`blazeproto.arrays.view` takes.
Every function runs on the caller's current stream, returns its outputs, and allocates those that are not handed in. The
specification, for a CPU, is the function of the same name in `blazeproto.gemm.reference`.

Errors: TypeError or ValueError that names the argument, before anything is launched. d and n are multiples of 8 (TMA moves 16
bytes), pointers 16-byte aligned, E at most 512, and all arrays on the current GPU.
"""

from __future__ import annotations

from typing import Any

from blazeproto.arrays import DeviceArray, columns_within, empty, expect, output, view
from blazeproto.gemm import unchecked
from blazeproto.gemm.config import DEFAULTS, GATHERED_ELEMENTS, MAX_EXPERTS, TileConfig, is_gated
from blazeproto.gemm.rows import Rows, addresses, on_current_gpu


def _weights(name: str, array: Any, experts: int) -> DeviceArray:
    w = expect(name, array, "bfloat16", (experts, None, None))
    for size in w.shape[1:]:
        if size % 8:
            raise ValueError(f"{name}: expected widths that are multiples of 8, got shape {w.shape}")
    if experts > MAX_EXPERTS:
        raise ValueError(f"{name}: expected at most {MAX_EXPERTS} experts, got {experts}")
    return w


def _gathered(name: str, array: Any, shape: tuple[int | None, ...]) -> DeviceArray:
    a = expect(name, array, "bfloat16", shape)
    if a.size >= GATHERED_ELEMENTS:
        raise ValueError(
            f"{name}: expected fewer than {GATHERED_ELEMENTS} elements to gather from, got shape {a.shape}"
        )
    return a


def _bias(name: str, array: Any, shape: tuple[int, int]) -> DeviceArray | None:
    return None if array is None else expect(name, array, "bfloat16", shape)


def _scores(scores: Any, rows: Rows) -> DeviceArray:
    s = expect("scores", scores, "float32")
    if s.size != rows.num_pairs:
        raise ValueError(f"scores: expected {rows.num_pairs} elements, one a pair, got shape {s.shape}")
    return s


# --- The row products: varlen_m.cuh ------------------------------------------------------------------------------------


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
    w = _weights("up_proj", up_proj, rows.num_experts)
    x_view = _gathered("x", x, (rows.num_tokens, w.shape[2]))
    if w.shape[1] % (8 * halves):
        raise ValueError(f"up_proj: expected {halves} x (a multiple of 8) rows an expert, got shape {w.shape}")
    width = w.shape[1]
    b = _bias("bias", bias, (rows.num_experts, width))
    h, h_view = output("h", h, "bfloat16", (rows.num_rows, width))
    act, act_view = output("act", act, "bfloat16", (rows.num_rows, width // halves))
    where = on_current_gpu(rows, stream, x=x_view, up_proj=w, bias=b, h=h_view, act=act_view)
    unchecked.up_forward(x_view, w, where, activation=activation, bias=b, h=h_view, act=act_view, config=config)
    return h, act


def grouped_mm(
    a: Any,
    weights: Any,
    rows: Rows,
    *,
    gather: bool = False,
    transposed: bool = False,
    bias: Any = None,
    columns: range | None = None,
    out: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out[r] = a[r or its token] . W[e]^T (+ bias): the row products with nothing after them but a store.

    a (R, reduction), or (T, reduction) with ``gather``. weights (E, columns, reduction), or with ``transposed``
    (E, reduction, columns), which is read as it lies. bias (E, columns) → out (R, columns).

    columns: make only these of the columns, e.g. range(0, 1024): out (R, len(columns)).
    """
    rows = rows.views()
    w = _weights("weights", weights, rows.num_experts)
    width, reduction = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    columns = columns_within(columns, width)
    a_view = (
        _gathered("a", a, (rows.num_tokens, reduction))
        if gather
        else expect("a", a, "bfloat16", (rows.num_rows, reduction))
    )
    b = _bias("bias", bias, (rows.num_experts, width))
    out, out_view = output("out", out, "bfloat16", (rows.num_rows, len(columns)))
    if not columns:
        return out
    where = on_current_gpu(rows, stream, a=a_view, weights=w, bias=b, out=out_view)
    options: dict[str, Any] = {"gather": gather, "transposed": transposed, "columns": columns, "config": config}
    unchecked.grouped_mm(a_view, w, where, bias=b, out=out_view, **options)
    return out


def down_forward(
    act: Any,
    down_proj: Any,
    rows: Rows,
    *,
    bias: Any = None,
    columns: range | None = None,
    y: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """y = act W_down^T (+ bias). act (R, n), down_proj (E, d, n), bias (E, d) → y (R, d). MoEBlaze Algorithm 1, line 10.

    columns: as :func:`grouped_mm`. y may be act itself where d = n is at most a tile's width (``config.tile_n``).
    """
    return grouped_mm(act, down_proj, rows, bias=bias, columns=columns, out=y, config=config, stream=stream)


def up_backward_act(
    dh: Any,
    up_proj: Any,
    rows: Rows,
    *,
    columns: range | None = None,
    dx_rows: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dx_rows = dh W_up. dh (R, G n), up_proj (E, G n, d) → dx_rows (R, d). MoEBlaze Algorithm 1, line 30.

    columns: as :func:`grouped_mm`.
    """
    options: dict[str, Any] = {"transposed": True, "columns": columns, "config": config}
    return grouped_mm(dh, up_proj, rows, out=dx_rows, stream=stream, **options)


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
    w = _weights("down_proj", down_proj, rows.num_experts)
    d, n = w.shape[1:]
    act_view = expect("act", act, "bfloat16", (rows.num_rows, n))
    s, b = _scores(scores, rows), _bias("bias", bias, (rows.num_experts, d))
    sums = expect("out_f32", out_f32, "float32", (rows.num_tokens, d))
    where = on_current_gpu(rows, stream, act=act_view, down_proj=w, scores=s, bias=b, out_f32=sums)
    unchecked.down_forward_fused(act_view, w, s, where, bias=b, out_f32=sums, config=config)
    return out_f32


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
    d_scores (P,) fp32, zero for pairs without a row. dh may be h itself. workspace: fp32, (score_partials(n), R).
    """
    rows, halves = rows.views(), 2 if is_gated(activation) else 1
    w = _weights("down_proj", down_proj, rows.num_experts)
    d, n = w.shape[1:]
    d_out_view = _gathered("d_out", d_out, (rows.num_tokens, d))
    h_view = expect("h", h, "bfloat16", (rows.num_rows, halves * n))
    s = _scores(scores, rows)
    dh, dh_view = output("dh", dh, "bfloat16", (rows.num_rows, halves * n))
    a_scaled, a_view = output("a_scaled", a_scaled, "bfloat16", (rows.num_rows, n))
    d_scores, ds_view = output("d_scores", d_scores, "float32", (s.size,))
    if rows.num_rows == 0:
        return dh, a_scaled, d_scores
    _, partials = output("workspace", workspace, "float32", (score_partials(n, config), rows.num_rows))
    inputs: dict[str, Any] = {"d_out": d_out_view, "down_proj": w, "h": h_view, "scores": s}
    outputs: dict[str, Any] = {"dh": dh_view, "a_scaled": a_view, "d_scores": ds_view, "workspace": partials}
    where = on_current_gpu(rows, stream, **inputs, **outputs)
    unchecked.down_backward_act(**inputs, rows=where, activation=activation, **outputs, config=config)
    return dh, a_scaled, d_scores


def score_partials(n: int, config: TileConfig | None = None) -> int:
    """Column tiles of the down backward product, each of which leaves one partial dS a row."""
    return -(-n // (config or DEFAULTS["down_backward_act"]).tile_n)


# --- The weight products: weight.cu -----------------------------------------------------------------------------------


def _weight_gradient(
    product: str,
    operands: dict[str, DeviceArray],
    rows: Rows,
    shape: tuple[int, int, int],
    dw: Any,
    workspace: Any,
    stream: int | None,
    *,
    gather: bool,
    accumulate: bool,
    config: TileConfig | None,
) -> Any:
    """operands: checked, by name, in the order of ``product``'s parameters.  shape: of dw."""
    dw = empty(shape, "bfloat16") if dw is None else dw
    f32 = view(dw, "dw").dtype == "float32"
    out = expect("dw", dw, "float32" if f32 else "bfloat16", shape)
    if accumulate and not f32:
        raise ValueError("accumulate: expected an fp32 dw to add to, got bfloat16")
    if shape[0] == 0 or shape[1] % 8 or shape[2] % 8:
        raise ValueError(f"dw: expected widths that are multiples of 8 and at least one expert, got shape {shape}")
    pieces, elements = None, unchecked.weight_workspace(product, addresses(rows, out.device, 0), shape, config)
    if elements or workspace is not None:
        pieces = output("workspace", workspace, "float32", (elements,))[1]
    where = on_current_gpu(rows, stream, **operands, dw=out, workspace=pieces)
    options: dict[str, Any] = {"gather": gather, "f32": f32, "accumulate": accumulate, "config": config}
    getattr(unchecked, product)(*operands.values(), where, dw=out, workspace=pieces, **options)
    return dw


def weight_workspace(product: str, dw: Any, rows: Rows, config: TileConfig | None = None) -> int:
    """fp32 elements of the workspace of ``product``, a weight gradient into ``dw``: by shapes and device alone; may be 0."""
    out = view(dw, "dw")
    return unchecked.weight_workspace(product, addresses(rows.views(), out.device, 0), out.shape, config)


def down_backward_weight(
    d_out: Any,
    a_scaled: Any,
    rows: Rows,
    *,
    dw: Any = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of d_out[token]^T a_scaled. d_out (T, d), a_scaled (R, n) → dw (E, d, n), bf16, or fp32 if ``dw`` is.

    Experts without rows get zeros. MoEBlaze Algorithm 1, line 18.

    gather: False where d_out's rows are in expert order already, (R, d).  accumulate: add to an fp32 ``dw``.
    workspace: fp32, `weight_workspace` elements: reductions over very many rows are cut and their pieces summed, in order.
    """
    rows = rows.views()
    gathered = _gathered("d_out", d_out, (rows.num_tokens if gather else rows.num_rows, None))
    ordered = expect("a_scaled", a_scaled, "bfloat16", (rows.num_rows, None))
    operands, shape = {"d_out": gathered, "a_scaled": ordered}, (rows.num_experts, gathered.shape[1], ordered.shape[1])
    options: dict[str, Any] = {"gather": gather, "accumulate": accumulate, "config": config}
    return _weight_gradient("down_backward_weight", operands, rows, shape, dw, workspace, stream, **options)


def up_backward_weight(
    dh: Any,
    x: Any,
    rows: Rows,
    *,
    dw: Any = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of dh^T x[token]. dh (R, G n), x (T, d) → dw (E, G n, d), as :func:`down_backward_weight`;
    gather=False: x (R, d). MoEBlaze Algorithm 1, line 29.
    """
    rows = rows.views()
    gathered = _gathered("x", x, (rows.num_tokens if gather else rows.num_rows, None))
    ordered = expect("dh", dh, "bfloat16", (rows.num_rows, None))
    operands, shape = {"dh": ordered, "x": gathered}, (rows.num_experts, ordered.shape[1], gathered.shape[1])
    options: dict[str, Any] = {"gather": gather, "accumulate": accumulate, "config": config}
    return _weight_gradient("up_backward_weight", operands, rows, shape, dw, workspace, stream, **options)
