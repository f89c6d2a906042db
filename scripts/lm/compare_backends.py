"""Train the same model from one seed with backend="hopper" and backend="torch", and see whether the loss curves agree.

    python -m scripts.lm.compare_backends --train            # two runs of 500 steps: results/h200/curves.json, docs/curves.png
    python -m scripts.lm.compare_backends                    # the verdict and the picture again, from curves.json

They agree when the smoothed losses differ by at most 1 % at every step. Both runs see the same batches and dropout masks;
what differs is the rounding inside the products, and from there the choice of an expert where two are nearly even. At
the presets' learning rates that alone makes two runs of one backend differ by about 1 %, at 3e-4 by 0.05 %
(results/cpu/rounding_noise.txt), so both runs use 3e-4.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import train_lm
from scripts.bench.common import REPOSITORY, RESULTS, of_kernels, read_json, write_json
from scripts.bench.identity import launched
from scripts.command import argument_parser, need_kernels, refuse
from scripts.lm.run_folder import METRICS, SUMMARY, read_lines

BACKENDS = ("hopper", "torch")
SETTINGS = ["--batch=64", "--lr=3e-4", "--steps=500", "--val-every=500", "--checkpoint-every=500"]
LIMIT = 0.01  # of the loss
HALF_LIFE = 20  # steps


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponentially weighted mean of the losses so far, by HALF_LIFE."""
    keep = 0.5 ** (1 / HALF_LIFE)
    total = weight = 0.0
    means = []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1
        means.append(total / weight)
    return means


def largest_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """Largest relative difference of the smoothed losses, and at which step; infinite where one is not a number."""
    differences = [abs(x - y) / y for x, y in zip(smoothed(a), smoothed(b), strict=True)]
    differences = [value if math.isfinite(value) else math.inf for value in differences]
    step = max(range(len(differences)), key=differences.__getitem__)
    return differences[step], step


def losses_of(backend: str) -> list[float]:
    """The loss of each step of a training run."""
    with tempfile.TemporaryDirectory() as out:
        code = train_lm.main(["--backend", backend, "--out", out, "--name", backend, *SETTINGS])
        folder = Path(out) / backend
        if not (folder / SUMMARY).exists():  # a run that Ctrl-C stopped has exit code 0 too
            refuse(f"the run with backend {backend} did not end (exit code {code}); nothing was written")
        return [line["loss"] for line in read_lines(folder / METRICS)]


def plot(losses: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for backend, color, style in zip(BACKENDS, ("#d1495b", "#00798c"), ("-", "--"), strict=True):
        top.plot(losses[backend], color=color, alpha=0.25, lw=0.8)
        top.plot(smoothed(losses[backend]), color=color, lw=1.5, ls=style, label=backend)
    top.set(ylabel="training loss, nats a byte", title="One seed, two backends")
    top.legend(frameon=False)
    pairs = zip(*(smoothed(losses[backend]) for backend in BACKENDS), strict=True)
    bottom.plot([100 * (a - b) / b for a, b in pairs], color="#444444", lw=1)
    bottom.axhspan(-100 * LIMIT, 100 * LIMIT, color="#66a182", alpha=0.15)
    bottom.set(xlabel="step", ylabel="difference, %")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argument_parser("scripts.lm.compare_backends", __doc__)
    parser.add_argument("--train", action="store_true", help="make the two runs")
    parser.add_argument("--results", type=Path, default=RESULTS / "curves.json")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "docs" / "curves.png")
    args = parser.parse_args()
    if args.train:
        need_kernels()
        with launched() as kernels:
            made = {backend: losses_of(backend) for backend in BACKENDS}
        difference, step = largest_difference(made["hopper"], made["torch"])
        record: dict[str, Any] = {"of": of_kernels(kernels), "largest_difference": difference, "at_step": step}
        write_json(args.results, record | {"losses": made})
    if not args.results.is_file():
        refuse(f"--results: expected the losses of two runs, but there is no {args.results}; --train makes it")
    losses = read_json(args.results)["losses"]
    difference, step = largest_difference(losses["hopper"], losses["torch"])
    plot(losses, args.picture)
    print(f"smoothed losses differ by at most {100 * difference:.2f} % (step {step}); the limit is {100 * LIMIT:.0f} %")
    return int(difference > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
