"""The Router module: every named router end to end, its records, gradients and contracts, alone and in the layer."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blazeproto import reference
from blazeproto.autograd import checkpoint_contexts
from blazeproto.layer import MoE
from blazeproto.router import fallback, topk
from blazeproto.router.choice import rank_tokens
from blazeproto.router.choices import TokenRounding, chosen_first_keys, rounded_counts
from blazeproto.router.fallback import choose_top_k
from blazeproto.router.router import ROUTERS, Router, Routing, make_router, routing_stats
from blazeproto.router.scores import SCORES
from blazeproto.runtime import checks
from tests.refusals import refuses

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
GROUPED: dict[str, Any] = {"score": "sigmoid", "num_groups": 4, "top_groups": 2}
VARYING = [name for name in ROUTERS if name.startswith(("token_rounding", "expert_choice", "capacity"))]


def tile_of(name: str) -> dict[str, Any]:
    """The tile of token rounding, smaller than by default."""
    return {"tile": 8} if name.startswith("token_rounding") else {}


def named(name: str, d: int = 16, num_experts: int = 8, top_k: int = 2, **overrides: Any) -> Router:
    return make_router(name, d, num_experts, top_k, **tile_of(name) | overrides)


def ids_for(router: Router, num_tokens: int) -> Tensor | None:
    return torch.arange(num_tokens) % 50 if "Hash" in router.extra_repr() else None


def check_record(routing: Routing, num_tokens: int, num_experts: int, top_k: int) -> None:
    """What the layer relies on."""
    experts = routing.experts
    assert experts.dtype == torch.int32 and not experts.requires_grad
    assert routing.logits.shape == (num_tokens, num_experts)
    assert routing.scores.shape == experts.shape and routing.scores.dtype == routing.logits.dtype
    assert routing.load.dtype == torch.int32
    assert routing.load.tolist() == [(experts == e).sum().item() for e in range(num_experts)]
    if routing.token_offsets is None:
        assert routing.pair_tokens is None and experts.shape == (num_tokens, top_k)
        assert all(len(set(row)) == top_k for row in experts.tolist())
        assert ((experts >= 0) & (experts < num_experts)).all()
        return
    tokens, offsets = routing.pair_tokens, routing.token_offsets
    assert tokens is not None and tokens.dtype == offsets.dtype == torch.int32
    assert experts.dim() == 1 and tokens.shape == experts.shape and offsets.shape == (num_tokens + 1,)
    used = int(offsets[-1])
    assert offsets[0] == 0 and (experts[:used] >= 0).all() and (experts[:used] < num_experts).all()
    assert (experts[used:] == -1).all() and (tokens[used:] == 0).all() and (routing.scores[used:] == 0).all()
    pairs = (tokens.long() * num_experts + experts)[:used]
    assert (pairs.diff() > 0).all()  # by token, ascending expert, none twice
    expected = torch.repeat_interleave(torch.arange(num_tokens), offsets.diff().long())
    assert torch.equal(tokens[:used].long(), expected)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 8, 2), (1, 8, 2), (100, 8, 2), (33, 1, 1), (33, 5, 5), (33, 40, 8)]
)
@pytest.mark.parametrize("name", ROUTERS)
def test_record(name: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    router = named(name, num_experts=num_experts, top_k=top_k)
    routing = router(torch.randn(num_tokens, 16), token_ids=ids_for(router, num_tokens))
    check_record(routing, num_tokens, num_experts, top_k)
    assert (routing.token_offsets is not None) == (name in VARYING)
    assert all(loss.dim() == 0 and loss.isfinite() for loss in routing.aux_losses.values())
    stats = routing_stats(routing, top_k=top_k)
    assert all(value.isfinite() and not value.requires_grad for value in stats.values())
    (routing.scores.sum() + sum(routing.aux_losses.values())).backward()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()


@DEVICES
@pytest.mark.parametrize("name", ROUTERS)
def test_compiles_to_one_graph(name: str, device: str) -> None:
    """A graph break, or a shape that depends on data, fails under fullgraph."""
    torch.compiler.reset()
    router, x = named(name, device=device), torch.randn(40, 16, device=device)
    ids = ids_for(router, 40)
    given = {"token_ids": None if ids is None else ids.to(device)}
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    expected = router(x, **given)
    torch.manual_seed(1)
    got = compiled(x, **given)
    torch.testing.assert_close(got, expected)
    got.scores.sum().backward()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_nan_token_harms_no_other(name: str, training: bool) -> None:
    router, x = named(name, num_experts=4).train(training), torch.randn(64, 16)
    ids = ids_for(router, 64)
    clean = router(x, token_ids=ids)
    x[7, 0] = math.nan
    routing = router(x, token_ids=ids)
    check_record(routing, 64, 4, 2)
    if routing.token_offsets is None:
        others = torch.arange(64) != 7
        assert routing.scores[7].isnan().all() and torch.equal(routing.scores[others], clean.scores[others])
    else:
        mine = (routing.pair_tokens == 7) & (routing.experts >= 0)
        assert mine.any() and routing.scores[mine].isnan().all() and routing.scores[~mine].isfinite().all()


def test_a_router_in_bf16_computes_in_fp32() -> None:
    x, router = torch.randn(32, 16).bfloat16(), named("top_k").to(torch.bfloat16)
    routing = router(x)
    assert routing.logits.dtype == routing.scores.dtype == torch.float32
    torch.testing.assert_close(routing.logits, x.float() @ router.weight.float().t())


@pytest.mark.parametrize("name", ROUTERS)
def test_gradcheck(name: str) -> None:
    router = named(name, 5, 4, 2, dtype=torch.float64, z_loss=0.1)
    x = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    ids = ids_for(router, 13)

    def scores(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)  # the same draw in every evaluation of a stochastic rounding
        routing = torch.func.functional_call(router, {"weight": weight}, (x, ids))
        return (routing.scores, *routing.aux_losses.values())

    torch.autograd.gradcheck(scores, (x, router.weight))


@pytest.mark.parametrize("name", ["token_rounding", "token_rounding_sr_f", "expert_choice"])
def test_eval_mode_is_plain_top_k(name: str) -> None:
    router = named(name).eval()
    x = torch.randn(40, 16)
    routing = router(x)
    assert routing.token_offsets is None
    plain = Router(16, 8, 2, renormalize=router.renormalize).eval()
    plain.load_state_dict(router.state_dict())
    expected = plain(x)
    assert torch.equal(routing.experts, expected.experts) and torch.equal(routing.scores, expected.scores)


def test_eval_mode_can_keep_the_choice() -> None:
    router = named("token_rounding", eval_top_k=False).eval()
    assert router(torch.randn(40, 16)).token_offsets is not None


def test_a_batch_too_small_to_round_warns_once_and_compiles() -> None:
    checks.warn_once.cache_clear()
    router, x = named("token_rounding", tile=16), torch.randn(40, 16)
    with pytest.warns(
        UserWarning, match="tile: expected T of at least 16, and T .* with E=8 and K=2; a batch of fewer"
    ):
        assert router(x[:8]).load.sum() == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router(x[:9])  # the second time
        checks.warn_once.cache_clear()
        router(x)
        router.eval()(x[:8])
    torch.compiler.reset()
    compiled = torch.compile(router.train(), fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (40, 8, 33, 15):
        torch.testing.assert_close(compiled(x[:num_tokens]), router(x[:num_tokens]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("aux_loss", [0.0, 0.01])
@pytest.mark.parametrize("name", VARYING)
def test_the_share_that_was_dropped(name: str, aux_loss: float, masked: bool) -> None:
    options = {} if name == "expert_choice" else {"aux_loss": aux_loss}
    router, x = named(name, **options), torch.randn(60, 16)
    routing = router(x, mask=torch.arange(60) % 4 > 0 if masked else None)
    if name == "expert_choice":
        assert routing.dropped is None and "dropped" not in routing_stats(routing)
        return
    plain = named("top_k")
    plain.load_state_dict(router.state_dict())
    chosen = plain(x, mask=routing.mask)
    pairs = {(t, e) for t, row in enumerate(chosen.experts.tolist()) for e in row if e >= 0}
    listed = zip(routing.pair_tokens.tolist(), routing.experts.tolist(), strict=True)
    share = len(pairs - set(listed)) / len(pairs)
    assert routing.dropped.item() == pytest.approx(share)
    assert routing_stats(routing)["dropped"].item() == pytest.approx(share)
    assert (share > 0) or name in ("token_rounding_up", "token_rounding_sr_f", "token_rounding_nr_s", "capacity")
    assert (plain(x).dropped is None and router.eval()(x).dropped is None) or name == "capacity"


LEARNS = [name for name in ROUTERS if name not in ("topk_softmax", "hash")]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LEARNS)
def test_with_one_expert_a_token_the_score_is_the_probability(name: str, training: bool) -> None:
    """A score of 1, whatever the logits, would leave the router without a gradient of the task."""
    router = named(name, 16, 4, 1, dtype=torch.float64).train(training)
    routing = router(torch.randn(40, 16, dtype=torch.float64))
    values = SCORES[router.score].value(routing.logits)
    tokens = torch.arange(40) if routing.pair_tokens is None else routing.pair_tokens
    used = routing.experts.flatten() >= 0
    assert not router.renormalize and used.any()
    expected = values[tokens.long(), routing.experts.flatten().long()][used]
    torch.testing.assert_close(routing.scores.flatten()[used], expected)
    (gradient,) = torch.autograd.grad(routing.scores.sum(), router.weight)
    assert gradient.norm() > 1e-3


@pytest.mark.parametrize("name", LEARNS)
def test_renormalize_is_kept_where_it_is_asked_for(name: str) -> None:
    assert make_router(name, 16, 4, 1, renormalize=True).renormalize
    assert make_router(name, 16, 4, 2).renormalize == (name != "expert_choice")


def test_a_choice_and_a_score_know_one_expert_too() -> None:
    """A router made without a name, and the kernels' functions."""
    assert not Router(16, 4, 1, score="sigmoid").renormalize
    assert not Router(16, 4, 1, choose=TokenRounding(8)).renormalize
    logits, d_scores = torch.randn(9, 4, dtype=torch.float64), torch.ones(9, 1, dtype=torch.float64)
    scores, experts = fallback.topk_route(logits, 1, score="sigmoid")
    torch.testing.assert_close(scores, logits.sigmoid().amax(dim=1, keepdim=True))
    assert fallback.topk_route_backward(logits, experts, d_scores, score="sigmoid").any()
    assert topk.scoring({"score": "sigmoid", "renormalize": None, "scale": 1, "top_k": 1}) == ("sigmoid", False, 1.0)
    assert topk.scoring({"score": "sigmoid", "renormalize": None, "scale": 1, "K": 2}) == ("sigmoid", True, 1.0)


