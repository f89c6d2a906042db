"""What PTX text means, and what of it is refused before anything runs, with its line."""

import sys

import numpy as np
import pytest
from small_kernels import WGMMA, cuda, out_of, ptx, zeros

import ptxsim
from ptxsim import PtxError

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


@pytest.mark.parametrize(
    ("declared", "kind", "value"),
    [
        ("__device__ volatile float g = 1.5f;", "float", 1.5),
        ("__device__ volatile double g = 2.5;", "double", 2.5),
        ("__device__ volatile short g[2][2] = {{1, 2}, {3, -4}};\n#define g g[1][1]", "int", -4),
    ],
)
def test_initial_values_of_variables(declared: str, kind: str, value: float) -> None:
    out = zeros(1, {"float": np.float32, "double": np.float64, "int": np.int32}[kind])
    ptxsim.run(cuda("o[0] = g;", f"{kind}* o", declared), 1, 1, [out])
    assert out[0] == value


LOCAL = "int a[8]; for (int i = 0; i < 8; i++) a[i] = 2 * x[i]; o[threadIdx.x] = a[x[threadIdx.x] % 8 ^ 1];"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (cuda(LOCAL), r"\.local"),
        (
            cuda("o[0] = *p;", before="__device__ int a[2] = {5, 6}; __device__ int* volatile p = a + 1;"),
            "initial|generic",
        ),
    ],
)
def test_what_is_refused_of_cuda(source: str, said: str) -> None:
    """Local memory, and variables that begin as other variables' addresses."""
    with pytest.raises(PtxError, match=rf"line \d+: .*({said})"):
        out_of(source)


@pytest.mark.parametrize(
    "body",
    [
        "setp.eq.u32 %p2|%p1, 1, 1;",
        "mov.b16 %h1, 0; red.global.add.noftz.bf16 [%rd1], %h1;",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1, %r1}], [%r2];",
        "mbarrier.complete_tx.shared::cta.b64 [%r1], 64;",
        "barrier.sync 0; call f, ();",
        "mov.u32 %r1, nobody;",
        "mov.u32 %r1, 018;",
        "bra %p1;",
        "bra;",
        "mov.u32 %r1, 1024; redux.sync.min.abs.NaN.f32 %r1, %r1, -1;",
        "mov.u32 %r1, 1; redux.sync.min.f32 %r1, %r1, -1;",
        "mov.u32 %r1, 1024; st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r1, [%r1];",
        "bar.sync 17;",
        "bar.sync 1, 40;",
        "mov.u32 %r1, 1024; ld.shared.u32 %r2, [%r1]; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3}, [%r1];",
        "add.u64 %r1, 1, 1;",
        WGMMA.replace("SHAPE", "m64n16k16").replace("SCALE", "0").replace("%rd2", "64"),
        WGMMA.replace("SHAPE", "m64n12k16").replace("SCALE", "0").replace("%rd2", "64"),
        WGMMA.replace("SHAPE", "m64k16").replace("SCALE", "0").replace("%rd2", "64"),
        "A: mov.u32 %r1, 1; A: mov.u32 %r1, 2;",
        "fence.proxy.nonsense;",
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd2, {%r1, %r1}];",
        "mov.u32 %r1, 1024; cp.async.cg.shared.global [%r1], [%rd2], 4;",
    ],
)
def test_text_that_ptxas_refuses_or_the_machine_does_not_know(body: str) -> None:
    """Nothing of it runs: it is refused as it is read."""
    with pytest.raises(PtxError, match=r"line 1[456]: "):
        ptxsim.step(ptx(body, ""), 1, 128, [], shared=8192)


@pytest.mark.parametrize(
    "text", [".version 8.0\n}\n", ".version 8.0\n.reg .b32 %r<3>;\n", ".entry k()\n{\nret;\n", ".entry k() {}\nret"]
)
def test_broken_text(text: str) -> None:
    with pytest.raises(PtxError, match="line"):
        ptxsim.run(text, 1, 1, [])


def test_an_entry_without_instructions() -> None:
    assert ptxsim.run(".visible .entry k()\n{\n}\n", 1, 1, []).steps == 1
