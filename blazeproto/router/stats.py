"""The record of a router's choice that a layer returns beside its output."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from blazeproto.autograd.checkpoint import is_watched
from blazeproto.autograd.private import saved_by_export
from blazeproto.router.router import dropped_share


@saved_by_export
class MoEStats(NamedTuple):
    """The router's statistics of one forward pass."""

    load: Tensor  # (E,) int32: pairs of each expert
    aux_losses: dict[str, Tensor]  # scalars with their coefficients in, differentiable
    overflow: Tensor | None = None  # (1,) int32: pairs left out by a capacity, on all ranks; None without one
    chosen_load: Tensor | None = None  # (E,) int32: of the token choice, where the router may drop pairs of it

    @property
    def dropped(self) -> Tensor | None:
        """The share of the token choice's pairs that token rounding or the router's capacity dropped, () on the device; None
        where neither can. With both loads summed over ranks it is the share on all."""
        return dropped_share(self.load, self.chosen_load)

    @property
    def aux_loss(self) -> Tensor | float:
        """The auxiliary losses' sum, to add to the loss; 0.0 where the router has none."""
        losses = list(self.aux_losses.values())
        if not losses:
            return 0.0
        with torch.enable_grad() if any(map(is_watched, losses)) else nullcontext():
            return sum(losses[1:], losses[0])
