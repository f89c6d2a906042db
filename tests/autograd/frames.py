"""How deep a launch lies: the Python frames of this package on the stack when the driver is called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import blazeproto

PACKAGE = Path(blazeproto.__file__).parent
MOST_FRAMES = 7


def frames_here() -> list[FrameType]:
    """Those of this package, outermost first."""
    frame, mine = sys._getframe(1), []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            mine.append(frame)
        frame = frame.f_back
    return mine[::-1]


def names_of(frames: list[FrameType]) -> list[str]:
    return [f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}" for frame in frames]


def kernel_of(frames: list[FrameType]) -> tuple[str, str]:
    """The room and the name of what is launched: a Numba kernel's, an entry's of reduce.cu, or else the launching function's."""
    for frame in reversed(frames):
        path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
        if path.parts[0] == "runtime":
            continue
        inner = frames[frames.index(frame) + 1]
        numba = inner.f_locals.get("self")
        name = getattr(numba, "name", None) or frame.f_locals.get("entry") or f"{path.stem}.{frame.f_code.co_name}"
        return path.parts[0], str(name)
    raise AssertionError(f"launched from outside of every room: {names_of(frames)}")
