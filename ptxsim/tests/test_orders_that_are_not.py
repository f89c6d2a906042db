"""What PTX's memory model does not order, of instructions of several lanes or warps and of asynchronous ones: a race with every
seed, and none in its right counterpart."""

from __future__ import annotations

import pytest
from test_races import (
    ARRIVE,
    CLUSTER_SYNC,
    COMMIT,
    COPY,
    EXPECT,
    FENCE,
    FILL,
    INIT,
    LOAD,
    MULTICAST,
    MULTIPLY,
    READ,
    REMOTE,
    STORE,
    SYNC,
    TMA_LOAD,
    TMA_STORE,
    WAIT,
    Case,
    lines,
    run_case,
)

from ptxsim import MachineError

SEEDS = 8
STORE_BESIDE, LOAD_BESIDE = (text.replace("[%r2]", "[%r2+1024]") for text in (STORE, LOAD))
LOAD_LAST = LOAD.replace("[%r2]", "[%r2+496]")  # of what the last lane copied
COPY_EACH = "shl.b32 %r9, %r4, 4;\nadd.u32 %r9, %r9, %r2;\ncp.async.ca.shared.global [%r9], [%d0], 16, 16;"
TRACK = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];"
WAIT_COPIES, WAIT_PRODUCTS = "cp.async.wait_group 0;", "wgmma.wait_group.sync.aligned 0;"
WAIT_TOO = WAIT.replace("W:", "V:").replace("bra W", "bra V")
REMOTE_STORE = lines(REMOTE, "st.shared::cluster.u32 [%r11], %r7;")
RELAXED_ARRIVE = ARRIVE.replace("arrive.", "arrive.relaxed.cta.")
RELAXED_WAIT = WAIT.replace("parity.", "parity.relaxed.cta.")
RELAXED_CLUSTER = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;"
READ_MATRIX = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r9];"
TO_FIRST = "mov.u32 %r10, 0;\nmapa.shared::cluster.u32 %r12, %r3, %r10;\n"

