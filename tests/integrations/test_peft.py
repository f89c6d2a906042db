"""`blazeproto.integrations.peft` beside peft's own path, which puts W + BA in a weight's place."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
peft = pytest.importorskip("peft", reason="needs peft 0.20 or later")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.lora.layer import ParamWrapper  # noqa: E402

from blazeproto.integrations import peft as ours  # noqa: E402
from blazeproto.integrations import transformers as experts  # noqa: E402
from blazeproto.lab.accuracy import Pool  # noqa: E402
from tests.gpu import DEVICES  # noqa: E402
from tests.integrations import families, on_devices  # noqa: E402
from tests.integrations.families import close, experts_of, tiny, tokens  # noqa: E402

# In place; transposed, alternating, with biases; transposed; without a gate; a shared expert beside them.
FAMILIES = ("qwen3_moe", "gpt_oss", "aria_text", "nemotron_h", "deepseek_v3")


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.logging.set_verbosity_error()
    ours.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranks of up's and down's factors in each call of `moe_mlp`, 0 where there are none."""
    made: list[tuple[int, int]] = []
    moe_mlp = experts.moe_mlp

    def counted(*args: Any, **options: Any) -> Tensor:
        factors = (options["up_factors"], options["down_factors"])
        made.append(tuple(0 if of is None else of.a.shape[1] for of in factors))  # type: ignore[arg-type]
        return moe_mlp(*args, **options)

    monkeypatch.setattr(experts, "moe_mlp", counted)
    return made


@pytest.fixture
def no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes W + BA fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError("W + BA was made")

    monkeypatch.setattr(ParamWrapper, "_activate_lora", refuse)
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", refuse)


def up_of(model: Any) -> str:
    return "gate_up_proj" if next(iter(experts_of(model).values())).has_gate else "up_proj"


def config_for(model: Any, **options: Any) -> Any:
    targets = [f"experts.{up_of(model)}", "experts.down_proj"]
    given = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": targets, **options}
    return LoraConfig(**given)


def randomise(model: Any) -> None:
    """Both factors of every adapter: peft's B is 0 at first."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)


def adapted(family: str = "qwen3_moe", activation: torch.nn.Module | None = None, **options: Any) -> Any:
    model = tiny(family)
    if activation is not None:
        for experts in families.experts_of(model).values():
            experts.act_fn = activation
    model = get_peft_model(model, config_for(model, **options))
    randomise(model)
    return model


def use(model: Any, implementation: str) -> None:
    model.get_base_model().set_experts_implementation(implementation)


def train(model: Any, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and every gradient by its parameter's name."""
    use(model, implementation)
    model.zero_grad()
    ids = tokens().to(model.device)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def logits_of(model: Any, implementation: str) -> Tensor:
    use(model, implementation)
    with torch.no_grad():
        made: Tensor = model(input_ids=tokens()).logits
    return made


def trains_as_with_peft(model: Any) -> dict[str, Tensor]:
    """Its gradients."""
    logits, gradients = train(model, "eager")
    our_logits, our_gradients = train(model, "blazeproto")
    assert gradients.keys() == our_gradients.keys()
    close(our_logits, logits)
    for name, gradient in gradients.items():
        close(our_gradients[name], gradient)
    return our_gradients


