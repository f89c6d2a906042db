"""Drawings by matplotlib, shown as SVG: timelines and layouts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from blazeproto.runtime.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCH = 72  # units of an SVG that matplotlib writes


class Picture:
    """A picture: a drawing in a notebook, text in a terminal."""

    def figure(self) -> Figure:
        """The drawing, which belongs to no window."""
        raise NotImplementedError

    def svg(self) -> str:
        """The drawing, as the text of an SVG file: the same each time, without a script, its words as text."""
        need("matplotlib")
        from matplotlib import rc_context

        file = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "blazeproto"}):
            self.figure().savefig(file, format="svg", metadata={"Date": None})
        _, begin, rest = file.getvalue().partition("<svg")
        return begin + rest

    def _repr_html_(self) -> str:
        return self.svg()

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file; its path."""
        path = Path(path)
        path.write_text(self.svg())
        return path


def blank(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure of this many SVG units, and its axes, without a frame. A line's place in y is its number, from above."""
    need("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure((width / INCH, height / INCH), layout="constrained")
    ax = figure.subplots()
    ax.set_title(title, loc="left", family="monospace", size=9, pad=14)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.invert_yaxis()
    return figure, ax
