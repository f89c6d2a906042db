"""The balancing bias, which chooses experts beside their scores: its step, and its values in fp32 whatever else casts it.

Wang et al. 2024, "Auxiliary-loss-free load balancing"; DeepSeek-V3 §2.1.2.
"""

import torch
from torch import Tensor

from blazeproto.autograd.checks import check_dense
from blazeproto.runtime import checks


def updated_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The balancing bias after a step: up by ``rate`` where the load was below its mean, down where above.

    Wang et al. 2024, "Auxiliary-loss-free load balancing", Algorithm 1 (DeepSeek-V3 §2.1.2). bias (E,) floating point,
    load (E,) integers or floating point, on the same device, of the whole batch: sum it over ranks and accumulation steps
    first. They are trusted to be finite and not negative: with a NaN among them no bias moves. Returns a new bias, of the old
    one's dtype.
    """
    checks.number("rate", rate, least=0)
    load = load.to(torch.float64)  # counts are exact, and so is what is compared: E times a load with the sum of all
    return bias + rate * torch.sign(load.sum() - len(load) * load).to(bias.dtype)


def check_load(load: Tensor, num_experts: int, device: torch.device | None) -> None:
    """TypeError or ValueError unless ``load`` is (E,), integers or floating point, on this device (None: on any)."""
    check_dense("load", load)
    if load.dtype == torch.bool or load.is_complex() or load.is_quantized:
        raise TypeError(f"load: expected an integer or floating-point tensor, got {load.dtype}")
    if load.shape != (num_experts,):
        raise ValueError(f"load: expected shape ({num_experts},), one count an expert, got {tuple(load.shape)}")
    if device is not None and load.device != device:
        raise ValueError(f"load: expected device {device} (the bias's), got {load.device}")


def in_fp32(bias: Tensor) -> Tensor:
    """A bias (E,), after its ``data`` has become fp32 again if something has assigned a copy in another dtype.

    Its attribute ``exact`` is its memory as it was. Numbers of the copy that are the rounding of the exact ones count as these.
    Traced by a compiler, and of a subclass, nothing is assigned: returns the exact bias.
    """
    exact: Tensor | None = getattr(bias, "exact", None)
    if torch.compiler.is_compiling() or type(bias) is not Tensor:
        return bias if bias.dtype == torch.float32 or exact is None else exact.to(bias.device)
    if bias.dtype != torch.float32 and exact is None:  # somebody else's, as `functional_call` has it
        return bias.float()
    if bias.dtype != torch.float32:
        with torch.inference_mode(False), torch.no_grad():
            bias.data = unrounded(bias, exact)
    if exact is None or exact.data_ptr() != bias.data_ptr():
        vars(bias)["exact"] = bias.detach()
    return bias


def unrounded(rounded: Tensor, exact: Tensor | None) -> Tensor:
    """fp32 on the device of ``rounded``: its numbers, or the exact ones where it has their rounding. One in fp32 is itself."""
    wide = rounded.float()
    if rounded is wide or exact is None or exact.is_meta or wide.is_meta:
        return wide
    exact = exact.to(wide.device)
    return torch.where(exact.to(rounded.dtype) == rounded, exact, wide)
