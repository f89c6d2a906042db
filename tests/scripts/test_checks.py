"""The GPU checks, as far as a machine without one can follow them: what they would run, and that it is called rightly."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import blazeproto.autograd
from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS
from blazeproto.autograd import moe_mlp, torch_backend
from blazeproto.autograd.torch_formulas import Torch
from blazeproto.dispatch import Dispatch
from blazeproto.gemm import Sizes
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.tiles import force
from blazeproto.lab.accuracy import Pool
from blazeproto.lab.oracle import dispatch_fixed, make_case
from scripts.bench import peers, rounding
from scripts.bench.peers import layers as programs
from scripts.checks import fuzz, layers, sanitize_target
from scripts.checks.layers import Layer


@pytest.fixture(autouse=True)
def _tiles_back() -> Iterator[None]:
    """The fuzzer forces tiles on the products, run by run."""
    yield
    force()


def test_a_seed_says_all_about_a_run() -> None:
    drawn = [layers.draw_products(seed) for seed in range(400)]
    assert drawn == [layers.draw_products(seed) for seed in range(400)]
    inputs = [layer.inputs for layer in drawn]
    activations = {options["activation"] for options in inputs}
    assert {*ACTIVATIONS} < activations <= {*ACTIVATIONS, *layers.OTHERS}
    assert len([name for name in activations if name.startswith("alternating")]) >= 3  # gate and up in turn
    assert {options["varying"] for options in inputs} == {True, False}
    assert {(options["transposed"], bool(options["rank"])) for options in inputs} == {*product((True, False), repeat=2)}
    assert all(layer.sizes.d % 8 == layer.sizes.n % 8 == 0 for layer in drawn)
    assert any(layer.sizes.K > layer.sizes.E for layer in drawn)


def test_the_fuzzer_draws_capacities_that_none_some_and_all_rows_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """And factors beside trained and frozen weights; its check of moe_mlp runs on each first one, here on the torch backend."""
    monkeypatch.setattr(fuzz, "DEVICE", "cpu")
    monkeypatch.setattr(fuzz, "BACKENDS", ["torch"])
    totals, seed = {pool: Pool() for pool in fuzz.PARTS["experts"].pools}, -1
    missing = {*product(("none", "some", "all"), (True, False)), *product((True, False), repeat=3)}
    while missing and seed < 200:
        seed += 1
        layer = layers.draw_experts(seed)
        sizes, capacity = layer.sizes, layer.inputs["row_capacity"]
        if sizes.T * sizes.d * sizes.n * sizes.E > 2**21:
            continue
        made = make_case(sizes, **layer.inputs, seed=seed, device="cpu").dispatch
        which = "none" if not made.overflow else "some" if made.expert_token_offsets[-1] else "all"
        found: set[Any] = {(which, layer.options["workspace_bytes"] is not None)} if capacity is not None else set()
        found.add((*map(bool, layer.ranks), "d_up" in layer.frozen))
        if found & missing:
            missing -= found
            assert fuzz.check_experts(seed, totals) == []
    assert not missing and totals["torch"].totals.keys() >= {"d_up_a", "d_up_b", "d_down_a", "d_down_b"}
    assert not any(total.requires_grad for total in totals["torch"].totals.values())  # which would keep every run


def halved(expert_row_sum: Any, values: Tensor, num_experts: int, rows: Dispatch, *others: Any) -> Tensor:
    """`torch_backend.expert_row_sum`, every other row by itself, both sums rounded to bf16."""
    odd = torch.arange(len(values))[:, None] % 2 == 1
    parts = [expert_row_sum(values.masked_fill(mask, 0), num_experts, rows, *others) for mask in (odd, ~odd)]
    return sum(part.bfloat16().float() for part in parts)


def rounded_gradient(activate_backward: Any, m: Torch, h: Tensor, d_act: Tensor, activation: str) -> Tensor:
    """`Torch.activate_backward` of S dA' that is rounded to bf16."""
    return activate_backward(m, h, d_act.bfloat16(), activation)


PLANTED = {"expert_row_sum": (torch_backend, halved), "activate_backward": (Torch, rounded_gradient)}


