"""Run a program in a process of its own and write down which kernels of this package it launches.

python -m scripts.bench.launched kernels.json scripts.train_lm --steps 500
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

from scripts.bench import identity
from scripts.command import argument_parser


def main() -> None:
    parser = argument_parser("scripts.bench.launched", __doc__)
    parser.add_argument("file", type=Path, help="the kernels' descriptions by their identities, as JSON")
    parser.add_argument("module", help="what is run, as by python -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.argv = [options.module, *options.arguments]
    kernels: dict[str, identity.Description] = {}
    try:
        with identity.launched() as kernels:
            runpy.run_module(options.module, run_name="__main__", alter_sys=True)
    finally:  # a program may end by SystemExit
        options.file.write_text(json.dumps(kernels))


if __name__ == "__main__":
    main()
