"""300 small PTX programs over the instructions of kernels for Hopper, edge values included; what a GPU makes of each is kept.

A program has one entry, ``program(in, out)``: addresses of its input and its output, and behind them, where it loads or stores by
TMA, one tensor map of the array that its name says. test_against_gpu.py runs the same texts and compares `ptx_programs.npz`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LANES = 32
WORDS_IN = 32  # 8-byte words of input a thread
HEADER = ".version 8.3\n.target sm_90a\n.address_size 64\n"
SHARED_BYTES = 64 * 1024


class Map(NamedTuple):
    """A tensor map: of "in" or "out", its shape and box, innermost first; strides in bytes leave out the innermost. bf16."""

    array: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    name: str
    text: str
    data: np.ndarray  # input, bytes
    out_bytes: int
    threads: int = LANES
    cluster: int = 1
    shared_bytes: int = 0
    map: Map | None = None

    @property
    def opcodes(self) -> set[str]:
        """What may stand first in a statement of the text."""
        words = (line.strip().split(None, 2) for line in self.text.replace("{", "{\n").replace(";", ";\n").splitlines())
        names = (word[1] if word[0].startswith("@") and len(word) > 1 else word[0] for word in words if word)
        return {name.rstrip(";") for name in names if (name[0].isalpha() and "." in name) or name in ("bra", "ret;")}


# --- Arithmetic -----------------------------------------------------------------------------------------------------------
# An opcode, and what it takes: result, then operands. r d h: 32, 64, 16 bits; f: fp32; p: a predicate; R D: never zero and
# positive, for divisors; s: a shift's amount; b: a position or length of a bit field; c: constant; x: fp32 for an exponential.
ARITHMETIC = """
abs.f32 f f|add.f32 f f f|add.s32 r r r|add.s64 d d d|and.b32 r r r|and.b64 d d d|and.pred p p p|bfi.b32 r r r b b
bfi.b64 d d d b b|copysign.f32 f f f|cvt.rn.bf16x2.f32 r f f|cvt.s64.s32 d r|cvt.u32.u64 r d|cvt.u64.u32 d r|cvt.u16.u32 h r
cvt.rn.f32.s32 f r|cvt.rn.f32.s64 f d|cvt.sat.f32.f32 f f|div.s32 r r R|div.s64 d d D|div.u32 r r R|div.u64 d d D
div.rn.f32 f f f|ex2.approx.ftz.f32 f x|fma.rn.f32 f f f f|fma.rm.f32 f f f f|mad.lo.s32 r r r r|max.s32 r r r|max.s64 d d d
max.u32 r r r|max.f32 f f f|min.s32 r r r|min.s64 d d d|min.u32 r r r|min.f32 f f f|mov.b32 r f|mov.b64 d d|mov.f32 f f
mov.pred p p|mov.u16 h h|mov.u32 r r|mov.u64 d d|mul.f32 f f f|mul.hi.s32 r r r|mul.hi.s64 d d d|mul.lo.s32 r r r
mul.lo.s64 d d d|mul.wide.s32 d r r|mul.wide.u32 d r r|neg.f32 f f|neg.s64 d d|not.b32 r r|not.b64 d d|not.pred p p
or.b32 r r r|or.b64 d d d|or.pred p p p|rcp.approx.ftz.f32 f f|rcp.rn.f32 f f|rem.s32 r r R|selp.b32 r r r p|selp.b64 d d d p
selp.f32 f f f p|selp.u16 h h h p|selp.b16 h h h p|selp.u32 r r r p|selp.u64 d d d p|setp.eq.b32 p r r|setp.eq.b64 p d d
setp.eq.s16 p h h|setp.eq.s32 p r r|setp.eq.s64 p d d|setp.eq.f32 p f f|setp.ge.s32 p r r|setp.ge.s64 p d d|setp.ge.u32 p r r
setp.ge.u64 p d d|setp.gt.f32 p f f|setp.gt.s32 p r r|setp.gt.s64 p d d|setp.gt.u32 p r r|setp.gt.u64 p d d|setp.le.f32 p f f
setp.le.s32 p r r|setp.le.s64 p d d|setp.lt.f32 p f f|setp.lt.s32 p r r|setp.lt.s64 p d d|setp.lt.u32 p r r|setp.lt.u64 p d d
setp.ne.b32 p r r|setp.ne.s32 p r r|setp.ne.s64 p d d|setp.ne.u32 p r r|setp.neu.f32 p f f|setp.nan.f32 p f f
setp.num.f32 p f f|shl.b32 r r s|shl.b64 d d s|shr.s32 r r s|shr.s64 d d s|shr.u32 r r s|shr.u64 d d s|sub.f32 f f f
sub.s32 r r r|sub.s64 d d d|tanh.approx.f32 f x|xor.b32 r r r|xor.pred p p p
""".replace("\n", "|")
INSTRUCTIONS = [tuple(line.split()) for line in ARITHMETIC.split("|") if line]
EDGES_32 = (0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x10000)
EDGES_64 = (0, 1, 63, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
EDGES_F = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-40,
    1.1754944e-38,
    3.4028235e38,
    1.0000001,
    88.8,
)
INPUTS = "rdhfpRDsbx"  # of each kind so many registers are loaded:
EACH = 3


def lane_values(kind: str, draw: np.random.Generator) -> np.ndarray:
    """(LANES,) uint64: what the 8-byte words of an input of this kind hold."""
    edge = draw.random(LANES) < 0.5
    if kind in "fx":
        wide = draw.standard_normal(LANES) * (10.0 ** draw.integers(-30, 30, LANES) if kind == "f" else 8.0)
        values = np.where(edge, draw.choice(EDGES_F, LANES), wide).astype(np.float32).view(np.uint32).astype(np.uint64)
    elif kind in "dD":
        values = np.where(
            edge, draw.choice(np.array(EDGES_64, np.uint64), LANES), draw.integers(0, 2**64, LANES, np.uint64)
        )
        values >>= draw.choice(np.array([0, 0, 20, 40], np.uint64), LANES)
    else:
        values = np.where(
            edge, draw.choice(np.array(EDGES_32, np.uint64), LANES), draw.integers(0, 2**32, LANES, np.uint64)
        )
        values >>= draw.choice(np.array([0, 0, 8, 20], np.uint64), LANES)
    if kind in "RD":
        values = values & np.uint64(2**31 - 1 if kind == "R" else 2**63 - 1) | np.uint64(1)
    if kind == "s":
        values %= np.uint64(80)
    if kind == "b":
        values %= np.uint64(70)
    if kind == "p":
        values &= np.uint64(1)
    return values


class Text:
    """A program's text while it is written."""

    def __init__(self, shared: int = 0, with_map: bool = False, cluster: int = 1) -> None:
        self.lines: list[str] = []
        parameters = ".param .u64 in, .param .u64 out" + (", .param .align 64 .b8 map[128]" if with_map else "")
        self.head = f"{HEADER}.extern .shared .align 1024 .b8 smem[];\n" if shared else HEADER
        clusters = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
        self.head += f".visible .entry program({parameters})\n{clusters}{{\n"
        registers = {"r": "b32", "d": "b64", "f": "f32", "h": "b16", "p": "pred"}
        self.head += "".join(f".reg .{kind} %{name}<300>;\n" for name, kind in registers.items())
        # %d0 in, %d1 out, %d2 this thread's input, %d3 its output, %r0 its number, %r1 shared memory
        self.add("""
            ld.param.u64 %d0, [in]; ld.param.u64 %d1, [out]; cvta.to.global.u64 %d0, %d0;
            cvta.to.global.u64 %d1, %d1; mov.u32 %r0, %tid.x;
        """)
        if shared:
            self.add("mov.u32 %r1, smem")
        if with_map:
            self.add("mov.b64 %d4, map; cvta.param.u64 %d4, %d4")

    def add(self, text: str) -> None:
        """Instructions, between semicolons, and labels, each at a line's end."""
        parts = [part.strip() for line in text.splitlines() for part in line.split(";")]
        self.lines += [part if part.endswith(":") else f"\t{part};" for part in parts if part]

    def thread_addresses(self, in_words: int, out_words: int) -> None:
        self.add(f"""
            mul.wide.u32 %d2, %r0, {8 * in_words}; add.s64 %d2, %d0, %d2;
            mul.wide.u32 %d3, %r0, {8 * out_words}; add.s64 %d3, %d1, %d3;
        """)

    def __str__(self) -> str:
        return self.head + "\n".join([*self.lines, "\tret;", "}\n"])


