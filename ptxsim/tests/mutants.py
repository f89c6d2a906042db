"""A copy of a module with one place of its source changed, so that a test shows that the others would see it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """``old`` stands once in the module's source; the copy has ``new`` in its place."""
    path = Path(str(module.__file__))
    source = path.read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {path.name}"
    made = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), path.name, "exec"), made.__dict__)
    return made


def check_all(checks: Iterable[Callable[[ModuleType], None]], module: ModuleType) -> None:
    for check in checks:
        check(module)
