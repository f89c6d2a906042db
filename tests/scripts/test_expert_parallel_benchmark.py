"""`scripts.bench.expert_parallel` in its short form, one CPU rank: rows of all dispatchers, in the place of earlier ones."""

import json
from pathlib import Path

from scripts.bench import expert_parallel, running
from scripts.bench.tables import TABLES


def test_rows_of_all_dispatchers(tmp_path: Path) -> None:
    out = tmp_path / "distributed.json"
    running.run(expert_parallel.BENCH, ["--cpu", "--out", str(tmp_path)])
    record = json.loads(out.read_text())
    record["ep"].insert(1, record["ep"][0] | {"gpus": 2})
    out.write_text(json.dumps(record))
    running.run(expert_parallel.BENCH, ["--cpu", "--out", str(tmp_path)])
    record = json.loads(out.read_text())
    made = [(row["gpus"], row["dispatcher"]) for row in record["ep"]]
    assert made == [
        (1, "symmetric"),
        (2, "symmetric"),
        *((1, name) for name in ("all_to_all", "capacity", "zipf", "vdev_2d")),
    ]
    row = record["ep"][0]
    assert row["cfg"] == {"T": 64, "d": 64, "n": 32, "E": 8, "K": 2} and row["fwd_ms"] > 0 and row["payload_MiB"] == 0
    assert "| 64, 64, 32, 8, 2 | 1 | `Symmetric` |" in TABLES["expert_parallel"](record)
    [row] = json.loads((tmp_path / "fp8_ranks.json").read_text())["rows"]
    assert max(row["bf16_apart"].values()) < 1e-5 and 0 <= max(row["fp8_apart"].values()) < 0.02
    assert "| 64, 64, 128, 8, 2 | 1 | " in TABLES["fp8_ranks"]({"rows": [row]})
    why = "`all_to_all_vdev_2d`, the exchange alone (absent: needs GPUs, got ranks on cpu) | – |"
    assert why in TABLES["expert_parallel"](record)
