"""The exchange between GPUs on the PTX machine: all ranks' launches at once, and faults planted in a copy of the sources."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.distributed import peer_memory
from blazeproto.gemm.compile import CUDA_SOURCES
from ptxsim import Deadlock, MachineError
from tests.distributed.exchange_machine import Exchange

CUDA = Path(peer_memory.__file__).parent / "cuda"
SIZES: dict[str, dict[str, Any]] = {
    "two ranks": {"tokens": (5, 3)},
    "an idle rank": {"tokens": (4, 0)},
    "three ranks, one idle": {"tokens": (5, 0, 2)},
    "experts that vary in number": {"tokens": (4, 3), "varying": True},
    "only rank 1 has too few rows": {"tokens": (5, 4), "capacities": (99, 2)},
    "one expert a token": {"tokens": (5, 3), "top_k": 1},
    "three ranks of one token": {"tokens": (2, 1, 1), "top_k": 6},
    "eight ranks, some idle": {"tokens": (1, 0, 1, 1, 0, 1, 1, 1)},
    "more columns than a warp loads at once": {"tokens": (1, 1), "d": 2064},
    "epochs that pass 2^32": {"tokens": (2, 2), "epoch": 2**32 - 3},
}
COUNTED = "add_release_sys(&m.flags(threadIdx.x)->arrived[m.rank], 1);"
WAITED = "wait_until(&m.flags(m.rank)->started[threadIdx.x], epoch, m.patience_ns);"


class Fault(NamedTuple):
    """shows: "race", or "values" where what came is wrong too, with some of 20 seeds.  tokens: of ranks that show it."""

    file: str
    before: str
    after: str
    shows: str = "race"
    tokens: tuple[int, ...] = (5, 3)


FAULTS = {
    "no release of what was sent": Fault("meeting.cuh", "red.release.sys", "red.relaxed.sys", "values"),
    "a release of the GPU": Fault("meeting.cuh", "red.release.sys", "red.release.gpu", "values"),
    "no release of partial sums": Fault("meeting.cuh", "st.release.sys", "st.relaxed.sys"),
    "no acquire": Fault("meeting.cuh", "ld.acquire.sys", "ld.relaxed.sys"),
    "the end waits for the epoch before": Fault(
        "meeting.cuh", "epoch * gridDim.x,", "(epoch - 1) * gridDim.x,", "values"
    ),
    "a part waits for the epoch before": Fault(
        "add_up.cu", "part), epoch, m.patience", "part), epoch - 1, m.patience", "values"
    ),
    "the start waits for the epoch before": Fault("meeting.cuh", WAITED, WAITED.replace("epoch", "epoch - 1")),
    "no wait at the start": Fault("meeting.cuh", WAITED, ""),
    "no wait at the end": Fault(
        "exchange.cu", "end_exchange(m, epoch, true);", "end_exchange(m, epoch, false);", "values"
    ),
    "a signal before the block's barrier": Fault(
        "meeting.cuh",
        "    __syncthreads();\n    if (threadIdx.x < m.ranks) {\n        add_",
        "    if (threadIdx.x < m.ranks) {\n        add_",
        "values",
    ),
    "a part's signal before the barrier": Fault(
        "add_up.cu", "part_of(ticket));\n            __syncthreads();\n", "part_of(ticket));\n", "values"
    ),
    "a rank's flags of parts over the next one's": Fault(
        "add_up.cu", "from * parts + part", "from + part", "values", (5, 5, 5)
    ),
    "a rank's scales over rank 0's": Fault(
        "exchange.cu", "[m.rank * p.max_tokens + token] = scale", "[token] = scale", "values"
    ),
    "blocks counted without an order": Fault("meeting.cuh", "atom.acq_rel.gpu", "atom.relaxed.gpu"),
}
QUICK = (
    "no release of what was sent",
    "the end waits for the epoch before",
    "no wait at the start",
    "a rank's flags of parts over the next one's",
)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the launches compile a copy of the sources with a change."""

    def plant(file: str, before: str, after: str) -> None:
        for source in (*CUDA.iterdir(), CUDA_SOURCES / "meeting.cuh", CUDA_SOURCES / "sending.cuh"):
            shutil.copy(source, tmp_path)
        text = (tmp_path / file).read_text()
        assert before in text, before
        (tmp_path / file).write_text(text.replace(before, after))
        for name in ("kernel", "add_up_kernel"):
            monkeypatch.setattr(peer_memory, name, partial(getattr(peer_memory, name), sources=str(tmp_path)))

    return plant


def found(seed: int, **sizes: Any) -> set[str]:
    """In what ways an exchange is wrong: "error", "race", "values"."""
    exchange = Exchange(seed=seed, **sizes)
    try:
        races = exchange.run().races
    except MachineError as error:
        return {"error"} | ({"race"} if error.report and error.report.races else set())
    return ({"race"} if races else set()) | ({"values"} if exchange.failures() else set())


@pytest.mark.parametrize(
    "name", ["two ranks", "three ranks, one idle", "experts that vary in number", "one expert a token"]
)
def test_an_exchange_brings_what_it_should(name: str) -> None:
    exchange = Exchange(seed=0, **SIZES[name])
    report = exchange.run()
    assert exchange.failures() == [] and not report.races, report


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_an_exchange_with_many_seeds(name: str) -> None:
    seeds = range(1, 3 if len(SIZES[name]["tokens"]) > 4 else 25)
    assert {seed: ways for seed in seeds if (ways := found(seed, **SIZES[name]))} == {}


def test_only_rank_1_leaves_pairs_out() -> None:
    """Their part of the sums is zero on both ranks, and nothing else is."""
    exchange = Exchange(seed=0, **SIZES["only rank 1 has too few rows"])
    left_out = [
        int((here & (places < 0)).sum()) for here, places in zip(exchange.here, exchange.index_map, strict=True)
    ]
    assert left_out[0] == 0 and left_out[1] > 0
    report, whole = exchange.run(), Exchange(seed=0, tokens=(5, 4))
    assert exchange.failures() == [] and not report.races
    assert all((exchange.right(rank)["out"] != whole.right(rank)["out"]).any() for rank in range(2))


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_found(name: str, planted: Any) -> None:
    planted(*FAULTS[name][:3])
    assert any(found(seed, tokens=FAULTS[name].tokens) for seed in range(3))


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_how_many_seeds_find_a_planted_fault(name: str, planted: Any) -> None:
    planted(*FAULTS[name][:3])
    ways = [found(seed, tokens=FAULTS[name].tokens) for seed in range(20)]
    print(name, sum(map(bool, ways)), {way: sum(way in one for one in ways) for way in ("race", "values", "error")})
    assert sum(map(bool, ways)) >= 10 and any(FAULTS[name].shows in one for one in ways)


def test_a_rank_that_never_starts_is_told(planted: Any) -> None:
    planted("meeting.cuh", "if (blockIdx.x == 0) store_release", "if (blockIdx.x == 0 && m.rank != 1) store_release")
    exchange = Exchange(seed=0, tokens=(1, 1))
    with pytest.raises(Deadlock) as error:
        exchange.run()
    text = str(error.value)
    assert "GPU 0, launch 0, CTA 0, warp 0 asking again at meeting.cuh" in text and "byte 4 of rank 0's memory" in text


def test_a_wait_has_an_end() -> None:
    """Beyond its patience, a kernel whose peer does not come ends the program."""
    exchange = Exchange(seed=0, tokens=(1, 1), patience=1e-7)
    with pytest.raises(MachineError, match="trap"):
        exchange.machine.together([lambda: exchange.launch(0), lambda: None], most=10**6)