def agrees_with_peft(model: Any, calls: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Its gradients."""
    gradients = trains_as_with_peft(model)
    assert len(calls) == len(ours.explain(model))
    assert all("lora_" in name for name in gradients), "frozen weights have no gradient"
    assert all(gradient.any() for gradient in gradients.values())
    return gradients


# --- As peft computes it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.of_this_version(FAMILIES))
def test_adapters_train_as_with_peft(family: str, calls: list[tuple[int, int]]) -> None:
    model = adapted(family)
    gradients = agrees_with_peft(model, calls)
    assert set(ours.explain(model).values()) == {"factors"}
    assert len(gradients) == 4 * len(calls) and set(calls) == {(4, 4)}


@DEVICES
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_in_bf16_are_as_near_to_float64_as_with_peft(family: str, device: str) -> None:
    """The routers are told what eager chose."""
    model, pool = adapted(family).to(device, torch.bfloat16), Pool()
    exact = copy.deepcopy(model).double()
    choices = on_devices.record_choices(model, lambda: train(model, "eager"))
    on_devices.give_choices(model, choices)
    on_devices.give_choices(exact, choices)
    made = []
    for each, implementation in ((model, "blazeproto"), (model, "eager"), (exact, "eager")):
        logits, gradients = train(each, implementation)
        made.append({"logits": logits, **{name: t.clone() for name, t in gradients.items()}})
    on_devices.add_to_pool(pool, *made)
    assert not pool.failures(slack=1.3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_weight_alone(family: str, which: int, calls: list[tuple[int, int]]) -> None:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    agrees_with_peft(adapted(family, target_parameters=targets[which : which + 1]), calls)
    assert set(calls) == {(4, 0) if which == 0 else (0, 4)}


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"experts.down_proj": 9}, "alpha_pattern": {"experts.down_proj": 31}},
        {"target_modules": ["q_proj", "v_proj"]},
    ],
    ids=["rslora", "patterns", "attention too"],
)
def test_options_of_peft(options: dict[str, Any], calls: list[tuple[int, int]]) -> None:
    agrees_with_peft(adapted(**options), calls)
    assert set(calls) == {(4, 9) if "rank_pattern" in options else (4, 4)}


@pytest.mark.usefixtures("no_sum")
@pytest.mark.parametrize("family", families.of_this_version(FAMILIES))
def test_w_plus_ba_is_never_made(family: str) -> None:
    model = adapted(family)
    _, gradients = train(model, "blazeproto")
    assert gradients
    with pytest.raises(AssertionError, match=r"W \+ BA was made"):
        train(model, "eager")


def test_two_adapters(calls: list[tuple[int, int]]) -> None:
    """Each alone, and both at once, with other ranks and scalings."""
    model = adapted()
    model.add_adapter("second", config_for(model.get_base_model(), r=7, lora_alpha=2, use_rslora=True))
    randomise(model)
    for active, rank in ((["default"], 4), (["second"], 7), (["default", "second"], 11)):
        model.base_model.set_adapter(active)
        calls.clear()
        gradients = agrees_with_peft(model, calls)
        assert set(calls) == {(rank, rank)} and {name.split(".")[-2] for name in gradients} == set(active)
    model.base_model.set_adapter(["default"])
    alone = logits_of(model, "blazeproto")
    model.delete_adapter("second")
    assert torch.equal(logits_of(model, "blazeproto"), alone)


def test_disabled_adapters(calls: list[tuple[int, int]]) -> None:
    model = adapted()
    with_adapters = logits_of(model, "blazeproto")
    with model.disable_adapter():
        calls.clear()
        without = logits_of(model, "blazeproto")
        assert set(calls) == {(0, 0)}
        close(without, logits_of(model, "eager"))
    assert not torch.allclose(with_adapters, without, rtol=1e-2)
    assert torch.equal(logits_of(model, "blazeproto"), with_adapters)


# --- Saving, loading, merging --------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """What is saved after training here is what peft saves, and loads on either path."""
    model = adapted()
    names = {name for name, _ in model.named_parameters()}
    before = logits_of(model, "blazeproto")
    train(model, "blazeproto")
    for implementation in ("blazeproto", "eager"):
        use(model, implementation)
        model.save_pretrained(tmp_path / implementation)
    one, other = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("blazeproto", "eager"))
    assert one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())
    assert {tuple(t.shape) for t in one.values()} == {(16, 32), (32, 16), (16, 16)}

    base = tiny("qwen3_moe")
    base.load_state_dict(model.unload().state_dict())
    again = PeftModel.from_pretrained(base, tmp_path / "blazeproto")
    assert {name for name, _ in again.named_parameters()} == names
    calls.clear()
    assert torch.equal(logits_of(again, "blazeproto"), before) and set(calls) == {(4, 4)}
    close(logits_of(again, "eager"), before)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merge_and_unmerge(family: str, calls: list[tuple[int, int]]) -> None:
    model = adapted(family)
    expected = logits_of(model, "blazeproto")
    model.merge_adapter()
    calls.clear()
    merged = logits_of(model, "blazeproto")
    assert set(calls) == {(0, 0)}, "they are in the weights"
    close(merged, expected)
    with model.disable_adapter():  # which unmerges, as peft does
        close(logits_of(model, "blazeproto"), logits_of(model, "eager"))
    model.merge_adapter()
    model.unmerge_adapter()
    close(logits_of(model, "blazeproto"), expected)
    assert calls[-1] == (4, 4)
    plain = model.merge_and_unload()
    calls.clear()
    plain.set_experts_implementation("blazeproto")
    with torch.no_grad():
        close(plain(input_ids=tokens()).logits, expected)
    assert set(calls) == {(0, 0)} and not any(isinstance(module, ParamWrapper) for module in plain.modules())


# --- What a model does besides -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_sum")
def test_bf16_weights_with_float32_adapters(calls: list[tuple[int, int]]) -> None:
    """As peft makes them; gradients are float32 and near to those of float32 weights."""
    model = tiny("qwen3_moe").bfloat16()
    model = get_peft_model(model, config_for(model))
    randomise(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    _, gradients = train(model, "blazeproto")
    assert len(calls) == 2 and {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    _, exact = train(model.float(), "blazeproto")
    for name, gradient in gradients.items():
        assert (gradient - exact[name]).norm() <= 0.05 * exact[name].norm(), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool, calls: list[tuple[int, int]]) -> None:
    model = adapted().train()
    logits, gradients = train(model, "blazeproto")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls.clear()
    again, recomputed = train(model, "blazeproto")
    assert len(calls) == 4, "each of two layers twice"
    assert torch.equal(logits, again)
    for name, gradient in gradients.items():
        close(recomputed[name], gradient)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiles_without_a_graph_break(family: str) -> None:
    model = adapted(family)
    use(model, "blazeproto")
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    x, index, scores = torch.randn(10, 32), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    factors = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
    assert len(factors) == 4
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(wrapper, fullgraph=True, backend="aot_eager")
        results = []
        for layer in (wrapper, compiled):
            out = layer(x, index, scores)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), factors)])
    for got, wanted in zip(*results, strict=True):
        close(got, wanted)


# --- Other ways to compute, and what is refused ---------------------


def test_what_stays_with_peft(calls: list[tuple[int, int]]) -> None:
    """Here an activation that is not in the table."""
    model = adapted("gemma4_text", activation=torch.nn.Softplus())
    trains_as_with_peft(model)
    assert set(ours.explain(model).values()) == {"peft: the activation Softplus"} and not calls


def test_weights_that_are_trained_beside_their_adapters(calls: list[tuple[int, int]]) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        if name.endswith(".gate_up_proj"):
            parameter.requires_grad_()
    gradients = trains_as_with_peft(model)
    assert any(name.endswith(".gate_up_proj") for name in gradients) and calls
    assert set(ours.explain(model).values()) == {"factors"}


def test_adapters_of_a_bias_stay_with_peft(calls: list[tuple[int, int]]) -> None:
    model = adapted("gpt_oss", target_parameters=["experts.down_proj_bias", "experts.down_proj"])
    trains_as_with_peft(model)
    assert set(ours.explain(model).values()) == {"peft: adapters of down_proj_bias"}
    assert set(calls) == {(0, 4)}, "the adapter of the weight inside it runs as factors"


def test_one_transposed_expert_stays_with_peft(calls: list[tuple[int, int]]) -> None:
    """peft adds B A to a weight (in, out) as it is; what is merged must be what was computed before."""
    config = families.configuration("gpt_oss")
    config.num_local_experts = config.num_experts_per_tok = 1
    config.intermediate_size = config.hidden_size  # another width is an error of peft's, in forward too
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    families.randomise(model)
    model = get_peft_model(model, config_for(model, target_parameters=["experts.down_proj"]))
    randomise(model)
    use(model, "blazeproto")
    (why,) = set(ours.explain(model).values())
    assert why.startswith("peft: transposed weights of one expert")
    ours_ = logits_of(model, "blazeproto")
    assert set(calls) == {(0, 0)}
    close(ours_, logits_of(model, "eager"))
    model.merge_adapter()
    close(logits_of(model, "blazeproto"), ours_)


def test_explain_without_experts_or_with_another_implementation() -> None:
    model = adapted()
    use(model, "grouped_mm")
    assert set(ours.explain(model).values()) == {'peft: experts_implementation="grouped_mm"'}
    assert ours.explain(torch.nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("what", ours.REFUSED)
def test_the_refused_are_refused_by_name(what: str, calls: list[tuple[int, int]]) -> None:
    model = adapted()
    use(model, "blazeproto")
    for wrapper in (module for module in model.modules() if isinstance(module, ParamWrapper)):
        if what == "DoRA":
            wrapper.use_dora["default"] = True
        elif what == "lora_dropout":
            wrapper.lora_dropout["default"] = torch.nn.Dropout(0.1)
        elif what == "lora_bias":
            wrapper.lora_bias["default"] = True
        else:
            wrapper.lora_variant["default"] = object()
    with pytest.raises(ValueError, match=f"adapter 'default' of down_proj has {what}"):
        model(input_ids=tokens())
    assert not calls


def test_a_second_adapter_is_refused_too() -> None:
    """DoRA by peft; a bias, which it leaves out without a word, here."""
    model = adapted()
    with pytest.raises(ValueError, match="use_dora"):
        model.add_adapter("with DoRA", config_for(model.get_base_model(), use_dora=True))
    model = adapted()
    use(model, "blazeproto")
    model.add_adapter("second", config_for(model.get_base_model(), lora_bias=True))
    model.set_adapter("second")
    with pytest.raises(ValueError, match="adapter 'second' of down_proj has lora_bias"):
        model(input_ids=tokens())


def test_mixed_batches_are_refused_as_peft_does() -> None:
    model = adapted()
    use(model, "blazeproto")
    wrapper = next(module for module in model.modules() if isinstance(module, ParamWrapper))
    x, index, scores = torch.randn(2, 32), torch.rand(2, 4).topk(2).indices, torch.rand(2, 2)
    with pytest.raises(ValueError, match="does not support mixed adapter batches"):
        wrapper(x, index, scores, adapter_names=["default", "__base__"])


def test_factors_for_experts_of_another_road_are_refused() -> None:
    layer = families.experts_alone("gemma4", "modeling_gemma4.Gemma4TextExperts")
    layer.act_fn = torch.nn.Softplus()
    inputs = torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"^low_rank: "):
        experts.experts_forward(layer, *inputs, low_rank=(None, None))


def test_registering_again_is_harmless() -> None:
    forward = ParamWrapper.forward
    ours.register()
    assert ParamWrapper.forward is forward
