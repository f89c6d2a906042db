"""The table of activations: derivatives, names, and what its lines become in the kernels."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blazeproto
from blazeproto.activations import ACTIVATIONS, activation_named, mathematics, with_parameters
from blazeproto.gemm.tiles import TILES
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import YARDSTICK, evaluate, make_case

PACKAGE = Path(blazeproto.__file__).parent


def other_parameters(name: str) -> list[str]:
    """An activation with its parameters, each a third of the table's; [] where it has none."""
    parameters = {} if "(" in name else {p.name: p.value / 3 for p in activation_named(name).parameters}
    return [with_parameters(name, **parameters)] if parameters else []


NAMES = [name for each in ACTIVATIONS for name in (each, *other_parameters(each))]


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_the_derivatives(name: str) -> None:
    """By autograd in float64, of f and of g, where they don't jump."""
    chosen, x = activation_named(name), torch.linspace(-12, 12, 481, dtype=torch.float64).add(0.003).requires_grad_()
    for function, slope in ((chosen.f, chosen.slope), (chosen.g, chosen.g_slope)):
        assert (function is None) == (slope is None)
        if function is None or slope is None:
            continue
        (wanted,) = torch.autograd.grad(function(mathematics(x), x, *chosen.values).sum(), x)
        got = slope(mathematics(x), x.detach(), *chosen.values)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_nan_goes_through(name: str) -> None:
    """Functions give NaN. Slopes give NaN, or 1 for a straight piece, as a kernel's ``x <= 0 ? 0 : 1`` does."""
    chosen = activation_named(name)
    for nan in (np.full(1, np.nan), torch.full((1,), torch.nan)):
        for function, slope in ((chosen.f, chosen.slope), (chosen.g, chosen.g_slope)):
            if function is not None and slope is not None:
                assert np.isnan(float(function(mathematics(nan), nan, *chosen.values)[0]))
                at_nan = float(slope(mathematics(nan), nan, *chosen.values)[0])
                assert np.isnan(at_nan) or at_nan == 1


