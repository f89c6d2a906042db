"""What orders threads of several CTAs and GPUs through memory, and what they see of each other's stores: small PTX programs."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import ptxsim
from ptxsim import Deadlock, MachineError, Report

SEEDS = 8
# %r0 which of the threads it is, by the argument and the CTA; %d0 data, %d1 flags, %d2 out of this one, as is %r2.
HEAD = """
.version 8.3
.target sm_90a
.address_size 64
.file 1 "made.ptx"
.visible .entry made(.param .u64 data, .param .u64 flags, .param .u64 out, .param .u32 first)
{
.reg .pred %p<2>;
.reg .b32 %r<8>;
.reg .b64 %d<8>;
ld.param.u64 %d0, [data];
ld.param.u64 %d1, [flags];
ld.param.u64 %d2, [out];
ld.param.u32 %r0, [first];
mov.u32 %r1, %ctaid.x;
add.u32 %r0, %r0, %r1;
mul.wide.u32 %d3, %r0, 4;
add.s64 %d2, %d2, %d3;
mov.u32 %r2, 0;
"""
TAIL = "st.global.u32 [%d2], %r2;\nret;\n}\n"
STAY, LEAVE = (
    "STAY: ld.relaxed.sys.global.u32 %r3, [%d1+256];\nsetp.eq.u32 %p0, %r3, 0;\n@%p0 bra STAY;",
    "red.sys.global.add.u32 [%d1+256], 1;",
)
STORE, LOAD = "st.global.u32 [%d0], 7;", "ld.global.u32 %r2, [%d0];"


def until(load: str, least: int = 1) -> str:
    return f"AGAIN: {load}\nsetp.lt.u32 %p0, %r3, {least};\n@%p0 bra AGAIN;"


def program(*threads: str) -> str:
    """A branch for each."""
    text = HEAD
    for number, thread in enumerate(threads):
        text += f"setp.ne.u32 %p1, %r0, {number};\n@%p1 bra NEXT{number};\n"
        lines = thread.replace("AGAIN", f"AGAIN{number}").splitlines()
        text += "".join(f".loc 1 {100 * number + at} 0\n{line}\n" for at, line in enumerate(lines, 1))
        text += f"bra END;\nNEXT{number}:\n"
    return text + "END:\n" + TAIL


def run(*threads: str, gpus: list[int], seed: int, **options: Any) -> tuple[Report, list[int]]:
    """gpus: how many of the threads are on each, as CTAs of one launch. What each has loaded comes back."""
    text, data, flags = program(*threads), np.zeros(128, np.uint32), np.zeros(128, np.uint32)
    out, streams, first = np.zeros(len(threads), np.uint32), [], 0
    for count in gpus:
        streams.append([{"kernel": text, "grid": count, "block": 1, "arguments": [data, flags, out, first]}])
        first += count
    report = ptxsim.run_together(streams, seed=seed, most=5000, **options)
    return report, out.tolist()


class Case(NamedTuple):
    """How a thread signals behind its store and how another waits before its load; on how many GPUs that orders them."""

    signal: str
    wait: str
    gpus: tuple[int, ...]


CASES = (
    Case("st.release.sys.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), (1, 2)),
    Case("red.release.sys.global.add.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), (1, 2)),
    Case(
        "atom.acq_rel.sys.global.exch.b32 %r4, [%d1], 1;",
        until("atom.acquire.sys.global.or.b32 %r3, [%d1], 0;"),
        (1, 2),
    ),
    Case(
        "fence.acq_rel.sys;\nst.relaxed.sys.global.u32 [%d1], 1;",
        until("ld.relaxed.sys.global.u32 %r3, [%d1];") + "\nfence.acq_rel.sys;",
        (1, 2),
    ),
    Case(
        "membar.sys;\nst.volatile.global.u32 [%d1], 1;",
        until("ld.volatile.global.u32 %r3, [%d1];") + "\nfence.sc.sys;",
        (1, 2),
    ),
    Case("fence.acq_rel.sys;\nred.global.add.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), (1,)),
    Case("st.release.gpu.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), (1,)),
    Case("st.release.sys.global.u32 [%d1], 1;", until("ld.acquire.gpu.global.u32 %r3, [%d1];"), (1,)),
    Case(
        "membar.gl;\nst.volatile.global.u32 [%d1], 1;",
        until("ld.volatile.global.u32 %r3, [%d1];") + "\nmembar.sys;",
        (1,),
    ),
    Case(
        "membar.sys;\nst.volatile.global.u32 [%d1], 1;",
        until("ld.volatile.global.u32 %r3, [%d1];") + "\nmembar.gl;",
        (1,),
    ),
    Case("st.release.cta.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), ()),
    Case("membar.cta;\nst.volatile.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), ()),
    Case("st.relaxed.sys.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), ()),
    Case("st.release.sys.global.u32 [%d1], 1;", until("ld.relaxed.sys.global.u32 %r3, [%d1];"), ()),
    Case("st.release.sys.global.u32 [%d1], 1;", until("ld.volatile.global.u32 %r3, [%d1];") + "\nmembar.cta;", ()),
    Case("st.relaxed.sys.global.u32 [%d1], 1;\nmembar.sys;", until("ld.acquire.sys.global.u32 %r3, [%d1];"), ()),
    Case("st.volatile.global.u32 [%d1], 1;", "membar.sys;\n" + until("ld.volatile.global.u32 %r3, [%d1];"), ()),
)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.signal.split()[0]} {case.wait.split()[1]}")
def test_which_signals_order_what_is_before_them_with_what_is_behind_the_wait(case: Case, gpus: int) -> None:
    """PTX ISA §8.8: release and acquire patterns, whose scopes reach from one thread to the other."""
    for seed in range(SEEDS):
        report, out = run(
            f"{STORE}\n{case.signal}", f"{case.wait}\n{LOAD}", gpus=[2] if gpus == 1 else [1, 1], seed=seed
        )
        racing = [race for race in report.races if "made.ptx:1:" in race.first and "ld.global.u32" in race.second]
        assert bool(racing) == (gpus not in case.gpus), f"seed {seed}: {report}"
        assert out[1] == 7 or (racing and gpus == 2), "threads of one GPU see stores at once"


def test_weak_accesses_to_a_flag_are_races() -> None:
    report, _ = run("st.global.u32 [%d1], 1;", "ld.acquire.sys.global.u32 %r2, [%d1];", gpus=[1, 1], seed=0)
    assert [race.kind for race in report.races] in (["a write, then a read"], ["a read, then a write"])
    assert "st.global.u32 of GPU 0, CTA 0, warp 0" in str(report) and "of GPU 1, CTA 0, warp 0" in str(report)


@pytest.mark.parametrize(
    ("signal", "late"), [("red.relaxed.sys", True), ("red.release.gpu", True), ("red.release.sys", False)]
)
def test_a_store_may_stay_invisible_to_another_gpu_until_a_release_of_system_scope(signal: str, late: bool) -> None:
    """With two flags, so that the word that is waited for is never late itself; at the end of a launch all is seen."""
    first = f"{STORE}\n{signal}.global.add.u32 [%d1+4], 1;\natom.sys.global.add.u32 %r3, [%d1], 1;\n{STAY}"
    second = until("atom.sys.global.or.b32 %r3, [%d1], 0;") + f"\n{LOAD}\n{LEAVE}"
    found = {run(first, second, gpus=[1, 1], seed=seed)[1][1] for seed in range(12)}
    assert found == ({0, 7} if late else {7})
    assert {run(first, second, gpus=[2], seed=seed)[1][1] for seed in range(12)} == {7}


def test_stores_become_visible_in_any_order() -> None:
    first = "st.volatile.global.u32 [%d0], 1;\nst.volatile.global.u32 [%d0+128], 1;\n" + STAY
    second = until("ld.volatile.global.u32 %r3, [%d0+128];") + "\nld.volatile.global.u32 %r2, [%d0];\n" + LEAVE
    assert {run(first, second, gpus=[1, 1], seed=seed)[1][1] for seed in range(12)} == {0, 1}
    assert {run(first, second, gpus=[2], seed=seed)[1][1] for seed in range(12)} == {1}


def test_stores_to_one_word_become_visible_in_their_order() -> None:
    first = "\n".join(f"st.volatile.global.u32 [%d0], {n};" for n in range(1, 9))
    second = until(
        "ld.volatile.global.u32 %r2, [%d0];\nsetp.lt.u32 %p1, %r2, %r4;\n@%p1 trap;\nmov.u32 %r4, %r2;\nmov.u32 %r3, %r2;",
        8,
    )
    for seed in range(SEEDS):
        assert run(first, "mov.u32 %r4, 0;\n" + second, gpus=[1, 1], seed=seed)[1][1] == 8


def test_what_a_thread_has_acquired_it_hands_on() -> None:
    """Causality order, PTX ISA §8.9: A, then B on the same GPU, then C on another, which a release of B's reaches."""
    wait, more = until("ld.acquire.{}.global.u32 %r3, [%d1];"), "st.release.sys.global.u32 [%d1+4], 1;"
    last = until("ld.acquire.sys.global.u32 %r3, [%d1+4];") + f"\n{LOAD}"
    for gpus, scope in (([2, 1], "gpu"), ([1, 1, 1], "sys"), ([1, 2], "sys")):
        first = f"{STORE}\nst.release.{scope}.global.u32 [%d1], 1;"
        for seed in range(SEEDS):
            report, out = run(first, f"{wait.format(scope)}\n{more}", last, gpus=gpus, seed=seed)
            assert not report.races and out[2] == 7
    report, _ = run(
        f"{STORE}\nst.release.gpu.global.u32 [%d1], 1;", f"{wait.format('sys')}\n{more}", last, gpus=[1, 1, 1], seed=0
    )
    assert any("st.global.u32 of GPU 0" in race.first and "of GPU 2" in race.second for race in report.races)


def test_atomics_hand_on_what_was_released_before_them() -> None:
    """Observation order, PTX ISA §8.7: through a relaxed atomic, but through no store."""
    first = f"{STORE}\nred.release.sys.global.add.u32 [%d1], 1;"
    last = until("ld.relaxed.sys.global.u32 %r3, [%d1];", 2) + f"\nld.acquire.sys.global.u32 %r3, [%d1];\n{LOAD}"
    for seed in range(SEEDS):
        between = until("ld.relaxed.sys.global.u32 %r3, [%d1];")
        report, out = run(
            first, between + "\nred.relaxed.sys.global.add.u32 [%d1], 1;", last, gpus=[1, 1, 1], seed=seed
        )
        assert not report.races and out[2] == 7
        report, _ = run(first, between + "\nst.relaxed.sys.global.u32 [%d1], 2;", last, gpus=[1, 1, 1], seed=seed)
        assert report.races


def test_atomics_of_system_scope_add_up_and_those_of_one_gpu_race() -> None:
    adds = "\n".join(["atom{}.global.add.u32 %r3, [%d0], 1;"] * 8)
    ends = (
        "\nred.release.sys.global.add.u32 [%d1], 1;\n" + until("ld.acquire.sys.global.u32 %r3, [%d1];", 2) + f"\n{LOAD}"
    )
    for seed in range(SEEDS):
        report, out = run(*[adds.replace("{}", ".sys") + ends] * 2, gpus=[1, 1], seed=seed)
        assert not report.races and out == [16, 16]
        report, _ = run(*[adds.replace("{}", ".gpu") + ends] * 2, gpus=[1, 1], seed=seed)
        assert any("atom.gpu" in race.first and "atom.gpu" in race.second for race in report.races)
        report, out = run(*[adds.replace("{}", "") + ends] * 2, gpus=[2], seed=seed)
        assert not report.races and out == [16, 16]


def test_non_coherent_loads_see_what_was_there_when_the_launch_began() -> None:
    """PTX ISA §9.7.9.9: ld.global.nc reads what nobody writes meanwhile; an acquire does not help."""
    first, wait = f"{STORE}\nst.release.sys.global.u32 [%d1], 1;", until("ld.acquire.sys.global.u32 %r3, [%d1];")
    report, _ = run(first, f"{wait}\n{LOAD.replace('global', 'global.nc')}", gpus=[1, 1], seed=0)
    assert [race.kind for race in report.races] == ["a write, then a non-coherent read"]
    text, data, flags, out = program(STORE, LOAD.replace("global", "global.nc")), *np.zeros((3, 4), np.uint32)
    launches = [{"kernel": text, "grid": 1, "block": 1, "arguments": [data, flags, out, n]} for n in range(2)]
    assert not ptxsim.run_together([launches]).races and out[1] == 7


def launches(*threads: str, seed: int, order: list[list[int]]) -> tuple[Report, list[int]]:
    """order: of each GPU the threads that it has as launches, one after the other."""
    text, arrays = (
        program(*threads),
        [np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(len(threads), np.uint32)],
    )
    made = [[{"kernel": text, "grid": 1, "block": 1, "arguments": [*arrays, n]} for n in numbers] for numbers in order]
    return ptxsim.run_together(made, seed=seed), arrays[2].tolist()


def test_launches_of_a_gpu_are_a_stream() -> None:
    """One begins when the one before it has ended, whose stores all GPUs see; another GPU's may still be in an earlier one."""
    waits = until("ld.acquire.sys.global.u32 %r3, [%d1];") + f"\n{LOAD}"
    for seed in range(SEEDS):
        report, out = launches(
            STORE, "st.release.sys.global.u32 [%d1], 1;", waits, LOAD, seed=seed, order=[[0, 1], [2, 3]]
        )
        assert not report.races and out[2:] == [7, 7] and report.entry == "GPU 0: made, made; GPU 1: made, made"
        report, out = launches(STORE, "st.relaxed.sys.global.u32 [%d1], 1;", waits, seed=seed, order=[[0, 1], [2], []])
        assert out[2] == 7 and ["GPU 0, launch 0, CTA 0" in race.first for race in report.races] == [True]


def test_a_deadlock_tells_who_waits_for_which_word() -> None:
    wait = until("ld.acquire.sys.global.u32 %r3, [%d1+8];")
    with pytest.raises(Deadlock) as error:
        run(wait, wait, gpus=[1, 1], seed=0)
    assert [line.split(": address")[0] for line in str(error.value).splitlines()[:3]] == [
        "GPU 0: made; GPU 1: made: nobody can go on",
        "  GPU 0, CTA 0, warp 0 asking again at made.ptx:1",
        "  GPU 1, CTA 0, warp 0 asking again at made.ptx:101",
    ]
    assert str(error.value).count(", byte 8 of argument 1, uint32[128] (512 bytes), which is 0") == 2


def test_who_reads_a_word_again_and_again_need_not_wait_for_it() -> None:
    text = "mov.u32 %r4, 0;\nMORE: ld.volatile.global.u32 %r3, [%d1];\nadd.u32 %r4, %r4, 1;\n"
    text += "setp.lt.u32 %p0, %r4, 25;\n@%p0 bra MORE;"
    assert run(text + "\nmov.u32 %r2, %r4;", gpus=[1], seed=0)[1] == [25]


def test_ctas_begin_in_order_where_there_is_room() -> None:
    """The first waits for the second: on a GPU that has room for one of them nobody goes on."""
    waits = until("ld.acquire.gpu.global.u32 %r3, [%d1];") + f"\n{LOAD}"
    signals = f"{STORE}\nst.release.gpu.global.u32 [%d1], 1;"
    assert run(waits, signals, gpus=[2], seed=0, resident=2)[1] == [7, 0]
    assert run(signals, waits, gpus=[2], seed=0, resident=1)[1] == [0, 7]
    with pytest.raises(Deadlock, match="  GPU 0, CTAs from 1 on: not begun"):
        run(waits, signals, gpus=[2], seed=0, resident=1)


def test_what_ends_a_run_tells_the_gpu() -> None:
    with pytest.raises(MachineError, match=r"made: made.ptx:101: trap \(GPU 1, CTA 0, warp 0, lane 0; trap\)"):
        run(STORE, "trap;", gpus=[1, 1], seed=0)
    endless = until("atom.global.xor.b32 %r3, [%d1], 1;", 2)
    with pytest.raises(MachineError, match="more than 5000 instructions"):
        run(endless, gpus=[1], seed=0)


def test_the_same_seed_gives_the_same_run() -> None:
    case = CASES[0]
    runs = [run(f"{STORE}\n{case.signal}", f"{case.wait}\n{LOAD}", gpus=[1, 1], seed=5) for _ in range(2)]
    assert str(runs[0]) == str(runs[1])


def test_masks_of_lanes() -> None:
    lane, out = np.arange(32), np.zeros((5, 32), np.uint32)
    names = ("eq", "lt", "le", "gt", "ge")
    stores = "".join(
        f"mov.u32 %r2, %lanemask_{name};\nst.global.u32 [%d2+{128 * n}], %r2;\n" for n, name in enumerate(names)
    )
    place = "mov.u32 %r5, %laneid;\nmul.wide.u32 %d4, %r5, 4;\nadd.s64 %d2, %d2, %d4;\n"
    text = HEAD + place + stores + "ret;\n}\n"
    ptxsim.run(text, 1, 32, [out, out, out, 0])
    compare = (np.equal, np.less, np.less_equal, np.greater, np.greater_equal)
    bits = 1 << lane
    assert [row.tolist() for row in out] == [(how(lane, lane[:, None]) * bits).sum(axis=1).tolist() for how in compare]
