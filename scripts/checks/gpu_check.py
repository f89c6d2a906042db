"""The one entry point on a Hopper GPU: tests, benchmarks, training, sanitizers and fuzzing, each in a process with a
time limit.

    python -m scripts.checks.gpu_check --steps tests,layer,products --minutes 9 --out /tmp/out
    python -m scripts.checks.gpu_check --full --steps layer        # the benchmarks' long forms, which write the committed results

By default all kernels, tests, short benchmarks and fuzzing; training, sanitizers and the rest by --steps.

A step that hangs is killed at its limit, and the next one starts. Writes results/GPU/check.json: for each step its command,
outcome, seconds, last lines and failed tests, when and on which GPU it ran, versions, and a hash of the package's sources. An
outcome is "ok", "skipped: ..." or "failed: ..."; the exit code is 1 unless all are ok. A benchmark whose own bounds fail is ok,
and its step names them. With --out, results and the log go there too. Without a Hopper GPU it does nothing. Steps that are not
asked for stay in check.json as they were.
"""

import glob
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts.bench.common import REPOSITORY, RESULTS, folder_of, now, provenance, write_json
from scripts.command import argument_parser, some_of


@dataclass(frozen=True)
class Step:
    """A command, its long form, and how many minutes each may take."""

    command: str
    minutes: float
    full: str = ""
    full_minutes: float = 0.0
    gpus: int = 1  # that it sees


# A kernel that never ends blocks its test inside a CUDA call, where only ending the process helps.
_TIMEOUT = " --timeout=120 --timeout-method=thread" if importlib.util.find_spec("pytest_timeout") else ""
# Most of a test is compiling and its oracle.
_WORKERS = (os.cpu_count() or 4) * 3 // 4
_PARALLEL = f" -n {min(16, _WORKERS)} --dist worksteal" if importlib.util.find_spec("xdist") else ""
_PYTEST = f"python -m pytest -v --no-header --tb=short --durations=10 --disable-warnings -p no:cacheprovider{_TIMEOUT}{_PARALLEL}"

