"""MoE layers of models that people know, by name; MegaBlocks' Figure 10 and Table 3; choices of experts, skew, padding.

    python -m scripts.bench.models layers                  # -> results/h200/models/layers.json on an H200
    python -m scripts.bench.models all --time-budget 450   # in order, each leaving time for those after it; once more goes on
    python -m scripts.bench.models layers --peers grouped_mm
    python -m scripts.bench.models all --cpu               # a short form on a CPU: tables alone, or files with --out FOLDER

Rows that a file has of the same kernels and benchmark are kept, so that a run that ended early, at --time-budget or by Ctrl-C,
goes on with the same command. A peer that does not run is a reason in the row. SonicMoE compiles for minutes at first: --caches
keeps what it made. What `liger` and `quack` want beside this environment's packages stands in the folders that the
environment variable BENCH_PEERS names.

Whole layers in bf16, router weights too, training mode, auxiliary loss 0.01; random tokens and weights, the same for all
programs, which run in turn in one process, five rounds; those that don't fit beside each other, and peers that want other
libraries, in processes of their own, in turn (A B A B by process). Times are medians of the durations of the kernels, by the
profiler, an overlap counted once; the GPU is held until the host has queued a call. Peak: the most that is allocated in forward
and backward over what was there before, gradients included. Before they are timed, programs are shown to compute the same.
"""

from __future__ import annotations

from scripts.bench.common import RESULTS, folder_of, gpu_name
from scripts.bench.models.items import ITEMS, PEERS
from scripts.bench.models.tables import SHOWN
from scripts.bench.paper.running import options_parser, run_all
from scripts.command import need_hopper


def main(words: list[str] | None = None) -> None:
    options = options_parser("models", __doc__, ITEMS, PEERS).parse_args(words)
    if not options.cpu:
        need_hopper()
        options.out = options.out or RESULTS.parent / folder_of(gpu_name()) / "models"
    run_all(ITEMS, SHOWN, __doc__, options)


if __name__ == "__main__":
    main()
