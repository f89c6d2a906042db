"""README's example runs, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_is_twelve_lines_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = BLOCKS[0]
    assert len(example.splitlines()) == 12
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    x = names["x"]
    assert isinstance(x, torch.Tensor)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert "torch.Size([8, 128, 512])" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    places = [place for place in re.findall(r"\]\(([^)#]+)", README) if not place.startswith("http")]
    assert places
    assert not [place for place in places if not (ROOT / place).exists()]
