"""Low-rank factors beside an expert's weight."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd.policy import padded_rank

LowRows = tuple[Tensor, Tensor]
"""What factors add to a product: rows (R, r) in expert order, and the factor (E, m, r) or (E, r, m) that they meet."""


class LowRank(NamedTuple):
    """A term added to the weights (E, out, in) of E experts: b a, of rank r. Hu et al., LoRA, arXiv 2106.09685, section 4.1.

    Adapters that act together are one such pair, concatenated along r.

    Fields:
        a: (E, r, in), of a weight's dtype or float32.
        b: (E, out, r), of such a dtype; a scaling is the caller's to multiply into it.
    """

    a: Tensor
    b: Tensor


def padded(factors: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    """a and b with zeros up to `padded_rank`, contiguous."""
    if factors is None:
        return None, None
    a, b = factors
    if missing := padded_rank(a.shape[1]) - a.shape[1]:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return a.contiguous(), b.contiguous()


def tensors_of(*factors: LowRank | None) -> list[Tensor]:
    """a and b of each pair that is one, whatever else came."""
    return [t for pair in factors if isinstance(pair, LowRank) for t in pair]


def rank_of(factors: LowRank | None) -> int:
    """The rank of the factors; 0 without factors."""
    return 0 if factors is None else factors.a.shape[1]
