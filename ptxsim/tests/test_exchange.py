"""A small exchange between GPUs (exchange.cu), right with every seed, and faults planted in it, each found."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from exchange import exchange, found, ptx

from ptxsim import Deadlock

STORED = "if (peer != rank) p.inbox[peer][(rank * chunks + chunk) * THREADS + thread] = mine;\n"
BARRIER = "        __syncthreads();\n"
SIGNAL = "        if (thread < ranks && thread != rank) signal(p.arrived[thread] + rank * chunks + chunk);\n"
WAITED = "wait(p.arrived[rank] + thread * chunks + chunk, epoch);\n"


class Fault(NamedTuple):
    """changes: of the source.  seeds: how many of 20 find it, at the least.  shows: "values" where sums are wrong with some."""

    changes: tuple[tuple[str, str], ...]
    seeds: int
    shows: str = "race"


FAULTS = {
    "no release": Fault((("red.release.sys", "red.relaxed.sys"),), 20, "values"),
    "a release of the GPU": Fault((("red.release.sys", "red.release.gpu"),), 20, "values"),
    "a fence of the GPU": Fault((('"red.release.sys', '"fence.acq_rel.gpu; red.relaxed.sys'),), 20, "values"),
    "no acquire": Fault((("ld.acquire.sys", "ld.relaxed.sys"),), 20),
    "an acquire of the GPU": Fault((("ld.acquire.sys", "ld.acquire.gpu"),), 20),
    "a wait for the epoch before": Fault(((WAITED, WAITED.replace("epoch", "epoch - 1")),), 20, "values"),
    "a buffer reused one step early": Fault((("chunk, epoch - 1);", "chunk, epoch - 2);"),), 8, "values"),
    "a signal before the barrier": Fault(((STORED + BARRIER + SIGNAL, STORED + SIGNAL),), 20, "values"),
    "no barrier behind the wait": Fault(((WAITED + BARRIER, WAITED),), 20, "values"),
    "readers signal before the barrier": Fault((("= sum;\n" + BARRIER, "= sum;\n"),), 15),
    "a relaxed count of blocks": Fault((("atom.acq_rel.gpu", "atom.relaxed.gpu"),), 20),
}
FENCED = {
    "a fence before a relaxed signal": (('"red.release.sys', '"fence.acq_rel.sys; red.relaxed.sys'),),
    "a fence behind relaxed loads": (
        ("ld.acquire.sys", "ld.relaxed.sys"),
        ("while (int(found - value) < 0);", "while (int(found - value) < 0);\n    __threadfence_system();"),
    ),
}


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_right(seed: int) -> None:
    assert not found(ptx(), seed)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{}, {"ranks": 3}, {"ranks": 4, "chunks": 2}, {"grid": 5}, {"resident": 1}, {"ranks": 1}], ids=str
)
def test_sums_are_right_with_many_seeds(sizes: dict[str, int]) -> None:
    assert [seed for seed in range(25) if found(ptx(), seed, **sizes)] == []


@pytest.mark.full
@pytest.mark.parametrize("name", FENCED)
def test_fences_do_for_releases_and_acquires(name: str) -> None:
    assert [seed for seed in range(20) if found(ptx(*FENCED[name]), seed)] == []


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name].shows == "values"][:-1])
def test_a_planted_fault_is_found(name: str) -> None:
    kernel = ptx(*FAULTS[name].changes)
    assert any(found(kernel, seed) for seed in range(5))


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_how_many_seeds_find_a_planted_fault(name: str) -> None:
    fault = FAULTS[name]
    kernel = ptx(*fault.changes)
    ways = [found(kernel, seed) for seed in range(20)]
    print(name, sum(map(bool, ways)), {way: sum(way in one for one in ways) for way in ("race", "values", "error")})
    assert sum(map(bool, ways)) >= fault.seeds and any(fault.shows in one for one in ways)


def test_both_places_of_a_race_are_told() -> None:
    report, _ = exchange(ptx(*FAULTS["no release"].changes), 0)
    told = [str(race) for race in report.races]
    stored, read = r"kernel.cu:\d+: st.global.v4.u32 of GPU \d", r"kernel.cu:\d+: ld.global.v4.u32 of GPU \d"
    assert any(
        re.search(rf"argument 0, member \d, uint32.*: a write, then a read\n  {stored}.*\n  {read}", text)
        for text in told
    )


def test_a_signal_that_never_comes_is_a_deadlock() -> None:
    with pytest.raises(Deadlock, match=r"GPU 1, launch 0, CTA 0, warp 0 asking again at kernel.cu:\d+ .*which is 0"):
        exchange(ptx((SIGNAL, "")), 0)
