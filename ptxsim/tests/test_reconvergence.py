"""Lanes that branched apart meet at what they all take part in, also where some come from further back in the text."""

from __future__ import annotations

import numpy as np
import pytest

import ptxsim

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry program(.param .u64 program_param_0)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 kept[4];
    ld.param.u64 %rd1, [program_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r4, kept;
    mov.u32 %r2, 1;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra $FAR;
$HERE:
    MEET
    ld.shared.u32 %r3, [%r4];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r3;
    ret;
$FAR:
    mov.u32 %r2, 7;
    st.shared.u32 [%r4], %r2;
    THEN
}
"""


def result_of(meet: str, then: str, threads: int) -> list[int]:
    out = np.zeros(threads, np.uint32)
    for seed in range(5):
        out[:] = 0
        assert not ptxsim.run(TEXT.replace("MEET", meet).replace("THEN", then), 1, threads, [out], seed=seed).races
    return out.tolist()


@pytest.mark.parametrize(
    ("meet", "threads"),
    [
        ("bar.sync 0;", 64),
        ("bar.warp.sync 0xffffffff;", 32),
        ("redux.sync.add.s32 %r3, %r2, 0xffffffff;", 32),
        ("shfl.sync.idx.b32 %r3, %r2, 0, 31, 0xffffffff;", 32),
        ("vote.sync.any.pred %p2, %p1, 0xffffffff;", 32),
        ("elect.sync %r3|%p2, 0xffffffff;", 32),
    ],
)
def test_lanes_wait_for_those_from_further_on(meet: str, threads: int) -> None:
    assert result_of(meet, "bra $HERE;", threads) == [7] * threads


@pytest.mark.parametrize("meet", ["bar.sync 0;", "bar.warp.sync 0xffffffff;"])
def test_lanes_at_their_end_are_not_waited_for(meet: str) -> None:
    assert result_of(meet, "ret;", 32) == [0] + [7] * 31
