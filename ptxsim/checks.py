"""Checks of arguments. Each error names the argument, what was expected and what came."""

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
