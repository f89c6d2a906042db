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


def has_hopper() -> bool:
    """Whether this machine has a Hopper GPU."""
    return _lacks("hopper") is None


def need_kernels(backend: str = "hopper") -> None:
    """`refuse` without a GPU that runs a backend's kernels, before anything is measured and any file is written."""
    if lacks := _lacks(backend):
        refuse(f"needs {lacks}; nothing was run")


def _lacks(backend: str) -> str | None:
    """What keeps a backend's kernels from running here; None if nothing does."""
    import torch

    # Not above: a process of `compare` takes the package of another checkout.
    from blazeproto.runtime.arch import missing

    return missing(torch.cuda.get_device_capability() if torch.cuda.is_available() else None, name=backend)
