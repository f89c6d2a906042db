"""A router's gradients in fp16 on the machine: against float64, the rows that they are made of, and faults that are found."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_ins import halve_rows

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
pytest.importorskip("numba.cuda", reason="needs numba-cuda")

from blazeproto.gemm.compile import CUDA_SOURCES
from blazeproto.gemm.product import edited
from blazeproto.gemm.weight import ROUTER
from blazeproto.lab.target import Machine, MachineError, hosted
from blazeproto.router.logits import halve_kernel
from blazeproto.runtime.arrays import view
from blazeproto.runtime.target import launches_on
from tests.lab.machine.trials import RouterGradient
from tests.lab.planted_bugs import plant

WEIGHT, ROWS = RouterGradient("weight_gradient", 128, 200), RouterGradient("linear", 192)
BARRIER, FENCE = "        named_barrier_sync(CONSUMER_BARRIER + strip, WARPGROUP);\n", "        fence_proxy_async();\n"
WAIT = "        wgmma_wait_group<0>();\n        pin_registers(acc);\n        if (stage"
FAULTS = {  # name: trial, product, text, what replaces it; all but the last two stand in fp16.cuh
    "a strip is multiplied before all warps have converted it": (
        WEIGHT,
        ROUTER,
        BARRIER,
        "        __syncwarp();\n",
        "race",
    ),
    "no fence between conversion and product": (WEIGHT, ROUTER, FENCE, "", "race"),
    "a stage is given back before its product is done": (WEIGHT, ROUTER, WAIT, WAIT.replace("<0>", "<1>"), "race"),
    "the factor falls without the accumulators": (WEIGHT, ROUTER, "&& fall > 0;", "&& fall > 99;", "beyond"),
    "a row's scale is another row's": (WEIGHT, ROUTER, "stage * BK + r * LANES +", "stage * BK +", "beyond"),
    "a value may exceed fp16": (WEIGHT, ROUTER, "FP16_LIMIT = 32768.0f", "FP16_LIMIT = 1e9f", "beyond"),
    "both rows of a thread have one scale": (
        ROWS,
        "up_backward_act",
        "acc[2 * i + 1] * scale[i % 2]",
        "acc[2 * i + 1] * scale[0]",
        "beyond",
    ),
    "a scale is of the tile's other strip": (
        ROWS,
        "up_backward_act",
        "min(tile.row + strip_row(h), p.rows - 1)",
        "min((tile.row ^ STRIP) + strip_row(h), p.rows - 1)",
        "beyond",
    ),
}


@pytest.mark.parametrize("trial", [WEIGHT, ROWS, pytest.param(RouterGradient("weight_gradient", 256, 200), id="wide")])
def test_a_gradient_is_right(trial: RouterGradient) -> None:
    assert not trial.run(Machine(seed=1))


def test_a_gradient_of_several_work_units_is_right() -> None:
    """On four multiprocessors, two work units."""
    machine = Machine(4)
    assert not RouterGradient("weight_gradient", 128, 3300).run(machine)
    assert [report.entry for report in machine.reports] == ["weight_gradient", "weight_sum"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    trial, product, old, new, says = FAULTS[name]
    folder = tmp_path / "cuda"
    shutil.copytree(CUDA_SOURCES, folder)
    plant(folder, [("fp16.cuh" if product == ROUTER else "linear.cu", old, new)])
    with edited(product, folder):
        for seed in range(10):
            try:
                found = trial.run(Machine(seed=seed))
            except MachineError as error:
                found = [str(error)]
            if found:
                break
    assert any(says in line for line in found), found


@pytest.mark.parametrize(
    ("rows", "columns", "gradient"), [(5, 8, True), (37, 40, True), (9, 136, False), (9, 520, False), (70, 520, True)]
)
def test_halved_rows(rows: int, columns: int, gradient: bool) -> None:
    """Tiny numbers, zeros, infinities, a broken token."""
    torch.manual_seed(columns)
    values = torch.randn(rows, columns) * torch.exp2(torch.randint(-40, 10, (rows, columns)).float())
    values[0], values[1] = 0, values[1] * 2.0**-80
    values[2, 3], values[3, 0], values[4, 1] = torch.inf, torch.nan, 3e38
    logits, factors = torch.randn(rows, columns), torch.exp2(torch.randint(-20, -3, (columns,)).float())
    logits[-1] = torch.nan
    values = values if gradient else values.bfloat16()
    made, scales = torch.empty(rows, columns, dtype=torch.float16), torch.zeros(-(-rows // 64) * 64)
    expected = halve_rows(gradient, values, logits, factors, made, scales)
    machine = Machine(seed=rows)
    with launches_on(machine), np.errstate(all="ignore"):
        arrays = [view(hosted(t), "a") for t in (values, logits, factors, made.view(torch.int32), scales)]
        halve_kernel(columns, gradient).over(rows, (arrays[0].device, 0), tuple(arrays[:3]), made=tuple(arrays[3:]))
    assert not [str(race) for report in machine.reports for race in report.races]
    np.testing.assert_array_equal(made.numpy(), expected[0].numpy())
    assert torch.equal(scales, expected[1])
