"""Shared by the benchmarks: the 23 layer shapes, routings, and the record of where a number came from.

Floors and bytes come from `blazeproto.cost`, for a shape's ``sizes``.
"""

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from blazeproto.gemm import Sizes
from blazeproto.router import make_router
from blazeproto.router.choice import VaryingChoice
from scripts.bench import identity

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "results" / "h200"

MIB = 2**20
T = TypeVar("T")


def cfg_of(shape: Sizes) -> dict[str, int]:
    """A layer's sizes as a row of results has them, by their letters."""
    return {letter: getattr(shape, letter) for letter in "TdnEK"}


# Tables 9a of the SonicMoE paper, 1 and 2 of the MoEBlaze paper (n = 4d in Table 1; n = d = 256 in Table 2).
TABLES: dict[str, tuple[Sizes, ...]] = {
    "sonicmoe-9a": tuple(
        Sizes(T, d, n, E, K)
        for T, d, n, E, K in (
            (40960, 768, 256, 128, 8),
            (40960, 768, 512, 64, 4),
            (40960, 768, 1024, 32, 2),
            (24576, 1536, 256, 128, 8),
            (24576, 1536, 512, 64, 4),
            (24576, 1536, 1024, 32, 2),
            (32768, 4096, 256, 256, 16),
            (32768, 4096, 512, 128, 8),
            (32768, 4096, 1024, 64, 4),
            (32768, 4096, 512, 256, 16),
            (32768, 4096, 1024, 128, 8),
            (32768, 4096, 2048, 64, 4),
        )
    ),
    "moeblaze-1": tuple(
        Sizes(T, d, 4 * d, E, K)
        for T, d, E, K in (
            (65536, 512, 4, 1),
            (65536, 1024, 8, 2),
            (65536, 1024, 16, 4),
            (32768, 512, 16, 4),
            (16384, 1024, 16, 4),
            (8192, 2048, 8, 4),
        )
    ),
    "moeblaze-2": tuple(Sizes(T, 256, 256, 128, 4) for T in (8192, 32768, 131072, 524288, 2097152)),
}
SHAPES: tuple[Sizes, ...] = tuple(shape for shapes in TABLES.values() for shape in shapes)
# Those that whole layers are compared on beside them: many experts, odd widths, few rows an expert; Mixtral 8x7B, DeepSeek-V3.
EXTRA_SHAPES = (
    Sizes(16384, 4096, 512, 512, 8),
    Sizes(16384, 2880, 2880, 128, 4),
    Sizes(8192, 4096, 1536, 256, 6),
    Sizes(16384, 5120, 1536, 160, 6),
    Sizes(16384, 4096, 14336, 8, 2),
    Sizes(32768, 4096, 14336, 8, 2),
    Sizes(16384, 7168, 2048, 256, 8),
)
MODULE_SHAPES = (*SHAPES, *EXTRA_SHAPES)


def table_of(shape: Sizes) -> str:
    """The table a shape comes from, or "" for one of the user's own."""
    return next((table for table, shapes in TABLES.items() if shape in shapes), "")


def parse_shapes(text: str, shapes: Sequence[T]) -> list[T]:
    """ "1-3,23": numbers from 1 in the order of ``shapes``."""
    chosen: list[T] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (
            first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first) <= len(shapes)
        ):
            raise argparse.ArgumentTypeError(f"expected numbers from 1 to {len(shapes)} such as 1-3,23, got {part!r}")
        chosen += shapes[int(first) - 1 : int(last or first)]
    return chosen


def sizes_of_run(config: Any, batch: int, ranks: int = 1) -> dict[str, Any]:
    """The sizes of its layers that a row of a language-model run states, for `layer_tiles.has_other_tiles`.

    config: of `scripts.lm.settings`.  batch: a rank's sequences in a step.  ranks: over which the experts are spread.
    """
    tokens = batch // config.accumulate * config.context
    shape = Sizes(tokens, config.d_model, config.d_expert, config.num_experts, config.top_k)
    tile = {"tile": config.rounding_tile} if "rounding" in config.router else {}
    choice = make_router(config.router, shape.d, shape.E, shape.K, device="meta", **tile).choice
    most = choice.max_pairs(shape.T, shape.E, shape.K) if isinstance(choice, VaryingChoice) else ranks * shape.rows
    return {"cfg": cfg_of(shape), "ranks": ranks, "row_counts": [most], "several_sizes": True}


# ---------------------------------------------------------------------------------------------------------- routings


