"""torchtitan's own MoE block, in small, with the override and without."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

OVERRIDE = "blazeproto.integrations.torchtitan.experts"
D, N, EXPERTS = 32, 24, 6


@cache
def missing() -> str | None:
    """The packages that torchtitan's MoE block needs and that aren't there; None if it can be imported from now on.

    torch for CPUs comes without Triton, which the kernels of one of torchtitan's dispatchers import; there these are left out.
    """
    if importlib.util.find_spec("triton") is None:
        sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    packages = ("torchtitan", "spmd_types", "tyro")
    return ", ".join(package for package in packages if importlib.util.find_spec(package) is None) or None


def load() -> ModuleType:
    """`blazeproto.integrations.torchtitan`; skips where torchtitan isn't there."""
    if missing():
        pytest.skip(f"needs torchtitan 0.3 or later; missing: {missing()}", allow_module_level=True)
    return importlib.import_module("blazeproto.integrations.torchtitan")


def block_config(*, d: int = D, n: int = N, num_experts: int = EXPERTS, top_k: int = 2, **options: Any) -> Any:
    """The layer of torchtitan's MoE block, by its own builders. options: of its router, and shared: with a shared expert."""
    load()
    from torchtitan.models.common import config_utils as build

    shared = options.pop("shared", False)
    initialise = dict.fromkeys(("weight", "w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
    feed_forward = build.make_ffn_config(dim=d, hidden_dim=n, w1_param_init=initialise, w2w3_param_init=initialise)
    return build.make_moe_config(
        num_experts=num_experts,
        router=build.make_router_config(
            dim=d, num_experts=num_experts, gate_param_init=initialise, top_k=top_k, **options
        ),
        routed_experts=build.make_routed_experts_config(
            dim=d, hidden_dim=n, num_experts=num_experts, top_k=top_k, param_init=initialise, comm_backend="standard"
        ),
        shared_experts=feed_forward if shared else None,
    )


def overridden(config: Any, **kwargs: Any) -> Any:
    """The configuration with the override, as the command line's --override.imports applies it."""
    from torchtitan.config import OverrideConfig, apply_overrides

    apply_overrides(OverrideConfig(imports=[(OVERRIDE, kwargs)]), config)
    return config


def blocks(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    save: str = "minimal",
    backend: str = "auto",
    **options: Any,
) -> tuple[Any, Any]:
    """The block without the override and with it, with the same weights, taken over through a state dict."""
    plain, ours = (
        block_config(**options).build(),
        overridden(block_config(**options), save=save, backend=backend).build(),
    )
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    ours.load_state_dict(plain.state_dict())
    return plain.to(device, dtype), ours.to(device, dtype)


def train(block: nn.Module, x: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    """The output and every gradient by name; dX as "x"."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    out = block(x)
    out.backward(d_out)
    gradients = {"x": x.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient of {missing}"
    return {"out": out.detach(), **{name: gradient.clone() for name, gradient in gradients.items()}}


@contextlib.contextmanager
def products_in_float32() -> Iterator[None]:
    """torchtitan's experts, and ours there, call Tensor.bfloat16 on all that they multiply. Here it changes nothing, so that
    results can be compared to the last digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", lambda tensor: tensor)
        yield
