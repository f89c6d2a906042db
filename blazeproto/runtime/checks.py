"""Checks of options. Each error names the argument, what was expected and what came."""

import difflib
import math
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from numbers import Real
from typing import Any


def require(holds: bool, name: str, expected: str, got: object) -> None:
    """ValueError unless it ``holds``. For checks outside of what runs often or is traced: the text is made in any case."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def integer(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int: an int, or a NumPy integer or the like, but no bool.

    TypeError for anything else, ValueError below ``least``.
    """
    # int() would cut off the fraction of an array without dimensions.
    array = getattr(value, "ndim", 0) or "int" not in str(getattr(value, "dtype", "int"))
    if isinstance(value, bool | type) or not hasattr(value, "__index__") or array:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    require(least is None or value >= least, name, f"at least {least}", value)
    return int(value)


def number(name: str, value: Any, *, least: float | None = None, above: float | None = None) -> None:
    """TypeError unless ``value`` is an int or a float, or NumPy's, but no bool; ValueError unless it is finite, at least
    ``least`` and above ``above``."""
    if isinstance(value, bool) or not issubclass(type(value), Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    bound = f", at least {least}" if least is not None else f" above {above}" if above is not None else ""
    fits = (least is None or value >= least) and (above is None or value > above)
    require(math.isfinite(value) and fits, name, f"a finite number{bound}", value)


def boolean(name: str, value: object) -> None:
    """TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def instance(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """TypeError unless ``value`` is a ``kind``; ``optional``: or None."""
    if not isinstance(value, kind) and not (optional and value is None):
        expected = f"{kind.__name__} or None" if optional else kind.__name__
        raise TypeError(f"{name}: expected a {expected}, got {type(value).__name__}")


def nearest(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'X'?"`` for the known name that is nearest to ``name``; empty where none is near."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError unless ``value`` is among the ``allowed`` names, with the nearest of them."""
    if not isinstance(value, str) or value not in allowed:  # an array is equal to no name
        raise ValueError(f"{name}: expected one of {tuple(allowed)}, got {value!r}{nearest(value, allowed)}")


def fixed(owner: object, name: str, value: object, sizes: Sequence[str]) -> None:
    """AttributeError where an attribute among ``sizes`` is set to another value or type: weights were made for it."""
    if name in sizes and ((had := vars(owner).get(name, value)) != value or type(had) is not type(value)):
        kind = type(owner).__name__
        raise AttributeError(
            f"{name}: expected {had!r}, which this {kind} was made for, got {value!r}; make another and load its state"
        )


@cache
def warn_once(message: str) -> None:
    """A warning of this text, once a process."""
    warnings.warn(message, stacklevel=3)
