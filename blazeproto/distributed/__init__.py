"""Several GPUs: expert parallelism, on torch.distributed. ``docs/distributed.md`` says what holds across ranks."""

from blazeproto.distributed.all_to_all import AllToAll
from blazeproto.distributed.clip import clip_grad_norm_
from blazeproto.distributed.parallel import expert_parallel

__all__ = ["AllToAll", "clip_grad_norm_", "expert_parallel"]
