"""The kernels of the package on the machine, from their unedited sources: each beside what its formula gives, in float64 and as
plain torch rounds it (DESIGN §6, and a bound of each element). No race, no store of what nobody wrote, none elsewhere.
test_variants.py has each product with what a layer may ask of it."""

import re
import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.gemm import (
    PRODUCTS,
    TILES,
    Kernel,
    Sizes,
    TileConfig,
    all_kernels,
    kernel_for,
    quantize,
    up_forward,
)
from blazeproto.gemm.tiles import CHOSEN
from blazeproto.lab import oracle, target
from blazeproto.lab.calls import CALLS
from blazeproto.lab.oracle import make_case
from blazeproto.lab.target import Machine
from blazeproto.runtime.arch import AMPERE, kernels_of
from tests.lab.machine.trials import Logits, Trial, stream_k, trial_of, with_tiles

# Three experts have rows, the last one has none. Reductions of TINY are mostly of one stage; those of DEEPER are of a stage and
# a part of one, so that all tiles together have more stages than the ring.
TINY, DEEPER = Sizes(24, 56, 56, 4, 3), Sizes(92, 72, 72, 4, 3)


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture(autouse=True)
def few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas multiply expert by expert: a CPU is slow at a matrix for each row."""
    monkeypatch.setattr(oracle, "BY_ROW_BYTES", 0)


SHARED = {"one row block": Sizes(96, 72, 136, 2, 2), "several": Sizes(400, 72, 264, 2, 1)}


def trial_at(name: str, sizes: Sizes, config: TileConfig | None) -> Trial:
    """Half of the experts have no rows, and some pairs are elsewhere."""
    case = make_case(sizes, "half_empty", sentinels=0.2, device="cpu")
    return Trial(PRODUCTS[name].run, PRODUCTS[name].spec, case, {"activation": case.activation}, config=config)


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("up_forward", "one row block"),
        ("down_forward", "several"),
        ("down_backward_act", "one row block"),
        full("up_forward", "several"),
        full("down_forward", "one row block"),
        full("down_backward_act", "several"),
        *(full("up_backward_act", which) for which in SHARED),
    ],
)
def test_clusters_share_weights(name: str, which: str) -> None:
    """One row block of an expert; then two of one and several of the other, with an odd number of columns' blocks for most."""
    assert not trial_at(name, SHARED[which], replace(TILES[name], cluster=2)).run(Machine(4))


class HostileRows(Trial):
    """Tokens that no expert has are NaN."""

    def inputs(self) -> dict[str, torch.Tensor]:
        unread = torch.ones(self.case.sizes.T, dtype=torch.bool)
        unread[self.case.row_token] = False
        made = super().inputs()
        made["x" if "x" in made else "d_out"][unread] = torch.nan
        return made


FEW_ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clusters": {"cluster": 2},
    "tickets": {"tickets": True},
    "narrow": {"tile_n": 128},
}
QUICK = [("up_forward", "clusters", True), ("up_forward", "narrow", False), ("down_backward_act", "tickets", False)]


@pytest.mark.parametrize(
    ("name", "which", "transposed"),
    [
        case if case in QUICK else full(*case)
        for case in product(CHOSEN, FEW_ROWS, [False, True])
        if case[:2] != ("down_backward_act", "narrow")
    ],
)
def test_rows_past_an_experts_end_are_not_read(name: str, which: str, transposed: bool) -> None:
    """Ends on both sides of a pass of 16 rows and of a strip of 64; an odd last row block; every second token is NaN."""
    counts = (1, 0, 17, 64, 129)
    ids = torch.full((2 * sum(counts), 1), -1)
    ids[::2, 0] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    case = make_case(Sizes(len(ids), 72, 136, len(counts), 1), device="cpu")
    case = replace(case, dispatch=oracle.dispatch_fixed(ids, len(counts)))
    config = replace(TILES[name], few_rows=True, **FEW_ROWS[which])
    options = {"activation": case.activation, "transposed": transposed}
    trial = HostileRows(PRODUCTS[name].run, PRODUCTS[name].spec, case, options, rank=8, config=config)
    assert not trial.run(Machine(4))


def test_logits_are_right() -> None:
    assert not Logits(64, 2).run(Machine())


def seconds_of(sizes: Sizes) -> float:
    """What up_forward takes of a core with races watched, once its kernel is compiled; the shortest of three runs."""
    case = make_case(sizes, device="cpu")
    kernel_for("up_forward").compile()
    times = []
    for _ in range(3):
        began = time.process_time()
        target.launch(Machine(), up_forward, x=case.x, up_proj=case.up_proj, dispatch=case.dispatch)
        times.append(time.process_time() - began)
    return min(times)


def test_a_tile_takes_less_than_a_second() -> None:
    """128 x 256, with a reduction of 128. Three times as long is allowed, for a machine that does other things too."""
    assert seconds_of(Sizes(128, 128, 128, 1, 1)) < 3 * 1


