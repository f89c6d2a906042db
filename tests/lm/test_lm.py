"""scripts/lm/model.py: the model, and the text and its batches."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench.timing import SavedBytes
from scripts.lm.model import GPT, Batches, GPTConfig, as_bytes, load_data
from scripts.lm.ranks import Ranks

SMALL = GPTConfig(layers=2, d_model=32, heads=2, context=16, d_expert=16, num_experts=4, top_k=2)


@pytest.fixture
def model() -> GPT:
    model = GPT(SMALL)
    torch.nn.init.normal_(model.head.weight)  # it starts at zero, where every test would pass
    return model


def test_untrained_model_knows_nothing() -> None:
    ids = torch.randint(0, 256, (3, 16), dtype=torch.uint8)
    out = GPT(SMALL)(ids, ids)
    assert out.loss.item() == pytest.approx(math.log(256)) and out.aux_loss.item() > 0
    assert out.logits.shape == (3, 16, 256) and out.loads.shape == (2, 4)
    assert out.loads.sum(1).tolist() == [3 * 16 * 2] * 2


@pytest.mark.parametrize("router", ["top_k", "aux_free", "token_rounding", "expert_choice", "hash"])
def test_no_byte_sees_a_later_one(router: str) -> None:
    """In training expert choice and rounding compare tokens of the whole batch; what generates text must not."""
    model = GPT(dataclasses.replace(SMALL, router=router)).eval()
    torch.nn.init.normal_(model.head.weight)
    ids = torch.randint(0, 256, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    a, b = model(ids).logits, model(changed).logits
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9], b[:, 9])


def test_positions_matter(model: GPT) -> None:
    """Attention without positions would give the same for any order of the bytes before."""
    a = model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    b = model(torch.tensor([[2, 1, 3, 4]])).logits[0, -1]
    assert not torch.allclose(a, b)


def test_every_parameter_learns(model: GPT) -> None:
    ids = torch.randint(0, 256, (4, 16))
    out = model(ids, ids)
    (out.loss + out.aux_loss).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_it_can_learn_a_line_by_heart() -> None:
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = as_bytes(b"def f(x): return")[None]
    for _ in range(60):
        loss = model(text[:, :-1], text[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1 and model.generate(b"def", 13, temperature=0.01) == b"def f(x): return"


def test_generate(model: GPT) -> None:
    one = model.generate(b"abc", 40, seed=1)
    assert one.startswith(b"abc") and len(one) == 43  # beyond the context, too
    assert model.generate(b"abc", 40, seed=1) == one != model.generate(b"abc", 40, seed=2) and model.training


def test_too_many_positions(model: GPT) -> None:
    with pytest.raises(ValueError, match="ids: expected at most context = 16 positions, got 17"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_bf16_autocast(model: GPT) -> None:
    ids = torch.randint(0, 256, (4, 16))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, ids)
        out.loss.backward()
    assert out.logits.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(out.loss, model(ids, ids).loss, rtol=0.02, atol=0)


def test_saved_bytes_counts_each_memory_once() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    with (saved := SavedBytes([])).hooks:
        y = x.exp()  # keeps y
        y.exp() * y  # keeps two more, and y again
    assert saved.total == 2 * 400


# ---- text --------------------------------------------------------------------------------------------------------


def test_standard_library_is_the_default() -> None:
    train, validation = load_data("", 256)
    assert len(train) > 5e6 and 0.01 < len(validation) / len(train) < 0.2 and train.dtype == torch.uint8


def test_files_are_held_out_whole(text: Path) -> None:
    train, validation = (bytes(part.tolist()) for part in load_data(str(text), 32))
    files = {(text / f"{i}.txt").read_bytes() for i in range(40)}
    assert set(train.split(b"\0")[:-1]) | set(validation.split(b"\0")[:-1]) == files
    assert not set(train.split(b"\0")[:-1]) & set(validation.split(b"\0")[:-1])


def test_split_does_not_depend_on_other_files(text: Path, tmp_path: Path) -> None:
    """A file's name is no matter; content that is no UTF-8 is left out."""
    train, held_out = load_data(str(text), 32)
    shutil.copytree(text, tmp_path, dirs_exist_ok=True)
    (tmp_path / ".hidden").write_text("not this")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00" * 100)
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe no text")
    assert all(map(torch.equal, load_data(str(tmp_path), 32), (train, held_out)))
    (tmp_path / os.fsdecode(b"odd\xff.txt")).write_bytes(b"odd but text")
    assert b"odd but text" in b"".join(bytes(part.tolist()) for part in load_data(str(tmp_path), 32))


def test_one_file_gives_its_last_tenth(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a" * 900 + b"b" * 99)
    train, validation = load_data(str(tmp_path / "one.txt"), 32)
    assert bytes(train.tolist()) == b"a" * 900 and bytes(validation.tolist()) == b"b" * 99 + b"\0"


def test_an_epoch_shows_every_window_once() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batches = Batches(text, context=16, batch=3)
    starts = [batches.start(i) for i in range(2 * batches.per_epoch)]
    first, second = starts[: batches.per_epoch], starts[batches.per_epoch :]
    assert len({s // 16 for s in first}) == len(set(first)) == batches.per_epoch
    assert len({s % 16 for s in first}) == 1 and first != second
    ids, targets = batches[0]
    assert ids.shape == (3, 16) and torch.equal(targets[:, :-1], ids[:, 1:])
    assert torch.equal(ids[:, 0].long(), torch.tensor(first[:3]))


def test_a_batch_depends_on_step_and_seed_alone() -> None:
    text = torch.randint(0, 256, (500,), dtype=torch.uint8)
    forward = Batches(text, 16, 4, seed=3)
    ordered = [forward[step][0] for step in range(20)]
    jumping = Batches(text, 16, 4, seed=3)
    for step in (19, 3, 12):
        assert torch.equal(jumping[step][0], ordered[step])
    assert not torch.equal(Batches(text, 16, 4, seed=4)[0][0], ordered[0])


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 48, 49, 500])
def test_no_window_leaves_the_text(length: int) -> None:
    text = torch.arange(length) % 256
    batches = Batches(text.to(torch.uint8), 16, 4)
    for step in range(20):
        ids, targets = batches[step]
        assert ids.shape == targets.shape == (4, 16)
    assert sum(ids.shape[0] for ids, _ in batches.spread(16)) == 1
    everything = [targets for _, targets in batches.spread(10**6)]
    assert torch.equal(torch.cat([targets.flatten() for targets in everything]), batches.text[1:])
    assert len(list(batches.spread(length - 1))) == len(everything)


@pytest.mark.parametrize("tiles", [1, 3])
def test_validation_of_all_the_text_has_its_last_shorter_window(
    tiles: int, script: Any, text: Path, tmp_path: Path
) -> None:
    """Each byte but the first counts once, whatever the length of its window, which is alone in its batch."""
    sizes = dataclasses.asdict(SMALL) | {"attention_tiles": tiles, "data": str(text), "batch": 3}
    trainer = script.Trainer(script.Config(**sizes), tmp_path / "run", Ranks(torch.device("cpu")))
    torch.nn.init.normal_(trainer.model.head.weight)
    inputs, targets = trainer.val_batches.text[:-1].split(16), trainer.val_batches.text[1:].split(16)
    assert len(inputs[-1]) < 16, "there is a shorter window"
    trainer.model.eval()
    pairs = zip(inputs, targets, strict=True)
    total = sum(trainer.model(ids[None], of[None]).loss.item() * len(ids) for ids, of in pairs)
    assert trainer.validate(10**6) == pytest.approx(total / sum(map(len, inputs)), rel=1e-6)
