"""Our experts under torchtitan's tensor and expert parallelism, on two processes (titan_ranks.py)."""

from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.integrations import titan
from tests.integrations.titan_ranks import RANKS, run_rank

titan.load()
pytest.importorskip("torchtitan.models.qwen3", reason="torchtitan's models need a later torch", exc_type=ImportError)


@pytest.mark.full
def test_attention_and_experts_over_two_ranks(tmp_path: Path) -> None:
    """Qwen3-MoE's attention by tensor parallelism; experts by it too, with a part of their width on each rank, or by expert
    parallelism: one process's loss, and the gradients that torchtitan's experts have there."""
    mp.start_processes(run_rank, args=(tmp_path,), nprocs=RANKS, start_method="spawn")
