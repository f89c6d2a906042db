"""Experts on rows that lie by expert already, as programs have them that move tokens to their experts themselves.

    x (R, d)    | rows of expert 0 | rows of expert 1 | ... | padding |      counts (E,), on the device, say where each ends

To `moe_mlp`'s operators a row is a token with one expert and a score of 1: the dispatch has K = 1, its lists count up, and it is
made of the counts without waiting for the device. Padding belongs to nobody.

Gate and up are two weights here, and one operand of the products. They are joined for forward and again for backward; what is
saved between the two is the weights themselves, so that a layer which FSDP has sharded again keeps no copy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blazeproto.autograd import SavePolicy, node
from blazeproto.autograd.checks import FLOAT_DTYPES
from blazeproto.autograd.chunks import WHOLE
from blazeproto.autograd.operators import Gradients, define, on_another_gpu, without_autocast
from blazeproto.autograd.policy import Options, check_options
from blazeproto.autograd.private import graph_is_kept, nobody_listens, refuse_transforms, release_saved_tensors
from blazeproto.gemm.tiles import GATHERED_ELEMENTS

__all__ = ["grouped_experts"]

COUNT_DTYPES = (torch.int32, torch.int64)
ARGUMENTS = 8  # of the operator

# --- The operator --------------------------------------------------------------------------------------------------------


def _rest(places: Tensor, offsets: Tensor, options: str) -> tuple[Any, ...]:
    """How the arguments of `node`'s operators end: K = 1, every pair in the row of its number. places: (R,), -1 for padding."""
    return places, offsets, places, 1, None, None, WHOLE, options


def _fake(
    x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, scores: Tensor, places: Tensor, offsets: Tensor, encoded: str
) -> tuple[Tensor, Tensor, Tensor]:
    options, rows, width = Options.decode(encoded), x.shape[0], w1.shape[1]
    h = x.new_empty(rows if options.saves_h else 0, 2 * width)
    return torch.empty_like(x), h, x.new_empty(rows if options.saves_act else 0, width)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, encoded = inputs
    (_, h, act), options = output, Options.decode(encoded)
    ctx.options = encoded
    ctx.mark_non_differentiable(h, act)
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    ctx.save_for_backward(*tensors, h if options.saves_h else None, act if options.saves_act else None)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * ARGUMENTS
    saved = ctx.saved_tensors
    quiet = not torch.is_grad_enabled() and nobody_listens((d_out, *saved))  # enabled: create_graph=True
    # dH may lie over H where only this node can have seen H, and nobody will ask for it again.
    overwrite_h = quiet and getattr(ctx, "alone", False) and not graph_is_kept()
    x, w1, w3, w2, scores, places, offsets, h, act = saved
    del saved
    release_saved_tensors(ctx)
    rest = _rest(places, offsets, ctx.options)
    needs_x, needs_w1, needs_w3, needs_w2 = ctx.needs_input_grad[:4]
    needs_of_up = (needs_x, needs_w1 or needs_w3, False)
    to_recompute_from = (x, torch.cat((w1, w3), dim=1), None) if h is None else (None, None, None)
    arguments = (d_out, h, act, scores, w2, None, *to_recompute_from, *rest)
    needs_of_down = (any(needs_of_up), False, needs_w2, False)
    if quiet:
        of_down = node.down_backward.kernel(needs_of_down, *arguments, overwrite_h=overwrite_h)
    else:
        of_down = node.down_backward.gradients(needs_of_down, *arguments)
    dh, _d_scores, d_w2, _d_bias = of_down
    w13 = to_recompute_from[1]
    del h, act, arguments, of_down, to_recompute_from  # before the up projection's backward allocates
    of_up: Gradients = (None, None, None)
    if any(needs_of_up):
        w13 = torch.cat((w1, w3), dim=1) if w13 is None else w13
        up_backward = node.up_backward.kernel if quiet else node.up_backward.gradients
        of_up = up_backward(needs_of_up, dh, x, w13, None, *rest)
    dx, d_w13, _d_bias = of_up
    d_w1, d_w3 = (None, None) if d_w13 is None else d_w13.chunk(2, dim=1)
    return dx, d_w1 if needs_w1 else None, d_w3 if needs_w3 else None, d_w2, *[None] * (ARGUMENTS - 4)


