"""Train the CPU preset with every router and write the table of final validation losses.

    python -m scripts.lm.compare_routers                     # the table, from the runs that exist
    python -m scripts.lm.compare_routers --train             # first make the runs that are missing, one after the other
    python -m scripts.lm.compare_routers --train top_k hash  # only these

Reads runs/router-NAME/metrics.jsonl, as scripts/train_lm.py writes it, and replaces the table in docs/routers.md. A router
without a run keeps its row. Without any run the page stays as it is, and the exit code is 2. If a run had other settings than the
preset, the page stays too, and the table of these runs is only printed.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path

from blazeproto.router import ROUTERS
from scripts.bench.common import REPOSITORY
from scripts.command import argument_parser, refuse, run_module
from scripts.lm.run_folder import CONFIG, METRICS, SUMMARY, read_config, read_lines
from scripts.lm.settings import PRESETS

PAGE = REPOSITORY / "docs" / "routers.md"
BEGIN, END = "<!-- table -->\n", "<!-- /table -->"


def ended_in(runs: Path) -> dict[str, Path]:
    """The folders of the runs that have ended, which have a summary then, by router."""
    folders = {name: runs / f"router-{name}" for name in ROUTERS}
    return {name: folder for name, folder in folders.items() if (folder / SUMMARY).exists()}


def row_of(name: str, line: dict[str, float], more: float) -> str:
    """A run's last validation. more: its loss over top_k's, NaN where that is unknown."""
    difference = "" if math.isnan(more) else f"{more:+.3f}"
    return f"| `{name}` | {line['val_loss']:.3f} | {difference} | {line['balance']:.2f} | {line['step'] + 1} |"


def table(runs: Path, names: list[str], earlier: str = "") -> str:
    """The rows of the runs that have ended, and those that the ``earlier`` table has of other routers."""
    kept = {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)` \|.*$", earlier, re.MULTILINE)}
    lines = {name: read_lines(folder / METRICS) for name, folder in ended_in(runs).items()}
    last = {name: [line for line in each if "val_loss" in line][-1] for name, each in lines.items()}
    base = {name: float(row.split("|")[2]) for name, row in kept.items()}
    base |= {name: line["val_loss"] for name, line in last.items()}
    top_k = base.get("top_k", math.nan)
    rows = kept | {name: row_of(name, line, line["val_loss"] - top_k) for name, line in last.items()}
    head = [
        "| router | validation loss, nats/byte | against `top_k` | largest load / mean, last step | steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(rows[name] for name in names if name in rows)]) + "\n"


def main() -> int:
    parser = argument_parser("scripts.lm.compare_routers", __doc__)
    parser.add_argument("names", nargs="*", help="routers to train (all)")
    parser.add_argument("--train", action="store_true", help="make the runs that are missing")
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs", help="folder of the runs")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(ROUTERS)):
        parser.error(f"names: expected some of {list(ROUTERS)}, got {unknown}")
    before = ended_in(args.runs)
    for name in [name for name in args.names or ROUTERS if args.train and name not in before]:
        started = (args.runs / f"router-{name}").exists()
        how = ["--resume"] if started else ["--preset", "cpu", "--router", name]
        command = ["scripts.train_lm", "--device", "cpu", "--out", str(args.runs), "--name", f"router-{name}"]
        if code := run_module(*command, *how):
            return code
    ended = ended_in(args.runs)
    if not ended:
        expected = f"expected runs router-NAME that have ended, but {args.runs} has none"
        refuse(f"--runs: {expected}; {PAGE.name} stays as it is")
    cpu = {name: dataclasses.replace(PRESETS["cpu"], router=name) for name in ended}
    others = [name for name, run in ended.items() if read_config(run / CONFIG) != dataclasses.asdict(cpu[name])]
    if others:
        print(table(args.runs, [*ended]))
        why = "its runs have the preset's settings; these have others"
        print(f"{PAGE.name} stays as it is, {why}: {', '.join(others)}")
        return 0
    above, rest = PAGE.read_text().split(BEGIN)
    earlier, below = rest.split(END)
    text = table(args.runs, list(ROUTERS), earlier)
    PAGE.write_text(above + BEGIN + text + END + below)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
