"""How this package defines a torch operator: one `define`, one kind of object, for the experts and for the router."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from blazeproto.autograd.once import refuse
from blazeproto.gemm.tiles import ALIGNMENT
from blazeproto.stored.weight import StoredWeight

# Beside torch's own record of the operators, where modules that are executed again (importlib.reload) find them.
OPERATORS: dict[str, "Operator"] = vars(torch.ops.blazeproto).setdefault("operators", {})
CHOOSING: set[Any] = vars(torch.ops.blazeproto).setdefault("choosing", set())
"""Overloads whose results are a choice of experts or its dispatch: a checkpoint policy keeps them, so that nothing is chosen
twice."""

Gradients = Sequence[Tensor | None]


class Operator:
    """A torch operator as an object: calling it goes through torch's dispatcher.

    kernel: the Python function that it runs.  overload: what torch knows it as (``torch.ops.blazeproto.NAME.default``).
    library: as long as it lives, torch knows the operator.  differentiated: the kernel as an autograd node; None without one.
    """

    name: str
    kernel: Callable[..., Any]
    overload: Any
    library: torch.library.Library | None
    differentiated: Callable[..., Any] | None

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def entry(self, tensors: Sequence[Tensor | None], *, unobserved: bool) -> Callable[..., Any]:
        """How to call the operator on these tensors: past the dispatcher where they are `unobserved`, for there it only brings
        arguments from Python to Python."""
        if not unobserved:
            return self.overload
        wants_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        return self.differentiated if self.differentiated and wants_gradients else self.kernel

    def gradients(self, needs: Sequence[bool], *arguments: Any) -> Gradients:
        """The results of an operator ``(bool[] needs, ...) -> Tensor[]``, with None in place of what isn't needed."""
        made = iter(self.overload(needs, *arguments))
        return [next(made) if need else None for need in needs]


def define(
    schema: str,
    fake: Callable[..., Any],
    *,
    chooses: bool = False,
    setup: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator of the function below it, its kernel for every device. Under a name that exists already, it is the same
    object, with all of it made anew: so a module can be executed again, and who holds the operator runs what is new.

    fake: shapes and dtypes alone.  chooses: see `CHOOSING`.  setup, backward: its derivative, as
    ``torch.library.register_autograd`` takes them (``setup(ctx, inputs, output)``).  forward: kernel and setup in one,
    ``forward(ctx, *inputs)``, where that saves a frame. An operator that neither chooses nor has a derivative raises when
    one is asked for.  flops: its operations, of shapes, as `torch.utils.flop_counter` asks.

    Kernel and fake may return None for an output. An operator that returns a list leaves it out; any other returns a
    tensor of shape (0,) there.
    """
    name = schema.split("(", 1)[0]

    def decorate(kernel: Callable[..., Any]) -> Operator:
        torch_sees = _without_none if schema.endswith("-> Tensor[]") else _with_empty
        operator = OPERATORS.setdefault(name, Operator())
        operator.__class__, operator.library = Operator, None  # with which torch forgets an earlier one
        operator.library = library = torch.library.Library("blazeproto", "FRAGMENT")
        library.define(schema)
        library.impl(name, _on_its_gpu(torch_sees(kernel)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"blazeproto::{name}", torch_sees(fake), lib=library)
        operator.name, operator.kernel, operator.differentiated = name, kernel, None
        operator.overload = getattr(torch.ops.blazeproto, name).default
        if flops is not None:
            register_flop_formula(operator.overload.overloadpacket)(flops)
        if chooses:
            CHOOSING.add(operator.overload)
        if backward is not None and setup is not None:
            torch.library.register_autograd(f"blazeproto::{name}", backward, setup_context=setup, lib=library)
            operator.differentiated = _node(name, forward or _forward(kernel, setup), backward)
        elif not chooses:
            torch.library.register_autograd(f"blazeproto::{name}", refuse, lib=library)
        return operator

    return decorate


def _forward(kernel: Callable[..., Any], setup: Callable[..., None]) -> Callable[..., Any]:
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = kernel(*arguments)
        setup(ctx, arguments, output)
        return output

    return forward


def _node(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node: Any = type(name, (torch.autograd.Function,), functions)
    return node.apply


def _without_none(kernel: Callable[..., Gradients]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: [made for made in kernel(*arguments) if made is not None]


def _with_empty(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        made = kernel(*arguments)
        if not isinstance(made, tuple):
            return made
        return tuple(_first_tensor(arguments).new_empty(0) if one is None else one for one in made)

    return run


def _first_tensor(arguments: Sequence[Any]) -> Tensor:
    return next(argument for argument in arguments if isinstance(argument, Tensor))


def _on_its_gpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with the GPU of its first tensor as the current one, which launches go to."""

    def run(*arguments: Any) -> Any:
        with gpu_of(_first_tensor(arguments)):
            return kernel(*arguments)

    return run


def on_another_gpu(t: Tensor | None) -> bool:
    """Whether ``t`` lies on a GPU that is not the current one."""
    return t is not None and t.is_cuda and t.get_device() != torch.cuda.current_device()


def gpu_of(t: Tensor) -> AbstractContextManager[Any]:
    """The GPU of ``t`` as the current one, which launches go to."""
    return torch.cuda.device(t.device) if on_another_gpu(t) else nullcontext()


def cast(t: Any, dtype: torch.dtype) -> Any:
    """``t.to(dtype)``, which takes a microsecond even if the dtype is right already; None for None."""
    return t if t is None or t.dtype == dtype else t.to(dtype)


def ready(t: Tensor) -> Tensor:
    """``t`` as the kernels want it: contiguous and 16-byte aligned; a copy if it is not."""
    if t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous():
        return t
    return t.clone(memory_format=torch.contiguous_format)


def narrow_ids(experts: Tensor) -> Tensor:
    """Expert ids in int32. An id that int32 has no room for is no expert's either way."""
    return experts if experts.dtype == torch.int32 else experts.clamp(-1, torch.iinfo(torch.int32).max).int()


def dense(weight: Any) -> Tensor:
    """A weight (E, out, in), contiguous or a transposed view of what is; a copy if it is neither; a stored weight's values."""
    if isinstance(weight, StoredWeight):
        return weight.values
    return weight if weight.mT.is_contiguous() else weight.contiguous()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's dtype on devices of this type; None if it is off, or unknown, as on "meta"."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def as_experts_see(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """x in autocast's dtype where it is enabled, and scores in float32; float64 stays float64, which autocast leaves alone."""
    if x.dtype == torch.float64:
        return x, cast(scores, torch.float64)
    return cast(x, autocast_dtype(x.device.type) or x.dtype), cast(scores, torch.float32)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off inside."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


@define("rounded(Tensor gradient) -> Tensor", torch.empty_like)
def rounded(gradient: Tensor) -> Tensor:
    """A copy, which torch.compile can't fuse with what made the gradient."""
    return gradient.clone()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return rounded(gradient)


def gradient_rounded(x: Tensor) -> Tensor:
    """x; the gradients that its uses from here on give are summed and rounded to x's dtype before others are added.

    As eager mode adds them, two at a time. Compiled, three would be added at once and rounded once, to other bits.
    """
    return _Rounded.apply(x)  # type: ignore[no-untyped-call]
