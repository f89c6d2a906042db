"""Activation checkpointing that never routes again.

Recomputing a layer must send each token to the experts that it went to at first: a top-k that is run again may choose
otherwise (ties, noise, another reduction order), and gradients would be of another function. This policy for torch's
selective checkpointing keeps the choice and the dispatch, which are small, and recomputes everything else::

    from torch.utils.checkpoint import checkpoint
    from blazeproto.autograd import checkpoint_contexts

    out, stats = checkpoint(layer, x, use_reentrant=False, context_fn=checkpoint_contexts)

``use_reentrant=True`` gives gradients to the tensors that the function itself returns and drops those inside other objects, the
auxiliary losses in ``stats`` too. `refuse_lost_gradients` makes an error of that.

Without this policy a checkpoint does route again. If the balancing bias has changed since, it would choose other experts:
`refuse_another_bias` makes an error of that.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy, create_selective_checkpoint_contexts

from blazeproto.autograd.operators import CHOOSING, define
from blazeproto.autograd.private import in_backward, saved_tensors_hooks

_TORCH_CHOOSES = ("aten::topk", "aten::sort", "aten::argsort", "aten::bernoulli", "aten::multinomial")


def checkpoint_policy(_ctx: Any, operator: object, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``: keep the routing choice, recompute the rest.

    operator: the one that has just run.
    """
    name = operator.name().split(".")[0] if isinstance(operator, torch._ops.OpOverload) else ""
    chooses = operator in CHOOSING or name in _TORCH_CHOOSES
    return CheckpointPolicy.MUST_SAVE if chooses else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_contexts() -> Any:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, with `checkpoint_policy`."""
    return create_selective_checkpoint_contexts(checkpoint_policy)


def refuse_lost_gradients(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """The losses, such that a backward through one raises if ``checkpoint(use_reentrant=True)`` runs this forward pass.

    There it runs without gradients, and once more in backward. A loss that a caller takes out of the stats is then a constant.
    Summed up and returned beside the output it is a tensor that the checkpoint knows, and has its gradient.
    """
    if not losses or torch.compiler.is_compiling() or torch.is_grad_enabled() or not _runs_in_reentrant_checkpoint():
        return losses

    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            "stats.aux_losses: expected a forward pass that autograd sees, got one inside checkpoint(use_reentrant=True), which "
            "drops the gradient of tensors in nested results; use use_reentrant=False, or return out and stats.aux_loss"
        )

    watched = {name: loss.detach().requires_grad_() for name, loss in losses.items()}
    for loss in watched.values():
        loss.register_hook(refuse)
    return watched


def is_watched(loss: Tensor) -> bool:
    """Whether it comes from `refuse_lost_gradients`. Other losses that need a gradient have a history."""
    return loss.requires_grad and loss.is_leaf


def _runs_in_reentrant_checkpoint() -> bool:
    frame, forward = sys._getframe(1), CheckpointFunction.forward.__code__
    while frame.f_code is not forward and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is forward


@define("bias_state(Tensor bias) -> Tensor", lambda bias: torch.empty(2, dtype=torch.int64, device="cpu"), chooses=True)
def bias_state(bias: Tensor) -> Tensor:
    """(2,) int64 in host memory: where a bias lies, and torch's count of writes to it. Kept as the choice is."""
    return torch.tensor((bias.data_ptr(), bias._version), device="cpu")


def refuse_another_bias(router: object, bias: Tensor) -> None:
    """RuntimeError where a checkpoint runs a router's forward pass again with a bias that has changed since.

    Not seen: what a CUDA graph or ``bias.data`` wrote, and a compiled router inside a checkpoint that is not compiled.
    """
    if torch.compiler.is_compiling() or type(bias) is not Tensor or bias.is_inference():
        return
    calls = _checkpoints()
    state = bias_state(bias).tolist() if calls else None
    for call, again in calls:
        if not hasattr(call, "biases"):
            call.biases = {}
        if call.biases.setdefault(id(router), state) != state and again:
            raise RuntimeError(
                "expert_bias: expected the bias of the first forward pass where a checkpoint runs it again, got one that has "
                "changed since; call update_bias after backward, or keep the choice with context_fn=checkpoint_contexts"
            )
        call.biases[id(router)] = state


def _checkpoints() -> list[tuple[Any, bool]]:
    """The checkpoints that this forward pass is in: for each call an object of its own, and whether it runs again."""
    calls: list[tuple[Any, bool]] = []
    for _, unpack in saved_tensors_hooks():
        if getattr(unpack, "__module__", "") == CheckpointFunction.__module__ and unpack.__closure__:
            calls += [
                (dict(zip(unpack.__code__.co_freevars, unpack.__closure__, strict=True))["frame"].cell_contents, False)
            ]
    frame = sys._getframe(1) if in_backward() or not torch.is_grad_enabled() else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and "frame" in code.co_freevars:
            calls.append((frame.f_locals["frame"], True))
        # With use_reentrant=True, or of another library that does likewise: a Function whose backward runs forward again.
        elif code.co_name in ("forward", "backward") and isinstance(ctx := frame.f_locals.get("ctx"), FunctionCtx):
            calls.append((ctx, code.co_name == "backward"))
        frame = frame.f_back
    return calls
