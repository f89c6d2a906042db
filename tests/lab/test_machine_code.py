"""SASS beside source lines: a stored sample, and real kernels against nvdisasm's plain listing. Needs no GPU."""

import re
from itertools import groupby
from pathlib import Path

import pytest
from shown import Text

from blazeproto import gemm
from blazeproto.gemm import nvrtc
from blazeproto.gemm.compile import Kernel
from blazeproto.lab import Workbench, machine_code
from blazeproto.lab.sass import Instruction, MachineCode
from blazeproto.runtime.arch import HOPPER
from tests.refusals import refuses

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

SAMPLE = """\
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"

//--------------------- .text.helper           --------------------------
helper:
.text.helper:
        /*0000*/                   RET.ABS.NODEC R20 0x0 ;

//--------------------- .text.up_forward          --------------------------
	.section	.text.up_forward,"ax",@progbits
up_forward:
.text.up_forward:
	//## File "/elsewhere/cuda/up.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P2 BRA `(.L_x_1) ;
	//## File "/elsewhere/cuda/part/wgmma.cuh", line 2 inlined at "/elsewhere/cuda/up.cu", line 4
	//## File "/elsewhere/cuda/up.cu", line 4 inlined at "/elsewhere/cuda/up.cu", line 5
	//## File "/elsewhere/cuda/up.cu", line 5
        /*0020*/                   WARPGROUP.ARRIVE ;
.L_x_1:
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
	//## File "/elsewhere/cuda/up.cu", line 3
        /*10040*/             @UP0 UTMALDG.4D [UR8], [UR6] ;
"""


pytestmark = pytest.mark.usefixtures("nvdisasm")


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel of two short sources, whose disassembly is SAMPLE."""
    (tmp_path / "part").mkdir()
    (tmp_path / "up.cu").write_text("one\ntwo\n    kernel() {\n  call();\n}\n")
    (tmp_path / "part" / "wgmma.cuh").write_text("//\n  wgmma<A & B>();\n")
    monkeypatch.setattr(Kernel, "disassemble", lambda *_: SAMPLE)
    return Kernel("up.cu", "up_forward", sources=tmp_path)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return gemm.kernel_for("up_forward")


@pytest.fixture(scope="module")
def code(kernel: Kernel) -> MachineCode:
    return machine_code(kernel)


def plain(sass: str) -> list[tuple[int, str]]:
    """(address, instruction) of nvdisasm's listing without lines."""
    rows = [row.strip().split("*/", 1) for row in sass.splitlines() if row.strip().startswith("/*")]
    return [(int(address[2:], 16), text.strip().removesuffix(";").strip()) for address, text in rows]


