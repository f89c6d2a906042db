"""What tests on a GPU share: whose kernels run, steps captured in a graph, and a host that must not wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from blazeproto.autograd import backends
from blazeproto.runtime import arch

DEVICES = pytest.mark.parametrize(
    "device",
    ["cpu", *(pytest.param(device, marks=pytest.mark.gpu) for device in ("cuda", "cuda-ampere"))],
    indirect=True,
)
"""On a CPU, on a GPU, and on a GPU that passes for one without Hopper's kernels. The fixture gives torch's name of the device."""


@contextmanager
def passes_for(name: str) -> Iterator[None]:
    """The GPU passes for one that runs this backend's kernels alone: "auto", products and a router's logits take them."""
    caches = backends.backend_on, backends._missing_on_device, arch._arch_of_gpu
    with cleared(*caches), patch.object(arch, "ARCHES", {name: arch.ARCHES[name]}):
        yield


@contextmanager
def cleared(*caches: Any) -> Iterator[None]:
    """These functions remember nothing from before, and nothing of this afterwards."""
    for function in caches:
        function.cache_clear()
    try:
        yield
    finally:
        for function in caches:
            function.cache_clear()


class Captured:
    """``results`` of ``run()``, a tuple, list or dictionary of tensors, captured in a CUDA graph after two runs."""

    def __init__(self, run: Callable[[], Any], pool: Any = None) -> None:
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and makes autograd's nodes on the stream that captures
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.results = run()

    def replay(self) -> Any:
        """The results again, which are overwritten before: what a replay leaves out shows."""
        for t in self.results.values() if isinstance(self.results, dict) else self.results:
            t.fill_(torch.nan if t.is_floating_point() else -1)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.results


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
