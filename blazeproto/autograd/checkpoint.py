"""Activation checkpointing that never routes again.

Recomputing a layer must send each token to the experts that it went to at first: a top-k that is run again may choose
otherwise (ties, noise, another reduction order), and gradients would be of another function. This policy for torch's
selective checkpointing keeps the choice and the dispatch, which are small, and recomputes everything else::

    from functools import partial
    from torch.utils.checkpoint import checkpoint
    from blazeproto.autograd import checkpoint_contexts

    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

CHOOSING_OPERATORS = {"aten::topk", "aten::sort", "aten::argsort", "aten::bernoulli", "aten::multinomial"}
"""torch operators a router chooses with; beside them, every operator of CHOOSING_NAMESPACE named dispatch or topk."""
CHOOSING_NAMESPACE = "blazeproto"
CHOOSING_WORDS = ("dispatch", "topk", "route", "choose", "pairs")


def checkpoint_policy(_ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: keep the routing choice, recompute the rest."""
    if _chooses(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts() -> Any:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, with :func:`checkpoint_policy`."""
    return create_selective_checkpoint_contexts(checkpoint_policy)


def _chooses(operator: Any) -> bool:
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    qualified = operator.name().split(".")[0]
    namespace, name = qualified.split("::")
    if namespace == CHOOSING_NAMESPACE:
        return any(word in name for word in CHOOSING_WORDS)
    return qualified in CHOOSING_OPERATORS
