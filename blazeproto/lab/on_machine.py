"""Calls of products (`lab.calls`) with torch tensors of a CPU, launched on a `blazeproto.lab.target.Machine`.

case = make_case(sizes, device="cpu")
machine = Machine(seed=1)
run(machine, CALLS["up_forward"], case, given, out)         # ``out`` holds what the kernels made of it
machine.reports[-1]                                         # races, steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blazeproto.blocksparse.topology import Topology
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import TileConfig, product
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.product import PACKAGE, Build
from blazeproto.lab.calls import Call, Case
from blazeproto.lab.target import Machine
from blazeproto.runtime.target import launches_on


def run(
    machine: Machine,
    call: Call,
    case: Case,
    given: Mapping[str, Tensor],
    out: Mapping[str, Tensor],
    config: TileConfig | None = None,
    build: Build = PACKAGE,
) -> None:
    """One call, into ``out``, by its kernels as ``build`` has them.

    case, given: the inputs, row arrays of all R rows, on a CPU.  out: as `Call.run` has it; a workspace that is not in it, the
    machine makes, as memory that nobody wrote.  config: tiles; default: those that a layer takes.
    Raises what `ptxsim.run` raises.
    """
    with product.alone({call.product: build}):
        launch(machine, call.entry.run, **call.arguments(case, given, out, config))


def launch(machine: Machine, function: Callable[..., Any], **arguments: Any) -> None:
    """``function(**arguments)`` of dispatch, gemm or router, of tensors of a CPU, which it reads and writes where they lie."""
    with launches_on(machine):
        function(**{name: hosted(value) for name, value in arguments.items()})


def hosted(value: Any) -> Any:
    """A tensor of a CPU as the NumPy array of its memory, bf16 as uint16; those in a record or a tuple too. Else itself."""
    if isinstance(value, Tensor):
        bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(value.dtype, value.dtype)
        return value.view(bits).numpy()
    if isinstance(value, Quantized):
        return Quantized(*map(hosted, value))
    if isinstance(value, tuple):
        return tuple(map(hosted, value))
    if isinstance(value, Dispatch | Topology):
        return replace(value, **{name: hosted(part) for name, part in vars(value).items() if isinstance(part, Tensor)})
    return value
