"""Gradients that have no derivative: a second backward pass that reaches them is refused."""

from collections.abc import Callable
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
    """Copies of gradients; a backward pass that reaches one raises.  anchor: requires a gradient, so that the copies do."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, d_out: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.clone() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        refuse()


def once(gradients: tuple[Tensor | None, ...], d_out: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients that a backward returns under ``create_graph=True``. A second backward that reaches one raises RuntimeError.

    A gradient can be made of saved tensors alone, none of which requires a gradient: of frozen experts, dX is made of H. Autograd
    would take it for a constant.
    """
    made = _Once.apply(torch.empty(0, requires_grad=True), d_out, *gradients)  # type: ignore[no-untyped-call]
    return tuple(made)


def once_differentiable(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A Function's backward of one gradient, run without autograd, its results through `once`. torch's decorator of this name
    refuses a second backward only where the given gradient requires one itself."""

    def run(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            made = backward(ctx, d_out)
        return once(made, d_out) if torch.is_grad_enabled() else made

    return run
