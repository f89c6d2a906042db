"""What the benchmarks share: the 23 layer shapes, routings, and the record of where a number came from.

Floors and bytes are those of `blazeproto.cost`, of a shape's ``sizes``.
"""

from __future__ import annotations

import argparse
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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blazeproto.gemm import Sizes
from blazeproto.router import make_router
from blazeproto.router.choice import VaryingChoice
from scripts.bench import identity
from scripts.command import argument_parser, need_hopper, positive

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "results" / "h200"

MIB = 2**20


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
QUICK_SHAPES: tuple[Sizes, ...] = (SHAPES[0], SHAPES[8], SHAPES[15], SHAPES[20])
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


def parse_shapes(text: str, shapes: Sequence[Sizes] = SHAPES) -> list[Sizes]:
    """ "1-3,23": numbers from 1 in the order of ``shapes``; or a table's name."""
    chosen: list[Sizes] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if part in TABLES:
            chosen += TABLES[part]
        elif first.isdecimal() and (last or first).isdecimal() and 1 <= int(first) <= int(last or first) <= len(shapes):
            chosen += shapes[int(first) - 1 : int(last or first)]
        else:
            expected = f"numbers from 1 to {len(shapes)} such as 1-3,23, or one of {', '.join(TABLES)}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {part!r}")
    return chosen


def bench_parser(
    name: str,
    doc: str | None,
    *,
    quick: str = "",
    configs: Sequence[Sizes] = (),
    resume: bool = False,
    time_budget: bool = False,
) -> argparse.ArgumentParser:
    """The options that benchmarks share: --rounds and --out, and what is asked for.

    quick: what --quick does.  configs: the shapes that --configs numbers.  resume: --resume, and --time-budget, which
    ``time_budget`` asks for alone.
    """
    parser = argument_parser(f"scripts.bench.{name}", doc)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--out", type=Path, help=f"results file (default results/h200/{name}.json)")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if configs:
        what = "numbers such as 1-3, or a table: " + ", ".join(TABLES)
        parser.add_argument("--configs", type=partial(parse_shapes, shapes=configs), help=what)
    if resume:
        parser.add_argument(
            "--resume", action="store_true", help="leave out what the file has of the same kernels and benchmark"
        )
    if time_budget or resume:
        what = "skip what would start later"
        parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS", help=what)
    return parser


def settled(options: argparse.Namespace, name: str, rounds: int, quick_rounds: int = 7) -> argparse.Namespace:
    """The options, with how many rounds there are, and --quick's own results file."""
    options.rounds = options.rounds or (quick_rounds if options.quick else rounds)
    if options.quick:
        options.out = options.out or RESULTS / f"{name}-quick.json"
    return options


def sizes_of_run(config: Any, batch: int, ranks: int = 1) -> dict[str, Any]:
    """What a row of a run of the language model says of its layers, by `layer_tiles.has_other_tiles`.

    config: of `scripts.lm.settings`.  batch: a rank's sequences in a step.  ranks: over which the experts are spread.
    """
    tokens, experts, top_k = batch // config.accumulate * config.context, config.num_experts, config.top_k
    tile = {"tile": config.rounding_tile} if "rounding" in config.router else {}
    sizes = {"T": tokens, "d": config.d_model, "n": config.d_expert, "E": experts, "K": top_k}
    choice = make_router(config.router, config.d_model, experts, top_k, device="meta", **tile).choice
    most = choice.max_pairs(tokens, experts, top_k) if isinstance(choice, VaryingChoice) else ranks * tokens * top_k
    return {"cfg": sizes, "ranks": ranks, "row_counts": [most], "several_sizes": True}


# ---------------------------------------------------------------------------------------------------------- routings


def route(shape: Sizes, kind: str, device: torch.device | str, generator: torch.Generator) -> torch.Tensor:
    """Expert ids (T, K) int32, distinct in a row.

    "uniform": every K of the E experts equally likely. "zipf": popularity of the r-th expert ~ r^-1.2, drawn without
    replacement (Gumbel top-k). "half_on_one": half of the tokens use expert 0, the others never do.
    """
    T, E, K = shape.T, shape.E, shape.K
    experts = torch.empty(T, K, dtype=torch.int32, device=device)
    for start in range(0, T, 1 << 17):  # bounds the (tokens, E) scratch
        tokens = min(1 << 17, T - start)
        keys = torch.rand(tokens, E, device=device, generator=generator)
        if kind == "zipf":
            rank = torch.arange(1, E + 1, device=device, dtype=torch.float32)
            keys = -1.2 * rank.log() - (-keys.clamp_min(1e-12).log()).log()
        elif kind == "half_on_one":
            first = torch.arange(start, start + tokens, device=device) % 2 == 0
            keys[:, 0] = torch.where(first, 2.0, -1.0 if K < E else 0.5)
        elif kind != "uniform":
            raise ValueError(f"kind: expected 'uniform', 'zipf' or 'half_on_one', got {kind!r}")
        experts[start : start + tokens] = keys.topk(K, dim=1).indices
    return experts


