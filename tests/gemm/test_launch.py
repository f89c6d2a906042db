"""What a launch hands to the driver, with a stand-in for the driver: no GPU is needed."""

import ctypes
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from blazeproto.gemm import launch, weight
from blazeproto.gemm.combine import column_slices, slice_widths
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import BF16, E4M3
from blazeproto.runtime import driver


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
        self.encoded = self.replaced = self.contexts = 0
        self.dtypes: list[int] = []  # of the encoded tensor maps
        self.struct_bytes = 384

    def launchKernel(self, *arguments: int) -> None:
        if self.errors and (error := self.errors.pop(0)):
            raise DriverError(error)
        *where, pointers, extra = arguments
        assert extra == 0
        start = ctypes.c_uint64.from_address(pointers).value
        self.launches.append((tuple(where), ctypes.string_at(start, self.struct_bytes)))

    def encode(self, where: int, dtype: int, rank: int, address: int, shape: Any, *_: Any) -> int:
        self.encoded += 1
        self.dtypes.append(dtype)
        ctypes.memset(where, 0, launch.MAP_BYTES)
        ctypes.memmove(where + 16, shape, 8 * rank)
        return self.replace(where, address)

    def replace(self, where: int, address: int) -> int:
        self.replaced += 1
        ctypes.c_uint64.from_address(where + 8).value = address
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


NO_GPU = -2  # an ordinal of which nothing is remembered
PARAMS = launch.Params("P", "p.cuh", ("a", "b", "c", "d"), ("source", "offsets"), ("rows", "experts"))


def make_plan() -> launch.Plan:
    boxes = (None, launch.dense_box((64, 5), (64, 64)), None, launch.dense_box((64, 6), (64, 64)))
    return launch.Plan(Kernel("up.cu", "up", {}, 1000, 384), PARAMS, boxes, (7, -8), grid=3, device=1)


def test_only_addresses_change_between_launches(fake: FakeDriver) -> None:
    fake.struct_bytes = PARAMS.size
    plan = make_plan()
    ctypes.memset(driver.arguments.address, 0xFF, driver.ArgumentBuffer.BYTES)  # what launches before have left
    for address, word in ((0x1000, 11), (0x2000, 12)):
        driver.launch(*plan.fill((address, 3 * address), (word, 13)), 77)
        where, data = fake.launches[-1]
        assert where == (101, 3, 1, 1, 384, 1, 1, 1000, 77)
        for index, at, rows in ((1, address, 5), (3, 3 * address, 6)):
            expected = (ctypes.c_uint64 * 16)(0, at, 64, rows)
            assert data[index * launch.MAP_BYTES : (index + 1) * launch.MAP_BYTES] == bytes(expected)
            assert data[(index - 1) * launch.MAP_BYTES : index * launch.MAP_BYTES] == bytes(launch.MAP_BYTES)
        assert struct.unpack_from("2Q2i", data, 4 * launch.MAP_BYTES) == (word, 13, 7, -8)
    assert fake.encoded == 2


def test_a_tensor_map_has_its_element(fake: FakeDriver) -> None:
    byte, shape = replace(E4M3, packing=1, tma=0), ((64, 5), (64, 64))
    boxes = (launch.dense_box(*shape), launch.dense_box(*shape, byte), None, None)
    assert [box.strides for box in boxes[:2]] == [(128,), (64,)]
    launch.Plan(Kernel("up.cu", "up", {}, 1000, 384), PARAMS, boxes, (7, -8), grid=3, device=1).fill((1, 2), (3, 4))
    assert fake.dtypes == [BF16.tma, byte.tma] == [9, 0]  # CUtensorMapDataType


def test_a_thread_without_a_context(fake: FakeDriver) -> None:
    fake.errors = [driver.INVALID_CONTEXT]
    driver.launch(5, (1, 1), 32, 0, 0, (1, -2))
    assert fake.contexts == len(fake.launches) == 1 and struct.unpack_from("2q", fake.launches[0][1]) == (1, -2)


def test_other_errors_are_raised(fake: FakeDriver) -> None:
    fake.errors = [700]
    with pytest.raises(DriverError, match="700"):
        driver.launch(5, (1, 1), 32, 0, 0)
    assert not fake.launches and not fake.contexts


def test_threads_have_arguments_of_their_own() -> None:
    import threading

    seen = SimpleNamespace()
    thread = threading.Thread(target=lambda: setattr(seen, "address", driver.arguments.address))
    thread.start()
    thread.join()
    assert seen.address != driver.arguments.address and driver.arguments.address % 64 == 0


@pytest.mark.parametrize("product", ["down_backward_weight", "up_backward_weight"])
def test_the_workspace_of_a_weight_gradient(monkeypatch, product) -> None:
    """A fifth of the gradient and its ordered rows at most; none where that is too little for two fifths of the clusters."""
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    shape, width = (128, 256, 256), 256
    for num_rows in (0, 1, 10_000, 100_000, 1_000_000, 30_000_000):
        elements = weight.workspace_elements(product, (num_rows, shape[0], NO_GPU), shape)
        touched = 2 * (128 * 256 * width + num_rows * width)  # bytes, bf16
        of_a_unit = 2 * 2 * 128 * 256  # elements: two partials of each of two CTAs
        units = elements // of_a_unit
        assert elements == 0 or elements - units * of_a_unit == -(-2 * units // 4) * 4  # and an int2 each, aligned
        assert 4 * units * of_a_unit <= touched / 5
        assert units == min(66, touched // 5 // (4 * of_a_unit)) or (units == 0 and touched / 5 < 27 * 4 * of_a_unit)


@pytest.mark.parametrize(("d", "n", "shared"), [(1024, 4096, False), (1024, 2048, True), (4096, 512, True)])
def test_no_workspace_where_the_tiles_of_one_expert_keep_all_clusters_busy(monkeypatch, d, n, shared) -> None:
    """4 · 16 tiles of 256 x 256 are 64 for 66 clusters; 32 leave half of them without work."""
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    elements = weight.workspace_elements("down_backward_weight", (131_072, 8, NO_GPU), (8, d, n))
    assert (elements > 0) == shared


def test_column_slices() -> None:
    """Less than twice what may be allocated there anyway, in whole tiles; where rows or columns are few, nothing is cut."""
    rows, mib = 2**19, 2**20
    by_1024 = [range(first, first + 1024) for first in range(0, 4096, 1024)]
    assert column_slices(rows, 4096, 1024 * mib) == tuple(by_1024)
    assert column_slices(rows, 4096, 2100 * mib) == (range(4096),)
    assert column_slices(rows, 3000, mib) == (*by_1024[:2], range(2048, 3000))
    assert column_slices(rows, 2312, mib) == (range(1024), range(1024, 1792), range(1792, 2312))
    assert column_slices(rows, 1528, mib) == (range(1528),) and column_slices(1000, 4096, mib) == (range(4096),)
    assert column_slices(0, 8, 0) == (range(8),)
    assert slice_widths(256) == [256] and slice_widths(3000) == [952, 1024, 1464, 1536, 3000]
