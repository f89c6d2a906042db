"""The faults to find, one a rung. Look at what a check reports before you read on."""

from __future__ import annotations

from rung import Rung
from rungs import RUNGS

LAST = (
    "        __syncthreads();                      // and all threads' copies; and all warps have multiplied step - 1\n"
)
MULTIPLY = "        multiply(sums, stage, stage + A_BYTES);\n"
FENCE = (
    "            fence_proxy_async();  // cp.async wrote through the generic proxy, wgmma reads through the async one\n"
)
FAULTS = {
    "tiles": {"        __syncthreads();  // all warps have read them\n": ""},
    "tensor_cores": {"row + 16 * i + 8 * h": "row + 16 * i + 4 * h"},
    "ring": {LAST: "", MULTIPLY: "        __syncthreads();\n" + MULTIPLY},
    "tma": {"full_at(step), STAGE_BYTES)": "full_at(step), A_BYTES)"},
    "specialised": {"threadIdx.x % 32 == 0;": "threadIdx.x % WARPGROUP == 0;", "CONSUMERS * 4);": "CONSUMERS);"},
    "grouped": {FENCE: ""},
}
"""By a rung's name: the right text, and the wrong one in its place."""


def faulty(name: str) -> Rung:
    """The rung with its fault."""
    return RUNGS[name].edited(FAULTS[name])
