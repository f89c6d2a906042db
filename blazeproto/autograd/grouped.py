"""``grouped_experts``: experts on rows that have arrived, with their counts, as programs have them that move tokens themselves.

    x (R, d)    | rows of expert 0 | rows of expert 1 | ... | padding |      counts (E,), on the device, say where each ends

To `moe_mlp`'s operators a row is a token with one expert and a score of 1: the dispatch has K = 1, its lists count up, and it is
made of the counts without waiting for the device. Padding belongs to no expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd import node
from blazeproto.autograd.call import Beside, ExpertsCall, pack
from blazeproto.autograd.checks import check_counts, check_dense, check_experts
from blazeproto.autograd.chunks import WHOLE
from blazeproto.autograd.low_rank import LowRank, tensors_of
from blazeproto.autograd.mlp import how_of, operator_tensors
from blazeproto.autograd.operators import on_another_gpu, without_autocast
from blazeproto.autograd.options import DEFAULTS, Options, merged, takes_options
from blazeproto.autograd.private import refuse_transforms, unobserved
from blazeproto.dispatch.structures import Dispatch


@takes_options("row_capacity", "workspace_bytes", "validate")
def grouped_experts(
    x: Tensor,
    gate_up_proj: Tensor | tuple[Tensor, Tensor],
    down_proj: Tensor,
    counts: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_factors: LowRank | None = None,
    down_factors: LowRank | None = None,
    options: Options | None = None,
    **keywords: Any,
) -> Tensor:
    """out_r = MLP_e(x_r), e being the expert of row r. MoEBlaze §2.1, without its sum over experts.

    On a GPU the host waits for nothing. Autocast changes nothing.

    Args:
        x: (R, d) rows by expert, bfloat16, float16, float32 or float64. Rows beyond the counts are padding: whatever is in them,
            their output and their gradient are zero.
        gate_up_proj: (E, 2n, d) or (E, n, d), of x's dtype or, unless that is float64, float32, in the layouts of `moe_mlp`;
            or a pair (gate, up), (E, n, d) each, of one dtype. A pair is joined for forward and again for backward, and what is
            saved between the two is the pair itself, so that a layer which FSDP has sharded again keeps no copy.
        down_proj: (E, d, n), of any dtype that gate_up_proj may have.
        counts: (E,) rows of each expert, int32 or int64, on x's device. Their values are trusted not to be negative; of more
            than R rows those past R are left out.
        up_bias: (E, 2n) or (E, n), of any dtype that gate_up_proj may have.
        down_bias: (E, d), of any dtype that gate_up_proj may have.
        up_factors, down_factors: as in `moe_mlp`.
        options: an `Options`, in place of the keywords below; a keyword that is given too replaces its field.
        keywords: the fields of `Options`.

    Returns:
        (R, d) in the dtype of ``x``.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and
            nothing has been launched.
        RuntimeError: on a double backward.
    """
    options = merged("grouped_experts", options, keywords)
    for name in ("row_capacity", "workspace_bytes", "validate"):
        expected, got = getattr(DEFAULTS, name), getattr(options, name)
        if got != expected:
            raise ValueError(f"{name}: expected {expected} for rows that have arrived, got {got}")
    up = gate_up_proj if isinstance(gate_up_proj, tuple) else (gate_up_proj,)
    weights = (down_proj, up_bias, down_bias, up_factors, down_factors)
    factors = tensors_of(up_factors, down_factors)
    refuse_transforms("grouped_experts", (x, *up, down_proj, up_bias, down_bias, *factors))
    check_dense("down_proj", down_proj)
    num_experts = len(down_proj) if down_proj.dim() else 0
    with without_autocast(x.device.type if isinstance(x, Tensor) else "cpu"):
        check_experts(x, up, *weights, num_experts=num_experts, options=options, rows="R")
        check_counts(x, counts, num_experts)
        # A dispatcher with a fixed capacity drops rows that don't fit, and still counts them.
        ends = counts.cumsum(0, dtype=torch.int64).clamp_max(x.shape[0]).to(torch.int32)
        places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        places = places.masked_fill(places >= ends[-1], -1)
        scores = x.new_ones(x.shape[0], 1, dtype=torch.promote_types(x.dtype, torch.float32))
        parameters = operator_tensors(x, up, *weights, scores)
        direct = unobserved((*parameters, counts)) and not on_another_gpu(x)
        dispatch = Dispatch(places, F.pad(ends, (1, 0)), places, None, num_experts, 1, x.shape[0])
        call = ExpertsCall(parameters, Beside(), dispatch, how_of(options, parameters, 1, WHOLE, ""))
        return node.experts.entry(parameters, unobserved=direct)(*pack(call))[0]
