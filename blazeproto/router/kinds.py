"""The three kinds of scores, what sums to one, and the names of choices: the same for torch, the kernels and their twins. No
torch in here.

softmax_topk    softmax over all experts, then the K largest    MoEBlaze §2.1; Switch Transformer eq. 1
topk_softmax    softmax over the K largest logits               Shazeer et al. 2017 eq. 3; Mixtral §2.1
sigmoid         sigmoid of each logit                           DeepSeek-V3 §2.1.2, eq. 15
"""

from typing import Literal, get_args

Score = Literal["softmax_topk", "topk_softmax", "sigmoid"]
SCORES: tuple[str, ...] = get_args(Score)

RoundingRule = Literal["nr_f", "sr_f", "nr_s", "balance_f", "up", "down"]  # of token rounding: SonicMoE appendix E.2
Priority = Literal["slot", "token", "score"]  # of a capacity: who stays
RULES: tuple[str, ...] = get_args(RoundingRule)
DRAWING_RULES = ("sr_f", "nr_s")
WAYS = (*RULES, "expert_choice", *get_args(Priority))
"""Of choosing a number of experts that varies from token to token, those that kernels know; see `choices.choose_mask`."""


def renormalizes(score: str, renormalize: bool | None) -> bool:
    """Whether a token's scores are divided by their sum: as asked for; where nothing is asked, sigmoid scores (DeepSeek-V3
    eq. 13). topk_softmax sums to one by itself."""
    return score == "sigmoid" if renormalize is None else bool(renormalize)


def sums_to_one(score: str, renormalize: bool | None) -> bool:
    """Whether a token's scores sum to one before scaling.

    They are then a softmax over its chosen experts: of their logits, or of the logarithms of their sigmoids. So they are
    computed, never by dividing scores by a sum, which underflows where the chosen logits lie far below 0 or below others.
    """
    return score == "topk_softmax" or renormalizes(score, renormalize)
