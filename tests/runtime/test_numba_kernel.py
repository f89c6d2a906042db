"""Numba kernels: what decides a cubin's name in the cache, and a cache that is damaged."""

import shutil
from pathlib import Path

import pytest

import blazeproto
from blazeproto.runtime import numba_kernel
from tests.python import python

pytest.importorskip("numba.cuda", reason="needs numba-cuda")

PACKAGE = Path(blazeproto.__file__).parent

KEYS = """
from blazeproto.dispatch import dense, tiled
from blazeproto.router import topk
kernels = [*tiled.kernels(2**20, 8, 128, "int32"), *dense.kernels(1000, 8, 128, "int32")]
kernels += [topk.backward_kernel(128, 8, "sigmoid", True, 1.0, False)]
for kernel in kernels:
    print(kernel.name, kernel.key())
"""


def keys_in(folder: Path) -> dict[str, str]:
    """Every kernel's key, as a process says that imports the package in this folder."""
    printed = python("-c", KEYS, variables={"PYTHONPATH": str(folder)}, cwd=folder)
    return dict(line.split() for line in printed.splitlines())


def test_a_changed_helper_is_another_key(tmp_path: Path) -> None:
    """Also one that nobody has listed anywhere: a new file, imported by a helper."""
    package = tmp_path / "blazeproto"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "router" / "helper.py").write_text("SIZE = 8\n")
    with (package / "router" / "best.py").open("a") as file:
        file.write("from . import helper\n")
    keys = keys_in(tmp_path)

    def changed_by(*files: str) -> set[str]:
        nonlocal keys
        for name in files:
            with (package / name).open("a") as file:
                file.write("# changed\n")
        before, keys = keys, keys_in(tmp_path)
        return {name for name, key in keys.items() if before[name] != key}

    assert changed_by("router/helper.py", "router/choices.py", "gemm/launch.py") == {"topk_route_backward"}
    assert changed_by("dispatch/place.py") == set(keys) - {"topk_route_backward"}
    assert changed_by("runtime/warp.py") == set(keys)


def test_kernels_compile_on_a_numpy_without_row_stack(tmp_path: Path) -> None:
    """As it is from NumPy 2.5 on."""
    code = (
        "import numpy\nvars(numpy).pop('row_stack', None)\n"
        "from blazeproto.dispatch import limit\nassert '.entry' in limit.KERNEL.ptx()"
    )
    python("-c", code, variables={"BLAZEPROTO_CACHE": str(tmp_path)})


def test_ptx_is_kept_with_lines_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blazeproto.dispatch import limit

    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))
    plain, lined = limit.KERNEL.ptx(), limit.KERNEL.ptx(lineinfo=True)
    assert ".loc" not in plain and ".loc" in lined and "dispatch/limit.py" in lined
    monkeypatch.setattr(limit.KERNEL, "_compile", None)
    assert (limit.KERNEL.ptx(), limit.KERNEL.ptx(lineinfo=True)) == (plain, lined)


def test_what_was_edited_since_it_was_imported_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's name has the file's text, and what is compiled is the text before."""
    from blazeproto.dispatch import limit

    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))
    monkeypatch.setattr(limit.KERNEL, "_compile", lambda *_: b"as it was imported")
    file = Path(limit.__file__)
    monkeypatch.setattr(numba_kernel, "BEGAN", file.stat().st_mtime - 1)
    with pytest.warns(UserWarning, match=r"limit\.py.* changed after this process began; .* so start again"):
        assert limit.KERNEL.ptx() == "as it was imported"
    assert not any(tmp_path.iterdir())


def test_where_the_compiler_fails_on_lines_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blazeproto.dispatch import limit

    def compile_without(*_: object, lineinfo: bool, **__: object) -> tuple[str, object]:
        if lineinfo:
            raise RuntimeError("Symbol name with unsupported characters")
        return "plain", None

    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))
    monkeypatch.setattr("blazeproto.runtime.numba.cuda.compile", compile_without)
    assert limit.KERNEL.ptx(lineinfo=True) == "plain"


@pytest.mark.parametrize(
    "capability",
    [(8, 0), (12, 0), *(pytest.param(each, marks=pytest.mark.full) for each in ((8, 6), (8, 9), (9, 0)))],
    ids=str,
)
def test_dispatch_and_router_compile_for_every_capability_from_8_0_on(capability: tuple[int, int]) -> None:
    from blazeproto.dispatch import dense, limit, tiled
    from blazeproto.router import logits, losses, pairs, topk

    kernels = [*tiled.kernels(1000, 2, 16, "int32"), *dense.kernels(1000, 2, 16, "int64"), limit.KERNEL]
    kernels += [topk.forward_kernel(16, 2, "sigmoid", True, 1.0, True, False, True)]
    kernels += [topk.backward_kernel(16, 2, "sigmoid", True, 1.0, False), topk.hash_kernel(16, 2)]
    kernels += [
        logits.finish_kernel(16),
        logits.split_kernel(16, 2),
    ]
    kernels += [
        *losses.kernels(16, "softmax_topk", True, True, True),
        pairs.score_kernel(16, "sigmoid", True, 1.0),
    ]
    kernels += filter(None, pairs.choosing_kernels(16, 2, "score", True))
    for kernel in kernels:
        assert f".target sm_{capability[0]}{capability[1]}" in kernel.ptx(capability), kernel
