"""What a launch hands to the driver, with a stand-in for the driver: no GPU is needed."""

from __future__ import annotations

import ctypes
import struct
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from blazeproto import driver
from blazeproto.gemm import launch
from blazeproto.gemm.compile import Kernel


class DriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class FakeDriver:
    """Notes every launch and the bytes of its struct; a tensor map is its address, then its shape."""

    CUDADriverError = DriverError

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.errors: list[int] = []  # of the next launches
        self.encoded = self.contexts = 0
        self.struct_bytes = 384

    def launchKernel(self, *arguments: int) -> None:
        if self.errors and (error := self.errors.pop(0)):
            raise DriverError(error)
        *where, pointers, extra = arguments
        assert extra == 0
        start = ctypes.c_uint64.from_address(pointers).value
        self.launches.append((tuple(where), ctypes.string_at(start, self.struct_bytes)))

    def encode(self, where: int, dtype: int, rank: int, address: int, shape: int, *_: int) -> int:
        self.encoded += 1
        ctypes.memset(where, 0, launch.MAP_BYTES)
        ctypes.memmove(where + 8, shape, 8 * rank)
        return self.replace(where, address)

    def replace(self, where: int, address: int) -> int:
        ctypes.c_uint64.from_address(where).value = address
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    def make_context() -> None:
        fake.contexts += 1

    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(driver, "make_context", make_context)
    monkeypatch.setattr(launch, "_tensor_maps", lambda: (fake.encode, fake.replace))
    monkeypatch.setattr(Kernel, "handle", lambda self, device: 100 + device)
    return fake


def make_plan() -> launch.Plan:
    boxes = (launch.box_2d(64, 5, (64, 64)), None)
    return launch.Plan(Kernel("up.cu", "up", {}, 1000), boxes, 2, (7, -8), grid=3, block=384, device=1)


def test_only_addresses_change_between_launches(fake: FakeDriver) -> None:
    plan = make_plan()
    ctypes.memset(driver.arguments.address, 0xFF, driver.Arguments.BYTES)  # what launches before have left
    for address, word in ((0x1000, 11), (0x2000, 12)):
        plan.launch(77, (address,), (word, 13))
        where, data = fake.launches[-1]
        assert where == (101, 3, 1, 1, 384, 1, 1, 1000, 77)
        assert struct.unpack_from("3Q", data) == (address, 64, 5)
        assert data[launch.MAP_BYTES : 2 * launch.MAP_BYTES] == bytes(launch.MAP_BYTES)
        assert struct.unpack_from("2Q2i", data, 2 * launch.MAP_BYTES) == (word, 13, 7, -8)
    assert fake.encoded == 1


def test_a_plan_wants_as_many_addresses_as_maps_and_words(fake: FakeDriver) -> None:
    plan = make_plan()
    plan.launch(0, (0x1000,), (1, 2))
    with pytest.raises(ValueError, match="longer"):
        plan.launch(0, (0x1000, 0x2000), (1, 2))
    with pytest.raises(struct.error):
        plan.launch(0, (0x1000,), (1,))


def test_a_thread_without_a_context(fake: FakeDriver) -> None:
    fake.errors = [driver.INVALID_CONTEXT]
    driver.launch_words(5, (1, 1), 32, 0, 0, (1, -2))
    assert fake.contexts == len(fake.launches) == 1
    assert struct.unpack_from("2q", fake.launches[0][1]) == (1, -2)


def test_other_errors_are_raised(fake: FakeDriver) -> None:
    fake.errors = [700]
    with pytest.raises(DriverError, match="700"):
        driver.launch(5, (1, 1), 32, 0, 0)
    assert not fake.launches and not fake.contexts


def offsets_of(structure: type[ctypes.Structure]) -> dict[str, int]:
    return {name: getattr(structure, name).offset for name, *_ in structure._fields_}


def test_launch_structs_lie_as_in_cuda_h() -> None:
    """As sizeof and offsetof say of CUlaunchAttribute and CUlaunchConfig on x86-64 and aarch64."""
    assert offsets_of(driver.LaunchAttribute) == {"id": 0, "pad": 4, "value": 8}
    assert (ctypes.sizeof(driver.LaunchAttribute), ctypes.alignment(driver.LaunchAttribute)) == (72, 8)
    assert offsets_of(driver.LaunchConfig) == {
        "grid": 0,
        "block": 12,
        "shared_bytes": 24,
        "stream": 32,
        "attributes": 40,
        "num_attributes": 48,
    }
    assert (ctypes.sizeof(driver.LaunchConfig), ctypes.alignment(driver.LaunchConfig)) == (56, 8)


@pytest.mark.parametrize("errors", [[], [driver.INVALID_CONTEXT], [700]])
def test_a_dependent_launch(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, errors: list[int]) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch_kernel_ex(config_address: int, function: int, pointers: int, extra: None) -> int:
        if errors:
            return errors.pop(0)
        config = driver.LaunchConfig.from_address(config_address)
        assert config.num_attributes == 1
        attribute = driver.LaunchAttribute.from_address(config.attributes)
        allowed = ctypes.c_int.from_buffer(attribute, driver.LaunchAttribute.value.offset).value
        words = ctypes.string_at(ctypes.c_uint64.from_address(pointers).value, 16)
        where = (*config.grid, *config.block, config.shared_bytes, config.stream)
        seen.append((function, where, attribute.id, allowed, struct.unpack("2q", words), extra))
        return 0

    monkeypatch.setattr(driver, "_launch_kernel_ex", lambda: launch_kernel_ex)
    fails, no_context = 700 in errors, driver.INVALID_CONTEXT in errors
    with pytest.raises(DriverError, match="700") if fails else nullcontext():
        driver.launch_words(5, (2, 3), 32, 1000, 1 << 40, (1, -2), dependent=True)
    assert seen == ([] if fails else [(5, (2, 3, 1, 32, 1, 1, 1000, 1 << 40), 6, 1, (1, -2), None)])
    assert fake.contexts == no_context and not fake.launches


def test_a_plan_that_is_dependent(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(driver, "_launch_kernel_ex", lambda: lambda config, function, *_: launched.append(function))
    kernel = Kernel("up.cu", "up", {}, 1000)
    for dependent in (False, True):
        plan = launch.Plan(kernel, (None,), 1, (7,), grid=3, block=384, device=1, dependent=dependent)
        plan.launch(77, (), (8,))
    assert launched == [101] and len(fake.launches) == 1


def test_threads_have_arguments_of_their_own() -> None:
    import threading

    seen = SimpleNamespace()
    thread = threading.Thread(target=lambda: setattr(seen, "address", driver.arguments.address))
    thread.start()
    thread.join()
    assert seen.address != driver.arguments.address and driver.arguments.address % 64 == 0
