"""Each kind of ordering: a small PTX program in which it orders two accesses, and its twin without it, which has a race."""

from typing import NamedTuple

import numpy as np
import pytest

from ptxsim import Deadlock, MachineError, Memory, Program, Report, TensorMap
from ptxsim.schedule import run
from ptxsim.together import run_together

SEEDS, RACING_SEEDS = 6, 8
# %r0 thread, %r1 warp, %r2 data, %r3 an mbarrier, %r5 rank in the cluster, %d0 and %d1 in and out, %d2 and %d3 their maps,
# %p0 thread 0, %p1 warp 0, %p2 warp 1, %p3 a warp's first thread.
START = """
.version 8.3
.target sm_90a
.address_size 64
.file 1 "made.ptx"
.visible .entry made(.param .align 64 .b8 arguments[320])
{
.reg .pred %p<8>;
.reg .b16 %h<2>;
.reg .b32 %r<16>;
.reg .b64 %d<8>;
.reg .f32 %f<8>;
.shared .align 1024 .b8 smem[8192];
ld.param.u64 %d0, [arguments];
ld.param.u64 %d1, [arguments+8];
mov.b64 %d4, arguments;
add.s64 %d2, %d4, 64;
add.s64 %d3, %d4, 192;
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
mov.u32 %r2, smem;
add.u32 %r3, %r2, 4096;
mov.u32 %r5, %cluster_ctarank;
mov.u32 %r7, 0;
and.b32 %r4, %r0, 31;
setp.eq.u32 %p0, %r0, 0;
setp.eq.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r1, 1;
setp.eq.u32 %p3, %r4, 0;
"""
STORE, LOAD, SYNC = "st.shared.u32 [%r2], %r7;", "ld.shared.u32 %r8, [%r2];", "bar.sync 1, 64;"
ARRIVE, FENCE = "@%p3 mbarrier.arrive.shared::cta.b64 _, [%r3], 1;", "fence.proxy.async.shared::cta;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p7, [%r3], 0;\n@!%p7 bra W;"
EXPECT = "@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;"
TMA_LOAD = (
    "@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d2, {%r7, %r7}], [%r3];"
)
TMA_STORE = (
    "@%p3 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3, {%r7, %r7}], [%r2];\n"
    "@%p3 cp.async.bulk.commit_group;"
)
READ = "cp.async.bulk.wait_group.read 0;"
MULTICAST = (
    "mov.u16 %h0, 3;\n@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r2], [%d2, {%r7, %r7}], [%r3], %h0;"
)
INIT = "@%p0 mbarrier.init.shared::cta.b64 [%r3], 1;\n"
ADD = "atom.shared.add.u32 %r8, [%r2], 1;"
COMMIT = "cp.async.commit_group;"
COPY = "cp.async.ca.shared.global [%r2], [%d0], 16, 16;"
FILL = "shl.b32 %r9, %r4, 2;\nadd.u32 %r9, %r9, %r2;\nst.shared.u32 [%r9], %r7;"  # the 128 bytes that TMA stores
REMOTE = "mov.u32 %r10, 1;\nmapa.shared::cluster.u32 %r11, %r2, %r10;\nmapa.shared::cluster.u32 %r12, %r3, %r10;\n"
CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
MULTIPLY = """mov.b64 %d5, 4611686293305294848;
shr.u32 %r9, %r2, 4;
cvt.u64.u32 %d6, %r9;
or.b64 %d5, %d5, %d6;
wgmma.fence.sync.aligned;
setp.ne.u32 %p4, %r7, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d5, %d5, %p4, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;"""


class Case(NamedTuple):
    """A line that begins with + is left out of the twin, one with - stands in the twin alone.

    warp0, warp1: what either does; of a cluster, its CTAs.  first: what all do before a barrier.  racing: a text of either line.
    """

    name: str
    warp0: str
    warp1: str
    racing: tuple[str, str]
    first: str = ""
    arrivals: int = 1
    cluster: int = 1


def lines(*texts: str) -> str:
    """Texts of several lines, each with the sign of its text."""
    return "\n".join(
        (text[0] if text[0] in "+-" else "") + line for text in texts for line in text.lstrip("+-").splitlines()
    )


