"""`explain`: its steps' bytes, operations and floors are cost's, what they keep is what autograd keeps, and their calls run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from blazeproto import MoE, cost
from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.gemm.recipe import RECIPES
from blazeproto.lab import explanation, times
from blazeproto.lab.explanation import Explanation, explain
from tests.refusals import refuses

POLICIES = ("minimal", "paper", "recompute")
OF_ROUTER = ("router product", "top-k", "choice", "load and losses")


def kept_by_experts(made: Explanation) -> int:
    return sum(step.kept_bytes for step in made.rows if step.name not in OF_ROUTER)


def explained(T: int = 96, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[MoE, Tensor, Explanation]:
    layer = MoE(64, 32, 8, 2, dtype=dtype, **options)
    x = torch.randn(T, 64).to(dtype).requires_grad_()
    return layer, x, explain(layer, x)


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("save", POLICIES)
def test_steps_are_those_of_cost(save: str, activation: str) -> None:
    """All of them, in order; the products' floors too."""
    _, _, made = explained(save=save, activation=activation)
    counted = [(s.phase, s.name, s.operations, s.bytes_read + s.bytes_written) for s in made.rows]
    sizes = Sizes(96, 64, 32, 8, 2, halves=2 if activation == "swiglu" else 1)
    assert counted == cost.layer_work(sizes, save)
    floors = [
        sum(step.floor_ms for step in made.rows if step.phase == phase and step.name in PRODUCTS)
        for phase in ("forward", "backward")
    ]
    assert save == "recompute" or floors == pytest.approx([*cost.layer_floor_ms(sizes)], rel=1e-9)


def test_what_an_evaluation_has_kept_is_not_what_training_reads() -> None:
    layer, x = MoE(128, 128, 4, 2, precision="fp8"), torch.randn(8, 128, requires_grad=True)
    with torch.no_grad():
        layer(x)
    assert layer.kept.nbytes and "quantized before" not in explain(layer, x).note
    assert "quantized before" in explain(layer.requires_grad_(False), x).note


@pytest.mark.parametrize("save", ["minimal", "recompute"])
@pytest.mark.parametrize("weights", ["each", "both", "before"])
def test_steps_in_fp8(save: str, weights: str) -> None:
    layer = MoE(512, 128, 8, 2, save=save, bias=True, precision="fp8", keep_transposed=weights == "both")
    layer.to(torch.bfloat16)
    if weights == "before":
        layer.quantize_weights()
    made = explain(layer, torch.randn(96, 512, dtype=torch.bfloat16, requires_grad=True))
    assert kept_by_experts(made) == layer.saved_bytes(96)
    backward = [step for step in made.rows if step.phase == "backward"]
    names = [step.name for step in backward]
    order = ("down_backward_act", "up_backward_act", "up_backward_weight", "down_backward_weight")
    assert names[names.index("dequantize dH") + 1] == "expert_row_sum of dH"
    assert sorted(names.index(name) for name in order) == [names.index(name) for name in order]
    read = sum(
        a.nbytes
        for step in made.rows
        for a in step.reads
        if a.name in ("gate_up_proj", "down_proj") and a.itemsize == 2
    )
    kept = weights == "both" and save == "minimal"
    once = layer.gate_up_proj.nbytes + layer.down_proj.nbytes
    again = layer.gate_up_proj.nbytes if save == "recompute" else 0
    assert read == (0 if weights == "before" else once if kept else 2 * once + again)
    assert ("beside the weights" in repr(made)) == (weights == "before")
    plain = (
        explain(MoE(512, 128, 8, 2, save=save, bias=True), torch.randn(96, 512, requires_grad=True)).totals().operations
    )
    assert made.totals().operations == plain
    assert [s.rate for s in made.rows if s.name in ("down_forward", *order)] == [2] * 5
    assert ("quantize down_proj^T" in names) == (weights != "before" and not kept)
    for name, weight in (("down_backward_act", "down_proj^T"), ("up_backward_act", "gate_up_proj^T")):
        assert weight in [a.name for s in backward if s.name == name for a in s.reads]
    assert "fp8 of bfloat16" in repr(made)


class Held:
    """What autograd keeps in place of a tensor, so that it is seen to be dropped."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_by_autograd(layer: MoE, x: Tensor, **inputs: Any) -> int:
    """Bytes of all that a forward's graph keeps but for the parameters, each storage once; what it keeps of losses that are not
    returned is gone by then."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    held: WeakSet[Held] = WeakSet()

    def pack(t: Tensor) -> Held:
        held.add(made := Held(t))
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        out, stats = layer(x, **inputs)
    tensors = {each.tensor.untyped_storage().data_ptr(): each.tensor for each in held}
    del out, stats
    return sum(t.nbytes for place, t in tensors.items() if place not in parameters)


