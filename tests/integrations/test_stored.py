"""Stored experts in transformers' models: MXFP4 checkpoints, `store_experts`, peft's adapters, saving and reloading."""

import copy
import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
peft = pytest.importorskip("peft", reason="needs peft 0.20 or later")

from transformers.integrations import finegrained_fp8 as fp8  # noqa: E402
from transformers.quantizers import auto  # noqa: E402

from blazeproto import stored  # noqa: E402
from blazeproto.integrations import peft as on_peft  # noqa: E402
from blazeproto.integrations.stored import store_experts  # noqa: E402
from blazeproto.integrations.transformers import expert_parallel, explain, register  # noqa: E402
from blazeproto.stored.module import held  # noqa: E402
from scripts import finetune_stored  # noqa: E402
from tests.autograd.test_peaks import Allocated  # noqa: E402
from tests.integrations import families  # noqa: E402
from tests.integrations.families import experts_of, tokens  # noqa: E402
from tests.refusals import refuses  # noqa: E402

PARTS = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.logging.set_verbosity_error()
    register(storage="mxfp4")
    on_peft.register()
    monkeypatch.setattr(
        families, "SMALL", families.SMALL | {"hidden_size": 64, "moe_intermediate_size": 64}
    )  # blocks fit
    torch.manual_seed(0)


def model_of(family: str) -> Any:
    return families.tiny(family, dtype=torch.bfloat16)


def loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def decoded(model: Any) -> Any:
    """A copy of the model whose experts' weights are the decoded numbers."""
    made = copy.deepcopy(model)
    for experts in experts_of(made).values():
        for name in experts.stored:
            numbers = held(experts, name).decode()
            setattr(experts, name, torch.nn.Parameter(numbers.mT if experts.is_transposed else numbers))
        experts.stored = {}
    return made


def gradients(model: Any) -> list[Tensor]:
    """The logits and the gradients of all parameters but the experts' weights."""
    model.zero_grad()
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    made = [p.grad for name, p in model.named_parameters() if not name.endswith((*PARTS, "up_proj"))]
    return [out.logits.detach(), *(gradient for gradient in made if gradient is not None)]