CASES = (
    Case("bar.sync", lines(STORE, "+" + SYNC), lines("+" + SYNC, LOAD), ("st.shared", "ld.shared")),
    Case("bar.sync behind a read", lines(LOAD, "+" + SYNC), lines("+" + SYNC, STORE), ("ld.shared", "st.shared")),
    Case("bar.arrive", lines(STORE, "+bar.arrive 1, 64;"), lines("+" + SYNC, LOAD), ("st.shared", "ld.shared")),
    Case(
        "the named barrier that was meant",
        lines("-bar.arrive 2, 64;", STORE, "bar.arrive 1, 64;"),
        lines("-bar.sync 2, 64;", "+bar.sync 1, 64;", LOAD),
        ("st.shared", "ld.shared"),
    ),
    Case("an arrival behind the store", lines("-" + ARRIVE, STORE, "+" + ARRIVE), lines(WAIT, LOAD), ("st.", "ld.")),
    Case("an mbarrier's wait", lines(STORE, ARRIVE), lines("+" + WAIT, LOAD), ("st.shared", "ld.shared")),
    Case(
        "the phase that was meant",
        lines(STORE, ARRIVE),
        lines("+" + WAIT, "-" + WAIT.replace(", 0;", ", 1;"), LOAD),
        ("st.shared", "ld.shared"),
    ),
    Case(
        "an mbarrier made before it is used",
        INIT + lines("+bar.arrive 1, 64;"),
        lines("+" + SYNC, ARRIVE),
        ("init", "arrive"),
    ),
    Case("a load by TMA", lines(EXPECT, TMA_LOAD), lines("+" + WAIT, LOAD), ("cp.async.bulk", "ld.shared")),
    Case(
        "the bytes of two loads",
        lines("+" + EXPECT.replace("128", "256"), "-" + EXPECT, TMA_LOAD, TMA_LOAD.replace("[%r2]", "[%r2+1024]")),
        lines(WAIT, LOAD, LOAD.replace("[%r2]", "[%r2+1024]")),
        ("cp.async.bulk", "ld.shared"),
    ),
    Case(
        "cp.async.wait_group",
        lines(COPY, COMMIT, "+cp.async.wait_group 0;", SYNC),
        lines(SYNC, LOAD),
        ("cp.async.ca", "ld."),
    ),
    Case(
        "as many groups as were meant",
        lines(
            COPY,
            COMMIT,
            COPY.replace("[%r2]", "[%r2+512]"),
            COMMIT,
            "+cp.async.wait_group 1;",
            "-cp.async.wait_group 2;",
            SYNC,
        ),
        lines(SYNC, LOAD),
        ("cp.async.ca", "ld.shared"),
    ),
    Case(
        "cp.async.mbarrier.arrive.noinc",
        lines(
            COPY,
            "-mbarrier.arrive.shared::cta.b64 _, [%r3], 1;",
            "+cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];",
        ),
        lines(WAIT, LOAD),
        ("cp.async.ca", "ld.shared"),
        arrivals=32,
    ),
    Case(
        "bulk wait_group.read",
        lines(FILL, FENCE, TMA_STORE, "+" + READ, STORE, READ),
        "",
        ("cp.async.bulk.tensor", "st.shared"),
    ),
    Case(
        "bulk wait_group",
        lines(
            FILL,
            FENCE,
            TMA_STORE,
            "-" + READ,
            "+cp.async.bulk.wait_group 0;",
            "ld.global.u32 %r8, [%d1];",
        ),
        "",
        ("cp.async.bulk.tensor", "ld.global"),
    ),
    Case(
        "a proxy fence where it is written",
        lines(FILL, "+" + FENCE, SYNC),
        lines(SYNC, TMA_STORE, READ),
        ("st.shared", "cp.async.bulk"),
    ),
    Case(
        "a proxy fence where it is read",
        lines(FILL, SYNC),
        lines(SYNC, "+" + FENCE, TMA_STORE, READ),
        ("st.shared", "cp.async.bulk"),
    ),
    Case(
        "a proxy fence behind what is written",
        lines("-" + FENCE, FILL, "+" + FENCE, SYNC),
        lines(SYNC, TMA_STORE, READ),
        ("st.shared", "cp.async.bulk"),
    ),
    Case(
        "a proxy fence behind what is read",
        lines(LOAD, "+" + FENCE, SYNC),
        lines(SYNC, EXPECT, TMA_LOAD),
        ("ld.shared", "cp.async.bulk"),
    ),
    Case(
        "wgmma.wait_group",
        "",
        "",
        ("wgmma.mma", "st.shared"),
        lines(MULTIPLY, "+wgmma.wait_group.sync.aligned 0;", "bar.sync 0;", "@%p1 " + STORE),
    ),
    Case(
        "a proxy fence before wgmma",
        "",
        "",
        ("st.", "wgmma.mma"),
        lines("@%p1 " + STORE, "bar.sync 0;", "+" + FENCE, MULTIPLY),
    ),
    Case(
        "the cluster's barrier",
        lines(REMOTE, "st.shared::cluster.u32 [%r11], %r7;", "+" + CLUSTER_SYNC),
        lines("+" + CLUSTER_SYNC, LOAD),
        ("st.shared::cluster", "ld.shared"),
        cluster=2,
    ),
    Case(
        "an arrival at another CTA's mbarrier",
        lines(REMOTE, "st.shared::cluster.u32 [%r11], %r7;", "@%p3 mbarrier.arrive.shared::cluster.b64 _, [%r12];"),
        lines("+" + WAIT, LOAD),
        ("st.shared::cluster", "ld.shared"),
        cluster=2,
    ),
    Case("multicast", lines(EXPECT, MULTICAST), lines(EXPECT, "+" + WAIT, LOAD), ("multicast", "ld.shared"), cluster=2),
    Case(
        "atomics alone",
        ADD,
        lines("+" + ADD, "-" + LOAD),
        ("atom", "ld.shared"),
        first=lines("@%p1 " + STORE, "bar.sync 0;"),
    ),
    Case(
        "global memory",
        lines("st.global.u32 [%d1], %r7;", "+" + SYNC),
        lines("+" + SYNC, "ld.global.u32 %r8, [%d1];"),
        ("st.", "ld.global"),
    ),
    Case(
        "global memory that is read first",
        lines("ld.global.u32 %r8, [%d0];", "+" + SYNC),
        lines("+" + SYNC, "st.global.u32 [%d0], %r7;"),
        ("ld.global", "st."),
    ),
    Case(
        "one CTA beside another",
        lines(
            "mov.u32 %r9, %ctaid.x;",
            "-mov.u32 %r9, 0;",
            "mul.wide.u32 %d5, %r9, 4;",
            "add.s64 %d5, %d5, %d1;",
            "st.global.u32 [%d5], %r7;",
        ),
        "",
        ("st.global", "st.global"),
    ),
    Case(
        "more readers than one",
        "",
        "",
        ("ld.shared", "st.shared"),
        lines(
            "@%p1 " + STORE,
            "bar.sync 0;",
            LOAD,
            "+bar.sync 1, 128;",
            "-setp.eq.u32 %p5, %r1, 3;",
            "-@!%p5 bar.sync 1, 96;",
            "@%p1 " + STORE,
        ),
    ),
)


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

