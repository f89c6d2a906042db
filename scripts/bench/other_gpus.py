"""The table of docs/other_gpus.md: GPUs on which the ampere kernels were not measured, and the times that a layer may take there.

`scripts.bench.plot_results` writes it. A prediction is a layer's floor at the GPU's rates over the share of their floor that the
kernels reached on the GPU that was measured (ampere.json).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from blazeproto import cost
from blazeproto.gemm.product import Sizes
from scripts.bench.common import geometric_mean
from scripts.bench.markdown import NOT_MEASURED, origin

LAYERS = Sizes(16384, 2048, 768, 128, 8), Sizes(4096, 1024, 512, 64, 4)
MEASURED = cost.GPU(640e12, cost.GPUS["H200"].bytes, "measured, operations by mma.sync")
HEADER = ("GPU", "compute capability", "shared memory of a CTA, KB", "memory, GB", "bf16, TFLOP/s", "memory, TB/s")


class Card(NamedTuple):
    """A GPU by NVIDIA's documents. smem: KB of shared memory that a CTA may have.  gigabytes: of memory.
    rates: operations with fp32 accumulation, dense."""

    capability: str
    smem: int
    gigabytes: int
    rates: cost.GPU


CARDS = {
    "A100 80GB SXM": Card("8.0", 163, 80, cost.GPU(312e12, 2.039e12, "A100 data sheet")),
    "L4": Card("8.9", 99, 24, cost.GPU(121e12, 0.3e12, "L4 data sheet, 242 TFLOP/s with sparsity")),
    "RTX 3090": Card("8.6", 99, 24, cost.GPU(71e12, 0.936e12, "GA102 whitepaper")),
    "RTX 4090": Card("8.9", 99, 24, cost.GPU(165.2e12, 1.008e12, "Ada whitepaper")),
    "RTX 5090": Card("12.0", 99, 32, cost.GPU(209.5e12, 1.792e12, "RTX Blackwell whitepaper")),
}


def floor_ms(sizes: Sizes, rates: cost.GPU) -> float:
    """The least time of a layer's forward and backward: the longer of each step's operations and bytes, summed."""
    steps = cost.layer_work(sizes)
    return sum(1e3 * max(step.operations / rates.operations, step.least_bytes / rates.bytes) for step in steps)


def layer_gigabytes(sizes: Sizes, bytes_a_parameter: int = 4) -> float:
    """At most what a training step holds: parameters, by default with their gradients; x, out, and their gradients; H, act and Y,
    and the gradients of H and Y."""
    tokens = 4 * sizes.T * sizes.d + sizes.rows * (5 * sizes.n + 2 * sizes.d)
    return 1e-9 * (cost.weight_bytes(sizes, 1, bytes_a_parameter) + cost.BF16_BYTES * tokens)


def shares(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Floors over measured times."""
    return [floor_ms(Sizes(**row["cfg"]), MEASURED) / row["ampere_ms"] for row in rows]


def other_gpus_table(record: dict[str, Any]) -> str:
    """A GPU a line: what NVIDIA's documents say of it, and predicted ms."""
    rows = [row for row in record["rows"] if "ampere_ms" in row]
    if not rows:
        return NOT_MEASURED
    found = shares(rows)
    share = geometric_mean(found)
    names = ["predicted ms: " + ", ".join(map(str, sizes[:5])) for sizes in LAYERS]
    lines: list[list[str]] = [[*HEADER, *names], ["---"] + ["---:"] * (len(HEADER) + len(names) - 1)]
    for name, card in CARDS.items():
        operations, least_bytes, _ = card.rates
        said = [
            card.capability,
            str(card.smem),
            str(card.gigabytes),
            f"{operations / 1e12:g}",
            f"{least_bytes / 1e12:g}",
        ]
        lines.append([name, *said, *(f"{floor_ms(sizes, card.rates) / share:.1f}" for sizes in LAYERS)])
    sources = "; ".join(f"{name}: {card.rates.source}" for name, card in CARDS.items())
    held = " and ".join(f"{layer_gigabytes(sizes):.1f}" for sizes in LAYERS)
    note = (
        f"**Predictions, not measurements.** Forward + backward of one layer, by T, d, n, E, K, in bf16. A prediction is the "
        f"layer's floor at the GPU's rates, over {share:.2f}. That is the share of their floor that the kernels reach on an H200 "
        f"({min(found):.2f} to {max(found):.2f} on {len(found)} layers), at the measured 640 TFLOP/s by mma.sync and 4.24 TB/s. "
        f"A training step of these layers holds at most {held} GB, without an optimizer's states. "
        f"Rates: NVIDIA's, dense, with fp32 accumulation ({sources}). Shares: {origin(rows)}"
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}"
