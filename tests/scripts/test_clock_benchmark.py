"""`scripts.bench.clock`: the kinds of a step's kernels, and the bounds."""

from dataclasses import replace

import pytest

from scripts.bench import clock


@pytest.mark.parametrize(("formulation", "products"), [("moe", 2), ("dense", 4)])
def test_kernels_by_kind(formulation: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond each: a product of attention; in the layer a kernel and a cast; in its backward a gradient and clipping."""
    log: list[str] = []
    for block in (program := clock.Program(replace(clock.SMALL, formulation=formulation), "cpu")).model.blocks:
        block.attention.register_forward_hook(lambda *_: log.append("linear"))
        (block.moe.router or block.moe.up).register_forward_hook(
            lambda *_: log.extend(["topk", "void a_copy_kernel<8>"])
        )
        block.moe.down_proj.register_hook(lambda _: log.extend(["weight_gradient", "void multi_tensor_apply_kernel"]))
    monkeypatch.setattr("torch.cuda._sleep", lambda _: log.append(clock.MARKER))
    monkeypatch.setattr(
        clock, "device_spans", lambda call: call() and [(name, 1e3 * at, 1e3 * at + 1e3) for at, name in enumerate(log)]
    )
    assert [*clock.kernels_ms(program).values()] == [products, 4 - products, 2, 2, 2]


def test_the_better_ratio_is_bounded() -> None:
    rows = [
        {"cfg": {"d": 1024, "E": E, "K": K}, "eager": 1.3, "graph": graph}
        for E, K, graph in ((8, 1, None), (16, 2, 1.1), (16, 4, 2.0), (64, 1, 1.2))
    ]
    assert {said[-12:]: holds for said, holds in clock.bounds({"rows": rows})} == {
        "1.300, eager": False,
        "1.100, graph": True,
    }
