"""`scripts.bench.torch_exchange` with the operators as torch documents them, on two ranks of one process; and its ends."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.bench import expert_parallel
from scripts.bench.expert_parallel import draw_ids, ended
from scripts.bench.torch_exchange import Exchange
from scripts.lm.ranks import Ranks

RANKS = 2


def begins(splits: Tensor) -> Tensor:
    return splits.cumsum(0) - splits


def send(all_ranks: list[Exchange], rank: int, rows: Tensor, arrived: Tensor, splits: Tensor, places: Tensor) -> None:
    """A rank takes from all, by group and then by rank."""
    groups, at = len(splits) // RANKS, 0
    for place in range(len(splits)):
        other = all_ranks[place % RANKS]
        column = rank * groups + place // RANKS
        first, number = int(begins(other.splits)[column]), int(other.splits[column])
        arrived[at : at + number] = other.rows[first : first + number]
        places[:, place] = torch.tensor([number, at])
        at += number


def send_back(all_ranks: list[Exchange], rank: int, y: Tensor, returned: Tensor, *_: Tensor) -> None:
    """By the rank that they come from and then by group: as they left."""
    at = 0
    for other in all_ranks:
        for place in range(rank, other.places.shape[1], RANKS):
            number, first = other.places[:, place].tolist()
            returned[at : at + number] = other.arrived[first : first + number]
            at += number


@pytest.mark.parametrize(("experts", "groups"), [(6, 3), (40, 10), (128, 16)])
def test_rows_go_to_their_groups_and_come_back(experts: int, groups: int) -> None:
    shape, all_ranks = Sizes(50, 8, 8, experts, 3), []  # type: Any
    for rank in range(RANKS):
        ways = (partial(send, all_ranks, rank), partial(send_back, all_ranks, rank))
        ranks = Ranks(torch.device("cpu"), rank, RANKS)
        all_ranks.append(
            Exchange(shape, ranks, torch.float32, lambda size, dtype: torch.zeros(size, dtype=dtype), *ways)
        )
    torch.manual_seed(0)
    xs = [torch.randn(shape.T, shape.d) for _ in range(RANKS)]
    ids = [torch.empty(shape.T, shape.K, dtype=torch.int32) for _ in range(RANKS)]
    for each in ids:
        draw_ids(each, experts)
    for rank in (0, 1, 0):  # rank 0 again, once rank 1 has its rows
        all_ranks[rank].out(xs[rank], ids[rank])
    for rank, exchange in enumerate(all_ranks):
        assert exchange.places.shape == (2, RANKS * groups)
        for place, (number, first) in enumerate(exchange.places.T.tolist()):
            group, other = rank * groups + place // RANKS, place % RANKS
            tokens = (ids[other] // (experts // RANKS // groups) == group).nonzero()[:, 0]
            got = exchange.arrived[first : first + number]
            assert number == len(tokens)
            torch.testing.assert_close(got.sum(0), xs[other][tokens].sum(0))
        scores = torch.rand(shape.T, shape.K)
        torch.testing.assert_close(exchange.back(scores), xs[rank] * scores.sum(1, keepdim=True))


@pytest.mark.full
def test_what_ends_badly_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = ended("scripts.bench.torch_exchange", "first")["absent"]
    assert reason.startswith("error: argument spec: invalid loads value: 'first'")
    assert ended("scripts.bench.timing")["absent"].startswith("StopIteration")  # which prints nothing
    monkeypatch.setattr(expert_parallel, "PATIENCE", 0.01)
    assert ended("scripts.bench.torch_exchange", "--help") == {"absent": expert_parallel.SILENT}


@pytest.mark.gpu
def test_one_gpu(tmp_path: Path) -> None:
    """Where torch has the operators they are right; where it has not, there is a reason."""
    spec = {"shape": [256, 64, 32, 8, 2], "rounds": 2, "store": f"{tmp_path}/store", "rank": 0, "ranks": 1, "gpu": 0}
    made = ended("scripts.bench.torch_exchange", json.dumps(spec))
    assert made.get("dispatch_ms", 0) > 0 if "absent" not in made else "differs" not in made["absent"], made
