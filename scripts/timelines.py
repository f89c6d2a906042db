"""Timelines of the up projection and of a weight gradient for docs/kernels.md: what each warp of one CTA did and when.

    python -m scripts.timelines                         # on a Hopper GPU
    python -m scripts.timelines --out /tmp/timelines

Writes docs/timeline_up.svg, docs/timeline_weight.svg and results/h200/timeline.json; with --out all three there. The default
shape is docs/kernels.md's; ids are uniform at random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blazeproto.gemm import Sizes
from scripts.bench.common import REPOSITORY, RESULTS, cfg_of, provenance, stamped, write_json
from scripts.command import argument_parser, need_kernels

PICTURES = {"up_forward": "timeline_up.svg", "up_backward_weight": "timeline_weight.svg"}
SHAPE = Sizes(T=40960, d=768, n=256, E=128, K=8)
TILES, CTA = 3, 0  # the tiles that are drawn, and whose


def draw(product: str, picture: Path) -> dict[str, Any]:
    """A product's row; its timeline is drawn into a file."""
    from blazeproto.lab import Workbench

    timeline = Workbench(product, SHAPE.T, SHAPE.d, SHAPE.n, SHAPE.E, SHAPE.K).timeline(TILES, CTA)
    print(timeline, f"\nwrote {timeline.save(picture)}\n")
    shares = {
        role: {what: round(share, 4) for what, share in of_role.items()} for role, of_role in timeline.summary().items()
    }
    row = {"product": product, "cfg": cfg_of(SHAPE), "cta": CTA, "tiles": TILES}
    return row | {"cycles": timeline.cycles, "shares": shares}


def main() -> None:
    parser = argument_parser("scripts.timelines", __doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder for all three files")
    options = parser.parse_args()
    need_kernels()

    pictures, results = (options.out or folder for folder in (REPOSITORY / "docs", RESULTS))
    pictures.mkdir(parents=True, exist_ok=True)
    rows = [stamped(draw, product, pictures / file) for product, file in PICTURES.items()]
    write_json(results / "timeline.json", provenance() | {"rows": rows})
    print(f"wrote {results / 'timeline.json'}")


if __name__ == "__main__":
    main()
