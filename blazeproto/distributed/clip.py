"""``clip_grad_norm_``: torch's, where some parameters are sharded and others are not, which torch's own refuses to mix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from blazeproto.runtime import checks


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients by one factor so that their norm, of all ranks' experts together, is at most ``max_norm``.

    parameters: one, or any mixture of plain ones (...), whose gradients are the same on all ranks, as they are after a reduction,
    and of DTensors on any meshes; of any float dtype. Those without a gradient are left out.

    Returns the norm before, (), the same on all ranks. All ranks call it. Raises TypeError for ``parameters`` that are no
    tensors, TypeError or ValueError for a ``max_norm`` that is no number from 0 on.
    """
    checks.number("max_norm", max_norm, least=0)
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)  # which iterates over its rows
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters if several else (parameters,):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters: expected a Tensor or an iterable of Tensors, got {type(parameter).__name__}")
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    total = get_total_norm([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms])
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