@pytest.mark.parametrize("planted", ["nothing", "low rank", *PLANTED])
def test_the_torch_backend_rounds_where_its_yardstick_does(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """No less often, so that its error is the yardstick's; and one rounding more in d_up_bias is found.

    SiLU without a gate: d_up_bias has the roundings of dA', dH and the sum and a little of H's. One more makes the error nearly
    √(4/3) of that.
    """
    inputs = {"activation": "silu", "biases": True}
    drawn = Layer(Sizes(96, 64, 64, 8, 2), inputs, ranks=(8, 8) if planted == "low rank" else (0, 0))
    monkeypatch.setattr(fuzz, "DEVICE", "cpu")
    monkeypatch.setattr(fuzz, "draw_experts", lambda seed: drawn)
    monkeypatch.setattr(fuzz, "BACKENDS", ["torch"])
    if planted in PLANTED:
        where, wrong = PLANTED[planted]
        right = getattr(where, planted)
        monkeypatch.setattr(where, planted, lambda *given: wrong(right, *given))
    totals = {"torch": Pool()}
    assert not [line for seed in range(10) for line in fuzz.check_experts(seed, totals)]
    failures = totals["torch"].failures()
    if planted in PLANTED:
        assert any(line.startswith("d_up_bias: norm") for line in failures)
        return
    assert not failures
    for name, total in totals["torch"].totals.items():
        error2, yardstick2, *_ = total.tolist()
        assert error2 == pytest.approx(yardstick2, rel=0.02), name


@pytest.mark.parametrize("pooled", [False, True])
def test_the_fuzzer_counts_what_failed_and_its_exit_code_says_so(
    pooled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails, and a bound that all runs together break where each alone holds it."""
    checked: list[int] = []

    def check(seed: int, totals: dict[str, Pool]) -> list[str]:
        checked.append(seed)
        exact = torch.ones(4, 4, dtype=torch.float64)
        totals["pool"].add("out", exact + pooled, exact + 0.1, exact)
        return ["out: norm"] if seed in (1, 3) and not pooled else []

    part = fuzz.Part(str, lambda seeds: [], check, ("pool",))
    monkeypatch.setattr(fuzz, "PARTS", {"part": part})
    monkeypatch.setattr(fuzz, "need_kernels", lambda backend: None)
    assert fuzz.run("part", range(5), 60.0) == (3 if pooled else 2)
    printed = capsys.readouterr().out
    assert checked == [0, 1, 2, 3, 4] and f" s: {0 if pooled else 2} failed" in printed
    assert ("all runs, pool: out: norm" in printed) is pooled and (
        "part, seed 3: 3\nout: norm" in printed
    ) is not pooled
    for seed, code in ((1, 1), (2, int(pooled))):
        monkeypatch.setattr("sys.argv", ["fuzz", "--parts", "part", "--runs", "1", "--seed", str(seed)])
        assert fuzz.main() == code
    most = fuzz.Part(str, lambda seeds: [], lambda seed, totals: ["wrong"], ("pool",))
    monkeypatch.setattr(fuzz, "PARTS", {"part": most})
    assert fuzz.run("part", range(50), 60.0) == fuzz.MOST_FAILURES  # then it stops


def test_the_fuzzer_compiles_what_its_runs_launch() -> None:
    kernels = fuzz.kernels_of_products(range(20))
    assert all(isinstance(kernel, Kernel) for kernel in kernels)
    assert {kernel.file for kernel in kernels} >= {kernel.file for kernel in gemm.all_kernels()}
    for part in fuzz.PARTS.values():
        assert part.draw(0) == part.draw(0)


def test_the_sanitizers_target_has_every_activation_and_option() -> None:
    names = [name for part in sanitize_target.PARTS.values() for name, _ in part()]
    assert len({*names}) == len(names) and sum("capacity, " in name for name in names) == 15
    drawn = sanitize_target.drawn()
    assert {*ACTIVATIONS} <= {layer.inputs["activation"] for layer in drawn}
    options = {
        (layer.options["save"], bool(layer.options["workspace_bytes"]), layer.inputs["biases"]) for layer in drawn
    }
    assert len(options) == 12 and {"fused", "fused_both"} < {layer.options["combine"] for layer in drawn}
    assert {layer.inputs["transposed"] for layer in drawn} == {any(layer.ranks) for layer in drawn} == {True, False}
    assert {0, None} < {layer.inputs["row_capacity"] for layer in drawn} and any(each.frozen for each in drawn)


def test_what_the_sanitizers_watch_is_looked_at() -> None:
    run = partial(sanitize_target.run_experts, Layer(sanitize_target.SMALL, {"sentinels": 0.2}), 0, "cpu")
    sanitize_target.finite(run)
    with pytest.raises(AssertionError, match="out: expected finite values"):
        sanitize_target.finite(lambda: run() | {"out": torch.tensor(torch.nan)})


def test_the_layer_s_kernels_are_launched_as_moe_mlp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the torch backend in the Hopper backend's place: both have one protocol."""
    monkeypatch.setattr(blazeproto.autograd, "hopper_backend", torch_backend, raising=False)
    shape = Sizes(40, 16, 8, 4, 2)
    inputs = peers.make_inputs(shape, device="cpu")
    dispatch = dispatch_fixed(inputs.experts, shape.E)
    leaves = (inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores)
    out = moe_mlp(*leaves, dispatch=dispatch, num_experts=shape.E)
    expected = (out, *torch.autograd.grad(out, leaves, inputs.grad_output))
    made = programs.launch_kernels(inputs, dispatch)
    for got, want in zip(made, expected, strict=True):
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_rounding_runs_on_dispatches_made_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    def varying(experts: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, num_experts: int) -> Dispatch:
        lists = list(dispatch_fixed(experts[:, None], num_experts).arrays.values())[:3]
        return Dispatch(*lists, experts, num_experts, None, len(offsets) - 1, offsets, tokens)

    calls = []

    def experts_of(*arguments: object, dispatch: Dispatch, backend: str, **options: object) -> torch.Tensor:
        calls.append((dispatch.top_k, backend))
        return moe_mlp(*arguments, dispatch=dispatch, backend=backend, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rounding, "build_dispatch", dispatch_fixed)
    monkeypatch.setattr(rounding, "build_dispatch_varying", varying)
    monkeypatch.setattr(programs, "moe_mlp", experts_of)
    shape = Sizes(64, 16, 8, 4, 2)
    inputs = peers.make_inputs(shape, device="cpu")
    layers = rounding.whole_layers(shape, inputs, tile=8)
    for name, routing in rounding.routings(layers, inputs.x).items():
        if name in ("top_k", "rounded"):
            out, gradients = rounding.on_routing(shape, inputs, routing).forward_backward()
            assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert calls == [(2, "torch"), (None, "torch")]
    for whole in layers.values():
        (out, loss), gradients = rounding.with_router(whole, inputs).forward_backward()
        assert out.isfinite().all() and loss > 0 and len(gradients) == 4
        assert all(gradient.isfinite().all() for gradient in gradients)


Lines = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def fuzz_fp8(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """``fuzz_fp8(kernels, tokens)``: what is wrong with two runs of so many tokens, and with both together.

    ``kernels(*args, **options)`` is called where `moe_mlp` is by the Hopper backend, ``torch_backend`` where it is by the other.
    """
    monkeypatch.setattr(fuzz, "DEVICE", "cpu")
    monkeypatch.setattr(fuzz, "draw_quantized", layers.draw_fp8)  # what else is drawn has effects of its own
    drawn = {seed: layers.draw_fp8(seed).sizes for seed in range(300)}

    def lines(
        kernels: Callable[..., Any], tokens: range, torch_backend: Callable[..., Any] = moe_mlp
    ) -> tuple[list[str], list[str]]:
        def run(*args: Any, backend: str = "auto", **options: Any) -> Any:
            return (torch_backend if backend == "torch" else kernels)(*args, **options)

        monkeypatch.setattr(layers, "moe_mlp", run)
        small = sorted((of.d * of.n * of.E * of.K, seed) for seed, of in drawn.items() if of.T in tokens)[:2]
        totals = {"fp8": Pool()}
        return [line for _, seed in small for line in fuzz.check_fp8(seed, totals)], totals["fp8"].failures()

    return lines


ONE, MANY = range(1, 2), range(60, 200)


def test_the_fuzzer_of_fp8_sees_another_precision(fuzz_fp8: Lines) -> None:
    """With the torch backend in the kernels' place."""
    assert fuzz_fp8(moe_mlp, ONE) == fuzz_fp8(moe_mlp, MANY) == ([], [])
    _, together = fuzz_fp8(lambda *args, **o: moe_mlp(*args, **o | {"precision": "bf16", "quantized": None}), MANY)
    off = {line.partition(":")[0] for line in together if "norm of the error" in line}
    assert off == {"out", "dx", "d_up", "d_down", "d_scores"}


@pytest.mark.parametrize(
    ("record", "factor", "seen"),
    [
        pytest.param("H", 2.0, {"dx", "d_up", "d_down", "d_scores"}, id="H's scale doubled"),
        pytest.param("act", 0.0, {"out"}, id="128 of Y's reduction dropped"),
        pytest.param("dH", 0.0, {"dx", "d_up"}, id="128 of dX's reduction dropped"),
        pytest.param("A'", 2.0, {"d_down"}, id="A''s scale doubled"),
    ],
)
def test_the_fuzzer_of_fp8_sees_a_wrong_block_of_a_row(
    record: str, factor: float, seen: set[str], fuzz_fp8: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One alone in its run; of one row among many, which no run shows by itself, all together. With the torch backend in the
    kernels' place."""
    makers = {"H": ("up_forward", 0), "act": ("up_forward", 1), "dH": ("down_backward_act", 0)}
    maker, index = makers.get(record, ("down_backward_act", 2))
    real, planting = getattr(torch_backend, maker), False

    def planted(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        if planting:
            torch_backend.rows_in(made[index], torch_backend.width_of(made[index])).scales[0, 0] *= factor
        return made

    def with_blocks(wrong: bool) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:  # its backward comes before the next forward
            nonlocal planting
            planting = wrong
            return moe_mlp(*args, **options)

        return run

    monkeypatch.setattr(torch_backend, maker, planted)
    single, _ = fuzz_fp8(with_blocks(True), ONE, with_blocks(False))
    assert {line.split(":")[1].strip() for line in single} == seen
    single, together = fuzz_fp8(with_blocks(True), MANY, with_blocks(False))
    assert single == [] and {line.partition(":")[0] for line in together} >= seen - {"d_scores"}
