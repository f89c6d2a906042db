"""Checks of options. Each error names the argument, what was expected and what came."""

import difflib
from collections.abc import Sequence
from typing import Any


def integer(name: str, value: Any, least: int) -> int:
    """``value`` as an int: an int, or a NumPy integer or the like, but no bool.

    TypeError for anything else, ValueError below ``least``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """ValueError unless ``value`` is among the ``allowed`` names, with the nearest of them."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value).lower(), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: expected one of {tuple(allowed)}, got {value!r}{hint}")
