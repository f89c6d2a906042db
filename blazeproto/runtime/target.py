"""Launches go to the GPU's driver, to Numba's simulator, or to a target that a caller gives, such as an interpreter of PTX.

    with launches_on(machine):
        h, act = gemm.up_forward(x, up_proj, dispatch)    # NumPy arrays; `Target.launch` is called, and no driver

Inside, NumPy arrays take the place of device arrays: the public functions of dispatch, gemm and router check them, make their
outputs and launch their kernels as on a GPU, and compute no twin. bf16 is uint16, or ml_dtypes' bfloat16. A target has one
stream, 0, on which a launch is done when it returns.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, Protocol

from blazeproto.runtime import checks

FIRST_DEVICE = 1000  # no host has so many GPUs


@cache
def in_simulator() -> bool:
    """Whether this process has Numba's simulator in its compiler's place."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


def simulated() -> bool:
    """Whether launches from NumPy arrays run in Numba's simulator: in its process, where they go to no target."""
    return in_simulator() and _chosen.get() is None


class Target(Protocol):
    """Takes launches in the driver's place.

    multiprocessors: their number, at least 1; a persistent kernel has at most one CTA for each.
    """

    multiprocessors: int

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new NumPy array that nobody has written. dtype: NumPy's, or its name."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new NumPy array of zeros, which the target keeps."""

    def address(self, array: Any) -> int:
        """The address, below 2**63, of the first element of a NumPy array: the caller's, one made here, or a part of either. It
        is the same whenever it is asked for, and a part lies within its whole."""

    def clear(self, address: int, size: int) -> None:
        """Zero ``size`` bytes at ``address``."""

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        block: int,
        shared_bytes: int,
        parameters: bytes,
        boxes: Mapping[int, tuple[Any, int]],
        cluster: int,
    ) -> None:
        """One launch.

        kernel: a `blazeproto.gemm.compile.Kernel` or a `blazeproto.runtime.numba_kernel.NumbaKernel`.
        grid: CTAs by x and y.  block: threads of a CTA.  cluster: CTAs of a cluster, by x.
        shared_bytes: dynamic shared memory of a CTA.
        parameters: the kernel's, as they lie in its parameter space; zeros in the place of tensor maps.
        boxes: (`blazeproto.gemm.launch.Box`, address) of each tensor map in use, by its offset in ``parameters``.
        """


_chosen: ContextVar[Target | None] = ContextVar("target", default=None)
chosen = _chosen.get
"""``chosen()``: the target that this thread's launches from NumPy arrays go to; None where there is none."""


def here() -> Target:
    """The target, for a launch that is on a target's device. RuntimeError where this thread has none."""
    if (target := chosen()) is None:
        raise RuntimeError("expected launches_on(...) around a launch on a target, got none in this thread")
    return target


@contextmanager
def launches_on(target: Target) -> Iterator[None]:
    """Launches of this thread from NumPy arrays go to ``target``, launches inside an inner context to the inner one's.

    TypeError or ValueError for a number of multiprocessors that is none.
    """
    checks.integer("multiprocessors", target.multiprocessors, least=1)
    token = _chosen.set(target)
    try:
        yield
    finally:
        _chosen.reset(token)


# --- Devices ---------------------------------------------------------------------------------------------------------


def device_of(target: Target) -> int:
    """Its ordinal, which says the number of multiprocessors. So targets with as many multiprocessors share cached plans, and an
    ordinal is never a GPU's."""
    return FIRST_DEVICE + target.multiprocessors


def is_target(device: int) -> bool:
    """Whether the ordinal is a target's."""
    return device >= FIRST_DEVICE


class Handle(NamedTuple):
    """A kernel loaded on a target, as a CUfunction is one loaded on a GPU.

    parameters, boxes: as `Target.launch` has them, of a kernel that takes a struct and not words.
    """

    kernel: Any
    parameters: bytes = b""
    boxes: Mapping[int, tuple[Any, int]] = {}

    @property
    def ptr(self) -> "Handle":
        """As a ``cupy.cuda.Function`` has it."""
        return self

    def launch(self, grid: tuple[int, int], block: int, shared_bytes: int, parameters: bytes) -> None:
        """On the target that `here` gives."""
        here().launch(self.kernel, grid, block, shared_bytes, parameters, self.boxes, self.kernel.cluster)
