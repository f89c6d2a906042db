"""The table of architectures, and what reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blazeproto import gemm
from blazeproto.autograd import backends
from blazeproto.gemm import tiles
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tuned import MEASURED
from blazeproto.runtime import arch
from blazeproto.runtime.arch import ARCHES, HOPPER


def test_a_gpu_runs_the_kernels_of_its_capability_or_hears_why_not() -> None:
    assert {*ARCHES} == {"hopper"} and arch.arch_of((9, 0)) is arch.arch_of([9, 0]) is HOPPER
    assert arch.missing((9, 0)) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0), None):
        assert arch.arch_of(capability) is None
    assert arch.missing((8, 6), "cuda:1") == "compute capability 9.0; cuda:1 has 8.6"
    assert arch.missing(None) == "compute capability 9.0; there is none"


def test_the_backend_asks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    backends._missing_on_device.cache_clear()
    try:
        assert backends._missing_on_device(3) == "a GPU of compute capability 9.0; cuda:3 has 8.0"
    finally:
        backends._missing_on_device.cache_clear()


def test_a_kernel_is_its_architectures() -> None:
    """Its options, its shared memory, and its place in the cache."""
    kernel = gemm.kernel_for("up_forward")
    assert kernel.arch is HOPPER and kernel.dynamic_smem == kernel.defines["SMEM_LIMIT"] == HOPPER.smem_limit
    assert HOPPER.options[0] == "--gpu-architecture=sm_90a"
    other = replace(HOPPER, name="other", target="sm_90")
    assert Kernel("combine.cu", "combine", arch=other).key != Kernel("combine.cu", "combine").key


def test_tiles_are_an_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm.TILES is HOPPER.tiles and {*MEASURED} == {*ARCHES}
    other = replace(HOPPER, name="other", tiles=dict(HOPPER.tiles))
    monkeypatch.setitem(MEASURED, "other", {"up_forward": {(1.0, 64, 64): {"cluster": 2}}})
    assert tiles.chosen("up_forward", 8, 8, 64, 64, arch=other).cluster == 2
    assert tiles.chosen("up_forward", 8, 8, 64, 64).cluster == 1
    other.tiles["down_forward"] = gemm.TileConfig(stages=2)
    assert (
        tiles.tiles_for("down_forward", 256, arch=other).stages == 2
        and tiles.tiles_for("down_forward", 256).stages == 4
    )
