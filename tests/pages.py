"""Blocks of Python on the pages of docs/, as programs: a page's blocks one after the other, as a reader pastes them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EDITS = {"recipes.md"}  # whose blocks change the sources: test_recipes.py makes them
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOR_A_GPU = "# on a Hopper GPU\n"  # how a block begins that nothing else runs
AXOLOTL = ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
STAND_IN = f"""
import sys, types
sys.modules |= {{name: types.SimpleNamespace(BasePlugin=object) for name in {AXOLOTL}}}
"""
STAND_INS = {"transformers.md": STAND_IN}  # of what a page's blocks import and no extra brings
USED = "assert explain(model) and any(parameter.grad is not None for parameter in model.parameters())"
MASKED = """
out = model.model.layers[0].mlp(torch.randn(2, 16, 64, dtype=torch.bfloat16))
assert out[mask].any(-1).all() and not out[~mask].any()
"""
AFTERWARDS = {"transformers.md": USED + MASKED, "peft.md": USED}  # what must be so then


def pages() -> list[str]:
    """The pages of docs/ whose blocks of Python are programs, by name."""
    return sorted({page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text())} - EDITS)


def program(page: str, *, hopper: bool) -> str:
    """hopper: with the blocks for a GPU."""
    blocks = BLOCK.findall((DOCS / page).read_text())
    kept = [block for block in blocks if hopper or not block.startswith(FOR_A_GPU)]
    return "\n".join([STAND_INS.get(page, ""), *kept, AFTERWARDS.get(page, "")])
