"""Faults put into the sources one at a time: which of them do the tests notice?

    python -m scripts.checks.mutants                      # the faults of tests/mutants.json -> results/cpu/mutants.json
    python -m scripts.checks.mutants --only cuda,named --jobs 2
    python -m scripts.checks.mutants --alive              # once more, those that no test noticed
    python -m scripts.checks.mutants --at blazeproto/gemm/cuda/linear.cu:84      # once more, one of them

A fault changes one line: another comparison, sum, constant or condition. It goes into a copy of the files, where the tests
run that import its file or room, and end at the first that fails. The test of this list is left out, and so are tests of sources'
identities, but for tables: they fail for every change, a right one too. 40 faults were drawn at random from all lines. Faults of
the kind ``named`` are written by hand: some version of the tests did not notice them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from scripts.bench.common import REPOSITORY, now, write_json
from scripts.command import argument_parser, positive, refuse, some_of

LIST = REPOSITORY / "tests" / "mutants.json"
OUT = REPOSITORY / "results" / "cpu" / "mutants.json"
SECONDS = 900  # that the tests of one fault may take
NOT_IDENTITIES = "not up_to_date and not identit"  # of tests' names


MACHINE = "tests/lab/machine"
TESTS = {
    "cuda": (
        *(f"{MACHINE}/test_{name}.py" for name in ("variants", "products", "fp8")),
        "tests/gemm",
        "tests/lab",
        "tests/autograd",
    ),
    "router": ("tests/router", f"{MACHINE}/test_numba_kernels.py", "tests/layer", "tests/properties"),
    "dispatch": ("tests/dispatch", f"{MACHINE}/test_numba_kernels.py", "tests/layer"),
    "distributed": ("tests/distributed", "tests/same_bits", "tests/lm/test_ranks.py"),
    "bench": ("tests/scripts", "tests/test_cost.py"),
    "named": (),
}
"""By a fault's kind: the tests that import its file, quickest first."""


class Mutant(NamedTuple):
    """A line of a file, by its number in the sources that it was drawn from, and what it becomes."""

    kind: str
    file: str
    line: int
    old: str
    new: str
    tests: tuple[str, ...] = ()  # default: its kind's
    same: str = ""  # why the program does the same with it, so that no test can notice it; it is then not run

    @property
    def at(self) -> str:
        return f"{self.file}:{self.line}"

    def applied(self, text: str) -> str:
        """The file's text with the fault. ValueError where the line is gone, or stands several times and not where it was."""
        lines = text.split("\n")
        places = [place for place, line in enumerate(lines) if line.strip() == self.old.strip()]
        place = self.line - 1 if self.line - 1 in places else places[0] if len(places) == 1 else None
        if place is None:
            raise ValueError(f"{self.at}: expected the line {self.old.strip()!r}, got {len(places)} like it")
        lines[place] = lines[place].replace(self.old.strip(), self.new.strip())
        return "\n".join(lines)


def read(path: Path = LIST) -> list[Mutant]:
    return [
        Mutant(**each | {"tests": tuple(each.get("tests", ()))}) for each in json.loads(path.read_text())["mutants"]
    ]


def failing(tests: Iterable[str], folder: Path, jobs: int) -> str:
    """The first of the tests that fails in the checkout there, else how the run ended; "" where all pass."""
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"],
        *["--ignore=tests/scripts/test_mutants.py", "-n", str(jobs)],  # whose list has the lines without faults
        *tests,
    ]
    options: dict[str, Any] = {"cwd": folder, "capture_output": True, "text": True, "timeout": SECONDS}
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, check=False, **options)
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS} s"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return "" if done.returncode == 0 else found[1] if found else f"exit code {done.returncode}"


def noticed(mutant: Mutant, folder: Path, jobs: int) -> str:
    """`failing` with the fault in the checkout there. RuntimeError where that test fails without the fault too."""
    tests = [each for each in mutant.tests or TESTS[mutant.kind] if (folder / each.split("::")[0]).exists()]
    path = folder / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied(before))
    try:
        by = failing([*tests, *([] if "table" in mutant.file else ["-k", NOT_IDENTITIES])], folder, jobs)
    finally:
        path.write_text(before)
    if "::" in by and failing([by], folder, jobs):
        raise RuntimeError(f"{by}: expected a test that passes without the fault of {mutant.at}, got one that fails")
    return by


def place_of(mutant: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that tell one fault from the others, whatever runs it."""
    return mutant["file"], mutant["line"], mutant["new"]


def copied(folder: Path) -> None:
    """The tracked files, as they are here; some tests ask git for them."""
    copy = 'git ls-files -z | tar c --null -T - | tar x -C "$0" && cd "$0" && git init -q && git add -A'
    subprocess.run(["bash", "-o", "pipefail", "-c", copy, str(folder)], cwd=REPOSITORY, check=True)


def main() -> None:
    parser = argument_parser("scripts.checks.mutants", __doc__)
    parser.add_argument("--only", type=some_of(TESTS), default=[*TESTS], help=f"of {', '.join(TESTS)}")
    parser.add_argument("--alive", action="store_true", help="those alone that the last run did not notice")
    parser.add_argument("--at", metavar="FILE:LINE", help="one fault alone, by its place in the list")
    parser.add_argument("--jobs", type=positive, default=2, help="test processes")
    parser.add_argument("--out", type=Path, default=OUT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mutants = [each for each in read() if each.kind in options.only and options.at in (None, each.at)]
    if not mutants:
        refuse(f"--at: expected FILE:LINE of a fault of {LIST.name}, got {options.at}")
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows: dict[Any, dict[str, Any]] = {place_of(row["mutant"]): row for row in known}
    with TemporaryDirectory() as place:
        copied(Path(place))
        for mutant in mutants:
            key = place_of(mutant._asdict())
            if options.alive and rows.get(key, {}).get("noticed_by"):
                continue
            rows[key] = {"mutant": mutant._asdict(), "noticed_by": ""}
            if not mutant.same:  # else it changes nothing, is not run, and has no time
                rows[key] |= {"noticed_by": noticed(mutant, Path(place), options.jobs), "measured": now()}
            by = rows[key]["noticed_by"] or ("the same" if mutant.same else "NOT NOTICED")
            print(f"{by}  {mutant.at}  {mutant.new.strip()}", flush=True)
            write_json(options.out, {"seed": json.loads(LIST.read_text())["seed"], "rows": [*rows.values()]})
    alive = [row for row in rows.values() if not row["noticed_by"]]
    print(f"{len(rows) - len(alive)} of {len(rows)} noticed")


if __name__ == "__main__":
    main()
