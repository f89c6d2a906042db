"""The experts' one autograd node: MoEBlaze's Algorithm 1, whose lines are numbered on the right. ``mlp.py`` draws it.

    X, W_1 and W_2 (up_proj), W_3 (down_proj), A and B (h), dA and dB (dh), Y_swi (act), Y_out (out) are the paper's; S are the
    router's scores, A' is S Y_swi; xa, dh_b and low are rows that low-rank factors made

Tokens come in chunks (`chunks.py`); a whole batch is one chunk. A step (`steps.Steps`) is a backend's products for a chunk.

Memory: a tensor is freed (``del``) right below the last line that reads it, before the next step allocates; what
a step makes for itself, copies of weights and rows of the tokens' width, is gone when it returns. So H is freed before dX is
made, or dH lies over it where nobody else can see H. In fp8 dW_3 is last, so that dH is freed before its transposed operands
are made; and dH and A' are freed once they are transposed.

A compiler frees likewise, for it sees each step of a whole batch's backward as an operator of its own (`Operators`). Several
chunks run in one operator, which sums their weight gradients in float32, in order; so does a batch whose rows an exchange
brings, which is to bring them as often as on other ranks.

For a frozen tensor no gradient is made, nor what only that gradient would read, unless a kernel makes it along with something
else.
"""

from collections.abc import Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from blazeproto.autograd.call import (
    FIELDS,
    SCHEMA,
    ExpertsCall,
    Parameters,
    first,
    load,
    pack,
    store,
    tensors_of,
    unpack,
)
from blazeproto.autograd.chunks import WHOLE, take
from blazeproto.autograd.once import edge, once
from blazeproto.autograd.operators import cast, define
from blazeproto.autograd.policy import Saved, places
from blazeproto.autograd.private import graph_is_kept, hooks_see_saved_tensors, release_saved_tensors, unobserved
from blazeproto.autograd.ranks import EXCHANGES
from blazeproto.autograd.records import new_rows
from blazeproto.autograd.steps import MAKES, backward_flops, forward_flops, steps_of, wanted


def forward(ctx: Any, *packed: Any) -> tuple[Tensor | None, ...]:
    """Procedure FusedForward: out (T, d), and `Saved`. ctx: the autograd node, which keeps them; None without one."""
    call = unpack(packed)  # 2: X, W_1, W_2, W_3
    saved, out = places(call), None  # 11: A, B, Y_swi
    for steps in steps_of(call):
        x = steps.load(call.p.x, call.recipe.x, sends=True)  # 4: Load X
        h, act, xa = steps.up(x, saved)  # 5-9: A and B, Y_swi
        del x, h, xa
        out = steps.down(act, out, saved)  # 10: Y_out
        del act
    _keep(ctx, call, saved)  # 11-12: Store A, B, Y_swi
    return out, *saved  # 13: Return Y_out


def backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Procedure FusedBackward: a gradient for each argument of forward. ctx: the autograd node, or a `Batch` in an operator."""
    batch = ctx if isinstance(ctx, Batch) else _opened(ctx, d_out)  # 16: dY_out, W_1, W_2, W_3
    for steps in batch.chunks(d_out):
        saved, last = steps.held.pop(), steps.call.quantized and steps.needs.down_proj  # 22: Load A, B
        dh, a_scaled, d_scores, xa, *low = steps.down_backward(d_out, saved)  # 20-28, 4-9: dA, dB, with H again
        dh, a_scaled = [dh], [a_scaled]  # 18, 29: lists, from which dW_1, dW_2 and dW_3 take them
        up_t = saved.up_t  # 30: W_1^T and W_2^T, where they are quantized
        del saved
        if not last:
            d_down = steps.down_gradients(d_out, a_scaled, *low)  # 18: dW_3
            del a_scaled, low
        dx, dh_b = steps.up_backward(dh[0], up_t)  # 30: dX
        del up_t
        d_up = steps.up_gradients(dh, dh_b, xa)  # 29: dW_1, dW_2
        del dh, dh_b, xa
        if last:
            d_down = steps.down_gradients(d_out, a_scaled, *low)  # 18: dW_3
            del a_scaled, low
        batch.made = Parameters._make((dx, *d_up, *d_down, d_scores, None))  # 29-30: their sums
    return batch.returned()  # 31: Return


class Batch:
    """A backward of all chunks, and the gradients that it has made."""

    def __init__(
        self, call: ExpertsCall, needs: Any, saved: Saved, *, observed: bool, overwrite_h: bool, of: Any = ()
    ) -> None:
        """observed: whether somebody is to be told of operators.  of: as of `once`, where a second backward may come."""
        self.call, self.needs, self.held, self.observed, self.overwrite_h = call, needs, [saved], observed, overwrite_h
        self.made, self.whole, self.of = _NOTHING, call.how.chunk_tokens == WHOLE, of

    def chunks(self, d_out: Tensor | None) -> Iterator[Any]:
        """The steps of each, with what was saved for it in ``held``. None for d_out: there is no gradient."""
        call, needs = self.call, self.needs
        if d_out is None:
            return
        if call.p.up_rest is not None:
            needs = needs._replace(up_proj=needs.up_proj or needs.up_rest, up_rest=False)
        if not self.observed:
            sums = None if self.whole else self._sums(torch.promote_types(d_out.dtype, torch.float32))
            for steps in steps_of(call, needs, sums, overwrite_h=self.overwrite_h):
                rows = steps.chunk.rows
                steps.held = self.held if self.whole else [Saved(*(take(t, rows) for t in self.held[0]))]
                yield steps
            self.made = sums or self.made
        elif self.whole and not call.how.exchange:
            yield Operators(call, needs, self.held)
        else:
            self.made = Parameters(*Operators(call, needs, self.held).run("backward", d_out, *self.held.pop()))

    def returned(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in its parameter's dtype, and None for what has none."""
        d_up, made = self.made.up_proj, self.made
        if self.call.p.up_rest is not None and d_up is not None:
            halves = zip(d_up.chunk(2, 1), (self.needs.up_proj, self.needs.up_rest), strict=True)
            gate, rest = (half if need else None for half, need in halves)
            made = made._replace(up_proj=gate, up_rest=rest)
        of = zip(made, self.call.p, strict=True)
        gradients = *[None if t is None else cast(t, like.dtype) for t, like in of], *_NO_MORE
        return once(gradients, self.of) if self.of else gradients

    def _sums(self, wide: torch.dtype) -> Parameters:
        """Where chunks leave gradients: a token's is one chunk's, a weight's the sum of all."""
        zeros = Parameters(*(partial(torch.zeros_like, dtype=wide) for _ in self.needs))
        new = zip(zeros._replace(x=torch.empty_like, scores=torch.empty_like), self.call.p, self.needs, strict=True)
        return Parameters(*(make(t) if need else None for make, t, need in new))


# ---- as torch sees it --------------------------------------------------------------------------------------------

_NOTHING = Parameters(*(None for _ in Parameters._fields))
_NO_MORE = tuple(None for name in FIELDS if name not in Parameters._fields)


def _keep(ctx: Any, call: ExpertsCall, saved: Saved) -> None:
    """In the node of a call past the dispatcher. alone: whether only the node can hold what is saved."""
    if ctx is None:
        return
    ctx.alone = not hooks_see_saved_tensors()
    ctx.mark_non_differentiable(*[t for t in saved if t is not None])
    _save(ctx, call, saved)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *saved = output
    ctx.alone = False
    ctx.mark_non_differentiable(*saved)
    # For what is not saved the dispatcher has tensors of shape (0,).
    _save(ctx, unpack(inputs), Saved(*(t if t.dim() > 1 else None for t in saved)))


def _save(ctx: Any, call: ExpertsCall, saved: Saved) -> None:
    needs = _needs(ctx)
    if saved.h is not None and not (needs.up_proj or needs.up_a or needs.up_rest):  # nothing else reads X
        ctx.of_x = edge(call.p.x) if needs.x else None
        call = call._replace(p=call.p._replace(x=None))
    ctx.exchange = EXCHANGES.get(call.how.exchange)  # lives as long as the node
    ctx.set_materialize_grads(False)  # or autograd would make zeros of their sizes
    store(ctx, call, saved)


def _needs(ctx: Any) -> Any:
    return first(Parameters, ctx.needs_input_grad)


