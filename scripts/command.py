"""The command line that the scripts share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an option in one line; the usage of thirty options would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def argument_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose usage line is `python -m` and the module, and whose help begins with the module's docstring."""
    return Parser(prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def need_hopper(parser: argparse.ArgumentParser) -> None:
    """End with exit code 2 and one line, before anything is measured or written, where there is no Hopper GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.exit(2, "error: needs a CUDA device of compute capability 9.0, there is none; nothing was written\n")
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        needed = f"needs a CUDA device of compute capability 9.0, this one has {capability[0]}.{capability[1]}"
        parser.exit(2, f"error: {needed}; nothing was written\n")
