"""`scripts.bench.attention_tiles`, in its short form on a CPU, and the table that is made of what it measures."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench import attention_tiles
from scripts.bench.result_tables import fill
from scripts.lm.model import GPT

TINY = dataclasses.replace(attention_tiles.SMALL, d_model=16, context=32, d_expert=8, num_experts=4)


def test_more_tiles_keep_less(short_form: Callable[[str], Path]) -> None:
    folder = short_form("attention_tiles")
    rows = json.loads((folder / "attention_tiles.json").read_text())["rows"]
    assert [row["tiles"] for row in rows] == [1, 2, 4, 8]
    assert (rows[0]["cfg"], rows[0]["row_counts"]) == (
        {"T": 8 * 64, "d": 64, "n": 32, "E": 8, "K": 2, "layers": 2, "sequences": 8},
        [1024, 512, 256, 128],
    )
    for field in ("tiled_saved_MiB", "tiled_peak_MiB", "micro_saved_MiB", "micro_peak_MiB"):
        assert rows[1][field] < rows[0][field]
    assert rows[0]["tiled_saved_MiB"] == rows[0]["micro_saved_MiB"], "with one tile they are the same"
    marked = "<!-- results:attention_tiles -->\n\nNot measured.\n\n<!-- /results:attention_tiles -->"
    filled = fill(marked, folder)
    assert "| 2 |" in filled and "8 sequences of 64 bytes; layers, d, n, E, K = 2, 64, 32, 8, 2." in filled
    assert fill(filled, folder) == filled
    assert fill(marked, folder / "none") == marked, "without results the text stays"


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
    attention_tiles.step(model, ids, tiles=2, micro=micro, bf16=False)
    assert cleared == [True] and model.blocks[0].attention_tiles == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
