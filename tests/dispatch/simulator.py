"""Numba's simulator for tests: it runs kernels where there is no GPU, a Python thread for each CUDA thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def simulate(script: Path, *arguments: str) -> None:
    """Run a script with Numba's simulator for a GPU. It exits with 0 where all is right, and else prints what is not.

    In a process of its own, because Numba looks at its variable when it is first imported.
    """
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