CASES = (
    Case(
        "each warp of a warpgroup waits for what wgmma reads",
        "",
        "",
        ("cp.async.bulk", "wgmma.mma"),
        lines(
            f"@!%p1 bra LOADED;\n{EXPECT}\n{TMA_LOAD}\nLOADED:",
            "-@!%p1 bra WAITED;",
            WAIT,
            "-WAITED:",
            MULTIPLY,
            WAIT_PRODUCTS,
        ),
    ),
    Case(
        "each warp of a warpgroup knows what one of them wrote",
        "",
        "",
        ("st.shared", "wgmma.mma"),
        lines("@%p2 " + STORE, FENCE, "+bar.sync 0;", MULTIPLY, WAIT_PRODUCTS),
    ),
    Case(
        "each warp of a warpgroup has a proxy fence",
        "",
        "",
        ("st.shared", "wgmma.mma"),
        lines("@%p2 " + STORE, "bar.sync 0;", "+" + FENCE, "-@%p1 " + FENCE, MULTIPLY, WAIT_PRODUCTS),
    ),
    Case(
        "a stage that one warp frees, of four that read it",
        "",
        "",
        ("wgmma.mma", "cp.async.bulk"),
        lines(
            MULTIPLY,
            WAIT_PRODUCTS,
            "+bar.sync 0;",
            f"@!%p1 bra LOADED;\n{EXPECT}\n{TMA_LOAD}\nLOADED:",
            WAIT,
        ),
    ),
    Case(
        "a wait for wgmma by its own warp",
        "",
        "",
        ("wgmma.mma", "st.shared"),
        lines(MULTIPLY, WAIT_PRODUCTS, "+bar.sync 0;", "@%p1 " + STORE),
    ),
    Case(
        "what the thread wrote that issued a load",
        lines("+" + STORE_BESIDE, EXPECT, "-" + STORE_BESIDE, TMA_LOAD),
        lines(WAIT, LOAD_BESIDE),
        ("st.shared", "ld.shared"),
    ),
    Case(
        "what the thread wrote whose copies arrive",
        lines(STORE_BESIDE, "+bar.arrive 1, 64;", COPY, TRACK),
        lines("+" + SYNC, WAIT, LOAD_BESIDE),
        ("st.shared", "ld.shared"),
        arrivals=32,
    ),
    Case(
        "copies that only one lane's arrival tracks",
        lines(COPY_EACH, "+" + TRACK, "-@%p3 " + TRACK, "-@%p3 mbarrier.arrive.shared::cta.b64 _, [%r3], 31;"),
        lines(WAIT, LOAD_LAST),
        ("cp.async.ca", "ld.shared"),
        arrivals=32,
    ),
    Case(
        "copies that only one lane waits for",
        lines(COPY_EACH, COMMIT, "+" + WAIT_COPIES, "-@%p3 " + WAIT_COPIES, SYNC),
        lines(SYNC, LOAD_LAST),
        ("cp.async.ca", "ld.shared"),
    ),
    Case(
        "two copies of one thread to one place",
        lines(COPY, COMMIT, "+" + WAIT_COPIES, COPY, COMMIT, WAIT_COPIES),
        "",
        ("cp.async.ca", "cp.async.ca"),
    ),
    Case(
        "a copy, then a store by the same thread",
        lines(COPY, COMMIT, "+" + WAIT_COPIES, STORE, WAIT_COPIES),
        "",
        ("cp.async.ca", "st.shared"),
    ),
    Case(
        "a copy, then ldmatrix",
        lines(COPY_EACH, COMMIT, "+" + WAIT_COPIES, READ_MATRIX),
        "",
        ("cp.async.ca", "ldmatrix"),
    ),
    Case(
        "stmatrix, then TMA",
        lines(
            "shl.b32 %r9, %r4, 4;\nadd.u32 %r9, %r9, %r2;",
            "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r7};",
            "+" + FENCE,
            TMA_STORE,
            READ,
        ),
        "",
        ("stmatrix", "cp.async.bulk"),
    ),
    Case(
        "two stores by TMA to one place",
        lines(FILL, FENCE, TMA_STORE, "+cp.async.bulk.wait_group 0;", "-" + READ, TMA_STORE, READ),
        "",
        ("cp.async.bulk", "cp.async.bulk"),
    ),
    Case(
        "a bulk group that another lane waits for",
        lines(FILL, FENCE, TMA_STORE, "+" + READ, "-@!%p3 " + READ, STORE, READ),
        "",
        ("cp.async.bulk", "st.shared"),
    ),
    Case(
        "a multicast's part for another CTA",
        lines(EXPECT, MULTICAST, WAIT, "+" + CLUSTER_SYNC, REMOTE, "ld.shared::cluster.u32 %r8, [%r11];", CLUSTER_SYNC),
        lines(EXPECT, WAIT_TOO, "+" + CLUSTER_SYNC, CLUSTER_SYNC),
        ("multicast", "ld.shared"),
        cluster=2,
    ),
    Case(
        "a relaxed arrival at the cluster's barrier",
        lines(REMOTE_STORE, "+" + CLUSTER_SYNC, "-" + RELAXED_CLUSTER),
        lines(CLUSTER_SYNC, LOAD),
        ("st.shared::cluster", "ld.shared"),
        cluster=2,
    ),
    Case(
        "a relaxed arrival behind a fence, or behind one of mbarriers alone",
        lines(REMOTE_STORE, "+fence.acq_rel.cluster;", "-fence.mbarrier_init.release.cluster;", RELAXED_CLUSTER),
        lines(CLUSTER_SYNC, LOAD),
        ("st.shared::cluster", "ld.shared"),
        cluster=2,
    ),
    Case(
        "an mbarrier made before a relaxed arrival",
        INIT + lines("+fence.mbarrier_init.release.cluster;", RELAXED_CLUSTER, CLUSTER_SYNC),
        lines(CLUSTER_SYNC, TO_FIRST, "@%p3 mbarrier.arrive.shared::cluster.b64 _, [%r12];", CLUSTER_SYNC),
        ("init", "arrive"),
        cluster=2,
    ),
    Case(
        "a relaxed arrival at an mbarrier",
        lines(STORE, "+" + ARRIVE, "-" + RELAXED_ARRIVE),
        lines(WAIT, LOAD),
        ("st.shared", "ld.shared"),
    ),
    Case(
        "a fence before a relaxed arrival",
        lines(STORE, "+fence.acq_rel.cta;", RELAXED_ARRIVE),
        lines(WAIT, LOAD),
        ("st.shared", "ld.shared"),
    ),
    Case(
        "a fence behind a relaxed wait",
        lines(STORE, ARRIVE),
        lines(RELAXED_WAIT, "+fence.acq_rel.cta;", LOAD),
        ("st.shared", "ld.shared"),
    ),
    Case(
        "a proxy fence of global memory, for shared memory",
        lines(FILL, "+fence.proxy.async.shared::cta;", "-fence.proxy.async.global;", TMA_STORE, READ),
        "",
        ("st.shared", "cp.async.bulk"),
    ),
    Case(
        "a proxy fence of shared memory, for global memory",
        lines("st.global.u32 [%d0], %r7;", "+fence.proxy.async.global;", "-" + FENCE, EXPECT, TMA_LOAD, WAIT),
        "",
        ("st.global", "cp.async.bulk"),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_race_with_every_seed_and_none_once_it_is_ordered(case: Case) -> None:
    for seed in range(SEEDS):
        assert not run_case(case, True, seed).races, f"seed {seed}"
        try:
            races = run_case(case, False, seed).races
        except MachineError as error:  # beside it, where this run's order shows
            races = error.report.races
        pairs = [pair for race in races for pair in ((race.first, race.second), (race.second, race.first))]
        assert any(case.racing[0] in first and case.racing[1] in second for first, second in pairs), f"seed {seed}"
