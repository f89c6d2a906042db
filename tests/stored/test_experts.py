"""Experts of stored weights: the bits of the same call on decoded weights, against float64, and what they hold and refuse."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blazeproto import stored
from blazeproto.autograd import LowRank, grouped_experts
from blazeproto.autograd.call import STORED, How
from blazeproto.autograd.mlp import dispatched_mlp
from blazeproto.autograd.options import Options
from blazeproto.autograd.ranks import Arrived
from blazeproto.runtime.arch import missing
from blazeproto.stored import StoredWeight
from tests.autograd.cases import Case, assert_close, assert_same_bits, make_case
from tests.refusals import refuses

FORMATS = ("mxfp4", "nf4", "int4", "fp8")
SIZES = (37, 128, 64, 5, 3)  # T, d, n, E, K
BLOCKS = {"fp8": (64, 64)}


def stored_case(format: str, *, only: str = "", sizes: tuple[int, ...] = SIZES, **more: Any) -> tuple[Case, Case]:
    """A case with low-rank factors whose weights are stored, and the same with decoded ones.  only: the one that is stored."""
    case = make_case(*sizes, **{"factors": "both", "trained": (), "dtype": torch.bfloat16, **more})
    for name in ("gate_up_proj", "down_proj"):
        if only in ("", name):
            setattr(case, name, stored.quantize(getattr(case, name), format, BLOCKS.get(format)))
    plain = [
        w.decode(dtype=case.x.dtype) if isinstance(w, StoredWeight) else w for w in (case.gate_up_proj, case.down_proj)
    ]
    return case, replace(case, gate_up_proj=plain[0], down_proj=plain[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("workspace_bytes", [None, 100_000])
def test_bits_are_those_of_decoded_weights(format, save, workspace_bytes):
    """out, dX, dS, dA and dB, with biases; of an expert without rows too, and in a second forward."""
    case, plain = stored_case(format, bias=True, sentinels=True, idle=(2,))
    options = {"save": save, "workspace_bytes": workspace_bytes}
    made = case.run(**options)
    assert len(made) == 7
    assert_same_bits(made, plain.run(**options))
    assert_same_bits(case.run(**options), made)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["swiglu", "relu", "alternating(clamped_swiglu)", "gelu"])
@pytest.mark.parametrize(
    "how", [{"varying": True}, {"capacity": 0.6}, {"factors": "up"}, {"factors": None}, {"rank": 5}]
)
def test_bits_of_other_layers(format, activation, how):
    case, plain = stored_case(format, activation=activation, **how)
    assert_same_bits(case.run(), plain.run())


@pytest.mark.parametrize("only", ["gate_up_proj", "down_proj"])
def test_one_stored_weight(only):
    """The other may be trained."""
    other = ({"gate_up_proj", "down_proj"} - {only}).pop()
    case, plain = stored_case("nf4", only=only, trained=(other,))
    made = case.run()
    assert len(made) == 8
    assert_same_bits(made, plain.run())


@pytest.mark.parametrize("format", FORMATS)
def test_against_float64(format):
    """In float64 a product of bf16 numbers rounds nothing that matters; in bf16 the error is bf16's."""
    case, plain = stored_case(format, dtype=torch.float64)
    assert_close(case.run(), plain.reference(), 1e-13)
    case, plain = stored_case(format)
    assert_close(case.run(), plain.reference(), 1.5e-2)


@pytest.mark.parametrize("seed", range(60))
def test_random_layers(seed):
    """Sizes, format, activation, biases, ranks and options drawn at random."""
    draw = random.Random(seed).choice
    sizes = (draw((1, 5, 64, 200)), 64 * draw((1, 2, 3)), 64 * draw((1, 2)), draw((1, 3, 8)), draw((1, 2)))
    more = {"bias": draw((True, False)), "sentinels": draw((True, False)), "rank": draw((1, 8, 17))}
    more |= {"factors": draw(("up", "down", "both")), "activation": draw(("swiglu", "relu2", "geglu"))}
    case, plain = stored_case(draw(FORMATS), sizes=sizes, **more)
    options = {"save": draw(("minimal", "paper", "recompute")), "workspace_bytes": draw((None, 200_000))}
    assert_same_bits(case.run(**options), plain.run(**options))


