"""The kernel rooms leave torch alone: each module of them, imported in a process of its own."""

from pathlib import Path

import pytest

import blazeproto
from tests.python import python

PACKAGE = Path(blazeproto.__file__).parent
ROUTER = (
    *("kinds", "scores", "topk", "topk_kernels", "best"),
    *("pairs", "select_kernels", "pair_kernels", "hash_kernels"),
)
MODULES = [
    *(
        f"blazeproto.{room}.{path.stem}"
        for room in ("runtime", "dispatch")
        for path in (PACKAGE / room).glob("[!_]*.py")
    ),
    *(f"blazeproto.router.{name}" for name in ROUTER),
]
NEED_NUMBA = {"numba", "warp", "tiled", "place", "dense", "limit", "best"}
NEED_NUMBA |= {"topk_kernels", "select_kernels", "pair_kernels", "hash_kernels"}


@pytest.mark.parametrize(
    "code",
    [
        "from blazeproto.router import choose_pairs, hash_route, score_pairs, topk_route, topk_route_backward",
        "from blazeproto.dispatch import build_dispatch",
        "from blazeproto import build_dispatch",
    ],
)
def test_a_name_leaves_torch_out(code: str) -> None:
    python("-c", f"import sys\n{code}\nassert 'torch' not in sys.modules")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("blazeproto", "torch numpy cupy numba cuda.core cuda.bindings rich matplotlib"),
        ("blazeproto.__main__", "torch numpy cupy numba cuda.core cuda.bindings rich matplotlib"),
        ("blazeproto.lab", "torch numpy cupy numba cuda.core cuda.bindings rich matplotlib"),
        ("blazeproto.doctor", "torch numpy cupy numba cuda.core cuda.bindings rich matplotlib"),
        ("blazeproto.runtime", "torch numpy cupy numba cuda.core cuda.bindings rich matplotlib"),
        ("blazeproto.runtime.arrays", "torch numpy cupy numba cuda.core cuda.bindings packaging"),
        ("blazeproto.gemm", "torch cupy numba cuda.core cuda.bindings packaging"),
        ("blazeproto.dispatch", "torch cupy numba cuda.core cuda.bindings packaging"),
    ],
)
def test_what_importing_a_module_leaves_out(module: str, names: str) -> None:
    python(
        "-c",
        f"""
import sys
import {module}
loaded = set({names.split()}) & sys.modules.keys()
assert not loaded, loaded
""",
    )


def test_every_module_leaves_torch_out() -> None:
    """And what needs neither Numba nor CuPy to be imported imports neither."""
    plain = sorted(name for name in MODULES if name.split(".")[-1] not in NEED_NUMBA)
    python(
        "-c",
        f"""
import importlib, sys
for module in {plain}:
    importlib.import_module(module)
    for heavy in ("torch", "numba", "cupy", "cuda.core"):
        assert heavy not in sys.modules, (module, heavy)
""",
    )
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    python(
        "-c",
        f"""
import importlib, sys
for module in {sorted(MODULES)}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
""",
    )
