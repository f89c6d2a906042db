"""Frozen weights of experts in 4 or 8 bits, as checkpoints store them, beside which low-rank factors are trained.

up = stored.mxfp4(blocks, scales)               # or nf4, int4, fp8, or quantize(weight, "nf4")
moe_mlp(x, up, down, scores, ids, num_experts=E, up_factors=LowRank(a, b))
"""

from blazeproto.stored.fp8 import fp8
from blazeproto.stored.int4 import int4
from blazeproto.stored.mxfp4 import mxfp4
from blazeproto.stored.nf4 import Nested, nf4
from blazeproto.stored.weight import FORMATS, StoredWeight, quantize

__all__ = ["FORMATS", "Nested", "StoredWeight", "fp8", "int4", "mxfp4", "nf4", "quantize"]