@pytest.mark.parametrize("router", ["top_k", "aux_free", "topk_softmax"])
@pytest.mark.parametrize("save", POLICIES)
def test_what_is_kept_is_what_autograd_keeps(save: str, router: str) -> None:
    layer, x, made = explained(save=save, router=router)
    assert kept_by_experts(made) == made.saved_bytes == layer.saved_bytes(96)
    assert made.totals().kept_bytes == kept_by_autograd(layer, x)


UP, DOWN, ROUTER = "gate_up_proj", "down_proj", "router.weight"
BIASES = ("gate_up_proj_bias", "down_proj_bias")
TRAINED = [(), (UP,), (DOWN,), (UP, DOWN), BIASES[:1], BIASES[1:], BIASES, (ROUTER,), (UP, DOWN, *BIASES, ROUTER)]


@pytest.mark.parametrize("router", ["top_k", "topk_softmax", "token_rounding"])
@pytest.mark.parametrize("save", POLICIES)
@pytest.mark.parametrize("trained", TRAINED, ids="-".join)
def test_steps_are_those_of_what_is_trained(trained: tuple[str, ...], save: str, router: str) -> None:
    """With and without a gradient of x: what is kept is what autograd keeps, and what is written is what has a gradient."""
    layer = MoE(64, 32, 8, 2, router=router, save=save, bias=True, **({"tile": 16} if "round" in router else {}))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    for wants in (False, True):
        x = torch.randn(96, 64).requires_grad_(wants)
        made = explain(layer, x)
        assert made.totals().kept_bytes == kept_by_autograd(layer, x)
        assert kept_by_experts(made) == made.saved_bytes == layer.saved_bytes(96, input_grad=wants)
        backward = [step for step in made.rows if step.phase == "backward"]
        written = {array.name for step in backward for array in step.writes}
        out, stats = layer(x)
        if not (wants or trained):
            assert not backward and not made.saved_bytes and not out.requires_grad
            continue
        (out.sum() + stats.aux_loss).backward()
        shown = {UP: "d gate_up_proj", DOWN: "d down_proj", ROUTER: "d router.weight"}
        for name, parameter in layer.named_parameters():
            if name in shown:
                assert (shown[name] in written) == (parameter.grad is not None)
        assert ("dX" in written) == (x.grad is not None) == ("up_backward_act" in [step.name for step in backward])
        assert [array.shape for step in backward for array in step.writes if array.name == "bias"] == [
            tuple(layer.get_parameter(name).shape) for name in reversed(BIASES) if name in trained
        ]


@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_fp8_without_gradients(save: str) -> None:
    """No transposed weight is kept where x needs no gradient; dW_down comes last, also where dW_up is not made."""
    layer = MoE(512, 128, 8, 2, save=save, precision="fp8", dtype=torch.bfloat16)
    layer.gate_up_proj.requires_grad_(False)
    for wants in (False, True):
        x = torch.randn(96, 512, dtype=torch.bfloat16).requires_grad_(wants)
        made = explain(layer, x)
        assert kept_by_experts(made) == made.saved_bytes and made.totals().kept_bytes == kept_by_autograd(layer, x)
        names = [step.name for step in made.rows if step.phase == "backward"]
        assert "up_backward_weight" not in names and ("up_backward_act" in names) == wants
        assert names.index("down_backward_weight") == max(map(names.index, {*names} & {*PRODUCTS}))


@pytest.mark.parametrize(("precision", "scales"), [("fp8", (96,)), ("fp8_rollout", (96, 4))])
def test_a_precision_s_recipe_is_shown(precision: str, scales: tuple[int, ...]) -> None:
    made = explain(MoE(512, 128, 8, 2, precision=precision), torch.randn(96, 512))
    assert f"{precision}: {RECIPES[precision]}." in " ".join(str(made).split())
    (quantizing,) = (step for step in made.rows if step.name == "quantize x" and step.phase == "forward")
    assert scales in [a.shape for a in quantizing.writes]


def test_a_layer_on_meta() -> None:
    """Sizes say all where every token has K experts."""
    layer, x = (
        MoE(64, 32, 8, 2, dtype=torch.bfloat16, device="meta"),
        torch.empty(96, 64, dtype=torch.bfloat16, device="meta"),
    )
    here = MoE(64, 32, 8, 2, dtype=torch.bfloat16)
    assert explain(layer, x).rows == explain(here, torch.randn(96, 64, dtype=torch.bfloat16)).rows
    refuses(lambda: explain(MoE(64, 32, 8, 2, router="token_rounding", dtype=torch.bfloat16, device="meta"), x), "x")


