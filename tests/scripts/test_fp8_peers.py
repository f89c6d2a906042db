"""The benchmark of other fp8 programs, on a CPU: what it gives torchao and DeepGEMM, stand-ins of which compute in bf16."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.bench import fp8_peers
from scripts.bench.tables import TABLES
from scripts.bench.timing import Machine

SHAPE = Sizes(128, 256, 128, 4, 2)
CPU = Machine("cpu", 1)


def test_each_expert_has_as_many_rows() -> None:
    ids = fp8_peers.balanced(SHAPE, "cpu")
    assert torch.bincount(ids.flatten()).tolist() == [64] * 4 and (ids[:, 0] != ids[:, 1]).all()


def test_what_does_not_run_is_a_reason() -> None:
    row = fp8_peers.layers(SHAPE, CPU)
    assert row["absent"]["torchao fp8"].startswith("ModuleNotFoundError")
    assert 0.01 < row["off"]["ours fp8"] < 0.2 and row["off"]["torch grouped_mm bf16"] < 0.02
    assert fp8_peers.deep_gemm(SHAPE, CPU)["absent"]["DeepGEMM"].startswith("ModuleNotFoundError")


def test_a_product_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def cast(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
        return x, x.amax(1)

    fails = Mock(side_effect=RuntimeError("dim == 2 or dim == 3"))
    math = SimpleNamespace(per_token_cast_to_fp8=cast, per_block_cast_to_fp8=cast)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=fails))
    monkeypatch.setitem(sys.modules, "deep_gemm.utils.math", math)
    row = fp8_peers.deep_gemm(SHAPE, CPU)
    assert row["absent"] == {"DeepGEMM": "RuntimeError: dim == 2 or dim == 3"} and not row["tflops"]
    assert fails.call_count == 1


def test_torchao_computes_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Tensor, b: Tensor, offs: Tensor, pad_token_groups_for_grouped_mm: bool) -> Tensor:
        assert not pad_token_groups_for_grouped_mm
        return F.grouped_mm(a, b, offs=offs)

    module = SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=product)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.fp8_grouped_mm", module)
    row = fp8_peers.layers(SHAPE, CPU)
    assert not row["absent"] and row["off"]["torchao fp8"] < 0.02


def test_the_table_has_a_line_for_each_shape() -> None:
    of = {"gpu": "a GPU", "measured": "today", "versions": "torch 2.11.0", "kernels": []}
    row = {
        "cfg": SHAPE._asdict(),
        "fwdbwd_ms": {"ours bf16": 2.0, "ours fp8": 1.5},
        "of": of,
    }
    without = row | {"cfg": SHAPE._replace(T=256)._asdict()}
    record = {"rows": [row, without], "products": [{"cfg": SHAPE._asdict(), "tflops": {"up": 1000, "down": 900}}]}
    lines = TABLES["fp8_peers"](record).splitlines()[2:4]
    assert lines[0].endswith("| 2.00 | 1.50 | – | – | 1 000 | 900 |")
    assert lines[1].endswith("| 2.00 | 1.50 | – | – | – | – |")
