"""`scripts/finetune_stored.py` on tiny models: of random numbers, and folders in each format that checkpoints have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
pytest.importorskip("peft", reason="needs peft 0.20 or later")

from scripts import finetune_stored  # noqa: E402
from scripts.finetune_stored import SIZES  # noqa: E402

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
