"""Programs in a process of their own: for what Python decides once, and for what must not be imported before."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def python(*arguments: str, variables: dict[str, str] | None = None, **options: Any) -> str:
    """What ``python ARGUMENTS`` prints; it must end with 0.

    variables: of the environment, beside those that are there.  options: of `subprocess.run`.
    """
    options |= {"env": {**os.environ, **(variables or {})}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *arguments], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def simulate(script: Path, *arguments: str) -> None:
    """Run a script with Numba's simulator for a GPU, which runs a Python thread for each CUDA thread. It exits with 0 where all
    is right, and else prints what is not. Numba looks at its variable when it is first imported."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    python(str(script), *arguments, variables={"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": paths}, timeout=500)