def arithmetic(seed: int, instructions: list[tuple[str, ...]]) -> Program:
    """These instructions on lanes of edge values and others; each result goes to a word of the thread's output."""
    draw, choose = np.random.default_rng(seed), random.Random(seed)
    text, loaded = Text(), dict[str, list[str]]()
    text.thread_addresses(WORDS_IN, len(instructions))
    columns = np.zeros((LANES, WORDS_IN), np.uint64)
    for index, kind in enumerate(kind for kind in INPUTS for _ in range(EACH)):
        columns[:, index] = lane_values(kind, draw)
        store = {"R": "r", "s": "r", "b": "r", "D": "d", "x": "f"}.get(kind, kind)
        name, at = f"%{store}{100 + index}", f"[%d2+{8 * index}]"
        if store == "p":
            text.add(f"ld.global.u32 %r{100 + index}, {at}; setp.ne.u32 {name}, %r{100 + index}, 0")
        else:
            text.add(f"ld.global.{ {'r': 'u32', 'd': 'u64', 'f': 'f32', 'h': 'u16'}[store] } {name}, {at}")
        loaded.setdefault(kind, []).append(name)
    for index, (opcode, made, *taken) in enumerate(instructions):
        result, operands = f"%{made}{50 + index}", [choose.choice(loaded[kind]) for kind in taken]
        if opcode.startswith("selp.u") and choose.random() < 0.5:
            operands[:2] = ["1", "0"]
        text.add(f"{opcode} {result}, {', '.join(operands)}")
        store_result(text, made, result, 50 + index, f"[%d3+{8 * index}]")
    names = " ".join(opcode for opcode, *_ in instructions)
    return Program(
        f"arithmetic {seed}: {names}", str(text), columns.view(np.uint8).ravel(), LANES * len(instructions) * 8
    )


