"""The GPU's hardware counters of one launch: tensor pipe, L2, DRAM, and warps' reasons to wait. By Nsight Compute (ncu).

>>> from blazeproto.lab.counters import counters
>>> counters("up_forward", T=40960, d=768, n=256, E=128, K=8)

ncu watches a program from its start, so the product is launched by a process of its own:

    ncu ... python -m blazeproto.lab.watched '{"product": "up_forward", "T": 40960, "d": 768, "n": 256, "E": 128, "K": 8, ...}'
"""

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blazeproto.gemm import TileConfig
from blazeproto.gemm.registry import PRODUCTS, kernel_for
from blazeproto.runtime import checks

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
# Field: metric. Of several the first that this GPU and this ncu know.
METRICS: dict[str, tuple[str, ...]] = {
    "milliseconds": ("gpu__time_duration.sum",),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_hit_rate": ("lts__t_sector_hit_rate.pct",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "dram_read": ("dram__bytes_read.sum",),
    "dram_written": ("dram__bytes_write.sum",),
    "dram_busy": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
}
UNITS = {"milliseconds": 1e6, "tensor_pipe": 100, "l2_hit_rate": 100, "dram_busy": 100}  # ncu says ns and percent
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!.*not_issued)(\w+)_per_issue_active")
STALLS_SHOWN = 5
MINUTES = 5
ROOTS = (Path("/opt/nvidia/nsight-compute"), Path("/usr/local"))  # Nsight Compute's own folder, and where toolkits are
INSTALL = "apt-get install cuda-nsight-compute-12-9 (from NVIDIA's repository), or put its folder on PATH"
ALLOW = (
    "run as root, in a container with --cap-add=SYS_ADMIN, or let every user: "
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/profiling.conf, then reboot"
)


class CountersRefused(PermissionError):
    """The driver lets this user read no counters; the message ends with the command that changes it."""


@dataclass(frozen=True, repr=False)
class HardwareCounters:
    """The counters of one launch. Shares are between 0 and 1; NaN if this GPU or this ncu does not count them.

    tensor_pipe: of the cycles, those in which the tensor cores multiply.  l2_hit_rate: of L2's sectors.  l2_bytes: through L2.
    dram_read, dram_written: bytes.  dram_busy: of DRAM's peak.  stalls: the five reasons that warps waited for most, in cycles a
    warp and an issued instruction.
    """

    kernel: str
    milliseconds: float
    tensor_pipe: float
    l2_hit_rate: float
    l2_bytes: float
    dram_read: float
    dram_written: float
    dram_busy: float
    stalls: Mapping[str, float]

    def __repr__(self) -> str:
        lines = [
            f"{self.kernel}: {self.milliseconds:.4f} ms",
            f"  tensor pipe  {self.tensor_pipe:6.1%} busy",
            f"  L2           {self.l2_hit_rate:6.1%} hits, {self.l2_bytes / 2**20:.1f} MiB",
            f"  DRAM         {self.dram_busy:6.1%} of its peak, {self.dram_read / 2**20:.1f} MiB read, "
            f"{self.dram_written / 2**20:.1f} MiB written",
            "  warps waited, cycles an instruction:",
            *(f"    {reason:20s} {cycles:6.2f}" for reason, cycles in self.stalls.items()),
        ]
        return "\n".join(lines)


