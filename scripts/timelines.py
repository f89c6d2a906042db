"""Timelines of the up projection and of a weight gradient for docs/kernels.md: what each warp of one CTA did and when.

    python -m scripts.timelines                                    # on a Hopper GPU
    python -m scripts.timelines --shape 32768,4096,1024,64,4 --out /tmp/timelines

Writes docs/timeline_up.svg, docs/timeline_weight.svg and results/h200/timeline.json; with --out all three there. The default
shape is docs/kernels.md's; ids are uniform at random.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from blazeproto.gemm import Sizes
from scripts.bench.common import REPOSITORY, RESULTS, cfg_of, provenance, stamped, write_json
from scripts.command import argument_parser, need_hopper, positive

PICTURES = {"up_forward": "timeline_up.svg", "up_backward_weight": "timeline_weight.svg"}
DEFAULT = Sizes(T=40960, d=768, n=256, E=128, K=8)


def shape_of(text: str) -> Sizes:
    """T,d,n,E,K."""
    parts = text.split(",")
    if len(parts) != 5 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected five positive numbers T,d,n,E,K, got {text!r}")
    return Sizes(*map(int, parts))


def draw(product: str, shape: Sizes, tiles: int, cta: int, picture: Path) -> dict[str, Any]:
    """A product's row; its timeline is drawn into a file."""
    from blazeproto.lab import Workbench

    timeline = Workbench(product, shape.T, shape.d, shape.n, shape.E, shape.K).timeline(tiles, cta)
    print(timeline, f"\nwrote {timeline.save(picture)}\n")
    shares = {
        role: {what: round(share, 4) for what, share in of_role.items()} for role, of_role in timeline.summary().items()
    }
    row = {"product": product, "cfg": cfg_of(shape), "cta": cta, "tiles": tiles}
    return row | {"cycles": timeline.cycles, "shares": shares}


def main() -> None:
    parser = argument_parser("scripts.timelines", __doc__)
    parser.add_argument("--shape", type=shape_of, default=DEFAULT, metavar="T,d,n,E,K")
    parser.add_argument("--tiles", type=positive, default=3)
    parser.add_argument("--cta", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder for all three files")
    options = parser.parse_args()
    need_hopper()

    pictures, results = (options.out or folder for folder in (REPOSITORY / "docs", RESULTS))
    pictures.mkdir(parents=True, exist_ok=True)
    which = (options.shape, options.tiles, options.cta)
    rows = [stamped(draw, product, *which, pictures / file) for product, file in PICTURES.items()]
    write_json(results / "timeline.json", provenance() | {"rows": rows})
    print(f"wrote {results / 'timeline.json'}")


if __name__ == "__main__":
    main()
