"""Batch tiling on attention: any number of tiles computes what one does, and keeps less for backward."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.bench.timing import SavedBytes, host_peak_bytes, relative_difference
from scripts.lm import model as lm
from scripts.lm.model import GPT, Block, Output
from scripts.lm.settings import FORMULATIONS, GPTConfig
from tests.lm.conftest import AtStep, Metrics, Run, interrupt

pytestmark = pytest.mark.usefixtures("without_sample_and_picture")

SMALL = GPTConfig(layers=2, d_model=32, heads=2, context=16, d_expert=16, num_experts=4, top_k=2, dropout=0.1)
IDS = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))


def built(tiles: int, dtype: torch.dtype = torch.float32, **changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, attention_tiles=tiles, **changes)).to(dtype)
    torch.nn.init.normal_(model.head.weight, std=0.1)  # it starts at zero, where every test would pass
    return model


def step(model: GPT, ids: Tensor = IDS) -> tuple[Output, dict[str, Tensor]]:
    """The output of a training step, and every gradient."""
    torch.manual_seed(1)  # of dropout
    out = model(ids[:, :-1], ids[:, 1:])
    (out.loss + out.aux_loss).backward()
    return out, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_one_tile_is_the_plain_block_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(block: Block, x: Tensor, rotation: Tensor) -> Tensor:
        return block.attention(block.attention_norm(x), rotation)

    monkeypatch.setattr(lm, "checkpoint", None)  # whoever called it would fail
    out, gradients = step(built(1))
    monkeypatch.setattr(Block, "attend", plain)
    expected, of_plain = step(built(1))
    assert torch.equal(out.loss, expected.loss) and torch.equal(out.logits, expected.logits)
    assert all(torch.equal(gradients[name], of_plain[name]) for name in of_plain)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("formulation", [*FORMULATIONS])
def test_any_number_of_tiles_computes_the_same(formulation: str, tiles: int) -> None:
    """With dropout, whose masks are those of the whole batch."""
    changes: dict[str, Any] = {"formulation": formulation, "d_expert": 128 if formulation == "dmoe" else 16}
    expected, of_one = step(built(1, torch.float64, **changes))
    out, gradients = step(built(tiles, torch.float64, **changes))
    assert out.logits.dtype == torch.float64
    assert relative_difference(out.logits.detach(), expected.logits.detach()) < 1e-12
    assert abs(out.loss.item() / expected.loss.item() - 1) < 1e-12 and torch.equal(out.loads, expected.loads)
    for name, gradient in of_one.items():
        assert gradient.norm() > 0
        assert relative_difference(gradients[name], gradient) < 1e-12, name


@pytest.mark.parametrize("tiles", [2, 4, 8])
def test_a_tile_is_its_sequences_alone_to_the_bit(tiles: int) -> None:
    """So a whole batch's bits are those of one tile wherever the products' bits do not depend on how many rows they have."""
    block, x = built(tiles).blocks[0], torch.randn(8, 16, 32)
    rotation = torch.view_as_complex(built(1).rotations)
    tiled = block.attend(x, rotation)
    block.attention_tiles = 1
    assert torch.equal(tiled, torch.cat([block.attend(tile, rotation) for tile in x.chunk(tiles)]))
    torch.testing.assert_close(tiled, block.attend(x, rotation))


def test_under_autocast_the_gradients_of_tiles_are_summed_in_fp32() -> None:
    """Summed in bf16, they would be the further from one tile's the more tiles there are."""
    ids = torch.randint(256, (32, 17))
    with torch.autocast("cpu", torch.bfloat16):
        of_one, of_two, of_many = (step(built(tiles, dropout=0.0), ids)[1] for tiles in (1, 2, 32))
    for name in ("blocks.1.attention.qkv.weight", "blocks.1.attention.out.weight"):
        assert of_many[name].dtype == torch.float32
        differences = [relative_difference(gradients[name], of_one[name]) for gradients in (of_two, of_many)]
        assert differences[1] < 1.2 * differences[0] < 0.01


def test_what_is_kept_for_backward_falls() -> None:
    """A block's attention in tiles keeps x alone, and its peak falls with every further tile."""
    x, rotation = torch.randn(8, 64, 32, requires_grad=True), torch.view_as_complex(lm.rotations(64, 16))
    block = built(1).blocks[0]
    kept, peaks = [], []
    for tiles in (1, 2, 4, 8):
        block.attention_tiles = tiles
        with (saved := SavedBytes([*block.parameters(), rotation])).hooks:
            block.attend(x, rotation)
        kept.append(saved.total)
        peaks.append(host_peak_bytes(lambda: block.attend(x, rotation).sum().backward()))
        block.zero_grad()
    assert kept[0] > 10 * x.nbytes and kept[1:] == [x.nbytes] * 3
    assert sorted(peaks, reverse=True) == peaks and peaks[0] > 1.5 * peaks[1] > 2 * peaks[3]


def test_a_batch_that_the_tiles_do_not_divide() -> None:
    """Training refuses it; validation has tiles of at most ceil(B / G) sequences, and keeps nothing."""
    model = built(4, torch.float64)
    with pytest.raises(ValueError, match=r"^ids: expected a multiple of attention_tiles = 4 sequences, got 6$"):
        step(model, IDS[:6])
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    for count in (1, 3, 6):
        with torch.no_grad():
            made = model(IDS[:count, :-1]).logits
            expected = built(1, torch.float64).eval()(IDS[:count, :-1]).logits
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


# ---- scripts/train_lm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tiles", "then"), [(2, 2), (1, 4)])
def test_a_run_in_tiles_goes_on(
    tiles: int,
    then: int,
    finished: Path,
    tiny: list[str],
    run: Run,
    at_step: AtStep,
    metrics: Metrics,
    tmp_path: Path,
) -> None:
    """To the bit with as many tiles, and with another number but for rounding, which is then the run's."""
    options = [*tiny, "--attention-tiles", tiles, "--out", tmp_path]
    at_step(7, interrupt)
    code, printed = run(*options, "--name", "cut")
    assert code == 0 and "stopped after step 8 of 20" in printed
    code, printed = run("--resume", "--out", tmp_path, "--device", "cpu", "--attention-tiles", 3)
    assert code == 2 and printed == "error: attention_tiles: expected a divisor of batch=4, got 3\n"
    given = ["--attention-tiles", then] if then != tiles else []
    assert run("--resume", "--out", tmp_path, "--device", "cpu", *given)[0] == 0
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert config["attention_tiles"] == then
    if not given:
        assert run(*options, "--name", "uncut")[0] == 0
        assert metrics(tmp_path / "cut") == metrics(tmp_path / "uncut")
    plain, tiled = ([line["loss"] for line in metrics(folder)] for folder in (finished, tmp_path / "cut"))
    assert tiled == pytest.approx(plain, rel=1e-3)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (finished, tmp_path / "cut")]
    saved = [each["saved_activation_bytes"] for each in summaries]
    assert 0 < saved[1] < 0.8 * saved[0]