def same_bits(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as gpt-oss's are: blocks and scales, and the entry of config.json."""
    model, state = model_of("gpt_oss"), {}
    for name, t in model.state_dict().items():
        if name.endswith(PARTS):
            weight = stored.quantize(t.mT, "mxfp4")
            state[f"{name}_blocks"] = weight.values.unflatten(2, (-1, 16))
            state[f"{name}_scales"] = weight.scales.view(torch.uint8)
        else:
            state[name] = t
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = model.config.to_dict() | {"quantization_config": entry, "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


# --- While loading, and after it -----------------------------------------------------------------------------------------


def test_a_checkpoint_in_mxfp4_is_loaded_as_its_bytes_lie(checkpoint: Path, tmp_path: Path) -> None:
    """Logits and gradients are those of transformers' own decoding, on our experts; saved again, the file is the same."""
    model = loaded(checkpoint)
    assert all(path.startswith("in place (torch: ") for path in explain(model).values())
    plain = loaded(
        checkpoint, quantization_config=transformers.Mxfp4Config(dequantize=True), experts_implementation="blazeproto"
    )
    same_bits(gradients(model), gradients(plain))
    model.save_pretrained(tmp_path / "again")
    again, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", checkpoint))
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)
    same_bits([loaded(tmp_path / "again")(tokens()).logits], [model(tokens()).logits])
    assert model.hf_quantizer.is_trainable and model.generate(tokens(), max_new_tokens=2).shape[1] == 14


def test_no_half_of_a_layers_weights_is_allocated(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loading, forward and backward, beside the mapped file."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # another thread's allocations are not seen
    with torch.profiler.profile(profile_memory=True) as profile:
        gradients(model := loaded(checkpoint))
    weights = [held(experts, name) for experts in experts_of(model).values() for name in experts.stored]
    in_bf16 = 2 * sum(weight.shape.numel() for weight in weights[:2])
    assert max(event.self_cpu_memory_usage for event in profile.events() if event.name[0] != "[") < in_bf16 / 2


@pytest.mark.parametrize("storage", ["mxfp4", "nf4"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_one_weight_at_a_time_is_stored(family: str, storage: str) -> None:
    """Beyond the model as it was: one weight's bytes, and less than one expert's numbers in bf16. Each bf16 weight is freed."""
    model = model_of(family)
    experts = [*experts_of(model).values()]
    sizes = [getattr(each, name).nbytes for each in experts for name in PARTS]
    with Allocated() as allocated:
        for each, name in itertools.product(experts, PARTS):
            weight = getattr(each, name)
            weakref.finalize(weight.untyped_storage(), allocated.free, weight.nbytes)
        del weight
        store_experts(model, storage)
    first = held(experts[0], "gate_up_proj")
    assert first.nbytes < allocated.peak < first.nbytes + 2 * first.shape[1:].numel()
    stored_bytes = sum(held(each, name).nbytes for each, name in itertools.product(experts, PARTS))
    assert allocated.now == stored_bytes - sum(sizes)


def test_scales_that_overflow_and_checkpoints_without_blocks_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model_of("gpt_oss").save_pretrained(tmp_path / "plain")
    refuses(lambda: loaded(tmp_path / "plain", quantization_config=transformers.Mxfp4Config()), "quantization_config")
    refuses(lambda: register(storage="nf4"), "storage")
    state = load_file(checkpoint / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 253
    save_file(state, checkpoint / "model.safetensors", metadata={"format": "pt"})
    refuses(lambda: loaded(checkpoint), "down_proj_scales")


@pytest.mark.parametrize("storage", ["nf4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_stored_experts_compute_what_their_numbers_compute_and_are_saved(
    family: str, storage: str, tmp_path: Path
) -> None:
    model = store_experts(model_of(family), storage)
    wanted = gradients(model)
    same_bits(wanted, gradients(decoded(model)))
    model.save_pretrained(tmp_path)
    same_bits(gradients(loaded(tmp_path)), wanted)


def test_fp8_experts_of_transformers_run_as_they_lie() -> None:
    """Adapters beside them too, which peft alone adds to the codes. Scales that do not fit are refused."""
    families.SMALL.update(hidden_size=128, moe_intermediate_size=128)  # the fixture's copy
    model = model_of("qwen3_moe")
    plain, config = copy.deepcopy(model), transformers.FineGrainedFP8Config()
    fp8.replace_with_fp8_linear(model, [r".*_proj", "lm_head"], config)
    for experts, decoded in zip(experts_of(model).values(), experts_of(plain).values(), strict=True):
        for name in PARTS:
            weight = stored.quantize(getattr(decoded, name), "fp8")
            setattr(experts, name, torch.nn.Parameter(weight.values))
            setattr(experts, f"{name}_scale_inv", torch.nn.Parameter(weight.scales))
            setattr(decoded, name, torch.nn.Parameter(weight.decode()))
    for of in (model, plain):
        of.set_experts_implementation("blazeproto")
    same_bits(gradients(model), gradients(plain))
    torch.manual_seed(1)
    losses = trained(beside := adapted(model))
    torch.manual_seed(1)
    assert losses == trained(adapted(plain))
    refuses(beside.merge_adapter, "merge")
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(4, 2, 1))
    assert list(explain(model).values())[1].startswith("refused: quantised")


def test_refused_models_stay_as_they_were() -> None:
    model = model_of("qwen3_moe")
    refuses(lambda: store_experts(model, "fp8"), "gate_up_proj's block")
    for of, storage, named, error in (
        (model, "fp4", "storage", ValueError),
        (
            torch.nn.Sequential(model),
            "nf4",
            "model",
            ValueError,
        ),  # has experts, and no implementation of theirs to choose
        (None, "fp8", "model", TypeError),
    ):
        refuses(lambda: store_experts(of, storage), named, error)  # noqa: B023
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    store_experts(model, "nf4")
    refuses(lambda: store_experts(model, "nf4"), "storage")
    refuses(lambda: expert_parallel(model, object()), "mesh_or_group", TypeError)  # type: ignore[arg-type]
    experts_of(model)["model.layers.0.mlp.experts"].act_fn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has stored experts; expected stored experts in a module that runs in place"):
        model(tokens())


# --- peft ----------------------------------------------------------------------------------------------------------------


def adapted(model: Any) -> Any:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))


def trained(model: Any) -> list[float]:
    """The losses of a few steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_beside_stored_experts_train_as_beside_their_numbers(family: str, tmp_path: Path) -> None:
    model = store_experts(model_of(family), "nf4")
    plain = decoded(model)
    torch.manual_seed(1)
    beside = adapted(copy.deepcopy(model))
    assert set(on_peft.explain(beside).values()) == {"factors"}
    losses = trained(beside)
    torch.manual_seed(1)
    assert losses == trained(adapted(plain)) and losses[-1] < 0.9 * losses[0]
    beside.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model, tmp_path)
    wanted = beside(tokens()).logits
    same_bits([again(tokens()).logits], [wanted])
    for merge in (beside.merge_adapter, beside.merge_and_unload):
        refuses(merge, "merge")
    same_bits([beside(tokens()).logits], [wanted])
    beside.get_base_model().set_experts_implementation("eager")
    refuses(lambda: beside(tokens()), "adapters")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_the_script_trains_a_checkpoint_and_exports_it_merged(
    family: str,
    quantized: bool,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gpt-oss in MXFP4, and bf16 to NF4. transformers alone loads the merged one, whose W + BA is rounded to bf16, or quantized
    to MXFP4 or e4m3 blocks: its logits are those of W + BA in bf16, but for the printed error."""
    families.SMALL.update(hidden_size=128, moe_intermediate_size=128)  # the fixture's copy
    if family != "gpt_oss":
        model_of(family).save_pretrained(checkpoint)
    given = ["--steps=4", "--tokens=24", "--lr=0.01", "--device=cpu"] + quantized * ["--quantized"]
    finetune_stored.main([str(checkpoint), *given, f"--adapters={tmp_path / 'a'}", f"--export={tmp_path / 'merged'}"])
    printed = capsys.readouterr().out
    losses = [float(line.split()[3].rstrip(",")) for line in printed.splitlines() if "loss" in line]
    assert len(losses) == 4 and losses[-1] < 0.95 * losses[0]
    base = loaded(checkpoint) if family == "gpt_oss" else store_experts(loaded(checkpoint), "nf4")
    before = base(tokens()).logits
    beside = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    wanted = beside(tokens()).logits
    as_it_lies = loaded(tmp_path / "merged", experts_implementation="blazeproto")(tokens()).logits
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "mxfp4", auto.Mxfp4HfQuantizer)
    plain = loaded(tmp_path / "merged", experts_implementation="eager")
    assert {p.dtype for p in plain.parameters()} <= {torch.bfloat16, torch.float32}
    assert ("quantization_config" in json.loads((tmp_path / "merged" / "config.json").read_text())) == quantized
    off, change = ((t - wanted).detach().float().norm(dim=-1).median() for t in (plain(tokens()).logits, before))
    errors = [float(line.split()[-1]) for line in printed.splitlines() if "RMS" in line]
    assert len(errors) == (2 + (family != "gpt_oss")) * quantized
    assert off < (0.3 if quantized else 0.05) * change and all(0.01 < error < 0.15 for error in errors)
    plain.set_experts_implementation("blazeproto")
    assert torch.equal(plain(tokens()).logits, as_it_lies)
