"""The table of activations: f, g and their derivatives for NumPy and torch, parameters, and the name in cuda/activation.cuh.

    gated     H = [gate, up]    act = f(gate) * g(up), g(up) = up but for those that say otherwise
    ungated   H = pre           act = f(pre)

Gate and up are H's halves, gate 0, gate 1, ..., up 0, up 1, ... (Hugging Face's gate_up_proj). In the weights of some models
they alternate, gate 0, up 0, gate 1, up 1, ... (gpt-oss's); then they do in H, and ``alternating("swiglu")`` names that.

A new activation is a line of `_ROWS` here and, where f or g is new, a branch of gemm/cuda/activation.cuh; every product, both
backends, the twins, the tests and the fuzzer read this table. An activation is asked for by its name. One with parameters is
asked for by its name alone, which stands for the table's values, or by ``"clamped_swiglu(limit=7.0,alpha=1.702)"``.
"""

import math
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from blazeproto.runtime import checks

# --- Mathematics of either library ---------------------------------------------------------------------------------------


def _torch_silu(x: Any) -> Any:
    from torch.nn.functional import silu  # here: gemm's twins and kernels use this module without torch

    return silu(x)


def _torch_silu_slope(x: Any) -> Any:
    import torch

    if x.requires_grad or torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
        return _silu_slope(_TORCH, x)  # silu_backward has no derivative
    return torch.ops.aten.silu_backward(x.new_ones(()), x)


def _torch_gelu(x: Any, approximate: str = "none") -> Any:
    from torch.nn.functional import gelu

    return gelu(x, approximate=approximate)


_GELU_TANH, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715  # of GELU by tanh (Hendrycks and Gimpel 2016)
_erf = np.vectorize(math.erf, otypes=[float])


def _numpy_sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):  # of exp: the quotient is 0 then, as it should be
        return 1 / (1 + np.exp(-x))


