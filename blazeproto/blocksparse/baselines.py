"""The two ways to compute experts that MegaBlocks was compared with, in plain torch operations and plain autograd.

    DroppingMoE      experts as one batched product of C rows each: padded where an expert has fewer tokens, dropped where more
    SequentialMoE    experts one after the other, each with its own rows

    tokens of     0 0 0 0 0  0  0 1 2 2 2        C = 4      0 0 0 0    of expert 0 three are dropped
                  -------------                             1 . . .    . is padding: zeros, multiplied like a row
                  an expert's rows, by expert               2 2 2 .

Both are `blazeproto.MoE` with other experts: its parameters, its router, its losses, so that a checkpoint of one loads in the
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blazeproto.activations import activate
from blazeproto.autograd.checks import check_choice, check_experts
from blazeproto.autograd.operators import as_experts_see, cast
from blazeproto.autograd.options import OPTION_NAMES, Options, is_options
from blazeproto.layer import MoE, MoEStats
from blazeproto.router.choices import Capacity
from blazeproto.runtime.checks import integer

Weights = list[Tensor | None]  # up, its bias or None, down, its bias or None
PLAIN = Options(backend="torch")  # what these layers have, but for the activation


class PlainMoE(MoE):
    """A `blazeproto.MoE` whose experts are computed by `_sum_of_experts`, and differentiated by autograd.

    Not a layer by itself: `DroppingMoE` and `SequentialMoE` are.
    """

    own_options: tuple[str, ...] = ("activation",)  # of its experts, that may be chosen

    def __init__(self, *sizes: int, **keywords: Any) -> None:
        super().__init__(*sizes, **{"backend": PLAIN.backend} | keywords)

    def _experts(
        self,
        x: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        scores: Tensor,
        experts: Tensor,
        *,
        num_experts: int,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        options: Options,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
    ) -> Tensor:
        """What `blazeproto.moe_mlp` computes, checked and cast as there."""
        sizes: dict[str, Any] = {"num_experts": num_experts, "options": options}
        check_experts(x, (up_proj,), down_proj, up_bias, down_bias, None, None, **sizes)
        check_choice(x, scores, experts, None, pair_tokens, token_offsets, **sizes)
        x, scores = as_experts_see(x, scores)
        if pair_tokens is None:
            pair_tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(experts.shape[1])
        weights = [w if w is None else cast(w, x.dtype) for w in (up_proj, up_bias, down_proj, down_bias)]
        return self._sum_of_experts(x, weights, scores.flatten(), experts.flatten(), pair_tokens).to(x.dtype)

    def _sum_of_experts(self, x: Tensor, weights: Weights, scores: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
        """x (T, d) floating point, and of pairs, token by token, scores (P,) float32 or float64, experts (P,) and tokens (P,)
        integers; an expert outside [0, E) is none -> (T, d) of the scores' dtype."""
        raise NotImplementedError

    def saved_bytes(self, num_tokens: int, dtype: torch.dtype | None = None, *, input_grad: bool = True) -> int:
        """NotImplementedError, whatever num_tokens, dtype, input_grad: autograd decides what is kept, and
        `torch.autograd.graph.saved_tensors_hooks` sees it."""
        raise NotImplementedError(f"saved_bytes: expected a layer that decides what is kept, got {type(self).__name__}")

    def extra_repr(self) -> str:
        """As `blazeproto.MoE` shows, without the save policy, which these layers have not."""
        return super().extra_repr().replace(f"save={self.save}, ", "", 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options" and is_options(value):
            for option in OPTION_NAMES:
                ours, got = getattr(PLAIN, option), getattr(value, option)
                if got != ours and option not in self.own_options:
                    raise ValueError(f"{option}: expected {ours}, as {type(self).__name__} has no other, got {got}")
        super().__setattr__(name, value)


class DroppingMoE(PlainMoE):
    """`blazeproto.MoE` with a capacity: an expert computes C rows, whatever its load. MegaBlocks §2.2 and Figure 1.

    The experts are one batched product of (E, C, d), as in GShard (Lepikhin et al. 2021) and Switch Transformer (Fedus et al.
    2022). An expert's first C pairs are computed, the others are dropped: a dropped pair adds nothing and has no gradient. The
    output of a token that loses all its pairs is 0; a residual connection carries it on. First means by token, a token's K
    choices together: the order of Switch, whose K is 1, and of MegaBlocks' code. GShard's Algorithm 1, and Tutel, take all
    first choices before any second one (`blazeproto.router.choices.Capacity` has both orders). So whether a pair is dropped does
    not depend on the tokens after it, but for their number T.

    C = capacity_factor * T * K / E, rounded up, at most T. MegaBlocks §2.2 writes the quotient for K = 1, without rounding; its
    code and Switch's round that down, DeepSpeed's up, Tutel's T / E up. Rounded up, factor 1 drops nothing of an even load.
    Masked tokens count in T, which needs no look at the mask, but take no place.

    Args:
        d_model, d_expert, num_experts, top_k: d, n, E, K.
        capacity_factor: above 0; MegaBlocks §3 measures 1, 1.5 and 2. None: C is the largest load, so that nothing is dropped.
            This is the dynamic capacity factor of Tutel (Hwang et al. 2022), which MegaBlocks §6.1 compares with. The host
            then waits for the device, once a forward pass; with a factor it does not.
        keywords: `blazeproto.MoE`'s, but for the options of its experts: of these only ``activation`` may differ from what
            plain torch has. ``backend``, ``save`` and the like are refused.

    A layer of float32 takes x in bf16 or fp16 too; a weight's gradient is then rounded to x's dtype. On a GPU the sum over a
    token's experts, and x's gradient, are added in an order that varies from run to run, unless
    ``torch.use_deterministic_algorithms`` asks for one.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        num_experts: int,
        top_k: int,
        *,
        capacity_factor: float | None = 1.0,
        **keywords: Any,
    ) -> None:
        limit = None if capacity_factor is None else Capacity(capacity_factor)  # checks it too
        super().__init__(d_model, d_expert, num_experts, top_k, **keywords)
        self.limit = limit

    @property
    def capacity_factor(self) -> float | None:
        """As it was given."""
        return None if self.limit is None else self.limit.capacity_factor

    def capacity(self, num_tokens: int) -> int | None:
        """C for T = ``num_tokens``; None where it is dynamic."""
        integer("num_tokens", num_tokens, least=0)
        return None if self.limit is None else self.limit.size(num_tokens, self.num_experts, self.top_k)

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        experts: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """As `blazeproto.MoE.forward`: x (..., d) floating point -> out (..., d) of x's dtype, and what the router did.

        The stats' ``load`` is the router's, before any pair is dropped; ``overflow`` is how many are.
        token_ids: (...) integers, for hash routing alone.  mask: (...) bool, False at padding.
        experts, scores: (..., K) integers and floating point, of an inference engine, say.
        TypeError or ValueError names what does not fit.
        """
        out, stats = super().forward(x, token_ids, mask, experts, scores)
        capacity = self.capacity(x.shape[:-1].numel())
        places = stats.load if capacity is None else stats.load.clamp_max(capacity)
        return out, stats._replace(overflow=(stats.load - places).sum(dim=0, keepdim=True, dtype=torch.int32))

    def _sum_of_experts(self, x: Tensor, weights: Weights, scores: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
        """By one batched product for all experts; `PlainMoE._sum_of_experts` gives the shapes."""
        order = experts.argsort(stable=True)  # by expert, and inside one as they came
        begins = torch.searchsorted(
            experts[order], torch.arange(self.num_experts + 1, device=x.device, dtype=experts.dtype)
        )
        loads, capacity = begins.diff(), self.capacity(x.shape[0])
        if capacity is None:
            capacity = int(loads.max())  # waits for the device
        place = torch.arange(capacity, device=x.device)  # (C,)
        padding = place >= loads[:, None]  # (E, C)
        pairs = order[(begins[:-1, None] + place).clamp_max(len(order) - 1)]  # (E, C); where there is padding, any
        token = tokens[pairs].flatten()

        rows = x.index_select(0, token).unflatten(0, pairs.shape).masked_fill(padding[..., None], 0)
        # Both are 0 at padding: a NaN of an expert that no token chose, or of a score that multiplies nothing, times 0 is NaN.
        y = expert_mlp(rows, weights, self.activation).masked_fill(padding[..., None], 0)
        weighed = scores[pairs].masked_fill(padding, 0)[..., None] * y
        return torch.zeros_like(x, dtype=scores.dtype).index_add_(0, token, weighed.flatten(0, 1))


class SequentialMoE(PlainMoE):
    """`blazeproto.MoE` as a loop over its experts: the code of Cerebras' "MoE at Scale", Figure 1, and Megatron-LM's SwitchMLP,
    which MegaBlocks appendix A and Figure 10 compare with.

    Nothing is dropped or padded. An expert's products have only its own rows, so that its time grows with E at the same number
    of operations, and the host waits for the device once an expert, to learn the number of its rows.

    Args:
        d_model, d_expert, num_experts, top_k: d, n, E, K.
        keywords: as for `DroppingMoE`.

    Dtypes and the order of sums are `DroppingMoE`'s.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """

    def __init__(self, d_model: int, d_expert: int, num_experts: int, top_k: int, **keywords: Any) -> None:
        super().__init__(d_model, d_expert, num_experts, top_k, **keywords)

    def _sum_of_experts(self, x: Tensor, weights: Weights, scores: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
        """By the products of one expert after the other; `PlainMoE._sum_of_experts` gives the shapes."""
        out = torch.zeros_like(x, dtype=scores.dtype)
        for expert in range(self.num_experts):
            pairs = (experts == expert).nonzero().flatten()  # waits for the device
            rows = x.index_select(0, tokens[pairs])
            y = expert_mlp(rows, [w if w is None else w[expert] for w in weights], self.activation)
            out.index_add_(0, tokens[pairs], scores[pairs, None] * y)
        return out


def expert_mlp(x: Tensor, weights: Weights, activation: str) -> Tensor:
    """down(act(up(x))): x (R, d) floating point by one expert's weights, or (E, R, d) by all of them -> its shape and dtype.

    MoEBlaze §2.1. weights: up (2n, d), ungated (n, d), its bias (2n,) or None, down (d, n), its bias (d,) or None, of x's dtype;
    with E in front for all experts.  activation: a name of `blazeproto.activations`; ValueError for another.
    """
    up, up_bias, down, down_bias = weights
    return _linear(activate(_linear(x, up, up_bias), activation), down, down_bias)


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    y = x @ weight.mT  # torch.bmm, where there is a dimension of experts
    return y if bias is None else y + bias[..., None, :]
