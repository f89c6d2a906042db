"""The most memory that a forward and a backward take, in bf16 and in fp8: the Hopper backend's allocations, of meta tensors."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blazeproto.autograd import LowRank, backends, hopper_backend, mlp, moe_mlp, node, quantize_weights
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.structures import addresses
from blazeproto.runtime.target import device_of, launches_on
from scripts.bench.fp8 import LAYERS, SHAPES
from tests.runtime.test_target import Recorder

MIB = 2**20
RESULTS = Path(__file__).parents[2] / "results" / "h200" / "fp8.json"
SMS = 132


class Allocated(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside, and the most that they have been."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                if not any(isinstance(t, torch.Tensor) and t.untyped_storage() is storage for t in args):
                    self.seen.add(storage)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, storage.nbytes())
        return made

    def free(self, size: int) -> None:
        self.now -= size


@pytest.fixture
def peak(monkeypatch):
    """``peak(shape, precision, **options)``: bytes over what a call is given, by the kernels' host code."""
    monkeypatch.setattr(backends, "missing_for_kernels", lambda *_, **__: None)
    backends.backend_on.cache_clear()
    recorder = Recorder(SMS)
    device = device_of(recorder)
    monkeypatch.setattr(hopper_backend, "rows_of", lambda dispatch: addresses(dispatch, device, 0))
    monkeypatch.setattr(hopper_backend, "current_stream", lambda _: 0)
    monkeypatch.setattr(hopper_backend, "OnStream", lambda *_: hopper_backend.quantize.OnStream(device, 0))
    for module in (mlp, node):
        monkeypatch.setattr(module, "unobserved", lambda _: True)

    def measure(shape, precision, kept=False, frozen=False, rank=0, **options) -> int:
        T, d, n, E, K = shape[:5]
        bf16 = {"dtype": torch.bfloat16, "device": "meta"}
        x, up, down = (torch.empty(s, **bf16).requires_grad_() for s in ((T, d), (E, 2 * n, d), (E, d, n)))
        scores, d_out = torch.empty(T, K, device="meta", requires_grad=True), torch.empty(T, d, **bf16)
        factors = [torch.empty(E, *s, **bf16) for s in ((rank, d), (2 * n, rank), (rank, n), (d, rank))]
        wanted = (x, scores, *(t.requires_grad_() for t in factors if rank))
        wanted += () if frozen else (up, down)
        for weight in (up, down):
            weight.requires_grad_(not frozen)
        if rank:
            options |= {"up_factors": LowRank(*factors[:2]), "down_factors": LowRank(*factors[2:])}
        if kept:
            options["quantized"] = quantize_weights(up, down, backend="hopper")
        lists = [torch.empty(count, dtype=torch.int32, device="meta") for count in (T * K, E + 1, T * K)]
        with Allocated() as allocated:
            out = moe_mlp(
                *(x, up, down, scores),
                num_experts=E,
                backend="hopper",
                precision=precision,
                **options,
                dispatch=Dispatch(*lists, None, E, K, T),
            )
            gradients = torch.autograd.grad(out, wanted, d_out)
        assert allocated.now == sum(t.nbytes for t in (out, *gradients))
        return allocated.peak + sum(t.nbytes for t in lists)

    with launches_on(recorder):
        yield measure
    backends.backend_on.cache_clear()


OTHERS = LAYERS[len(SHAPES) :]
COLUMNS = (  # of docs/fp8.md's table
    {"precision": "bf16"},
    {"precision": "fp8"},
    {"precision": "fp8", "kept": True},
    {"precision": "bf16", "frozen": True},
    {"precision": "fp8", "kept": True, "frozen": True},
    {"precision": "bf16", "frozen": True, "rank": 16},
    {"precision": "fp8", "kept": True, "frozen": True, "rank": 16},
)


def test_the_page_s_peaks_are_these(peak):
    page = (Path(__file__).parents[2] / "docs" / "fp8.md").read_text()
    lines = page.split("frozen with LoRA: bf16 | fp8, kept |\n")[1].split("\n\n")[0].splitlines()[1:]
    for line, shape in zip(lines, LAYERS, strict=True):
        sizes, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert sizes == ", ".join(map(str, shape[:5]))
        assert [int(cell.replace(" ", "")) for cell in cells] == [round(peak(shape, **way) / MIB) for way in COLUMNS]
    frozen = {"precision": "fp8", "frozen": True}
    above = sum(peak(shape, **frozen) > peak(shape, "bf16", frozen=True) for shape in LAYERS)
    most = (
        f"{peak(OTHERS[4], **frozen, **way) / MIB:,.0f}".replace(",", " ") for way in ({}, {"keep_transposed": False})
    )
    assert above == 7 and "peaks at {} MiB ({} with".format(*most) in page


@pytest.mark.parametrize("shape", LAYERS, ids=lambda shape: f"T{shape.T}d{shape.d}n{shape.n}")
def test_fp8_takes_no_more_than_bf16(peak, shape):
    """Whose figure is what was measured. Of frozen weights, whose gradients bf16 doesn't have either, if they were quantized
    before, and with LoRA's factors but for one layer."""
    bf16 = peak(shape, "bf16")
    measured = {tuple(row["cfg"].values()): row["bf16_1_peak_MiB"] for row in json.loads(RESULTS.read_text())["rows"]}
    assert bf16 / MIB == pytest.approx(measured.get(shape[:5], bf16 / MIB), rel=0.02)  # of a whole layer
    ways = ({}, {"save": "recompute"}, {"keep_transposed": False}, {"kept": True})
    assert all(peak(shape, "fp8", **way) <= bf16 for way in ways)
    for rank in (0, 16):
        most = peak(shape, "bf16", frozen=True, rank=rank) * (1.03 if rank and shape == OTHERS[3] else 1)
        assert peak(shape, "fp8", kept=True, frozen=True, rank=rank) <= most
