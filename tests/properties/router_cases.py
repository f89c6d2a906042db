"""Routers and their input, drawn at random, and what `reference_router` says of them: for the router's and the layer's
properties."""

import itertools
from dataclasses import dataclass
from typing import Any

import reference_router as reference
import torch
from hypothesis import strategies as st
from torch import Tensor

from blazeproto.router.router import ROUTERS, Router, Routing, make_router

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (
    [(F64, F64)] * 3 + [(F32, F32)] * 3 + [(BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, F32), (F64, F32)]
)
UNIT = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-24, F64: 2.0**-53}
LEAST = {F16: 2.0**-24, BF16: 2.0**-126, F32: 2.0**-126, F64: 0.0}  # below this, rounding is absolute or flushes


@dataclass
class Case:
    router: Router
    x: Tensor
    ids: Tensor | None
    choice: str
    options: dict[str, Any]  # of the choice
    kind: str

    @property
    def varies(self) -> bool:
        return self.choice in ("token_rounding", "expert_choice", "capacity") and (
            self.router.training or not getattr(self.router.choice, "eval_top_k", True)
        )


def draw_choice_options(data: Any, choice: str) -> dict[str, Any]:
    if choice == "token_rounding":
        return {
            "tile": data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 128]), "tile"),
            "rule": data.draw(st.sampled_from(["nr_f", "sr_f", "nr_s", "balance_f", "up", "down"]), "rule"),
            "eval_top_k": data.draw(st.booleans(), "eval_top_k"),
        }
    if choice in ("expert_choice", "capacity"):
        options: dict[str, Any] = {
            "capacity_factor": data.draw(st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.1, 1.25, 2.0, 100.0]), "factor"),
            "eval_top_k": data.draw(st.booleans(), "eval_top_k"),
        }
        if choice == "capacity":
            options["priority"] = data.draw(st.sampled_from(["slot", "token", "score"]), "priority")
        return options
    return {"seed": data.draw(st.integers(0, 2**40), "seed")} if choice == "hash" else {}


