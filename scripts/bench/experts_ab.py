"""The experts alone, forward and backward, by this checkout's kernels against another one's, in one process.

    git worktree add .base COMMIT
    python -m scripts.bench.experts_ab --package-root .base                    # the two shapes of row tails, and all 23
    python -m scripts.bench.experts_ab --package-root .base --shapes tails     # the two alone
    python -m scripts.bench.experts_ab --package-root .base --shapes 1-3,19 --rounds 9

Kernels are launched as a layer launches them, outputs allocated beforehand. Each product is a CUDA graph, and all of them,
in the order of a forward and a backward, are one more; graphs of both checkouts are replayed in turn (A B A B), medians.
Both get the dispatch that this checkout makes, which is timed apart and counted in both. Ids are uniform at random. Says
where the two compute other bits.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from blazeproto import gemm
from scripts.bench.common import SHAPES, LayerShape, format_table, geometric_mean, parse_shapes, provenance
from scripts.bench.products import Arrays
from scripts.bench.timing import gpu_ms
from scripts.command import argument_parser, need_hopper, positive

Call = Callable[[], object]

# Experts whose last tiles are half empty: 512 rows each (and 2880 is no multiple of 256), and 192.
TAIL_SHAPES = (LayerShape(16384, 2880, 2880, 128, 4), LayerShape(8192, 4096, 1536, 256, 6))


@contextmanager
def without_package() -> Iterator[None]:
    """No module of blazeproto is loaded inside; afterwards those are that were before."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "blazeproto"}
    for name in ours:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "blazeproto"]:
            del sys.modules[name]
        sys.modules.update(ours)


def other_gemm(root: Path) -> tuple[ModuleType, type[Any]]:
    """blazeproto.gemm of the checkout at ``root``, and its Dispatch. They import no torch, so two of them meet in peace."""
    with without_package():
        sys.path.insert(0, str(root.resolve()))
        try:
            module = importlib.import_module("blazeproto.gemm")
            dispatch = importlib.import_module("blazeproto.dispatch").Dispatch
        finally:
            del sys.path[0]
    found = Path(module.__file__ or "").resolve().parents[2]
    if found != root.resolve():
        raise SystemExit(f"--package-root: expected blazeproto in {root.resolve()}, got that of {found}")
    return module, dispatch


def products(module: ModuleType, dispatch: Any, a: LayerArrays) -> dict[str, Call]:
    """Every kernel of a forward and a backward, in their order, by ``module``."""
    empty: dict[str, Any] = {"dtype": torch.float32, "device": a.x.device}
    partials = torch.empty(module.score_partials(a.shape.n), a.shape.rows, **empty)

    def weight(name: str, dw: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"dw": dw, "workspace": torch.empty(module.weight_workspace(name, dw, dispatch), **empty)}

    of_down, of_up = weight("down_backward_weight", a.down_grad), weight("up_backward_weight", a.up_grad)
    of_h = {"dh": a.dh, "a_scaled": a.a_scaled, "d_scores": a.d_scores, "workspace": partials}
    return {
        "up": lambda: module.up_forward(a.x, a.up_proj, dispatch, h=a.h_out, act=a.act_out),
        "down": lambda: module.down_forward(a.act_out, a.down_proj, dispatch, y=a.y_out),
        "combine": lambda: module.combine(a.y_out, dispatch, scores=a.scores, out=a.out),
        "dH": lambda: module.down_backward_act(a.d_out, a.down_proj, a.h_out, a.scores, dispatch, **of_h),
        "dW_down": lambda: module.down_backward_weight(a.d_out, a.a_scaled, dispatch, **of_down),
        "dX": lambda: module.up_backward_act(a.dh, a.up_proj, dispatch, dx_rows=a.dx_rows),
        "combine dX": lambda: module.combine(a.dx_rows, dispatch, out=a.dx),
        "dW_up": lambda: module.up_backward_weight(a.dh, a.x, dispatch, **of_up),
    }


