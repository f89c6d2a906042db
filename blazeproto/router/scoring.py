"""From router logits to scores, auxiliary losses and the balancing bias, in plain torch.

    logits (T, E) --dense_scores--> (T, E)        every expert's score
                  --gathered_scores--> (T, K)     those of the chosen experts
                  --pair_scores--> (P,)           those of a flat list of pairs

Everything here runs on any device, has static shapes and never waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.router.kinds import sums_to_one
from blazeproto.runtime import checks

# ---------------------------------------------------------------------------------------------------------------------
# Scores


def dense_scores(logits: Tensor, score: str) -> Tensor:
    """Every expert's score in [0, 1] for every token, (T, E): softmax over the experts, or sigmoid."""
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, dim=1)


def log_scores(logits: Tensor, score: str) -> Tensor:
    """Logarithms of scores, but for a term that all experts of a token share. Their softmax over any of a token's experts is
    those experts' scores divided by their sum, exact also where the scores themselves underflow."""
    return F.logsigmoid(logits) if score == "sigmoid" else logits


def gathered_scores(logits: Tensor, experts: Tensor, *, score: str, renormalize: bool, scale: float) -> Tensor:
    """The scores (T, K) of the experts (T, K) that were chosen; differentiable in the logits (T, E).

    score: ``softmax_topk``, ``topk_softmax`` or ``sigmoid``; `blazeproto.router.kinds` says what they are. The
    balancing bias chooses experts and never enters a score.
    ``renormalize`` makes a token's scores sum to one, then ``scale`` (DeepSeek-V3's routed scaling factor) multiplies.
    """
    index = experts.long()
    if sums_to_one(score, renormalize):
        return torch.softmax(log_scores(logits.gather(1, index), score), dim=1) * scale
    return dense_scores(logits, score).gather(1, index) * scale


def pair_scores(
    logits: Tensor, experts: Tensor, tokens: Tensor, *, score: str, renormalize: bool, scale: float
) -> Tensor:
    """The scores (P,) of a flat list of distinct pairs, as `gathered_scores`; zero for the unused ones (expert -1).

    With ``renormalize``, and with ``topk_softmax``, a token's scores sum to one over the experts that it has in the list.
    """
    num_tokens, num_experts = logits.shape
    used = experts >= 0
    entry = tokens.long() * num_experts + experts.long().clamp(min=0)  # of the flat (T, E) scores
    if sums_to_one(score, renormalize):
        # One more entry takes the unused pairs. Sums over a token's row keep one order; adding up pairs would not.
        mask = torch.zeros(num_tokens * num_experts + 1, dtype=torch.bool, device=logits.device)
        mask = mask.scatter(0, torch.where(used, entry, num_tokens * num_experts), True)
        # What is left out gets the lowest number and not -inf: a token without any pair would have NaN gradients.
        kept = torch.where(mask[:-1].view_as(logits), logits, torch.finfo(logits.dtype).min)
        scores = torch.softmax(log_scores(kept, score), dim=1)
    else:
        scores = dense_scores(logits, score)
    return torch.where(used, scores.flatten().gather(0, entry), 0.0) * scale


def selection_keys(logits: Tensor, score: str, bias: Tensor | None) -> Tensor:
    """What top-k ranks: the logits, or scores plus the balancing bias (DeepSeek-V3 §2.1.2). (T, E), no gradient."""
    logits = logits.detach()
    return logits if bias is None else dense_scores(logits, score) + bias


# ---------------------------------------------------------------------------------------------------------------------
# Balance


def expert_load(experts: Tensor, num_experts: int) -> Tensor:
    """How many pairs each expert has: experts of any shape, ids outside [0, E) not counted; returns (E,) int32."""
    ids = experts.flatten().long()
    # One more bin takes the sentinels. (torch.bincount would ask the device for the largest id.)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    load = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    return load.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))[:num_experts]


def load_balancing_loss(logits: Tensor, experts: Tensor, *, score: str = "softmax_topk") -> Tensor:
    """E * sum_e f_e P_e: Switch Transformer eq. 4 without its coefficient; 1 when the load is even.

    f_e is the fraction of the T*K choices in ``experts`` (T, K) that fell on expert e (eq. 5, for any K), P_e the mean
    router probability (eq. 6). Sigmoid scores are first divided by their sum (DeepSeek-V3 §2.1.2). The gradient flows
    through P alone. Returns a scalar; zero for T = 0.
    """
    num_tokens, num_experts = logits.shape
    probabilities = torch.softmax(log_scores(logits, score), dim=1)
    fraction = expert_load(experts, num_experts).to(logits.dtype) / max(experts.numel(), 1)
    return num_experts * (fraction * probabilities.sum(dim=0)).sum() / max(num_tokens, 1)


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of logsumexp(logits)²: ST-MoE eq. 5 without its coefficient. Scalar; zero for T = 0."""
    return torch.logsumexp(logits, dim=1).square().sum() / max(logits.shape[0], 1)


def updated_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The balancing bias after a step: up by ``rate`` where the load was below its mean, down where above.

    Wang et al. 2024, "Auxiliary-loss-free load balancing", Algorithm 1 (DeepSeek-V3 §2.1.2). bias (E,) floating point,
    load (E,) integers or floating point, on the same device, of the whole batch: sum it over ranks and accumulation steps
    first. Returns a new bias, of the old one's dtype. TypeError or ValueError for anything else.
    """
    checks.number("rate", rate, least=0)
    check_load(load, bias.shape[0], bias.device)
    load = load.to(torch.float64)  # counts are exact, and so is what is compared: E times a load with the sum of all
    return bias + rate * torch.sign(load.sum() - len(load) * load).to(bias.dtype)


def check_load(load: Tensor, num_experts: int, device: torch.device | None) -> None:
    """TypeError or ValueError unless ``load`` is (E,), integers or floating point, on this device (None: on any)."""
    if not isinstance(load, Tensor):
        raise TypeError(f"load: expected a tensor, got {type(load).__name__}")
    if load.dtype == torch.bool or load.is_complex():
        raise TypeError(f"load: expected an integer or floating-point tensor, got {load.dtype}")
    if load.shape != (num_experts,):
        raise ValueError(f"load: expected shape ({num_experts},), one count an expert, got {tuple(load.shape)}")
    if device is not None and load.device != device:
        raise ValueError(f"load: expected device {device} (the bias's), got {load.device}")
