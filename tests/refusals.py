"""How a test says that bad input is refused: which argument is named, by which error."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

MESSAGE = re.compile(r"(?P<argument>.+?): expected (?P<expected>.+), got (?P<got>.+)", re.DOTALL)


class Refusal(NamedTuple):
    """The parts of "ARGUMENT: expected EXPECTED, got GOT"."""

    argument: str
    expected: str
    got: str


def refuses(call: Callable[[], object], argument: str, error: type[Exception] = ValueError) -> Refusal:
    """`call` raises `error`, whose message names `argument`, what it takes and what it got. Returns the message's parts."""
    with pytest.raises(error) as caught:
        call()
    found = MESSAGE.fullmatch(str(caught.value))
    assert found, f"expected 'NAME: expected ..., got ...', got {caught.value}"
    assert found["argument"] == argument, caught.value
    return Refusal(**found.groupdict())
