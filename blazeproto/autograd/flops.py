"""Operations of each operator, for `torch.utils.flop_counter.FlopCounterMode`: two for each multiplication with a sum.

    forward    2 R (G n d + n d)       that is 6 T K n d with a gate      MoEBlaze §2.1
    backward   twice that, and 2 R G n d where H is made again

R is the number of rows, which counts places that no pair takes (sentinels, unused capacity). Shapes stand for tensors here: so
torch calls a formula.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from blazeproto.autograd import lora, node

Shape = Sequence[int]


def _product(pair_indices: Shape, weight: Shape) -> int:
    """Of every row with its expert's matrix; a gradient of the weight takes as much. weight: (E, rows, columns)."""
    return 2 * pair_indices[0] * prod(weight[1:])


@register_flop_formula(node.experts.overload.overloadpacket)
def experts(
    x: Shape,
    up_proj: Shape,
    up_bias: Shape | None,
    down_proj: Shape,
    down_bias: Shape | None,
    scores: Shape,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """Forward: H and Y."""
    return _product(pair_indices, up_proj) + _product(pair_indices, down_proj)


@register_flop_formula(node.down_backward.overload.overloadpacket)
def down_backward(
    needs: Sequence[bool],
    d_out: Shape,
    h: Shape | None,
    act: Shape | None,
    scores: Shape,
    down_proj: Shape,
    down_bias: Shape | None,
    x: Shape | None,
    up_proj: Shape | None,
    up_bias: Shape | None,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """dA' for dH and dS, and dW_down; H, if it was not saved."""
    needs_h, needs_scores, needs_weight, _needs_bias = needs
    again = 0 if up_proj is None else _product(pair_indices, up_proj)
    return again + ((needs_h or needs_scores) + needs_weight) * _product(pair_indices, down_proj)


@register_flop_formula(node.up_backward.overload.overloadpacket)
def up_backward(
    needs: Sequence[bool],
    dh: Shape,
    x: Shape,
    up_proj: Shape,
    up_bias: Shape | None,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """dX and dW_up."""
    needs_x, needs_weight, _needs_bias = needs
    return (needs_x + needs_weight) * _product(pair_indices, up_proj)


@register_flop_formula(node.backward_in_chunks.overload.overloadpacket)
def backward_in_chunks(
    needs: Sequence[bool],
    d_out: Shape,
    x: Shape,
    up_proj: Shape,
    up_bias: Shape | None,
    down_proj: Shape,
    down_bias: Shape | None,
    scores: Shape,
    h: Shape | None,
    act: Shape | None,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """Both."""
    *needs_of_up, needs_down, needs_down_bias, needs_scores = needs
    needs_of_down = (any(needs_of_up), needs_scores, needs_down, needs_down_bias)
    made_again = None if h is not None else up_proj
    of_down = down_backward(
        needs_of_down, d_out, h, act, scores, down_proj, down_bias, x, made_again, up_bias, pair_indices
    )
    return of_down + up_backward(needs_of_up, d_out, x, up_proj, up_bias, pair_indices)


@register_flop_formula(lora.experts.overload.overloadpacket)
def lora_experts(
    x: Shape,
    up_proj: Shape,
    up_bias: Shape | None,
    up_a: Shape | None,
    up_b: Shape | None,
    down_proj: Shape,
    down_bias: Shape | None,
    down_a: Shape | None,
    down_b: Shape | None,
    scores: Shape,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """Forward: H and Y, each with what two factors add."""
    weights = (up_proj, up_a, up_b, down_proj, down_a, down_b)
    return sum(_product(pair_indices, weight) for weight in weights if weight is not None)


@register_flop_formula(lora.down_backward.overload.overloadpacket)
def lora_down_backward(
    needs: Sequence[bool],
    d_out: Shape,
    h: Shape,
    act_a: Shape,
    scores: Shape,
    down_proj: Shape,
    down_bias: Shape | None,
    down_a: Shape | None,
    down_b: Shape | None,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """dA' for dH and dS, with the factors; dA_down and dB_down."""
    whole = _product(pair_indices, down_proj)
    if down_a is None or down_b is None:
        return whole
    of_a, of_b = _product(pair_indices, down_a), _product(pair_indices, down_b)
    return whole + of_a + of_b + needs[2] * of_a + needs[3] * of_b


@register_flop_formula(lora.up_backward.overload.overloadpacket)
def lora_up_backward(
    needs: Sequence[bool],
    dh: Shape,
    x: Shape,
    xa: Shape,
    up_proj: Shape,
    up_a: Shape | None,
    up_b: Shape | None,
    pair_indices: Shape,
    *_: Any,
    **out: Any,
) -> int:
    """dX, with the factors; dA_up and dB_up."""
    needs_x, needs_a, needs_b = needs
    total = needs_x * _product(pair_indices, up_proj)
    if up_a is None or up_b is None:
        return total
    of_a, of_b = _product(pair_indices, up_a), _product(pair_indices, up_b)
    return total + (needs_x or needs_a) * of_b + (needs_x + needs_a) * of_a + needs_b * of_b
