"""One side of `scripts.checks.compare`: a process that has one checkout's blazeproto, and does what it is asked.

    python -m scripts.checks.compare_worker CHECKOUT cuda        # PYTHONPATH: the checkout of this file; with -P

Requests come by standard input, pickled (name, arguments); answers go to standard output: ("done", value) or ("failed", text).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import math
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from scripts.checks import compare_layers, compare_routing
from scripts.checks.compare_cases import Case, Product, Shape, product_cases
from scripts.command import argument_parser

FUSED_RUNS = 4
WARM_TOKENS = 64
BURST_MS, MOST_CALLS = 20.0, 12  # how long a timed interval is, and the most calls in it


def package_of(root: Path) -> ModuleType:
    """blazeproto of the checkout at ``root``, its rooms loaded. ImportError if another one is found."""
    sys.path.insert(0, str(root))
    others = os.environ["PYTHONPATH"].split(os.pathsep)[1:]  # behind the checkout of this file
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *others])  # of the processes that compile
    package = importlib.import_module("blazeproto")
    found = Path(package.__file__ or "").resolve().parents[1]
    if found != root:
        raise ImportError(f"expected blazeproto in {root}, got that of {found}")
    for room in ("activations", "dispatch", "gemm", "router"):
        importlib.import_module(f"blazeproto.{room}")
    return package


def digest(value: Tensor | str) -> str:
    """sha256 of the bytes, with the shape and the dtype; a refusal is itself."""
    if isinstance(value, str):
        return value
    values = value.detach().contiguous().cpu()
    about = f"{values.dtype} {tuple(values.shape)} ".encode()
    data = values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return hashlib.sha256(about + data).hexdigest()


class Side:
    """The requests."""

    def __init__(self, root: Path, device: str) -> None:
        self.package, self.device = package_of(root), device
        self.cases: dict[str, Case] = {}
        self.step: Any = None
        self.graph: Any = None

    # --- Bits ------------------------------------------------------------------------------------------------------------

    def names(self, products: dict[str, Product]) -> list[str]:
        """The names of all cases, which are made here; of these products."""
        kinds = (compare_layers.layer_cases, compare_routing.dispatch_cases, compare_routing.router_cases)
        cases = [*product_cases(self.package, self.device, products)]
        cases += [case for kind in kinds for case in kind(self.package, self.device)]
        self.cases = {case.name: case for case in cases}
        if len(self.cases) < len(cases):
            raise ValueError("cases: expected different names, one is there twice")
        return list(self.cases)

    def run(self, name: str) -> dict[str, Any]:
        """``hashes`` of a case's outputs by name; of floats that vary, ``runs``: the values of several runs, in fp32."""
        case = self.cases[name]
        made = case.run()
        for output, tensor in made.items() if case.finite else ():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{output}: expected finite values")
        runs: dict[str, list[Any]] = {}
        if case.varies:
            every = [made, *(case.run() for _ in range(FUSED_RUNS - 1))]
            for output, tensor in made.items():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    runs[output] = [each[output].detach().float().cpu() for each in every]  # type: ignore[union-attr]
        return {"hashes": {output: digest(made[output]) for output in made if output not in runs}, "runs": runs}

    # --- Time ------------------------------------------------------------------------------------------------------------

    def warm(self, kind: str, sizes: tuple[int, ...]) -> None:
        """Compile what a shape needs, on a few of its tokens."""
        tokens, d, n, experts, top_k = sizes
        self.package.gemm.prepare(d, n, experts, top_k, jobs=2)
        self.package.dispatch.prepare_dispatch(tokens, top_k, experts)
        self.load(kind, (WARM_TOKENS, *sizes[1:]), graph=False)
        self.unload()

    def load(self, kind: str, sizes: tuple[int, ...], graph: bool = True) -> int:
        """Make a layer and capture its step; the bytes of a step's peak over what lies there before."""
        shape = Shape(*sizes)
        self.step = getattr(compare_layers, f"{kind}_step")(self.package, self.device, shape)
        self.step()
        if self.device != "cuda":
            return 0
        from scripts.bench.timing import capture, peak_bytes

        if not graph:
            torch.cuda.synchronize()
            return 0
        self.step()
        peak = peak_bytes(self.step)
        self.graph = capture(self.step, torch.cuda.graph_pool_handle())
        return peak

    def time(self) -> float:
        """Milliseconds a step, by replay of the graph."""
        from blazeproto.lab.times import elapsed_ms

        once = elapsed_ms(self.graph.replay, 1, queued=True)
        calls = max(1, min(MOST_CALLS, math.ceil(BURST_MS / max(once, 1e-3))))
        return elapsed_ms(self.graph.replay, calls, queued=True)

    def unload(self) -> None:
        """Give back the layer's memory."""
        self.step = self.graph = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def serve(side: Side, requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the requests end. A GPU that has failed runs nothing more, so its process ends too."""
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pickle.load(requests)
            failed = None
            try:
                answer = ("done", getattr(side, name)(*arguments))
            except Exception as error:  # noqa: BLE001  one case that fails is no reason to lose the others
                last = traceback.extract_tb(error.__traceback__)[-1]
                failed, answer = error, ("failed", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")
            pickle.dump(answer, answers)
            answers.flush()
            if isinstance(failed, torch.AcceleratorError):
                return


def main() -> None:
    parser = argument_parser("scripts.checks.compare_worker", __doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("device", choices=("cuda", "cpu"))
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes elsewhere
    serve(Side(options.checkout.resolve(), options.device), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
