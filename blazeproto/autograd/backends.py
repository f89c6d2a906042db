"""The backends, and which of them runs: ``backend="auto" | "hopper" | "ampere" | "torch"``.

`backend_on` is asked inside the operators, where tensors are real, so that nothing of it is traced by torch.compile
and every operator of one layer answers alike.

"auto" takes torch on a GPU where `python -m blazeproto doctor --check` failed, until a check passes.
"""

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, cast

import torch

from blazeproto.autograd import hopper_backend, torch_backend
from blazeproto.autograd.call import Backend
from blazeproto.gemm.tiles import CHUNK, MAX_EXPERTS
from blazeproto.runtime import arch, notes, optional
from blazeproto.runtime.arch import AMPERE

# Hopper's launches, of the other architecture's kernels: a step's rows say whose.
ampere_backend = cast(
    Backend,
    SimpleNamespace(
        **vars(hopper_backend) | {"rows_of": lambda dispatch: hopper_backend.rows_of(dispatch)._replace(arch=AMPERE)}
    ),
)
_BACKENDS: dict[str, Any] = {"hopper": hopper_backend, "ampere": ampere_backend, "torch": torch_backend}


@lru_cache(maxsize=1024)
def backend_on(
    name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int, needs: tuple[str, ...] = ()
) -> Backend:
    """The backend for tensors of this device and dtype, E experts, d and n. needs: of `Options.needs`. ValueError: kernels were
    asked for by name and cannot run; it says what is missing."""
    missing = (
        "" if name == "torch" else missing_for_kernels(device, dtype, num_experts, *widths, name=name, needs=needs)
    )
    if missing and name != "auto":
        raise ValueError(f'backend: expected one that can run here, got "{name}", which needs {missing}')
    return cast(Backend, _BACKENDS["torch" if missing is not None else kernels_on(name, device, needs)])


def kernels_on(name: str, device: torch.device, needs: Sequence[str] = ()) -> str:
    """The backend whose kernels run on a GPU that runs some. name: of a backend with kernels, or "auto"."""
    if name in _BACKENDS:
        return name
    found = arch.arch_of(torch.cuda.get_device_capability(device_index(device)), needs)
    assert found is not None
    return found.name


def dispatch_backend(name: str, device: torch.device) -> Backend:
    """The backend that builds the dispatch of tensors on ``device``, whatever the products' dtype and widths."""
    return hopper_backend if has_dispatch_kernels(name, device) else torch_backend


def has_dispatch_kernels(backend: str, device: torch.device) -> bool:
    """Whether the Numba kernels of dispatch and top-k run for tensors on ``device``."""
    return backend != "torch" and device.type == "cuda" and _missing_on_device(device_index(device), backend) is None


def missing_for_kernels(
    device: torch.device,
    dtype: torch.dtype,
    num_experts: int,
    *widths: int,
    name: str = "auto",
    needs: Sequence[str] = (),
) -> str | None:
    """The reason why the kernels cannot run with this device, dtype, E and these widths (d, n); None if they can.
    name: of the backend whose kernels are meant, or "auto" for any.  needs: what they must have (`Options.needs`)."""
    if device.type != "cuda":
        return f"a CUDA GPU of {arch.WANTED}; the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"torch.bfloat16 tensors; they are {dtype}"
    if num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts; there are {num_experts}"
    for width in widths:
        if width % CHUNK:
            return f"d_model and d_expert that are multiples of {CHUNK} (16 bytes of bf16); one is {width}"
    return _missing_on_device(device_index(device), name, tuple(needs))


def what_runs(
    name: str, device: torch.device, dtype: torch.dtype, num_experts: int, *widths: int, needs: Sequence[str] = ()
) -> str:
    """The result of `backend_on` in words, with its reason: "hopper", "ampere", "torch", or "nothing" if it raises."""
    if name == "torch":
        return name
    missing = missing_for_kernels(device, dtype, num_experts, *widths, name=name, needs=needs)
    if missing is None:
        return kernels_on(name, device, needs)
    return f"{'torch' if name == 'auto' else 'nothing'}: the kernels need {missing}"


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
def _missing_on_device(index: int, name: str = "auto", needs: tuple[str, ...] = ()) -> str | None:
    if lacks := arch.missing(torch.cuda.get_device_capability(index), f"cuda:{index}", name, needs):
        return lacks
    for package in optional.KERNELS:
        if lacks := optional.missing(package):
            warnings.warn(f"backend: the kernels need {lacks}", stacklevel=2)
            return lacks
    return _failed_check(index) if name == "auto" and index < torch.cuda.device_count() else None


@cache
def _failed_check(index: int) -> str | None:
    """The reason why "auto" takes no kernels on a GPU where `doctor --check` failed; None where no failure is noted. It warns,
    once."""
    gpu = torch.cuda.get_device_name(index)
    if not notes.noted("check", gpu):
        return None
    mend = f"run it again or delete {notes.note_path('check', gpu)}"
    lacks = f"`python -m blazeproto doctor --check` to pass on {gpu}; it failed: {mend}"
    warnings.warn(f'backend: "auto" takes torch, since the kernels need {lacks}', stacklevel=2)
    return lacks


def __getattr__(name: str) -> Any:
    """HOPPER_CAPABILITY: an old name, to be removed after one release."""
    if name != "HOPPER_CAPABILITY":
        raise AttributeError(f"module 'blazeproto.autograd.backends' has no attribute {name!r}")
    warnings.warn(
        "blazeproto.autograd.backends.HOPPER_CAPABILITY is blazeproto.runtime.arch.HOPPER.least now",
        DeprecationWarning,
        stacklevel=2,
    )
    return arch.HOPPER.least
