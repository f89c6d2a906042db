"""The options of the expert MLP, declared and checked here and nowhere else: `moe_mlp`, `MoE` and `grouped_experts` take a field
of `Options` each as a keyword, by the signature and the docstring that `takes_options` makes of the fields.

A new option is a field, and the place where it acts: before the operators, by ``options.NAME``; inside them and in a backend, by
the `Options` that `Options.decode` makes of the operator's string.
"""

from __future__ import annotations

import inspect
import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from textwrap import indent
from typing import Any, TypeVar

import torch

from blazeproto.activations import activation_named
from blazeproto.autograd.policy import SavePolicy
from blazeproto.gemm.recipe import Recipe, name_of
from blazeproto.runtime.arch import ARCHES
from blazeproto.runtime.checks import boolean, integer, nearest

Check = Callable[[str, Any], object]
Documented = TypeVar("Documented", bound=Callable[..., Any])


def _one_of(allowed: tuple[str, ...], name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in allowed:  # an array is equal to no name
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def _size(least: int, name: str, value: Any) -> None:
    if value is not None and not torch.compiler.is_compiling():  # to which it may be a symbol
        integer(name, value, least=least)


def _about(check: Check, doc: str, *, in_operators: bool = True) -> dict[str, Any]:
    """in_operators: whether `encode` tells the operators. Sizes that a compiler may take for symbols act before them, and
    `call.How` has what a call's tensors decide too."""
    return {"check": check, "doc": inspect.cleandoc(doc), "in_operators": in_operators}


@dataclass(frozen=True)
class Options:
    """The options of a call of the expert MLP, the same for every call of a layer.

    keywords: those below.

    Raises TypeError or ValueError for a value that does not fit; the option is named, with what was expected and what came.
    """

    activation: str = field(
        default="swiglu",
        metadata=_about(
            lambda _, value: activation_named(value),
            'a name of `blazeproto.activations`: gated ("swiglu", ...) or without a gate ("relu", ...).',
        ),
    )
    save: SavePolicy | str = field(
        default=SavePolicy.MINIMAL,
        metadata=_about(
            partial(_one_of, tuple(policy.value for policy in SavePolicy)),
            """what is kept for backward, see `SavePolicy`. On the Hopper backend backward may overwrite H unless
        ``retain_graph=True``: with forward and backward as two CUDA graphs, replay backward exactly once per forward. What
        ``grad_fn`` holds is undefined afterwards.""",
            in_operators=False,
        ),
    )
    backend: str = field(
        default="auto",
        metadata=_about(
            partial(_one_of, ("auto", *ARCHES, "torch")),
            """"hopper" (bf16 on compute capability 9.0), "ampere" (bf16 on 8.0 or later, combine="gather"), "torch" (any
        device) or "auto", which picks.""",
        ),
    )
    combine: str = field(
        default="gather",
        metadata=_about(
            partial(_one_of, ("gather", "fused", "fused_both")),
            """"gather" is deterministic. "fused" sums experts inside the down product (no (T K, d) buffer in forward),
        "fused_both" dX too, inside the up projection's backward (none in backward either): with float32 atomics into a (T, d)
        buffer, in an order that varies, so that neither is deterministic to the bit. The torch backend treats all as
        "gather".""",
        ),
    )
    row_capacity: int | None = field(
        default=None,
        metadata=_about(
            partial(_size, 0),
            """R, the most rows that are computed, so that H has min(R, T K) of them; default: a row for every pair. Where
        more pairs have an expert, the rows from R on, the last in expert order, are left out as if they were not here.
        Chunks leave out the same pairs, but each has places for all of its own: there R bounds no memory.""",
            in_operators=False,
        ),
    )
    workspace_bytes: int | None = field(
        default=None,
        metadata=_about(
            partial(_size, 1),
            """bound on the bytes of transient buffers, as the Hopper backend has them; the torch backend, which gathers
        rows and keeps dH beside H, needs more. The layer then runs in chunks of tokens, with a
        dispatch each and float32 accumulators for the weight gradients. Needs a fixed K. On the Hopper backend a
        weight gradient may take a fifth of itself and of a chunk's dH or A' beside the bound.""",
            in_operators=False,
        ),
    )
    precision: str | Recipe = field(
        default="bf16",
        metadata=_about(
            lambda _, value: name_of(value),
            """what the products' operands are: "bf16", by which x's own dtype is meant, or "fp8" (e4m3 with scales), or
        "fp8_rollout" (a forward with vLLM's bits), or a `Recipe`, whose name it becomes. fp8 takes a gated activation whose
        halves lie apart, d_model a multiple of 16 and d_expert one of 128, contiguous weights and combine="gather", and
        refuses save="paper" and workspace_bytes. Low-rank factors are multiplied in bf16. fp8_rollout takes multiples of
        128, and weights stored as fp8 in blocks of 128 x 128 too, which it multiplies as they are.
        See docs/fp8.md and docs/rollout.md.""",
        ),
    )
    keep_transposed: bool = field(
        default=True,
        metadata=_about(
            boolean,
            """of quantized operands, whether forward quantizes a weight as it lies and its transpose in one pass, and leaves
        the transpose for backward, which takes a byte for each of a weight's elements, of all layers at once. False makes each
        just before its product: weights are read once more, and no copy outlives its product. So it is, too, where x needs no
        gradient. With save="recompute" none is left for backward.""",
            in_operators=False,
        ),
    )

    validate: bool = field(
        default=False,
        metadata=_about(
            boolean,
            """look at the experts' ids: ValueError for one outside [0, E), and where ids are (T, K) for one that a token names
        twice. Without it an id outside is "not here", as of ids that count from 1 the last. The host waits for the device at
        each forward: a CUDA-graph capture and torch.compile(fullgraph=True) raise, and without fullgraph the graph breaks.
        Padding of a ``mask`` and places for pairs that are not used have -1, which passes.""",
            in_operators=False,
        ),
    )

    def __post_init__(self) -> None:
        for name, check in _CHECKS:
            check(name, getattr(self, name))
        object.__setattr__(self, "precision", name_of(self.precision))

    def encode(self) -> str:
        """As operators take it, who know tensors, numbers and strings."""
        return "/".join([f"{getattr(self, name)}" for name in _IN_OPERATORS])

    @staticmethod
    @cache
    def decode(encoded: str) -> Options:
        """The options that `encode` encoded. Those that act before the operators have their defaults."""
        named = zip(_IN_OPERATORS, encoded.split("/"), strict=True)
        values: dict[str, Any] = {name: t if "str" in _TYPES[name] else literal_eval(t) for name, t in named}
        return Options(**values)

    def policy(self, *, trains_down: bool) -> str:
        """The save policy of a call. trains_down: whether a down weight or factor is trained, for which alone act is saved."""
        return "minimal" if self.save == SavePolicy.PAPER and not trains_down else f"{self.save}"

    @property
    def needs(self) -> tuple[str, ...]:
        """The extras that kernels must have for these options (`Arch.extras`)."""
        return ("fp8",) * (self.precision != "bf16") + ("fused",) * (self.combine != "gather")


_CHECKS = tuple((option.name, option.metadata["check"]) for option in fields(Options))
_IN_OPERATORS = tuple(option.name for option in fields(Options) if option.metadata["in_operators"])
_TYPES = {option.name: str(option.type) for option in fields(Options)}
OPTION_NAMES, DEFAULTS = tuple(_TYPES), Options()


def is_options(value: Any) -> bool:
    """Whether it is an `Options`. By its fields: after a reload of this module, one made before is of another class."""
    return not isinstance(value, type) and getattr(value, "__match_args__", None) == Options.__match_args__


def merged(function: str, options: Options | None, keywords: dict[str, Any]) -> Options:
    """``options`` with the ``keywords`` that `takes_options` gave a function of this name.

    TypeError for a keyword that is no option, with the nearest, and for options of another type; what `Options` raises.
    """
    options = DEFAULTS if options is None else options
    if not is_options(options):
        raise TypeError(f"options: expected an Options or None, got {type(options).__name__}")
    for name in keywords:
        if name not in OPTION_NAMES:
            raise TypeError(f"{name}: unknown keyword of {function}{nearest(name, _KEYWORDS_OF.get(function, []))}")
    return replace(options, **keywords) if keywords else options


_KEYWORDS_OF: dict[str, list[str]] = {}


def takes_options(*left_out: str, rest: str | None = None) -> Callable[[Documented], Documented]:
    """Decorates a function whose ``**keywords`` are options: its signature and its docstring name each of them.

    In the docstring they replace the line "keywords: ...". left_out: those that it refuses.  rest: what remains of its
    ``**keywords``, by name.
    """

    def decorate(function: Documented) -> Documented:
        signature = inspect.signature(function)
        *own, keywords = signature.parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        own += [
            inspect.Parameter(option.name, kind, default=option.default, annotation=option.type)
            for option in fields(Options)
            if option.name not in left_out
        ]
        own += [keywords.replace(name=rest)] if rest else []
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        function.__doc__ = documented(function.__doc__, *left_out)
        _KEYWORDS_OF[function.__name__] = [parameter.name for parameter in own]
        return function

    return decorate


def documented(doc: str | None, *left_out: str) -> str:
    """A docstring whose line "keywords: ..." is replaced by an entry for each of them."""
    entries = [
        f"{o.name}: {indent(o.metadata['doc'], ' ' * 4).strip()}" for o in fields(Options) if o.name not in left_out
    ]
    return re.sub(
        r"^( *)keywords: .*$", lambda found: indent("\n".join(entries), found[1]), doc or "", flags=re.MULTILINE
    )


def set_attributes(layer: type) -> None:
    """Each option as an attribute of a class whose objects have ``options``."""

    def attribute(name: str) -> property:
        def value(self: Any) -> Any:
            """An option of the experts, see `blazeproto.autograd.Options`."""
            return getattr(self.options, name)

        def set_value(self: Any, value: Any) -> None:
            self.options = replace(self.options, **{name: value})

        return property(value, set_value)

    for name in OPTION_NAMES:
        setattr(layer, name, attribute(name))


Options.__doc__ = documented(Options.__doc__)