def test_numbers_of_no_tokens_and_of_one():
    for num_tokens in (0, 1):
        case, plain = stored_case("mxfp4", sizes=(num_tokens, *SIZES[1:]))
        assert_same_bits(case.run(), plain.run())


def test_gradients_numerically():
    case, _ = stored_case("nf4", sizes=(3, 64, 64, 3, 2), dtype=torch.float64, rank=2)
    assert torch.autograd.gradcheck(case.function, case.parameters, fast_mode=True)


def test_autocast():
    case, plain = stored_case("mxfp4", dtype=torch.bfloat16, factor_dtype=torch.float32)
    case.x, plain.x = (case.x.detach().float().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        outs = case.forward(), plain.forward()
    assert outs[0].dtype == torch.bfloat16
    assert_same_bits(case.gradients(outs[0]), plain.gradients(outs[1]))
    refuses(lambda: torch.autocast("cpu", torch.float16)(case.forward)(), "x")


def test_a_lower_layer_has_its_gradient_through_two():
    """Two layers of stored experts with residuals over a trained matrix, whose gradient has the bits of decoded weights."""
    layers, lowest, gradients = [stored_case("mxfp4"), stored_case("nf4")], torch.randn(128, 128).bfloat16(), []
    for which in (0, 1):
        weight = lowest.clone().requires_grad_()
        x = layers[0][0].x.detach() @ weight
        for layer in layers:
            x = x + replace(layer[which], x=x).forward()
        gradients += torch.autograd.grad(x.square().sum(), (weight, *layers[0][which].parameters[1:]))
    assert_same_bits(gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :])
    assert gradients[0].abs().amin(1).bool().all()


def test_rows_that_have_arrived():
    case, plain = stored_case("nf4")
    counts, factors = torch.tensor([9, 0, 11, 2, 12]), {"up_factors": LowRank(case.up_a, case.up_b)}
    made = []
    for each in (case, plain):
        out = grouped_experts(each.x, each.gate_up_proj, each.down_proj, counts, **factors)
        made.append([out, *torch.autograd.grad(out, (each.x, case.up_a, case.up_b), each.d_out)])
    assert_same_bits(*made)
    pair = case.gate_up_proj[:], case.gate_up_proj[:]
    refuses(lambda: grouped_experts(case.x, pair, case.down_proj, counts), "gate_up_proj[0]", TypeError)


class Home:
    """A dispatcher of one rank, which moves nothing."""

    def check(self, options: Options) -> None: ...

    def dispatch(self, x: Tensor, scores: Tensor, topk_experts: Tensor, *lists: Any) -> Arrived:
        return Arrived(x, scores, topk_experts, *lists, route=None)

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        return partial


def test_experts_of_several_ranks():
    case, plain = stored_case("fp8")
    made = []
    for each in (case, plain):
        given = each.x, each.gate_up_proj, each.down_proj, each.scores, each.topk_experts
        factors = {"up_factors": LowRank(each.up_a, each.up_b)}
        out, _ = dispatched_mlp(Home(), *given, num_experts=5, options=Options(), **factors)
        made.append(each.gradients(out, allow_unused=True)[:4])
    assert_same_bits(*made)


# ---- what is held ------------------------------------------------------------------------------------------------


def test_experts_are_decoded_one_at_a_time(monkeypatch):
    """Each expert with rows once a product: up and down, and their gradients in backward; none that is idle."""
    (case, _), seen, real = stored_case("mxfp4", idle=(1,)), [], StoredWeight.decode
    monkeypatch.setattr(StoredWeight, "decode", lambda self, *which: seen.append(which[0]) or real(self, *which))
    out = case.forward()
    assert seen == 2 * [0, 2, 3, 4]
    case.gradients(out)
    assert seen == 4 * [0, 2, 3, 4]


