"""Run a program in a process of its own and write down which kernels of this package it launches.

python -m scripts.bench.launched kernels.json scripts.train_lm --steps 500
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from scripts.bench import identity


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    kernels: dict[str, identity.Description] = {}
    try:
        with identity.launched() as kernels:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # a program may end by SystemExit
        Path(file).write_text(json.dumps(kernels))


if __name__ == "__main__":
    main()
