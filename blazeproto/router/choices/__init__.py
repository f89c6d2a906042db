"""Ways of choosing experts beyond a token's own top K, in plain torch, for any device and dtype.

Each is a frozen dataclass of options in a file of its own. `Router` calls operators (`blazeproto.router.ops`), which choose the
same by kernels where these run.

    TokenRounding    token choice, each expert's count rounded to a multiple of the kernel's tile   SonicMoE §5
    ExpertChoice     every expert takes the same number of tokens, its best                         Zhou et al. 2022
    Capacity         token choice, what overflows an expert's capacity is dropped                   GShard, Switch
    Hash             a fixed pseudo-random function of the token id                                 Roller et al. 2021
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from blazeproto.router.choices.capacity import Capacity
from blazeproto.router.choices.choice import VaryingChoice
from blazeproto.router.choices.expert_choice import ExpertChoice
from blazeproto.router.choices.hashing import Hash
from blazeproto.router.choices.token_rounding import TokenRounding
from blazeproto.runtime import checks

Choice = VaryingChoice | Hash
CHOICES: dict[str, Any] = {
    "token_rounding": TokenRounding,
    "expert_choice": ExpertChoice,
    "capacity": Capacity,
    "hash": Hash,
}


def varying_choice(by: str) -> type[VaryingChoice]:
    """The choice that has this name among its `WAYS`. ValueError for an unknown one."""
    named = {name: choice for choice in CHOICES.values() for name in getattr(choice, "WAYS", ())}
    checks.one_of("by", by, tuple(named))
    return named[by]


def make_choice(name: str, options: dict[str, Any], keywords: Iterable[str] = ()) -> Choice | None:
    """The choice of this name, with its options; None for ``"top_k"``, which has none.

    ValueError unless there is one of this name, TypeError for an option that it does not take.
    keywords: further names that may have been meant, those of `Router`.
    """
    checks.one_of("choose", name, ("top_k", *CHOICES))
    options_of = {other: [field.name for field in fields(kind)] for other, kind in CHOICES.items()} | {"top_k": []}
    for option in options:
        if option not in options_of[name]:
            owner = next((other for other, names in options_of.items() if option in names), None)
            hint = f"; choose={owner!r} takes it" if owner else checks.nearest(option, [*options_of[name], *keywords])
            takes = f"the options {', '.join(options_of[name])}" if options_of[name] else "no options"
            raise TypeError(f"{option}: unknown keyword (choose={name!r} takes {takes}){hint}")
    return None if name == "top_k" else CHOICES[name](**options)