def store_result(text: Text, kind: str, result: str, index: int, at: str) -> None:
    if kind == "p":
        text.add(f"selp.u32 %r{index}, 1, 0, {result}")
        kind, result = "r", f"%r{index}"
    text.add(f"st.global.{ {'r': 'u32', 'd': 'u64', 'f': 'f32', 'h': 'u16'}[kind] } {at}, {result}")


# --- Warps, memory, control -----------------------------------------------------------------------------------------------


def shuffles(seed: int) -> Program:
    choose = random.Random(seed)
    text, out = Text(), 0
    text.thread_addresses(1, 10)
    text.add("ld.global.u32 %r2, [%d2]; setp.lt.s32 %p9, %r2, 0")
    for kind, amounts in (("idx", (0, 5, 31, 40)), ("up", (1, 2, 16, 31)), ("bfly", (1, 2, 8, 16))):
        for _ in range(2):
            clamp = choose.choice((0, 0x1F00, 0x1800, 0x101F if kind != "up" else 0x1000, 0x1F if kind != "up" else 0))
            lane = f"{choose.choice(amounts)}"
            text.add(f"""
                mov.u32 %r3, {clamp}; mov.u32 %r4, -1; mov.u32 %r5, {lane};
                shfl.sync.{kind}.b32 %r6|%p1, %r2, %r5, %r3, %r4; selp.u32 %r7, 1, 0, %p1;
                st.global.v2.u32 [%d3+{8 * out}], {{%r6, %r7}};
            """)
            out += 1
    text.add(f"""
        mov.u32 %r4, -1; redux.sync.max.s32 %r6, %r2, %r4; st.global.u32 [%d3+{8 * out}], %r6;
        vote.sync.all.pred %p2, %p9, %r4; vote.sync.ballot.b32 %r7, %p9, %r4; selp.u32 %r6, 1, 0, %p2;
        st.global.v2.u32 [%d3+{8 * out + 8}], {{%r6, %r7}}; bar.red.or.pred %p3, 0, %p9; selp.u32 %r6, 1, 0, %p3;
        st.global.u32 [%d3+{8 * out + 16}], %r6; bar.warp.sync -1;
    """)
    draw = np.random.default_rng(seed)
    sign = draw.choice([0.0, 0.5, 1.0])
    data = draw.integers(0, 2**31, LANES, np.uint64) | (draw.random(LANES) < sign).astype(np.uint64) << np.uint64(31)
    return Program(f"shuffles {seed}", str(text), data.view(np.uint8), LANES * 80)


