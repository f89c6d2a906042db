"""`scripts/finetune_stored.py` on tiny models: of random numbers, and folders in each format that checkpoints have."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
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
