"""Which of the two sets of products runs: ``backend="auto" | "hopper" | "torch"``.

:func:`products_for` is asked inside the operators, where tensors are real, so that nothing of it is traced by torch.compile
and every operator of one layer answers alike.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor

from blazeproto.autograd.policy import Options
from blazeproto.gemm.config import MAX_EXPERTS

BACKENDS = ("auto", "hopper", "torch")
HOPPER_CAPABILITY = (9, 0)
ALIGNMENT = 8  # elements of bf16 in the 16 bytes that TMA wants a row to be a multiple of


def products_for(options: Options, t: Tensor, num_experts: int, d_model: int, d_expert: int) -> ModuleType:
    """The module of products for tensors like ``t``: ``hopper_products`` or ``torch_products``.

    Raises:
        ValueError: "hopper" was asked for and cannot run; the message says what is missing.
    """
    return products_on(options.backend, t.device, t.dtype, num_experts, d_model, d_expert)


@lru_cache(maxsize=1024)
def products_on(backend: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> ModuleType:
    """:func:`products_for` by what it looks at; it raises the same."""
    if backend != "torch":
        missing = missing_for_hopper(device, dtype, num_experts, *widths)
        if missing is None:
            from blazeproto.autograd import hopper_products

            return hopper_products
        if backend == "hopper":
            raise ValueError(f'backend: expected one that can run here, got "hopper", which needs {missing}')
    from blazeproto.autograd import torch_products

    return torch_products


def has_dispatch_kernels(backend: str, device: torch.device) -> bool:
    """Whether the dispatch of tensors on ``device`` is built by blazeproto.dispatch instead of torch operations."""
    return backend != "torch" and device.type == "cuda" and _missing_on_device(device_index(device)) is None


def missing_for_hopper(device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int) -> str | None:
    """What keeps the Hopper backend from running with this device, dtype, E and these widths (d, n); None if nothing."""
    if device.type != "cuda":
        return f"a CUDA GPU of compute capability 9.0; the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"torch.bfloat16 tensors; they are {dtype}"
    if num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts; there are {num_experts}"
    for width in widths:
        if width % ALIGNMENT:
            return f"d_model and d_expert that are multiples of {ALIGNMENT} (16 bytes of bf16); one is {width}"
    return _missing_on_device(device_index(device))


def device_index(device: torch.device) -> int:
    """The CUDA ordinal of a device, of the current one if it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _missing_on_device(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability != HOPPER_CAPABILITY:
        return f"a GPU of compute capability 9.0; cuda:{index} has {capability[0]}.{capability[1]}"
    for module, extra in (("cupy", "cupy-cuda12x or cupy-cuda13x"), ("numba.cuda", "numba-cuda")):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"the package {module.split('.')[0]} ({extra}); install blazeproto[cu12] or blazeproto[cu13]"
    return None
