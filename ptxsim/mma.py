"""mma.sync: a warp multiplies matrices that lie in its registers (PTX ISA §9.7.15.5.14).

    A (16, 16) bf16, 4 registers a lane      B (16, 8) bf16, 2      C, D (16, 8) fp32, 4

A register of two bf16 holds neighbours of the reduction, the first in its low half. An accumulator is a part of wgmma's.
"""

import numpy as np

from ptxsim import matrices
from ptxsim.operands import UINT16, UINT32, fetch, registers_of
from ptxsim.ptx import Operand, Statement, Vector, require
from ptxsim.warp import LANES, Compiled, Run, Warp

M, N, K = 16, 8, 16
_register, _lane, _half = np.ogrid[:4, :LANES, :2]
A_PLACES = (_lane // 4 + 8 * (_register % 2)) * K + _lane % 4 * 2 + _half + 8 * (_register // 2)  # §9.7.15.5.8
B_PLACES = (_lane // 4 * K + _lane % 4 * 2 + _half + 8 * _register)[:2]  # of B^T
C_PLACES = ((_lane // 4 + 8 * (_register // 2)) * N + _lane % 4 * 2 + _register % 2)[:, :, 0]


def mma(instruction: Statement, step: Compiled) -> Run:
    """m16n8k16.row.col.f32.bf16.bf16.f32: D = A B + C, summed as `matrices.multiply` does."""
    operands = instruction.operands
    require(
        [isinstance(one, Vector) and len(one.parts) for one in operands] == [4, 4, 2, 4],
        "expected 4, 4, 2, 4 registers",
    )
    d, *read = map(registers_of, operands)
    gets = [
        [fetch(part, dtype) for part in _parts(one)]
        for one, dtype in zip(operands[1:], (UINT32, UINT32, np.dtype(np.float32)), strict=True)
    ]

    def matrix(warp: Warp, which: int, places: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """An operand, and which elements of it nobody wrote."""
        values = np.array([get(warp) for get in gets[which]])
        lost = [np.broadcast_to(warp.unwritten_among((one,)), LANES) for one in read[which]]
        missing: np.ndarray = np.stack(lost)
        if places.ndim == 3:
            values, missing = values.view(UINT16).reshape(places.shape), np.repeat(missing[:, :, None], 2, axis=2)
        order = places.ravel().argsort()
        return values.ravel()[order].reshape(-1, columns), missing.ravel()[order].reshape(-1, columns)

    def run(warp: Warp, running: np.ndarray | None) -> None:
        step.refuse(warp, ~warp.mask(running), "expected all 32 lanes")
        (a, no_a), (b, no_b) = matrix(warp, 0, A_PLACES, K), matrix(warp, 1, B_PLACES, K)
        c, no_c = matrix(warp, 2, C_PLACES, N)
        result = matrices.multiply(a, b, c)[:, :N]
        missing = no_c | no_a.any(axis=1, keepdims=True) | no_b.any(axis=1, keepdims=True).T
        for register, values, lost in zip(d, result.take(C_PLACES), missing.take(C_PLACES), strict=True):
            warp.write(register, values.view(UINT32), running, lost)

    return run


def _parts(operand: Operand) -> tuple[Operand, ...]:
    assert isinstance(operand, Vector)
    return tuple(operand.parts)


TABLE = {"mma": mma}