def route(
    shape: Sizes, kind: str, device: torch.device | str, generator: torch.Generator, exponent: float = 1.2
) -> torch.Tensor:
    """Expert ids (T, K) int32, distinct in a row.

    "uniform": every K of the E experts equally likely. "zipf": popularity of the r-th expert ~ r^-exponent, drawn without
    replacement (Gumbel top-k). "half_on_one": half of the tokens use expert 0, the others never do.
    """
    T, E, K = shape.T, shape.E, shape.K
    experts = torch.empty(T, K, dtype=torch.int32, device=device)
    for start in range(0, T, 1 << 17):  # bounds the (tokens, E) scratch
        tokens = min(1 << 17, T - start)
        keys = torch.rand(tokens, E, device=device, generator=generator)
        if kind == "zipf":
            rank = torch.arange(1, E + 1, device=device, dtype=torch.float32)
            keys = -exponent * rank.log() - (-keys.clamp_min(1e-12).log()).log()
        elif kind == "half_on_one":
            first = torch.arange(start, start + tokens, device=device) % 2 == 0
            keys[:, 0] = torch.where(first, 2.0, -1.0 if K < E else 0.5)
        elif kind != "uniform":
            raise ValueError(f"kind: expected 'uniform', 'zipf' or 'half_on_one', got {kind!r}")
        experts[start : start + tokens] = keys.topk(K, dim=1).indices
    return experts


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """The places of 0, 1, 2, ... in a permutation (R,) int64."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


# -------------------------------------------------------------------------------------------------------- provenance


def source_hash() -> str:
    """sha256 over the package's sources in sorted order: which code a result belongs to."""
    package = REPOSITORY / "blazeproto"
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in {".py", ".cu", ".cuh"} and path.is_file()]
    parts = (path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() for path in sources)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def installed_versions() -> list[str]:
    names = (
        "torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "numba", "numba-cuda", "cuda-bindings",
        "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "scattermoe", "megablocks", "stanford-stk",
        "transformers", "peft", "torchao", "sgl-deep-gemm", "liger-kernel",
    )  # fmt: skip
    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


@cache
def gpu_name() -> str:
    """Name and driver of the first GPU, as the peers' results spell it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    name, _, driver = line.partition(", ")
    return f"{name}, driver {driver}"


def folder_of(gpu: str) -> str:
    """The folder of a GPU's results: "h100" of "NVIDIA H100 80GB HBM3, driver ..."."""
    found = re.search(r"\b[A-Z]+\d+", gpu.upper().replace("NVIDIA", ""))
    return found[0].lower() if found else "other"


def provenance() -> dict[str, Any]:
    """Date, GPU, versions and the hash of the sources measured."""
    return {
        "gpu": gpu_name(),
        "measured": now(),
        "versions": installed_versions(),
        "sources_sha256": source_hash(),
    }


def now() -> str:
    """As results files have it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def stamped(measure: Callable[..., Any], *arguments: Any) -> Any:
    """The row that a benchmark's function makes, or its list of rows, each with what it is of: `of_kernels`, and

    protocol, version: the benchmark's name and version (`identity.VERSIONS`).
    """
    with identity.launched() as kernels:
        made = measure(*arguments)
    name = identity.name_of(measure)
    of = of_kernels(kernels) | {"protocol": name, "version": identity.VERSIONS.get(name, 1)}
    return [row | {"of": of} for row in made] if isinstance(made, list) else made | {"of": of}


def of_kernels(kernels: dict[str, identity.Description]) -> dict[str, Any]:
    """The field "of" of a row. measured: when.  gpu, versions.  kernels: the identities of the launched kernels."""
    identity.KERNELS.update(kernels)
    versions = ", ".join(installed_versions())
    return {"measured": now(), "gpu": gpu_name(), "versions": versions, "kernels": sorted(kernels)}


def read_json(path: Path) -> dict[str, Any]:
    """A results file; the kernels that it describes are known from now on."""
    record: dict[str, Any] = json.loads(path.read_text())
    identity.KERNELS.update(record.get("kernels", {}))
    return record


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record, with the descriptions of its rows' kernels, whole or not at all: a run cut short leaves the last complete
    file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {name for row in identity.rows_in(record) for name in row["of"].get("kernels", ())}
    if names:
        record = record | {"kernels": {name: identity.KERNELS[name] for name in sorted(names)}}
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def in_turn(
    wanted: Iterable[T],
    seconds: float = math.inf,
    *,
    later: Callable[[T], float] = lambda each: 0.0,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[T]:
    """Those of ``wanted`` that can begin in ``seconds``, the GPU's memory being freed after each. Says what was left out.

    later: seconds that one leaves to those after it.  agreed: what all ranks take for true, of what this one does.
    """
    begin, skipped = time.monotonic(), []
    for each in wanted:
        if agreed(time.monotonic() - begin > seconds - later(each)):
            skipped.append(str(each))
            continue
        yield each
        free_memory()
    left_out = f"skipped for time: {', '.join(skipped)}" if skipped else "nothing skipped"
    print(f"{time.monotonic() - begin:.0f} s; {left_out}")


def free_memory() -> None:
    """That nobody has any more, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def begun(name: str, doc: str | None, paragraphs: int = 1, **fields: Any) -> dict[str, Any]:
    """A record without rows, printed: where and when, and the protocol, which is the last paragraphs of a docstring."""
    protocol = " ".join(" ".join((doc or "").split("\n\n")[-paragraphs:]).split())
    record = provenance() | {"benchmark": name, "protocol": protocol} | fields
    print(record["gpu"], "|", ", ".join(record["versions"]), "|", record["sources_sha256"][:12], flush=True)
    return record


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Fixed-width text, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
