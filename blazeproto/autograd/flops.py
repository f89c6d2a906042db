"""Operations of each operator, for `torch.utils.flop_counter.FlopCounterMode`: two for each multiplication with a sum.

    forward    2 R (G n d + n d)       that is 6 T K n d with a gate      MoEBlaze §2.1
    backward   twice that, and 2 R G n d where H is made again; for a frozen weight, half of its share

R is the number of rows, which counts places that no pair takes (sentinels, unused capacity). Low-rank factors add a product of
their own sizes beside each product of their weight. Shapes stand for tensors here: so torch calls a formula.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from blazeproto.autograd.arguments import Made, Parameters, Saved

Shape = Sequence[int]


def _of_all_rows(num_rows: int, *weights: Shape | None) -> int:
    """Every row with its expert's matrix; a gradient of the matrix takes as much. weights: (E, rows, columns)."""
    return sum(2 * num_rows * prod(weight[1:]) for weight in weights if weight is not None)


def experts(*arguments: Any, **out: Any) -> int:
    """Forward: H and Y, each with what two factors add."""
    p, up_rest, num_rows = Parameters(*arguments[:10]), arguments[10], arguments[13][0]
    return _of_all_rows(num_rows, p.up_proj, up_rest, p.up_a, p.up_b, p.down_proj, p.down_a, p.down_b)


def backward(
    needs: Sequence[bool], d_out: Shape | None, dh: Shape | None, a_scaled: Shape | None, *arguments: Any, **out: Any
) -> int:
    """dA' for dH and dS, dX, and the gradients of weights and factors; H, if it was not saved."""
    need, p, h = Made(*needs), Parameters(*arguments[:10]), arguments[10]
    num_rows = arguments[12 + len(Saved._fields)][0]
    needs_of_up, total = any(need[3:8]), 0
    if d_out is not None and a_scaled is None:
        if h is None:
            total += _of_all_rows(num_rows, p.up_proj, p.up_a, p.up_b, p.down_a if need.down_b else None)
        if need.dh or needs_of_up or need.scores:
            total += _of_all_rows(num_rows, p.down_proj, p.down_a)
        if need.dh or needs_of_up or need.scores or need.down_a:
            total += _of_all_rows(num_rows, p.down_b)
    if need.x:
        total += _of_all_rows(num_rows, p.up_proj, p.up_a)
    if need.x or need.up_a:
        total += _of_all_rows(num_rows, p.up_b)
    made = [name for name in ("up_proj", "up_a", "up_b", "down_proj", "down_a", "down_b") if getattr(need, name)]
    return total + _of_all_rows(num_rows, *(getattr(p, name) for name in made))
