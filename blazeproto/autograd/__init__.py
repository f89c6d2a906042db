"""The bridge to PyTorch: it decides what to save, what to recompute, and in which order the kernels run."""

from blazeproto.autograd.checkpoint import checkpoint_contexts, checkpoint_policy
from blazeproto.autograd.kept import QuantizedWeights
from blazeproto.autograd.low_rank import LowRank
from blazeproto.autograd.mlp import grouped_experts, moe_mlp, quantize_weights
from blazeproto.autograd.options import Options
from blazeproto.autograd.policy import SavePolicy, saved_bytes
from blazeproto.autograd.ranks import Arrived, Dispatcher
from blazeproto.gemm.recipe import Recipe

__all__ = [
    "Arrived",
    "Dispatcher",
    "LowRank",
    "Options",
    "QuantizedWeights",
    "Recipe",
    "SavePolicy",
    "checkpoint_contexts",
    "checkpoint_policy",
    "grouped_experts",
    "moe_mlp",
    "quantize_weights",
    "saved_bytes",
]
