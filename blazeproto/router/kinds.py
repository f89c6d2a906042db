"""Names and numbers that the choices in torch and the kernels share. No torch in here, and no Numba."""

from typing import Literal, get_args

RoundingRule = Literal["nr_f", "sr_f", "nr_s", "balance_f", "up", "down"]  # of token rounding: SonicMoE appendix E.2
Priority = Literal["slot", "token", "score"]  # of a capacity: which pairs stay
RULES: tuple[str, ...] = get_args(RoundingRule)
DRAWING_RULES = ("sr_f", "nr_s")
WAYS = (*RULES, "expert_choice", *get_args(Priority))
"""What kernels choose by where the number of experts varies from token to token; `choices` says what each means."""

GOLDEN, MASK_32 = 0x9E3779B9, 0xFFFFFFFF  # of hash routing
