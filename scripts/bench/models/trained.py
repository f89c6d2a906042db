"""How unevenly a trained router loads its experts: the exponent of Zipf's law, from a short run of the language model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.lm.model import GPT, Batches, load_data
from scripts.lm.settings import GPTConfig

STEPS = {"cuda": 200, "cpu": 2}
COUNTED = 20  # of the last steps, whose loads are added up
MODEL = {  # by plain torch: a row of skew has the kernels that it times, and no others
    "cuda": GPTConfig(
        layers=4, d_model=256, heads=4, context=256, d_expert=128, num_experts=64, top_k=4, backend="torch"
    ),
    "cpu": GPTConfig(layers=2, d_model=32, heads=2, context=16, d_expert=32, num_experts=8, top_k=2),
}
BATCH = {"cuda": 64, "cpu": 4}


@cache
def exponents(device: str) -> tuple[float, ...]:
    """Each layer's, after STEPS steps on Python's own library (AdamW, bf16 autocast), with an auxiliary loss of 0.01."""
    torch.manual_seed(0)
    config = MODEL[device]
    with torch.device(device):
        model = GPT(config)
    batches = Batches(load_data("", config.context)[0].to(device), config.context, BATCH[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loads = torch.zeros(config.layers, config.num_experts, device=device)
    for step in range(STEPS[device]):
        inputs, targets = batches[step]
        with torch.autocast(device, torch.bfloat16):
            out = model(inputs, targets)
        assert out.loss is not None
        (out.loss + out.aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= STEPS[device] - COUNTED:
            loads += out.loads
    return tuple(exponent_of(load) for load in loads.tolist())


def exponent_of(load: Sequence[float]) -> float:
    """s of the r-th expert's load ~ r^-s: the least squares in logarithms, over the experts that have tokens."""
    popular = sorted((each for each in load if each > 0), reverse=True)
    if len(popular) < 2:
        return 0.0
    x, y = torch.arange(1, len(popular) + 1).double().log().tolist(), torch.tensor(popular).double().log().tolist()
    return round(-statistics.linear_regression(x, y).slope, 4)


def zipf(shape: Sizes, exponent: float, device: str) -> Tensor:
    """Expert ids (T, K) int32, distinct in a row: popularity of the r-th expert ~ r^-exponent, drawn without replacement."""
    generator = torch.Generator(device).manual_seed(0)
    rank = torch.arange(1, shape.E + 1, device=device, dtype=torch.float32)
    keys = torch.rand(shape.T, shape.E, device=device, generator=generator).clamp_min(1e-12)
    drawn = (-exponent * rank.log() - (-keys.log()).log()).topk(shape.K, dim=1).indices  # Gumbel top-k
    return drawn.to(torch.int32)
