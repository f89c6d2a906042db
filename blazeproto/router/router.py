"""The router: a token's features in, its experts and their scores out.

    router = Router(d_model, num_experts=64, top_k=4, aux_loss=0.01)                  # softmax, top-k
    router = Router(d_model, 64, 4, score="sigmoid", bias_update_rate=1e-3)           # DeepSeek-V3, its groups: below
    router = Router(d_model, 64, 4, choose="token_rounding", tile=128, rule="nr_f")   # SonicMoE
    router = make_router("token_rounding", d_model, 64, 4)                            # by name, as scripts do
    routing = router(x)                                                               # x (T, d)

Scores are differentiable, choices are not. Nothing here waits for the device, and no shape depends on its data.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blazeproto.autograd.backends import check_device
from blazeproto.autograd.checkpoint import refuse_another_bias
from blazeproto.autograd.checks import FLOAT_DTYPES, check_dense, check_dtype
from blazeproto.autograd.operators import on_another_gpu
from blazeproto.autograd.private import refuse_transforms, saved_by_export, unobserved
from blazeproto.router import fallback, ops, pair_ops
from blazeproto.router.bias import check_load, in_fp32, unrounded, updated_bias
from blazeproto.router.choices import Choice, Hash, TokenRounding, make_choice
from blazeproto.router.kinds import MASK_32
from blazeproto.router.linear import router_logits
from blazeproto.router.scores import SCORES, renormalizes, score_named
from blazeproto.router.topk import check_groups
from blazeproto.runtime import checks


@saved_by_export
class Routing(NamedTuple):
    """The choice of experts and their scores. A pair is one (token, expert) that runs; P is a static number of places for pairs.

    With K experts a token, always: scores and experts are (T, K), in falling order of what was ranked, and
    token_offsets and pair_tokens are None. With a number that varies: scores, experts and pair_tokens are (P,), by
    token and by ascending expert inside one; places not used come last and hold expert -1, score 0, token 0. A masked
    token has experts -1 and scores 0, or no pairs.
    """

    scores: Tensor  # fp32 (fp64 for an fp64 router), differentiable
    experts: Tensor  # int32
    logits: Tensor  # (T, E), as scores; a masked token, and one with a NaN or infinite logit, has NaN throughout
    load: Tensor  # (E,) int32, pairs of each expert
    aux_losses: dict[str, Tensor]  # scalars with their coefficients in: add their sum to the loss
    token_offsets: Tensor | None = None  # (T + 1,) int32, where each token's pairs begin
    pair_tokens: Tensor | None = None  # (P,) int32, the token of each pair
    mask: Tensor | None = None  # (T,) bool, as it was given
    chosen_load: Tensor | None = None  # (E,) int32, of the token choice, where pairs of it may have been dropped since

    @property
    def dropped(self) -> Tensor | None:
        """The share of the token choice's pairs that rounding or a capacity dropped, () on the device; None where neither can."""
        return dropped_share(self.load, self.chosen_load)


def check_routing(routing: Any, num_experts: int, mask: Tensor | None) -> None:
    """TypeError or ValueError unless a router has returned a `Routing` of this many experts, with the mask that it was given."""
    # By its fields: after a reload of this module, Routings made before are of another class.
    if isinstance(routing, type) or getattr(routing, "_fields", None) != Routing._fields:
        raise TypeError(f"router: expected a Routing, got {type(routing).__name__}")
    load, losses = routing.load, routing.aux_losses
    if not isinstance(load, Tensor) or load.shape != (num_experts,):
        raise ValueError(f"router: expected one with {num_experts} experts, got loads {load!r}")
    if not isinstance(losses, dict) or not all(isinstance(loss, Tensor) for loss in losses.values()):
        raise TypeError(f"router: expected aux_losses as a dict of tensors, got {losses!r}")
    if mask is not None and routing.mask is None:
        raise TypeError("mask: expected a router whose Routing has it, got None")


