"""The command line that the scripts share."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an option in one line; the usage of thirty options would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def argument_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose usage line is `python -m` and the module, and whose help begins with the module's docstring."""
    return Parser(prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def positive(word: str) -> int:
    """An option's type: an int of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected an int of at least 1, got {word!r}")
    return int(word)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An option's type: some of the known words, with commas between."""

    def read(text: str) -> list[str]:
        words = text.split(",")
        if unknown := sorted(set(words) - set(known)):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return words

    return read


def refuse(line: str) -> NoReturn:
    """End with exit code 2 and one line that says why."""
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def run_module(*words: str) -> int:
    """The exit code of `python -m` and these words, in the repository; the command is printed first."""
    command = [sys.executable, "-m", *words]
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode


FIRST = {
    "hopper": (9, 0),
    "ampere": (8, 0),
}  # compute capabilities. Here: `compare` takes the package of another checkout


def has_hopper() -> bool:
    """Whether this machine has a Hopper GPU."""
    return _capability() == FIRST["hopper"]


def need_kernels(backend: str = "hopper") -> None:
    """`refuse` without a GPU that runs a backend's kernels, before anything is measured and any file is written."""
    capability, first = _capability(), FIRST[backend]
    if capability is None or (capability < first if backend == "ampere" else capability != first):
        has = "there is none" if capability is None else "this one has {}.{}".format(*capability)
        later = " or later" if backend == "ampere" else ""
        refuse(f"needs a GPU of compute capability {first[0]}.{first[1]}{later}; {has}; nothing was run")


def _capability() -> tuple[int, int] | None:
    """The current GPU's compute capability; None without one."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