def test_a_softmax_of_one_logit_warns_once() -> None:
    checks.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="score: 'topk_softmax' with top_k=1 .*score='softmax_topk'"):
        router = make_router("topk_softmax", 16, 4, 1)
    assert router(torch.randn(3, 16)).scores.tolist() == [[1.0]] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_router("topk_softmax", 16, 4, 1)  # the second time
        checks.warn_once.cache_clear()
        make_router("hash", 16, 4, 1)
        make_router("topk_softmax", 16, 4, 1, renormalize=True)
        make_router("topk_softmax", 16, 4, 2)


def test_update_bias_does_nothing_without_a_rate() -> None:
    router = Router(16, 8, 2, score="sigmoid")
    router.update_bias(torch.arange(8))
    assert router.expert_bias is not None and not router.expert_bias.any()


def test_forward_changes_no_state() -> None:
    router = named("aux_free")
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router(torch.randn(40, 16))
    torch.testing.assert_close(dict(router.state_dict()), before, rtol=0, atol=0)


def test_aux_loss_evens_out_the_load() -> None:
    x = torch.randn(512, 16) + 1.0
    router = Router(16, 8, 2, aux_loss=1.0)
    optimizer = torch.optim.Adam(router.parameters(), lr=0.02)
    before = routing_stats(router(x))["balance"]
    for _ in range(60):
        optimizer.zero_grad()
        router(x).aux_losses["load_balancing"].backward()
        optimizer.step()
    after = routing_stats(router(x))["balance"]
    assert after < 1.6 < before


