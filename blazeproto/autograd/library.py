"""How this package defines a torch operator, and the dispatch operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
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

from blazeproto.autograd.backends import has_dispatch_kernels
from blazeproto.autograd.policy import Options

library = torch.library.Library("blazeproto", "DEF")

_kernels: dict[str, Callable[..., Any]] = {}
_nodes: dict[str, tuple[Callable[..., Any], int]] = {}  # of operators with a derivative: apply, number of inputs

Gradients = Sequence[Tensor | None]

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), int, str, bool, list, tuple))


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Add an operator: its schema, its kernel for every device, its fake kernel (shapes and dtypes only).

    The kernels of an operator that returns a list may have None in it, which the operator leaves out.
    """
    name = schema.split("(", 1)[0]
    _kernels[name] = kernel
    library.define(schema)
    if schema.endswith("-> Tensor[]"):
        kernel, fake = _without_none(kernel), _without_none(fake)
    library.impl(name, _on_its_gpu(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"blazeproto::{name}", fake, lib=library)


def _without_none(kernel: Callable[..., Gradients]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: [made for made in kernel(*arguments) if made is not None]


def _on_its_gpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with the GPU of its first tensor as the current one, which launches go to."""

    def run(*arguments: Any) -> Any:
        first = next(argument for argument in arguments if isinstance(argument, Tensor))
        if not _elsewhere(first):
            return kernel(*arguments)
        with torch.cuda.device(first.device):
            return kernel(*arguments)

    return run


def _elsewhere(t: Tensor) -> bool:
    return t.is_cuda and t.get_device() != torch.cuda.current_device()


def caller(x: Tensor, *others: Tensor | None) -> Callable[..., Any]:
    """How to call operators on these tensors: a function of an operator's name and its arguments.

    Where nobody listens, and the GPU of ``x`` is the current one, it goes past the dispatcher and past ``Function.apply`` in
    Python, which only bring arguments from Python to Python.
    """
    if torch.compiler.is_compiling() or not _unheard((x, *others)) or _elsewhere(x):
        return _call
    return _call_directly


def _call(name: str, *arguments: Any) -> Any:
    return getattr(torch.ops.blazeproto, name).default(*arguments)


def _call_directly(name: str, *arguments: Any) -> Any:
    if name not in _nodes or not _wants_gradients(arguments):
        return _kernels[name](*arguments)
    apply, num_inputs = _nodes[name]
    return apply(*arguments[:num_inputs], (_kernels[name], arguments[num_inputs:]))


def _unheard(arguments: Sequence[Any]) -> bool:
    """Whether no mode, transform, profiler, tracer or tensor subclass wants to hear of the operators that are called."""
    return (
        _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not _are_functorch_transforms_active()
        and not _profiler_enabled()
        and _get_tracing_state() is None
        and _PLAIN.issuperset(map(type, arguments))
    )


def _wants_gradients(arguments: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, which takes a microsecond to find that there is nothing to do."""
    return t if t.dtype == dtype else t.to(dtype)


def differentiate(
    name: str, num_inputs: int, setup_context: Callable[..., None], backward: Callable[..., tuple[Tensor | None, ...]]
) -> None:
    """Give operator ``name`` its backward, in the manner of ``torch.library.register_autograd``.

    The first ``num_inputs`` arguments may have gradients; ``setup_context(ctx, inputs, tail, output)`` gets the
    others as ``tail``, and ``backward(ctx, *grads)`` returns ``num_inputs`` gradients. ``ctx.holds_alone``: whether
    only the node can hold outputs that `moe_mlp` doesn't return. By hand, because ``register_autograd`` looks up the
    schema's defaults at every call and autograd walks every argument: 35 us of host time an operator.
    """
    operator = getattr(torch.ops.blazeproto, name).default

    def forward(ctx: Any, *arguments: Any) -> Any:
        *inputs, (run, tail) = arguments
        output = run(*inputs, *tail)
        # What goes through the dispatcher, or to hooks of what is saved, others may hold.
        ctx.holds_alone = run is not operator and _top_saved_tensors_default_hooks(False) is None
        setup_context(ctx, inputs, tail, output)
        return tuple(output) if isinstance(output, list) else output

    def backward_and_none_for_tail(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (*backward(ctx, *grads), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_and_none_for_tail)}
    node: Any = type(name, (torch.autograd.Function,), methods)
    node._backward_cls.apply = backward_and_none_for_tail  # which the one that is there would look up and call
    returns_list = str(operator._schema.returns[0].type) == "List[Tensor]"

    def autograd_kernel(*arguments: Any) -> Any:
        if _wants_gradients(arguments):
            tail = arguments[num_inputs:]
            output = node.apply(*arguments[:num_inputs], (operator, tail))
            return list(output) if returns_list else output
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl(name, autograd_kernel, "Autograd")
    # Function.apply itself first looks for functorch, of which `caller` knows that there is none.
    _nodes[name] = super(torch.autograd.Function, node).apply, num_inputs


def refuse_double_backward(name: str) -> None:
    """Make a derivative of the backward operator ``name`` raise: without a formula torch would only warn, and use 0."""

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"blazeproto::{name} has no derivative: moe_mlp can be differentiated once, and a backward pass reached "
            "the gradients of a backward pass with create_graph=True"
        )

    num_arguments = len(getattr(torch.ops.blazeproto, name).default._schema.arguments)
    differentiate(name, num_arguments, lambda ctx, inputs, tail, output: None, backward)


def gradients_caller(*tensors: Tensor | None) -> Callable[..., Gradients]:
    """How to call backward operators on these tensors, as :func:`caller`: a function of the name, which gradients are needed, and
    the arguments. It returns one entry a gradient, None where it is not needed.
    """
    if torch.is_grad_enabled() or not _unheard(tensors):  # enabled: create_graph=True
        return _gradients_by_operator
    return gradients_directly


def _gradients_by_operator(name: str, needs: Sequence[bool], *arguments: Any) -> Gradients:
    made = iter(_call(name, needs, *arguments))
    return [next(made) if need else None for need in needs]


def gradients_directly(name: str, needs: Sequence[bool], *arguments: Any) -> Gradients:
    return _kernels[name](needs, *arguments)


def may_overwrite(ctx: Any, call: Callable[..., Gradients]) -> bool:
    """Whether a backward that calls its operators by ``call`` may write over what only its node holds."""
    return call is gradients_directly and ctx.holds_alone and not _get_current_graph_task_keep_graph()


def weight_grad_dtype(weight: Tensor, options: Options) -> torch.dtype:
    return torch.float32 if options.weight_grads == "float32" else weight.dtype


# ---- dispatch ----------------------------------------------------------------------------------------------------


def _dispatch(topk_experts: Tensor, num_experts: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """topk_experts (T, K) or (P,), int32 or int64 -> pair_indices (P,), offsets (E+1,), token_index_map (P,), int32.

    A pair whose expert id is outside [0, E) gets no row: -1 in ``token_index_map``. The rows that are left over come
    last, with -1 in ``pair_indices``.
    """
    index_arrays = _dispatch_fake(topk_experts, num_experts, backend)
    build_dispatch(topk_experts, num_experts, backend, index_arrays)
    return index_arrays


def build_dispatch(
    topk_experts: Tensor, num_experts: int, backend: str, index_arrays: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill ``index_arrays``, as :func:`_dispatch` returns them."""
    if has_dispatch_kernels(backend, topk_experts.device):
        from blazeproto.autograd import hopper_products

        hopper_products.build_dispatch(topk_experts, num_experts, index_arrays)
        return
    pair_indices, offsets, token_index_map = index_arrays
    experts = topk_experts.reshape(-1)
    here = (experts >= 0) & (experts < num_experts)
    keys = torch.where(here, experts, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    counts.scatter_add_(0, keys.long(), torch.ones_like(keys, dtype=torch.int32))
    offsets[:1].zero_()  # offsets[0] = 0 would copy a number from the host and wait
    offsets[1:] = counts[:-1].cumsum(0)
    order = torch.sort(keys, stable=True).indices  # (P,) the pair in each row; pairs without a row come last
    pair_indices.copy_(order).masked_fill_(~here[order], -1)
    token_index_map[order] = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    token_index_map.masked_fill_(~here, -1)


def _dispatch_fake(topk_experts: Tensor, num_experts: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    num_pairs = topk_experts.numel()
    return (
        topk_experts.new_empty(num_pairs, dtype=torch.int32),
        topk_experts.new_empty(num_experts + 1, dtype=torch.int32),
        topk_experts.new_empty(num_pairs, dtype=torch.int32),
    )


define(
    "dispatch(Tensor topk_experts, int num_experts, str backend) "
    "-> (Tensor pair_indices, Tensor offsets, Tensor token_index_map)",
    _dispatch,
    _dispatch_fake,
)
