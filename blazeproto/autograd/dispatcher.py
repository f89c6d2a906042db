"""The old place of `mlp.dispatched_mlp` and of what is in `blazeproto.autograd.ranks`."""

from blazeproto.runtime.moved import moved

_HOME_OF = {"dispatched_mlp": "blazeproto.autograd.mlp"}
__getattr__ = moved("blazeproto.autograd.dispatcher", "blazeproto.autograd.ranks", _HOME_OF)