LAST_LINES = 60  # of a step's output that are printed and kept in check.json
STEPS = {
    "kernels": Step("python -m blazeproto kernels", 2),  # into the cache, before many processes want them
    "tests": Step(f"{_PYTEST} -x -m 'gpu and not full'", 9, f"{_PYTEST} -m gpu", 9),
    "tests_on_two": Step(f"{_PYTEST}{_PARALLEL and f' -n {min(32, _WORKERS)}'} -m gpu", 9.5, gpus=2),
    "batch": Step(
        "python -m scripts.checks.batch_invariance --cases 500 --seconds 300 --out results/h200/batch_invariance.json",
        6,
    ),
    "layer": Step(
        "python -m scripts.bench.layer --quick", 3, "python -m scripts.bench.layer --resume --time-budget 255", 4.6
    ),
    "module": Step(
        "python -m scripts.bench.module --quick", 4, "python -m scripts.bench.module --resume --time-budget 480", 9.5
    ),
    "router": Step("python -m scripts.bench.router --quick", 2, "python -m scripts.bench.router", 3),
    "blocksparse": Step("python -m scripts.bench.blocksparse --quick", 3, "python -m scripts.bench.blocksparse", 6),
    "attention_tiles": Step(
        "python -m scripts.bench.attention_tiles --quick", 2, "python -m scripts.bench.attention_tiles", 3
    ),
    "clock": Step("python -m scripts.bench.clock --quick", 2, "python -m scripts.bench.clock --time-budget 200", 4),
    "distributed": Step(
        "python -m torch.distributed.run --nproc-per-node 2 -m scripts.bench.distributed --quick",
        3,
        "python -m torch.distributed.run --nproc-per-node 2 -m scripts.bench.distributed --resume --time-budget 360",
        9.5,
        gpus=2,
    ),
    "expert_parallel": Step(
        "python -m torch.distributed.run --nproc-per-node 2 -m scripts.bench.expert_parallel --quick",
        2,
        "python -m torch.distributed.run --nproc-per-node 2 -m scripts.bench.expert_parallel --layers qwen3,mixtral",
        5,
        gpus=2,
    ),
    "lora": Step("python -m scripts.bench.lora --quick", 3, "python -m scripts.bench.lora", 4),
    "stored": Step("python -m scripts.bench.stored", 6),
    "products": Step(
        "python -m scripts.bench.products --quick", 2, "python -m scripts.bench.products --time-budget 75", 1.8
    ),
    "tune": Step("python -m scripts.bench.products --tune --time-budget 330", 6.5),
    "dispatch": Step("python -m scripts.bench.dispatch", 4),
    "rounding": Step("python -m scripts.bench.rounding --quick", 4, "python -m scripts.bench.rounding", 8),
    "ladder": Step("python -m scripts.bench.ladder", 1),
    "few_tokens": Step("python -m scripts.bench.few_tokens --quick", 1, "python -m scripts.bench.few_tokens", 1),
    "paper": Step("python -m scripts.bench.paper all --time-budget 480", 9.5),
    "models": Step("python -m scripts.bench.models all --time-budget 480", 9.5),
    "runs": Step("python -m scripts.lm.compare_runs all --time-budget 480", 9.5),
    "notebooks": Step("python -m scripts.checks.notebooks", 3),
    "integrations": Step("python -m scripts.bench.integrations", 5),
    "train": Step("python -m scripts.train_lm", 8),
    "curves": Step("python -m scripts.lm.compare_backends --train", 4),
    **{  # at once, on one GPU: most of their time the driver compiles kernels
        f"fuzz_ampere_{first}": Step(
            f"python -m scripts.checks.fuzz --backend ampere --seed {first} --runs 250 --seconds 120", 6
        )
        for first in range(0, 1000, 250)
    },
    "batch_ampere": Step(
        "python -m scripts.checks.batch_invariance --backend ampere --cases 200 --out results/h200/batch_invariance_ampere.json",
        4,
    ),
    "ampere": Step("python -m scripts.bench.ampere", 4),
    "fuzz": Step("python -m scripts.checks.fuzz --runs 1000 --seconds 300", 8),
}
SANITIZERS = {"memcheck": 9.5, "synccheck": 9.5, "racecheck": 9.5, "initcheck": 2.5}  # minutes
STEPS |= {
    tool: Step(f"compute-sanitizer --tool {tool} --error-exitcode 99 python -m scripts.checks.sanitize_target", minutes)
    for tool, minutes in SANITIZERS.items()
}
GROUPS = {"sanitizer": [*SANITIZERS], "fuzz_ampere": [name for name in STEPS if name.startswith("fuzz_ampere")]}
DEFAULT_STEPS = "kernels,tests,module,router,layer,products,dispatch,fuzz"


FINDINGS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
FAILED = re.compile(r"(?:FAILED|ERROR) (tests/.+?)(?: - |\s*$)")  # a line of `pytest -v` with xdist, or of its summary
TESTS = re.compile(r"\d+ (passed|failed|skipped).* in [\d.]+s")


def sanitizer_path() -> str:
    """compute-sanitizer, which a CUDA toolkit need not put on the PATH."""
    places = glob.glob("/usr/local/cuda*/bin/compute-sanitizer") + glob.glob(
        "/opt/nvidia/**/compute-sanitizer", recursive=True
    )
    return shutil.which("compute-sanitizer") or next(iter(sorted(places)), "compute-sanitizer")


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES would have them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True).stdout
    return [str(index) for index, _ in enumerate(filter(None, listed.splitlines()))]


