"""All that goes around torch's public interface, in one place. If a name is missing, every answer is the safe one.

It tells whether anything but an autograd node can see what the node saves, so that dH may be written over H; calling
operators past torch's dispatcher where they are unobserved, which halves the host's time of an eager layer; telling a
transform of torch.func that it is not supported; derivatives
inside an operator's kernel; and results that torch.export can save.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

try:
    from torch._C import (
        DispatchKey,
        _are_functorch_transforms_active,
        _current_graph_task_id,
        _dispatch_tls_local_exclude_set,
        _dispatch_tls_local_include_set,
        _ForceDispatchKeyGuard,
        _get_tracing_state,
        _has_storage,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import (
        _get_current_graph_task_keep_graph,
        _pop_saved_tensors_default_hooks,
        _profiler_enabled,
        _push_saved_tensors_default_hooks,
        _top_saved_tensors_default_hooks,
    )

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def refuse_transforms(name: str, tensors: Iterable[Any]) -> None:
    """RuntimeError inside a transform of torch.func, and for a tensor with a forward-mode tangent, which a layer has none of."""
    if not AVAILABLE or torch.compiler.is_compiling():
        return
    dual = getattr(forward_ad, "_current_level", -1) >= 0 and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
    if dual or _are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: expected a call outside torch.func's grad, vmap, jvp and forward-mode AD, which are not supported; for "
            "gradients use backward() or torch.autograd.grad, for a batch of inputs one tensor with all their tokens"
        )


def refuse_batches(gradient: Tensor | None) -> None:
    """RuntimeError in a backward for a gradient that is_grads_batched=True, vectorize=True or a transform has wrapped."""
    if not AVAILABLE or gradient is None or torch.compiler.is_compiling():
        return
    if gradient.layout == torch.strided and not _has_storage(gradient):
        raise RuntimeError(
            "backward: expected a plain gradient of the output, got one inside vmap, is_grads_batched=True, vectorize=True or "
            "another transform of torch.func; call torch.autograd.grad once for each gradient"
        )


def unobserved(tensors: Sequence[Any]) -> bool:
    """Whether no compiler, mode, transform, profiler, tracer or tensor subclass is to be told of operators on these tensors,
    which hold numbers (meta tensors don't)."""
    return (
        AVAILABLE
        and not torch.compiler.is_compiling()
        and _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not _are_functorch_transforms_active()
        and not _profiler_enabled()
        and _get_tracing_state() is None
        and _PLAIN.issuperset(map(type, tensors))
        and not any(t is not None and t.is_meta for t in tensors)
    )


def hooks_see_saved_tensors() -> bool:
    """Whether hooks are given what autograd nodes save."""
    return not AVAILABLE or _top_saved_tensors_default_hooks(False) is not None


_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


@contextmanager
def _hooks_put_aside() -> Iterator[list[_Hooks]]:
    """The hooks of saved tensors, which are not called inside: the innermost pair first."""
    pairs: list[_Hooks] = []
    while AVAILABLE and (pair := _top_saved_tensors_default_hooks(False)) is not None:
        pairs.append(pair)
        _pop_saved_tensors_default_hooks()
    try:
        yield pairs
    finally:
        for pair in reversed(pairs):
            _push_saved_tensors_default_hooks(*pair)


def saved_tensors_hooks() -> list[_Hooks]:
    """The hooks that are given what autograd nodes save, and give it back: the innermost pair first."""
    with _hooks_put_aside() as pairs:
        return pairs


def graph_is_kept() -> bool:
    """In a backward: whether the graph is kept for another one."""
    return not AVAILABLE or _get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """Whether a backward runs on this thread. A forward pass inside it belongs to a checkpoint, which runs it again."""
    return AVAILABLE and _current_graph_task_id() >= 0


def release_saved_tensors(ctx: Any) -> None:
    """Let go of what a node saved, in its backward, unless the graph is kept."""
    getattr(ctx, "maybe_clear_saved_tensors", lambda: None)()


Named = TypeVar("Named", bound=type)


def saved_by_export(result: Named) -> Named:
    """Decorates a NamedTuple that a module returns: torch.export.save writes it under its name."""
    register = getattr(torch.utils._pytree, "_register_namedtuple", None)
    if register is not None:
        register(result, serialized_type_name=f"{result.__module__}.{result.__name__}")
    return result


def vjp(function: Callable[[Tensor], Any], at: Tensor, gradients: Any) -> Tensor:
    """The gradient at a tensor of a differentiable function, from the ``gradients`` of its results.

    By torch.func: autograd raises inside an operator's kernel. Under a dispatch mode the dispatcher leaves out what torch.func's
    transforms are made of, so it is let in again.
    """
    with _transforms_let_in():
        pull_back: Any = torch.func.vjp(function, at)[1]
        made: Tensor = pull_back(gradients)[0]
        return made


@contextmanager
def _transforms_let_in() -> Iterator[None]:
    """And the user's hooks of saved tensors, which torch.func refuses, are put aside."""
    if not AVAILABLE:
        yield
        return
    excluded = _dispatch_tls_local_exclude_set()
    for name in (
        "FuncTorchDynamicLayerFrontMode",
        "FuncTorchDynamicLayerBackMode",
        "FuncTorchGradWrapper",
        "ADInplaceOrView",
    ):
        excluded = excluded.remove(getattr(DispatchKey, name))
    with _hooks_put_aside(), _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), excluded):
        yield
