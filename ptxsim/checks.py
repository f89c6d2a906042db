"""Checks of arguments. Each error names the argument, what was expected and what came."""

from typing import Any


def expect(name: str, right: object, expected: str, got: object, error: type[Exception] = ValueError) -> None:
    """The ``error`` that an argument of this name gets, unless it is ``right``."""
    if not right:
        raise error(f"{name}: expected {expected}, got {got}")


def integer(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as an int: an int, or a NumPy integer or the like, but no bool.

    TypeError for anything else, ValueError below ``least``.
    """
    expect(
        name,
        hasattr(value, "__index__")
        and not isinstance(value, bool | type)
        and not getattr(value, "ndim", False)
        and "int" in str(getattr(value, "dtype", "int")),  # int() would cut off a fraction
        "an int",
        type(value).__name__,
        TypeError,
    )
    expect(name, least is None or value >= least, f"at least {least}", value)
    return int(value)
