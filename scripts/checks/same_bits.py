"""Does a checkout compute what another one does, to the bit? Hashes of outputs and gradients of fixed layers, compared.

    python -m scripts.checks.same_bits --package-root .base --out old.json    # blazeproto of the folder .base
    python -m scripts.checks.same_bits --package-root . --out new.json
    python -m scripts.checks.same_bits --compare old.json new.json            # names what differs; exit code 1 if any

Each run is a process of its own, so that the two packages never meet. Layers go through the public ``moe_mlp`` and ``MoE``;
then every product, dispatch and top-k by itself. combine="fused" adds in an order that varies: it runs three times, and two
checkouts agree where their nearest outputs differ by no more than one checkout's differ from each other. --backend torch
runs layers of a few tokens on a CPU, to try this script.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import itertools
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scripts.checks import bit_cases, bit_products
from scripts.command import argument_parser, need_hopper, refuse

FUSED_RUNS = 3
SMOKE_TOKENS = 300  # of a layer, at most, where the torch backend runs on a CPU
Outputs = dict[str, Tensor]
Record = dict[str, Any]


def package_of(root: Path) -> ModuleType:
    """blazeproto of the checkout at ``root``, its rooms loaded. SystemExit if another one is found."""
    sys.path.insert(0, str(root.resolve()))
    package = importlib.import_module("blazeproto")
    found = Path(package.__file__ or "").resolve().parents[1]
    if found != root.resolve():
        raise SystemExit(f"--package-root: expected blazeproto in {root.resolve()}, got that of {found}")
    for room in ("dispatch", "gemm", "router"):
        importlib.import_module(f"blazeproto.{room}")
    return package


# --- Runs ----------------------------------------------------------------------------------------------------------------


def cases(package: ModuleType, backend: str) -> Iterator[tuple[str, Callable[[], Outputs], bool]]:
    """Name, what runs it, and whether its output varies from run to run."""
    device = "cuda" if backend == "hopper" else "cpu"
    for layer in bit_cases.layer_cases():
        if backend == "hopper" or (layer.shape[0] <= SMOKE_TOKENS and not layer.given_dispatch):
            of_layer = partial(bit_cases.run_layer, package, layer, backend, device)
            yield layer.name, of_layer, layer.fused and backend == "hopper"
    for router in bit_cases.ROUTERS:
        yield f"MoE: {router}", partial(bit_cases.run_module, package, router, backend, device), False
    if backend == "hopper":
        for case in bit_products.product_cases():
            yield case.name, partial(bit_products.run_products, package, case, device), False
        for name, run in bit_products.routing_cases(package, device):
            yield name, run, False


def digest(tensor: Tensor) -> str:
    """sha256 of the bytes, with the shape and the dtype."""
    values = tensor.detach().contiguous().cpu()
    about = f"{values.dtype} {tuple(values.shape)} ".encode()
    return hashlib.sha256(about + values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def pack(tensor: Tensor) -> str:
    """The values as fp32, in text."""
    return base64.b85encode(zlib.compress(tensor.detach().float().cpu().numpy().tobytes())).decode()


def unpack(text: str) -> Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=torch.float32)


def relative_difference(first: Tensor, second: Tensor) -> float:
    """Largest difference over the largest value."""
    if not first.numel():
        return 0.0
    return float((first - second).abs().max() / torch.maximum(first.abs().max(), second.abs().max()).clamp_min(1e-30))


def run_case(run: Callable[[], Outputs], varies: bool) -> Record:
    """What a case leaves in the file: a hash an output; of "out", where it varies, the values of each run instead."""
    runs = [run() for _ in range(FUSED_RUNS if varies else 1)]
    for name, tensor in runs[0].items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name}: expected finite values")
    made: Record = {
        "hashes": {name: digest(tensor) for name, tensor in runs[0].items() if not (varies and name == "out")}
    }
    if varies:
        made["out"] = [pack(each["out"]) for each in runs]
        made["run_to_run"] = run_to_run(made["out"])
    return made


def run_to_run(texts: list[str]) -> float:
    """How far runs of one checkout are from each other, at most."""
    pairs = itertools.combinations(map(unpack, texts), 2)
    return max(relative_difference(first, second) for first, second in pairs)


def compile_kernels(package: ModuleType) -> None:
    """All kernels at once, on all cores."""
    kernels = [*package.gemm.all_kernels()]
    if hasattr(package.gemm, "Rows"):  # those of combine and the small sums had a list of their own
        kernels += importlib.import_module("blazeproto.gemm.rowops").all_kernels()
    start = time.perf_counter()
    importlib.import_module("blazeproto.gemm.compile").compile_many(kernels)
    print(f"{len(kernels)} kernels in {time.perf_counter() - start:.1f} s", flush=True)


def measure(root: Path, backend: str, only: list[str]) -> Record:
    """The record of one checkout. only: cases whose name has one of these in it; none for all."""
    package = package_of(root)
    if backend == "hopper":
        compile_kernels(package)
    gpu = torch.cuda.get_device_name() if backend == "hopper" else "none"
    record: Record = {"package": str(root), "backend": backend, "gpu": gpu, "torch": torch.__version__, "cases": {}}
    start = time.perf_counter()
    for name, run, varies in cases(package, backend):
        if only and not any(text in name for text in only):
            continue
        try:
            record["cases"][name] = run_case(run, varies)
        except Exception as error:  # noqa: BLE001  one case that fails is no reason to lose the others
            record["cases"][name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name}: {record['cases'][name]['error'][:500]}", flush=True)
            if isinstance(error, torch.AcceleratorError):
                break  # after which nothing runs on this GPU
    failed = sum("error" in made for made in record["cases"].values())
    print(f"{len(record['cases'])} cases, {failed} failed, {time.perf_counter() - start:.1f} s; {package.__file__}")
    return record


# --- Comparison ----------------------------------------------------------------------------------------------------------


def differences(old: Record, new: Record) -> list[str]:
    """A line for each case that differs, failed, or is in one record only."""
    lines = [f"{key}: {old[key]} and {new[key]}" for key in ("backend", "gpu", "torch") if old[key] != new[key]]
    for name in dict.fromkeys((*old["cases"], *new["cases"])):
        records = [record["cases"].get(name) for record in (old, new)]
        if any(made is None for made in records):
            lines.append(f"{name}: in one of the two only")
            continue
        if errors := [made["error"] for made in records if "error" in made]:
            lines += [f"{name}: failed: {error}" for error in dict.fromkeys(errors)]
            continue
        before, after = records
        outputs = dict.fromkeys((*before["hashes"], *after["hashes"]))
        wrong = [output for output in outputs if before["hashes"].get(output) != after["hashes"].get(output)]
        if "out" in before and (off := too_far(before["out"], after["out"])):
            wrong.append(off)
        if wrong:
            lines.append(f"{name}: {', '.join(wrong)}")
    return lines


def too_far(before: list[str], after: list[str]) -> str:
    """Outputs that vary: "" if the nearest of two checkouts are as near as the farthest of one."""
    own = max(run_to_run(before), run_to_run(after))
    pairs = itertools.product(map(unpack, before), map(unpack, after))
    nearest = min(relative_difference(first, second) for first, second in pairs)
    return "" if nearest <= own else f"out: {nearest:.3g} apart, {own:.3g} from run to run"


def compare(old: Record, new: Record) -> int:
    """Prints what differs; the exit code."""
    lines = differences(old, new)
    print("\n".join(lines))
    for name, made in new["cases"].items():
        if "run_to_run" in made:
            earlier = old["cases"].get(name, {}).get("run_to_run")
            print(f"{name}: from run to run {earlier} and {made['run_to_run']}")
    print(f"{len(new['cases'])} cases; {f'{len(lines)} lines differ' if lines else 'all the same'}")
    return 1 if lines or not new["cases"] else 0


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.checks.same_bits", __doc__)
    parser.add_argument("--package-root", type=Path, help="folder that blazeproto/ is in")
    parser.add_argument("--out", type=Path, help="file of hashes to write")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="two such files")
    parser.add_argument("--backend", choices=("hopper", "torch"), default="hopper")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases with this in their names")
    options = parser.parse_args(words)
    if not options.compare and not (options.package_root and options.out):
        parser.error("expected --package-root and --out, or --compare")
    if missing := [str(path) for path in options.compare or () if not path.is_file()]:
        parser.error(f"--compare: expected two files, but there is no {' and no '.join(missing)}")
    return options


def main() -> int:
    options = arguments()
    if options.compare:
        old, new = (json.loads(path.read_text()) for path in options.compare)
        return compare(old, new)
    if options.backend == "hopper":
        need_hopper()
    record = measure(options.package_root, options.backend, options.only)
    if not record["cases"]:
        refuse(f"--only: expected parts of cases' names, but none has any of {options.only}; nothing was written")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any("error" in made for made in record["cases"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
