"""The table of activations: f and f' for NumPy and torch, the name in cuda/activation.cuh, and whether there is a gate.

    gated     H = [gate, up]    act = f(gate) * g(up), g(up) = up but for clamped_swiglu
    ungated   H = pre           act = f(pre)

Gate and up are H's halves, gate 0, gate 1, ..., up 0, up 1, ... (Hugging Face's gate_up_proj). In the weights of some models
they alternate, gate 0, up 0, gate 1, up 1, ... (gpt-oss's); then they do in H, and ``alternating("swiglu")`` names that.

A new activation is a line of `_TABLE` here and a branch of ``nonlinearity`` in gemm/cuda/activation.cuh; every product, both
backends, the twins, the tests and the fuzzer read this table. An activation is asked for by its name, one with parameters by
what its function here returns: ``activation=clamped_swiglu(limit=7.0, alpha=1.702)``.
"""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from blazeproto.runtime import checks

# --- Mathematics of either library ---------------------------------------------------------------------------------------


def _torch_silu(x: Any) -> Any:
    from torch.nn.functional import silu  # here: gemm's twins and kernels use this module without torch

    return silu(x)


def _torch_gelu(x: Any) -> Any:
    from torch.nn.functional import gelu

    return gelu(x)


_erf = np.vectorize(math.erf, otypes=[float])


def _numpy_sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):  # of exp: the quotient is 0 then, as it should be
        return 1 / (1 + np.exp(-x))


