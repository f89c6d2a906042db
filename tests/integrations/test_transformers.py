"""`blazeproto.integrations.transformers` beside transformers' eager experts, on tiny models of many families."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from blazeproto import MoE  # noqa: E402
from blazeproto.autograd.low_rank import LowRank  # noqa: E402
from blazeproto.integrations import peft  # noqa: E402
from blazeproto.integrations import transformers as ours  # noqa: E402
from tests.integrations import families  # noqa: E402
from tests.integrations.families import close, experts_of, tiny, tokens  # noqa: E402
from tests.refusals import refuses  # noqa: E402

FAMILIES = [  # a dozen, and in the full set all others
    *families.of_this_version(families.DOZEN),
    *(pytest.param(f, marks=pytest.mark.full) for f in families.causal_families() if f not in families.DOZEN),
]
NEVER_BF16 = {"inkling2_text", "inkling2_loop_text"}
IN_PLACE = "in place (torch: the kernels need a CUDA GPU of compute capability 8.0 or later; the tensors are on cpu)"
CLASSES = [(folder, name) for folder, names in families.decorated().items() for name in names]
ELSEWHERE = {  # of the classes that are not "in place"
    "MuseSparkExperts": "grouped_mm: a norm after each expert",
}


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.logging.set_verbosity_error()
    ours.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of each call of `moe_mlp`."""
    made: list[str] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        made.append(options["options"].activation)
        return moe_mlp(*args, **options)

    moe_mlp = ours.moe_mlp
    monkeypatch.setattr(ours, "moe_mlp", counted)
    return made


