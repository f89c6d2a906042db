"""The old name of `ptxsim`."""

from blazeproto.runtime.moved import moved

_HOME_OF = {"Machine": "blazeproto.lab.target", "run": "ptxsim.schedule", "run_together": "ptxsim.together"}
__getattr__ = moved("blazeproto.lab.machine", "ptxsim", _HOME_OF)
