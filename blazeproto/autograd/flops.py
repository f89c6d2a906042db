"""Operations of each operator, for `torch.utils.flop_counter.FlopCounterMode`: two for each multiplication with a sum.

    forward    2 R (G n d + n d)       that is 6 T K n d with a gate      MoEBlaze §2.1
    backward   twice that, and 2 R G n d where H is made again; for a frozen weight, half of its share

R is the number of rows, which counts places that no pair takes (sentinels, unused capacity). Low-rank factors add a product of
their own sizes beside each product of their weight. Shapes stand for tensors here: so torch calls a formula.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from blazeproto.autograd.call import FIELDS, Parameters, first
from blazeproto.autograd.policy import SavePolicy
from blazeproto.autograd.steps import needs_of_up

Shape = Sequence[int]


def _read(packed: Sequence[Any]) -> tuple[Parameters, int]:
    """The shapes of a packed call, and R."""
    named = dict(zip(FIELDS, packed, strict=True))
    return first(Parameters, packed), named["expert_pair_indices"][0]


def _of_all_rows(num_rows: int, *weights: Any) -> int:
    """Every row with its expert's matrix; a gradient of the matrix takes as much. weights: (E, rows, columns)."""
    return sum(2 * num_rows * prod(weight[1:]) for weight in weights if weight is not None)


def experts(*packed: Any, **out: Any) -> int:
    """Forward: H and Y, each with what two factors add."""
    p, num_rows = _read(packed)
    return _of_all_rows(num_rows, p.up_proj, p.up_rest, p.up_a, p.up_b, p.down_proj, p.down_a, p.down_b)


def backward(step: str, needs: Sequence[bool], given: Sequence[Shape | None], *packed: Any, **out: Any) -> int:
    """A step's: dA' for dH and dS, dX, and the gradients of weights and factors; H, if it was not saved."""
    (p, num_rows), need, products = _read(packed), Parameters(*needs), list[Any]()
    whole, again = step == "backward", SavePolicy.RECOMPUTE in packed
    if whole or step == "down_backward":
        products += [p.up_proj, p.up_a, p.up_b, need.down_b and p.down_a] if again else []
        of_rows = any(needs_of_up(need)) or need.scores
        products += [p.down_proj, p.down_a] if of_rows else []
        products += [p.down_b] if of_rows or need.down_a else []
    if whole or step == "up_backward":
        products += [p.up_proj, p.up_a] if need.x else []
        products += [p.up_b] if need.x or need.up_a else []
    for part in ("down", "up"):
        if whole or step == f"{part}_gradients":
            products += [getattr(p, f"{part}_{name}") for name in ("proj", "a", "b") if getattr(need, f"{part}_{name}")]
    return _of_all_rows(num_rows, *(each for each in products if each))
