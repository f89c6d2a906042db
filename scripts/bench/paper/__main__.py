"""The papers' tables and figures, measured here beside what they print, and what a review asks of a layer.

    python -m scripts.bench.paper moeblaze-figures        # -> results/h200/paper/moeblaze-figures.json on an H200
    python -m scripts.bench.paper moeblaze-scale sonicmoe-layers --time-budget 120
    python -m scripts.bench.paper waterfall policies activations    # what a review of MoEBlaze asks
    python -m scripts.bench.paper all                     # one after the other
    python -m scripts.bench.paper combine --rounds 20 --again
    python -m scripts.bench.paper all --cpu               # a short form on a CPU: tables alone, or files with --out FOLDER

Rows that a file has of the same kernels and benchmark are kept, so that a run that ended early, at --time-budget or by Ctrl-C,
goes on with the same command. A peer that does not run is a reason in the row. SonicMoE compiles for minutes at first: --caches
keeps what it made.

Layers in bf16, random data, uniform routing, dispatch included, routers not. Times are medians of rounds in which all programs
run in turn: GPU time by CUDA-graph replay, or the sum of kernel durations where one of those that are compared can't be captured;
eager: host time included. saved: what autograd keeps for backward, weights excluded; peak: the most that is allocated in forward
and backward over what was there before, gradients included. Floors are of the rates that `blazeproto.cost.GPUS` has.
"""

from __future__ import annotations

from scripts.bench.common import RESULTS, folder_of, gpu_name
from scripts.bench.paper.items import ALL_PEERS, ITEMS
from scripts.bench.paper.running import options_parser, run_all
from scripts.bench.paper.tables import SHOWN
from scripts.command import need_hopper


def main(words: list[str] | None = None) -> None:
    options = options_parser("paper", __doc__, ITEMS, ALL_PEERS).parse_args(words)
    if not options.cpu:
        need_hopper()
        options.out = options.out or RESULTS.parent / folder_of(gpu_name()) / "paper"
    run_all(ITEMS, SHOWN, __doc__, options)


if __name__ == "__main__":
    main()
