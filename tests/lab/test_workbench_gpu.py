"""The workbench on a Hopper GPU: verdicts in time, bugs found and named, no false alarm, layers that use edited kernels."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from planted_bugs import BUGS, SHAPE, WRONG_PAIR, Bug, plant

from blazeproto import MoE, cost, gemm
from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm.tiles import E4M3, Element
from blazeproto.lab import Workbench
from blazeproto.lab.oracle import ROUTINGS
from blazeproto.lab.times import gpu_here
from blazeproto.lab.verdict import Verdict

pytestmark = pytest.mark.gpu

HALVED = (  # Y times 0.5
    "linear.cu",
    "out[i] = pack_biased(acc[2 * i], acc[2 * i + 1], bias);",
    "out[i] = pack_biased(0.5f * acc[2 * i], 0.5f * acc[2 * i + 1], bias);",
)
SECONDS = 3.0  # from a saved file to a verdict
RANDOM_SHAPES = 50


# ---- check --------------------------------------------------------------------------------------------------------


def test_a_verdict_takes_at_most_three_seconds(tmp_path: Path) -> None:
    bench = Workbench("up_forward", T=4096, d=512, n=512, E=16, K=4)
    folder = bench.edit(tmp_path / "sources")
    assert bench.check()
    old = "else if (plane < PLANES / HALVES) store(p.out1_rows + column_zero + own, activate(h[plane], h[HALVES - 1]));"
    plant(folder, [("up.cu", old, old.replace("activate(h[plane]", "activate(h[HALVES - 1]"))])
    begin = time.perf_counter()
    verdict = bench.check()
    seconds = time.perf_counter() - begin
    assert not verdict and verdict.experts == list(range(16))
    assert {tile.output for tile in verdict.tiles} == {"act"}
    assert seconds <= SECONDS, f"{seconds:.2f} s"


def bench_for(bug: Bug) -> Workbench:
    """With inputs for which no expert ends with a whole strip, or with one row of a tile."""
    for seed in range(40):
        bench = Workbench(bug.product, **SHAPE, seed=seed)
        if (bench._inputs.case.dispatch.expert_token_offsets.diff() % 64 > 1).all():
            return bench
    raise AssertionError("no seed gives tails everywhere")


def row_tiles_of(bench: Workbench, bug: Bug, expert: int) -> set[int]:
    case = bench._inputs.case
    count = int(case.dispatch.expert_token_offsets.diff()[expert])
    if bug.row_tiles == "last":
        return {(count - 1) // 128}
    if isinstance(bug.row_tiles, tuple):
        return set(bug.row_tiles)
    if bug.product.endswith("_weight"):
        return set()
    return set(range(-(-count // 128)))


def assert_named(bench: Workbench, bug: Bug, verdict: Verdict) -> None:
    assert not verdict
    assert verdict.mismatches and not verdict.stray, repr(verdict)
    assert {tile.output for tile in verdict.tiles} <= set(bug.outputs)
    assert verdict.experts and f"expert {verdict.experts[0]}" in repr(verdict)
    if bug.row_tiles == "any":
        return
    assert {tile.output for tile in verdict.tiles} == set(bug.outputs), repr(verdict)
    if bug.row_tiles == "of the pair":
        case = bench._inputs.case
        row = int(case.dispatch.token_index_map[WRONG_PAIR])
        expert = int(case.row_expert[row])
        inside = row - int(case.dispatch.expert_token_offsets[expert])
        assert {(tile.expert, tile.row_tile) for tile in verdict.tiles} == {(expert, inside // 128)}
        assert {m.row_in_expert for m in verdict.mismatches} == {inside}
        assert verdict.mismatches[0].token == WRONG_PAIR // SHAPE["K"]
        return
    assert bug.experts is not None
    assert verdict.experts == list(bug.experts), repr(verdict)
    for expert in bug.experts:
        named = [tile for tile in verdict.tiles if tile.expert == expert]
        rows, columns = {tile.row_tile for tile in named}, {tile.column_tile for tile in named}
        assert not (wanted := row_tiles_of(bench, bug, expert)) or rows == wanted, repr(verdict)
        assert bug.column_tiles is None or columns == set(bug.column_tiles), repr(verdict)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_found_and_named(tmp_path: Path, bug: Bug) -> None:
    bench = bench_for(bug)
    plant(bench.edit(tmp_path / "sources"), bug.edits)
    verdict = bench.check()
    assert_named(bench, bug, verdict)
    if bug is BUGS[0]:
        assert sum(tile.wrong for tile in verdict.tiles) <= 8
        assert {m.row_in_expert for m in verdict.mismatches} == {128 + 3 * 16 + 5}
        assert {m.index[1] for m in verdict.mismatches} <= set(range(64, 72))
    bench.edit(tmp_path / "again")
    assert bench.check(4), "the sources as they were"


@pytest.mark.parametrize("index", range(RANDOM_SHAPES))
def test_no_false_alarm(index: int) -> None:
    draw = torch.Generator().manual_seed(index)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    experts = integer(1, 40)
    sizes = {"T": integer(1, 3000), "d": 8 * integer(1, 90), "n": 8 * integer(1, 90), "E": experts}
    sizes["K"] = integer(1, min(experts, 8))
    activation = ACTIVATIONS[index // 3 % len(ACTIVATIONS)] if index % 3 == 0 else "swiglu"
    names = tuple(gemm.PRODUCTS)
    for product in {names[index % len(names)], names[(3 * index + 1) % len(names)]}:
        bench = Workbench(product, **sizes, activation=activation, routing=ROUTINGS[index % len(ROUTINGS)], seed=index)
        verdict = bench.check(3)
        assert verdict, f"{bench!r}\n{verdict!r}"


@pytest.mark.parametrize(
    ("product", "element"), [(name, element) for name, entry in gemm.PRODUCTS.items() for element in entry.elements]
)
def test_every_product_is_right_and_timed(product: str, element: Element, tmp_path: Path) -> None:
    precision = "fp8" if element is E4M3 else "bf16"
    bench = Workbench(product, T=4096, d=512, n=512, E=16, K=4, precision=precision)
    folder = bench.edit(tmp_path / "sources")
    assert bench.check()
    for file in folder.glob("*.cu*"):
        file.write_text(file.read_text() + "// changed\n")
    times = bench.time(5)
    assert times.unedited_ms is not None and times.ms > 0
    assert times.floor_ms == cost.product_floor_ms(bench.product, bench.sizes, gpu_here(), precision)
    assert 2 / 3 < times.ms / times.unedited_ms < 3 / 2 and product in repr(times) and "unedited" in repr(times)


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("out[-1] = 0", "out: wrote 2 bytes before its first element"),
        ("const_cast<bf16*>(y)[3] = 0", "y: wrote over this input"),
    ],
)
def test_what_is_written_elsewhere_is_told_and_mended(store: str, told: str, tmp_path: Path) -> None:
    """Within the guards that the workbench lays around an output, so no other memory is hit; and over an input."""
    bench = Workbench("combine", **SHAPE)
    folder = bench.edit(tmp_path / "sources")
    line = "    if (token >= num_tokens) return;\n"
    plant(folder, [("combine.cu", line, f"    if (token == 0 && first_column == 0) {store};\n{line}")])
    verdict = bench.check()
    assert not verdict and told in verdict.stray
    bench.edit(tmp_path / "again")
    assert bench.check()


# ---- use ----------------------------------------------------------------------------------------------------------


def layer_and_input() -> tuple[MoE, torch.Tensor]:
    torch.manual_seed(1)
    layer = MoE(d_model=256, d_expert=128, num_experts=8, top_k=2).to("cuda", torch.bfloat16)
    return layer, torch.randn(600, 256, device="cuda", dtype=torch.bfloat16)


def step(layer: MoE, x: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """The loss, and the gradients."""
    layer.zero_grad()
    loss = layer(x)[0].float().square().mean()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in layer.parameters() if p.grad is not None]


def test_a_layer_trains_with_an_edited_kernel(tmp_path: Path) -> None:
    layer, x = layer_and_input()
    before, gradients = step(layer, x)
    bench = Workbench("down_forward", **SHAPE)
    plant(bench.edit(tmp_path / "sources"), [HALVED])
    with bench.use():
        halved, _ = step(layer, x)
        assert halved == pytest.approx(before / 4, rel=1e-2)
    after, again = step(layer, x)
    assert after == before and all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    with pytest.raises(KeyboardInterrupt), bench.use():
        raise KeyboardInterrupt
    assert step(layer, x)[0] == before
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-3)
    with bench.use():
        losses = []
        for _ in range(5):
            losses.append(step(layer, x)[0])
            optimizer.step()
    assert losses[0] == halved and losses[-1] < losses[0]


def test_backward_runs_the_edited_kernel_too(tmp_path: Path) -> None:
    """In autograd's own threads: without its sums, the gradient of the up projection is zero, and no other one changes."""
    layer, x = layer_and_input()
    _, gradients = step(layer, x)
    bench = Workbench("up_backward_weight", **SHAPE)
    folder = bench.edit(tmp_path / "sources")
    old = "for (int i = 0; i < BN / 4; ++i) out[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);"
    plant(folder, [("weight_epilogue.cuh", old, "for (int i = 0; i < BN / 4; ++i) out[i] = 0;")])
    with bench.use():
        _, edited = step(layer, x)
    names = [name for name, p in layer.named_parameters() if p.grad is not None]
    for name, a, b in zip(names, gradients, edited, strict=True):
        if name.endswith("gate_up_proj"):
            assert a.any() and not b.any()
        else:
            assert torch.equal(a, b), name


