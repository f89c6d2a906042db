"""FSDP2, expert parallelism, fp8, torch.compile and activation checkpointing in one training run; pipeline parallelism
(composed_ranks.py)."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from composed_ranks import RANKS, STEPS, Made, Run, built, run_rank, run_stage, train

NEAR = 1e-12  # of a loss, in float64: products are quantized alike on one process and on four


def apart(losses: list[float], others: list[float]) -> float:
    """The largest difference of two runs' losses, over the loss."""
    return max(abs(a - b) / b for a, b in zip(losses, others, strict=True))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_all_at_once_trains_as_one_process(tmp_path: Path) -> None:
    """On four ranks, two copies of two halves of the experts, with each dispatcher: the losses of 20 steps equal those of one
    process, in eager and without checkpoints. The compiler breaks its graph at the experts and compiles the parts around them,
    by aot_eager, because inductor would need a C++ compiler. A wrong divide factor, and bf16 in place of fp8, are far beyond the
    tolerance."""
    runs = (Run(), Run(dispatcher="symmetric"), Run(factor=RANKS // 2))
    mp.start_processes(run_rank, args=(tmp_path, runs), nprocs=RANKS, start_method="spawn")
    *right, wrong = (Made(*made) for made in torch.load(tmp_path / "made"))
    one = train(built(), range(RANKS))
    assert len(one) == STEPS and one[-1] < 0.9 * one[0]
    for made in right:
        assert apart(made.losses, one) < NEAR
        assert made.calls == [2 * STEPS] * 2, "not computed again in backward"
        assert all(made.graphs), "nothing was compiled"
    for other in (wrong.losses, train(built("bf16"), range(RANKS))):
        assert apart(other, one) > 1e-4


@pytest.mark.full
def test_a_layer_is_a_pipeline_s_stage(tmp_path: Path) -> None:
    """torch's GPipe over two ranks."""
    mp.start_processes(run_stage, args=(tmp_path,), nprocs=2, start_method="spawn")
