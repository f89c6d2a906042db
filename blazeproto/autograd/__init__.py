"""What is saved, what is recomputed, in which order the kernels run: the bridge to PyTorch."""

from blazeproto.autograd import flops as _flops  # noqa: F401 - registers formulas
from blazeproto.autograd.checkpoint import checkpoint_contexts, checkpoint_policy
from blazeproto.autograd.lora import LowRank, moe_mlp_lora
from blazeproto.autograd.mlp import moe_mlp
from blazeproto.autograd.policy import SavePolicy, saved_bytes

__all__ = [
    "LowRank",
    "SavePolicy",
    "checkpoint_contexts",
    "checkpoint_policy",
    "moe_mlp",
    "moe_mlp_lora",
    "saved_bytes",
]