def test_two_workbenches_do_not_see_each_other(tmp_path: Path) -> None:
    layer, x = layer_and_input()
    before, _ = step(layer, x)
    wrong, right = Workbench("down_forward", **SHAPE), Workbench("down_forward", **SHAPE)
    other, unedited = Workbench("up_forward", **SHAPE), Workbench("up_forward", **SHAPE)
    plant(wrong.edit(tmp_path / "wrong"), [HALVED])
    right.edit(tmp_path / "right")
    plant(other.edit(tmp_path / "other"), BUGS[5].edits)
    with wrong.use():
        assert right.check(4) and unedited.check(4) and not wrong.check(4)
        once, _ = step(layer, x)
        with other.use():
            assert right.check(4) and unedited.check(4) and not other.check(4)
            both, _ = step(layer, x)
        assert step(layer, x)[0] == once
    assert step(layer, x)[0] == before and len({before, once, both}) == 3


PROBE = """
import hashlib, sys, torch
if sys.argv[1] == "lab":
    import blazeproto.lab
    from blazeproto.lab import Workbench
    assert Workbench("up_forward", T=300, d=64, n=64, E=4, K=2).check(2)
from blazeproto import MoE
torch.manual_seed(0)
layer = MoE(d_model=256, d_expert=128, num_experts=8, top_k=2).to("cuda", torch.bfloat16)
x = torch.randn(600, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
out = layer(x)[0]
out.float().square().mean().backward()
digest = hashlib.sha256()
for tensor in (out, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)):
    digest.update(tensor.detach().float().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_an_unedited_layer_has_the_same_bits_with_the_lab_imported() -> None:
    digests = [
        subprocess.run([sys.executable, "-c", PROBE, which], check=True, capture_output=True, text=True).stdout
        for which in ("lab", "no lab")
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 65
