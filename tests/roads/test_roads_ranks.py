"""DistributedDataParallel and FSDP2: the bits of the plain road on one rank, and the mean of the ranks' on two. gloo on the CPU,
NCCL on GPUs."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from roads import PLACES, Place
from roads_ranks import WRAPPERS, check_rank, run_rank


@pytest.fixture
def one_rank(place: Place) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "gloo" if place.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@PLACES
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.usefixtures("one_rank")
def test_one_rank(place: Place, wrapper: str) -> None:
    check_rank(place, wrapper, rank=0, ranks=1)


TWO = [
    pytest.param(Place("cpu", "torch", False), id="cpu", marks=pytest.mark.full),
    pytest.param(Place("cpu", "torch", True), id="cpu-float32", marks=pytest.mark.full),
    *(
        pytest.param(
            Place("cuda", "hopper", float32_weights),
            id="gpu-float32" if float32_weights else "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
            ],
        )
        for float32_weights in (False, True)
    ),
]


@pytest.mark.parametrize("place", TWO)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks(place: Place, wrapper: str) -> None:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.start_processes(run_rank, args=(place, wrapper, 2, port), nprocs=2, start_method="spawn")
