"""How long a layer takes on this machine, beside its floor: `python -m blazeproto bench T,d,n,E,K`."""

import os
import sys
from dataclasses import dataclass

import torch

from blazeproto.gemm import Sizes
from blazeproto.lab.explanation import explain
from blazeproto.lab.tables import Table, View, in_bytes, in_ms
from blazeproto.lab.times import COLD_ROUNDS, cold_ms, wall_ms
from blazeproto.layer import MoE


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of a forward, and of a forward and backward, of a `MoE` with its router and auxiliary loss.

    floor_forward_ms, floor_both_ms: the sums of the steps' floors, of an H200 (`explain`); None where no Hopper kernel runs.
    """

    sizes: Sizes
    device: str
    backend: str
    dtype: str
    forward_ms: float
    both_ms: float
    floor_forward_ms: float | None
    floor_both_ms: float | None

    def view(self) -> View:
        """As a table."""
        rows = [["forward", in_ms(self.forward_ms)], ["forward + backward", in_ms(self.both_ms)]]
        columns, floors = ["", "ms"], dict[str, str]()
        if self.floor_forward_ms is not None and self.floor_both_ms is not None:
            columns += ["floor, ms", "floor / ms"]
            rows[0] += [in_ms(self.floor_forward_ms), f"{self.floor_forward_ms / self.forward_ms:.2f}"]
            rows[1] += [in_ms(self.floor_both_ms), f"{self.floor_both_ms / self.both_ms:.2f}"]
            floors["floors"] = "at an H200's rates"
        sizes = ", ".join(f"{name}={getattr(self.sizes, name)}" for name in ("T", "d", "n", "E", "K"))
        facts = {"device": self.device, "backend": f"{self.backend}, {self.dtype}"} | floors
        return View(f"MoE: {sizes}", facts, [Table(columns, rows, left=[""])])


def layer_times(sizes: Sizes, rounds: int = COLD_ROUNDS) -> LayerTimes:
    """A `MoE` of these ``sizes``, SwiGLU and the top-k router with its auxiliary loss, on the best backend of this machine.

    On a GPU in bf16, each call alone with a cold L2 cache, by CUDA events: an eager layer below a millisecond waits for the
    host, whose time is then in it where it is longer than what the GPU was held for. On a CPU in float32, by the clock.
    Medians of ``rounds`` calls, after three that are not counted. ValueError where K > E, and for sizes that the device's memory
    cannot hold.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    least, memory = least_bytes(sizes, dtype), memory_of(device)
    if least > memory:
        raise ValueError(
            f"T,d,n,E,K: expected sizes that fit in {in_bytes(memory)} of memory, got ones that need at least {in_bytes(least)}"
        )
    layer = MoE(sizes.d, sizes.n, sizes.E, sizes.K, device=device, dtype=dtype)
    backend = layer.runs_on(dtype).partition(":")[0]
    x = torch.randn(sizes.T, sizes.d, device=device, dtype=dtype, requires_grad=True)
    d_out = torch.randn_like(x)
    wanted = [x, *layer.parameters()]

    def forward() -> object:
        return layer(x)

    def both() -> object:
        out, stats = layer(x)
        loss = stats.aux_loss
        assert isinstance(loss, torch.Tensor)
        return torch.autograd.grad((out, loss), wanted, (d_out, torch.ones_like(loss)))

    if backend != "torch":
        layer.prepare(sizes.T)
    clock = cold_ms if device.type == "cuda" else wall_ms
    floors = explain(layer, x, measure=False) if backend == "hopper" else None
    return LayerTimes(
        sizes,
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        backend,
        str(dtype).removeprefix("torch."),
        clock(forward, rounds),
        clock(both, rounds),
        None if floors is None else floors.totals("forward").floor_ms,
        None if floors is None else floors.totals().floor_ms,
    )


def least_bytes(sizes: Sizes, dtype: torch.dtype) -> int:
    """The weights and their gradients; x, the output and dx; H: what is there at once at the end of a backward or before it."""
    weights = sizes.E * sizes.d * (3 * sizes.n + 1)
    return dtype.itemsize * (2 * weights + 3 * sizes.T * sizes.d + 2 * sizes.T * sizes.K * sizes.n)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a GPU, or this machine, has in all; no bound where the operating system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
