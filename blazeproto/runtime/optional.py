"""Packages that only kernels, integrations or the lab need: whether they are installed, in a version that this package takes.

    need("cupy")  # ImportError: expected cupy>=13.6, got 13.5.1: pip install 'cupy-cuda12x[ctk]>=13.6'
    import cupy

Versions are those that pip wrote down, so nothing is imported to learn them. A package that passed is not looked up again.
"""

import ctypes
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from operator import attrgetter
from typing import Any

INTEGRATIONS = {"transformers": ">=5.17,<6", "peft": ">=0.20,<1", "torchtitan": ">=0.3,<1"}
TESTED = {"transformers": "5.24", "peft": "0.21", "torchtitan": "0.3"}
"""The newest minor version of each that the tests have run with; `need` warns of a newer one."""
LAB = {"rich": "", "matplotlib": ""}
KERNELS = {"cupy": ">=13.6", "numba-cuda": ">=0.20", "cuda-bindings": ">=12.9,<14", "cuda-core": ">=0.3,<2"}
WANTED = {**KERNELS, **INTEGRATIONS, **LAB}
"""Versions, as in the extras of pyproject.toml; an integration's extra has its package's name."""
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")  # one package under three names
_MODULES = {"numba-cuda": "numba_cuda", "cuda-bindings": "cuda.bindings", "cuda-core": "cuda.core"}


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def requirement(name: str, major: str) -> str:
    """The requirement that makes pip install a package of `WANTED` for CUDA ``major``."""
    if name == "cupy":
        return f"cupy-cuda{major}x[ctk]{WANTED[name]}"
    return f"numba-cuda[cu{major}]{WANTED['numba-cuda']}"  # which brings cuda-bindings and cuda-core


def missing(name: str) -> str | None:
    """The fault of a package of `WANTED`: version expected, version found, the command that mends it. None if it has none.

    One that can be imported but that pip knows nothing of has no version, and is taken as it is.
    """
    versions = list(installed(CUPY if name == "cupy" else (name,)).values())
    if not versions and _is_importable(_MODULES.get(name, name)):
        return None
    from packaging.specifiers import SpecifierSet

    wrong = [version for version in versions if not SpecifierSet(WANTED[name]).contains(version, prereleases=True)]
    if versions and not wrong:
        return None
    return f"{name}{WANTED[name]}, got {wrong[0] if wrong else 'none'}: {command(name)}"


@cache
def need(name: str) -> None:
    """Call it before a package of `WANTED` is imported. ImportError where it is missing or of another version; of a newer minor
    version than the one in `TESTED` it warns, once."""
    if lacks := missing(name):
        raise ImportError(f"expected {lacks}", name=_MODULES.get(name, name))
    for version in installed([name] if name in TESTED else ()).values():
        from packaging.version import Version

        if Version(version).release[:2] > Version(TESTED[name]).release:
            newer = f"{name} {version} is newer than {TESTED[name]}, the newest that blazeproto is tested with"
            warnings.warn(newer, stacklevel=3)


def look(name: str, uses: Mapping[str, tuple[int, Sequence[str]] | None]) -> None:
    """Whether a package has what an integration uses of it. ImportError that names what it lacks.

    uses: by its name, ``module:attribute``, each function with the number of positional arguments and the names of the others
    that it is called with; None for what is not called.
    """
    for thing, call in uses.items():
        module, _, path = thing.partition(":")
        try:
            found = attrgetter(path)(importlib.import_module(module))
            if call is not None:
                inspect.signature(found).bind(*range(call[0]), **dict.fromkeys(call[1]))
        except (ImportError, AttributeError, TypeError) as error:
            what = thing if call is None else f"{thing}({', '.join(['_'] * call[0] + [f'{w}=_' for w in call[1]])})"
            version = installed([name]).get(name, "")
            raise ImportError(f"{name} {version}: expected {what}, got the error: {error}", name=name) from error


def cupy() -> Any:
    """CuPy, imported. ImportError as `need`."""
    need("cupy")
    import cupy

    return cupy


def _is_importable(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA (major, minor) that the driver runs; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def cuda_major(driver: tuple[int, int] | None) -> str:
    """The CUDA, "12" or "13", whose packages fit: the driver's; without a driver the installed packages'; else "12"."""
    if driver:
        return "13" if driver >= (13, 0) else "12"
    bindings = {version.split(".")[0] for version in installed(("cuda-bindings",)).values()} & {"12", "13"}
    return max(bindings or {major for major in ("12", "13") if installed((f"cupy-cuda{major}x",))} or {"12"})


def command(name: str) -> str:
    """To mend a package of `WANTED`, with all that the lab needs where it is not installed."""
    if name in INTEGRATIONS or name in LAB:
        return f"pip install -e '.[{name if name in INTEGRATIONS else 'lab'}]'"
    major = cuda_major(driver_cuda())
    one = f"pip install '{requirement(name, major)}'"
    return one if installed(CUPY if name == "cupy" else (name,)) else f"{one}{or_the_lab(major)}"


def or_the_lab(major: str) -> str:
    """The end of a message that says how to install one package that the lab uses: how to install all of them."""
    return f", or -e '.[cu{major},lab]' for all that the lab needs"