def counters(
    product: str,
    T: int,
    d: int,
    n: int,
    E: int,
    K: int,
    *,
    activation: str = "swiglu",
    routing: str = "uniform",
    seed: int = 0,
    precision: str = "bf16",
    config: TileConfig | None = None,
    sources: Path | None = None,
) -> HardwareCounters:
    """Counts one warm launch of a product that is made of tiles, with random inputs (`lab.oracle.make_case`).

    T tokens, d model width, n expert width, E experts, K experts a token.  precision: ``"bf16"`` or ``"fp8"``.
    config: its tiles; default: the package's choice.
    sources: a folder of CUDA sources instead of the package's.

    FileNotFoundError without ncu, CountersRefused if the driver forbids it, RuntimeError if the program fails;
    each says what to do.
    """
    checks.one_of("product", product, tuple(name for name, entry in PRODUCTS.items() if entry.kernel))
    entry = kernel_for(product, config, precision=precision).entry
    sizes = {"T": T, "d": d, "n": n, "E": E, "K": K}
    for name, value in sizes.items():
        checks.integer(name, value, 1)
    ncu = find_ncu()
    options = {
        "product": product,
        **sizes,
        "activation": activation,
        "routing": routing,
        "seed": seed,
        "precision": precision,
        "config": vars(config) if config else None,
        "sources": str(sources) if sources else None,
    }
    path = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    known = re.findall(r"^(\w+__\w+)", _run([ncu, "--query-metrics"]), re.MULTILINE)
    chosen, stalls = choose_metrics({*known})
    if not chosen:
        raise RuntimeError(f"ncu lists none of the metrics that are asked for on this GPU: is {ncu} too old for it?")
    command = [
        *(ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--clock-control", "none"),
        *("--kernel-name-base", "function", "--kernel-name", entry, "--metrics", ",".join([*chosen.values(), *stalls])),
        *(sys.executable, "-m", "blazeproto.lab.watched", json.dumps(options)),
    ]
    return parse(_run(command, os.environ | {"PYTHONPATH": path}), chosen, entry)


# --- ncu -------------------------------------------------------------------------------------------------------------------


def find_ncu() -> str:
    """Path of ncu: on PATH, or the newest in Nsight Compute's folder or a CUDA toolkit. FileNotFoundError if neither has it."""
    if found := shutil.which("ncu"):
        return found
    own, toolkits = ROOTS
    paths = [*own.glob("*/ncu"), *toolkits.glob("cuda*/bin/ncu")]
    usable = [path for path in paths if os.access(path, os.X_OK)]
    if not usable:
        raise FileNotFoundError(f"ncu (Nsight Compute) is not on PATH, in {own} or in {toolkits}/cuda*/bin: {INSTALL}")
    return str(max(usable, key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))]))


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command of ncu's prints."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60 * MINUTES)
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise CountersRefused(f"this user may not read the GPU's counters: {ALLOW}")
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}:\n{said[-3000:]}")
    return done.stdout


def choose_metrics(known: set[str]) -> tuple[dict[str, str], list[str]]:
    """For each field of METRICS the first of its metrics whose base name is known; and the metrics of all stalls."""
    first = {
        field: next((metric for metric in metrics if metric.partition(".")[0] in known), None)
        for field, metrics in METRICS.items()
    }
    stalls = [f"{name}.ratio" for name in sorted(known) if STALL.fullmatch(name)]
    return {field: metric for field, metric in first.items() if metric}, stalls


def parse(output: str, chosen: Mapping[str, str], kernel: str) -> HardwareCounters:
    """Reads the output of ``ncu --csv --print-units base`` for one launch; other lines are left out.

    chosen: the metric of each field.  RuntimeError where no launch was profiled.
    """
    lines = output.splitlines()
    header = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise RuntimeError(f"ncu profiled no launch of {kernel}; it said:\n{output[-2000:]}")
    table = "\n".join(line for line in lines[header:] if line.startswith('"'))
    values: dict[str, float] = {}
    for row in csv.DictReader(io.StringIO(table)):
        try:
            values.setdefault(row["Metric Name"], float(row["Metric Value"].replace(",", "")))
        except ValueError:  # n/a
            continue
    stalls = {
        match[1]: value for name, value in values.items() if (match := STALL.match(name)) and match[1] != "selected"
    }
    return HardwareCounters(
        kernel=kernel,
        stalls=dict(sorted(stalls.items(), key=lambda item: -item[1])[:STALLS_SHOWN]),
        **{name: values.get(chosen.get(name, ""), math.nan) / UNITS.get(name, 1) for name in METRICS},
    )
