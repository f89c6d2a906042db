"""A CUDA function without branches, computed by NumPy from the compiler's PTX: what tells right from wrong where there is no GPU.

>>> outputs("... .entry unit(...) { ... mul.f32 %f3, %f1, %f2; st.global.f32 [%rd1], %f3; ret; }", [gate, up])
[gate * up]
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import numpy as np

OPERATIONS = {
    "mov": lambda a: a,
    "neg": np.negative,
    "abs": np.abs,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "ex2": np.exp2,
    "lg2": np.log2,
    "min": np.fmin,
    "max": np.fmax,
    "selp": lambda a, b, which: np.where(which, a, b),
}
BITS = ("mov.b32", "mov.u32", "selp.b32", "selp.u32")  # which take floats as well
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def outputs(ptx: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the kernel ``unit(float, ..., float* out, ...)`` of a PTX text writes to out[0], out[1] and so on.

    inputs: float32 arrays (N,), the kernel's first parameters, each element in a call of its own. NotImplementedError names an
    instruction that is not computed here: one of integers, of memory, or a branch.
    """
    body = ptx.partition(".entry unit(")[2].partition("\n}")[0].partition("{")[2]
    code = re.sub(r"^\s*(//|\.loc|\.reg).*$", "", body, flags=re.MULTILINE)
    values: dict[str, np.ndarray] = {f"[unit_param_{number}]": array for number, array in enumerate(inputs)}
    written: dict[int, np.ndarray] = {}

    def operand(text: str) -> np.ndarray:
        if text.startswith("0f") or text.isdigit():  # a number's bits: in hexadecimal, or 0 and the like
            return np.array(int(text[2:], 16) if text.startswith("0f") else int(text), np.uint32).view(np.float32)
        return values[text]

    for instruction in [" ".join(words) for part in code.split(";") if (words := part.split())]:
        name, _, rest = instruction.partition(" ")
        (base, *modifiers), (first, *others) = name.split("."), rest.split(", ")
        if base in ("cvta", "ret"):  # the address of `out`
            continue
        if base == "st" and modifiers[0] == "global":
            written[int((re.findall(r"\+(\d+)", first) or [0])[0]) // 4] = operand(others[0])
        elif base == "ld" and modifiers[0] == "param":
            values[first] = values.get(others[0], np.float32(np.nan))  # that of `out`, which is no number
        elif base == "setp" and modifiers[-1] == "f32" and modifiers[0] in COMPARISONS:
            values[first] = COMPARISONS[modifiers[0]](*map(operand, others))
        elif base in OPERATIONS and (modifiers[-1] == "f32" or name in BITS) and "sat" not in modifiers:
            with np.errstate(all="ignore"):
                values[first] = OPERATIONS[base](*map(operand, others))
        else:
            raise NotImplementedError(instruction)
    return [np.broadcast_to(written[place], inputs[0].shape) for place in sorted(written)]