def _numpy_silu(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _numpy_gelu_tanh(x: Any) -> Any:
    return x * _numpy_sigmoid(2 * _GELU_TANH * (x + _GELU_CUBE * x * x * x))


_NUMPY: SimpleNamespace = SimpleNamespace(
    sigmoid=_numpy_sigmoid,
    exp=np.exp,
    tanh=np.tanh,
    clip=np.clip,
    within=lambda x, low, high: (~((x < low) | (x > high))).astype(x.dtype),
    relu=lambda x: np.maximum(x, 0),
    above_zero=lambda x: (~(x <= 0)).astype(x.dtype),
    normal_cdf=lambda x: (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
    silu=_numpy_silu,
    silu_slope=lambda x: _silu_slope(_NUMPY, x),
    gelu_tanh=_numpy_gelu_tanh,
    gelu=lambda x: x * (0.5 * (1 + _erf(x / math.sqrt(2)))).astype(x.dtype),
)
_TORCH: SimpleNamespace = SimpleNamespace(
    sigmoid=lambda x: x.sigmoid(),
    exp=lambda x: x.exp(),
    tanh=lambda x: x.tanh(),
    clip=lambda x, low, high: x.clamp(low, high),
    within=lambda x, low, high: (~((x < low) | (x > high))).to(x.dtype),
    relu=lambda x: x.relu(),
    above_zero=lambda x: (~(x <= 0)).to(x.dtype),
    normal_cdf=lambda x: 0.5 * (1 + (x * math.sqrt(0.5)).erf()),
    silu=_torch_silu,
    silu_slope=_torch_silu_slope,
    gelu=_torch_gelu,
    gelu_tanh=lambda x: _torch_gelu(x, "tanh"),
)


def _silu_slope(m: Any, x: Any) -> Any:
    s = m.sigmoid(x)
    return s * (1 + x * (1 - s))


def _gelu_slope(m: Any, x: Any) -> Any:
    return m.normal_cdf(x) + x * m.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(m: Any, x: Any) -> Any:
    s = m.sigmoid(2 * _GELU_TANH * (x + _GELU_CUBE * x * x * x))  # (1 + tanh) / 2 is a sigmoid of twice as much
    return s + x * s * (1 - s) * (2 * _GELU_TANH) * (1 + 3 * _GELU_CUBE * x * x)


# --- The table -----------------------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """A number that an activation takes: finite in float32, the kernels' type."""

    name: str
    value: float  # in the table, the default
    above_zero: bool = False

    def __str__(self) -> str:
        return f"a finite {self.name}{' above 0' if self.above_zero else ''}"

    @property
    def fits(self) -> bool:
        """Whether the value is allowed."""
        return (_LEAST if self.above_zero else -_MOST) <= self.value <= _MOST


_LEAST, _MOST = (float(bound) for bound in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class GateUp(NamedTuple):
    """How gate and up lie side by side. apart: h (..., 2n) and n -> views of gate and up.  beside: a library, gate and up, each
    (..., n) -> h."""

    apart: Callable[[Any, int], tuple[Any, Any]]
    beside: Callable[[Any, Any, Any], Any]


LAYOUTS = {  # in H, and so in the rows of gate_up_proj and in its bias, by the names of cuda/layout.cuh
    "HALVES": GateUp(lambda h, n: (h[..., :n], h[..., n:]), lambda m, gate, up: m.concatenate((gate, up), -1)),
    "ALTERNATING": GateUp(
        lambda h, n: (h[..., 0::2], h[..., 1::2]),
        lambda m, gate, up: m.stack((gate, up), -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1]),
    ),
}


class Activation(NamedTuple):
    """One activation. f, g and their derivatives take a library's mathematics, an array of it, and the parameters' values:
    ``f(m, x, *values)``."""

    name: str
    cuda: str  # the name of its branches in cuda/activation.cuh
    f: Callable[..., Any]
    slope: Callable[..., Any]
    g: Callable[..., Any] | None = None  # None: g(up) = up
    g_slope: Callable[..., Any] | None = None
    parameters: tuple[Parameter, ...] = ()
    gated: bool = False
    layout: str = "HALVES"  # of `LAYOUTS`

    @property
    def halves(self) -> int:
        """Columns of H for each hidden unit: 2 with a gate, else 1."""
        return 2 if self.gated else 1

    @property
    def up_name(self) -> str:
        """Hugging Face's name of the up projection's weight."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def values(self) -> tuple[float, ...]:
        """The parameters' values, in the order in which f takes them."""
        return tuple(parameter.value for parameter in self.parameters)

    @property
    def macros(self) -> dict[str, int | str]:
        """The macros that select it in cuda/activation.cuh and cuda/layout.cuh."""
        return {
            "ACTIVATION": self.cuda,
            f"ACTIVATION_IS_{self.cuda}": 1,
            "GATED": int(self.gated),
            "PLAIN_UP": int(self.g is None),
            "GATE_UP": self.layout,
            **{f"ACTIVATION_{parameter.name.upper()}": f"{parameter.value!r}f" for parameter in self.parameters},
        }


_Function = tuple[str, Callable[..., Any], Callable[..., Any]]  # its name in CUDA, f, slope
_SILU: _Function = ("SILU", lambda m, x: m.silu(x), lambda m, x: m.silu_slope(x))
_GELU: _Function = ("GELU", lambda m, x: m.gelu(x), _gelu_slope)  # the exact one, with erf
_GELU_TANH_ROW: _Function = ("GELU_TANH", lambda m, x: m.gelu_tanh(x), _gelu_tanh_slope)
_RELU: _Function = ("RELU", lambda m, x: m.relu(x), lambda m, x: m.above_zero(x))


def _clamped_slope(m: Any, x: Any, limit: float, alpha: float) -> Any:
    c = m.clip(x, -math.inf, limit)
    s = m.sigmoid(alpha * c)
    return s * (1 + alpha * c * (1 - s)) * m.within(x, -math.inf, limit)


def _softcapped_slope(m: Any, x: Any, gate_cap: float, up_cap: float) -> Any:
    t, s = m.tanh(x / gate_cap), m.sigmoid(x)
    return s * (1 - t * t + gate_cap * t * (1 - s))


_ROWS = (
    Activation("swiglu", *_SILU, gated=True),
    Activation("geglu", *_GELU, gated=True),
    Activation("geglu_tanh", *_GELU_TANH_ROW, gated=True),
    Activation("reglu", *_RELU, gated=True),
    Activation(  # gpt-oss: c sigmoid(alpha c) (clamp(up, -limit, limit) + 1), where c = min(gate, limit)
        "clamped_swiglu",
        "CLAMPED_SWIGLU",
        lambda m, x, limit, alpha: m.clip(x, -math.inf, limit) * m.sigmoid(alpha * m.clip(x, -math.inf, limit)),
        _clamped_slope,
        lambda m, up, limit, alpha: m.clip(up, -limit, limit) + 1,
        lambda m, up, limit, alpha: m.within(up, -limit, limit),
        (Parameter("limit", 7.0, above_zero=True), Parameter("alpha", 1.702)),
        gated=True,
    ),
    Activation(  # DeepSeek-V4, GLM-5, HY-V4: silu(min(gate, limit)) clamp(up, -limit, limit)
        "limited_swiglu",
        "LIMITED_SWIGLU",
        lambda m, x, limit: m.silu(m.clip(x, -math.inf, limit)),
        lambda m, x, limit: _clamped_slope(m, x, limit, 1.0),
        lambda m, up, limit: m.clip(up, -limit, limit),
        lambda m, up, limit: m.within(up, -limit, limit),
        (Parameter("limit", 10.0, above_zero=True),),
        gated=True,
    ),
    Activation(  # Inkling: gate_cap tanh(gate / gate_cap) sigmoid(gate) up_cap tanh(up / up_cap)
        "softcapped_swiglu",
        "SOFTCAPPED_SWIGLU",
        lambda m, x, gate_cap, up_cap: m.tanh(x / gate_cap) * gate_cap * m.sigmoid(x),
        _softcapped_slope,
        lambda m, up, gate_cap, up_cap: m.tanh(up / up_cap) * up_cap,
        lambda m, up, gate_cap, up_cap: 1 - m.tanh(up / up_cap) ** 2,
        (Parameter("gate_cap", 4.0, above_zero=True), Parameter("up_cap", 25.0, above_zero=True)),
        gated=True,
    ),
    Activation("relu", *_RELU),
    Activation("relu2", "RELU2", lambda m, x: m.relu(x) * m.relu(x), lambda m, x: 2 * m.relu(x)),  # So et al. 2021
    Activation("silu", *_SILU),
    Activation("gelu", *_GELU),
    Activation("gelu_tanh", *_GELU_TANH_ROW),
)
_TABLE = {row.name: row for row in _ROWS if not row.parameters}


# --- Names ---------------------------------------------------------------------------------------------------------------


def _entry(row: Activation, values: Mapping[str, Any]) -> Activation:
    """The row with these parameters, as the table has it under the name that says them."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"{row.name}: expected a number as {key}, got {type(value).__name__}")
    parameters = tuple(p._replace(value=_float(values.get(p.name, p.value))) for p in row.parameters)
    if not all(parameter.fits for parameter in parameters):
        got = " and ".join(str(parameter.value) for parameter in parameters)
        raise ValueError(f"{row.name}: expected {' and '.join(map(str, parameters))}, of float32, got {got}")
    name = f"{row.name}({','.join(f'{p.name}={p.value!r}' for p in parameters)})"
    return _TABLE.setdefault(name, row._replace(name=name, parameters=parameters))


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond the largest float
        return math.inf


_PARAMETRISED = {row.name: row for row in _ROWS if row.parameters}
_TABLE.update({name: _entry(row, {}) for name, row in _PARAMETRISED.items()})


def with_parameters(name: str, **values: float) -> str:
    """The name of the table's activation ``name`` with these parameters, and the table's values of the others.

    TypeError unless all are numbers. ValueError for a name without such parameters, for a value that is not finite, in float32
    too, and for one that is not above 0 where it has to be.
    """
    row = _PARAMETRISED.get(name) if isinstance(name, str) else None
    if row is None or not values.keys() <= {parameter.name for parameter in row.parameters}:
        known = ", ".join(
            f"{each.name}({', '.join(p.name for p in each.parameters)})" for each in _PARAMETRISED.values()
        )
        raise ValueError(f"activation: expected parameters of {known}, got {name}({', '.join(values)})")
    return _entry(row, values).name


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702) -> str:
    """The name of gpt-oss's SwiGLU with these parameters: `with_parameters`, which says what it raises."""
    return with_parameters("clamped_swiglu", limit=limit, alpha=alpha)


def alternating(name: str) -> str:
    """The name of a gated activation whose gate and up alternate in H, and so in the rows of gate_up_proj and in its bias.

    ValueError for an activation that isn't there, or has no gate.
    """
    chosen = activation_named(name)
    if not chosen.gated:
        raise ValueError(f"activation: expected one with a gate to alternate with up, got {name!r}")
    if chosen.layout == "ALTERNATING":
        return chosen.name
    made = chosen._replace(name=f"alternating({chosen.name})", layout="ALTERNATING")
    return _TABLE.setdefault(made.name, made).name


def activation_named(name: str) -> Activation:
    """The activation of this name. ValueError for another, with the nearest name."""
    if isinstance(name, str) and name in _TABLE:
        return _TABLE[name]
    if isinstance(name, str) and (found := re.fullmatch(r"(\w+)\((.+)\)", name)):
        outer, inside = found.groups()
        if outer == "alternating":
            return _TABLE[alternating(inside)]
        if outer in _PARAMETRISED:
            return _entry(_PARAMETRISED[outer], _parsed(name, _PARAMETRISED[outer], inside))
        if outer in _TABLE:
            raise ValueError(f"activation: {outer} has no parameters, got {name!r}")
    known = ", ".join(map(repr, ACTIVATIONS))
    raise ValueError(f"activation: expected one of {known}, got {name!r}{checks.nearest(name, ACTIVATIONS)}")


def _parsed(name: str, row: Activation, inside: str) -> dict[str, float]:
    """The values in a name's brackets."""
    expected = [parameter.name for parameter in row.parameters]
    try:
        given = [(key.strip(), float(value)) for key, value in (pair.split("=") for pair in inside.split(","))]
    except ValueError:
        given = [("", math.nan)]
    values = dict(given)
    if len(values) < len(given) or not values.keys() <= set(expected):
        form = f"{row.name}({','.join(f'{key}=NUMBER' for key in expected)})"
        raise ValueError(f"activation: expected {form}, got {name!r}")
    return values


ACTIVATIONS = (
    *(row.name for row in _ROWS if row.gated),
    "alternating(clamped_swiglu)",  # gpt-oss
    *(row.name for row in _ROWS if not row.gated),
)
_TABLE["alternating(clamped_swiglu)"] = _TABLE[alternating("clamped_swiglu")]


# --- Forward and backward, of NumPy arrays and torch tensors ---------------------------------------------------------------


def gate_and_up(h: Any, activation: str) -> tuple[Any, Any]:
    """Views of h (..., G n): gate and up, each (..., n); without a gate h and None."""
    chosen = activation_named(activation)
    return LAYOUTS[chosen.layout].apart(h, h.shape[-1] // 2) if chosen.gated else (h, None)


def side_by_side(gate: Any, up: Any, activation: str) -> Any:
    """The inverse of `gate_and_up`: gate and up, each (..., n), side by side as (..., G n); without a gate, gate alone."""
    if up is None:
        return gate
    library: Any = np
    if not isinstance(gate, np.ndarray):
        import torch as library
    return LAYOUTS[activation_named(activation).layout].beside(library, gate, up)


def mathematics(array: Any) -> Any:
    """The functions that f, g and their derivatives take first: NumPy's for a NumPy array, else torch's."""
    return _NUMPY if isinstance(array, np.ndarray) else _TORCH


def _read(h: Any, activation: str) -> tuple[Any, ...]:
    """The activation, the mathematics of h's library, and gate and up."""
    return activation_named(activation), mathematics(h), *gate_and_up(h, activation)


def _factor(chosen: Activation, m: Any, up: Any) -> Any:
    return up if chosen.g is None else chosen.g(m, up, *chosen.values)


def activate(h: Any, activation: str) -> Any:
    """h (..., G n) -> act (..., n), in the dtype of ``h``: f(gate) * g(up) with a gate, else f(h)."""
    chosen, m, gate, up = _read(h, activation)
    act = chosen.f(m, gate, *chosen.values)
    return act if up is None else act * _factor(chosen, m, up)


def activate_backward(h: Any, d_act: Any, activation: str, stored: Callable[[Any], Any] = lambda values: values) -> Any:
    """From h (..., G n) and the gradient of act (..., n), the gradient of h.  stored: what each half becomes before both lie side
    by side."""
    chosen, m, gate, up = _read(h, activation)
    slope = chosen.slope(m, gate, *chosen.values)
    if up is None:
        return stored(d_act * slope)
    d_gate, d_up = d_act * _factor(chosen, m, up) * slope, d_act * chosen.f(m, gate, *chosen.values)
    d_up = d_up if chosen.g_slope is None else d_up * chosen.g_slope(m, up, *chosen.values)
    return side_by_side(stored(d_gate), stored(d_up), activation)
