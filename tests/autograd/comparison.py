"""How near to float64 results must be, and when two are the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SMALL_OUTPUT = 10_000  # elements


def assert_close(got: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    """By each output's norm."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        assert error <= tolerance, f"output {index} of shape {tuple(b.shape)} is off by {error:.2e}"


def assert_same_bits(results: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(a, b), f"output {index}: {(a != b).sum()} of {a.numel()} elements differ"


def assert_as_good_as(got: Iterable[Tensor], yardstick: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """The Hopper backend's outputs about as near to float64's as those of the yardstick, the torch backend in bf16: the norm of
    the error may be 1.1 times its, the worst row and the worst element 3 times. Outputs of few elements, where either error is a
    matter of luck, may be off by 1 %."""
    for index, (a, y, reference) in enumerate(zip(got, yardstick, expected, strict=True)):
        reference, what = reference.double(), f"output {index} of shape {tuple(reference.shape)}"
        error, allowed = a.double() - reference, y.double() - reference
        assert error.isfinite().all(), f"{what}: {(~error.isfinite()).sum()} elements are not finite"
        tiny = 1e-6 * reference.norm()
        if error.numel() < SMALL_OUTPUT:
            assert error.norm() <= torch.maximum(1.1 * allowed.norm(), 0.01 * reference.norm()), what
            continue
        assert error.norm() <= 1.1 * allowed.norm() + tiny, f"{what}: {error.norm():.3e}, torch {allowed.norm():.3e}"
        rows, allowed_rows = (t.reshape(-1, t.shape[-1]).norm(dim=1).max() for t in (error, allowed))
        assert rows <= 3 * allowed_rows + tiny, f"{what}: worst row {rows:.3e}, torch {allowed_rows:.3e}"
        worst, allowed_worst = error.abs().max(), allowed.abs().max()
        assert worst <= 3 * allowed_worst + tiny, f"{what}: worst element {worst:.3e}, torch {allowed_worst:.3e}"