class Router(nn.Module):
    """Logits by one linear map in fp32, scores, choice of experts, auxiliary losses.

    Args:
        d_model, num_experts, top_k: d, E and K, 1 <= K <= E.
        score: ``softmax_topk``, ``topk_softmax`` or ``sigmoid``; `scores` says what they are.
        renormalize: make a token's scores sum to one. None: with K > 1 True for sigmoid (DeepSeek-V3) and for token
            rounding (SonicMoE §6.3.1), False otherwise; ``topk_softmax`` sums to one by itself. With K = 1 a score of 1
            would leave the router without the task's gradient.
        scale: multiplies the scores (DeepSeek-V3's routed scaling factor).
        num_groups, top_groups: group-limited routing (DeepSeek-V3 §2.1.2, with 8 and 4), for sigmoid scores; both or neither.
            The experts are num_groups groups of neighbours. A token chooses among its top_groups best, by the sum of a group's
            two largest ``score + expert_bias``.
        bias_update_rate: the step of `update_bias`; above 0, or with sigmoid scores, the choice is made by score plus
            ``expert_bias``.
        aux_loss, z_loss: coefficients of `fallback.load_balancing_loss` and `fallback.z_loss`; 0 leaves one out.
        choose: ``top_k``, or a name from `choices.CHOICES` whose options follow as keywords (choose_options), or a choice object.
        device, dtype: of ``weight``.

    The sizes are read-only afterwards. ``weight`` is (E, d), as in Hugging Face's gates; ``expert_bias`` (E,) is an fp32
    buffer or None. Rounded to bf16 it would choose other experts. It stays fp32, its values untouched, when the module is cast;
    where something assigns a rounded copy to its ``data``, as FSDP1's ``buffer_dtype`` does, it is fp32 with its values again at
    the next use.

    Raises TypeError or ValueError that names the argument, what was expected and what came; for an unknown keyword, the
    nearest that exists.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax_topk",
        renormalize: bool | None = None,
        scale: float = 1.0,
        num_groups: int | None = None,
        top_groups: int | None = None,
        bias_update_rate: float = 0.0,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        choose: str | Choice = "top_k",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **choose_options: Any,
    ) -> None:
        super().__init__()
        self.d_model = checks.integer("d_model", d_model, least=1)
        self.num_experts = checks.integer("num_experts", num_experts, least=1)
        self.top_k = checks.integer("top_k", top_k, least=1)
        checks.require(top_k <= num_experts, "top_k", f"at most num_experts={num_experts}", top_k)
        kind = score_named(score)
        if renormalize is not None:
            checks.boolean("renormalize", renormalize)
        checks.number("scale", scale)
        self.num_groups, self.top_groups = check_groups(num_groups, top_groups, num_experts, top_k)
        expected = f"None with score={score!r}, for only sigmoid scores rank groups"
        checks.require(num_groups is None or kind.elementwise, "num_groups", expected, num_groups)
        for name, rate in (("bias_update_rate", bias_update_rate), ("aux_loss", aux_loss), ("z_loss", z_loss)):
            checks.number(name, rate, least=0)
        check_dtype(dtype)
        check_device(device)
        self.choice = make_choice(choose, choose_options, router_keywords())
        if self.choice is not None and self.choice.LOAD_IS_CHOSEN:
            by, rates = f"with {type(self.choice).__name__}, where", (aux_loss, bias_update_rate)
            expected = f"0 {by} scores do not make the load"
            checks.require(not any(rates), "aux_loss, bias_update_rate", expected, rates)
            checks.require(num_groups is None, "num_groups", f"None {by} tokens do not rank experts", num_groups)

        self.score = score
        by_choice = renormalize is None and top_k > 1 and self.choice is not None and self.choice.RENORMALIZES
        self.renormalize = by_choice or renormalizes(score, renormalize, top_k)
        if top_k == 1 and kind.over_chosen and not renormalize and not isinstance(self.choice, Hash):
            checks.warn_once(
                f"score: {score!r} with top_k=1 makes every score 1, so that the router has no gradient of the task; "
                "score='softmax_topk' (router='top_k') has"
            )
        self.scale = float(scale)
        self.bias_update_rate = float(bias_update_rate)
        self.aux_loss, self.z_loss = float(aux_loss), float(z_loss)
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.d_model, device=device, dtype=dtype))
        with_bias = kind.elementwise or bias_update_rate > 0
        bias = torch.zeros(self.num_experts, device=device, dtype=torch.float32) if with_bias else None
        self.register_buffer("expert_bias", bias)
        self._bias()
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        checks.fixed(self, name, value, ("d_model", "num_experts", "top_k"))
        if name == "expert_bias" and type(value) is Tensor:
            value = value.float()  # what was assigned, by load_state_dict(assign=True) too, stays as it is
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Uniform weights within 1/√d, as nn.Linear's; ``expert_bias`` 0."""
        bound = self.d_model**-0.5  # nn.Linear's
        nn.init.uniform_(self.weight, -bound, bound)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def _bias(self) -> Tensor | None:
        return None if self.expert_bias is None else in_fp32(self.expert_bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """What `to`, `half`, `cuda`, `to_empty` and the like do, but that ``expert_bias`` keeps its values when it is cast."""
        bias = self._bias()
        super()._apply(lambda t: unrounded(fn(t), bias) if t is self.expert_bias else fn(t), recurse)
        self._bias()
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._bias()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._bias()
        super()._load_from_state_dict(*args, **kwargs)
        self._bias()

    def extra_repr(self) -> str:
        """Sizes, score, groups and choice, for the module's repr."""
        choice = "" if self.choice is None else f", choose={self.choice}"
        groups = "" if self.num_groups == 1 else f", num_groups={self.num_groups}, top_groups={self.top_groups}"
        return f"{self.d_model}, experts={self.num_experts}, top_k={self.top_k}, score={self.score}{groups}{choice}"

    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """x (T, d) floating point; token_ids (T,) integers, of any shape, for hash routing alone.

        mask: (T,) bool, in any shape; default: all True. A token where it is False is padding: it chooses no expert, has no part
        in loads, losses, capacities and rounding, and gets no gradient; what x holds there changes nothing.
        In eval mode a choice with ``eval_top_k`` gives way to plain top-k.
        """
        self._check_input(x, token_ids, mask)
        # Past torch's dispatcher, where only it would see the operators.
        hidden = unobserved((x, self.weight, token_ids, mask)) and not on_another_gpu(x)
        mask = None if mask is None else mask.flatten()
        padding = None if mask is None else ~mask[:, None]
        logits = router_logits.entry((x, self.weight), unobserved=hidden)(x, self.weight, mask)
        options, choice, bias = (self.score, self.renormalize, self.scale), self.choice, self._bias()
        groups = self.num_groups, self.top_groups
        if self.expert_bias is not None:
            refuse_another_bias(self, self.expert_bias)
        pair_tokens = token_offsets = load = chosen_load = None
        drops = False
        if isinstance(choice, Hash):
            assert token_ids is not None  # _check_input
            seed = choice.seed & MASK_32  # no more of it counts
            ids = token_ids.flatten()
            chosen = experts = ops.hash_experts.entry((), unobserved=hidden)(ids, self.num_experts, self.top_k, seed)
            scores = fallback.chosen_scores(logits, experts, *options)
        elif choice is None or (choice.eval_top_k and not self.training):
            route = ops.route_top_k.entry((logits,), unobserved=hidden)
            scores, experts = route(logits, bias, self.top_k, *options, *groups)
            chosen = experts
        else:
            keys = fallback.selection_keys(logits, self.score, bias)
            # The token choice: experts alone, which do not depend on the kind of scores.
            alone = keys, None, self.top_k, "topk_softmax", False, 1.0
            chosen = ops.route_top_k.entry((), unobserved=hidden)(*alone, *groups)[1]
            ranked = SCORES[self.score].value(logits.detach())
            if padding is not None:
                chosen, ranked = chosen.masked_fill(padding, -1), ranked.masked_fill(padding, 0)
            if isinstance(choice, TokenRounding) and not torch.compiler.is_compiling():
                choice.warn_of_few(len(logits), self.num_experts, self.top_k)
            crossing, drops = choice.crossing(ranked, chosen, counted=mask), choice.DROPS
            experts, pair_tokens, token_offsets, load = pair_ops.choose_pairs.entry((), unobserved=hidden)(*crossing)
            scores = pair_ops.score_pairs.entry((logits,), unobserved=hidden)(logits, experts, token_offsets, *options)
        if padding is not None and pair_tokens is None:
            scores, experts = scores.masked_fill(padding, 0), experts.masked_fill(padding, -1)
            chosen = experts
        aux_losses = {}
        if (
            load is None or self.aux_loss or self.z_loss or drops
        ):  # of the token choice, before any rounding or dropping
            losses = ops.routing_losses.entry((logits,), unobserved=hidden)
            balance, z, token_load, _ = losses(logits, chosen, self.score, self.aux_loss, self.z_loss, mask is not None)
            load, chosen_load = token_load if load is None else load, token_load if drops else None
            named = {"load_balancing": (self.aux_loss, balance), "z": (self.z_loss, z)}
            aux_losses = {name: loss for name, (coefficient, loss) in named.items() if coefficient}
        return Routing(scores, experts, logits, load, aux_losses, token_offsets, pair_tokens, mask, chosen_load)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """One step of the auxiliary-loss-free balancing; see `updated_bias`. Does nothing to a bias at rate 0.

        Call it once an optimizer step with the load (E,) of the whole batch: `Routing.load`, summed over accumulation
        steps and ranks, integers or floating point, on the bias's device. It is no part of forward, which activation
        checkpointing runs twice: after such a forward call it behind backward, or backward raises RuntimeError.
        TypeError or ValueError for another load, also at rate 0; ValueError without a bias.
        """
        bias = self._bias()
        check_load(load, self.num_experts, None if bias is None else bias.device)
        if bias is None:
            raise ValueError(
                "expert_bias: expected a router that has one, made with bias_update_rate > 0 or sigmoid scores, got one without"
            )
        if self.bias_update_rate > 0:
            bias.copy_(updated_bias(bias, load, self.bias_update_rate))

    def _check_input(self, x: Tensor, token_ids: Tensor | None, mask: Tensor | None) -> None:
        refuse_transforms("Router", (x, self.weight))
        check_dense("x", x)
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(f"x: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        if x.dim() != 2 or x.shape[1] != self.d_model:
            raise ValueError(f"x: expected shape (T, {self.d_model}), got {tuple(x.shape)}")
        for name, shape in (("weight", (self.num_experts, self.d_model)), ("expert_bias", (self.num_experts,))):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"{name}: expected shape {shape}, which the router was made for, got {tuple(tensor.shape)}"
                )
        if x.device != self.weight.device:
            raise ValueError(f"x: expected device {self.weight.device} (the router's weight), got {x.device}")
        for name, by_token in (("mask", mask), ("token_ids", token_ids)):
            if by_token is not None:
                check_by_token(name, by_token, x.shape[0], x.device)
        if token_ids is None and isinstance(self.choice, Hash):
            raise ValueError("token_ids: expected T integers for hash routing, got None")


def check_by_token(name: str, tensor: Tensor, num_tokens: int, device: torch.device) -> None:
    """TypeError or ValueError unless "mask" has a bool, "token_ids" an integer, for each of the tokens, on this device."""
    check_dense(name, tensor)
    kind, values = ("a torch.bool", "bools") if name == "mask" else ("an integer", "ids")
    numbers, dtype = tensor.is_floating_point() or tensor.is_complex(), tensor.dtype
    if numbers or (dtype == torch.bool) != (name == "mask"):
        raise TypeError(f"{name}: expected {kind} tensor, got {dtype}")
    if tensor.numel() != num_tokens:
        raise ValueError(f"{name}: expected {num_tokens} {values}, one a token, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, x's, got {tensor.device}")


def check_takes_mask(router: nn.Module) -> None:
    """TypeError unless its forward has a parameter ``mask``, or takes any keyword."""
    if type(router).forward is Router.forward:  # which torch.compile need not look at
        return
    takes = inspect.signature(router.forward).parameters.values()
    if not any(p.name == "mask" or p.kind == p.VAR_KEYWORD for p in takes):
        raise TypeError(f"mask: expected a router that takes one, got {type(router).__name__}")


def router_keywords() -> list[str]:
    """The keywords of `Router`, without the options of choices."""
    return [name for name in inspect.signature(Router).parameters if name != "choose_options"]


def dropped_share(load: Tensor, chosen_load: Tensor | None) -> Tensor | None:
    """The share of the token choice's pairs that did not run, () fp32, of loads (E,) before and after. An expert that has more
    pairs than had chosen it has dropped none."""
    if chosen_load is None:
        return None
    return (chosen_load - load).clamp(min=0).sum().float() / chosen_load.sum().clamp(min=1)


@torch.no_grad()
def routing_stats(routing: Routing, top_k: int | None = None) -> dict[str, Tensor]:
    """Scalars on the device to log, none of them with a gradient, of what a router returned (``routing``).

    "balance" is the largest load over the mean load, 1 at best; "entropy" is the entropy of the softmax of the logits, mean over
    tokens, in nats; given the router's K as ``top_k``, "pairs" is pairs that run over T * K (below 1 what capacity dropped); and
    where rounding or a capacity may drop pairs, "dropped" is the share that was. Masked tokens do not count.
    TypeError for what is no `Routing`, and TypeError or ValueError for a ``top_k`` that is no int of 1 or more.
    """
    checks.instance("routing", routing, Routing)
    if top_k is not None:
        checks.integer("top_k", top_k, least=1)
    (num_tokens, num_experts), mask = routing.logits.shape, routing.mask
    load = routing.load.to(torch.float32)
    entropies = torch.special.entr(torch.log_softmax(routing.logits, dim=1).exp())
    tokens: Any = max(num_tokens, 1)
    if mask is not None:
        entropies, tokens = entropies.where(mask[:, None], 0), mask.sum().clamp(min=1)
    stats = {"balance": load.amax() * num_experts / load.sum().clamp(min=1), "entropy": entropies.sum() / tokens}
    if top_k is not None:
        stats["pairs"] = load.sum() / (tokens * top_k)
    if routing.dropped is not None:
        stats["dropped"] = routing.dropped
    return stats


# What `scripts/train_lm.py --router NAME` and `MoE(router=NAME)` offer, as options of `Router`; `make_router` knows K = 1.
_BALANCED: dict[str, Any] = {"aux_loss": 0.01}  # Switch Transformer §2.2
ROUTERS: dict[str, dict[str, Any]] = {
    "top_k": {"renormalize": True, **_BALANCED},
    "topk_softmax": {"score": "topk_softmax", **_BALANCED},
    "aux_free": {"score": "sigmoid", "bias_update_rate": 1e-3},  # DeepSeek-V3 §4.2
    "token_rounding": {"choose": "token_rounding", **_BALANCED},
    "token_rounding_sr_f": {"choose": "token_rounding", "rule": "sr_f", **_BALANCED},
    "token_rounding_nr_s": {"choose": "token_rounding", "rule": "nr_s", **_BALANCED},
    "token_rounding_balance_f": {"choose": "token_rounding", "rule": "balance_f", **_BALANCED},
    "token_rounding_up": {"choose": "token_rounding", "rule": "up", **_BALANCED},
    "token_rounding_down": {"choose": "token_rounding", "rule": "down", **_BALANCED},
    "expert_choice": {"choose": "expert_choice"},
    "capacity": {"choose": "capacity", "renormalize": True, **_BALANCED},
    "hash": {"choose": "hash", "score": "topk_softmax"},
}


def make_router(name: str, d_model: int, num_experts: int, top_k: int, **overrides: Any) -> Router:
    """The router of this name in `ROUTERS`; keywords of `Router` in ``overrides`` win over the named ones.

    d_model, num_experts, top_k: d, E, K. ValueError for an unknown name or a value that does not fit, TypeError for an
    unknown keyword.
    """
    checks.one_of("router", name, sorted(ROUTERS))
    named = ROUTERS[name] | ({"renormalize": None} if checks.integer("top_k", top_k, least=1) == 1 else {})
    return Router(d_model, num_experts, top_k, **(named | overrides))
