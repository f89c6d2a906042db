"""DistributedDataParallel and FSDP2: the bits of a plain step on one rank, and the mean of the ranks' on two. gloo on the CPU,
NCCL on GPUs."""

import socket
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from places import PLACES, Place
from wrapped_ranks import WRAPPERS, check_rank, run_rank


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


def runs_of_two() -> Iterator[Any]:
    """Processes take seconds to start: one run on the CPU is enough for the quick set."""
    gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")]
    for wrapper, wide in product(WRAPPERS, (False, True)):
        quick = (wrapper, wide) == ("fsdp", False)
        name = f"{wrapper}-float32" if wide else wrapper
        yield pytest.param(Place("cpu", "torch", wide), wrapper, id=name, marks=[] if quick else [pytest.mark.full])
        for backend in ("hopper", "ampere"):
            yield pytest.param(Place("cuda", backend, wide), wrapper, id=f"gpu-{backend}-{name}", marks=gpus)


@pytest.mark.parametrize(("place", "wrapper"), list(runs_of_two()))
def test_two_ranks(place: Place, wrapper: str) -> None:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.start_processes(run_rank, args=(place, wrapper, 2, port), nprocs=2, start_method="spawn")
