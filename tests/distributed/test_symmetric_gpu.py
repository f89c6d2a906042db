"""`Symmetric` on all GPUs of the machine, two or more: symmetric_ranks.py has the cases, in one start of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from symmetric_ranks import run_rank


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_symmetric(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    mp.start_processes(run_rank, args=(ranks, tmp_path), nprocs=ranks, start_method="spawn")
