"""Activation checkpointing that never routes again.

Recomputing a layer must send each token to the experts that it went to at first: a top-k that is run again may choose
otherwise (ties, noise, another reduction order), and gradients would be of another function. This policy for torch's
selective checkpointing keeps the choice and the dispatch, which are small, and recomputes everything else::

    from torch.utils.checkpoint import checkpoint
    from blazeproto.autograd import checkpoint_contexts

    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from blazeproto.autograd.operators import CHOOSING

_TORCH_CHOOSES = ("aten::topk", "aten::sort", "aten::argsort", "aten::bernoulli", "aten::multinomial")


def checkpoint_policy(_ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: keep the routing choice, recompute the rest."""
    name = operator.name().split(".")[0] if isinstance(operator, torch._ops.OpOverload) else ""
    chooses = operator in CHOOSING or name in _TORCH_CHOOSES
    return CheckpointPolicy.MUST_SAVE if chooses else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts() -> Any:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, with :func:`checkpoint_policy`."""
    return create_selective_checkpoint_contexts(checkpoint_policy)
