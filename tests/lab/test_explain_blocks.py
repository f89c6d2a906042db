"""`explain` of a dMoE: its steps' operations, its bytes, and what it keeps."""

from __future__ import annotations

import pytest
import torch

from blazeproto.blocksparse import SequentialMoE, dMoE
from blazeproto.lab import explain

SDD, DSD = "SDD of H", "DSD of Y"


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_steps_of_a_dmoe(activation: str) -> None:
    """An expert of 300 pairs and 128 hidden units has three blocks, one of none has none, whatever its width."""
    layer = dMoE(64, [128, 256], 2, 1, activation=activation, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 64))
    made = explain(layer, torch.ones(300, 64, dtype=torch.bfloat16))
    G = 2 if activation == "swiglu" else 1
    steps = {(step.phase, step.name): step for step in made.rows}
    sdd, dsd = steps["forward", SDD], steps["forward", DSD]
    assert sdd.writes[0].shape == (3 * G, 128, 128) and dsd.writes[0].shape == (384, 64)
    assert (sdd.operations, dsd.operations) == (G * 2 * 3 * 128**2 * 64, 2 * 3 * 128**2 * 64)
    assert sdd.bytes_read == 2 * 64 * (384 + G * 384) and sdd.bytes_written == 2 * 3 * G * 128**2
    forward, backward = (
        sum(step.operations or 0 for step in made.rows if step.phase == phase and step.name[:2] in ("SD", "DS"))
        for phase in ("forward", "backward")
    )
    assert backward == 2 * forward
    names = [step.name for step in made.rows if step.phase == "forward"]
    assert names[-6:] == ["topology", "padded_gather", SDD, "activation", DSD, "padded_scatter"]
    assert not {name for _, name in steps} & {"up_forward", "combine", "down_backward_act"}
    kept = 2 * (2 * 384 * 64 + 3 * (G + 1) * 128**2)  # X, Y, H and act
    assert (
        kept < made.saved_bytes < kept + 300 * 32 and "dMoE: T=300" in repr(made) and "with this routing" in repr(made)
    )


def test_other_formulations_are_refused() -> None:
    with pytest.raises(TypeError, match="layer: expected a MoE, got SequentialMoE"):
        explain(SequentialMoE(64, 128, 2, 1), torch.ones(3, 64))