@pytest.mark.parametrize(
    "options",
    [
        {"row_capacity": 100},
        {"workspace_bytes": 20_000},
        {"router": "token_rounding", "tile": 16},
        {"router": "expert_choice"},
        {"bias": True, "combine": "fused", "d_shared": 16},
        {"combine": "fused_both", "workspace_bytes": 20_000},
        {"dtype": torch.float32},
    ],
    ids=["capacity", "chunks", "rounding", "expert_choice", "bias", "fused_both", "float32"],
)
@pytest.mark.parametrize("save", POLICIES)
def test_experts_keep_what_the_layer_says(save: str, options: dict[str, Any]) -> None:
    layer, _, made = explained(save=save, **options)
    assert kept_by_experts(made) == layer.saved_bytes(96)
    names = [step.name for step in made.rows]
    assert ("up_forward again" in names) == (save == "recompute")
    assert ("down_forward_fused" in names) == ("combine" in options)
    assert ("up_backward_act_fused" in names) == (options.get("combine") == "fused_both")
    assert ("bias_score_grad" in names) == ("bias" in options)
    assert "chunks of tokens" in repr(made) or "workspace_bytes" not in options


@pytest.mark.parametrize("combine", ["gather", "fused", "fused_both"])
def test_what_sums_a_tokens_rows(combine: str) -> None:
    """Rows (T K, d) in bf16 and `combine`, or float32 sums (T, d), which are written by the product and read once."""
    _, _, made = explained(combine=combine)
    for phase, fused, product in (
        ("forward", combine != "gather", "down_forward"),
        ("backward", combine == "fused_both", "up_backward_act"),
    ):
        steps = {step.name: step for step in made.rows if step.phase == phase}
        assert (f"{product}_fused" in steps) == fused and (product in steps) == ("combine" in steps) == (not fused)
        written = steps[f"{product}_fused" if fused else product].bytes_written
        assert written == (96 * 64 * 4 if fused else 192 * 64 * 2)
        cast = steps.get("out to x's dtype" if phase == "forward" else "dX to x's dtype")
        assert (cast is not None) == fused
        assert cast is None or (cast.bytes_read, cast.bytes_written) == (96 * 64 * 4, 96 * 64 * 2)


def test_float32_weights_are_cast_and_get_float32_gradients() -> None:
    layer = MoE(64, 32, 8, 2)
    made = explain(layer, torch.randn(96, 64, dtype=torch.bfloat16))
    assert [step.phase for step in made.rows if step.name == "weights to x's dtype"] == ["forward", "backward"]
    gradient = next(step for step in made.rows if step.name == "up_backward_weight")
    assert gradient.bytes_written == 4 * layer.gate_up_proj.numel()


@pytest.mark.parametrize(
    ("sizes", "options"), [((64, 96), {}), ((64, 128), {"combine": "fused"}), ((64, 128), {"save": "paper"})]
)
def test_a_layer_whose_forward_raises_is_refused(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    layer, x = MoE(*sizes, 8, 2, precision="fp8", **options), torch.randn(96, 64)
    assert refuses(lambda: explain(layer, x), "precision") == refuses(lambda: layer(x), "precision")


class EvenRouter(nn.Module):
    """Expert t mod E for token t: a router that is not this package's."""

    def forward(self, x: Tensor) -> Any:
        experts = torch.arange(len(x), dtype=torch.int32)[:, None] % 8
        load = torch.bincount(experts.flatten(), minlength=8).int()
        scores = torch.ones(len(x), 1)
        extra = {"aux_losses": {}, "token_offsets": None, "pair_tokens": None}
        return SimpleNamespace(scores=scores, experts=experts, logits=None, load=load, **extra)


def test_other_routers() -> None:
    made = explain(MoE(64, 32, 8, 1, router=EvenRouter()), torch.randn(4, 6, 64))
    assert made.rows[0].name == "router" and made.rows[0].operations is None
    assert made.note.startswith("Here the layer runs on torch: the kernels need a CUDA GPU")
    assert "EvenRouter" in made.note and "T=24" in made.title and "K=1," in made.title
    made = explain(MoE(64, 32, 8, 2, router="hash"), torch.randn(24, 64), torch.arange(24))
    assert "choice" in [step.name for step in made.rows]


def test_no_token() -> None:
    _, _, made = explained(T=0)
    assert made.totals().operations == 0 and "T=0" in repr(made)


def test_the_layer_is_left_as_it_was() -> None:
    layer = MoE(64, 32, 8, 2, router="aux_free")
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    explain(layer, torch.randn(8, 64))
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())


