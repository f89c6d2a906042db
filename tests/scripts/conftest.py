"""What several tests of the benchmarks use: every benchmark's short form on a CPU, measured once; a stub of SonicMoE."""

import importlib
import importlib.machinery
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench import running

NAMES = (
    "attention_tiles",
    "blocksparse",
    "clock",
    "dispatch",
    "distributed",
    "expert_parallel",
    "few_tokens",
    "fp8",
    "fp8_peers",
    "integrations",
    "layer",
    "lora",
    "models.__main__",
    "module",
    "paper.__main__",
    "rounding",
    "router",
)


def bench_of(name: str) -> running.Bench:
    made: running.Bench = importlib.import_module(f"scripts.bench.{name}").BENCH
    return made


def main_of(module: Any) -> Callable[[], object]:
    """What a script runs as a command."""
    return partial(running.run, module.BENCH) if hasattr(module, "BENCH") else module.main


@pytest.fixture(scope="session")
def short_form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A benchmark's name -> a folder of results, beside which pages find others."""

    @cache
    def measured(name: str) -> Path:
        bench, folder = bench_of(name), tmp_path_factory.mktemp("results") / "h100"
        (folder.parent / "h200").mkdir()
        running.run(bench, [*(["all"] if bench.goes_on else []), "--cpu", "--out", str(folder)])
        return folder

    return measured


class SonicMoE(nn.Module):
    """SonicMoE's module as its users see it: constructor, names of weights, gate and up rows in turn, a bf16 router."""

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: Enum,
        add_bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        assert activation_function.value == "swiglu" and not add_bias
        self.top_k = num_experts_per_tok
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc, self.c_proj = nn.Module(), nn.Module()
        self.c_fc.weight = nn.Parameter(std * torch.randn(num_experts, 2 * intermediate_size, hidden_size))
        self.c_proj.weight = nn.Parameter(std * torch.randn(num_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        chosen, experts = logits.topk(self.top_k, dim=1)
        h = torch.einsum("td,eid->tei", x, self.c_fc.weight)
        y = torch.einsum("tei,edi->ted", F.silu(h[..., ::2]) * h[..., 1::2], self.c_proj.weight)
        scores = torch.zeros_like(logits).scatter(1, experts, chosen.float().softmax(dim=1).to(x.dtype))
        share = torch.bincount(experts.flatten(), minlength=logits.shape[1]) / experts.numel()
        loss = logits.shape[1] * (share * logits.float().softmax(dim=1).mean(dim=0)).sum()
        return torch.einsum("te,ted->td", scores, y), loss


@pytest.fixture
def sonic_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """In SonicMoE's place."""
    package, enums = ModuleType("sonicmoe"), ModuleType("sonicmoe.enums")
    package.__spec__ = importlib.machinery.ModuleSpec("sonicmoe", None)
    package.MoE = SonicMoE  # type: ignore[attr-defined]
    enums.ActivationType = Enum("ActivationType", {"SWIGLU": "swiglu"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sonicmoe", package)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)
