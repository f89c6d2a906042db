"""`scripts.bench.stored` on a CPU: its programs compute one layer, and its verdicts are those of its bounds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import stored
from scripts.bench.common import read_json
from scripts.bench.running import run


def test_both_programs_run_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["stored", "--cpu", "--rounds", "1", "--out", str(tmp_path)])
    run(stored.BENCH)
    (training,), (few,) = (read_json(tmp_path / "stored.json")[part] for part in ("training", "few"))
    assert training["stored_ms"] > 0 < training["bf16_ms"] and few["stored_us"] > 0 < few["bf16_us"]
    assert training["stored_weights_MiB"] < 0.3 * training["bf16_weights_MiB"]
    packed: Any
    packed, plain = stored.inputs_of(stored.SMALL._replace(d=64, n=64), "fp8", "cpu")
    assert torch.equal(packed.down_proj.decode(), plain.down_proj)


@pytest.mark.parametrize(
    ("backend", "ms", "holds"), [("hopper", 1.3, True), ("hopper", 1.4, False), ("ampere", 1.4, True)]
)
def test_bounds(backend: str, ms: float, holds: bool) -> None:
    row = {"cfg": {}, "format": "mxfp4", "backend": backend, "stored_ms": ms, "bf16_ms": 1.0}
    found = list(stored.bounds({"training": [row | {"stored_peak_MiB": 70.0, "bf16_peak_MiB": 10.0}]}))
    assert [each for _, each in found] == [holds, True]
    cfg = dict(zip("TdnEK", (1, *stored.LAYERS[1][1:5]), strict=True))
    assert [each for _, each in stored.bounds({"few": [{"cfg": cfg, "stored_us": 6.1, "bf16_us": 10.0}]})] == [False]