def shared_memory(seed: int) -> Program:
    """Each lane stores to its own place of shared memory and loads from another's, in many widths."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    text = Text(shared=SHARED_BYTES)
    text.thread_addresses(8, 8)
    text.add(f"""
        ld.global.nc.v4.u32 {{%r10,%r11,%r12,%r13}}, [%d2]; ld.global.v4.f32 {{%f10,%f11,%f12,%f13}}, [%d2+16];
        ld.global.nc.b32 %r14, [%d2+32]; ld.global.nc.f32 %f14, [%d2+36]; ld.global.nc.s32 %r15, [%d2+40];
        ld.global.v2.u32 {{%r16,%r17}}, [%d2+48]; ld.global.s32 %d10, [%d2+56]; ld.global.u16 %h10, [%d2+60];
        shl.b32 %r2, %r0, 6; add.s32 %r3, %r1, %r2; cvt.u64.u32 %d20, %r3;
        st.shared.v4.u32 [%d20], {{%r10,%r11,%r12,%r13}}; st.shared.v2.u32 [%d20+16], {{%r16,%r17}};
        st.shared.u32 [%d20+24], %r14; st.shared.f32 [%d20+28], %f14; st.shared.u8 [%d20+32], %h10;
        st.shared.v2.b32 [%d20+40], {{%r15,%r14}}; st.shared.u32 [%d20+48], %r15; bar.sync 0;
        xor.b32 %r4, %r0, {choose.choice((1, 5, 31))}; shl.b32 %r4, %r4, 6; add.s32 %r4, %r1, %r4;
        cvt.u64.u32 %d21, %r4; ld.shared.v4.b32 {{%r20,%r21,%r22,%r23}}, [%d21]; ld.shared.f32 %f20, [%d21+28];
        ld.shared.v2.b32 {{%r24,%r25}}, [%d21+16]; ld.shared.s8 %r26, [%d21+32]; ld.shared.s32 %d22, [%d21+48];
        ld.shared.v2.u32 {{%r27,%r28}}, [%d21+40]; ld.shared.u32 %r29, [%d21+24];
        ld.shared.v4.u32 {{%r30,%r31,%r32,%r33}}, [%d21];
        st.global.v4.u32 [%d3], {{%r20,%r33,%r22,%r31}}; st.global.v2.u32 [%d3+16], {{%r24,%r26}}; st.global.u32 [%d3+24], %r29;
        ld.param.u32 %r35, [in]; ld.param.s32 %d23, [in+4]; ld.param.v2.u32 {{%r36,%r37}}, [out]; sub.s32 %r35, %r35, %r35;
        st.global.cs.v4.u32 [%d3], {{%r20,%r33,%r22,%r31}}; add.s32 %r29, %r29, %r35; st.global.u32 [%d3+24], %r29;
        st.global.f32 [%d3+28], %f20; st.global.cs.v2.u32 [%d3+32], {{%r27,%r28}}; st.global.u64 [%d3+40], %d22;
        add.s64 %d22, %d22, %d10; cvt.u32.u64 %r34, %d22; st.global.v2.f32 [%d3+48], {{%f13,%f11}};
        st.global.u32 [%d3+56], %r34; st.global.u16 [%d3+60], %h10;
    """)
    return Program(f"shared memory {seed}", str(text), draw.integers(0, 256, LANES * 64, np.uint8), LANES * 64,
                   shared_bytes=SHARED_BYTES)  # fmt: skip


def atomics(seed: int) -> Program:
    """Sums whose order doesn't show: small whole numbers."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    text = Text(shared=SHARED_BYTES)
    text.thread_addresses(2, 2)
    places = choose.choice((1, 4, 32))
    text.add(f"""
        ld.global.s32 %d10, [%d2]; cvt.u32.u64 %r10, %d10; cvt.rn.f32.s32 %f10, %r10;
        and.b32 %r2, %r0, {places - 1}; shl.b32 %r3, %r2, 2; add.s32 %r4, %r1, %r3; cvt.u64.u32 %d20, %r4;
        mov.u32 %r5, 0; st.shared.u32 [%d20], %r5; st.shared.u32 [%d20+256], %r5; bar.sync 0;
        atom.shared.max.s32 %r6, [%d20], %r10; atom.shared.add.u32 %r7, [%d20+256], %r10; bar.sync 0;
        ld.shared.u32 %r8, [%d20]; ld.shared.u32 %r9, [%d20+256]; st.global.v2.u32 [%d3], {{%r8, %r9}};
        mul.wide.u32 %d21, %r2, 8; add.s64 %d21, %d1, %d21; add.s64 %d21, %d21, 1024;
        red.global.add.f32 [%d21], %f10; mov.f32 %f11, 0f3F800000; red.global.add.v2.f32 [%d21+512], {{%f10, %f11}};
        add.s64 %d22, %d1, 2048; mov.u32 %r11, {choose.choice((0, 6, 30, 100))};
        atom.global.inc.u32 %r12, [%d22], %r11;
    """)
    data = draw.integers(-1000, 1000, LANES * 2).astype(np.int64)
    return Program(f"atomics {seed}", str(text), data.view(np.uint8), 2056, shared_bytes=SHARED_BYTES)


