"""One process of several that train a layer together, started by `test_wrapped.py`."""

import os
from typing import Any

import torch
import torch.distributed as dist
from places import Place, Results, assert_same_bits, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = ("ddp", "fsdp")


def wrapped(layer: nn.Module, wrapper: str, place: Place, ranks: int) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(layer)
    return fully_shard(layer, mesh=init_device_mesh(place.device, (ranks,)), reshard_after_forward=True)


def whole(results: Results) -> Results:
    """With gathered tensors for sharded ones, and the names of the layer's own parameters."""
    gathered: dict[str, Any] = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in results.items()
    }
    return {name.removeprefix("module."): t for name, t in gathered.items()}


def check_rank(place: Place, wrapper: str, rank: int, ranks: int) -> None:
    """A rank's own output and gradient of x; its parameters' gradients are the mean of all ranks'. Ranks are a power of two, so
    that the mean rounds as the sum does. On rank 0 all tokens are alike, so that most experts are idle there."""
    batches = [place.batch(10 + each) for each in range(ranks)]
    with torch.no_grad():
        batches[0][0][1:] = batches[0][0][0]
    expected = [train(place, place.build(), *batch) for batch in batches]
    layer = wrapped(place.build(), wrapper, place, ranks)
    for _ in range(2):
        got = whole(train(place, layer, *batches[rank]))
        mean = {name: sum(each[name] / ranks for each in expected) for name in expected[0]}
        assert_same_bits(got, mean | {name: expected[rank][name] for name in ("out", "x")})


def run_rank(rank: int, place: Place, wrapper: str, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if place.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    check_rank(place, wrapper, rank, ranks)
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive
