"""What one process at a time does, of all that run tests on this machine."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Waits until no other process is in ``alone(name)``; a process that ends leaves it."""
    with (Path(tempfile.gettempdir()) / f"blazeproto-tests-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