def test_bad_input() -> None:
    layer = MoE(64, 32, 8, 2)
    refuses(lambda: explain(nn.Linear(2, 2), torch.randn(3, 2)), "layer", TypeError)  # type: ignore[arg-type]
    refuses(lambda: explain(layer, [1]), "x", TypeError)  # type: ignore[arg-type]
    refuses(lambda: explain(layer, torch.randn(3, 2)), "x")
    refuses(lambda: explain(layer, torch.randn(3, 64, device="meta")), "x")
    refuses(lambda: explain(layer, torch.randn(3, 64), measure=None), "measure", TypeError)  # type: ignore[arg-type]
    refuses(lambda: explain(layer, torch.randn(3, 64)).totals("sideways"), "phase")


def test_on_a_cpu_there_is_no_time() -> None:
    _, _, made = explained()
    assert not made.is_timed and made.totals().ms is None and all(step.ms is None for step in made.rows)
    assert "floor / ms" not in repr(made) and "floor / ms" not in made._repr_html_()
    both, forward, backward = made.totals(), made.totals("forward"), made.totals("backward")
    assert both.bytes_read == forward.bytes_read + backward.bytes_read == sum(s.bytes_read for s in made.rows)
    assert both.floor_ms == pytest.approx(forward.floor_ms + backward.floor_ms)


# --- The calls that are timed --------------------------------------------------------------------------------------------------


LAYERS: list[dict[str, Any]] = [
    {},
    {"save": "recompute", "bias": True, "router": "aux_free"},
    {"combine": "fused", "row_capacity": 100, "activation": "relu"},
    {"combine": "fused_both", "bias": True},
    {"router": "token_rounding", "tile": 16},
]


@pytest.mark.parametrize("options", LAYERS, ids=lambda options: "-".join(options) or "plain")
def test_every_step_has_a_call_that_runs(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU by the twins: a call that does not fit its product's signature or shapes is refused by both."""

    def half(call: Callable[[], object]) -> float:
        call()
        return 0.5

    monkeypatch.setattr(explanation, "cold_ms", half)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    monkeypatch.setattr("blazeproto.layer.MoE.runs_on", lambda *_: "hopper")
    _, _, made = explained(**options)
    not_timed = {step.name for step in made.rows if step.ms is None}
    assert not_timed == (
        {"choice", "load and losses", "sum of dlogits"} if "router" in options and "tile" in options else set()
    )
    assert made.is_timed and "floor / ms" in repr(made)
    timed = [step for step in made.rows if step.ms is not None]
    assert made.totals().ms == 0.5 * len(timed)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*LAYERS, {"dtype": torch.float32}], ids=lambda o: "-".join(o) or "plain")
def test_each_step_is_timed_on_a_gpu(options: dict[str, Any]) -> None:
    layer = MoE(512, 256, 16, 4, device="cuda", **{"dtype": torch.bfloat16, **options})
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    made = explain(layer, x)
    not_timed = {step.name for step in made.rows if step.ms is None}
    assert not_timed <= {"choice", "load and losses", "sum of dlogits"} and (not not_timed or "tile" in options)
    for step in made.rows:
        if step.ms is not None:
            # A step may leave what it wrote in the cache, so it can beat its floor; it never takes a host's time.
            assert 0.5 * step.floor_ms <= step.ms <= 20 * step.floor_ms + 0.15, step


@pytest.mark.gpu
def test_times_are_of_the_whole_step_on_a_gpu() -> None:
    """At a size that keeps the GPU busy, the products run near their floors, and their sum is near the layer's own time.

    The best of three measurements: other tests' processes use the GPU too.
    """
    layer = MoE(1536, 512, 64, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(24576, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def train() -> object:
        out, stats = layer(x)
        return torch.autograd.grad(out.float().mean() + stats.aux_loss, [x, *layer.parameters()])

    def measured() -> tuple[float, float, float]:  # least and largest share of a floor, time over the steps' sum
        made = explain(layer, x)
        shares = [step.floor_ms / step.ms for step in made.rows if step.name in (*cost.FORWARD, *cost.BACKWARD)]
        return min(shares), max(shares), times.cold_ms(train) / made.totals().ms

    found = [measured() for _ in range(3)]
    assert any(least > 0.4 and most < 1.1 and 0.6 < whole < 1.6 for least, most, whole in found), found