def ended(command: str, gpus: list[str], limit: float, sink: IO[bytes]) -> str:
    """The outcome of a command in a process group of its own, which sees these GPUs and is killed after ``limit`` seconds."""
    programs = {"python": sys.executable, "compute-sanitizer": sanitizer_path()}
    words = [programs.get(word, word) for word in shlex.split(command)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    if "compute-sanitizer" in words[0]:  # allocations one by one, so that it sees the bounds of each tensor
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    output: dict[str, Any] = {"stdout": sink, "stderr": subprocess.STDOUT, "start_new_session": True}
    try:
        process = subprocess.Popen(words, cwd=REPOSITORY, env=environment, **output)
        code = process.wait(timeout=limit)
        return "ok" if code == 0 else f"failed: exit code {code}"
    except OSError as error:
        return f"failed: not started: {error}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"failed: killed after {limit:.0f} s"


def run(name: str, full: bool, seconds_left: float, log: Path) -> dict[str, Any]:
    """The record of a step, run on as many GPUs as it needs, for no longer than its limit or what is left."""
    step, gpus = STEPS[name], visible_gpus()
    if len(gpus) < step.gpus:
        return {"outcome": f"skipped: needs {step.gpus} GPUs, there are {len(gpus)}"}
    command, minutes = (step.full, step.full_minutes) if full and step.full else (step.command, step.minutes)
    limit, begin = min(60 * minutes, seconds_left), time.monotonic()
    print(f"--- {name}: {command} (at most {limit:.0f} s)", flush=True)
    with log.open("a+b") as sink:
        sink.write(f"\n--- {name}: {command}\n".encode())
        sink.flush()
        start = sink.tell()
        outcome = ended(command, gpus[: step.gpus], limit, sink)
        sink.seek(start)
        text = sink.read().decode(errors="replace").replace(f"{REPOSITORY}/", "")
    lines = text.replace(f"{sysconfig.get_path('purelib')}/", "").splitlines()
    last = [line[:1000] for line in lines[-LAST_LINES:]]
    print("\n".join(last), flush=True)
    record = {"command": command, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1), "last_lines": last}
    for line in lines:
        if found := FINDINGS.search(line):
            record["findings"] = int(found[1])
        if TESTS.search(line):
            record["tests"] = line.strip("= ")
    if failed := {found[1] for line in lines if (found := FAILED.search(line))}:
        record["failed_tests"] = sorted(failed)
    if failing := [line.removeprefix("FAILS ").strip() for line in lines if line.startswith("FAILS ")]:
        record["bounds_that_fail"] = failing  # of a benchmark
    print(f"--- {name}: {outcome}, {record['seconds']} s", flush=True)
    return record


def has_no_gpu() -> int:
    """0, or the exit code of what refuses. In a process of its own, which takes its memory on the GPU with it."""
    probe = [sys.executable, "-c", "from scripts.command import need_kernels; need_kernels()"]
    return subprocess.run(probe, cwd=REPOSITORY, check=False).returncode


def main() -> None:
    parser = argument_parser("scripts.checks.gpu_check", __doc__)
    known = [*STEPS, *GROUPS]
    parser.add_argument("--steps", type=some_of(known), default=DEFAULT_STEPS, help=f"of {', '.join(known)}")
    parser.add_argument("--full", action="store_true", help="long forms, which write the results that are committed")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument("--out", type=Path, default=None, help="copy the results and the log here")
    options = parser.parse_args()
    names = [step for name in options.steps for step in GROUPS.get(name, (name,))]
    if code := has_no_gpu():
        sys.exit(code)
    end = time.monotonic() + 60 * options.minutes
    where = provenance()
    print(where["gpu"], "|", ", ".join(where["versions"]), "|", where["sources_sha256"][:12], flush=True)
    results = RESULTS.parent / folder_of(where["gpu"])
    results.mkdir(parents=True, exist_ok=True)
    log = (options.out or results) / f"check-{names[0]}.log"  # another run, on another GPU, has its own
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    made: dict[str, dict[str, Any]] = {}
    for name in names:
        left = end - time.monotonic()
        made[name] = {"outcome": "skipped: no time left"}
        if left >= 10:
            made[name] = run(name, options.full, left, log) | where | {"measured": now()}
        kept = results / "check.json"
        # Read anew: another run, on another GPU, may have written to it.
        steps = json.loads(kept.read_text())["steps"] if kept.exists() else {}
        steps |= {name: step for name, step in made.items() if "seconds" in step or name not in steps}
        write_json(kept, {"steps": steps})
        if options.out:  # after every step: the machine may go at any time
            shutil.make_archive(str(options.out / "results"), "gztar", RESULTS.parent)
    for name, step in made.items():
        notes = [str(step[key]) for key in ("tests", "findings") if key in step]
        print(f"{name:10s} {step['outcome']:24s} {step.get('seconds', 0):7.1f} s  {' '.join(notes)}")
    sys.exit(any(step["outcome"] != "ok" for step in made.values()))


if __name__ == "__main__":
    main()
