"""The expert MLP in float64, as plainly as torch can say it: the oracle of the tests of `moe_mlp` and `MoE`.

One loop over the experts, ordinary autograd, no sorting, no grouped product, nothing saved cleverly. It follows
MoEBlaze §2.1 and Algorithm 1; see `moe_mlp`. Everything that is faster has to agree with this file.
"""

import torch
from torch import Tensor

from blazeproto.activations import activate


def moe_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    scores: Tensor,
    topk_experts: Tensor,
    *,
    num_experts: int,
    activation: str = "swiglu",
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    pair_tokens: Tensor | None = None,
    row_capacity: int | None = None,
) -> Tensor:
    """O_t = sum over the pairs of token t of S * (act(x_t W_up[e]^T + b_up[e]) W_down[e]^T + b_down[e]).

    Args:
        x: (T, d).
        gate_up_proj: (E, 2n, d), gate rows then up rows; (E, n, d) without a gate.
        down_proj: (E, d, n).
        scores: (T, K); (P,) when experts per token vary.
        topk_experts: (T, K) or (P,) expert ids. A pair whose id is outside [0, E) takes no part: it adds nothing,
            and every gradient through it is zero.
        up_bias: (E, 2n) or (E, n).
        down_bias: (E, d).
        pair_tokens: (P,) the token of each pair, when experts per token vary.
        row_capacity: R, the most pairs that take part: the first R by expert, and by number inside one. None: all.

    Returns:
        (T, d) in float64, differentiable in every floating-point argument.
    """
    x64, up64, down64, scores64 = (t.double() for t in (x, gate_up_proj, down_proj, scores.reshape(-1)))
    experts = topk_experts.reshape(-1)
    if pair_tokens is None:
        pair_tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(topk_experts.shape[1])

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    rows_left = experts.numel() if row_capacity is None else row_capacity
    for expert in range(num_experts):
        pairs = torch.nonzero(experts == expert).flatten()[:rows_left]
        rows_left -= len(pairs)
        tokens = pair_tokens[pairs].long()
        h = x64[tokens] @ up64[expert].T + (0 if up_bias is None else up_bias[expert].double())
        y = activate(h, activation) @ down64[expert].T + (0 if down_bias is None else down_bias[expert].double())
        out = out.index_add(0, tokens, scores64[pairs, None] * y)
    return out
