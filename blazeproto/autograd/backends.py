"""The backends, and which of them runs: ``backend="auto" | "hopper" | "torch"``.

`backend_on` is asked inside the operators, where tensors are real, so that nothing of it is traced by torch.compile
and every operator of one layer answers alike.
"""

import warnings
from functools import cache, lru_cache
from typing import Any

import torch

from blazeproto.autograd import hopper_backend, torch_backend
from blazeproto.autograd.call import Backend
from blazeproto.gemm.tiles import CHUNK, MAX_EXPERTS
from blazeproto.runtime import arch, optional


@lru_cache(maxsize=1024)
def backend_on(name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> Backend:
    """The backend for tensors of this device and dtype, E experts, d and n. ValueError: "hopper" was asked for and cannot
    run; it says what is missing."""
    missing = "" if name == "torch" else missing_for_kernels(device, dtype, num_experts, *widths)
    if missing and name == "hopper":
        raise ValueError(f'backend: expected one that can run here, got "hopper", which needs {missing}')
    return hopper_backend if missing is None else torch_backend


def dispatch_backend(name: str, device: torch.device) -> Backend:
    """The backend that builds the dispatch of tensors on ``device``, whatever the products' dtype and widths."""
    return hopper_backend if has_dispatch_kernels(name, device) else torch_backend


def has_dispatch_kernels(backend: str, device: torch.device) -> bool:
    """Whether the Numba kernels of dispatch and top-k run for tensors on ``device``."""
    return backend != "torch" and device.type == "cuda" and _missing_on_device(device_index(device)) is None


def missing_for_kernels(device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> str | None:
    """The reason why the kernels cannot run with this device, dtype, E and these widths (d, n); None if they can."""
    if device.type != "cuda":
        return f"a CUDA GPU of {arch.WANTED}; the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"torch.bfloat16 tensors; they are {dtype}"
    if num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts; there are {num_experts}"
    for width in widths:
        if width % CHUNK:
            return f"d_model and d_expert that are multiples of {CHUNK} (16 bytes of bf16); one is {width}"
    return _missing_on_device(device_index(device))


def what_runs(name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> str:
    """The result of `backend_on` in words, with its reason: "hopper", "torch", or "nothing" if it raises."""
    if name == "torch":
        return name
    missing = missing_for_kernels(device, dtype, num_experts, *widths)
    return "hopper" if missing is None else f"{'torch' if name == 'auto' else 'nothing'}: the kernels need {missing}"


def check_device(device: Any) -> None:
    """ValueError for a device that torch does not know, or that is not here. None is any."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # AssertionError: torch without CUDA
        why = str(error).splitlines()[0]
        raise ValueError(f"device: expected one that torch can use here, got {str(device)!r} ({why})") from error


def device_index(device: torch.device) -> int:
    """The CUDA ordinal of a device, of the current one if it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _missing_on_device(index: int) -> str | None:
    if lacks := arch.missing(torch.cuda.get_device_capability(index), f"cuda:{index}"):
        return f"a GPU of {lacks}"
    for package in optional.KERNELS:
        if lacks := optional.missing(package):
            warnings.warn(f"backend: the kernels of Hopper GPUs need {lacks}", stacklevel=2)
            return lacks
    return None


def __getattr__(name: str) -> Any:
    """HOPPER_CAPABILITY: an old name, to be removed after one release."""
    if name != "HOPPER_CAPABILITY":
        raise AttributeError(f"module 'blazeproto.autograd.backends' has no attribute {name!r}")
    warnings.warn(
        "blazeproto.autograd.backends.HOPPER_CAPABILITY is blazeproto.runtime.arch.HOPPER.capabilities[0] now",
        DeprecationWarning,
        stacklevel=2,
    )
    return arch.HOPPER.capabilities[0]
