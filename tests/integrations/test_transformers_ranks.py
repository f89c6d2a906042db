"""`expert_parallel` of transformers' models on two gloo ranks (model_ranks.py), and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.skipif(not is_newest(), reason="an earlier version lacks some of these families")
def test_two_ranks(tmp_path: Path) -> None:
    mp.start_processes(run_rank, args=(tmp_path,), nprocs=RANKS, start_method="spawn")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    register()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_refusals(group: dist.ProcessGroup) -> None:
    """Before anything changes."""
    model: Any = model_of("qwen3_moe")
    with pytest.raises(ValueError, match="model: expected one with experts of transformers, got Linear"):
        expert_parallel(nn.Linear(2, 2), group)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got int"):
        expert_parallel(3, group)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh_or_group: expected a DeviceMesh or a ProcessGroup that this rank is in"):
        expert_parallel(model, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dispatcher: expected one for num_experts=4, as the layer has, got AllToAll"):
        expert_parallel(model, group, dispatcher=AllToAll(group, 2))
    room = {"max_tokens": 8, "max_pairs": 16}
    with pytest.raises(ValueError, match="dispatcher: expected one for d_model=32, as the layer has, got Symmetric"):
        expert_parallel(model, group, dispatcher=Symmetric(group, 4, d_model=64, **room))
    with pytest.raises(TypeError, match="dispatcher: expected an object with check, dispatch and combine"):
        expert_parallel(model, group, dispatcher="all_to_all")  # type: ignore[arg-type]
    first, *_ = names = [*experts_of(model)]
    last = model.get_submodule(names[-1])
    last.act_fn = nn.Tanh()
    with pytest.raises(ValueError, match=f"model: expected experts that run in place .* got {names[-1]}: grouped_mm"):
        expert_parallel(model, group)
    assert not any(hasattr(parameter, "placements") for parameter in model.parameters())
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=f"got {first}: eager; experts_implementation="):
        expert_parallel(model, group)