def control(seed: int) -> Program:
    """Loops that each lane leaves when it will, with a branch in them, and lanes that end early."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    text = Text()
    text.thread_addresses(1, 2)
    text.add(f"""
        ld.global.u32 %r2, [%d2]; mov.u32 %r3, 0; mov.u32 %r4, 1; setp.gt.u32 %p5, %r2, 900;
        @%p5 st.global.u32 [%d3], %r2;
        @%p5 bra $END;
        $LOOP:
        and.b32 %r5, %r2, {choose.choice((1, 3, 7))}; setp.eq.s32 %p1, %r5, 0; @%p1 bra $EVEN;
        mad.lo.s32 %r2, %r2, 3, 1; xor.b32 %r4, %r4, %r2; bra.uni $NEXT;
        $EVEN:
        shr.u32 %r2, %r2, 1; add.s32 %r4, %r4, %r2;
        $NEXT:
        add.s32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 60; setp.gt.u32 %p3, %r2, 1; and.pred %p2, %p2, %p3;
        @%p2 bra $LOOP; st.global.v2.u32 [%d3], {{%r3, %r4}};
        @!%p3 bra $END;
        st.global.u32 [%d3+8], %r2;
        $END:
    """)
    return Program(f"control {seed}", str(text), draw.integers(0, 1024, LANES, np.uint64).view(np.uint8), LANES * 16)


# --- Matrices in shared memory --------------------------------------------------------------------------------------------


def fill_shared(text: Text, count: int, threads: int) -> None:
    """The first `count` bytes of the input to shared memory, 16 bytes a thread at a time."""
    text.add("shl.b32 %r200, %r0, 4")
    for begin in range(0, count, 16 * threads):
        text.add(f"""
            add.s32 %r201, %r200, {begin}; cvt.u64.u32 %d200, %r201; add.s64 %d201, %d0, %d200;
            add.s32 %r202, %r1, %r201; ld.global.v4.u32 {{%r203,%r204,%r205,%r206}}, [%d201];
            cvt.u64.u32 %d202, %r202; st.shared.v4.u32 [%d202], {{%r203,%r204,%r205,%r206}};
        """)
    text.add("bar.sync 0")


def dump_shared(text: Text, count: int, threads: int) -> None:
    """The first `count` bytes of shared memory to the output."""
    text.add("bar.sync 0; shl.b32 %r200, %r0, 4")
    for begin in range(0, count, 16 * threads):
        text.add(f"""
            add.s32 %r201, %r200, {begin}; cvt.u64.u32 %d200, %r201; add.s64 %d201, %d1, %d200;
            add.s32 %r202, %r1, %r201; cvt.u64.u32 %d202, %r202;
            ld.shared.v4.u32 {{%r203,%r204,%r205,%r206}}, [%d202]; st.global.v4.u32 [%d201], {{%r203,%r204,%r205,%r206}};
        """)


def matrices(seed: int) -> Program:
    """ldmatrix of rows in some order, then stmatrix of them elsewhere, transposed or not."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    trans, odd = choose.choice(("", ".trans")), choose.choice((1, 3, 5, 7, 11))
    text = Text(shared=SHARED_BYTES)
    fill_shared(text, 1024, LANES)
    text.add(f"""
        mul.lo.s32 %r2, %r0, {odd}; and.b32 %r2, %r2, 31; shl.b32 %r2, %r2, 4; add.s32 %r2, %r1, %r2;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10,%r11,%r12,%r13}}, [%r2]; bar.warp.sync -1;
        add.s32 %r3, %r2, 512; stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r3], {{%r13,%r10,%r12,%r11}};
    """)
    dump_shared(text, 1024, LANES)
    return Program(
        f"matrices {seed}", str(text), draw.integers(0, 256, 1024, np.uint8), 1024, shared_bytes=SHARED_BYTES
    )


