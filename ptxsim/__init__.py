"""An interpreter of PTX in NumPy: kernels for Hopper and older GPUs run without a GPU, races are reported by source line.

    report = ptxsim.run("kernel.cu", grid=2, block=64, arguments=[x, out, len(x)])    # NumPy arrays, written in place
    report.races

From a shell: ``python -m ptxsim kernel.cu --grid 2 --block 64 ...``.
"""

from ptxsim.arrays import Arrays
from ptxsim.maps import TensorMap
from ptxsim.memory import Memory
from ptxsim.nvrtc import Binary, CompileError, compile
from ptxsim.programs import run, run_together, step, tensor_map, unwritten
from ptxsim.ptx import Program, PtxError
from ptxsim.races import Race
from ptxsim.schedule import Deadlock, Report
from ptxsim.stepper import Stepper
from ptxsim.warp import MachineError

__version__ = "0.1.0"
__all__ = [
    "Arrays",
    "Binary",
    "CompileError",
    "Deadlock",
    "MachineError",
    "Memory",
    "Program",
    "PtxError",
    "Race",
    "Report",
    "Stepper",
    "TensorMap",
    "compile",
    "run",
    "run_together",
    "step",
    "tensor_map",
    "unwritten",
]
