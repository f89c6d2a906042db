"""Several GPUs: expert parallelism, on torch.distributed. ``docs/distributed.md`` says what holds across ranks."""

from blazeproto.distributed.all_to_all import AllToAll
from blazeproto.distributed.parallel import clip_grad_norm_, expert_parallel
from blazeproto.distributed.symmetric import Symmetric, check_overflow

__all__ = ["AllToAll", "Symmetric", "check_overflow", "clip_grad_norm_", "expert_parallel"]
