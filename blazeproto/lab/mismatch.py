"""The old place of what is in `blazeproto.lab.verdict`."""

from blazeproto.runtime.moved import moved

__getattr__ = moved("blazeproto.lab.mismatch", "blazeproto.lab.verdict", {})
