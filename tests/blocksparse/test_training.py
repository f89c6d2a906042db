"""A language model of dMoE layers learns as one of `blazeproto.MoE` with the same weights; dropping layers learn too."""

import copy
import math

import pytest
import torch

from scripts.lm.model import GPT, Batches, load_data
from scripts.lm.settings import GPTConfig

STEPS, LAST = 200, 20  # losses are smoothed over so many


def losses(config: GPTConfig, start: GPT | None, text: torch.Tensor, device: str) -> tuple[list[float], GPT]:
    """start: whose weights it begins with; those are None's own."""
    torch.manual_seed(0)
    model = GPT(config)
    if start is not None:
        model.load_state_dict(start.state_dict())
    untrained = copy.deepcopy(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches, made = Batches(text, config.context, 4), []
    for step in range(STEPS):
        ids, targets = (each.to(device) for each in batches[step])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = model(ids, targets)
        optimizer.zero_grad()
        (out.loss + out.aux_loss).backward()
        optimizer.step()
        made.append(out.loss.item())
    return made, untrained


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.full),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_losses_are_those_of_moe(device: str) -> None:
    """Within 1 %, smoothed; the dropping layer's within 10 % after the same steps, and both learn."""
    text, _ = load_data("docs", 64)
    sizes = {"layers": 2, "d_model": 64, "heads": 2, "context": 64, "d_expert": 128, "num_experts": 4}
    right, start = losses(GPTConfig(**sizes), None, text, device)

    def smoothed(values: list[float]) -> float:
        return math.fsum(values[-LAST:]) / LAST

    ours, _ = losses(GPTConfig(formulation="dmoe", **sizes), start, text, device)
    assert smoothed(right) < right[0] - 1
    assert all(abs(smoothed(ours[:end]) / smoothed(right[:end]) - 1) < 0.01 for end in range(LAST, STEPS + 1))
    dropping, _ = losses(GPTConfig(formulation="dropping", **sizes), start, text, device)
    assert abs(smoothed(dropping) / smoothed(right) - 1) < 0.1
