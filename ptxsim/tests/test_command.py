"""``python -m ptxsim``: the README's example, arguments, what it prints of errors, steps; and the README's Python."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptxsim
from ptxsim.__main__ import argument, main

README = (Path(__file__).parents[1] / "README.md").read_text()
SOURCE, PRINTED, PYTHON = (
    re.search(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]
    for language in ("cpp", "text", "python")
)
COMMAND = re.search(r"^    python (-m ptxsim sums\.cu .*)$", README, re.MULTILINE)[1]  # type: ignore[index]
LAUNCH = ("--grid", "2", "--block", "128")

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC is not on macOS")


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    (tmp_path / "sums.cu").write_text(SOURCE)
    return str(tmp_path / "sums.cu")


def sound(kernel: str) -> None:
    """Puts the barrier in."""
    Path(kernel).write_text(SOURCE.replace("// __syncthreads() is missing here.", "__syncthreads();"))


def plain(text: str) -> str:
    """Without what another release of NVRTC makes otherwise: counts of instructions, and types without a sign."""
    return re.sub(r"(?<=\.)[bus](?=32)", "b", re.sub(r"\d+(?= warp instructions)", "N", text))


def test_the_example_of_the_readme(kernel: str) -> None:
    command = [sys.executable, *(word.strip("'") for word in COMMAND.split())]
    done = subprocess.run(command, cwd=Path(kernel).parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "") and plain(done.stdout) == plain(PRINTED)


def test_the_python_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PYTHON, {})
    assert "saxpy, seed 0: running" in capsys.readouterr().out


def test_a_right_kernel_gives_its_sums(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    sound(kernel)
    assert main([kernel, *LAUNCH, "--runs", "2", "int32[256]=arange", "int32[2]"]) == 0
    said = capsys.readouterr().out
    assert [f"seed {seed}" in said for seed in range(3)] == [True, True, False]
    assert said.endswith("argument 1: [ 8128 24512]\n") and said.count("argument 1") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["int32[250]=arange", "int32[2]"], "out of bounds: address .* beyond the end of argument 0, int32"),
        (["int32[256]", "int32[2]"], "it stores what nobody wrote"),
        (["int32[256]=1", "int32[2]", "--most", "10"], "more than 10 instructions"),
    ],
)
def test_errors_are_told_with_their_lines(
    kernel: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sound(kernel)
    assert main([kernel, *LAUNCH, *arguments]) == 1
    told = capsys.readouterr().out
    assert re.search(said, told) and re.search(r"sums\.cu:\d+.*\n +\d+ \| \w", told) and "argument 1:" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["int33[4]", "int32[2]"], "ARGUMENT: expected a number, .* got 'int33"),
        (["nowhere.npy", "int32[2]"], "ARGUMENT: expected .* got 'nowhere.npy'"),
        (["int32[2]"], "arguments: expected 2 for sums, got 1"),
        (["float32[256]", "int32[2]"], "argument 0 .*expected an array of int"),
        (["--entry", "some", "int32[256]", "int32[2]"], "expected one of sums, got 'some'"),
        (["--option=-DWRONG=(", "--option=--nonsense", "1", "1"], "nonsense"),
    ],
)
def test_wrong_arguments_are_refused(
    kernel: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([kernel, *LAUNCH, *arguments]) == 2
    told = capsys.readouterr()
    assert re.search(said, told.err) and not told.out


def test_arguments(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    assert [argument(text) for text in ("64", "-1", "0x10", "2.5", "1e3")] == [64, -1, 16, 2.5, 1000.0]
    assert isinstance(argument("64"), int) and isinstance(argument("64.0"), float)
    assert argument(str(tmp_path / "x.npy")).tolist() == [0, 1, 2]
    assert argument("int8[2,3]=arange").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert argument("float32[2]=1.5").tolist() == [1.5, 1.5] and argument("uint16[1]=0x3f80").tolist() == [0x3F80]
    for kind in ("float64", "int32"):
        values = argument(f"{kind}[1000]=random")
        assert values.dtype == kind and len(set(values.tolist())) > 50 and (values >= 0).all()
    assert argument("float32[8]").array.shape == (8,)


def test_steps(kernel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(
        ["until st.shared", "registers 0 3", "", "shared 0 8", "nonsense", "step nonsense", "registers 9", "quit"]
    )
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main([kernel, *LAUNCH, "--step", "int32[256]=arange", "int32[2]"]) == 0
    told = capsys.readouterr().out
    assert "running, 0 instructions" in told and "lane 3" in told and "uint8" in told
    assert "expected one of step, until" in told and "count: expected an int, got str" in told
    assert "warp: expected 0 to 3, got 9" in told and list(lines) == []


@pytest.mark.parametrize(("what", "text"), [("ptx", ".visible .entry sums"), ("sass", ".text.sums")])
def test_what_a_kernel_is_compiled_to(kernel: str, what: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "sass":
        try:
            _ = ptxsim.compile(SOURCE).sass
        except FileNotFoundError:
            pytest.skip("needs nvdisasm")
    assert main([kernel, "--show", what]) == 0 and text in capsys.readouterr().out


def test_what_the_compiler_refuses_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ptxsim.CompileError, match=r"kernel\.cu\(2\): error"):
        ptxsim.compile('extern "C" __global__ void f() {\nint x = ; }')
    wrong = 'extern "C" __global__ void f() {\nasm volatile("nonsense.u32;"); }'
    with pytest.raises(ptxsim.CompileError, match=r"ptx input, line \d+ \(kernel\.cu:2: nonsense\.u32;\)"):
        ptxsim.compile(wrong)
    with pytest.raises(ptxsim.CompileError, match="nvidia-cuda-runtime-cu12"):
        ptxsim.compile('#include <nowhere.h>\nextern "C" __global__ void f() {}')
    (tmp_path / "mine.h").write_text("#define N 4\n")
    (tmp_path / "k.cu").write_text('#include "mine.h"\nextern "C" __global__ void f(int* x) { *x = N + M; }')
    ptxsim.run(tmp_path / "k.cu", 1, 1, [x := np.zeros(1, np.int32)], options=["-DM=3"])
    (tmp_path / "mine.h").write_text("#define N 5\n")
    ptxsim.run(str(tmp_path / "k.cu"), 1, 1, [y := np.zeros(1, np.int32)], options=["-DM=3"])
    assert (x[0], y[0]) == (7, 8)


def test_memory_that_nobody_wrote() -> None:
    source = 'extern "C" __global__ void f(const int* x, int* y) { if (*x) *y = *x; }'
    with pytest.raises(ptxsim.MachineError, match=r"kernel\.cu:1: .*nobody wrote"):
        ptxsim.run(source, 1, 1, [ptxsim.unwritten(np.zeros(1, np.int32)), np.zeros(1, np.int32)])
    ptxsim.run(source, 1, 1, [np.ones(1, np.int32), ptxsim.unwritten(y := np.zeros(1, np.int32))])
    assert y[0] == 1
    with pytest.raises(TypeError, match="array: expected a NumPy array, got list"):
        ptxsim.unwritten([1])  # type: ignore[arg-type]
    fixed = np.zeros(1)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="array: expected one that may be written"):
        ptxsim.unwritten(fixed)
