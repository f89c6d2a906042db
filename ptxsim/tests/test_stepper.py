"""A launch instruction by instruction: what a lane and shared memory hold meanwhile, and who goes on."""

from collections.abc import Callable

import numpy as np
import pytest

import ptxsim

COUNT = """
extern "C" __global__ void count(float* out, int more) {
    __shared__ int kept[64];
    kept[threadIdx.x] = threadIdx.x + more;
    __syncthreads();
    out[threadIdx.x] = 0.5f * kept[63 - threadIdx.x];
}
"""


def test_registers_of_a_lane() -> None:
    out = np.zeros(64, np.float32)
    stepper = ptxsim.step(COUNT, 1, 64, [out, 7]).until("st.shared")
    (warp,) = [w for w in (0, 1) if "st.shared" in repr(stepper.registers(w)).split("next:")[0]]
    registers = stepper.registers(warp, lane=5)
    assert 32 * warp + 5 + 7 in [value.signed for value in registers.values() if value.written]
    assert "nobody wrote it" in repr(registers["%f1"]) and not registers["%f1"].written
    assert "lane 5" in repr(registers) and "kernel.cu:4" in repr(registers)
    data, written = stepper.shared(0, 256)
    assert written.view(np.uint32).astype(bool).sum() == 32
    assert (data.view(np.int32)[32 * warp : 32 * warp + 32] == 32 * warp + np.arange(32) + 7).all()
    stepper.until("st.global")
    values = [value.number for value in stepper.registers(0, 0).values() if value.written]
    values += [value.number for value in stepper.registers(1, 31).values() if value.written]
    assert 35.0 in values or 3.5 in values
    assert stepper.finish().steps and (out == (70 - np.arange(64)) / 2).all()


def test_one_warp_alone_goes_as_far_as_its_barrier() -> None:
    stepper = ptxsim.step(COUNT, 2, 64, [np.zeros(64, np.float32), 0])
    stepper.step(1000, warp=1)
    assert stepper.next(1).opcode.startswith(("bar", "barrier")) and "waits" in repr(stepper)
    assert stepper.next(0).number < stepper.next(1).number
    stepper.step(1000)
    assert stepper.done


def test_the_same_seed_gives_the_same_run_in_steps_or_at_once() -> None:
    one, two = np.zeros(64, np.float32), np.zeros(64, np.float32)
    stepper = ptxsim.step(COUNT, 3, 64, [one, 1], seed=3)
    while not stepper.step().done:
        pass
    assert stepper.report.steps == ptxsim.run(COUNT, 3, 64, [two, 1], seed=3).steps and (one == two).all()


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda stepper: stepper.registers(2), ValueError, "warp: expected 0 to 1, got 2"),
        (lambda stepper: stepper.registers(0, 32), ValueError, "lane: expected 0 to 31, got 32"),
        (lambda stepper: stepper.barriers(1), ValueError, "cta: expected 0 to 0"),
        (lambda stepper: stepper.shared(0, 8192), ValueError, "expected bytes below 256"),
        (lambda stepper: stepper.step(0), ValueError, "count: expected at least 1"),
        (lambda stepper: stepper.matrix(["nobody"]), KeyError, "nobody"),
        (lambda stepper: stepper.until("wgmma"), RuntimeError, "text: expected an instruction that still runs"),
    ],
)
def test_what_there_is_not(ask: Callable[[ptxsim.Stepper], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ask(ptxsim.step(COUNT, 1, 64, [np.zeros(64, np.float32), 0]))


def states(stepper: ptxsim.Stepper, out: np.ndarray) -> tuple[object, ...]:
    return repr(stepper), out.copy().tolist(), [repr(stepper.registers(warp, 3)) for warp in (0, 1)]


def test_back_is_as_it_was() -> None:
    """Registers, shared memory, arrays and the schedule, and forward again the same way."""
    out = np.zeros(128, np.float32)
    stepper = ptxsim.step(COUNT, 2, 64, [out, 7], seed=5)
    stepper.until("st.shared").step(3, warp=1).step(2)
    before, memory = states(stepper, out), stepper.shared(0, 256)
    stepper.step(40)
    after = states(stepper, out)
    assert out.any() and after != before
    assert states(stepper.back(40), out) == before and not out.any()
    assert all((a == b).all() for a, b in zip(stepper.shared(0, 256), memory, strict=True))
    assert states(stepper.step(40), out) == after
    stepper.finish()
    assert stepper.done and (out[:64] == (70 - np.arange(64)) / 2).all()
    assert states(stepper.back(40), out) == before and not stepper.done
    with pytest.raises(ValueError, match="count: expected at most"):
        stepper.back(1000)


def test_back_counts_what_ran_alone() -> None:
    stepper = ptxsim.step(COUNT, 1, 64, [np.zeros(64, np.float32), 0])
    before = repr(stepper.step(2, warp=1))
    stepper.step(1000, warp=1).step(5, warp=1)  # as far as its barrier, and no further
    ran = int(repr(stepper).split(" instructions")[0].split()[-1])
    assert ran < 1000 and repr(stepper.back(ran - 2)) == before and repr(stepper.back(2)) != before
