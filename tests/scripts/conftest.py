"""What several tests of the benchmarks look at: every benchmark's short form on a CPU, measured once."""

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from scripts.bench import running

NAMES = (
    "attention_tiles",
    "blocksparse",
    "dispatch",
    "distributed",
    "expert_parallel",
    "few_tokens",
    "fp8",
    "fp8_peers",
    "integrations",
    "layer",
    "lora",
    "models.__main__",
    "module",
    "paper.__main__",
    "rounding",
    "router",
)


def bench_of(name: str) -> running.Bench:
    made: running.Bench = importlib.import_module(f"scripts.bench.{name}").BENCH
    return made


@pytest.fixture(scope="session")
def short_form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A benchmark's name -> a folder of results, beside which pages find others."""

    @cache
    def measured(name: str) -> Path:
        bench, folder = bench_of(name), tmp_path_factory.mktemp("results") / "h100"
        (folder.parent / "h200").mkdir()
        running.run(bench, [*(["all"] if bench.goes_on else []), "--cpu", "--out", str(folder)])
        return folder

    return measured