def _numpy_silu(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


_NUMPY = SimpleNamespace(
    sigmoid=_numpy_sigmoid,
    exp=np.exp,
    clip=np.clip,
    within=lambda x, low, high: (~((x < low) | (x > high))).astype(x.dtype),
    relu=lambda x: np.maximum(x, 0),
    above_zero=lambda x: (~(x <= 0)).astype(x.dtype),
    normal_cdf=lambda x: (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
    silu=_numpy_silu,
    gelu=lambda x: x * (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
)
_TORCH = SimpleNamespace(
    sigmoid=lambda x: x.sigmoid(),
    exp=lambda x: x.exp(),
    clip=lambda x, low, high: x.clamp(low, high),
    within=lambda x, low, high: (~((x < low) | (x > high))).to(x.dtype),
    relu=lambda x: x.relu(),
    above_zero=lambda x: (~(x <= 0)).to(x.dtype),
    normal_cdf=lambda x: 0.5 * (1 + (x * math.sqrt(0.5)).erf()),
    silu=_torch_silu,
    gelu=_torch_gelu,
)


def _silu_slope(m: Any, x: Any) -> Any:
    s = m.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_slope(m: Any, x: Any) -> Any:
    return m.normal_cdf(x) + x * m.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# --- The table -----------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """One activation. f, g and their derivatives take a library's mathematics and an array of it: ``f(m, x)``."""

    name: str
    gated: bool
    f: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], Any]
    g: Callable[[Any, Any], Any] = lambda m, up: up
    g_slope: Callable[[Any, Any], Any] | None = None  # None: 1
    kind: str = ""  # its name in cuda/activation.cuh, where that isn't its own
    parameters: tuple[tuple[str, float], ...] = ()
    alternating: bool = False  # how gate and up lie in H: cuda/layout.cuh

    @property
    def halves(self) -> int:
        """Columns of H for each hidden unit: 2 with a gate, else 1."""
        return 2 if self.gated else 1

    @property
    def macros(self) -> dict[str, int | str]:
        """What chooses it in cuda/activation.cuh."""
        values = {f"ACTIVATION_{name.upper()}": f"{value!r}f" for name, value in self.parameters}
        gate_up = "ALTERNATING" if self.alternating else "HALVES"
        return {"ACTIVATION": self.kind or self.name.upper(), "GATE_UP": gate_up, **values}


_SILU: Any = (lambda m, x: m.silu(x), _silu_slope)
_GELU: Any = (lambda m, x: m.gelu(x), _gelu_slope)  # the exact one, with erf
_RELU: Any = (lambda m, x: m.relu(x), lambda m, x: m.above_zero(x))
_RELU2: Any = (
    lambda m, x: m.relu(x) * m.relu(x),
    lambda m, x: 2 * m.relu(x),
)  # squared ReLU: Nemotron-H, So et al. 2021

_TABLE = {
    entry.name: entry
    for entry in (
        Activation("swiglu", True, *_SILU),
        Activation("geglu", True, *_GELU),
        Activation("relu", False, *_RELU),
        Activation("relu2", False, *_RELU2),
        Activation("silu", False, *_SILU),
        Activation("gelu", False, *_GELU),
    )
}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"clamped_swiglu: expected a number as {name}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:  # an int beyond the largest float
        return math.inf


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702) -> str:
    """The name of gpt-oss's SwiGLU with these parameters: act = c sigmoid(alpha c) (clamp(up, -limit, limit) + 1), where
    c = min(gate, limit).

    TypeError unless both are numbers. ValueError unless limit is above 0 and both are finite, in float32 too, as the kernels
    have them.
    """
    limit, alpha = _number("limit", limit), _number("alpha", alpha)
    least, most = (float(bound) for bound in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    if not (least <= limit <= most and abs(alpha) <= most):
        raise ValueError(
            f"clamped_swiglu: expected a finite limit above 0 and a finite alpha, of float32, got {limit} and {alpha}"
        )

    def slope(m: Any, x: Any) -> Any:
        c = m.clip(x, -math.inf, limit)
        s = m.sigmoid(alpha * c)
        return s * (1 + alpha * c * (1 - s)) * m.within(x, -math.inf, limit)

    name = f"clamped_swiglu(limit={limit!r},alpha={alpha!r})"
    made = Activation(
        name,
        True,
        lambda m, x: m.clip(x, -math.inf, limit) * m.sigmoid(alpha * m.clip(x, -math.inf, limit)),
        slope,
        lambda m, up: m.clip(up, -limit, limit) + 1,
        lambda m, up: m.within(up, -limit, limit),
        "CLAMPED_SWIGLU",
        (("limit", limit), ("alpha", alpha)),
    )
    return _TABLE.setdefault(name, made).name


_TABLE["clamped_swiglu"] = _TABLE[clamped_swiglu()]  # gpt-oss's parameters


def alternating(name: str) -> str:
    """The name of a gated activation whose gate and up alternate in H, and so in the rows of gate_up_proj and in its bias.

    ValueError for an activation that isn't there, or has no gate.
    """
    chosen = activation_named(name)
    if not chosen.gated:
        raise ValueError(f"activation: expected one with a gate to alternate with up, got {name!r}")
    if chosen.alternating:
        return chosen.name
    made = chosen._replace(
        name=f"alternating({chosen.name})", kind=chosen.kind or chosen.name.upper(), alternating=True
    )
    return _TABLE.setdefault(made.name, made).name


def activation_named(name: str) -> Activation:
    """The activation of this name. ValueError for another, with the nearest that there is."""
    if isinstance(name, str) and name in _TABLE:
        return _TABLE[name]
    if isinstance(name, str) and (inner := re.fullmatch(r"alternating\((.+)\)", name)):
        return _TABLE[alternating(inner[1])]
    if isinstance(name, str) and (found := re.fullmatch(r"clamped_swiglu\(limit=(.+),\s*alpha=(.+)\)", name)):
        try:
            limit, alpha = map(float, found.groups())
        except ValueError:
            expected = "clamped_swiglu(limit=NUMBER,alpha=NUMBER)"
            raise ValueError(f"activation: expected {expected}, got {name!r}") from None
        return _TABLE[clamped_swiglu(limit, alpha)]
    known = ", ".join(map(repr, ACTIVATIONS))
    raise ValueError(f"activation: expected one of {known}, got {name!r}{checks.nearest(name, ACTIVATIONS)}")


_TABLE["alternating(clamped_swiglu)"] = _TABLE[alternating("clamped_swiglu")]  # gpt-oss
ACTIVATIONS = (
    *("swiglu", "geglu", "clamped_swiglu", "alternating(clamped_swiglu)"),
    *(name for name, entry in _TABLE.items() if not entry.gated),
)


# --- Forward and backward, of NumPy arrays and torch tensors ---------------------------------------------------------------


def gate_and_up(h: Any, activation: str) -> tuple[Any, Any]:
    """Views of h (..., G n): gate and up, each (..., n); without a gate h and None."""
    chosen, n = activation_named(activation), h.shape[-1] // 2
    if not chosen.gated:
        return h, None
    return (h[..., 0::2], h[..., 1::2]) if chosen.alternating else (h[..., :n], h[..., n:])


def side_by_side(gate: Any, up: Any, activation: str) -> Any:
    """What `gate_and_up` takes apart: (..., G n) of gate and up, each (..., n); of gate alone without a gate."""
    if up is None:
        return gate
    library: Any = np
    if not isinstance(gate, np.ndarray):
        import torch as library
    if activation_named(activation).alternating:
        return library.stack((gate, up), -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return library.concatenate((gate, up), -1)


def _read(h: Any, activation: str) -> tuple[Any, ...]:
    """The activation, the mathematics of h's library, and gate and up."""
    return activation_named(activation), _NUMPY if isinstance(h, np.ndarray) else _TORCH, *gate_and_up(h, activation)


def activate(h: Any, activation: str) -> Any:
    """h (..., G n) -> act (..., n), in the dtype of ``h``: f(gate) * g(up) where there is a gate, else f(h)."""
    chosen, m, gate, up = _read(h, activation)
    act = chosen.f(m, gate)
    return act if up is None else act * chosen.g(m, up)


def activate_backward(h: Any, d_act: Any, activation: str) -> Any:
    """From h (..., G n) and the gradient of act (..., n), the gradient of h."""
    chosen, m, gate, up = _read(h, activation)
    if up is None:
        return d_act * chosen.slope(m, gate)
    d_gate, d_up = d_act * chosen.g(m, up) * chosen.slope(m, gate), d_act * chosen.f(m, gate)
    return side_by_side(d_gate, d_up if chosen.g_slope is None else d_up * chosen.g_slope(m, up), activation)
