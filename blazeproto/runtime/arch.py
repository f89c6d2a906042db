"""The architectures of GPUs that CUDA C++ kernels are written for, in one table, and which of them runs on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blazeproto.runtime import optional


@dataclass(frozen=True, eq=False)
class Arch:
    """name: of its backend too.  capabilities: the compute capabilities that run its kernels.  target: NVRTC's name for them.
    smem_limit: bytes of dynamic shared memory that a CTA may have.
    loads, multiplies: by which instructions operands come to shared memory, and to the tensor cores.
    tiles: product -> the tiles it runs with (`blazeproto.gemm.tiles`).
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    target: str
    smem_limit: int
    loads: tuple[str, ...]
    multiplies: str
    tiles: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's. --no-cache: with a driver installed NVRTC keeps a cache of its own, whose entries lack ptxas's report."""
        target = f"--gpu-architecture={self.target}"
        return (target, "-std=c++17", "--ptxas-options=-v", "-lineinfo", "-default-device", "--no-cache")


# sm_90a: CuPy's own sm_90 has no WGMMA.
HOPPER = Arch("hopper", ((9, 0),), "sm_90a", 227 * 1024, ("cp.async", "cp.async.bulk.tensor"), "wgmma")
ARCHES = {arch.name: arch for arch in (HOPPER,)}
"""By name, the fastest first: a GPU runs the first that has its compute capability."""
WANTED = "compute capability " + " or ".join(
    f"{major}.{minor}" for arch in ARCHES.values() for major, minor in arch.capabilities
)


def arch_of(capability: Sequence[int] | None) -> Arch | None:
    """The architecture whose kernels run on a GPU of this compute capability, (9, 0) say; None where none do, or for no GPU."""
    known = () if capability is None else tuple(capability)
    return next((arch for arch in ARCHES.values() if known in arch.capabilities), None)


def missing(capability: Sequence[int] | None, gpu: str = "this one") -> str | None:
    """The reason why no kernel runs on a GPU of this compute capability (None: no GPU), or None if kernels run.
    gpu: what the answer calls it."""
    if arch_of(capability) is not None:
        return None
    return f"{WANTED}; " + ("there is none" if capability is None else f"{gpu} has {'.'.join(map(str, capability))}")


def capability_of(device: int) -> tuple[int, int]:
    """The compute capability of a CUDA ordinal."""
    digits = optional.cupy().cuda.Device(device).compute_capability
    return int(digits[:-1]), int(digits[-1])
