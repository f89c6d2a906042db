"""The architectures of GPUs that CUDA C++ kernels are written for, in one table, and which of them runs on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from blazeproto.runtime import checks, optional
from blazeproto.runtime.target import is_target


@dataclass(frozen=True, eq=False)
class Arch:
    """name: of its backend too.  least: the first compute capability that runs its kernels.  later: whether later ones do too.
    target: NVRTC's name for what they are compiled for.  folder: of its sources, within ``blazeproto/gemm/cuda``.
    smem_limit: bytes of dynamic shared memory that a CTA may have.
    loads, multiplies: by which instructions operands come to shared memory, and to the tensor cores.
    tensor_maps: whether launches describe matrices by tensor maps, for TMA.
    extras: what its kernels do beside bf16 products whose rows `combine` sums: "fp8", "fused" sums, "block-sparse" products,
    "symmetric" exchanges, "stored weights".
    tiles: product -> the tiles it runs with (`blazeproto.gemm.tiles`).
    """

    name: str
    least: tuple[int, int]
    later: bool
    target: str
    folder: str
    smem_limit: int
    loads: tuple[str, ...]
    multiplies: str
    tensor_maps: bool
    extras: tuple[str, ...] = ()
    tiles: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's. --no-cache: with a driver installed NVRTC keeps a cache of its own, whose entries lack ptxas's report."""
        target = f"--gpu-architecture={self.target}"
        return (target, "-std=c++17", "--ptxas-options=-v", "-lineinfo", "-default-device", "--no-cache")

    @property
    def wanted(self) -> str:
        """The GPUs that run its kernels, in words."""
        return "compute capability {}.{}".format(*self.least) + (" or later" if self.later else "")

    def runs_on(self, capability: Sequence[int]) -> bool:
        """Whether a GPU of this compute capability runs its kernels."""
        return tuple(capability) == self.least or (self.later and tuple(capability) > self.least)


# sm_90a: CuPy's own sm_90 has no WGMMA.
HOPPER = Arch(
    "hopper",
    (9, 0),
    False,
    "sm_90a",
    "",
    227 * 1024,
    ("cp.async", "cp.async.bulk.tensor"),
    "wgmma",
    True,
    ("fp8", "fused", "block-sparse", "symmetric", "stored weights"),
)
# 99 KB: what a CTA may have on 8.6, 8.9 and 12.0.
AMPERE = Arch(
    "ampere", (8, 0), True, "sm_80", "ampere", 99 * 1024, ("cp.async",), "mma.sync", False, ("stored weights",)
)
ARCHES = {arch.name: arch for arch in (HOPPER, AMPERE)}
"""By name, the fastest first: a GPU runs the first that has its compute capability."""
WANTED = AMPERE.wanted


def arch_of(capability: Sequence[int] | None, needs: Sequence[str] = ()) -> Arch | None:
    """The architecture whose kernels run on a GPU of this compute capability, (9, 0) say; None where none do, or for no GPU.
    needs: ``extras`` that it must have."""
    if capability is None:
        return None
    return next((arch for arch in ARCHES.values() if arch.runs_on(capability) and {*needs} <= {*arch.extras}), None)


def missing(
    capability: Sequence[int] | None, gpu: str = "this one", name: str = "auto", needs: Sequence[str] = ()
) -> str | None:
    """The reason why no kernel runs on a GPU of this compute capability (None: no GPU), or None if kernels run.
    gpu: what the answer calls it.  name: of an architecture, or "auto" for any.  needs: as for `arch_of`."""
    able = [arch for arch in ARCHES.values() if name in ("auto", arch.name) and {*needs} <= {*arch.extras}]
    if not able:
        return (
            f"kernels that {'every backend' if name == 'auto' else f'the backend {name!r}'} lacks: {', '.join(needs)}"
        )
    if capability is not None and any(arch.runs_on(capability) for arch in able):
        return None
    beside = f" for {', '.join(needs)}" if needs else ""
    got = "there is none" if capability is None else f"{gpu} has {'.'.join(map(str, capability))}"
    return f"a GPU of {able[-1].wanted}{beside}; {got}"


def capability_of(device: int) -> tuple[int, int]:
    """The compute capability of a CUDA ordinal."""
    digits = optional.cupy().cuda.Device(device).compute_capability
    return int(digits[:-1]), int(digits[-1])


_asked: ContextVar[Arch | None] = ContextVar("arch", default=None)


@contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Launches of this thread take the kernels of one architecture, which need not be the GPU's own. name: "hopper" or "ampere";
    ValueError for another."""
    checks.one_of("name", name, tuple(ARCHES))
    token = _asked.set(ARCHES[name])
    try:
        yield
    finally:
        _asked.reset(token)


def arch_on(device: int) -> Arch:
    """The architecture of a launch on a device: `kernels_of` names it, or else the GPU decides. A target and host memory
    (-1) have Hopper's."""
    return _asked.get() or (HOPPER if device < 0 or is_target(device) else _arch_of_gpu(device))


@cache
def _arch_of_gpu(device: int) -> Arch:
    found = arch_of(capability_of(device))
    if found is None:
        raise RuntimeError(f"expected a GPU of {WANTED}, got device {device} of {capability_of(device)}")
    return found
