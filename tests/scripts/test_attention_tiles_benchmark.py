"""`scripts.bench.attention_tiles`, in its short form on a CPU, and the table that is made of what it measures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from scripts.bench import attention_tiles
from scripts.bench.identity import earlier
from scripts.bench.result_tables import fill
from scripts.lm.model import GPT

TINY = dataclasses.replace(attention_tiles.SMALL, d_model=16, context=32, d_expert=8, num_experts=4)


def test_the_short_form_runs_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its rows say what they are of, and more tiles keep less."""
    monkeypatch.setattr(attention_tiles, "SMALL", TINY)
    monkeypatch.setattr(attention_tiles, "SMALL_TILES", (1, 2))
    out = tmp_path / "attention_tiles.json"
    monkeypatch.setattr("sys.argv", ["attention_tiles", "--cpu", "--rounds", "1", "--out", str(out)])
    attention_tiles.main()
    record = json.loads(out.read_text())
    one, two = record["rows"]
    assert record["protocol"].startswith("The model and the batch of the Hopper preset")
    assert (one["tiles"], two["tiles"]) == (1, 2) and one["cfg"] == two["cfg"]
    assert one["cfg"] == {"T": 8 * 32, "d": 16, "n": 8, "E": 4, "K": 2, "layers": 2, "sequences": 8}
    assert one["of"]["kernels"] == [] and not earlier(one), "a row of today's benchmark"
    for kind in ("tiled", "micro"):
        assert two[f"{kind}_saved_MiB"] < one[f"{kind}_saved_MiB"]
        assert two[f"{kind}_peak_MiB"] < one[f"{kind}_peak_MiB"]
        assert two[f"{kind}_ms"] > 0
    assert one["tiled_saved_MiB"] == one["micro_saved_MiB"], "with one tile they are the same"
    marked = "<!-- results:attention_tiles -->\n\nNot measured.\n\n<!-- /results:attention_tiles -->"
    filled = fill(marked, tmp_path)
    assert "| 2 |" in filled and "8 sequences of 32 bytes; layers, d, n, E, K = 2, 16, 8, 4, 2." in filled
    assert attention_tiles.TABLES["attention_tiles"](record) in capsys.readouterr().out
    assert fill(filled, tmp_path) == filled
    assert fill(marked, tmp_path / "none") == marked, "without results the text stays"


@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_computes_the_gradients_of_the_whole_batch(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The auxiliary loss, which compares the experts' loads in a batch, aside."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, router="aux_free"))
    torch.nn.init.normal_(model.head.weight)
    ids = torch.randint(256, (8, 33))
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cleared = []
    monkeypatch.setattr(GPT, "zero_grad", lambda model, set_to_none: cleared.append(set_to_none))
    attention_tiles.Step(model, ids, bf16=False, tiles=2, micro=micro)()
    assert cleared == [True] and model.blocks[0].attention_tiles == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