def copies(seed: int) -> Program:
    """cp.async with zeros behind what it reads; its barrier's arrival."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    text = Text(shared=SHARED_BYTES)
    fill_shared(text, 1024, LANES)
    text.add(f"""
        add.s32 %r2, %r1, 2048; mov.u32 %r3, 32; setp.eq.s32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r2], %r3; bar.sync 0;
        xor.b32 %r4, %r0, 3; shl.b32 %r4, %r4, 4; add.s32 %r4, %r1, %r4; shl.b32 %r5, %r0, 4;
        cvt.u64.u32 %d5, %r5; add.s64 %d5, %d0, %d5; mul.lo.s32 %r6, %r0, {choose.choice((1, 2, 3))};
        min.s32 %r6, %r6, 16; cp.async.cg.shared.global.L2::128B [%r4], [%d5], 16, %r6;
    """)
    if choose.random() < 0.5:
        text.add("cp.async.wait_all")
    else:
        text.add("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2]")
        wait(text, "%r2", 0)
    dump_shared(text, 1024, LANES)
    return Program(f"copies {seed}", str(text), draw.integers(0, 256, 1024, np.uint8), 1024, shared_bytes=SHARED_BYTES)


def wait(text: Text, barrier: str, parity: int) -> None:
    name = f"$WAIT{len(text.lines)}"
    text.add(f"{name}:")
    text.add(f"""
        mov.u32 %r250, {parity}; mbarrier.try_wait.parity.shared::cta.b64 %p60, [{barrier}], %r250;
        @!%p60 bra {name};
    """)


def barriers(seed: int) -> Program:
    """What test_wait says of both parities after each arrival, by one lane; bytes are awaited by a copy of the lane's own."""
    choose = random.Random(seed)
    text = Text(shared=SHARED_BYTES, with_map=True)
    steps, count = 12, choose.choice((1, 2, 3))
    text.thread_addresses(1, steps)
    text.add(f"""
        setp.ne.s32 %p1, %r0, 0;
        @%p1 bra $END;
        mov.u32 %r2, {count}; mbarrier.init.shared::cta.b64 [%r1], %r2; fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta; mov.u32 %r3, 1; mov.u32 %r4, 512; add.s32 %r5, %r1, 1024; mov.u32 %r6, 0;
    """)
    for step in range(steps):
        if choose.random() < 0.7:
            text.add("mbarrier.arrive.shared::cta.b64 _, [%r1], %r3")
        elif choose.random() < 0.5:
            name = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            text.add(f"""
                mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r4; {name} [%r5], [%d4, {{%r6, %r6}}], [%r1];
                nanosleep.u32 20000;
            """)  # the sleep lasts until the bytes have come
        for parity in (0, 1):
            text.add(f"""
                mov.u32 %r7, {parity}; mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r1], %r7;
                selp.u32 %r{8 + parity}, 1, 0, %p2;
            """)
        text.add(f"st.global.v2.u32 [%d3+{8 * step}], {{%r8, %r9}}")
    text.add("$END:")
    of_input = Map("in", (64, 8), (128,), (64, 4))
    data = np.arange(1024, dtype=np.uint16).view(np.uint8)
    return Program(f"barriers {seed}", str(text), data, 8 * steps, shared_bytes=SHARED_BYTES, map=of_input)


def tensor_shape(dims: int, choose: random.Random) -> Map:
    outer = [choose.randint(3, 9) for _ in range(dims - 1)]
    inner = choose.choice((64, 72, 104))
    strides = [2 * inner]
    for size in outer[:-1]:
        strides.append(strides[-1] * size)
    box = [64, *(choose.randint(1, 4) for _ in range(dims - 1))]
    return Map("in", (inner, *outer), tuple(strides), tuple(box))


def tensor_bytes(of: Map) -> int:
    return of.strides[-1] * of.shape[-1]