def draw_router(data: Any, d: int, num_experts: int, top_k: int, dtype: torch.dtype) -> tuple[Router, str, dict]:
    losses = {
        "aux_loss": data.draw(st.sampled_from([0.0, 0.01, 1.0]), "aux_loss"),
        "z_loss": data.draw(st.sampled_from([0.0, 0.5]), "z_loss"),
    }
    if data.draw(st.integers(0, 2)) == 0:
        name = data.draw(st.sampled_from(list(ROUTERS)), "name")
        choice = ROUTERS[name].get("choose", "top_k")
        options = {k: v for k, v in draw_choice_options(data, choice).items() if k != "rule"}
        if choice in ("expert_choice", "hash"):
            losses.pop("aux_loss")
        router = make_router(name, d, num_experts, top_k, dtype=dtype, **losses, **options)
        return router, choice, options | ({"rule": router.choice.rule} if choice == "token_rounding" else {})
    choice = data.draw(st.sampled_from(["top_k", "top_k", "token_rounding", "expert_choice", "capacity", "hash"]))
    options = draw_choice_options(data, choice)
    rate = data.draw(st.sampled_from([0.0, 1e-3, 0.5]), "rate")
    if choice in ("expert_choice", "hash"):
        losses["aux_loss"] = rate = 0.0
    score = data.draw(st.sampled_from(["softmax_topk", "topk_softmax", "sigmoid"]), "score")
    groups = {}
    if score == "sigmoid" and choice not in ("expert_choice", "hash") and data.draw(st.booleans(), "groups"):
        number = data.draw(
            st.sampled_from([n for n in range(1, num_experts + 1) if num_experts % n == 0]), "num_groups"
        )
        least = -(-top_k * number // num_experts)
        groups = {"num_groups": number, "top_groups": data.draw(st.integers(least, number), "top_groups")}
    router = Router(
        d,
        num_experts,
        top_k,
        score=score,
        renormalize=data.draw(st.sampled_from([None, True, False]), "renormalize"),
        scale=data.draw(st.sampled_from([1.0, 1.0, 2.5, 0.125, 16.0]), "scale"),
        bias_update_rate=rate,
        choose=choice,
        dtype=dtype,
        **groups,
        **losses,
        **options,
    )
    return router, choice, options


def draw_case(data: Any, dtypes: list[tuple[torch.dtype, torch.dtype]] = DTYPES) -> Case:
    kinds = ["normal", "normal", "wide", "integers", "same", *(["near"] if (F64, F64) in dtypes else [])]
    kind = data.draw(st.sampled_from(kinds), "kind")
    # What only float64 tells apart is drawn in float64.
    x_dtype, dtype = data.draw(st.sampled_from([(F64, F64)] if kind == "near" else dtypes), "dtypes of x, weight")
    num_experts = data.draw(st.integers(1, 12) | st.sampled_from([33, 64]), "E")
    top_k = data.draw(st.integers(1, min(num_experts, 8)), "K")
    num_tokens, d = data.draw(st.integers(0, 40), "T"), data.draw(st.integers(1, 24), "d")
    router, choice, options = draw_router(data, d, num_experts, top_k, dtype)
    router.train(data.draw(st.integers(0, 3), "training") > 0)
    seed = data.draw(st.integers(0, 2**31), "seed of values")
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of roundings that draw

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=F64)

    x, weight, bias = normal(num_tokens, d), normal(num_experts, d) * d**-0.5, normal(num_experts)
    bias_scale = data.draw(st.sampled_from([0.0, 0.05, 1.0, 100.0]), "scale of the bias")
    if kind == "wide":  # gaps of many tens of nats between a token's logits
        weight *= 40
    elif kind == "integers":  # exact, with many ties
        x, weight, bias = (t.mul(2).round() for t in (x, weight * d**0.5, bias))
    elif kind == "same":
        x = x[:1].expand(num_tokens, d)
    elif kind == "near" and num_tokens:
        x = x[torch.arange(num_tokens) % max(1, num_tokens // 3)] * (1 + 1e-10 * normal(num_tokens, 1))
    with torch.no_grad():
        router.weight.copy_(weight)
        if router.expert_bias is not None:
            router.expert_bias.copy_(bias * bias_scale)
    ids = torch.randint(0, 50, (num_tokens,), generator=generator) if choice == "hash" else None
    return Case(router, x.to(x_dtype).contiguous(), ids, choice, options, kind)


@dataclass
class Expected:
    """What the reference says of a case; of the choice only, what is certain."""

    logits: Tensor  # (T, E) float64, differentiable in x and weight
    chosen: list[list[int]]  # by token choice
    masks: list[list[set[int]]]  # for each expert, what it may end up with, where that varies
    order: reference.Order
    logit_error: Tensor  # (T, 1)
    score_error: Tensor  # (T, 1), relative
    key_error: Tensor  # (T, E)
    keys: Tensor  # (T, E)
    unit: float  # u of the router's arithmetic
    least: float


def expect(case: Case, x: Tensor, weight: Tensor) -> Expected:
    """x, weight: float64 copies of what the router has."""
    router, d, num_experts = case.router, x.shape[1], len(weight)
    wide = torch.promote_types(torch.promote_types(case.x.dtype, router.weight.dtype), F32)
    unit, least = UNIT[wide], LEAST[wide]
    logits = x @ weight.T
    with torch.no_grad():
        sums = x.abs() @ weight.abs().T
        logit_error = unit * (d + 2) * sums.amax(dim=1, keepdim=True)
        exact = case.kind == "integers"  # no product or sum is rounded
        logit_error = logit_error * (not exact)
        score_error = 2 * logit_error + unit * (num_experts + 10 + 4 * logits.abs().amax(dim=1, keepdim=True))
        scores = reference.dense_scores(logits, router.score)
        keys, key_error = logits.detach(), logit_error.expand_as(logits)
        if router.expert_bias is not None:
            keys = scores + router.expert_bias.double()
            key_error = score_error * scores + unit * keys.abs() + least
        order = reference.Order()
        groups = router.num_groups, router.top_groups
        chosen = reference.token_choice(
            keys, key_error, router.top_k, exact and router.expert_bias is None, order, *groups
        )
        masks = []
        if case.varies:
            # A sigmoid may differ in the last bit between a vector's lanes and what is left over.
            same_token = (x[:, None] == x).all(dim=2) & (exact and router.score != "sigmoid")
            sizes = (scores, score_error * scores + least, chosen, router.top_k, same_token)
            masks = reference.choice_masks(case.choice, case.options, *sizes, order)
    return Expected(logits, chosen, masks, order, logit_error, score_error, key_error, keys, unit, least)


def tokens_of(routing: Routing) -> Tensor:
    """The token of each entry of ``routing.experts``."""
    if routing.pair_tokens is not None:
        return routing.pair_tokens.long()
    return torch.arange(len(routing.experts))[:, None].expand_as(routing.experts)


def dense_mask(routing: Routing, num_experts: int) -> Tensor:
    """The pairs that run, (T, E)."""
    num_tokens = len(routing.logits)
    mask = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    tokens = tokens_of(routing)
    used = routing.experts >= 0
    mask[tokens[used], routing.experts[used].long()] = True
    return mask


def check_record(case: Case, routing: Routing) -> None:
    """Shapes, dtypes, places for pairs, load."""
    router, num_tokens = case.router, len(case.x)
    num_experts, top_k, experts = router.num_experts, router.top_k, routing.experts
    wide = torch.promote_types(torch.promote_types(case.x.dtype, router.weight.dtype), F32)
    assert routing.logits.dtype == routing.scores.dtype == wide
    assert experts.dtype == routing.load.dtype == torch.int32
    assert routing.load.tolist() == [int((experts == e).sum()) for e in range(num_experts)]
    if not case.varies:
        assert routing.pair_tokens is None and routing.token_offsets is None
        assert experts.shape == routing.scores.shape == (num_tokens, top_k)
        assert all(len(set(row)) == top_k and set(row) <= set(range(num_experts)) for row in experts.tolist())
        return
    places = reference.max_pairs(case.choice, case.options, num_tokens, num_experts, top_k)
    assert experts.shape == routing.scores.shape == routing.pair_tokens.shape == (places,)
    offsets, used = routing.token_offsets.tolist(), int(routing.token_offsets[-1])
    assert len(offsets) == num_tokens + 1 and offsets[0] == 0
    pairs = list(zip(routing.pair_tokens.tolist(), experts.tolist(), strict=True))
    assert pairs[:used] == sorted(set(pairs[:used])) and all(0 <= e < num_experts for _, e in pairs[:used])
    assert [sum(t == token for t, _ in pairs[:used]) for token in range(num_tokens)] == [
        b - a for a, b in itertools.pairwise(offsets)
    ]
    assert set(pairs[used:]) <= {(0, -1)} and not routing.scores[used:].any()


def check_choice(case: Case, routing: Routing, expected: Expected) -> None:
    if case.choice == "hash":
        return  # see test_hash
    if case.varies:
        if expected.order.uncertain:
            return
        mask = dense_mask(routing, case.router.num_experts)
        for expert, possible in enumerate(expected.masks):
            took = set(mask[:, expert].nonzero().flatten().tolist())
            assert took in possible, (
                f"expert {expert} has {sorted(took)}, expected one of {list(map(sorted, possible))}"
            )
        return
    for token, (got, want) in enumerate(zip(routing.experts.tolist(), expected.chosen, strict=True)):
        if token not in expected.order.within:
            assert got == want, f"token {token}"
            continue
        keys, slack = expected.keys[token], 2 * expected.key_error[token].max()
        num_groups, top_groups = case.router.num_groups, case.router.top_groups
        size, sums = len(keys) // num_groups, reference.group_scores(keys.tolist(), num_groups)
        best = [g for g in range(num_groups) if sums[g] >= sorted(sums)[-top_groups] - 3 * slack]
        mine = {e // size for e in got}
        assert len(mine) <= top_groups and mine <= set(best), f"token {token}"
        same_groups = {e for e in range(len(keys)) if e // size in mine}
        ranked = [*got, *sorted(same_groups - set(got))]
        for place in range(len(got)):
            assert (keys[ranked[place]] >= keys[ranked[place + 1 :]] - slack).all(), f"token {token}, place {place}"
