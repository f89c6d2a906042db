"""A benchmark's launches on the PTX machine, in the place of a GPU's."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.structures import Addresses, addresses
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.lab.target import Machine
from blazeproto.runtime.arrays import view
from blazeproto.runtime.target import device_of, launches_on


def seen(value: Any) -> Any:
    """A tensor of a CPU as launches take it."""
    if isinstance(value, Quantized):
        return Quantized(*map(seen, value))
    if not isinstance(value, Tensor):
        return value
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
    return view(value.view(bits).numpy())


def run_on_machine(monkeypatch: pytest.MonkeyPatch, bench: Any, *modules: ModuleType) -> Machine:
    """Lets the launches of ``modules`` run on a machine, which is returned, and ``bench.rows_of`` give its addresses."""
    machine = Machine()

    def launched(launch: Callable[..., None]) -> Callable[..., None]:
        def on_machine(*arguments: Any, **options: Any) -> None:
            with launches_on(machine):
                launch(*map(seen, arguments), **{name: seen(value) for name, value in options.items()})

        return on_machine

    def rows_of(dispatch: Dispatch) -> Addresses:
        with launches_on(machine):
            lists: Any = {name: seen(tensor) for name, tensor in dispatch.arrays.items() if tensor is not None}
            return addresses(replace(dispatch, **lists), device_of(machine), 0)

    monkeypatch.setattr(bench, "rows_of", rows_of)
    for module in modules:
        for name in [name for name in vars(module) if name.startswith("launch")]:
            monkeypatch.setattr(module, name, launched(getattr(module, name)))
    return machine