def tma_load(seed: int) -> Program:
    """A box at places that may lie before the tensor, and past its end: zeros there."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    dims = choose.choice((2, 3, 4))
    of = tensor_shape(dims, choose)
    count = int(np.prod(of.box)) * 2
    size = -(-count // 512) * 512
    text = Text(shared=SHARED_BYTES, with_map=True)
    text.add("mov.u32 %r30, 0; add.s32 %r31, %r1, 32768; setp.eq.s32 %p1, %r0, 0; mov.u32 %r32, 1")
    for begin in range(0, size, 512):
        text.add(f"""
            shl.b32 %r33, %r0, 4; add.s32 %r33, %r33, {begin}; add.s32 %r33, %r1, %r33; cvt.u64.u32 %d33, %r33;
            st.shared.v4.u32 [%d33], {{%r30,%r30,%r30,%r30}};
        """)
    text.add(f"""
        @%p1 mbarrier.init.shared::cta.b64 [%r31], %r32; fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta; bar.sync 0; mov.u32 %r34, {count};
    """)
    places = [choose.choice((0, 8, 40, -16)), *(choose.randint(-2, length) for length in of.shape[1:])]
    text.add("; ".join(f"mov.u32 %r{40 + index}, {place}" for index, place in enumerate(places)))
    text.add("@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r31], %r34")
    at = ", ".join(f"%r{40 + index}" for index in range(dims))
    name = f"cp.async.bulk.tensor.{dims}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    text.add(f"@%p1 {name} [%r1], [%d4, {{{at}}}], [%r31]")
    wait(text, "%r31", 0)
    dump_shared(text, size, LANES)
    data = draw.integers(0, 2**16, tensor_bytes(of) // 2, np.uint16).view(np.uint8)
    return Program(f"tma load {seed}", str(text), data, size, shared_bytes=SHARED_BYTES, map=of)


def tma_store(seed: int) -> Program:
    """A box to places that may lie past the tensor's end: nothing is stored there."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    dims = choose.choice((2, 3))
    of = tensor_shape(dims, choose)._replace(array="out")
    count = int(np.prod(of.box)) * 2
    size = -(-count // 512) * 512
    text = Text(shared=SHARED_BYTES, with_map=True)
    fill_shared(text, size, LANES)
    text.add("fence.proxy.async.shared::cta; bar.sync 0; setp.eq.s32 %p1, %r0, 0")
    places = [choose.choice((0, 8, 40)), *(choose.randint(0, length) for length in of.shape[1:])]
    text.add("; ".join(f"mov.u32 %r{40 + index}, {place}" for index, place in enumerate(places)))
    at = ", ".join(f"%r{40 + index}" for index in range(dims))
    text.add(f"""
        @%p1 cp.async.bulk.tensor.{dims}d.global.shared::cta.bulk_group [%d4, {{{at}}}], [%r1];
        @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 0; @%p1 cp.async.bulk.wait_group 0;
    """)
    data = draw.integers(0, 256, size, np.uint8)
    return Program(f"tma store {seed}", str(text), data, tensor_bytes(of), shared_bytes=SHARED_BYTES, map=of)


def clusters(seed: int) -> Program:
    """Two CTAs: each loads half of a box and multicasts it to both; a remote arrival at the other's barrier."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    rows = choose.choice((4, 8))
    of = Map("in", (64, 2 * rows), (128,), (64, rows))
    text = Text(shared=SHARED_BYTES, with_map=True, cluster=2)
    text.add(f"""
        mov.u32 %r2, %cluster_ctarank; add.s32 %r3, %r1, 8192; mov.u32 %r4, 1; mov.u32 %r5, 3;
        setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r3], %r5; fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mul.lo.s32 %r6, %r2, {rows}; mul.lo.s32 %r7, %r2, {128 * rows}; add.s32 %r7, %r1, %r7; mov.u32 %r8, 0;
        mov.u32 %r9, {256 * rows}; mov.u16 %h1, 3; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r9;
    """)
    name = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    text.add(f"""
        @%p1 {name} [%r7], [%d4, {{%r8, %r6}}], [%r3], %h1; setp.lt.u32 %p2, %r0, 2; and.b32 %r10, %r0, 1;
        mapa.shared::cluster.u32 %r11, %r3, %r10; @%p2 mbarrier.arrive.shared::cluster.b64 _, [%r11];
    """)
    wait(text, "%r3", 0)
    text.add(f"mul.wide.u32 %d7, %r2, {256 * rows}; add.s64 %d1, %d1, %d7")
    dump_shared(text, 256 * rows, LANES)
    text.add("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned")
    data = draw.integers(0, 2**16, 128 * rows, np.uint16).view(np.uint8)
    return Program(f"clusters {seed}", str(text), data, 512 * rows, cluster=2, shared_bytes=SHARED_BYTES, map=of)


def wgmma(seed: int) -> Program:
    """One product of 64 x N x 16, whole numbers in every third program, so that its sums are exact."""
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    width, trans_a, trans_b = (64, 128, 64, 192, 64, 256)[seed % 6], choose.randint(0, 1), choose.randint(0, 1)
    steps, exact = choose.choice((1, 2, 4)), seed % 3 == 0
    a_bytes, b_bytes = 8192, width * 128
    size = a_bytes + b_bytes
    text = Text(shared=SHARED_BYTES)
    fill_shared(text, size, 128)
    count = width // 2
    text.add("; ".join(f"mov.f32 %f{index}, 0f{0x3F800000 + (index << 16):08X}" for index in range(count)))
    text.add("""
        fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r2, %r1, 4;
        setmaxnreg.inc.sync.aligned.u32 232; setmaxnreg.dec.sync.aligned.u32 224; wgmma.fence.sync.aligned;
    """)
    accumulators = ", ".join(f"%f{index}" for index in range(count))
    for step in range(steps):
        a_at = step * (128 if trans_a else 2)
        b_at = a_bytes // 16 + step * (128 if trans_b else 2)
        for name, at in (("40", a_at), ("41", b_at)):
            text.add(f"""
                add.s32 %r{name}, %r2, {at}; and.b32 %r{name}, %r{name}, 16383;
                or.b32 %r{name}, %r{name}, {8192 // 16 << 16}; cvt.u64.u32 %d{name}, %r{name};
                or.b64 %d{name}, %d{name}, {1 << 62 | 64 << 32};
            """)
        text.add(f"setp.ne.b32 %p1, {choose.choice((0, 1))}, {0}" if step == 0 else "setp.eq.b32 %p1, 0, 0")
        name = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
        text.add(f"{name} {{{accumulators}}}, %d40, %d41, %p1, 1, 1, {trans_a}, {trans_b}")
    text.add(f"""
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mul.wide.u32 %d3, %r0, {4 * count};
        add.s64 %d3, %d1, %d3;
    """)
    for index in range(0, count, 4):
        text.add(f"st.global.v4.f32 [%d3+{4 * index}], {{%f{index},%f{index + 1},%f{index + 2},%f{index + 3}}}")
    values = (
        draw.integers(-8, 9, size // 2).astype(np.float32) if exact else draw.standard_normal(size // 2, np.float32)
    )
    bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    kind = "exact" if exact else "inexact"
    return Program(f"wgmma {seed} {kind}", str(text), bits.view(np.uint8), 128 * 4 * count, threads=128,
                   shared_bytes=SHARED_BYTES)  # fmt: skip


# --- All ------------------------------------------------------------------------------------------------------------------

FAMILIES: dict[Callable[[int], Program], int] = {
    shuffles: 20,
    shared_memory: 10,
    atomics: 10,
    control: 10,
    matrices: 14,
    copies: 10,
    barriers: 16,
    tma_load: 30,
    tma_store: 20,
    clusters: 6,
    wgmma: 18,
}
AT_ONCE = 8  # instructions of an arithmetic program
TOTAL = 300


def programs() -> Iterator[Program]:
    """All of them, the same every time."""
    for make, count in FAMILIES.items():
        yield from (make(seed) for seed in range(count))
    choose = random.Random(0)
    for seed in range(TOTAL - sum(FAMILIES.values())):
        if seed % 10 == 0:
            order = choose.sample(INSTRUCTIONS, len(INSTRUCTIONS))
        begin = seed % 10 * AT_ONCE
        chosen = order[begin : begin + AT_ONCE] or choose.sample(INSTRUCTIONS, AT_ONCE)
        yield arithmetic(seed, [*chosen, *choose.sample(INSTRUCTIONS, 4)])


def empty_output(program: Program) -> np.ndarray:
    """What the output holds before the program runs: poison, zeros where it adds."""
    out = np.full(-(-program.out_bytes // 16) * 16, 0xA5, np.uint8)
    if program.name.startswith("atomics"):
        out[1024:] = 0
    return out


def digest_of_inputs() -> str:
    """So that a NumPy which draws otherwise is noticed."""
    return hashlib.sha256(b"".join(program.data.tobytes() for program in programs())).hexdigest()
