"""transformers' models with our experts on a Hopper GPU, where the kernels run; and the same tests on a CPU, with tiny models.

Outputs and gradients in bf16 are compared with float64, within the bounds of `blazeproto.lab.accuracy`; the yardstick is eager in
bf16.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")

from blazeproto.integrations import transformers as ours  # noqa: E402
from blazeproto.lab.accuracy import WORST_FACTOR, Pool  # noqa: E402
from tests.gpu import DEVICES  # noqa: E402
from tests.integrations import on_devices  # noqa: E402
from tests.integrations.on_devices import (  # noqa: E402
    BACKEND,
    SLACK,
    TrainingStep,
    add_to_pool,
    build,
    run_layer,
    token_ids,
)

SEEDS = range(3)
FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers.logging.set_verbosity_error()
    ours.register()


# --- Experts, and a decoder layer ----------------------------------------------------------------------------------------


@DEVICES
@FAMILIES
@pytest.mark.parametrize("away", [0.0, 0.3], ids=["all", "sentinels"])
def test_experts_are_as_near_to_float64_as_eager(family: str, away: float, device: str) -> None:
    """away: the share of pairs whose expert is elsewhere: their ids are E, their weights 0. Tokens of only such are not read."""
    experts, pool = on_devices.experts_module(family, device), Pool()
    experts._is_expert_parallel = away > 0
    exact = copy.deepcopy(experts).double()
    for seed in SEEDS:
        inputs = on_devices.experts_inputs(experts, device, seed)
        elsewhere = (torch.rand(inputs.ids.shape, generator=torch.Generator().manual_seed(seed)) < away).to(device)
        elsewhere[3] |= away > 0
        inputs.scores.masked_fill_(elsewhere, 0)
        eager, wanted = (on_devices.run_experts(module, "eager", inputs) for module in (experts, exact))
        for results in (eager, wanted):  # which have no sentinels: an expert got them, with weight 0
            results["scores"] = results["scores"].masked_fill(elsewhere, 0)
        inputs.ids.masked_fill_(elsewhere, experts.num_experts)
        inputs.x.masked_fill_(elsewhere.all(dim=1, keepdim=True), torch.nan)
        got = on_devices.run_experts(experts, "blazeproto", inputs)
        assert not got["scores"][elsewhere].any() and not got["x"][elsewhere.all(dim=1)].any()
        add_to_pool(pool, got, eager, wanted)
    assert not pool.failures(slack=SLACK[device])


@DEVICES
@FAMILIES
def test_a_decoder_layer_is_as_near_to_float64_as_eager(family: str, device: str) -> None:
    model, pool = build(family, device), Pool()
    on_devices.compare_layers(pool, model, device, SEEDS)
    assert not pool.failures(slack=SLACK[device])


@DEVICES
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_decoder_layer_is_as_near_to_float64_as_eager(device: str) -> None:
    model, pool = build("qwen3_moe", device), Pool()
    on_devices.compare_layers(pool, model, device, SEEDS, BACKEND[device])
    assert not pool.failures(slack=SLACK[device])


@DEVICES
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_decoder_layer_routes_as_it_is(device: str) -> None:
    """With its own router: all but the tokens whose choice rounding decides are as without compilation."""
    model = build("qwen3_moe", device, experts_implementation="blazeproto")
    x, d_out = on_devices.layer_inputs(model, device, 0)
    plain = run_layer(model, x, d_out)
    found = run_layer(model, x, d_out, on_devices.compiled(model.model.layers[0], BACKEND[device]))
    for name in ("out", "x"):
        error = (found[name] - plain[name]).float().norm(dim=-1) / plain[name].float().norm(dim=-1)
        assert error.median() < 2**-6 and (error < 2**-4).float().mean() > 0.8, name


# --- A training step -----------------------------------------------------------------------------------------------------


def step_of(family: str, device: str) -> TrainingStep:
    model = build(family, device, experts_implementation="blazeproto", num_hidden_layers=2)
    return TrainingStep(model, token_ids(device))


@DEVICES
@FAMILIES
def test_a_replayed_training_step_is_as_near_to_eager_as_eager_to_itself(family: str, device: str) -> None:
    step = step_of(family, device)
    replay = step.capture()
    for seed in (5, 6):  # of which the graph has seen neither
        step.ids.copy_(token_ids(device, seed))
        runs = [step() for _ in range(4)]
        spread = max(on_devices.distance(a, b) for a in runs for b in runs)
        got = replay()
        difference = on_devices.distance(got, runs[0])
        assert difference <= 2 * spread, f"{difference:.3g}, eager's own {spread:.3g}"
        assert got["loss"].isfinite() and not torch.equal(got["lm_head.weight"], step.begin["lm_head.weight"])


@DEVICES
@FAMILIES
def test_experts_of_a_replayed_training_step_give_the_same_bits(family: str, device: str) -> None:
    step = step_of(family, device)
    replay = step.capture()
    step.ids.copy_(token_ids(device, 7))
    got = replay()
    step.restore()
    for name, experts in step.experts.items():
        seen = step.seen[name]
        experts._forward_hooks.clear()
        experts._forward_pre_hooks.clear()
        x, scores = (seen[key].clone().requires_grad_() for key in ("x", "scores"))
        experts.zero_grad()
        out = experts(x, seen["ids"], scores)
        out.backward(seen["d_out"])
        again = {"out": out, "d_x": x.grad, "d_scores": scores.grad}
        for key, tensor in again.items():
            assert torch.equal(tensor, seen[key]), f"{name}: {key}"
        for key, parameter in experts.named_parameters():
            assert torch.equal(parameter.grad, got[f"gradient of {name}.{key}"]), f"{name}: gradient of {key}"


@DEVICES
@FAMILIES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(family: str, use_reentrant: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls, moe_mlp = step_of(family, device), [], ours.moe_mlp
    plain = step()
    step.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    monkeypatch.setattr(ours, "moe_mlp", lambda *args, **options: (calls.append(1), moe_mlp(*args, **options))[1])
    recomputed = step()
    assert len(calls) == 4, "each of two layers twice"
    assert abs(recomputed["loss"] - plain["loss"]) <= 2**-8 * plain["loss"]
    for name, gradient in recomputed.items():
        if name.startswith("gradient"):
            error = (gradient.float() - plain[name].float()).norm() / plain[name].float().norm().clamp_min(1e-20)
            assert error < 2**-6, f"{name}: {error:.3g}"


# --- A model -------------------------------------------------------------------------------------------------------------


@DEVICES
@FAMILIES
def test_save_and_load(family: str, device: str, tmp_path: Path) -> None:
    model = build(family, device, experts_implementation="blazeproto", num_hidden_layers=2).eval()
    ids = token_ids(device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        assert "blazeproto" not in (tmp_path / "config.json").read_text(), "it would not load without us"
        options = {"attn_implementation": model.config._attn_implementation, "dtype": torch.bfloat16}
        again = type(model).from_pretrained(tmp_path, experts_implementation="blazeproto", **options).to(device)
        assert torch.equal(again(input_ids=ids).logits, logits)


def check_layers_on(devices: list[str], folder: Path) -> None:
    """A model whose two layers `device_map` puts on these gives what it gives on the first of them."""
    whole = build("qwen3_moe", torch.device(devices[0]).type, experts_implementation="blazeproto", num_hidden_layers=2)
    whole.to(devices[0])
    whole.save_pretrained(folder)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "lm_head": 1}
    spread = type(whole).from_pretrained(
        folder,
        experts_implementation="blazeproto",
        dtype=torch.bfloat16,
        device_map={name: devices[place] for name, place in places.items()},
    )
    assert {p.device for p in spread.parameters()} == {torch.device(device) for device in devices}
    ids = token_ids(torch.device(devices[0]).type).to(devices[0])
    results = []
    for model in (whole, spread):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: p.grad.to(devices[0]) for name, p in model.named_parameters()}
        results.append(gradients | {"loss": loss.detach().to(devices[0])})
    one, two = results
    assert abs(two["loss"] - one["loss"]) <= 2**-8 * one["loss"]
    for name, gradient in two.items():
        if name != "loss":
            assert (gradient.float() - one[name].float()).norm() <= 2**-6 * one[name].float().norm(), name


def test_layers_by_device_map(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    check_layers_on(["cpu", "cpu"], tmp_path)


@pytest.mark.gpu
def test_layers_on_two_gpus(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there is {torch.cuda.device_count()}")
    check_layers_on(["cuda:0", "cuda:1"], tmp_path)


# --- Generation ----------------------------------------------------------------------------------------------------------

PROMPT, NEW = 16, 32


def generate(model: Any, prompt: Tensor) -> Tensor:
    return model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, use_cache=True)


@DEVICES
@FAMILIES
def test_logits_under_teacher_forcing_are_as_near_to_float64_as_eagers(family: str, device: str) -> None:
    model = build(family, device, num_hidden_layers=2).eval()
    exact = on_devices.exact_copy(model)
    model.set_experts_implementation("eager")
    pool = Pool()
    with torch.no_grad():
        ids = generate(model, token_ids(device, 3, (8, PROMPT)))
        choices = on_devices.record_choices(model, lambda: model(input_ids=ids))
        for each in (model, exact):
            on_devices.give_choices(each, choices)
        eager, wanted = (each(input_ids=ids).logits for each in (model, exact))
        model.set_experts_implementation("blazeproto")
        pool.add("logits", model(input_ids=ids).logits, eager, wanted)
    assert not pool.failures(slack=SLACK[device])


@DEVICES
def test_greedy_tokens_are_eagers_where_these_are_clear(device: str) -> None:
    """Clear: eager's two best logits differ by more than rounding may move them by. The second layer has no experts, so that the
    first one's error can't change what is chosen."""
    model = build("qwen3_moe", device, num_hidden_layers=2, mlp_only_layers=[1], vocab_size=32).eval()
    exact = on_devices.exact_copy(model)
    prompt = token_ids(device, 3, (8, PROMPT)) % 28 + 3
    with torch.no_grad():
        model.set_experts_implementation("eager")
        tokens = generate(model, prompt)
        choices = on_devices.record_choices(model, lambda: model(input_ids=tokens))
        on_devices.give_choices(exact, choices)
        logits = model(input_ids=tokens).logits.float()
        worst = float((logits - exact(input_ids=tokens).logits).abs().max())
        model.set_experts_implementation("blazeproto")
        forced, generated = model(input_ids=tokens).logits.float(), generate(model, prompt)
    best = logits.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 2 * (1 + WORST_FACTOR) * worst  # of both logits, eager's error and ours
    assert clear.float().mean() > 0.1, "too few to compare"
    assert torch.equal(forced.argmax(dim=-1)[clear], logits.argmax(dim=-1)[clear])
    for row, (got, wanted) in enumerate(zip(generated, tokens, strict=True)):
        where = (got != wanted).nonzero()
        if len(where):  # from there on the texts differ
            assert not clear[row, where[0] - 1], f"text {row}, token {int(where[0])}"
