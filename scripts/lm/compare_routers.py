"""Train the CPU preset with every router and write the table of final validation losses.

    python -m scripts.lm.compare_routers                     # the table, from the runs that exist
    python -m scripts.lm.compare_routers --train             # first make the runs that are missing, one after the other
    python -m scripts.lm.compare_routers --train top_k hash  # only these

Reads runs/router-NAME/metrics.jsonl, as scripts/train_lm.py writes it, and replaces the table in docs/routers.md. A router
without a run keeps its row. Without any run the page stays as it is, and the exit code is 2. If a run had other settings than the
preset, such as --steps, the page stays too, and the table of these runs is only printed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

from blazeproto.router import ROUTERS
from scripts.command import argument_parser, positive, refuse, run_module
from scripts.lm.run_folder import read_config
from scripts.lm.settings import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "routers.md"
BEGIN, END = "<!-- table -->\n", "<!-- /table -->"


def run_folder(runs: Path, name: str) -> Path:
    return runs / f"router-{name}"


def read_run(folder: Path) -> dict[str, float] | None:
    """The last validation loss and balance of a run, and its steps; None of one that has not ended."""
    if not (folder / "summary.json").exists():  # which a run writes last
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "val_loss" in row][-1]
    return {"val_loss": last["val_loss"], "balance": last["balance"], "steps": last["step"] + 1}


def is_preset(folder: Path, name: str) -> bool:
    """Whether a run had the settings of the CPU preset, but for its router."""
    config = read_config(folder / "config.json")
    return bool(config == dataclasses.asdict(dataclasses.replace(PRESETS["cpu"], router=name)))


def table(runs: Path, names: list[str], earlier: str = "") -> str:
    """The rows of the runs that have ended, and those that the ``earlier`` table has of other routers."""
    lines = [
        "| router | validation loss, nats/byte | against `top_k` | largest load / mean, last step | steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    kept = {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)` \|.*$", earlier, re.MULTILINE)}
    found = {name: run for name in names if (run := read_run(run_folder(runs, name)))}
    if "top_k" in found:
        base: float | None = found["top_k"]["val_loss"]
    else:
        base = float(kept["top_k"].split("|")[2]) if "top_k" in kept else None
    for name in names:
        if run := found.get(name):
            difference = "" if base is None else f"{run['val_loss'] - base:+.3f}"
            lines.append(f"| `{name}` | {run['val_loss']:.3f} | {difference} | {run['balance']:.2f} | {run['steps']} |")
        elif name in kept:
            lines.append(kept[name])
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argument_parser("scripts.lm.compare_routers", __doc__)
    parser.add_argument("names", nargs="*", help="routers to train (all)")
    parser.add_argument("--train", action="store_true", help="make the runs that are missing")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of the runs")
    parser.add_argument("--steps", type=positive, help="of each run (the preset's)")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(ROUTERS)):
        parser.error(f"names: expected some of {list(ROUTERS)}, got {unknown}")

    for name in args.names or ROUTERS:
        if not args.train or read_run(run_folder(args.runs, name)):
            continue
        command = ["scripts.train_lm", "--device", "cpu", "--out", str(args.runs), "--name", f"router-{name}"]
        if run_folder(args.runs, name).exists():
            command += ["--resume"]  # an interrupted one
        else:
            command += ["--preset", "cpu", "--router", name]
            command += ["--steps", str(args.steps)] if args.steps else []
        if code := run_module(*command):
            return code

    ended = [name for name in ROUTERS if read_run(run_folder(args.runs, name))]
    if not ended:
        refuse(
            f"--runs: expected runs router-NAME that have ended, but {args.runs} has none; {PAGE.name} stays as it is"
        )
    if others := [name for name in ended if not is_preset(run_folder(args.runs, name), name)]:
        print(table(args.runs, ended))
        print(
            f"{PAGE.name} stays as it is, its runs have the preset's settings; these have others: {', '.join(others)}"
        )
        return 0
    before, rest = PAGE.read_text().split(BEGIN)
    earlier, after = rest.split(END)
    text = table(args.runs, list(ROUTERS), earlier)
    PAGE.write_text(before + BEGIN + text + END + after)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
