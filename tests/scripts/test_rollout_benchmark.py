"""The benchmark of fp8_rollout's bits without a GPU: the kernels on the machine, DeepGEMM's arithmetic in NumPy."""

import re
from importlib.util import find_spec
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blazeproto.gemm.e4m3 import Quantized
from blazeproto.runtime.rounding import E4M3
from blazeproto.runtime.target import device_of, launches_on
from ptxsim import run, tensor_map
from ptxsim.matrices import multiply_in_14_bits
from scripts.bench import deep_gemm, fp8_tables, rollout
from tests.scripts.on_machine import run_on_machine


def product(rows: Quantized, weights: Quantized, out: Tensor, expert_of: Tensor) -> None:
    """Row by row."""
    (a, a_scales), (b, b_scales) = (
        (E4M3[of.view(torch.uint8).numpy()], scales.numpy()) for of, scales in (rows, weights)
    )
    for row, expert in enumerate(expert_of.tolist()):
        total = np.zeros((1, b.shape[1]), np.float32)
        for block in range(a.shape[1] // 128 if expert >= 0 else 0):
            kept = np.zeros_like(total)
            for begin in range(block * 128, (block + 1) * 128, 32):
                some = slice(begin, begin + 32)
                kept = multiply_in_14_bits(a[row : row + 1, some], b[expert][:, some], kept)
            scale = a_scales[row, block] * np.repeat(b_scales[expert, :, block], 128)
            total = (kept.astype(np.float64) * scale + total).astype(np.float32)
        out[row] = torch.from_numpy(total[0]).bfloat16()


def test_deepgemms_kernel_has_these_bits() -> None:
    if find_spec("deep_gemm") is None or which("nvcc") is None:
        pytest.skip("needs nvcc, and the folder of sgl-deep-gemm on PYTHONPATH")
    torch.manual_seed(0)
    ctas, expert_of = 2, torch.tensor([1, -1, 0, 1], dtype=torch.int32).repeat_interleave(128)
    m, n, k = len(expert_of), 256, 384

    def drawn(*shape: int, scales: tuple[int, ...]) -> Quantized:
        return Quantized(torch.randn(shape).mul(50).to(torch.float8_e4m3fn), torch.rand(scales))

    def seen(value: Any) -> Any:
        """As ptxsim takes it."""
        if isinstance(value, deep_gemm.Tiled):
            return tensor_map(seen(value.matrix), value.box, value.swizzle)
        bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
        return value.view(bits.get(value.dtype, value.dtype)).numpy() if isinstance(value, Tensor) else value

    rows, weights = drawn(m, k, scales=(m, k // 128)), drawn(2, n, k, scales=(2, n // 128, k // 128))
    out, right = (torch.zeros(m, n, dtype=torch.bfloat16) for _ in range(2))
    ptx = deep_gemm.compiled("ptx", 2, ctas).decode()
    for there, instead in (  # what ptxsim lacks: a hint, and modifiers in another order than the manual's
        (r"prefetch\.tensormap[^;]*;", ""),
        (r"stmatrix\.sync\.aligned\.x2\.m8n8", "stmatrix.sync.aligned.m8n8.x2"),
        (r"\bret;", "cp.async.bulk.wait_group.read 0;\nret;"),  # the kernel ends before TMA has read its last tile
    ):
        ptx, count = re.subn(there, instead, ptx)
        assert count
    given = [seen(value) for value in deep_gemm.arguments(rows, weights, out, expert_of)]
    threads = deep_gemm.TMA_THREADS + deep_gemm.MATH_THREADS
    run(ptx, grid=ctas, block=threads, arguments=given, shared=deep_gemm.shared_bytes(k))
    product(rows, weights, right, expert_of)
    assert right.any() and torch.equal(out.view(torch.int16), right.view(torch.int16))


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_no_bit_differs_from_what_it_compares_with(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")
    machine = run_on_machine(monkeypatch, rollout, rollout.up, rollout.linear, rollout.quantize)

    def place_of(_: Tensor) -> rollout.quantize.OnStream:
        with launches_on(machine):
            return rollout.quantize.OnStream(device_of(machine), 0)

    sizes = {"DEVICE": "cpu", "LAYERS": 1, "MOST_ROWS": 20, "MOST_EXPERTS": 3}
    for name, value in {"place_of": place_of, **sizes}.items():
        monkeypatch.setattr(rollout, name, value)
    if wrong:
        monkeypatch.setattr(rollout, "act_of", lambda h: (h[:, : h.shape[1] // 2].float().sigmoid() * 3).bfloat16())
    monkeypatch.setattr(rollout.deep_gemm, "Kernel", lambda experts: product)
    row = rollout.bits(rollout.Widths(256, 128), None)
    found = {name: differ for name, (_, differ) in fp8_tables.compared_in([row]).items()}
    assert not row["absent"] and found.keys() == fp8_tables.COMPARED.keys()
    assert {name for name, differ in found.items() if differ} == ({"act"} if wrong else set())


def test_the_tables_say_what_differs() -> None:
    of = {
        "gpu": "NVIDIA H200, driver 1",
        "versions": "torch 2.11.0, sgl-deep-gemm 0.2.1",
        "measured": "now",
        "kernels": [],
    }
    counts = {
        "layers": 50,
        "rows": 9,
        "x": 1000,
        "x differ": 1,
        "x scales": 10,
        "x scales differ": 1,
        "Y": 5,
        "Y differ": 0,
    }
    record = {"rows": [{"of": of, "found": counts}, {"of": of, "found": counts}], "times": []}
    assert "| x and its scales | 2 020 | 4 |\n| Y | 10 | 0 |" in fp8_tables.rollout_bits(record)
    assert fp8_tables.rollout_claim(record).startswith("of 2.03e+03 numbers in 100 layers on one NVIDIA H200, 4 differ")
    assert fp8_tables.rollout_bits({"rows": []}) == fp8_tables.rollout_claim({"rows": []}) == "Not measured."
