"""torch's own exchange between GPUs, `torch.ops.symm_mem.all_to_all_vdev_2d`, and `all_to_all_vdev_2d_offset` back.

`scripts.bench.expert_parallel` runs it in a process for each rank, which prints one row as JSON:

    python -m scripts.bench.torch_exchange '{"shape": [8192, 2048, 768, 128, 8], "rank": 0, "ranks": 1, "gpu": 0,
                                             "store": "/tmp/store", "rounds": 30}'

A row goes out for each (token, expert), as the operator is meant, in order of experts; scores stay at home and weigh what comes
back. It takes at most 16 experts of a rank, so beyond that neighbours count as one: then rows arrive in order of those.
dispatch_ms: from ids at hand to rows in that order, without the index lists of our experts. combine_ms: from Y, here the rows as
they came, to O. Both as they run, eight in a row, by events. The GB/s are of `expert_parallel`'s payload, a row for each (token,
other rank), so that they compare; moved_MiB: what leaves the GPU.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.bench.common import MIB, inverse_of
from scripts.bench.expert_parallel import exchange_row, inputs_of
from scripts.bench.timing import Machine, Row
from scripts.command import argument_parser
from scripts.lm.ranks import Ranks

OPERATORS = ("all_to_all_vdev_2d", "all_to_all_vdev_2d_offset")  # out and back
MOST_GROUPS = 16  # of a rank: warps of the operator's blocks
ROOM = 1.25  # for rows that arrive, over the mean
TIMEOUT = 40  # seconds that a rank waits for another


class Exchange:
    """The arrays of an exchange, and its two ways. Other ranks read them until the next exchange has begun: two take turns.

    new: makes symmetric memory, of a shape and a dtype.  send, send_back: the two operators, without their group.
    """

    def __init__(
        self,
        shape: Sizes,
        ranks: Ranks,
        dtype: torch.dtype,
        new: Callable[..., Tensor],
        send: Callable[..., object],
        send_back: Callable[..., object],
    ) -> None:
        here, self.shape, self.send, self.send_back = shape.E // ranks.size, shape, send, send_back
        groups = max(count for count in range(1, MOST_GROUPS + 1) if here % count == 0)
        number, rows = ranks.size * groups, shape.T * shape.K
        self.first_experts = here // groups * torch.arange(number + 1, dtype=torch.int32, device=ranks.device)
        self.rows, self.returned = (new((rows, shape.d), dtype) for _ in range(2))
        self.arrived = new((int(ROOM * rows) + number, shape.d), dtype)
        self.splits = new((number,), torch.int64)
        self.places, self.places_back = (new((2, number), torch.int64) for _ in range(2))  # splits, offsets
        self.order = torch.empty(0)

    def out(self, x: Tensor, ids: Tensor) -> None:
        """x (T, d) → ``arrived``, by ids (T, K) int32."""
        experts, self.order = ids.flatten().sort()
        self.splits.copy_(torch.searchsorted(experts, self.first_experts).diff())
        torch.index_select(x, 0, self.order // self.shape.K, out=self.rows)
        self.send(self.rows, self.arrived, self.splits, self.places)

    def back(self, scores: Tensor) -> Tensor:
        """``arrived`` → (T, d), weighed by scores (T, K)."""
        self.send_back(self.arrived, self.returned, self.places, self.places_back)
        rows, weights = inverse_of(self.order).view(scores.shape), scores.to(self.returned.dtype)
        return torch.nn.functional.embedding_bag(rows, self.returned, mode="sum", per_sample_weights=weights)


def missing() -> str:
    """The part that the exchange lacks here, or ""."""
    import torch.distributed._symmetric_memory as symmetric_memory

    if not symmetric_memory.is_nvshmem_available():
        return "torch finds no NVSHMEM"
    return next((f"torch has no symm_mem.{name}" for name in OPERATORS if not hasattr(torch.ops.symm_mem, name)), "")


@torch.no_grad()
def measure(shape: Sizes, machine: Machine, exchanges: list[Exchange]) -> Row:
    """The row, or the reason why it is absent."""
    ranks = machine.ranks
    given = inputs_of(shape, ranks)
    x, scores = given.x.detach(), given.scores.detach()
    turns = cycle(exchanges)

    def send(ids: Tensor) -> Exchange:
        exchange = next(turns)
        exchange.out(x, ids)
        return exchange

    exchanges[0].out(x, given.ids)
    wanted = x.float() * scores.sum(1, keepdim=True)
    wrong = (exchanges[0].back(scores).float() - wanted).norm() / wanted.norm()
    if ranks.sum((~(wrong < 0.02)).float()) > 0:  # NaN too
        return {"absent": f"what comes back differs by {float(wrong):.2g} of its norm"}
    away = int((given.ids // (shape.E // ranks.size) != ranks.rank).sum())
    row = exchange_row(send, lambda exchange: exchange.back(scores), given, shape, machine, captured=False)
    return row | {"moved_MiB": round(away * shape.d * x.element_size() / MIB, 2)}


def main() -> None:
    parser = argument_parser("scripts.bench.torch_exchange", __doc__)
    what = "JSON: shape: T of a rank, d, n, E, K; rank, ranks, gpu; store: a file that all ranks see, and nobody has used; rounds"
    parser.add_argument("spec", type=json.loads, help=what)
    spec = parser.parse_args().spec
    if reason := missing():
        print(json.dumps({"absent": reason}))
        return
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", spec["gpu"])
    torch.cuda.set_device(device)
    symmetric_memory.set_backend("NVSHMEM")
    store = dist.FileStore(spec["store"], spec["ranks"])
    where: Any = {"rank": spec["rank"], "world_size": spec["ranks"], "timeout": timedelta(seconds=TIMEOUT)}
    dist.init_process_group("nccl", store=store, device_id=device, **where)
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = symmetric_memory.empty(shape, dtype=dtype, device=device)
        symmetric_memory.rendezvous(made, group)
        return made

    def operator(name: str, *arrays: Tensor) -> None:
        getattr(torch.ops.symm_mem, name)(*arrays, group)

    ranks, shape = Ranks(device, spec["rank"], spec["ranks"]), Sizes(*spec["shape"])
    ways = [partial(operator, name) for name in OPERATORS]
    exchanges = [Exchange(shape, ranks, torch.bfloat16, new, *ways) for _ in range(2)]
    print(json.dumps(measure(shape, Machine("cuda", spec["rounds"], ranks=ranks), exchanges)))
    sys.stdout.flush()
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # NVSHMEM's own end waits for ranks that have ended


if __name__ == "__main__":
    main()
