"""A layer's Hopper backend without a GPU: its tensors are a CPU's, of device -1; kernels are neither compiled nor run.

    with launches() as seen:
        layer(x)[0].sum().backward()
    seen.frames                # by kernel: for each of its launches the package's frames, outermost first

Outputs of kernels are zeros.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

import blazeproto
from blazeproto.autograd import backends
from blazeproto.gemm import launch
from blazeproto.gemm.compile import Kernel
from blazeproto.router import linear
from blazeproto.runtime import cache, driver, optional
from blazeproto.runtime.numba_kernel import NumbaKernel

PACKAGE = Path(blazeproto.__file__).parent
MULTIPROCESSORS = 132


class Seen:
    """Stands in for the driver. frames: by a kernel's name.  kernels: those that were loaded, which is once in a process."""

    CUDADriverError = RuntimeError

    def __init__(self) -> None:
        self.frames: dict[str, list[list[str]]] = defaultdict(list)
        self.kernels: list[Kernel | NumbaKernel] = []

    def code(self, kernel: Kernel | NumbaKernel, key: str) -> bytes:
        """Machine code is looked up, and not missed."""
        self.kernels.append(kernel)
        return cache.read(key) or b""

    def launchKernel(self, name: str, *_: object) -> None:
        frame, mine = sys._getframe(1), list[str]()
        while frame is not None:
            if (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
                mine.append(f"{path.stem}.{frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        self.frames[name].append(mine[::-1])


@contextmanager
def launches() -> Iterator[Seen]:
    """Inside, layers with ``backend="hopper"`` run on CPU tensors, and a launch is only noted."""
    runtime = {"deviceGetAttribute": MULTIPROCESSORS, "malloc": 1 << 40, "streamIsCapturing": False}
    answers = {f"cuda.runtime.{name}.return_value": answer for name, answer in runtime.items()}
    seen, cupy = Seen(), MagicMock(**{"cuda.Device.return_value.compute_capability": "90", **answers})
    with ExitStack() as stack:
        for function, instead in (
            (backends.missing_for_kernels, lambda *_, **__: None),
            (backends.has_dispatch_kernels, lambda *_, **__: True),
        ):  # wherever it was imported
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = instead.__code__
        for owner, name, value in (
            (torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0)),
            (torch, "empty", torch.zeros),
            (torch, "empty_like", torch.zeros_like),
            (Tensor, "new_empty", Tensor.new_zeros),
            (linear, "_product", lambda a, b: a.float() @ b.float()),
            (optional, "cupy", lambda: cupy),
            (launch, "_tensor_maps", lambda: (lambda *_: 0, lambda *_: 0)),
            (Kernel, "cubin", property(lambda kernel: seen.code(kernel, kernel.key))),
            (NumbaKernel, "cubin", lambda kernel, capability: (kernel.name, seen.code(kernel, kernel.key(capability)))),
            (driver, "load", lambda code, entry, *_: SimpleNamespace(ptr=entry)),
            (driver, "_driver", lambda: seen),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield seen