# -------------------------------------------------------------------------------------------------------- provenance


def source_hash() -> str:
    """sha256 over the package's sources in sorted order: which code a result belongs to."""
    digest = hashlib.sha256()
    package = REPOSITORY / "blazeproto"
    for path in sorted(package.rglob("*")):
        if path.suffix in {".py", ".cu", ".cuh"} and path.is_file():
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def installed_versions() -> list[str]:
    names = (
        "torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "numba", "numba-cuda", "cuda-bindings",
        "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "scattermoe", "megablocks", "stanford-stk",
        "transformers", "peft", "torchao", "sgl-deep-gemm", "liger-kernel",
    )  # fmt: skip
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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
    """What a row says under "of". measured: when.  gpu, versions.  kernels: the identities of those that were launched."""
    identity.KERNELS.update(kernels)
    of = {"measured": now(), "gpu": gpu_name(), "versions": ", ".join(installed_versions())}
    return of | {"kernels": sorted(kernels)}


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


def with_row(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with one more, in the place of its shape's last; in the order of MODULE_SHAPES."""
    order = {shape: index for index, shape in enumerate(MODULE_SHAPES)}
    rows = [other for other in rows if other["cfg"] != row["cfg"]] + [row]
    return sorted(rows, key=lambda row: order.get(Sizes(**row["cfg"]), len(order)))


def rows_of(shape: Sizes, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A shape's rows that are of the kernels and the benchmark that are here."""
    return [row for row in rows if row["cfg"] == cfg_of(shape) and not identity.earlier(row)]


def in_turn(wanted: Iterable[Any], seconds: float = math.inf) -> Iterator[Any]:
    """Those of ``wanted`` that can begin in ``seconds``, the GPU's memory being freed after each. Says what was left out."""
    begin, skipped = time.monotonic(), []
    for each in wanted:
        if time.monotonic() - begin > seconds:
            skipped.append(str(each))
            continue
        yield each
        gc.collect()
        torch.cuda.empty_cache()
    left_out = f"skipped for time: {', '.join(skipped)}" if skipped else "nothing skipped"
    print(f"{time.monotonic() - begin:.0f} s; {left_out}")


def begun(name: str, doc: str | None, paragraphs: int = 1, **fields: Any) -> dict[str, Any]:
    """A record without rows, printed: where and when, and the protocol, which is the last paragraphs of a docstring."""
    protocol = " ".join(" ".join((doc or "").split("\n\n")[-paragraphs:]).split())
    record = provenance() | {"benchmark": name, "protocol": protocol} | fields | {"rows": []}
    print(record["gpu"], "|", ", ".join(record["versions"]), "|", record["sources_sha256"][:12], flush=True)
    return record


def measure_in_turn(
    name: str, doc: str | None, options: argparse.Namespace, jobs: Iterable[tuple[Any, ...]], parts: Sequence[str]
) -> None:
    """Measure on a Hopper GPU, and write after each row: to --out, or NAME.json in the folder of the GPU that is here.

    jobs: where in the record the row goes, what makes it, and the arguments.  parts: of the record, besides "rows".
    """
    need_hopper()
    record = begun(name, doc) | {part: [] for part in parts}
    out = options.out or RESULTS.parent / folder_of(gpu_name()) / f"{name}.json"
    for part, measure, *arguments in in_turn(jobs, options.time_budget):
        row = stamped(measure, *arguments)
        record[part].append(row)
        print(part, {field: value for field, value in row.items() if field != "of"}, flush=True)
        write_json(out, record)


def part_file(name: str) -> Path:
    """Where a benchmark writes row after row, so that one that measures a part, or is cut short, leaves NAME.json alone."""
    return RESULTS / f"{name}-part.json"


def finished(name: str, *, whole: bool) -> Path:
    """The file that a benchmark has written in the end: its part file, renamed to NAME.json if the ``whole`` was measured."""
    return part_file(name).replace(RESULTS / f"{name}.json") if whole else part_file(name)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """Fixed-width text, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
