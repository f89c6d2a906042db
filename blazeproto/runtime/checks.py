"""Checks of options. Each error names the argument, what was expected and what came."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def integer(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int: an int, or a NumPy integer or the like, but no bool.

    TypeError for anything else, ValueError below ``least``.
    """
    if isinstance(value, bool | type) or not hasattr(value, "__index__") or getattr(value, "ndim", False):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError unless ``value`` is among the ``allowed`` names; it names the nearest of them."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {tuple(allowed)}, got {value!r}{nearest(value, allowed)}")


def nearest(value: object, allowed: Iterable[str]) -> str:
    """For the end of an error: "; did you mean 'x'?", or nothing where no ``allowed`` name is near."""
    near = difflib.get_close_matches(str(value).lower(), list(allowed), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
