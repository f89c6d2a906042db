"""`scripts.bench.lora` on a CPU: its programs compute one layer, and its verdicts are those of its bounds."""

import pytest
import torch

from blazeproto.gemm import Sizes
from scripts.bench import lora
from scripts.bench.peers import modules


def test_the_programs_compute_the_same_layer() -> None:
    shape = Sizes(64, 32, 16, 4, 2)
    made, absent = lora.build_programs(shape, "cpu", rank=4)
    programs = {name: program for name, (program,) in made.items()}
    assert {*programs, *absent} == {"lora", "full", "peft", "wrapped"}
    frozen = programs["lora"]
    out, gradients = frozen.forward_backward()
    assert [g.shape for g in gradients] == [leaf.shape for leaf in frozen.leaves] and len(gradients) == 6
    assert not torch.allclose(out, programs["full"].forward(), rtol=0.05), "the factors count"
    for name in ("peft", "wrapped"):
        if name in programs:
            factors = {f"weight_{place}" for place in range(4)}
            assert set(modules.agreement(frozen, programs[name])) >= {"median_out", "median_x_grad", *factors}
    with pytest.raises(RuntimeError, match="different layers"):
        modules.agreement(frozen, programs["full"])


def test_peft_is_absent_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("expected peft, got none")

    monkeypatch.setattr("blazeproto.integrations.peft.register", missing)
    programs, absent = lora.build_programs(Sizes(8, 16, 8, 2, 1), "cpu")
    assert set(programs) == {"lora", "full"} and set(absent) == {"peft", "wrapped"}


@pytest.mark.parametrize(
    ("times", "bounds"),
    [
        ((8.0, 10.0, 16.0), {"of full fine-tuning: 0.800": True, "over peft on grouped_mm: 2.00 x": True}),
        ((8.9, 10.0, 17.0), {"of full fine-tuning: 0.890": False, "over peft on grouped_mm: 1.91 x": False}),
        ((8.0, 10.0), {"of full fine-tuning: 0.800": True}),
    ],
)
def test_bounds(times: tuple[float, ...], bounds: dict[str, bool]) -> None:
    fields = ("lora_fwdbwd_ms", "full_fwdbwd_ms", "peft_fwdbwd_ms")
    found = dict(lora.bounds({"rows": [dict(zip(fields, times, strict=False))]}))
    assert {said.partition(",")[0]: holds for said, holds in found.items()} == bounds
