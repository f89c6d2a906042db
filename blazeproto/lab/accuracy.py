"""How wrong a result may be: measured against how wrong careful bf16 arithmetic is anyway.

For each output, pooled over the runs given to `Pool.add`:

    ‖out − exact‖ ≤ 1.1 ‖yardstick − exact‖                             the whole
    worst row, worst element of |out − exact| ≤ 3 × the yardstick's     since a norm can miss one wrong 16-byte chunk

Rows and elements are measured by their row's root mean square, so that a small row's error counts as a large one's does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NORM_FACTOR, WORST_FACTOR = 1.1, 3.0
# An fp32 result has no last rounding to hide behind: tensor cores truncate where the yardstick may round to nearest, and the
# order of the sums differs. Both errors are near 1e-7.
FP32_NORM_FACTOR, FP32_WORST_FACTOR = 4.0, 8.0
# Where slack says that a pool is too small to judge finely, an fp32 output may also be wrong by what truncation makes of a
# long sum: of one or two numbers the yardstick's may be right to 1e-8 by chance, and a library may cut the sum into pieces,
# which spares it most of that. wgmma truncates after every 16 products: some 4e-6 of a sum of 3500, as
# tests/gemm/test_twins.py emulates it; the fuzzer's longest has 4000.
POOL_ELEMENTS, FP32_NOISE = 10_000, 2.0**-17
SMALL_ROW = 1e-2  # of the output's root mean square: rows smaller than that are measured by it
ELEMENTS_AT_ONCE = 2**27


class Pool:
    """Errors of outputs by name. Everything stays on the device until `failures` is asked for."""

    def __init__(self) -> None:
        # By output name: Σ error² and the yardstick's (over the exact mean square), worst row and the yardstick's,
        # worst element and the yardstick's.
        self.totals: dict[str, Tensor] = {}
        self.elements: dict[str, int] = {}
        self.fp32: set[str] = set()

    def add(self, name: str, out: Tensor, yardstick: Tensor, exact: Tensor) -> None:
        """Three arrays of one shape; the last dimension is a row."""
        if out.shape != exact.shape:
            raise ValueError(f"{name}: expected shape {tuple(exact.shape)}, got {tuple(out.shape)}")
        if out.numel() == 0:
            return
        if out.dtype == torch.float32:
            self.fp32.add(name)
        self._take(name, _errors(out, yardstick, exact), out.numel())

    def _take(self, name: str, total: Tensor, elements: int) -> None:
        before = self.totals.get(name)
        if before is not None:
            total = torch.cat([before[:2] + total[:2], torch.maximum(before[2:], total[2:])])
        self.totals[name] = total
        self.elements[name] = self.elements.get(name, 0) + elements

    def merge(self, other: Pool) -> None:
        """Take in what another pool holds."""
        self.fp32 |= other.fp32
        for name, total in other.totals.items():
            self._take(name, total, other.elements[name])

    def add_all(self, out: Mapping[str, Tensor], yardstick: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        """By name; row outputs of ``out`` may have more rows than are in use."""
        for name, reference in exact.items():
            self.add(name, out[name][: len(reference)], yardstick[name], reference)

    def failures(self, slack: float = 1.0, fp32_noise: float = FP32_NOISE) -> list[str]:
        """One line for each bound that doesn't hold. slack: widens all bounds, for pools too small to judge finely.
        fp32_noise: how wrong an fp32 output of a small pool may be with slack, of the size of its row."""
        lines = []
        for name, total in self.totals.items():
            error2, yardstick2, *worst = total.tolist()
            fp32 = name in self.fp32
            norm_factor, worst_factor = (FP32_NORM_FACTOR, FP32_WORST_FACTOR) if fp32 else (NORM_FACTOR, WORST_FACTOR)
            noise = fp32_noise if slack > 1 and fp32 and self.elements[name] < POOL_ELEMENTS else 0.0
            bounds = {
                "norm": (error2**0.5, yardstick2**0.5, norm_factor, noise * self.elements[name] ** 0.5),
                "worst row": (worst[0], worst[1], worst_factor, noise),
                "worst element": (worst[2], worst[3], worst_factor, noise),
            }
            for what, (error, yardstick, factor, truncation) in bounds.items():
                factor *= slack
                if not error <= max(factor * yardstick, truncation):  # so that NaN fails
                    lines.append(
                        f"{name}: {what} of the error {error:.3g} > {factor:.3g} x yardstick's {yardstick:.3g} "
                        f"({self.elements[name]} elements)"
                    )
        return lines


def far_off(
    out: Mapping[str, Tensor], yardstick: Mapping[str, Tensor], exact: Mapping[str, tuple[Tensor, Tensor]]
) -> list[str]:
    """The bounds that do not hold for outputs of one run: those that ``yardstick`` has. exact: by name, and what is beside it.

    Quantized numbers may each be off by 2^-4, behind which a factor for all of them would hide.
    """
    pool = Pool()
    for name, right in yardstick.items():
        pool.add(name, out[name].double(), right.double(), exact[name][0])  # fp32 has factors of its own
    return pool.failures(slack=1.0 if min(pool.elements.values(), default=0) >= POOL_ELEMENTS else 2.0)


def _errors(out: Tensor, yardstick: Tensor, exact: Tensor) -> Tensor:
    """(6,) float64: Σ error², Σ yardstick error² (over the exact mean square), worst row, its, worst element, its."""
    out, yardstick, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t[None] for t in (out, yardstick, exact))
    size = torch.linalg.vector_norm(exact) / exact.numel() ** 0.5 + 1e-150  # root mean square
    floor = SMALL_ROW * size
    totals = []
    step = max(1, ELEMENTS_AT_ONCE // exact.shape[1])
    for start in range(0, exact.shape[0], step):
        part = exact[start : start + step].double()
        scale = part.square().mean(dim=1, keepdim=True).sqrt().clamp_min(floor)
        sums, rows, elements = [], [], []
        for values in (out, yardstick):
            error = values[start : start + step].double() - part
            sums.append(error.square().sum())
            error = (error / scale).abs()
            rows.append(error.square().mean(dim=1).sqrt().max())
            elements.append(error.max())
        totals.append(torch.stack([*sums, *rows, *elements]))
    parts = torch.stack(totals)
    return torch.cat([parts[:, :2].sum(dim=0) / size**2, parts[:, 2:].amax(dim=0)])


def worst_mismatches(out: Tensor, exact: Tensor, count: int = 5) -> list[str]:
    """Where ``out`` is farthest from ``exact``, NaN first: lines of (row, column), got, want."""
    if out.numel() == 0:
        return []
    out, exact = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t[None] for t in (out.double(), exact.double()))
    distance = (out - exact).abs().nan_to_num(nan=torch.inf).flatten()
    worst = distance.topk(min(count, distance.numel())).indices.tolist()
    places = [divmod(index, out.shape[1]) for index in worst]
    return [f"  ({r}, {c}): got {out[r, c].item():.6g}, want {exact[r, c].item():.6g}" for r, c in places]
