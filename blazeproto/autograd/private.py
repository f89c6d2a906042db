"""All that goes around torch's public interface, in one place. Where a name is missing, every answer is the safe one.

What it is for: whether anybody but an autograd node can see what the node saves, so that dH may be written over H; and calling
operators past torch's dispatcher where nobody would hear of them, which halves the host's time of an eager layer.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C import (
        _are_functorch_transforms_active,
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import (
        _get_current_graph_task_keep_graph,
        _profiler_enabled,
        _top_saved_tensors_default_hooks,
    )

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def nobody_listens(tensors: Iterable[Any]) -> bool:
    """Whether no compiler, mode, transform, profiler, tracer or tensor subclass wants to hear of operators on these tensors."""
    return (
        AVAILABLE
        and not torch.compiler.is_compiling()
        and _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not _are_functorch_transforms_active()
        and not _profiler_enabled()
        and _get_tracing_state() is None
        and _PLAIN.issuperset(map(type, tensors))
    )


def hooks_see_saved_tensors() -> bool:
    """Whether hooks are given what autograd nodes save."""
    return not AVAILABLE or _top_saved_tensors_default_hooks(False) is not None


def graph_is_kept() -> bool:
    """In a backward: whether the graph is kept for another one."""
    return not AVAILABLE or _get_current_graph_task_keep_graph()


def release_saved_tensors(ctx: Any) -> None:
    """Let go of what a node saved, in its backward, unless the graph is kept."""
    getattr(ctx, "maybe_clear_saved_tensors", lambda: None)()
