"""Products that send rows while they multiply (sending.cuh), on the PTX machine, and faults planted in a copy of the sources."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm import down_backward, linear, up
from blazeproto.gemm.compile import CUDA_SOURCES, compile_many
from blazeproto.gemm.product import BOTH, TRANSPOSED, Build, Variant, variants
from blazeproto.gemm.sending import all_that_send
from ptxsim import MachineError
from tests.distributed.sending_machine import Sending

SIZES: dict[str, dict[str, Any]] = {
    "two ranks": {"tokens": (5, 3)},
    "an idle rank, two CTAs that send": {"tokens": (4, 0), "ctas": 2, "sends": 3, "late": 1},
    "three ranks": {"tokens": (3, 2, 2)},
    "four ranks, one idle": {"tokens": (2, 1, 0, 2)},
    "eight ranks, some idle": {"tokens": (1, 0, 1, 1, 0, 1, 1, 1), "steps": 1},
    "counts that pass 2^32": {"tokens": (3, 2), "sends": 2**32 - 1, "late": 1},
    "fewer tiles than CTAs that send": {"tokens": (3, 2), "ctas": 4, "steps": 2},
    "no tile for those that send": {"tokens": (3, 2), "late": 9},
}


class Fault(NamedTuple):
    """steps: products that show it."""

    file: str
    before: str
    after: str
    steps: int = 1


FAULTS = {
    "a count read early": Fault("sending.cuh", "(m.progress->sends + 1)", "m.progress->sends"),
    "rows of the group before": Fault(
        "sending.cuh", "group_of(expert, experts))", "max(group_of(expert, experts) - 1, 0))"
    ),
    "own rows that nobody waits for": Fault("sending.cuh", "if (lane < m.ranks)\n", "if (lane < m.ranks && !own)\n"),
    "a release of the GPU": Fault("meeting.cuh", "red.release.sys", "red.release.gpu"),
    "no acquire": Fault("meeting.cuh", "ld.acquire.sys", "ld.relaxed.sys"),
    "a count before the rows": Fault(
        "sending.cuh", "for (; i < end; i += workers)", "for (; i < end - 1; i += workers)"
    ),
    "rows over those that are still read": Fault(
        "meeting.cuh", "wait_until(&m.flags(m.rank)->started[threadIdx.x], epoch, m.patience_ns);", "", 2
    ),
    "a tile taken twice": Fault("tiles.cuh", "position * early + int(blockIdx.x) - senders", "position * early"),
    "progress that changes too soon": Fault("sending.cuh", "gridDim.x - 1) == gridDim.x - 1", "0) == 0", 2),
}
QUICK = ("a count read early", "a release of the GPU")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the products compile a copy of the sources with a change."""

    def plant(file: str, before: str, after: str) -> None:
        sources = shutil.copytree(CUDA_SOURCES, tmp_path / "cuda")
        text = (sources / file).read_text()
        assert before in text, before
        (sources / file).write_text(text.replace(before, after))
        for product in (up, down_backward, linear):
            monkeypatch.setattr(product, "build_of", lambda _: Build(sources=sources))

    return plant


def found(seed: int, **sizes: Any) -> set[str]:
    """In what ways the products are wrong: "error", "race", "values"."""
    sending = Sending(seed=seed, **sizes)
    try:
        races = sending.run().races
    except MachineError as error:
        return {"error"} | ({"race"} if error.report and error.report.races else set())
    return ({"race"} if races else set()) | ({"values"} if sending.failures() else set())


def test_rows_come_while_a_product_multiplies() -> None:
    assert found(seed=0, tokens=(3, 2), late=1, steps=2) == set()


@pytest.mark.full
def test_no_kernel_that_sends_spills() -> None:
    activations = (*variants(activation=ACTIVATIONS), *variants(activation=TRANSPOSED, transposed=[True]))
    wanted = [
        product.kernel(config, each._replace(sends=True, bias=bias))
        for name, product in (("up_forward", up), ("down_backward_act", down_backward))
        for config, bias in all_that_send(name)
        for each in activations
    ]
    wanted += [
        linear.kernel(config, Variant(transposed=transposed, sends=True))
        for config, _ in all_that_send("up_backward_act")
        for transposed in BOTH
    ]
    assert {kernel: kernel.spills for kernel in compile_many(wanted) if kernel.spills} == {}


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_products_that_send_with_many_seeds(name: str) -> None:
    seeds = range(1, 3 if len(SIZES[name]["tokens"]) > 4 else 6)
    assert {seed: ways for seed in seeds if (ways := found(seed, **SIZES[name]))} == {}


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_found(name: str, planted: Any) -> None:
    planted(*FAULTS[name][:3])
    assert any(found(seed, tokens=(3, 2), late=1, steps=1) for seed in range(3))


@pytest.mark.full
@pytest.mark.parametrize("name", FAULTS)
def test_how_many_seeds_find_a_planted_fault(name: str, planted: Any) -> None:
    planted(*FAULTS[name][:3])
    ways = [found(seed, tokens=(5, 3), late=1, steps=FAULTS[name].steps) for seed in range(6)]
    print(name, sum(map(bool, ways)), {way: sum(way in one for one in ways) for way in ("race", "values", "error")})
    assert sum(map(bool, ways)) >= 2
