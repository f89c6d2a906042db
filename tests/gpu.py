"""What tests on a GPU share: steps captured in a graph, and a host that must not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
