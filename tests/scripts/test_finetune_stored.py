"""`scripts/finetune_stored.py` on tiny models: of random numbers, and folders in each format that checkpoints have."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
tokenizers = pytest.importorskip("tokenizers")  # of transformers
pytest.importorskip("peft", reason="needs peft 0.20 or later")

from blazeproto import stored  # noqa: E402
from scripts import finetune_stored  # noqa: E402
from scripts.finetune_stored import SIZES  # noqa: E402
from tests.integrations import families  # noqa: E402

ON_CPU = ["--device=cpu", "--tokens=40", "--lr=0.01"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)


def losses_of(printed: str) -> list[float]:
    return [float(line.split()[3].rstrip(",")) for line in printed.splitlines() if "loss" in line]


# --- Without a checkpoint ------------------------------------------------------------------------------------------------


def test_a_model_of_random_numbers_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "row.json"
    finetune_stored.main(["--random=tiny", "--steps=5", "--backend=torch", f"--json={file}", *ON_CPU])
    losses, row = losses_of(printed := capsys.readouterr().out), json.loads(file.read_text())
    assert len(losses) == 5 and losses[-1] < 0.95 * losses[0] and " GiB reserved" in printed
    assert row["last_loss"] == pytest.approx(losses[-1], abs=1e-4) and row["tokens_per_s"] > 0
    assert (row["model"], row["backend"], row["gpu"]) == ("tiny", "torch", "none")
    for wrong in ([], ["--random=tiny", str(tmp_path)], ["--random=tiny", f"--text={file}"]):
        with pytest.raises(SystemExit):
            finetune_stored.main(wrong)


def test_no_weight_in_bf16_is_made_of_random_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed values of a layer are the largest allocation. The numbers' standard deviation is near 0.02."""
    monkeypatch.setitem(finetune_stored.RANDOM, "wide", (2, 32, 128, 128, 2, 64, 4, 2, 32, 8))
    with torch.profiler.profile(profile_memory=True) as profile:
        model = finetune_stored.of_random_numbers("wide", "cpu")
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert max(event.self_cpu_memory_usage for event in profile.events() if event.name[0] != "[") == weight.nbytes
    assert weight.dtype == torch.uint8 and weight.float().std() > 70
    numbers = finetune_stored.held(model.model.layers[1].mlp.experts, "down_proj").decode()
    assert 0.015 < numbers.float().std() < 0.025
    assert model.model.rotary_emb.inv_freq[0] == 1 and model.lm_head.weight.float().std() > 0.01


# --- Attention and loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_attention_and_loss_are_those_of_transformers(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of a sliding window, and in chunks: loss and gradients of the eager model, in float32."""
    monkeypatch.setattr(finetune_stored, "QUERIES", 16)
    monkeypatch.setattr(finetune_stored, "CHUNK", 16)
    config = dict(zip(SIZES, finetune_stored.RANDOM["tiny"], strict=True))
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.uniform_(-1, 3)
    ids, model.get_base_model = torch.randint(256, (2, tokens + 1)), lambda: model
    wanted = model(input_ids=ids, labels=ids).loss
    wanted = [wanted, *torch.autograd.grad(wanted, [*model.parameters()])]
    finetune_stored.attention_with_sinks(model)
    loss = finetune_stored.loss_of(model, ids)
    for got, want in zip((loss, *torch.autograd.grad(loss, [*model.parameters()])), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    model.config.logits_scaling = 1.0  # a model that says more of its logits computes its own loss
    torch.testing.assert_close(finetune_stored.loss_of(model, ids), loss)


# --- Folders with a tensor for each expert -------------------------------------------------------------------------------


def folder_of(family: str, method: str, where: Path) -> tuple[Path, Any]:
    """A tiny checkpoint as Qwen3's and DeepSeek-V3's in fp8, or compressed-tensors' in int4; and the model of its numbers."""
    model = families.tiny(family, dtype=torch.bfloat16)
    state = {}
    for name, t in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj"):
            halves = (
                {"down_proj": t}
                if leaf == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), t.chunk(2, 1), strict=True))
            )
            for (half, of_all), expert in itertools.product(halves.items(), range(len(t))):
                state |= packed(f"{path}.{expert}.{half}", of_all[expert], method)
        elif leaf == "weight" and "proj" in path and method == "fp8":
            state |= packed(path, t, method)
        else:
            state[name] = t
    save_file(state, where / "model.safetensors", metadata={"format": "pt"})
    entry = {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": False,
        "actorder": None,
    }
    entry |= {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights, "input_activations": None}}}
    config = model.config.to_dict() | {"quantization_config": entry, "architectures": [type(model).__name__]}
    (where / "config.json").write_text(json.dumps(config))
    return where, model


