"""A choice whose number of experts varies from token to token: its interface, and the steps that the formulas share."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from blazeproto.router.kinds import DRAWING_RULES


class VaryingChoice:
    """Options of such a choice: the base of frozen dataclasses.

    An object is called with scores (T, E) in [0, 1] or NaN and the token choice (T, K), and returns the mask (T, E) of the pairs
    that run. It crosses to operators as plain values (`crossing`): a name, numbers, and the two sizes that may depend on T.
    """

    WAYS: ClassVar[tuple[str, ...]]
    """What ``by`` may be: names that no other choice has."""
    KERNELS: ClassVar[str] = ""
    """The module whose ``launch_choice`` chooses the same on a Hopper GPU; empty where none does."""
    RENORMALIZES: ClassVar[bool] = False  # a token's scores, unless asked otherwise
    LOAD_IS_CHOSEN: ClassVar[bool] = False  # and not made by scores, so that there is nothing to balance
    DROPS: ClassVar[bool] = False  # pairs of the token choice
    eval_top_k: bool
    """Whether plain token choice takes its place when not training."""

    @property
    def by(self) -> str:
        return self.WAYS[0]

    @property
    def options(self) -> tuple[float, ...]:
        return ()

    def size(self, num_tokens: Any, num_experts: int, top_k: int) -> Any:
        """An integer of the choice's, from T: the unmasked tokens', which with a mask is a tensor (), as the size is then."""
        return 0

    def max_pairs(self, num_tokens: int, num_experts: int, top_k: int) -> int:
        """P, the most pairs that there can be: from host integers, so that every shape is known before a kernel runs."""
        return num_tokens * num_experts

    def draws(self, num_experts: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor | None:
        """(E,) in [0, 1), where the choice needs random numbers: in fp32 whatever torch's default dtype is, for in bf16 a
        probability of .999 is 1."""
        if self.by not in DRAWING_RULES:
            return None
        return torch.rand(num_experts, device=device, dtype=torch.float32, generator=generator)

    @staticmethod
    def mask(scores: Tensor, experts: Tensor, draws: Tensor | None, by: str, options: list[float], size: int) -> Tensor:
        """The formula, in torch, on any device: static shapes, and no wait for the device.

        With a mask the masked tokens come last, with scores 0 and experts -1, and ``size`` is a tensor (); entries for masked
        tokens are ignored.
        """
        raise NotImplementedError

    def crossing(
        self,
        scores: Tensor,
        experts: Tensor,
        generator: torch.Generator | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, str, tuple[float, ...], int, int, Tensor | None]:
        """The operator's arguments, in order: `mask`'s arguments, ``max_pairs``, and ``limits``: with ``counted`` (T,) bool,
        which says what tokens are not masked, (2,) int32 on the device, their number and the size for it.

        generator: of `draws`; default: torch's.
        """
        sizes = (*scores.shape, experts.shape[1])  # T, E, K
        draws, limits = self.draws(scores.shape[1], scores.device, generator), None
        if counted is not None:
            number = counted.sum()
            size = torch.zeros_like(number) + self.size(number, *sizes[1:])
            limits = torch.stack((number, size)).to(torch.int32)
        return scores.detach(), experts, draws, self.by, self.options, self.size(*sizes), self.max_pairs(*sizes), limits

    def __call__(self, scores: Tensor, experts: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.mask(*self.crossing(scores, experts, generator)[:-2])  # type: ignore[arg-type]


# --- Steps: rank the tokens of each expert, keep the first so many -----------------------------------------------------------


def rank_tokens(keys: Tensor) -> Tensor:
    """Each expert's tokens from the largest key to the smallest, ties to the lower token.

    keys (T, E), any ordered dtype; returns (E, T) int64: element (e, i) is expert e's i-th token.
    """
    return torch.sort(keys.t().contiguous(), dim=1, descending=True, stable=True).indices


def keep_first(order: Tensor, counts: Tensor) -> Tensor:
    """The mask (T, E) of the first counts[e] tokens of each row of ``order`` (E, T); counts (E,) integers."""
    num_tokens = order.shape[1]
    kept = torch.arange(num_tokens, device=order.device) < counts[:, None]  # (E, T) by place
    return torch.zeros_like(kept).scatter(1, order, kept).t()  # by token


def by_expert(experts: Tensor, num_experts: int, values: Any, rest: Any) -> Tensor:
    """(T, E): ``values``, one or (T, K), at the experts (T, K) of token choice, and ``rest`` elsewhere. Expert -1 is nobody."""
    at = torch.where(experts < 0, num_experts, experts).long()  # one more column takes it
    made = torch.full((len(experts), num_experts + 1), rest, device=experts.device)
    return made.scatter(1, at, values)[:, :num_experts]


def choice_mask(experts: Tensor, num_experts: int) -> Tensor:
    """Token choice (T, K) as a mask (T, E)."""
    return by_expert(experts, num_experts, True, False)
