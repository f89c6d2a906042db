"""Gradients that have no derivative: a second backward pass that reaches them is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def refuse(*_: Any) -> None:
    """The backward of what has no derivative: RuntimeError."""
    raise RuntimeError(
        "a layer can be differentiated once: a second backward pass reached its gradients (create_graph=True), which have no "
        "derivative"
    )


class _Once(torch.autograd.Function):
    """Copies of gradients; a backward pass that reaches one raises.  tensors: first ``count`` that lead to what the gradients are
    of, then the gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.clone() for gradient in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        refuse()


def edge(x: Tensor) -> Tensor:
    """An empty tensor whose graph leads to x. It keeps none of x's memory. A slice of x would not do: while torch sets up the
    node of an operator of ours, autograd sees no other operators."""
    with torch.enable_grad():
        return _Once.apply(1, x, x.new_empty(0))[0]  # type: ignore[no-untyped-call, no-any-return]


def once(gradients: tuple[Tensor | None, ...], of: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients that a backward returns under ``create_graph=True``. A second backward that reaches one raises RuntimeError.

    A gradient can be made of saved tensors alone, none of which requires a gradient: of frozen experts, dX is made of H. Autograd
    would take it for a constant, and skip it where the second backward names its inputs (``torch.autograd.grad``, ``hessian``).

    of: the output's gradient and each input that requires one, or its `edge`.
    """
    anchor = torch.empty(0, requires_grad=True)  # with it the copies require a gradient, whatever the others do
    made = _Once.apply(len(of) + 1, anchor, *of, *gradients)  # type: ignore[no-untyped-call]
    return tuple(made)


def once_differentiable(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A Function's backward of one gradient, run without autograd, its results through `once`. It takes what was saved too, among
    which are all inputs that require a gradient, or their `edge`. torch's decorator of this name refuses a second backward only
    where the given gradient requires one itself."""

    def run(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            made = backward(ctx, d_out, *saved)
        return once(made, [d_out, *saved]) if torch.is_grad_enabled() else made

    return run