def test_stats_of_known_routings() -> None:
    router = Router(4, 4, 1)
    with torch.no_grad():
        router.weight.zero_()
    stats = routing_stats(router(torch.randn(12, 4)), top_k=1)  # all ties: expert 0 has every token
    assert stats["balance"].item() == pytest.approx(4.0) and stats["entropy"].item() == pytest.approx(math.log(4))
    assert stats["pairs"].item() == 1.0


@pytest.mark.parametrize("choose", ["top_k", "token_rounding", "capacity"])
def test_groups_with_a_mask_in_evaluation_and_compiled(choose: str) -> None:
    torch.compiler.reset()
    router = Router(16, 8, 4, choose=choose, **GROUPED, **({"tile": 4} if choose == "token_rounding" else {}))
    assert router.expert_bias is not None
    router.expert_bias.normal_()
    mask = torch.rand(40) < 0.7
    x = torch.randn(40, 16)
    x[~mask] = math.nan
    routing, alone = router(x, mask=mask), router(x[mask])
    assert torch.equal(routing.load, alone.load) and routing.scores.isfinite().all()
    torch.testing.assert_close(
        torch.compile(router, fullgraph=True, backend="aot_eager")(x, mask=mask), routing, equal_nan=True
    )
    keys = fallback.selection_keys(alone.logits, "sigmoid", router.expert_bias)
    chosen = fallback.choose_top_k(keys, 4, 4, 2)
    assert ((chosen // 2).sort(dim=1).values.diff(dim=1) > 0).sum(dim=1).eq(1).all(), "two groups, and both whole"
    if choose == "token_rounding":
        router.eval()
    if choose != "capacity":
        assert torch.equal(router(x, mask=mask).experts[mask], chosen)


def test_choice_objects_are_taken_as_they_are() -> None:
    choice = TokenRounding(tile=4)
    assert Router(16, 8, 2, choose=choice).choice is choice


@pytest.mark.parametrize(
    ("options", "argument", "error"),
    [
        ({"top_k": 9}, "top_k", ValueError),
        ({"aux_loss": -1.0}, "aux_loss", ValueError),
        ({"z_loss": math.nan}, "z_loss", ValueError),
        ({"scale": math.inf}, "scale", ValueError),
        ({"bias_update_rate": -0.1}, "bias_update_rate", ValueError),
        ({"dtype": torch.int32}, "dtype", TypeError),
        ({"device": "cuda:99"}, "device", ValueError),
        ({"choose": TokenRounding}, "choose", TypeError),
        ({"choose": None}, "choose", TypeError),
        ({"choose": "capasity"}, "choose", ValueError),
        ({"choose": "hash", "seed": 1.0}, "seed", TypeError),
        ({"choose": "hash", "aux_loss": 0.1}, "aux_loss, bias_update_rate", ValueError),
        ({"choose": "token_rounding", "tile": 0}, "tile", ValueError),
        ({"choose": "token_rounding", "tile": 2.0}, "tile", TypeError),
        ({"choose": "token_rounding", "rule": "nr_g"}, "rule", ValueError),
        ({"choose": "token_rounding", "eval_top_k": "no"}, "eval_top_k", TypeError),
        ({"choose": "expert_choice", "capacity_factor": 0}, "capacity_factor", ValueError),
        ({"choose": "capacity", "capacity_factor": math.nan}, "capacity_factor", ValueError),
        ({"choose": "capacity", "capacity_factor": True}, "capacity_factor", TypeError),
        ({"choose": "capacity", "priority": "random"}, "priority", ValueError),
        ({**GROUPED, "top_groups": None}, "top_groups", TypeError),
        ({**GROUPED, "num_groups": None}, "num_groups", TypeError),
        ({**GROUPED, "num_groups": 0}, "num_groups", ValueError),
        ({**GROUPED, "num_groups": 3}, "num_groups", ValueError),
        ({**GROUPED, "top_groups": 5}, "top_groups", ValueError),
        ({**GROUPED, "top_k": 5}, "top_k", ValueError),
        ({**GROUPED, "score": "softmax_topk"}, "num_groups", ValueError),
        ({**GROUPED, "choose": "hash"}, "num_groups", ValueError),
        ({**GROUPED, "choose": "expert_choice"}, "num_groups", ValueError),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], argument: str, error: type[Exception]) -> None:
    refuses(lambda: Router(**({"d_model": 16, "num_experts": 8, "top_k": 2} | options)), argument, error)


@pytest.mark.parametrize(
    ("options", "suggested"),
    [
        ({"tile": 8}, "choose='token_rounding'"),
        ({"chose": "hash"}, "'choose'"),
        ({"aux_los": 0.1}, "'aux_loss'"),
        ({"choose": "capacity", "capacity": 2}, "'capacity_factor'"),
        ({"choose": "token_rounding", "tiles": 8}, "'tile'"),
        ({"choose": TokenRounding(), "aux_los": 0.1}, "'aux_loss'"),
        ({"choose": TokenRounding(), "tile": 8}, "carries its own options"),
    ],
)
def test_a_keyword_that_there_is_not_is_refused_with_what_may_be_meant(options: dict[str, Any], suggested: str) -> None:
    for make in (Router, partial(make_router, "top_k")) if options.keys() == {"aux_los"} else (Router,):
        with pytest.raises(TypeError, match=suggested):
            make(16, 8, 2, **options)


@pytest.mark.parametrize(
    ("x", "ids", "argument", "error"),
    [
        (torch.zeros(3, 16, dtype=torch.int64), None, "x", TypeError),
        (torch.zeros(3, 15), None, "x", ValueError),
        (torch.zeros(2, 3, 16), None, "x", ValueError),
        (torch.zeros(3, 16, device="meta"), None, "x", ValueError),
        (torch.zeros(3, 16), None, "token_ids", ValueError),
        (torch.zeros(3, 16), torch.zeros(3), "token_ids", TypeError),
        (torch.zeros(3, 16), [0, 1, 2], "token_ids", TypeError),
        (torch.zeros(3, 16), torch.zeros(4, dtype=torch.int64), "token_ids", ValueError),
    ],
)
def test_input_that_is_refused(x: Tensor, ids: Any, argument: str, error: type[Exception]) -> None:
    refuses(lambda: named("hash")(x, token_ids=ids), argument, error)


def test_a_bias_that_there_is_not_cannot_step() -> None:
    refuses(lambda: Router(16, 8, 2).update_bias(torch.arange(8)), "expert_bias")


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ROUTERS)
def test_no_host_synchronisation_and_graph_capture(name: str) -> None:
    router = named(name, 64, 32, 4, z_loss=0.1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1024, 64, device="cuda").bfloat16().requires_grad_()
    ids = torch.arange(1024, device="cuda") if name == "hash" else None

    def step() -> tuple[Routing, Tensor, Tensor]:
        routing = router(x, token_ids=ids)
        loss = routing.scores.square().sum() + sum(routing.aux_losses.values())
        return routing, *torch.autograd.grad(loss, (x, router.weight))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        routing, *gradients = step()
    x.detach().copy_(torch.randn(1024, 64))
    graph.replay()
    torch.cuda.synchronize()
    if name in ("token_rounding_sr_f", "token_rounding_nr_s"):
        return  # another draw than the eager one's
    expected, *expected_gradients = step()
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.scores, expected.scores)
    torch.testing.assert_close(gradients, expected_gradients)


