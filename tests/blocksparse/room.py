"""What the tests of the room share: dispatches, launches on the machine, and bf16."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from routings import make_routing, make_varying

from blazeproto.dispatch import Dispatch, build_dispatch, build_dispatch_varying
from blazeproto.lab.target import Machine
from blazeproto.runtime.rounding import bfloat16_bits, from_bfloat16_bits
from blazeproto.runtime.target import launches_on


def dispatch_of(name: str) -> Dispatch:
    """Four experts in all but one."""
    if name == "varying":
        return build_dispatch_varying(*make_varying(70, 4), 4)
    if name == "limited":
        return build_dispatch(make_routing("random", 80, 4, 2), 4, row_capacity=140)
    if name == "one expert":
        return build_dispatch(np.zeros((130, 1), np.int32), 1)
    kind, num_tokens = {
        "uniform": ("random", 64),
        "skewed": ("zipf", 90),
        "busy": ("one_expert_busy", 140),
        "empty experts": ("same", 65),
        "sentinels": ("sentinels", 90),
        "nobody": ("nobody_here", 5),
        "no tokens": ("random", 0),
    }[name]
    return build_dispatch(make_routing(kind, num_tokens, 4, 2), 4)


DISPATCHES = (
    "uniform",
    "skewed",
    "busy",
    "empty experts",
    "sentinels",
    "nobody",
    "no tokens",
    "one expert",
    "varying",
    "limited",
)


def some(names: Sequence[str], *left: str) -> list[Any]:
    """``names`` as parameters, of which the full set alone has the ``left``."""
    return [pytest.param(name, marks=pytest.mark.full) if name in left else name for name in names]


@contextmanager
def on_machine(multiprocessors: int = 2) -> Iterator[Machine]:
    """Fails where a race is reported."""
    machine = Machine(multiprocessors)
    with launches_on(machine):
        yield machine
    assert not [str(race) for report in machine.reports for race in report.races]


def bf16(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers that bf16 has: as uint16, which kernels take, and as fp32."""
    bits = bfloat16_bits(rng.standard_normal(shape).astype(np.float32))
    return bits, from_bfloat16_bits(bits)


def same_record(made: Any, right: Any) -> None:
    assert type(made) is type(right)
    for name, values in vars(right).items():
        np.testing.assert_array_equal(getattr(made, name), values, err_msg=name)