# --- All of them -----------------------------------------------------------------------------------------------------------

# Ampere's differ in fewer ways: one kernel for each value of each macro. Quantized ones have test_fp8.py and
# test_fp8_rollout.py, those that send rows tests/distributed/test_sending_machine.py.
QUANTIZED = [*quantize.kernels(), *quantize.kernels(floats=True)]
QUANTIZED += [kernel for kernel in all_kernels() if "FP8" in kernel.defines]
EACH_VALUE = {
    (kernel.entry, *macro): kernel
    for kernel in reversed(list(all_kernels()))
    if kernel.arch is AMPERE
    for macro in kernel.defines.items()
}
ALL = [
    kernel
    for kernel in all_kernels()
    if not (kernel in QUANTIZED or "SENDS" in kernel.defines)
    and (kernel.arch is not AMPERE or kernel in EACH_VALUE.values())
]


@pytest.mark.full
def test_a_small_layers_up_projection_takes_less_than_twelve_seconds() -> None:
    assert seconds_of(Sizes(256, 256, 256, 4, 2)) < 3 * 12


@pytest.mark.full
@pytest.mark.parametrize("kernel", ALL, ids=[f"{index}-{kernel.entry}" for index, kernel in enumerate(ALL)])
def test_every_kernel_is_right(kernel: Kernel) -> None:
    """At least its program: some have macros that they do not read, of which layers launch one."""
    machine = Machine(seed=ALL.index(kernel))
    with kernels_of(kernel.arch.name):
        assert not trial_of(kernel).run(machine)
    assert kernel.entry in [report.entry for report in machine.reports] and (
        body_of(kernel, kernel.ptx) in [body_of(kernel, text) for text in machine.programs]
    )


def body_of(kernel: Kernel, ptx: str) -> str | None:
    """The instructions of its entry."""
    found = re.search(rf"\.entry {kernel.entry}\(.*?^}}", ptx, re.DOTALL | re.MULTILINE)
    return found and found[0]


@pytest.mark.full
@pytest.mark.parametrize("entry", ["up_forward", "linear", "down_backward", "weight_gradient"])
def test_a_ring_of_two_stages_is_right(entry: str) -> None:
    kernel = next(kernel for kernel in ALL if kernel.entry == entry)
    trial = trial_of(kernel)
    assert isinstance(trial, Trial) and trial.config
    assert not with_tiles(entry, replace(trial.config, stages=2), kernel.defines).run(Machine())


@pytest.mark.full
@pytest.mark.parametrize("entry", ["up_forward", "linear", "down_backward"])
def test_low_rank_factors_of_more_than_a_stage_are_right(entry: str) -> None:
    trial = trial_of(next(kernel for kernel in ALL if kernel.entry == entry and kernel.defines["LOW_RANK"] == 4))
    assert isinstance(trial, Trial) and not replace(trial, rank=80).run(Machine())


TICKETS = TileConfig(tickets=True)
SCHEDULED = [(name, None) for name in CALLS] + [
    ("up_forward", TICKETS),
    ("down_backward_act", replace(TICKETS, deferred=False)),
    ("down_backward_weight", TileConfig(cluster=1)),  # the other one has two
]


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 40, 20))
@pytest.mark.parametrize(("name", "config"), SCHEDULED)
def test_every_schedule_gives_the_same(name: str, config: TileConfig | None, first: int) -> None:
    """The first twenty share TINY's tiles between two CTAs, or clusters. Then one has all of DEEPER's: it uses stages and slabs
    again, and a tile's epilogue runs beside the next one's mainloop."""
    cluster = (config or TILES.get(name, TileConfig())).cluster
    sizes, multiprocessors = (DEEPER, cluster) if first else (TINY, 2 * cluster)
    trial, made = trial_at(name, sizes, config), list[dict[str, torch.Tensor]]()
    for seed in range(first, first + 20):
        assert not trial.run(Machine(multiprocessors, seed))
        made.append(trial.made)
    for other in made[1:] if PRODUCTS[name].fixed_order else ():
        assert all(torch.equal(other[output], value) for output, value in made[0].items())


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 40, 20))
def test_every_schedule_of_stream_k_is_right(first: int) -> None:
    trial = stream_k()
    for seed in range(first, first + 20):
        assert not trial.run(Machine(seed=seed)), seed


@pytest.mark.full
@pytest.mark.parametrize("cluster", [1, 2])
def test_stream_k_cuts_a_tile(cluster: int) -> None:
    machine = Machine(multiprocessors=2 * cluster)
    assert not stream_k(cluster).run(machine)
    assert [report.entry for report in machine.reports] == ["weight_gradient", "weight_sum"]
    assert machine.reports[1].steps > 10_000  # some hundreds where there are no partial tiles to add