def test_the_sample(sample: Kernel) -> None:
    helper, *groups = machine_code(sample).groups
    assert (helper.function, helper.line, helper.calls) == ("helper", None, ())
    assert [(str(group.line), group.line.text) for group in groups if group.line] == [
        ("up.cu:3", "kernel() {"),
        ("part/wgmma.cuh:2", "wgmma<A & B>();"),
        ("up.cu:3", "kernel() {"),
    ]
    assert [[str(call) for call in group.calls] for group in groups] == [[], ["up.cu:4", "up.cu:5"], []]
    assert [instruction.address for group in groups for instruction in group.instructions] == [0, 16, 32, 48, 0x10040]
    assert groups[1].instructions[1].label == ".L_x_1"
    kinds = [instruction.kind for group in groups for instruction in group.instructions]
    assert kinds == ["arithmetic, moves", "control flow", "wgmma", "wgmma", "cp.async, TMA"]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("up.cu", ["up.cu:3", "up.cu:3"]),
        ("part/wgmma.cuh:2", ["part/wgmma.cuh:2"]),
        (r"wgmma<.*>", ["part/wgmma.cuh:2"]),
        (r"^(part|up).*:\d$", ["up.cu:3", "part/wgmma.cuh:2", "up.cu:3"]),
    ],
)
def test_a_part(sample: Kernel, lines: str, shown: list[str]) -> None:
    code = machine_code(sample, lines)
    assert [str(group.line) for group in code.groups] == shown
    assert f"{len(code.instructions)} of 6 instructions" in repr(code)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("@P0 LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", "cp.async, TMA"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3", "barriers, fences"),
        ("@!UPT UTMASTG.3D [UR8], [UR4]", "cp.async, TMA"),
        ("STSM.16.M88.4 [R3], R4", "shared memory"),
        ("STG.E.EF.128 desc[UR4][R2.64], R8", "global memory"),
        ("WARPSYNC.ALL", "control flow"),
        ("FFMA R1, R2, R3, R4", "arithmetic, moves"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert Instruction(0, text).kind == kind


def test_every_instruction_once_in_the_order_of_the_code(kernel: Kernel, code: MachineCode) -> None:
    found = [(instruction.address, instruction.text) for instruction in code.instructions]
    assert found == plain(kernel.sass) and sum(code.kinds.values()) == code.total == len(found)
    neighbours = [(group.function, group.line, group.calls) for group in code.groups]
    assert len(neighbours) == len(list(groupby(neighbours)))  # groups end where the line does


def test_products_come_from_wgmma(kernel: Kernel, code: MachineCode) -> None:
    """ptxas puts an HGMMA that it moves down to a neighbour's line, so not all have wgmma's; but all are of the main loop's."""
    groups = [group for group in code.groups for i in group.instructions if i.text.startswith("HGMMA")]
    assert len(groups) == kernel.sass.count("HGMMA") > 0
    lines = [[str(line) for line in (group.line, *group.calls)] for group in groups]
    source = (kernel.folder / "mainloop.cuh").read_text().splitlines()
    begin = next(n for n, text in enumerate(source, 1) if text.startswith("DEVICE void multiply_stage"))
    main_loop = {f"mainloop.cuh:{number}" for number in range(begin, len(source) + 1)}
    assert all(main_loop & set(line) for line in lines)
    assert sum(line[0].startswith("wgmma.cuh:") for line in lines) > len(lines) / 2
    calls = [call.text for group in groups for call in group.calls]
    assert any(text.startswith("wgmma<MN_A, MN_B>(acc") for text in calls)
    assert all(line[-1].startswith(f"{kernel.file}:") for line in lines)


def test_lines_are_the_sources(kernel: Kernel, code: MachineCode) -> None:
    for line in {line for group in code.groups for line in (group.line, *group.calls)}:
        assert line is not None
        assert line.text == (kernel.folder / line.file).read_text().splitlines()[line.number - 1].strip()


def test_edited_sources_show_their_own_lines(tmp_path: Path) -> None:
    bench = Workbench("combine", T=16, d=512, n=512, E=4, K=2)
    path = bench.edit(tmp_path / "sources") / bench.kernel.file
    path.write_text(re.sub(r"\n(?=[^\n]*__global__)", "\n// mine\n", path.read_text(), count=1) + "\n")
    code = machine_code(bench.kernel)
    texts = [line.strip() for line in path.read_text().splitlines()]
    own = [group.line for group in code.groups if group.line and group.line.file == bench.kernel.file]
    assert own and all(texts[line.number - 1] == line.text != "" for line in own)
    assert max(line.number for line in own) > texts.index("// mine")


def test_both_views_have_all(sample: Kernel) -> None:
    code = machine_code(sample)
    for shown in (code.text(width=160), Text(code._repr_html_()).text):
        for word in ("■ wgmma 2", "wgmma<A & B>();", "in up.cu:4 < up.cu:5", ".L_x_1:", "no source line", "10040"):
            assert word in shown
        places = [shown.index(instruction.text) for instruction in code.instructions]
        assert places == sorted(places)


def test_refusals(sample: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: machine_code("up_forward"), "kernel", TypeError)  # type: ignore[arg-type]
    refuses(lambda: machine_code(sample, 3), "lines", TypeError)  # type: ignore[arg-type]
    for lines in ("(", "down.cu"):
        refuses(lambda lines=lines: machine_code(sample, lines), "lines")
    monkeypatch.setattr(Kernel, "disassemble", lambda *_: re.sub(r"\s*//##.*", "", SAMPLE))
    with pytest.raises(ValueError, match="line information"):
        machine_code(sample)


def test_without_line_information(tmp_path: Path) -> None:
    path = tmp_path / "empty.cu"
    path.write_text('extern "C" __global__ void empty(int* x) { *x = 1; }\n')
    with_lines, without = Kernel(str(path), "empty"), Kernel(str(path), "empty")
    options = [option for option in HOPPER.options if option != "-lineinfo"]
    without.__dict__["binary"] = nvrtc.compile(str(path), options)
    code = machine_code(with_lines)
    assert {group.line.file for group in code.groups if group.line} == {"empty.cu"}
    assert [(instruction.address, instruction.text) for instruction in code.instructions] == plain(without.sass)


def test_without_nvdisasm(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nvrtc, "_cuda_homes", list)
    monkeypatch.setattr(nvrtc, "_wheel_folders", list)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        machine_code(kernel)