class LayerArrays(Arrays):
    """`Arrays` with an output of its own for every product, so that one can be run after the other."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        del self.h, self.act, self.y  # which products of the layer make
        self.dh, self.a_scaled = torch.empty_like(self.h_out), torch.empty_like(self.act_out)
        self.dx_rows, self.dx = torch.empty_like(self.y_out), torch.empty_like(self.out)

    def made(self) -> dict[str, torch.Tensor]:
        return {
            "h": self.h_out, "act": self.act_out, "y": self.y_out, "out": self.out, "dh": self.dh, "a_scaled": self.a_scaled,
            "d_scores": self.d_scores, "d_down": self.down_grad, "dx_rows": self.dx_rows, "dx": self.dx, "d_up": self.up_grad,
        }  # fmt: skip


def whole(calls: dict[str, Call], outputs: tuple[torch.Tensor, ...]) -> Call:
    """All of them, one after the other."""

    def run() -> object:
        for call in calls.values():
            call()
        return outputs

    return run


def differing(arrays: LayerArrays, old: Call, new: Call) -> list[str]:
    """Outputs in which the two differ in a bit. All are poisoned before each."""
    expected: dict[str, torch.Tensor] = {}
    for call in (old, new):
        for tensor in arrays.made().values():
            tensor.fill_(torch.nan)
        call()
        if call is old:
            expected = {name: tensor.clone() for name, tensor in arrays.made().items()}
    return [name for name, tensor in arrays.made().items() if not torch.equal(tensor, expected[name])]


def measure(shape: LayerShape, module: ModuleType, dispatch_type: type[Any], rounds: int) -> dict[str, Any]:
    """Milliseconds by product, of the other checkout and of this one; what differs."""
    gemm.prepare(shape.d, shape.n, shape.E, shape.K)
    with without_package():  # its compilers run in processes, which find it by its path
        module.prepare(shape.d, shape.n, shape.E, shape.K)
    arrays = LayerArrays(shape)
    theirs = dispatch_type(**{field.name: getattr(arrays.dispatch, field.name) for field in fields(dispatch_type)})
    old, new = products(module, theirs, arrays), products(gemm, arrays.dispatch, arrays)
    outputs = (arrays.out, arrays.dx, arrays.up_grad, arrays.down_grad, arrays.d_scores)
    row: dict[str, Any] = {"differs": differing(arrays, whole(old, outputs), whole(new, outputs))}
    times = {name: gpu_ms({"old": old[name], "new": new[name]}, ("old", "new"), rounds).ms for name in old}
    both = {"old": whole(old, outputs), "new": whole(new, outputs)}
    times["all"] = gpu_ms(both, tuple(both), rounds).ms
    experts = arrays.dispatch.token_expert_indices.view(shape.T, shape.K)
    from blazeproto.autograd.chunks import WHOLE

    dispatch: Call = lambda: torch.ops.blazeproto.dispatch.default(experts, shape.E, WHOLE, "hopper")  # noqa: E731
    row["dispatch"] = gpu_ms({"dispatch": dispatch}, (), rounds).ms["dispatch"]
    return row | {"ms": times}


def summary(shape: LayerShape, row: dict[str, Any]) -> list[str]:
    """A line of the table: forward + backward, then every product, as new ms and old / new."""
    total = {side: row["ms"]["all"][side] + row["dispatch"] for side in ("old", "new")}
    cells = [f"{shape.T},{shape.d},{shape.n},{shape.E},{shape.K}", f"{total['old']:.3f}", f"{total['new']:.3f}"]
    cells.append(f"{total['old'] / total['new']:.3f}")
    cells += [f"{ms['new']:.3f} {ms['old'] / ms['new']:.3f}" for name, ms in row["ms"].items() if name != "all"]
    return [*cells, " ".join(row["differs"]) or "same"]


def shapes_of(text: str) -> list[LayerShape]:
    chosen: list[LayerShape] = []
    for part in text.split(","):
        chosen += TAIL_SHAPES if part == "tails" else parse_shapes(part)
    return chosen


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.bench.experts_ab", __doc__)
    parser.add_argument("--package-root", type=Path, required=True, help="folder that the other blazeproto/ is in")
    parser.add_argument(
        "--shapes", type=shapes_of, default=[*TAIL_SHAPES, *SHAPES], help="tails, or as scripts.bench.layer"
    )
    parser.add_argument("--rounds", type=positive, default=5)
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    need_hopper()
    module, dispatch_type = other_gemm(options.package_root)
    lines, ratios = [], []
    for shape in options.shapes:
        lines.append(summary(shape, measure(shape, module, dispatch_type, options.rounds)))
        ratios.append(float(lines[-1][3]))
        print(" | ".join(lines[-1]), flush=True)
        torch.cuda.empty_cache()
    names = ("up", "down", "combine", "dH", "dW_down", "dX", "combine dX", "dW_up")
    header = ["T,d,n,E,K", "old ms", "new ms", "old/new", *names, "bits"]
    about = provenance()
    print(f"\n{about['gpu']}; {about['measured']}; old: {options.package_root}; each product: new ms, old / new")
    print(format_table(header, lines))
    print(f"old / new: geometric mean {geometric_mean(ratios):.4f}, least {min(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
