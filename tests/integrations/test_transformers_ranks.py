"""`expert_parallel` of transformers' models on two gloo ranks (model_ranks.py), and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

pytest.importorskip("transformers", reason="needs transformers 5.17 or later")
pytest.importorskip("peft", reason="needs peft 0.20 or later")

from blazeproto.distributed import AllToAll, Symmetric
from blazeproto.integrations.transformers import expert_parallel, register
from tests.integrations.families import experts_of, is_newest
from tests.integrations.model_ranks import RANKS, model_of, run_rank
from tests.refusals import refuses


@pytest.mark.skipif(not is_newest(), reason="an earlier version lacks some of these families")
def test_two_ranks(tmp_path: Path) -> None:
    mp.start_processes(run_rank, args=(tmp_path,), nprocs=RANKS, start_method="spawn")
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["last_loss"] < 0.95 * row["first_loss"]


def test_refusals(group: dist.ProcessGroup) -> None:
    """Before anything changes."""
    register()
    model: Any = model_of("qwen3_moe")
    refuses(lambda: expert_parallel(nn.Linear(2, 2), group), "model")
    smaller, wider = AllToAll(group, 2), Symmetric(group, 4, d_model=64, max_tokens=8, max_pairs=16)
    refuses(lambda: expert_parallel(model, group, dispatcher=smaller), "dispatcher")
    refuses(lambda: expert_parallel(model, group, dispatcher=wider), "dispatcher")
    first, *_ = names = [*experts_of(model)]
    last = model.get_submodule(names[-1])
    last.act_fn = nn.Tanh()
    assert refuses(lambda: expert_parallel(model, group), "model").got.startswith(f"{names[-1]}: grouped_mm")
    assert not any(hasattr(parameter, "placements") for parameter in model.parameters())
    model.set_experts_implementation("eager")
    assert refuses(lambda: expert_parallel(model, group), "model").got.startswith(f"{first}: eager")