def train(model: Any, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every parameter's gradient by its name."""
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    model.zero_grad()
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def path(experts: Any) -> str:
    """The code path of an experts module, where ours is set."""
    experts.config._experts_implementation = "blazeproto"
    return ours.explain(experts)[""]


# --- Families ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_eager(family: str, calls: list[str]) -> None:
    model = tiny(family)
    model.set_experts_implementation("blazeproto")
    ways = ours.explain(model).values()
    assert ways, "no experts in it"
    loss, gradients = train(model, "eager")
    assert not calls
    our_loss, our_gradients = train(model, "blazeproto")
    assert len(calls) == sum(not way.startswith("grouped_mm") for way in ways)
    assert gradients.keys() == our_gradients.keys()
    assert all(gradients[f"{name}.down_proj"].any() for name in experts_of(model))
    close(our_loss, loss)
    for name, gradient in gradients.items():
        close(our_gradients[name], gradient)


# --- DeepSeek-V3, whose tokens choose among their best groups -------------------------------------------------------------


def deepseek_v3(bias: float = 0.0, **options: Any) -> Any:
    """A model with 16 experts in 4 groups, of which a token has 4 experts in 2. bias: the mean of the balancing one."""
    sizes = {"n_routed_experts": 16, "num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 4}
    sizes |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    torch.manual_seed(0)
    config = families.configuration("deepseek_v3", **(sizes | options))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    families.randomise(model)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, bias, 0.1)
    return model


def moe_of(block: Any) -> MoE:
    """A DeepSeek-V3 block as a layer of ours: router, experts and shared expert, with the block's weights."""
    config, shared = block.config, block.shared_experts
    sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts, config.num_experts_per_tok
    groups = {"num_groups": config.n_group, "top_groups": config.topk_group}
    layer = MoE(
        *sizes, d_shared=shared.down_proj.in_features, score="sigmoid", scale=config.routed_scaling_factor, **groups
    )
    weights = {
        "router.weight": block.gate.weight,
        "router.expert_bias": block.gate.e_score_correction_bias,
        "gate_up_proj": block.experts.gate_up_proj,
        "down_proj": block.experts.down_proj,
        "shared_expert.gate_up_proj": torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
        "shared_expert.down_proj": shared.down_proj.weight,
    }
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize("bias", [0.0, pytest.param(-2.0, id="negative keys")])
def test_a_block_of_deepseek_v3_is_a_layer_of_ours(bias: float) -> None:
    if bias and not families.is_newest():
        pytest.skip("earlier versions may set the keys of other groups to 0, which win over negative ones")
    block = deepseek_v3(bias).model.layers[1].mlp
    layer, x = moe_of(block), torch.randn(50, 32)
    _, *theirs = block.gate(x)
    routing = layer.router(x)
    dense = [torch.zeros(50, 16).scatter(1, ids.long(), s) for s, ids in (routing[:2], theirs)]
    close(*dense)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    (out, _), wanted = layer(inputs[0][None]), block(inputs[1][None])
    close(out, wanted)
    d_out = torch.randn(wanted.shape)
    (out * d_out).sum().backward()
    (wanted * d_out).sum().backward()
    close(inputs[0].grad, inputs[1].grad)
    close(layer.router.weight.grad, block.gate.weight.grad)
    close(layer.gate_up_proj.grad, block.experts.gate_up_proj.grad)
    close(layer.down_proj.grad, block.experts.down_proj.grad)


def outputs_and_gradients(experts: Any, implementation: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Results of one call with output gradients of ones and twos: the output, dX, dS, and the weights' gradients."""
    x, index, scores = inputs
    x, scores = (tensor.detach().clone().requires_grad_() for tensor in (x, scores))
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    out = experts(x, index, scores)
    out.backward(torch.arange(out.numel()).view_as(out).remainder(2).add(1).to(out.dtype))
    return [tensor.detach() for tensor in (out, x.grad, scores.grad, *(p.grad for p in experts.parameters()))]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and scores."""
    return torch.randn(10, 32), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)


def trains_as_eager(experts: Any, inputs: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    inputs = inputs or drawn()
    wanted = outputs_and_gradients(experts, "eager", inputs)
    for got, want in zip(outputs_and_gradients(experts, "blazeproto", inputs), wanted, strict=True):
        close(got, want)


@pytest.mark.full
@pytest.mark.parametrize(("folder", "name"), CLASSES)
def test_every_experts_class_trains_as_eager(folder: str, name: str) -> None:
    experts = families.experts_alone(folder, name)
    kind = name.partition(".")[2]
    assert path(experts) == ELSEWHERE.get(kind, IN_PLACE)
    trains_as_eager(experts)


@pytest.mark.skipif(not families.is_newest(), reason="the table is of 5.24's classes")
def test_roads_are_those_of_classes_that_there_are() -> None:
    assert {name.partition(".")[2] for _, name in CLASSES} >= ELSEWHERE.keys()


@pytest.mark.skipif(not families.is_newest(), reason="an earlier version lacks some of these families")
@pytest.mark.parametrize(
    ("folder", "name", "activation"),
    [
        ("deepseek_v4", "DeepseekV4Experts", "limited_swiglu(limit=1.25)"),
        ("glm5_next", "Glm5NextTextExperts", "limited_swiglu(limit=1.25)"),
        ("hy_v4", "HYV4Experts", "limited_swiglu(limit=1.25)"),
        ("hy_v4_vl", "HYV4VLExperts", "limited_swiglu(limit=1.25)"),
        ("inkling2", "Inkling2Experts", "softcapped_swiglu(gate_cap=2.0,up_cap=3.0)"),
        ("inkling2_loop", "Inkling2LoopExperts", "softcapped_swiglu(gate_cap=2.0,up_cap=3.0)"),
        ("lara_mini", "LaraMiniExperts", "swiglu"),
        ("gemma4", "Gemma4TextExperts", "geglu_tanh"),
        ("diffusion_gemma", "DiffusionGemmaTextExperts", "geglu_tanh"),
    ],
)
def test_gates_of_their_own_run_in_place(folder: str, name: str, activation: str, calls: list[str]) -> None:
    """At inputs that pass the limits."""
    experts = families.experts_alone(folder, f"modeling_{folder}.{name}")
    x, *choice = drawn()
    trains_as_eager(experts, (2 * x, *choice))
    assert calls == [activation]


def test_a_gate_with_another_function_than_its_family_s_runs_as_it_is(calls: list[str]) -> None:
    for folder, name in (
        ("deepseek_v4", "DeepseekV4Experts"),
        ("inkling2", "Inkling2Experts"),
        ("inkling2_loop", "Inkling2LoopExperts"),
    ):
        if folder in families.decorated():
            experts = families.experts_alone(folder, f"modeling_{folder}.{name}")
            experts.act_fn = torch.nn.GELU()
            assert path(experts) == f"grouped_mm: its own gate, {name}._apply_gate"


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_experts_are_as_near_to_float32_as_eager(family: str) -> None:
    """Each experts module, on the inputs that it had in the model."""
    if family in NEVER_BF16:
        pytest.skip("the model itself multiplies float32 by bf16, and torch refuses")
    model = tiny(family).bfloat16()
    model.set_experts_implementation("blazeproto")
    inputs: dict[str, tuple[Tensor, ...]] = {}
    for name, experts in experts_of(model).items():
        experts.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args))
    with torch.no_grad():
        model(input_ids=tokens())
    for name, experts in experts_of(model).items():
        x, index, scores = inputs[name]
        ran = {kind: outputs_and_gradients(experts, kind, inputs[name]) for kind in ("eager", "blazeproto")}
        exact = outputs_and_gradients(experts.float(), "eager", (x.float(), index, scores.float()))
        for eager, got, wanted in zip(ran["eager"], ran["blazeproto"], exact, strict=True):
            assert got.dtype == eager.dtype
            eager_error, error = ((t.float() - wanted).norm() / wanted.norm() for t in (eager, got))
            assert error <= max(1.1 * eager_error, 2**-7), (name, tuple(got.shape), error, eager_error)


# --- Refused -------------------------------------------------------------------------------------------------------------


def experts_module() -> Any:
    return families.experts_alone("mixtral", "modeling_mixtral.MixtralExperts")


def quantised() -> Any:
    experts = experts_module()
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    return experts


def offloaded() -> Any:
    experts = experts_module()
    experts._hf_hook = SimpleNamespace(offload=True)
    return experts


@pytest.mark.parametrize("what", sorted({*ours.REFUSED} - {"stored"}))  # test_stored.py
def test_the_refused_are_refused_by_name(what: str, calls: list[str]) -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    experts = {"quantised": quantised, "offloaded": offloaded}[what]()
    experts.config._experts_implementation = "blazeproto"
    for call in (experts, partial(ALL_FP8_EXPERTS_FUNCTIONS["blazeproto"], experts))[: 1 + (what == "quantised")]:
        with pytest.raises(ValueError, match=f"MixtralExperts has {what} experts"):
            call(*drawn())
    assert not calls and path(experts).startswith(f"refused: {what}; expected ")


def test_experts_that_are_nowhere_yet_are_refused() -> None:
    assert path(experts_module().to("meta")).startswith("refused: offloaded")


def test_products_in_fp8() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts, x, scores = experts_module(), torch.randn(9, 32), torch.rand(9, 2)
    for name, shape in (("gate_up_proj", (4, 256, 32)), ("down_proj", (4, 32, 128))):
        setattr(experts, name, torch.nn.Parameter(torch.randn(shape)))
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    ours.register(precision="fp8")
    out = ALL_EXPERTS_FUNCTIONS["blazeproto"](experts, x, ids, scores)
    weights = (experts.gate_up_proj, experts.down_proj)
    expected = [ours.moe_mlp(x, *weights, scores, ids, num_experts=4, precision=name) for name in ("bf16", "fp8")]
    assert torch.equal(out, expected[1]) and not torch.equal(*expected)
    factors = (None, LowRank(torch.randn(4, 3, 128), torch.randn(4, 32, 3)))
    adapted = ours.experts_forward(experts, x, ids, scores, low_rank=factors, precision="fp8")
    given = {"num_experts": 4, "precision": "fp8", "down_factors": factors[1]}
    assert torch.equal(adapted, ours.moe_mlp(x, *weights, scores, ids, **given)) and not torch.equal(adapted, out)
    path = ours.explain(experts)[""]
    assert "would be in place (torch" in path and path.endswith(", fp8)")
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 200, 32))
    experts.down_proj = torch.nn.Parameter(torch.randn(4, 32, 100))
    assert "refused: precision: expected multiples of 16 and 128" in ours.explain(experts)[""]
    experts.gate_up_proj, experts.down_proj = weights
    pytest.importorskip("peft")
    peft.register()  # keeps the precision
    assert torch.equal(ALL_EXPERTS_FUNCTIONS["blazeproto"](experts, x, ids, scores), expected[1])
    ours.register()
    assert torch.equal(ALL_EXPERTS_FUNCTIONS["blazeproto"](experts, x, ids, scores), expected[0])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "blazeproto"])
def test_explain_says_what_runs(implementation: str, calls: list[str]) -> None:
    """Not what would, with another implementation."""
    model = tiny("qwen3_moe")
    train(model, implementation)
    beginning = "in place (torch: " if implementation == "blazeproto" else f"{implementation}; experts_implementation="
    assert all(way.startswith(beginning) for way in ours.explain(model).values())
    assert bool(calls) == (implementation == "blazeproto") and ours.explain(torch.nn.Linear(2, 2)) == {}


def stand_in_for_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("axolotl.integrations.base")
    stub.BasePlugin = object  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, stub)


def test_the_pages_plugins_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/transformers.md gives to axolotl and ms-swift, with a stub of what it imports from there."""
    text = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    stand_in_for_axolotl(monkeypatch)
    plugin, file = (block for block in blocks if "class" in block or block.endswith("\nregister()\n"))
    functions = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS._global_mapping
    monkeypatch.delitem(functions, "blazeproto")
    scope: dict[str, Any] = {}
    exec(plugin, scope)
    assert "blazeproto" not in functions
    scope["Blazeproto"]().pre_model_load(None)
    assert functions.pop("blazeproto").func is ours.experts_forward
    exec(file, {})
    assert functions["blazeproto"].func is ours.experts_forward


# --- What a model does besides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("mixtral", "modeling_mixtral.MixtralExperts"),
        ("gpt_oss", "modeling_gpt_oss.GptOssExperts"),
        ("nemotron_h", "modeling_nemotron_h.NemotronHExperts"),
        ("gemma4", "modeling_gemma4.Gemma4TextExperts"),
        ("mixtral", "with another activation"),
    ],
)
def test_sentinels(folder: str, name: str) -> None:
    """A pair of an expert elsewhere, with weight 0: it adds nothing, its gradients are 0; a token of only such is unread."""
    if other := name == "with another activation":
        name = "modeling_mixtral.MixtralExperts"
    experts = families.experts_alone(folder, name)
    if other:
        experts.act_fn = torch.nn.Softplus()
    experts._is_expert_parallel = True
    x, index, scores = torch.randn(12, 32), torch.rand(12, 4).topk(2).indices, torch.rand(12, 2)
    away = torch.zeros(12, 2, dtype=torch.bool)
    away[::2, 1], away[5] = True, True
    scores = scores.masked_fill(away, 0)
    here = index.clone()
    index = index.masked_fill(away, 4)
    read = x if path(experts).startswith("grouped_mm") else x.index_fill(0, torch.tensor([5]), torch.nan)
    got = outputs_and_gradients(experts, "blazeproto", (read, index, scores))
    wanted = outputs_and_gradients(experts, "eager", (x, here, scores))
    wanted[2] = wanted[2].masked_fill(away, 0)
    assert not got[0][5].any() and not got[1][5].any() and not got[2][away].any()
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


