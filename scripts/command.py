"""The command line that the scripts share."""

from __future__ import annotations

import argparse


def argument_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose usage line is `python -m` and the module, and whose help begins with the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
