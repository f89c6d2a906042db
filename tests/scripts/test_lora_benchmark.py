"""`scripts.bench.lora` on a CPU: its programs compute one layer, and its verdicts are those of its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blazeproto.gemm import Sizes
from scripts.bench import lora, module
from scripts.bench.common import cfg_of


def test_the_programs_compute_the_same_layer() -> None:
    shape = Sizes(64, 32, 16, 4, 2)
    programs, absent = lora.build_programs(shape, 4, device="cpu", backend="torch")
    assert {*programs, *absent} == {"lora", "full", "peft", "wrapped"}
    frozen = programs["lora"]
    out, gradients = frozen.forward_backward()
    assert [g.shape for g in gradients] == [leaf.shape for leaf in frozen.leaves] and len(gradients) == 6
    assert not torch.allclose(out, programs["full"].forward(), rtol=0.05), "the factors count"
    for name in ("peft", "wrapped"):
        if name in programs:
            factors = {f"weight_{place}" for place in range(4)}
            assert set(module.agreement(frozen, programs[name])) >= {"median_out", "median_x_grad", *factors}
    with pytest.raises(RuntimeError, match="different layers"):
        module.agreement(frozen, programs["full"])


def test_peft_is_absent_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("expected peft, got none")

    monkeypatch.setattr("blazeproto.integrations.peft.register", missing)
    programs, absent = lora.build_programs(Sizes(8, 16, 8, 2, 1), 8, device="cpu", backend="torch")
    assert set(programs) == {"lora", "full"} and set(absent) == {"peft", "wrapped"}


def row(**times: float) -> dict[str, Any]:
    made: dict[str, Any] = {"cfg": cfg_of(lora.SHAPE)}
    made["of"] = {"gpu": "a GPU", "measured": "then", "versions": "torch 2.11.0", "kernels": []}
    for name, ms in times.items():
        made |= {f"{name}_fwd_ms": ms / 3, f"{name}_fwdbwd_ms": ms, f"{name}_peak_fwdbwd_MiB": 100.0}
    return made


@pytest.mark.parametrize(
    ("times", "verdicts"),
    [
        ({"lora": 8.0, "full": 10.0, "peft": 16.0}, ["holds  of full fine-tuning: 0.800", "holds  over peft"]),
        ({"lora": 8.9, "full": 10.0, "peft": 17.0}, ["FAILS  of full fine-tuning: 0.890", "FAILS  over peft"]),
        ({"lora": 8.0, "full": 10.0}, ["holds  of full fine-tuning: 0.800", "absent peft on grouped_mm"]),
    ],
)
def test_verdicts(times: dict[str, float], verdicts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lora.print_table({"rows": [row(**times)]})
    last = capsys.readouterr().out.splitlines()[-2:]
    assert all(line.startswith(start) for line, start in zip(last, verdicts, strict=True))


def test_where_it_is_written() -> None:
    names = {words: lora.arguments(words.split()).out.name for words in ("", "--quick", "--rank 8")}
    assert names == {"": "lora.json", "--quick": "lora-quick.json", "--rank 8": "lora-part.json"}
    assert lora.arguments(["--quick"]).rounds == 3