@pytest.mark.parametrize("product", ["up_forward", "down_backward_act"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_kernel_computes_it_on_both_sides_of_every_clamp(
    name: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act and the slopes, by the kernels' PTX, at pre-activations beyond 10 and -10: the limits of the table are 7 and 10."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    from blazeproto.lab import workbench

    def scaled(*sizes: Any, **options: Any) -> Case:
        case = make_case(*sizes, **options)
        case.x.mul_(8)
        return case

    monkeypatch.setattr(workbench, "make_case", scaled)
    sizes = {"T": 24, "d": 16, "n": 16, "E": 2, "K": 1}
    bench = workbench.Workbench(product, **sizes, activation=name, config=TILES[product], device="cpu")
    h = evaluate(YARDSTICK, bench._inputs.case)["h"]
    assert all(
        (h[:, part] > 11).sum() > 9 < (h[:, part] < -11).sum() for part in (slice(0, None, 2), slice(1, None, 2))
    )
    assert bench.check()


def test_macros_say_all_that_a_kernel_asks() -> None:
    for name in ACTIVATIONS:
        chosen = activation_named(name)
        macros = chosen.macros
        assert macros["GATED"] == chosen.gated and macros[f"ACTIVATION_IS_{macros['ACTIVATION']}"] == 1
        assert len(macros) == 5 + len(chosen.parameters)
        assert macros["GATE_UP"] == ("ALTERNATING" if "alternating" in chosen.name else "HALVES")
        assert macros["PLAIN_UP"] == (chosen.g is None)
        assert all(macros[f"ACTIVATION_{p.name.upper()}"] == f"{p.value!r}f" for p in chosen.parameters)
        assert name == chosen.name or chosen.name.startswith(name.removesuffix(")"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clamped_swiglu(limit=1,gate=2)", r"expected clamped_swiglu\(limit=NUMBER,alpha=NUMBER\), got"),
        ("clamped_swiglu(limit=1,limit=2)", r"expected clamped_swiglu\(limit=NUMBER,alpha=NUMBER\), got"),
        ("swiglu(limit=3)", r"swiglu has no parameters, got 'swiglu\(limit=3\)'"),
        ("clamped_swiglu()", "expected one of 'swiglu', "),
    ],
)
def test_parameters_that_an_activation_has_not_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"activation: {message}"):
        activation_named(name)


def test_parameters_by_keywords() -> None:
    assert with_parameters("clamped_swiglu", alpha=2) == "clamped_swiglu(limit=7.0,alpha=2.0)"
    assert activation_named("clamped_swiglu(alpha=2)").name == "clamped_swiglu(limit=7.0,alpha=2.0)"
    for name, parameter in (("swiglu", "limit"), ("clamped_swiglu", "cap"), ("alternating(clamped_swiglu)", "limit")):
        with pytest.raises(
            ValueError, match=r"activation: expected parameters of clamped_swiglu\(limit, alpha\).*, got"
        ):
            with_parameters(name, **{parameter: 1.0})


def test_slopes_where_they_jump() -> None:
    for x, wanted in ((0.0, 0.0), (-1.0, 0.0), (1.0, 1.0)):
        for array in (np.array([x]), torch.tensor([x])):
            row = activation_named("relu")
            assert float(row.slope(mathematics(array), array)[0]) == wanted
    row = activation_named("clamped_swiglu")
    for array in (np.array([-7.0, 7.0, 7.5, -7.5]), torch.tensor([-7.0, 7.0, 7.5, -7.5])):
        assert row.g_slope(mathematics(array), array, *row.values).tolist() == [1, 1, 0, 0]


# --- An activation added as docs/recipes.md says -----------------------------------------------------------------------------

ROWS = """_ROWS = (
    Activation("square", "SQUARE", lambda m, x: x * x, lambda m, x: 2 * x),
    Activation("squareglu", "SQUARE", lambda m, x: x * x, lambda m, x: 2 * x, gated=True),
    Activation(
        "shifted",
        "SHIFTED",
        lambda m, x, by: x * x,
        lambda m, x, by: 2 * x,
        lambda m, up, by: up + by,
        lambda m, up, by: 1 + 0 * up,
        (Parameter("by", 0.5),),
        gated=True,
    ),
    Activation("cube", "CUBE", lambda m, x: x * x * x, lambda m, x: 3 * x * x),
    Activation("halfway", "SQUARE", lambda m, x: x * x, lambda m, x: 2 * x, lambda m, up: -up, lambda m, up: 0 * up - 1),
"""
SQUARES = """#if ACTIVATION_IS_SQUARE || ACTIVATION_IS_SHIFTED
    return {x * x, 2.0f * x};
#elif ACTIVATION_IS_SILU
"""
SHIFT = """#if ACTIVATION_IS_SHIFTED
    return {up + ACTIVATION_BY, 1.0f};
#elif PLAIN_UP
"""
BRANCHES = {"#if ACTIVATION_IS_SILU\n": SQUARES, "#if PLAIN_UP\n": SHIFT}
PROGRAM = """
import numpy as np
from blazeproto import gemm
from blazeproto.activations import activate
from blazeproto.gemm.compile import CompileError

h = np.array([[2.0, 3.0]])
assert activate(h, "squareglu") == 12 and activate(h, "shifted") == 14 and activate(h, "shifted(by=1)") == 16
kernels = {}
for name in ("square", "squareglu", "shifted", "shifted(by=1)"):
    for product in ("up_forward", "down_backward_act"):
        kernel = gemm.kernel_for(product, activation=name)
        assert kernel.defines["GATED"] == (name != "square") and not kernel.spills
        kernels[product, name] = kernel.compile().cubin
for product in ("up_forward", "down_backward_act"):
    assert len({kernels[product, name] for name in ("squareglu", "shifted", "shifted(by=1)")}) == 3, "g is not in it"
assert {kernel.defines.get("ACTIVATION") for kernel in gemm.all_kernels()} >= {"SQUARE", "SHIFTED"}
for name, missing in (("cube", "nonlinearity has no branch for CUBE"), ("halfway", "linear_half has no branch for SQUARE")):
    try:
        gemm.kernel_for("up_forward", activation=name).compile()
    except CompileError as error:
        assert f"activation.cuh: {missing}" in str(error), error
    else:
        raise AssertionError(f"{name} was compiled")
"""


def changed(one: Path, other: Path) -> list[str]:
    """The files that differ, or are in one of two folders only."""
    found = filecmp.dircmp(one, other, ignore=["__pycache__"])
    here = [*found.diff_files, *found.left_only, *found.right_only]
    return here + [f"{name}/{file}" for name in found.common_dirs for file in changed(one / name, other / name)]


def test_a_gated_activation_needs_two_files_and_gets_its_gate(tmp_path: Path) -> None:
    """And one without a branch in activation.cuh isn't compiled."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    copy = tmp_path / "blazeproto"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, edits in (("activations.py", {"_ROWS = (\n": ROWS}), ("gemm/cuda/activation.cuh", BRANCHES)):
        text = (copy / file).read_text()
        for old, new in edits.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (copy / file).write_text(text)
    assert sorted(changed(PACKAGE, copy)) == ["activations.py", "gemm/cuda/activation.cuh"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "BLAZEPROTO_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
