"""A language model of dMoE layers learns as one of `blazeproto.MoE` with the same weights; dropping layers learn too."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from scripts.lm.model import GPT, Batches, load_data
from scripts.lm.settings import GPTConfig

STEPS = 200


def losses(
    config: GPTConfig, start: GPT | None, text: torch.Tensor, steps: int, device: str
) -> tuple[list[float], GPT]:
    """start: whose weights it begins with; those are None's own."""
    torch.manual_seed(0)
    model = GPT(config)
    if start is not None:
        model.load_state_dict(start.state_dict())
    untrained = copy.deepcopy(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches, made = Batches(text, config.context, 4), []
    for step in range(steps):
        ids, targets = (each.to(device) for each in batches[step])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = model(ids, targets)
        optimizer.zero_grad()
        (out.loss + out.aux_loss).backward()
        optimizer.step()
        made.append(out.loss.item())
    return made, untrained


@pytest.mark.parametrize(
    ("device", "steps"),
    [
        pytest.param("cpu", 10, id="short"),
        pytest.param("cpu", STEPS, id="cpu", marks=pytest.mark.full),
        pytest.param("cuda", STEPS, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_losses_are_those_of_moe(device: str, steps: int) -> None:
    """Within 1 %, smoothed; the dropping layer's within 10 % after the same steps, and both learn."""
    text, _ = load_data("docs", 64)
    sizes = {"layers": 2, "d_model": 64, "heads": 2, "context": 64, "d_expert": 128, "num_experts": 4}
    right, start = losses(GPTConfig(**sizes), None, text, steps, device)

    last = steps // 10

    def smoothed(values: list[float]) -> float:
        return math.fsum(values[-last:]) / last

    ours, _ = losses(GPTConfig(formulation="dmoe", **sizes), start, text, steps, device)
    assert smoothed(right) < right[0] - (1 if steps == STEPS else 0.1)
    assert all(abs(smoothed(ours[:end]) / smoothed(right[:end]) - 1) < 0.01 for end in range(last, steps + 1))
    dropping, _ = losses(GPTConfig(formulation="dropping", **sizes), start, text, steps, device)
    assert abs(smoothed(dropping) / smoothed(right) - 1) < 0.1
