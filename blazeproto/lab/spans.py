"""The old place of what is in `blazeproto.lab.timeline`."""

from blazeproto.runtime.moved import moved

__getattr__ = moved("blazeproto.lab.spans", "blazeproto.lab.timeline", {})
