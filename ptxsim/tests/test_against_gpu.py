"""300 small PTX programs give on the machine what an H200 made of them (`ptx_programs.npz`); approximations within bounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from ptx_programs import TOTAL, Program, digest_of_inputs, empty_output, programs

import ptxsim

MADE = Path(__file__).with_name("ptx_programs.npz")
PROGRAMS = list(programs())
# PTX ISA 9.7.3: of tanh.approx 2^-11 of the value; of ex2.approx and rcp.approx 2 and 1 units in the last place.
RELATIVE = {"tanh.approx.f32": 2.0**-11, "ex2.approx.ftz.f32": 2.0**-22, "rcp.approx.ftz.f32": 2.0**-23}
SUM = (
    2.0**-13
)  # an inexact wgmma's sums, over the largest: the tensor core truncates addends beneath 25 bits of the largest


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    return dict(np.load(MADE))


def on_machine(program: Program) -> np.ndarray:
    arrays = {"in": program.data.copy(), "out": empty_output(program)}
    arguments: list[Any] = [*arrays.values()]
    if (of := program.map) is not None:
        tensor = as_strided(arrays[of.array].view(np.uint16), of.shape[::-1], (*of.strides[::-1], 2))
        arguments.append(ptxsim.tensor_map(tensor, of.box[::-1], swizzle=128))
    options = {"shared": program.shared_bytes, "cluster": program.cluster}
    report = ptxsim.run(program.text, program.cluster, program.threads, arguments, **options)
    # Of `barriers`, which sleeps until a copy has come: nothing orders two copies into the same bytes.
    slept = "a write, then a write" if program.name.startswith("barriers") else None
    assert not [race for race in report.races if race.kind != slept]
    return arrays["out"][: program.out_bytes]


def test_the_inputs_are_those_of_the_gpu(made: dict[str, np.ndarray]) -> None:
    assert len(made) == TOTAL + 1 and str(made["inputs"]) == digest_of_inputs()
    assert MADE.stat().st_size < 2 << 20


@pytest.mark.parametrize("index", range(TOTAL), ids=[program.name for program in PROGRAMS])
def test_as_on_a_gpu(index: int, made: dict[str, np.ndarray]) -> None:
    program, right = PROGRAMS[index], made[str(index)]
    found = on_machine(program)
    if program.name.endswith("inexact"):
        ours, its = found.view(np.float32), right.view(np.float32)
        assert np.abs(ours - its).max() <= SUM * np.abs(its).max()
        return
    if program.name.startswith("arithmetic"):
        ours, its = (array.view(np.uint64).reshape(program.threads, -1) for array in (found, right))
        for word, opcode in enumerate(program.name.split(": ")[1].split()):
            a, b = (array[:, word].astype(np.uint32).view(np.float32) for array in (ours, its))
            if opcode in RELATIVE:
                np.testing.assert_allclose(a, b, rtol=RELATIVE[opcode], atol=0, err_msg=opcode)
                ours[:, word] = its[:, word]
            elif opcode in ("min.f32", "max.f32"):
                # ptxas drops one of a register with itself, which then keeps its NaN's bits.
                both_nan = np.isnan(a) & np.isnan(b)
                ours[both_nan, word] = its[both_nan, word]
    wrong = np.flatnonzero(found != right)
    assert not len(wrong), f"{len(wrong)} bytes, first {wrong[0]}: {found[wrong[0]]:#x}, GPU {right[wrong[0]]:#x}"
