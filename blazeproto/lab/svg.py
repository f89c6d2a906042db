"""A drawing as SVG text: rectangles, lines and words, no script. Timelines and layouts are drawn by it."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def _short(value: float) -> str:
    """With one digit after the point, where it needs one."""
    return f"{value:.1f}".removesuffix(".0")


class Svg:
    """A drawing of so many pixels, on white. Later marks lie over earlier ones."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        size = f'width="{_short(width)}" height="{_short(height)}" viewBox="0 0 {_short(width)} {_short(height)}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="11">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]

    def rectangles(self, boxes: Iterable[tuple[float, float, float, float]], colour: str, title: str = "") -> None:
        """Rectangles of one colour, as one path: (x, y, width, height) of each."""
        path = "".join(f"M{_short(x)} {_short(y)}h{_short(w)}v{_short(h)}h{_short(-w)}z" for x, y, w, h in boxes)
        inside = f"<title>{escape(title)}</title>" if title else ""
        if path:
            self._parts.append(f'<path d="{path}" fill="{colour}">{inside}</path>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str = "#999999", width: float = 1.0) -> None:
        ends = f'x1="{_short(x0)}" y1="{_short(y0)}" x2="{_short(x1)}" y2="{_short(y1)}"'
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="{_short(width)}"/>')

    def text(self, x: float, y: float, words: object, *, anchor: str = "start", colour: str = "#222222") -> None:
        """anchor: which end of the words lies at x: start, middle, end. y: of the baseline."""
        at = f'x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f"<text {at}>{escape(str(words))}</text>")

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


class Picture:
    """What a notebook shows as a drawing and a terminal as text."""

    def svg(self) -> str:
        """The drawing, as the text of an SVG file."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.svg()

    def save(self, path: str | Path) -> Path:
        """Write the drawing to a file; its path."""
        path = Path(path)
        path.write_text(self.svg())
        return path
