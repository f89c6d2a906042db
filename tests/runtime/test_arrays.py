"""Device arrays as views. A stand-in with a tensor's methods plays the CUDA tensor where there is no GPU."""

import sys
import types

import numpy as np
import pytest
import torch

from blazeproto.runtime import arrays
from tests.refusals import refuses


class CudaTensor:
    """A CPU tensor that says it lies on cuda:0: what `view` asks of a torch tensor, and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape
        self.data_ptr, self.stride = tensor.data_ptr, tensor.stride

    def get_device(self) -> int:
        return 0


def test_view_of_a_tensor() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    owner = CudaTensor(tensor)
    a = arrays.view(owner)
    assert a == (tensor.data_ptr(), (3, 4), "bfloat16", (4, 1), 0, owner) and a.size == 12 and a.nbytes == 24
    assert arrays.view(a) is a and "bfloat16[3, 4]" in repr(a) and "cuda:0" in repr(a)


@pytest.mark.parametrize(
    ("tensor", "contiguous"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).T, False),
        (torch.zeros(1, 4)[:, ::2], False),
        (torch.zeros(4, 3).as_strided((1, 3), (99, 1)), True),  # a dimension of one element
        (torch.zeros(2, 3).expand(4, 2, 3), False),
        (torch.zeros(0, 3), True),
        (torch.zeros(()), True),
    ],
)
def test_contiguity(tensor: torch.Tensor, contiguous: bool) -> None:
    assert arrays.view(CudaTensor(tensor)).is_contiguous == contiguous


X = CudaTensor(torch.zeros(3, 4))
REFUSED = {
    "a CPU tensor": (lambda: arrays.view(torch.zeros(2), "x"), ValueError),
    "a NumPy array": (lambda: arrays.view(np.zeros(2), "x"), ValueError),
    "a list": (lambda: arrays.view([1, 2], "x"), TypeError),
    "a dtype": (lambda: arrays.expect("x", X, "bfloat16"), TypeError),
    "a length": (lambda: arrays.expect("x", X, "float32", (None, 5)), ValueError),
    "a dimension": (lambda: arrays.expect("x", X, "float32", (12,)), ValueError),
    "strides": (lambda: arrays.expect("x", CudaTensor(torch.zeros(4, 3).T), "float32", (3, 4)), ValueError),
    "a pointer": (lambda: arrays.expect("x", CudaTensor(torch.zeros(9)[1:]), "float32"), ValueError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_such_device_array(what: str) -> None:
    refuses(REFUSED[what][0], "x", REFUSED[what][1])


def test_what_is_expected_is_a_view() -> None:
    assert arrays.expect("x", X, "float32", (3, None)).shape == (3, 4)


def test_bfloat16_without_the_type() -> None:
    """Its bits are handed on, and read again as what they mean."""
    values = np.array([[1.0, -2.5], [3.0, 2.0**-120]], np.float32)
    array = arrays.BFloat16Array((values.view(np.uint32) >> 16).astype(np.uint16))
    tensor = torch.from_dlpack(array.bits).view(torch.bfloat16)
    assert tensor.float().tolist() == values.tolist()
    assert array.shape == (2, 2) and array.float().tolist() == values.tolist()


class OnGpu:
    """What exports an array of a GPU by DLPack alone, as JAX does."""

    dtype = "bfloat16"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("CuPy asks")


@pytest.mark.parametrize("error", [NotImplementedError("CuPy does not support bfloat16 yet"), None])
def test_an_array_crosses_by_its_own_dlpack(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CuPy imports it; what CuPy has not got is refused. With a stand-in for CuPy."""

    def from_dlpack(array: object) -> object:
        assert type(array) is OnGpu
        if error is not None:
            raise error
        return CudaTensor(torch.zeros(2, 3, dtype=torch.bfloat16))

    cupy = types.ModuleType("cupy")
    cupy.from_dlpack = from_dlpack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    if error is None:
        assert arrays.view(OnGpu()).dtype == "bfloat16"
    else:
        refuses(lambda: arrays.view(OnGpu(), "x"), "x", TypeError)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_other_libraries(dtype: str) -> None:
    """The same pointer by torch, CuPy, Numba and DLPack."""
    cupy = pytest.importorskip("cupy")
    tensor = torch.arange(24, device="cuda").view(2, 3, 4).to(getattr(torch, dtype))
    a = arrays.view(tensor)
    assert arrays.view(tensor.clone().requires_grad_(dtype != "int32")).dtype == dtype
    bits = cupy.from_dlpack(tensor.view(torch.int16 if dtype == "bfloat16" else getattr(torch, dtype)))
    foreign = bits.view("uint16") if dtype == "bfloat16" else bits
    others = [foreign]
    if dtype != "bfloat16":
        cuda = pytest.importorskip("numba.cuda")
        others.append(cuda.as_cuda_array(tensor))
    for other in others:
        b = arrays.view(other)
        assert b[:5] == a[:5]


@pytest.mark.gpu
def test_empty_and_streams() -> None:
    pytest.importorskip("cupy")
    made = arrays.empty((5, 8), "bfloat16")
    assert torch.from_dlpack(made.bits).view(torch.bfloat16).shape == (5, 8)
    assert arrays.view(made).dtype == "bfloat16" and arrays.view(made).nbytes == 80
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(3, device="cuda")
        assert arrays.current_stream(tensor) == arrays.current_stream(arrays.view(tensor)) == stream.cuda_stream