ALWAYS = (  # with every seed, of instructions of several lanes or warps and of asynchronous ones
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


def source(case: Case, ordered: bool) -> str:
    """With a source line for each instruction."""

    def chosen(text: str) -> list[str]:
        other = "-" if ordered else "+"
        return [line.lstrip("+-") for line in text.splitlines() if not line.startswith(other)]

    init = f"mbarrier.init.shared::cta.b64 [%r3], {case.arrivals};"
    first = (
        [] if INIT in case.warp0 else [f"@%p0 {init}", "bar.sync 0;", *([CLUSTER_SYNC] if case.cluster == 2 else [])]
    )
    parted = "setp.eq.u32 %p6, %r5, 1;" if case.cluster == 2 else "setp.ge.u32 %p6, %r1, 1;"
    body = [*"\n".join(first).splitlines(), *chosen(case.first), parted, "@%p6 bra SECOND;", *chosen(case.warp0)]
    body += ["bra.uni END;", "SECOND:", *(["@!%p2 bra END;"] if case.cluster == 1 else []), *chosen(case.warp1), "END:"]
    body += [CLUSTER_SYNC] if case.cluster == 2 and "barrier.cluster" not in case.warp0 else []
    text = "\n".join(f".loc 1 {number} 0\n{line}" for number, line in enumerate("\n".join(body).splitlines(), 1))
    return f"{START}{text}\nret;\n}}\n"


def run_case(case: Case, ordered: bool, seed: int, together: bool = False) -> Report:
    memory, arrays = Memory(), [np.zeros(1024, np.uint8) for _ in range(2)]
    addresses = [memory.add(array, name) for array, name in zip(arrays, ("in", "out"), strict=True)]
    maps = {64 + 128 * i: TensorMap(addresses[i], (64, 8), (128,), (64, 1), 2) for i in range(2)}
    parameters = np.array(addresses, np.uint64).tobytes().ljust(320, b"\0")
    one_by_one = case.name == "one CTA beside another"
    grid, threads = (1 + one_by_one if case.cluster == 1 else 2,), 32 if case.cluster == 2 else 128
    launch, options = (Program.read(source(case, ordered)), None, grid, (threads,), parameters), {"maps": maps}
    if together:
        return run_together([[(launch, options | {"cluster": case.cluster})]], memory, seed)
    return run(*launch, **options, memory=memory, cluster=case.cluster, seed=seed)


def races_as_said(case: Case, seed: int, together: bool) -> bool:
    """Whether the case races without its order, between the two instructions that it names."""
    try:
        races = run_case(case, False, seed, together).races
    except MachineError as error:  # beside it, where this run's order shows
        races = error.report.races
    assert all(race.first.startswith("made.ptx:") and race.second.startswith("made.ptx:") for race in races)
    pairs = [pair for race in races for pair in ((race.first, race.second), (race.second, race.first))]
    return any(case.racing[0] in first and case.racing[1] in second for first, second in pairs)


@pytest.mark.parametrize("together", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", [*CASES, *ALWAYS], ids=lambda case: case.name)
def test_what_orders_two_accesses_and_that_they_race_without_it(case: Case, together: bool) -> None:
    """In a launch alone, and in one that others may run beside."""
    for seed in range(SEEDS):
        assert not run_case(case, True, seed, together).races, f"seed {seed}"
    found = (races_as_said(case, seed, together) for seed in range(RACING_SEEDS))
    assert all(found) if case in ALWAYS else any(found)


def test_lanes_of_a_warp_count_as_ordered() -> None:
    case = Case(
        "lanes",
        lines("shl.b32 %r9, %r4, 2;", "xor.b32 %r10, %r9, 4;", "add.u32 %r9, %r9, %r2;", "add.u32 %r10, %r10, %r2;")
        + lines("\nst.shared.u32 [%r9], %r7;", "bar.warp.sync 0xffffffff;", "ld.shared.u32 %r8, [%r10];"),
        "",
        ("", ""),
    )
    assert not run_case(case, True, 0).races


def said(first: str, arrivals: int = 1, warp0: str = "", warp1: str = "", cluster: int = 1) -> str:
    """What an error says of a program, with one of the seeds."""
    case = Case("an error", warp0, warp1, ("", ""), first, arrivals, cluster)
    for seed in range(RACING_SEEDS):
        try:
            run_case(case, True, seed)
        except MachineError as error:
            return str(error)
    raise AssertionError("no error")


def test_accumulators_belong_to_the_product_that_is_under_way() -> None:
    wait = "wgmma.wait_group.sync.aligned 0;"
    number = source(Case("", "", "", ("", ""), MULTIPLY), True).split("wgmma.mma_async")[0].count(".loc")
    read = said(lines(MULTIPLY, "add.f32 %f4, %f0, %f1;", wait))
    assert f"an accumulator that nobody has waited for: the wgmma at made.ptx:{number} is under way" in read
    assert f"written while the wgmma at made.ptx:{number} was under way" in said(
        lines(MULTIPLY, "mov.f32 %f2, 0f00000000;", wait)
    )
    written = said(
        lines(MULTIPLY, wait, "mov.f32 %f2, 0f00000000;", MULTIPLY.replace("wgmma.fence.sync.aligned;\n", ""), wait)
    )
    assert "accumulators that were written behind the last wgmma.fence" in written
    assert not run_case(
        Case("", "", "", ("", ""), lines(MULTIPLY, wait, "mov.f32 %f2, 0f00000000;", MULTIPLY, wait)), True, 0
    ).races


def test_shared_memory_ends_with_its_cta() -> None:
    left = said(lines(FILL, FENCE, "@%p1 bra STORES;", "bra.uni OUT;", "STORES:", TMA_STORE, "OUT:"))
    assert "its CTA ended before TMA had read the shared memory" in left
    remote = lines(CLUSTER_SYNC, REMOTE, "st.shared::cluster.u32 [%r11], %r7;")
    assert "shared memory of rank 1, which has ended" in said("", warp0=remote, warp1=CLUSTER_SYNC, cluster=2)


def test_a_deadlock_tells_who_waits_for_what_in_order() -> None:
    text = said("", 3, warp0=lines(ARRIVE, WAIT), warp1="bar.sync 5, 64;")
    first, second, *rest = text.splitlines()[1:]
    assert "nobody can go on" in text and text.endswith("not at its end; no race so far") and "seed 0" in text
    assert "CTA 0, warp 0 at made.ptx:" in first and "the phase of parity 0 of the mbarrier at byte 4096 of" in first
    assert "made at made.ptx:1; its phase 0 has 2 of 3 arrivals and 0 bytes missing" in first
    assert "CTA 0, warp 1 at made.ptx:" in second and "barrier 5: 32 of 64 threads have arrived" in second
    assert "at their end: CTA 0, warp 2; CTA 0, warp 3" in rest[0]


def test_who_asks_in_vain_is_told_as_one_who_waits() -> None:
    asks = "W: mbarrier.test_wait.parity.shared::cta.b64 %p7, [%r3], 0;\n@!%p7 bra W;"
    with pytest.raises(
        Deadlock, match=r"warp 0 asking again at made\.ptx:.*: the phase of parity 0 of the mbarrier at byte 4096"
    ):
        run_case(Case("asks", asks, "", ("", "")), True, 0)