@define(
    "grouped_experts(Tensor x, Tensor w1, Tensor w3, Tensor w2, Tensor scores, Tensor places, Tensor offsets, str options) "
    "-> (Tensor out, Tensor h, Tensor act)",
    _fake,
    setup=_setup,
    backward=_backward,
)
def _experts(
    x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, scores: Tensor, places: Tensor, offsets: Tensor, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, d), w1 and w3 (E, n, d), w2 (E, d, n), scores (R, 1), places (R,), offsets (E+1,) -> as `node.experts`."""
    w13 = torch.cat((w1, w3), dim=1)
    made: tuple[Tensor, Tensor, Tensor] = node.experts.kernel(
        x, w13, None, w2, None, scores, *_rest(places, offsets, options)
    )
    return made


@register_flop_formula(_experts.overload.overloadpacket)
def _operations(x: Any, w1: Any, *_: Any, **out: Any) -> int:
    """Of forward; arguments are shapes. R counts padding too."""
    return 6 * x[0] * w1[1] * w1[2]


# --- The function --------------------------------------------------------------------------------------------------------


def grouped_experts(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    counts: Tensor,
    *,
    save: SavePolicy | str = SavePolicy.MINIMAL,
    backend: str = "auto",
) -> Tensor:
    """out_r = W2_e (silu(W1_e x_r) * W3_e x_r), e being the expert of row r. MoEBlaze §2.1, without its sum over experts.

    bfloat16 on compute capability 9.0 runs on the kernels, every other dtype and device on plain torch operations. On a GPU
    the host waits for nothing. Autocast changes nothing.

    Args:
        x: (R, d) rows by expert, bfloat16, float16, float32 or float64. Rows beyond the counts are padding: whatever is in them,
            their output and their gradient are zero.
        w1: (E, n, d) gate weights of x's dtype or, unless that is float64, float32. A gradient has its weight's dtype; a float32
            one was never rounded to x's.
        w3: (E, n, d) up weights, of w1's dtype.
        w2: (E, d, n) down weights, of a dtype as w1.
        counts: (E,) rows of each expert, int32 or int64, on x's device. Their values are trusted not to be negative; of more
            than R rows those past R are left out.
        save: what is kept for backward, see `SavePolicy`.
        backend: "hopper", "torch" or "auto", which picks, as in `moe_mlp`.

    Returns:
        (R, d) in the dtype of ``x``.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched.
        RuntimeError: on a double backward.
    """
    save = save.value if isinstance(save, SavePolicy) else save  # SavePolicy(save) would be traced by torch.compile
    _check(x, w1, w3, w2, counts, save, backend)
    if not torch.is_grad_enabled():
        save = "recompute"  # nothing will ask for H
    options = Options("swiglu", save, "gather", backend).encode()
    with without_autocast(x.device.type):
        parameters = [t.contiguous() for t in (x, w1, w3, w2)]
        # A dispatcher with a fixed capacity drops rows that don't fit, and still counts them.
        ends = counts.cumsum(0, dtype=torch.int32).clamp_max(x.shape[0])
        places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        places = places.masked_fill(places >= ends[-1], -1)
        scores = x.new_ones(x.shape[0], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        quiet = nobody_listens((*parameters, counts)) and not on_another_gpu(x)
        way = _experts.way(quiet, parameters)
        out: Tensor = way(*parameters, scores, places, F.pad(ends, (1, 0)), options)[0]
    return out


def _check(x: Any, w1: Any, w3: Any, w2: Any, counts: Any, save: str, backend: str) -> None:
    given = {"x": x, "w1": w1, "w3": w3, "w2": w2, "counts": counts}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or hasattr(tensor, "placements"):
            raise TypeError(f"{name}: expected a torch.Tensor that is local, got {type(tensor).__name__}")
        dtypes = COUNT_DTYPES if name == "counts" else FLOAT_DTYPES
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected on {x.device} as x is, got {tensor.device}")
    refuse_transforms("grouped_experts", (x, w1, w3, w2))
    check_options(save=save, backend=backend)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (R, d), got {tuple(x.shape)}")
    if w1.dim() != 3 or w1.shape[2] != x.shape[1] or not w1.shape[0]:
        raise ValueError(f"w1: expected shape (E, n, d) = (E >= 1, n, {x.shape[1]}), got {tuple(w1.shape)}")
    num_experts, width, d_model = w1.shape
    shapes = (
        ("w3", "(E, n, d)", (num_experts, width, d_model)),
        ("w2", "(E, d, n)", (num_experts, d_model, width)),
        ("counts", "(E,)", (num_experts,)),
    )
    for name, words, shape in shapes:
        if given[name].shape != shape:
            raise ValueError(f"{name}: expected shape {words} = {shape}, got {tuple(given[name].shape)}")
    for name in ("w1", "w3", "w2"):
        weight = given[name]
        if weight.dtype not in (x.dtype, torch.float32) or (x.dtype == torch.float64 != weight.dtype):
            raise ValueError(f"{name}: expected dtype {x.dtype} as x has, or torch.float32, got {weight.dtype}")
    if w3.dtype != w1.dtype:
        raise ValueError(f"w3: expected dtype {w1.dtype} as w1 has, got {w3.dtype}")
    if x.numel() >= GATHERED_ELEMENTS and backend != "torch" and x.is_cuda:
        raise ValueError(
            f'x: expected fewer than {GATHERED_ELEMENTS} elements unless backend="torch", got {tuple(x.shape)}'
        )