def test_nothing_decoded_is_saved():
    """What autograd saves is what it saves beside decoded weights."""
    case, plain = stored_case("mxfp4")
    sizes, saved = [], list[Tensor]()

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    for each in (case, plain):
        saved.clear()
        weights = (each.gate_up_proj, each.down_proj)
        known = [t for w in weights for t in (w.tensors if isinstance(w, StoredWeight) else (w,)) if t is not None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            each.forward()
        places = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        sizes.append(sum(size for place, size in places.items() if place not in {t.data_ptr() for t in known}))
    assert sizes[0] == sizes[1]


def test_nothing_of_half_a_weight_is_allocated():
    """The largest allocation of forward and backward is below half of one bf16 weight."""
    case, plain = stored_case("nf4", sizes=(256, 256, 256, 24, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        made = case.run()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert made[0].nbytes < largest < plain.down_proj.nbytes / 2 < plain.gate_up_proj.nbytes / 2


def test_operations_are_those_of_decoded_weights():
    totals = []
    for case in stored_case("mxfp4"):
        with FlopCounterMode(display=False) as counter:
            case.run()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_operators_see_stored_weights():
    """Under a mode, saved-tensor hooks and a kept graph, and compiled: the same bits."""
    case, _ = stored_case("mxfp4")
    made = case.run()
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(case.run(), made)
    out = case.forward()
    assert_same_bits(case.gradients(out, retain_graph=True), case.gradients(out))
    torch.compiler.reset()
    compiled = torch.compile(case.forward, fullgraph=True, backend="aot_eager")
    assert_same_bits(case.gradients(compiled()), made)


def test_compiled_for_other_blocks():
    """Weights are arguments; the second call's differ in their block alone."""
    case, call = stored_case("nf4")[0], lambda up: case.forward(gate_up_proj=up)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for block in ((1, 64), (1, 32)):
        assert torch.equal(compiled(up := stored.quantize(torch.randn(5, 128, 128), "nf4", block)), call(up))


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    "hopper": ("backend", {"backend": "hopper"}),
    "ampere": ("backend", {"backend": "ampere"}),
    "fp8": (
        "precision",
        {
            "precision": "fp8",
            "up_factors": None,
            "down_factors": None,
            "gate_up_proj": stored.quantize(torch.randn(5, 256, 128), "nf4"),  # sizes that fp8 takes
            "down_proj": stored.quantize(torch.randn(5, 128, 128), "nf4"),
        },
    ),
    "fp16": ("x", {"x": torch.zeros(37, 128, dtype=torch.float16)}),
    "another device": ("down_proj", {"down_proj": stored.quantize(torch.randn(5, 128, 64), "nf4").to("meta")}),
    "another shape": ("down_proj", {"down_proj": stored.quantize(torch.randn(5, 64, 64), "nf4")}),
    "other experts": ("down_proj", {"down_proj": stored.quantize(torch.randn(4, 128, 64), "nf4")}),
    "halves": ("gate_up_proj", {"gate_up_proj": stored.quantize(torch.randn(5, 64, 128), "nf4")}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what):
    case, (argument, replaced) = stored_case("nf4")[0], REFUSED[what]
    refuses(lambda: case.forward(**replaced), argument)


def test_no_architecture_has_kernels_for_short_blocks():
    needs = How(Options(), up_stored="nf4 1 64", down_stored="int4 1 16").needs
    assert "multiple of 32" in str(missing((9, 0), needs=needs)) and "multiple of 32" not in str(
        missing((9, 0), needs=How(Options(), up_stored="int4 1 32").needs)
    )


def test_both_architectures_have_kernels_of_stored_weights():
    assert all(How(Options(), **{which: "nf4 1 64"}).needs == STORED for which in ("up_stored", "down_stored"))
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert (
            missing(capability, name="auto", needs=STORED) is missing(capability, name="ampere", needs=STORED) is None
        )
    assert missing((9, 0), name="hopper", needs=STORED) is None
    assert "a GPU of compute capability 8.0" in str(missing((7, 5), needs=STORED))


def test_a_sharded_weight_is_refused():
    case = stored_case("nf4")[0]
    sharded = case.down_proj.values.as_subclass(type("Sharded", (Tensor,), {"placements": ()}))
    refuses(lambda: case.forward(down_proj=replace(case.down_proj, values=sharded)), "down_proj", TypeError)


@pytest.mark.parametrize("argument", ["x", "scores", "topk_experts", "up_bias"])
def test_no_other_argument_may_be_stored(argument):
    case = stored_case("nf4")[0]
    refuses(lambda: case.forward(**{argument: case.down_proj}), argument, TypeError)
