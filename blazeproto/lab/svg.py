"""Drawings by matplotlib, shown as SVG: timelines and layouts.

A drawing with titles is interactive in a notebook: a part's title shows below the drawing while the pointer is on it, the wheel
zooms, dragging moves, and a double click shows all again. A saved file has the titles, which browsers show, but no script.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from blazeproto.runtime.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCH = 72  # units of an SVG that matplotlib writes
INTERACTIVE = """<div><style>
  .blazeproto-drawing path:has(> title):hover {stroke: #000 !important; stroke-width: 1 !important}
</style>
%s<pre style="min-height: 6em; margin: 0; line-height: 1.3; white-space: pre-wrap">
The pointer on a span: what it is. Wheel: zoom. Drag: move. Double click: all again.</pre><script>(box => {
  const svg = box.querySelector("svg"), text = box.querySelector("pre"), {x, y, width, height} = svg.viewBox.baseVal;
  const all = [x, y, width, height];
  let view = all, held = null;
  const show = next => svg.setAttribute("viewBox", (view = next).join(" "));
  const place = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [point.x, point.y];
  };
  svg.classList.add("blazeproto-drawing");
  svg.style.cssText = "max-width: 100%%; height: auto; touch-action: none";
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const [px, py] = place(event), by = Math.min(1.2 ** Math.sign(event.deltaY), all[2] / view[2]);
    show(by * view[2] < all[2] ? [px - by * (px - view[0]), py - by * (py - view[1]), by * view[2], by * view[3]] : all);
  }, {passive: false});
  svg.addEventListener("pointerdown", event => { held = place(event); });
  svg.addEventListener("pointermove", event => {
    if (held && event.buttons) {
      const [px, py] = place(event);
      show([view[0] + held[0] - px, view[1] + held[1] - py, view[2], view[3]]);
    }
    const title = event.target.querySelector && event.target.querySelector(":scope > title");
    if (title) text.textContent = title.textContent;
  });
  svg.addEventListener("dblclick", () => show(all));
})(document.currentScript.parentElement)</script></div>"""


class Picture:
    """A picture: a drawing in a notebook, text in a terminal. titles: of the parts of a group, by its name in the drawing."""

    titles: Mapping[str, Sequence[str]] = {}

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
        made = "".join(file.getvalue().partition("<svg")[1:])
        for group, titles in self.titles.items():
            before, name, after = made.partition(f'<g id="{group}">')
            first, *parts = re.split(r"(<path\b[^>]*)/>", after, maxsplit=len(titles))
            made = (
                before
                + name
                + first
                + "".join(
                    f"{path}><title>{escape(title)}</title></path>{rest}"
                    for path, title, rest in zip(parts[::2], titles, parts[1::2], strict=True)
                )
            )
        return made

    def _repr_html_(self) -> str:
        return INTERACTIVE % self.svg() if self.titles else self.svg()

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file; its path."""
        (file := Path(path)).write_text(self.svg())
        return file


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
