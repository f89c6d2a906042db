"""An interpreter of PTX in NumPy: a Hopper GPU's warps, async proxies and barriers, run from a seed, its races reported.

It knows PTX and no product. `Machine` takes the package's launches (`runtime.target.launches_on`); `run` takes any program, and
`run_together` those of several GPUs.
"""

from blazeproto.lab.machine.machine import Machine
from blazeproto.lab.machine.memory import Memory
from blazeproto.lab.machine.ptx import Program, PtxError
from blazeproto.lab.machine.races import Race
from blazeproto.lab.machine.run import Deadlock, Report, run
from blazeproto.lab.machine.stepper import Stepper
from blazeproto.lab.machine.tensor_map import TensorMap
from blazeproto.lab.machine.together import run_together
from blazeproto.lab.machine.warp import MachineError

__all__ = [
    "Deadlock",
    "Machine",
    "MachineError",
    "Memory",
    "Program",
    "PtxError",
    "Race",
    "Report",
    "Stepper",
    "TensorMap",
    "run",
    "run_together",
]
