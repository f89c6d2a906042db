"""The table of tiles that launches take, `blazeproto/gemm/tuned.py`, made of the tuner's results.

python -m scripts.bench.tuning           # writes it from results/h200/tune.json
python -m scripts.bench.tuning --check   # exit status 1 where it is not what that file says
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blazeproto.gemm import Sizes, TileConfig, candidates
from blazeproto.gemm.tiles import CHOSEN, PLAIN
from scripts.bench.common import REPOSITORY, RESULTS, read_json
from scripts.command import argument_parser

TABLE = REPOSITORY / "blazeproto" / "gemm" / "tuned.py"
HEAD = '''"""The tiles of up_forward and down_backward_act: the first candidates that are within 1 % of the fastest
in a layer near to theirs, on an H200.

Written by `python -m scripts.bench.tuning` from results/h200/tune.json, which `python -m scripts.bench.products --tune` makes.
"""

from typing import Any

# architecture -> product -> (rows of an expert in the mean, d, n) -> what of the plain tiles (`tiles.PLAIN`) is changed.
# fmt: off
MEASURED: dict[str, dict[str, dict[tuple[float, int, int], dict[str, Any]]]] = {
    "hopper": {
'''
WORTH = 0.99  # of the time: what a later candidate has to save before it is taken instead of an earlier one


def describe(config: TileConfig) -> str:
    """n256 s4 c2 deferred: 256 columns a tile, 4 stages, clusters of 2 CTAs, the epilogue under the next tile's mainloop;
    tickets: CTAs take tiles as they get done; few_rows: nothing past an expert's end is read."""
    words = [name for name in ("deferred", "tickets", "few_rows") if getattr(config, name)]
    return " ".join([f"n{config.tile_n} s{config.stages} c{config.cluster}", *words])


def best(product: str, ms: dict[str, float]) -> TileConfig:
    """The earliest of the candidates that no other one is clearly faster than."""
    timed = {config: ms[describe(config)] for config in candidates(product) if describe(config) in ms}
    return next(config for config, time in timed.items() if min(timed.values()) >= WORTH * time)


def table(record: dict[str, Any]) -> str:
    """The text of the module, of a tuner's ``record``."""
    lines = []
    for product in CHOSEN:
        lines.append(f'        "{product}": {{')
        rows = [(Sizes(**row["cfg"]), row["ms"]) for row in record["rows"] if row["product"] == product]
        for sizes, ms in sorted(rows, key=lambda row: (row[0].d, row[0].n, row[0].rows / row[0].E)):
            plain, config = PLAIN[product], best(product, ms)
            changed = {name: value for name, value in asdict(config).items() if value != getattr(plain, name)}
            changes = ", ".join(f'"{name}": {value}' for name, value in changed.items())
            lines.append(f"            ({round(sizes.rows / sizes.E, 4)}, {sizes.d}, {sizes.n}): {{{changes}}},")
        lines.append("        },")
    return "\n".join([HEAD + lines[0], *lines[1:], "    },", "}", ""])


def main() -> None:
    parser = argument_parser("scripts.bench.tuning", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS / "tune.json", help="default results/h200/tune.json")
    options = parser.parse_args()
    if not options.results.is_file():
        parser.error(f"argument --results: expected the tuner's results, got {options.results}, which is no file")
    text = table(read_json(options.results))
    if options.check:
        sys.exit(f"{TABLE.name} is not what {options.results.name} says" if TABLE.read_text() != text else 0)
    TABLE.write_text(text)
    print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