def _opened(ctx: Any, d_out: Tensor | None) -> Batch:
    """The backward of an autograd node."""
    call, saved = load(ctx, d_out)
    of = (d_out, getattr(ctx, "of_x", None)) if torch.is_grad_enabled() else ()  # by create_graph=True
    direct = not of and unobserved((d_out, *tensors_of(call), *saved))
    # dH may lie over H where only this node can have seen H, and no other backward will ask for it.
    overwrite_h = direct and ctx.alone and not graph_is_kept()
    release_saved_tensors(ctx)  # should this backward fail halfway, there may be no H for another
    return Batch(call, _needs(ctx), saved, observed=not direct, overwrite_h=overwrite_h, of=of)


def _experts_fake(*packed: Any) -> tuple[Tensor | None, ...]:
    call = unpack(packed)
    return torch.empty_like(call.p.x), *places(call)


experts = define(
    f"moe_experts({SCHEMA}) -> (Tensor out, {', '.join(f'Tensor {name}' for name in Saved._fields)})",
    _experts_fake,
    setup=_setup,
    backward=backward,
    forward=forward,
    flops=forward_flops,
)(partial(forward, None))
"""A packed `ExpertsCall` -> out (T, d), and `Saved`."""


class Operators:
    """The steps of a backward as calls of the operator `step`, for a compiler, a profiler or a mode to see."""

    def __init__(self, call: ExpertsCall, needs: Parameters, held: list[Saved]) -> None:
        self.call, self.needs, self.held = call, needs, held

    def down_backward(self, d_out: Tensor, saved: Saved) -> tuple[Any, ...]:
        self.call = self.call.joined() if saved.h is None else self.call
        dh, a_scaled, d_scores, xa, *low = self.run("down_backward", d_out, *saved)
        return dh, a_scaled, d_scores, saved.xa if xa is None else xa, *low

    def up_backward(self, *given: Any) -> list[Any]:
        self.call = self.call.joined()
        return self.run("up_backward", *given)

    def run(self, name: str, *given: Any) -> list[Any]:
        """The tensors that a step makes, None for each that is not needed."""
        needs, wants = [bool(need) for need in self.needs], wanted(name, self.call, self.needs)
        given = tuple(t.pop() if isinstance(t, list) else t for t in given)
        made = iter(step(name, needs, given, *pack(self.call)) if any(wants) else ())
        return [next(made) if want else None for want in wants]

    down_gradients, up_gradients = partialmethod(run, "down_gradients"), partialmethod(run, "up_gradients")


def _step_fake(name: str, needs: Sequence[bool], given: Sequence[Tensor | None], *packed: Any) -> list[Tensor]:
    call = unpack(packed)
    p, num_rows = call.p, call.dispatch.expert_pair_indices.shape[0]
    widths = {"dh": call.up_width, "a_scaled": p.down_proj.shape[2]}
    for names, factor in ((("xa", "dh_b"), p.up_a), (("d_out_b", "act_a"), p.down_a)):
        widths |= dict.fromkeys(names, 0 if factor is None else factor.shape[1])
    wants = zip(MAKES[name], wanted(name, call, Parameters(*needs)), strict=True)
    makers: Any = {name: partial(p.x.new_empty, num_rows, width) for name, width in widths.items()}
    if call.quantized:
        makers |= {name: partial(new_rows, p.x, num_rows, widths[name]) for name in ("dh", "a_scaled")}
    return [makers[made]() if made in makers else torch.empty_like(getattr(p, made)) for made, want in wants if want]


@define(
    f"moe_backward(str step, bool[] needs, Tensor?[] given, {SCHEMA}) -> Tensor[]", _step_fake, flops=backward_flops
)
def step(name: str, needs: Sequence[bool], given: Sequence[Any], *packed: Any) -> list[Tensor | None]:
    """A step of `Steps`, or ``backward``, all of them in chunks.  needs: `Parameters`.  given: the step's tensors, `Saved` one
    by one.  -> what is `wanted` of what it `MAKES`."""
    call, of_needs, (gradient, *rest) = unpack(packed), Parameters(*needs), given
    made: Any
    if name == "backward":
        made = backward(Batch(call, of_needs, Saved(*rest), observed=False, overwrite_h=False), gradient)
    else:
        run = getattr(next(steps_of(call, of_needs)), name)
        made = run(gradient, Saved(*rest)) if name == "down_backward" else run(gradient, *rest)
    return [t if want else None for t, want in zip(made, wanted(name, call, of_needs), strict=False)]
