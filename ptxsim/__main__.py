"""Runs a kernel without a GPU, and says what is wrong with it, by source line.

    python -m ptxsim kernel.cu --grid 2 --block 64 'int32[128]=arange' 'int32[2]' 128

Arguments of the kernel, one for each parameter:

    64, -1, 0x10, 2.5       a number of the parameter's size
    float32[8,64]           an array that nobody has written
    float32[8,64]=1.5       an array filled with a number
    int32[512]=arange       0, 1, 2, ...
    float32[512]=random     uniform in [0, 1), the same in every run; integers from 0 to 99
    x.npy                   an array from a file

Ends with 1 where a race or an error was found, else with 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ptxsim import CompileError, MachineError, Report, Stepper, compile, run, step, unwritten
from ptxsim.checks import expect

ARRAY = re.compile(r"(\w+)\[([\d,]+)\](?:=(.+))?")
COMMANDS = ("step", "until", "back", "finish", "next", "registers", "barriers", "shared", "reads", "accumulators")
ABOUT_COMMANDS = f"""step by step: {", ".join(COMMANDS)}, with the arguments of Stepper's methods, as in "step 10",
"until st.shared", "registers 1 31" (warp, lane), "shared 0 64" (begin, bytes); an empty line is "step 1"; "quit" ends it"""


def argument(text: str) -> Any:
    """A kernel's argument. ValueError for what is none."""
    try:
        if found := ARRAY.fullmatch(text):
            return _array(found[1], tuple(map(int, found[2].split(","))), found[3])
        if text.endswith(".npy"):
            return np.load(text)
        return int(text, 0) if re.fullmatch(r"[-+]?(0[xX][\da-fA-F]+|\d+)", text) else float(text)
    except (OSError, TypeError, ValueError) as error:
        forms = "a number, DTYPE[SIZES], DTYPE[SIZES]=VALUE or a .npy file"
        raise ValueError(f"ARGUMENT: expected {forms}, got {text!r}: {error}") from error


def _array(kind: str, shape: tuple[int, ...], value: str | None) -> Any:
    if value is None:
        return unwritten(np.empty(shape, kind))
    if value == "arange":
        return np.arange(prod(shape), dtype=kind).reshape(shape)
    if value == "random":
        numbers = np.random.default_rng(0).random(shape)
        return (numbers if np.dtype(kind).kind == "f" else 100 * numbers).astype(kind)
    return np.full(shape, float(value) if np.dtype(kind).kind == "f" else int(value, 0), kind)


def sizes(text: str) -> tuple[int, ...]:
    """ "2,1,1" as a tuple."""
    return tuple(map(int, text.split(",")))


OPTIONS: dict[str, dict[str, Any]] = {
    "kernel": {"help": "a file of CUDA C++ or PTX"},
    "arguments": {"nargs": "*", "metavar": "ARGUMENT"},
    "--grid": {"type": sizes, "default": (1,), "help": "CTAs, as 2 or 2,1,1"},
    "--block": {"type": sizes, "default": (32,), "help": "threads of a CTA, as 64 or 8,8,1"},
    "--shared": {"type": int, "default": 0, "help": "bytes of dynamic shared memory"},
    "--cluster": {"type": int, "default": 1, "help": "CTAs of a cluster"},
    "--entry": {"help": "the kernel's name in the PTX, where there is more than one"},
    "--seed": {"type": int, "default": 0, "help": "of the first schedule"},
    "--runs": {"type": int, "default": 1, "help": "how many schedules, each of the next seed"},
    "--most": {"type": int, "help": "warp instructions, beyond which a run ends as an error"},
    "--option": {"action": "append", "default": [], "dest": "options", "help": "NVRTC's, as --option=-DN=4"},
    "--show": {"choices": ("ptx", "sass"), "help": "print what the kernel is compiled to, and run nothing"},
    "--step": {"action": "store_true", "help": ABOUT_COMMANDS},
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m ptxsim", description=__doc__, formatter_class=shape)
    for name, how in OPTIONS.items():
        parser.add_argument(name, **how)
    return parser.parse_intermixed_args(arguments)


def with_source(text: str, path: Path) -> str:
    """A run's output, each line followed by the source lines that it names."""
    source, lines = path.read_text().splitlines(), []
    for line in text.splitlines():
        lines.append(line)
        for number in dict.fromkeys(map(int, re.findall(rf"\b{re.escape(path.name)}:(\d+)", line))):
            lines += [f"    {number:4} | {source[number - 1].strip()}"] * (0 < number <= len(source))
    return "\n".join(lines)


def prompt(stepper: Stepper) -> None:
    """Reads commands from stdin to its end."""
    print(stepper)
    while True:
        try:
            name, *words = input("ptxsim> ").split() or ["step"]
            if name == "quit":
                return
            expect("command", name in COMMANDS, f"one of {', '.join(COMMANDS)} and quit", name)
            print(getattr(stepper, name)(*(int(word) if word.isdigit() else word for word in words)))
        except EOFError:
            return
        except (RuntimeError, TypeError, ValueError) as error:
            print(error)


def ran(path: Path, texts: list[str], seed: int, last: bool, **launch: Any) -> bool:
    """Prints what one run found, and of the last one its arrays: whether it found nothing."""
    arguments, console = [argument(text) for text in texts], Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("clusters")
        try:
            said: Any = run(
                path,
                arguments=arguments,
                seed=seed,
                progress=lambda done, count: bar.update(task, completed=done, total=count),
                **launch,
            )
        except MachineError as error:
            said = error
    print(with_source(str(said), path))
    ended = isinstance(said, Report)
    for number, value in enumerate(arguments if last and ended else ()):
        if isinstance(array := getattr(value, "array", value), np.ndarray):
            print(f"argument {number}: {np.array2string(array, threshold=16)}")
    return ended and not said.races


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where something was found, 2 where nothing could run."""
    given = parsed(arguments)
    path = Path(given.kernel)
    launch = {name: vars(given)[name] for name in ("grid", "block", "shared", "cluster", "entry", "options")}
    try:
        if given.show:
            print(getattr(compile(path, *given.options), given.show))
        elif given.step:
            prompt(step(path, arguments=[*map(argument, given.arguments)], seed=given.seed, **launch))
        else:
            seeds = range(given.seed, given.seed + given.runs)
            right = [ran(path, given.arguments, seed, seed == seeds[-1], most=given.most, **launch) for seed in seeds]
            return int(not all(right))
    except (CompileError, OSError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
