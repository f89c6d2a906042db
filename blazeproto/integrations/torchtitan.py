"""blazeproto's experts in torchtitan, by one line.

    torchrun ... -m torchtitan.train --module qwen3 ... --override.imports blazeproto.integrations.torchtitan.experts

torchtitan puts `Experts` in the place of its ``GroupedExperts`` in a model's configuration. Router, dispatcher and communication
stay torchtitan's; parameters keep their names and shapes, so checkpoints are the same. As there, products are in bfloat16.

Importing this module raises ImportError where torchtitan is missing, older than 0.3, or lacks what is used of it or what its
models import, such as Triton.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from blazeproto.autograd import grouped_experts
from blazeproto.autograd.checks import FLOAT_DTYPES
from blazeproto.autograd.options import Options
from blazeproto.runtime.optional import look, need

__all__ = ["REFUSED", "Experts", "experts"]

need("torchtitan")  # before what only that version may have is imported

try:
    import spmd_types as spmd
    import torchtitan.models.common.moe  # noqa: F401
except ModuleNotFoundError as error:
    hint = "; torch's builds for CUDA bring it, those for CPUs do not" if error.name == "triton" else ""
    raise ImportError(
        f"torchtitan: expected {error.name}, which its models import, got none{hint}", name=error.name
    ) from error
look(
    "torchtitan",
    {
        "torchtitan.config.override:derive": (2, ("save",)),
        "torchtitan.config.override:override": (0, ("target", "description")),
        "torchtitan.models.common.moe:GroupedExperts.Config": None,
        "torchtitan.models.common.moe:GroupedExperts.forward": (3, ()),
    },
)

from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

REFUSED = {
    "Float8": "float8 products",
    "MXFP8": "MXFP8 products",
    "GptOss": "biases and a clamped SwiGLU, gate and up alternating",
    "Fused": "gate and up weights in one parameter",
}
"""What is refused, by a part of the names of its classes."""


def _refuse(kind: str) -> None:
    found = [what for part, what in REFUSED.items() if part in kind]
    why = " and ".join(found) or "a class of its own, which may compute something else"
    raise ValueError(f"experts: expected torchtitan's GroupedExperts, not changed by anything else, got {kind}: {why}")


def _local(name: str, weight: Tensor) -> Tensor:
    """The part of a weight that is on this rank, as torchtitan's experts take it; in bfloat16 where no kernel casts it."""
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    # A compiler reads no __module__. What torchtitan's converters make is refused by its class before that.
    wrapped = not torch.compiler.is_compiling() and type(weight).__module__.startswith("torchao.")
    if wrapped or weight.dtype not in FLOAT_DTYPES:
        got = "a tensor of torchao" if wrapped else weight.dtype
        raise ValueError(f"{name}: expected a weight that is not quantised, got {got}")
    return weight if weight.dtype in (torch.bfloat16, torch.float32) else weight.bfloat16()


class Experts(GroupedExperts):
    """torchtitan's ``GroupedExperts`` on `grouped_experts`. MoEBlaze §2.1.

    config: its sizes, ``save`` and ``backend``. ValueError for a policy or a backend that does not exist, and for a class that is
    derived of this one, as torchtitan's quantisation makes them: it would not be quantised.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Sizes, initialisation and sharding as torchtitan has them; save: a name of `SavePolicy`.  backend: as in `moe_mlp`."""

        save: str = "minimal"
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        if type(self) is not Experts:
            _refuse(type(self).__name__)
        super().__init__(config)
        self.options = Options(save=config.save, backend=config.backend)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts' output, row by row; computed in bfloat16, as torchtitan does.

        Args:
            x_RD: (R, d) rows by expert, of any floating dtype; those past the counted ones are padding, and come out as zeros.
            num_tokens_per_expert_E: (E,) rows of each expert that is here, int32 or int64; their values stay on the device.

        Returns:
            (R, d) in the dtype of ``x_RD``.

        Raises:
            TypeError, ValueError: quantised weights, SPMD type checking, or what `grouped_experts` raises.
        """
        if spmd.is_type_checking():
            raise ValueError("debug.spmd_typechecking: expected False with blazeproto's experts, got True")
        w1, w3, w2 = (_local(name, getattr(self, name)) for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
        return grouped_experts(x_RD.bfloat16(), (w1, w3), w2, num_tokens_per_expert_E, options=self.options).type_as(
            x_RD
        )


@override(target=GroupedExperts.Config, description="blazeproto's kernels for routed experts")
def experts(cfg: GroupedExperts.Config, *, save: str = "minimal", backend: str = "auto") -> Experts.Config:
    """The override: what ``--override.imports blazeproto.integrations.torchtitan.experts`` names.

    cfg: torchtitan's configuration of the experts.
    save: what is kept for backward, see `SavePolicy`; on the command line
        ``'blazeproto.integrations.torchtitan.experts={"save": "recompute"}'``.
    backend: as in `moe_mlp`: "hopper" or "ampere" names the kernels.

    Returns the configuration of `Experts` of the same sizes. ValueError for experts that are not torchtitan's plain ones, by
    name (`REFUSED`), and for a policy or a backend that does not exist.
    """
    if type(cfg) is not GroupedExperts.Config:
        _refuse(getattr(type(cfg)._owner, "__name__", type(cfg).__qualname__))
    Options(save=save, backend=backend)
    return derive(cfg, Experts.Config, save=save, backend=backend)
