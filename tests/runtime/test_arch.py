"""The table of architectures, and what reads it."""

from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from blazeproto import gemm
from blazeproto.autograd import backends
from blazeproto.gemm import tiles
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tuned import MEASURED
from blazeproto.lab.target import Machine
from blazeproto.runtime import arch, optional
from blazeproto.runtime.arch import AMPERE, ARCHES, HOPPER
from blazeproto.runtime.arrays import current_device
from blazeproto.runtime.target import launches_on
from tests.gpu import cleared


def test_a_gpu_runs_the_kernels_of_its_capability_or_hears_why_not() -> None:
    assert [*ARCHES] == ["hopper", "ampere"] and arch.arch_of((9, 0)) is arch.arch_of([9, 0]) is HOPPER
    for capability in ((8, 0), (8, 6), (8, 9), (9, 1), (10, 0), (12, 0)):
        assert arch.arch_of(capability) is AMPERE and arch.missing(capability) is None
    assert (
        arch.arch_of((7, 5))
        is arch.arch_of(None)
        is arch.missing((9, 0))
        is arch.missing((9, 0), name="ampere")
        is None
    )
    wanted = "a GPU of compute capability"
    assert arch.missing((7, 5), "cuda:1") == f"{wanted} 8.0 or later; cuda:1 has 7.5"
    assert arch.missing(None) == f"{wanted} 8.0 or later; there is none"
    assert arch.missing((8, 6), name="hopper") == f"{wanted} 9.0; this one has 8.6"


def test_what_only_hopper_does_needs_a_hopper_gpu() -> None:
    for extra in {*HOPPER.extras} - {*AMPERE.extras}:
        assert arch.arch_of((9, 0), (extra,)) is HOPPER and arch.arch_of((8, 0), (extra,)) is None
        assert arch.missing((9, 0), needs=(extra,)) is None
    assert arch.missing((12, 0), needs=("fp8",)) == "a GPU of compute capability 9.0 for fp8; this one has 12.0"
    assert "'ampere' lacks: fp8" in str(arch.missing((9, 0), name="ampere", needs=("fp8",)))


def test_kernels_are_asked_for_by_name() -> None:
    machine = Machine()
    with launches_on(machine):
        device = current_device()
        assert arch.arch_on(device) is HOPPER
        with arch.kernels_of("ampere"):
            assert arch.arch_on(device) is AMPERE
        assert arch.arch_on(device) is arch.arch_on(-1) is HOPPER
    with pytest.raises(ValueError, match=r"name: expected .*ampere.*, got 'volta'"), arch.kernels_of("volta"):
        pass


def test_the_backend_asks_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with cleared(backends._missing_on_device):
        assert backends._missing_on_device(3) == "a GPU of compute capability 8.0 or later; cuda:3 has 7.5"
    monkeypatch.setattr(
        optional, "cupy", MagicMock(**{"return_value.cuda.Device.return_value.compute_capability": "120"})
    )
    assert arch.capability_of(3) == (12, 0)


def test_a_kernel_is_its_architectures() -> None:
    """Its options, its shared memory, and its place in the cache."""
    kernel = gemm.kernel_for("up_forward")
    assert kernel.arch is HOPPER and kernel.dynamic_smem == kernel.defines["SMEM_LIMIT"] == HOPPER.smem_limit
    assert HOPPER.options[0] == "--gpu-architecture=sm_90a"
    other = replace(HOPPER, name="other", target="sm_90")
    assert Kernel("combine.cu", "combine", arch=other).key != Kernel("combine.cu", "combine").key


def test_tiles_are_an_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm.TILES is HOPPER.tiles and {*MEASURED} == {"hopper"}
    other = replace(HOPPER, name="other", tiles=dict(HOPPER.tiles))
    monkeypatch.setitem(MEASURED, "other", {"up_forward": {(1.0, 64, 64): {"cluster": 2}}})
    assert tiles.chosen("up_forward", 8, 8, 64, 64, arch=other).cluster == 2
    assert tiles.chosen("up_forward", 8, 8, 64, 64).cluster == 1
    other.tiles["down_forward"] = gemm.TileConfig(stages=2)
    assert (
        tiles.tiles_for("down_forward", 256, arch=other).stages == 2
        and tiles.tiles_for("down_forward", 256).stages == 4
    )