# --- In the layer: output and gradients against the float64 oracle, under each save policy -------------------------------


def layer_and_input(name: str, save: str = "minimal") -> tuple[MoE, torch.Tensor, torch.Tensor | None]:
    layer = MoE(16, 8, 6, 2, router=name, save=save, dtype=torch.float64, **tile_of(name))
    x = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    return layer, x, torch.arange(50) % 20 if name == "hash" else None


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("name", ROUTERS)
def test_output_and_gradients_of_the_layer(name: str, save: str) -> None:
    layer, x, ids = layer_and_input(name, save)
    inputs = [x, *layer.parameters()]
    torch.manual_seed(1)
    out, stats = layer(x, token_ids=ids)
    got = torch.autograd.grad(out.square().sum() + stats.aux_loss, inputs)

    torch.manual_seed(1)
    routing = layer.router(x, token_ids=ids)
    expected = reference.moe_mlp(
        x, layer.gate_up_proj, layer.down_proj, routing.scores, routing.experts,
        num_experts=6, pair_tokens=routing.pair_tokens,
    )  # fmt: skip
    loss = expected.square().sum() + sum(routing.aux_losses.values())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(got, torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("name", ROUTERS)
def test_checkpointing_gives_the_same_gradients_and_bias(name: str) -> None:
    layer, x, ids = layer_and_input(name)
    inputs = [x, *layer.parameters()]

    def gradients(checkpointed: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        if checkpointed:
            out, stats = checkpoint(layer, x, ids, use_reentrant=False, context_fn=checkpoint_contexts)
        else:
            out, stats = layer(x, ids)
        return torch.autograd.grad(out.square().sum() + stats.aux_loss, inputs)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=0, atol=0)


# --- Its own precision: fp64 ranks as fp64, and neither autocast nor torch's default dtype matters -----------------------


def routed(name: str, x: torch.Tensor) -> Routing:
    torch.manual_seed(0)
    router = named(name, dtype=x.dtype)
    with torch.no_grad():
        router.weight.copy_(torch.linspace(-1, 1, 128, dtype=torch.float64).view(8, 16).sin())
    torch.manual_seed(1)
    return router(x, token_ids=torch.arange(len(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_autocast_and_the_default_dtype_change_nothing(name: str, dtype: torch.dtype, default_dtype: None) -> None:
    x = torch.randn(60, 16, dtype=dtype)
    expected = routed(name, x)
    assert expected.scores.dtype == expected.logits.dtype == dtype
    for reduced in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=reduced):
            torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)
    for default in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(default)
        torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ROUTERS)
def test_inference_mode_and_strides_change_nothing(name: str) -> None:
    x = torch.randn(60, 16)
    expected = routed(name, x)
    with torch.inference_mode():
        torch.testing.assert_close(routed(name, x), expected, rtol=0, atol=0)
    columns = x.t().contiguous().t()
    assert not columns.is_contiguous()
    torch.testing.assert_close(routed(name, columns), expected)


def test_float64_ranks_what_fp32_would_tie() -> None:
    """Scores that differ by 1e-12: the best come first, not the lower ids."""
    close = 0.5 + torch.arange(8, dtype=torch.float64)[:, None] * 1e-12
    assert choose_top_k(close.t(), 3).tolist() == [[7, 6, 5]]
    chosen = torch.tensor([[True], [False]] * 4)
    assert rank_tokens(chosen_first_keys(close, chosen)).tolist() == [[6, 4, 2, 0, 7, 5, 3, 1]]
    mask = TokenRounding(tile=3, rule="down")(close, torch.zeros(8, 1, dtype=torch.int32))
    assert mask.flatten().tolist() == [False, False, *[True] * 6]


@pytest.mark.parametrize("rule", ["sr_f", "nr_s"])
def test_draws_are_fp32_whatever_the_default(rule: str, default_dtype: None) -> None:
    """In bf16, .999 is 1 and a draw one of 256 numbers."""
    counts, row = torch.full((4000,), 999), torch.ones(4000, 1000)  # up with probability .999 by either rule

    def rounded() -> torch.Tensor:
        draws = TokenRounding(rule=rule).draws(4000, counts.device, torch.Generator().manual_seed(0))
        return rounded_counts(counts, 1000, rule, num_tokens=1000, sorted_scores=row, draws=draws)

    expected = rounded()
    assert expected.tolist().count(0) in range(1, 12)
    torch.set_default_dtype(torch.bfloat16)
    assert torch.equal(rounded(), expected)


@pytest.mark.parametrize("rule", ["sr_f", "nr_s"])
def test_a_generator_makes_the_draws(rule: str) -> None:
    scores = torch.rand(64, 16)
    choice, experts = TokenRounding(tile=8, rule=rule), choose_top_k(scores, 3)
    before = torch.get_rng_state()
    first, again, other = (choice(scores, experts, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(choice(scores, experts), first)