def packed(path: str, weight: Tensor, method: str) -> dict[str, Tensor]:
    """The tensors of one weight, which becomes their numbers. Scales of int4 are for 32 of a row, with zero points."""
    if method == "fp8":
        wide = F.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
        made = stored.quantize(wide[None], "fp8")
        weight.copy_(made.decode(0)[: weight.shape[0], : weight.shape[1]])
        values = made.values[0, : weight.shape[0], : weight.shape[1]].contiguous()
        return {f"{path}.weight": values, f"{path}.weight_scale_inv": made.scales[0]}
    made = stored.quantize(weight[None], "int4")
    zeros = torch.full(
        (1, weight.shape[0] // 8, weight.shape[1] // 32), 0x78787878, dtype=torch.int32
    )  # 0 and -1 in turn
    made = stored.int4(made.values.view(torch.int32), made.scales, zeros, group=32)
    weight.copy_(made.decode(0))
    names = ("weight_packed", "weight_scale", "weight_zero_point")
    return {
        f"{path}.{name}": t[0]
        for name, t in zip(names, (made.values.view(torch.int32), made.scales, zeros), strict=True)
    }


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_folder_is_read_as_its_bytes_lie_trained_and_exported(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of the model of its numbers; after the export, those of transformers on the merged folder."""
    monkeypatch.setattr(families, "SMALL", families.SMALL | {"hidden_size": 128, "moe_intermediate_size": 128})
    with torch.no_grad():
        folder, plain = folder_of(family, method, tmp_path)
    model = finetune_stored.of_tensors_per_expert(folder, method, "cpu")
    plain.set_experts_implementation("blazeproto")
    assert torch.equal(model(families.tokens()).logits, plain(families.tokens()).logits)
    made: list[Any] = []
    real = finetune_stored.export
    monkeypatch.setattr(finetune_stored, "export", lambda model, *more: made.append(model) or real(model, *more))
    finetune_stored.main([str(folder), "--steps=2", f"--export={tmp_path / 'merged'}", *ON_CPU])
    wanted = made[0].eval()(families.tokens()).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    after, before = merged(families.tokens()).logits, plain(families.tokens()).logits
    off, change = (
        (t - wanted).detach().float().norm(dim=-1).median() for t in (after, before)
    )  # a router may turn at a token
    assert off < 0.1 * change


# --- What is refused -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fp8", "compressed-tensors"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny DeepSeek-V3 in each format."""
    monkeypatch.setattr(families, "SMALL", families.SMALL | {"hidden_size": 128, "moe_intermediate_size": 128})
    (where := tmp_path / "checkpoint").mkdir()
    with torch.no_grad():
        return folder_of("deepseek_v3", request.param, where)[0]


def refused(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    """The one line of a command that ends before its first step."""
    with pytest.raises(SystemExit) as ended:
        finetune_stored.main([*map(str, given), "--device=cpu", "--steps=1"])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and "step" not in printed.out
    return printed.err.splitlines()[-1]


def test_options_are_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_stored, "loaded", None)
    (text := tmp_path / "text").write_text("many words " * 9)
    bytes_before = (folder / "model.safetensors").read_bytes()
    for options, words in (
        ([f"--export={folder / '..' / folder.name}"], "different folders"),
        ([f"--adapters={tmp_path / 'a'}", f"--export={tmp_path / 'a'}"], "different folders"),
        ([f"--export={text}"], "--export: expected a folder"),
        ([f"--json={tmp_path}"], "--json: expected a file"),
        ([f"--json={text / 'row.json'}"], "--json: expected a path"),
        ([f"--adapters={text / 'a' / 'b'}"], "--adapters: expected a path"),
        (["--tokens=1"], "--tokens: expected at least 2"),
        ([f"--text={text}"], "--text: expected"),  # there is no tokenizer
        ([f"--text={tmp_path / 'none'}"], "--text: expected"),
        (["--quantized"], "--quantized: expected --export"),
        (["--storage=nf4"], "--storage: expected none"),
    ):
        assert words in refused(capsys, folder, *options)
    assert "--storage: expected none" in refused(capsys, "--random=tiny", "--storage=nf4")
    assert "folder: expected one with config.json" in refused(capsys, tmp_path / "none")
    assert (folder / "model.safetensors").read_bytes() == bytes_before


def test_a_json_that_fails_leaves_adapters_and_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are of all of DeepSeek's attention. Their folders are made."""
    monkeypatch.setattr(finetune_stored, "train", lambda *_: {"no JSON": object()})
    given = [f"--{name}={tmp_path / 'new' / name}" for name in ("adapters", "export", "json")]
    with pytest.raises(TypeError, match="JSON"):
        finetune_stored.main([str(folder), *given, *ON_CPU])
    names = load_file(tmp_path / "new" / "adapters" / "adapter_model.safetensors")
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        assert f"base_model.model.model.layers.1.self_attn.{name}.lora_B.weight" in names
    assert (tmp_path / "new" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("folder", "setting", "got"),
    [
        ("compressed-tensors", "weights.num_bits", 8),
        ("compressed-tensors", "weights.actorder", "group"),
        ("compressed-tensors", "weights.strategy", "tensor"),
        ("compressed-tensors", "input_activations", {"num_bits": 8}),
        ("compressed-tensors", "format", "int-quantized"),
        ("fp8", "weight_block_size", None),
    ],
    indirect=["folder"],
)
def test_settings_that_would_be_misread_are_refused(setting: str, got: Any, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    entry = config["quantization_config"]
    group = entry["config_groups"]["group_0"]
    of = {"weights": group["weights"], "input_activations": group}.get(setting.split(".")[0], entry)
    of[setting.split(".")[-1]] = got
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^{setting}.*expected .*, got"):
        finetune_stored.main([str(folder), *ON_CPU])


def test_tensors_that_are_missing_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And one of weight_g_idx, which would be ignored."""
    state = load_file(file := folder / "model.safetensors")
    ends = (
        "e_score_correction_bias",
        "3.up_proj.weight",
        "kv_b_proj.weight",
        "_scale_inv",
        "3.down_proj.weight_packed",
    )
    for end in (*ends, "weight_scale", "weight_zero_point", "norm.weight"):
        for name in [name for name in state if name.endswith(end)][-1:]:
            save_file({key: t for key, t in state.items() if key != name}, file, metadata={"format": "pt"})
            assert f"without {name}" in refused(capsys, folder)
    save_file(state | {"a.weight_g_idx": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^weight_g_idx: expected .*, got a\.weight_g_idx"):
        finetune_stored.main([str(folder), *ON_CPU])


def test_a_text_of_one_token_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    for count in (0, 1, 2):
        (text := tmp_path / "text").write_text("one " * count)
        if count < 2:
            assert f"at least 2 tokens by the tokenizer in {folder}, got {count}" in refused(
                capsys, folder, f"--text={text}"
            )
    finetune_stored.main([str(folder), f"--text={text}", *ON_CPU, "--steps=1"])
    assert 0 < losses_of(capsys.readouterr().out)[0] < 20