def test_weights_of_fewer_experts_than_the_module_says_are_refused() -> None:
    """Three of four kept: eager raises where it meets the fourth, which here would be an expert of another rank."""
    experts = families.experts_alone("mixtral", "modeling_mixtral.MixtralExperts")
    for name, weight in [*experts.named_parameters()]:
        setattr(experts, name, torch.nn.Parameter(weight.detach()[:3]))
    refuses(lambda: outputs_and_gradients(experts, "blazeproto", drawn()), "num_experts")


def test_tokens_of_another_dtype_are_cast_to_the_weights() -> None:
    experts = experts_module().bfloat16()
    inputs = drawn()
    got = outputs_and_gradients(experts, "blazeproto", inputs)
    wanted = outputs_and_gradients(experts, "grouped_mm", inputs)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_autocast_multiplies_in_its_dtype() -> None:
    model = tiny("qwen3_moe")
    exact, _ = train(model, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = train(model, "blazeproto")
    assert abs(loss - exact) < 0.05 and {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("qwen3_moe", "modeling_qwen3_moe.Qwen3MoeExperts"),
        ("gpt_oss", "modeling_gpt_oss.GptOssExperts"),
        ("deepseek_v4", "modeling_deepseek_v4.DeepseekV4Experts"),
        ("inkling2", "modeling_inkling2.Inkling2Experts"),
    ],
)
def test_compiles_without_a_graph_break(folder: str, name: str) -> None:
    if folder not in families.decorated():
        pytest.skip("an earlier version lacks this family")
    experts = families.experts_alone(folder, name)
    torch._dynamo.reset()
    decide = torch.compile(lambda m: (torch.ones(1), ours._why_grouped_mm(m), ours.activation_of(m)), backend="eager")
    assert decide(experts)[1:] == (None, ours.activation_of(experts)), (
        "the compiler reads what a module is as Python does"
    )
    inputs = drawn()
    wanted = outputs_and_gradients(experts, "blazeproto", inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experts.compile(backend="aot_eager", fullgraph=True)
        got = outputs_and_gradients(experts, "blazeproto", inputs)
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


def test_compiled_code_is_not_shared_by_other_activations() -> None:
    """As where a decoder layer is compiled, and the next one has other limits."""
    torch._dynamo.reset()
    alike = [families.experts_alone("gpt_oss", "modeling_gpt_oss.GptOssExperts") for _ in range(2)]
    alike[1].load_state_dict(alike[0].state_dict())
    alike[1].limit = 0.25
    for experts in alike:
        experts.config._experts_implementation = "blazeproto"
    inputs = drawn()
    run = torch.compile(lambda experts: experts(*inputs), backend="eager", fullgraph=True)
    outs = [run(experts) for experts in alike]
    assert not torch.allclose(*outs, rtol=0.01)
    for experts, out in zip(alike, outs, strict=True):
        close(out, experts(*inputs))


OF_ACT_FN = "a hook on act_fn, or another forward of it"
UNKNOWN: dict[str, tuple[Callable[[Any], object], str]] = {
    "a flag": (lambda e: setattr(e, "has_pre_expert_norm", True), "has_pre_expert_norm, which is not known here"),
    "another forward": (lambda e: setattr(e.act_fn, "forward", torch.nn.functional.softplus), OF_ACT_FN),
    "a hook": (lambda e: e.act_fn.register_forward_hook(lambda *_: None), OF_ACT_FN),
    "a hook before": (lambda e: e.act_fn.register_forward_pre_hook(lambda *_: None), OF_ACT_FN),
    "a hook of backward": (lambda e: e.act_fn.register_full_backward_hook(lambda *_: None), OF_ACT_FN),
    "a hook before backward": (lambda e: e.act_fn.register_full_backward_pre_hook(lambda *_: None), OF_ACT_FN),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_experts_with_something_that_is_not_known_run_as_they_are(what: str, calls: list[str]) -> None:
    """A later decorator may say of experts that they do something else besides; in place nothing calls act_fn."""
    change, reason = UNKNOWN[what]
    experts = experts_module()
    change(experts)
    assert path(experts) == f"grouped_mm: {reason}"
    trains_as_eager(experts)
    assert not calls


def test_a_gate_that_is_not_known_runs_as_it_is(calls: list[str]) -> None:
    experts = families.experts_alone("gpt_oss", "modeling_gpt_oss.GptOssExperts")
    kind = type(experts)

    def halved_gate(self: Any, gate_up: Tensor) -> Tensor:
        return 0.5 * kind._apply_gate(self, gate_up)

    experts.__class__ = type("Halved", (kind,), {"_apply_gate": halved_gate})
    assert path(experts).startswith("grouped_mm: its own gate, ") and path(experts).endswith("halved_gate")
    trains_as_eager(experts)
    assert not calls
