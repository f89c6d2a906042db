"""The baselines against a loop over pairs in float64, and beside MoE with the same weights."""

import copy
import importlib
import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blazeproto import MoE
from blazeproto.blocksparse import DroppingMoE, SequentialMoE
from blazeproto.router import ROUTERS, Routing
from scripts.lm import settings
from scripts.lm.model import GPT
from scripts.lm.run_folder import read_config
from tests.refusals import refuses
from tests.threads import one_thread  # noqa: F401

D, N, E = 6, 5, 4
FACTORS = (0.5, 1, 1.5, 2, None)
ACTIVATIONS = {  # of gate and up, or of the one half that there is
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "gelu": F.gelu,
    "relu2": lambda h: F.relu(h) ** 2,
}
LAYERS: list[tuple[type[MoE], dict[str, Any]]] = [
    *((DroppingMoE, {"capacity_factor": factor}) for factor in FACTORS),
    (SequentialMoE, {}),
]
EXACT = [(kind, options) for kind, options in LAYERS if options.get("capacity_factor") is None]  # they drop nothing


class Chosen(nn.Module):
    """A router of experts (T, K) and scores (T, K) that are given; the scores are trained."""

    def __init__(self, experts: list[list[int]]) -> None:
        super().__init__()
        self.experts = torch.tensor(experts, dtype=torch.int32)
        self.scores = nn.Parameter(torch.rand(self.experts.shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Routing:
        load = torch.bincount(self.experts.flatten(), minlength=E)[:E].int()
        return Routing(self.scores, self.experts, torch.zeros(len(x), E), load, {})


def uniform(num_tokens: int, top_k: int) -> list[list[int]]:
    return [[(token + slot) % E for slot in range(top_k)] for token in range(num_tokens)]


def skewed(num_tokens: int, top_k: int) -> list[list[int]]:
    """Expert 1 has a pair of nearly every token, in any slot, and expert 3 none."""
    return [[[1, 0, 2], [1, 2, 0], [2, 1, 0], [0, 1, 2]][token % 4][:top_k] for token in range(num_tokens)]


def reference(
    layer: MoE, x: Tensor, experts: list[list[int]], scores: Tensor, factor: float | None
) -> tuple[Tensor, int]:
    """The output, and how many pairs were dropped: token by token, by a count of places taken."""
    num_tokens, top_k = x.shape[0], scores.shape[1]
    share = math.inf if factor is None else math.ceil(Fraction(factor) * num_tokens * top_k / E)
    taken, out, dropped = [0] * E, [], 0
    for token in range(num_tokens):
        row = torch.zeros(D, dtype=torch.float64)
        for slot, expert in enumerate(experts[token]):
            if taken[expert] >= share:
                dropped += 1
                continue
            taken[expert] += 1
            up = layer.up_proj_weight
            h = up[expert].mv(x[token])
            if layer.down_proj_bias is not None:
                h = h + getattr(layer, f"{layer.up_name}_bias")[expert]
            y = layer.down_proj[expert].mv(ACTIVATIONS[layer.activation](*h.split(N)))
            if layer.down_proj_bias is not None:
                y = y + layer.down_proj_bias[expert]
            row = row + scores[token, slot] * y
        out.append(row)
    return torch.stack(out) if out else x * 0, dropped


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("routing", [uniform, skewed])
@pytest.mark.parametrize("layer_of", LAYERS, ids=str)
def test_output_and_gradients_are_a_loops_over_pairs(
    layer_of: tuple[type[MoE], dict[str, Any]], routing: Any, top_k: int, activation: str, bias: bool
) -> None:
    """Also with 10 tokens for 4 experts, where factor 1 rounds up, and with an expert that has none."""
    kind, options = layer_of
    experts = routing(10, top_k)
    layer = kind(
        D, N, E, top_k, router=Chosen(experts), activation=activation, bias=bias, dtype=torch.float64, **options
    )
    x = torch.randn(10, D, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected, dropped = reference(layer, x, experts, layer.router.scores, options.get("capacity_factor"))
    out, stats = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if kind is DroppingMoE:
        assert stats.overflow.tolist() == [dropped] and stats.overflow.dtype == torch.int32
        if options["capacity_factor"] == 0.5 or (options["capacity_factor"] == 1 and routing is skewed):
            assert dropped
    else:
        assert stats.overflow is None
    d_out = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(made, wanted, d_out, retain_graph=True) for made in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_what_is_dropped_is_said_by_hand() -> None:
    """Expert 1 has tokens 0, 1, 2, 3, 4, 5 and C = 3: the last three lose it. The load is the router's."""
    layer = DroppingMoE(D, N, E, 1, router=Chosen([[1]] * 6 + [[0], [2]]), capacity_factor=1.5, dtype=torch.float64)
    assert layer.capacity(8) == 3 and layer.capacity_factor == 1.5
    out, stats = layer(torch.randn(8, D, dtype=torch.float64))
    assert out.abs().sum(1).gt(0).tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert stats.overflow.tolist() == [3] and stats.load.tolist() == [1, 6, 1, 0]


def test_second_choices_wait_for_their_token_alone() -> None:
    """By token: the second choice of token 0 comes before the first of token 1. GShard's Algorithm 1 would drop the former."""
    layer = DroppingMoE(D, N, E, 2, router=Chosen([[0, 1], [1, 2]]), capacity_factor=1, dtype=torch.float64)
    assert layer.capacity(2) == 1
    x = torch.randn(2, D, dtype=torch.float64)
    grad = torch.autograd.grad(layer(x)[0].sum(), layer.router.scores)[0]
    assert (grad != 0).tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(("factor", "capacity"), [(1, 3), (1.5, 4), (2, 5), (1.1, 3), (100, 5), (0.01, 1)])
def test_capacity_rounds_up_and_is_at_most_t(factor: float, capacity: int) -> None:
    assert DroppingMoE(D, N, E, 2, capacity_factor=factor).capacity(5) == capacity  # an even share is 2.5


@pytest.mark.parametrize("layer_of", EXACT, ids=str)
@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "hash"])
@pytest.mark.parametrize("activation", ["swiglu", "alternating(clamped_swiglu)", "gelu"])
def test_without_a_drop_they_are_moe(layer_of: tuple[type[MoE], dict[str, Any]], router: str, activation: str) -> None:
    """Outputs, statistics and gradients, with its checkpoint, a mask, and a NaN that the mask covers."""
    kind, options = layer_of
    common: dict[str, Any] = {"router": router, "activation": activation, "bias": True, "dtype": torch.float64}
    moe, layer = MoE(16, 8, 5, 3, backend="torch", **common), kind(16, 8, 5, 3, **common, **options)
    layer.load_state_dict(moe.state_dict())
    x, mask = torch.randn(23, 16, dtype=torch.float64), torch.rand(23) > 0.2
    x[~mask] = math.nan
    gradients = []
    for each in (moe, layer):
        torch.manual_seed(1)  # some routers draw
        mine = x.clone().requires_grad_()
        out, stats = each(mine, mask=mask)
        gradients.append(
            [out, stats.load, *torch.autograd.grad((out**2).sum() + stats.aux_loss, [mine, *each.parameters()])]
        )
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not gradients[1][0][~mask].any()


def test_a_masked_token_takes_no_place() -> None:
    layer = DroppingMoE(D, N, E, 2, capacity_factor=1, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.zero_()  # all tokens choose the same two experts, so C = 5 of ten tokens stay
    x, mask = torch.randn(10, D, dtype=torch.float64), torch.tensor([False, True] * 5)
    out, stats = layer(x, mask=mask)
    assert out.abs().sum(1).gt(0).tolist() == mask.tolist() and stats.overflow.tolist() == [0]
    assert layer(x)[1].overflow.tolist() == [10]


@pytest.mark.parametrize("layer_of", LAYERS, ids=str)
@pytest.mark.parametrize("router", ["top_k", "token_rounding", "expert_choice"])
def test_no_tokens(layer_of: tuple[type[MoE], dict[str, Any]], router: str) -> None:
    kind, options = layer_of
    layer = kind(16, 8, 4, 2, router=router, **options)
    x = torch.zeros(0, 16, requires_grad=True)
    out, stats = layer(x)
    (out.sum() + stats.aux_loss).backward()
    assert out.shape == (0, 16) and stats.load.tolist() == [0] * 4
    assert not layer.down_proj.grad.any() and not layer.up_proj_weight.grad.any()


@pytest.mark.parametrize("layer_of", LAYERS, ids=str)
def test_a_nan_stays_with_its_expert_and_its_token(layer_of: tuple[type[MoE], dict[str, Any]]) -> None:
    """In the gradients too. Nobody chooses expert 1, whose padding is made of what comes after: token 2."""
    kind, options = layer_of
    layer = kind(D, N, E, 1, router=Chosen([[0], [0], [2], [3]]), dtype=torch.float64, **options)
    x = torch.randn(4, D, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.down_proj[1] = layer.down_proj[3] = math.nan
    out = layer(x)[0]
    out.sum().backward()
    assert all(t.isfinite().all(1).tolist() == [True] * 3 + [False] for t in (out, x.grad, layer.router.scores.grad))
    with torch.no_grad():
        layer.down_proj[1:] = 0.5
        x[2] = math.nan
    layer.zero_grad()
    layer(x)[0].sum().backward()
    for weight in (layer.up_proj_weight, layer.down_proj):
        assert weight.grad.isfinite().all((1, 2)).tolist() == [True, True, False, True]


@pytest.mark.parametrize("layer_of", LAYERS, ids=str)
def test_experts_elsewhere_take_no_place(layer_of: tuple[type[MoE], dict[str, Any]]) -> None:
    """Ids outside [0, E), as `moe_mlp` takes them; their scores may be anything."""
    kind, options = layer_of
    experts = [[0, -1], [E + 1, 2], [E, -3], [-1, E]]
    layer = kind(D, N, E, 2, router=Chosen(experts), dtype=torch.float64, **options)
    layer.router.forward = lambda x: Routing(layer.router.scores, layer.router.experts, x, torch.ones(E).int(), {})
    here = (layer.router.experts >= 0) & (layer.router.experts < E)
    layer.router.scores.data[~here] = math.nan
    x = torch.randn(4, D, dtype=torch.float64)
    out = layer(x)[0]
    assert out.isfinite().all() and out.abs().sum(1).gt(0).tolist() == [True, True, False, False]
    out.sum().backward()
    assert not layer.router.scores.grad[~here].any()


@pytest.mark.parametrize("layer_of", EXACT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(layer_of: tuple[type[MoE], dict[str, Any]], dtype: torch.dtype) -> None:
    """As MoE: a layer of float32 takes x of 16 bits, and autocast is heard."""
    kind, options = layer_of
    moe = MoE(16, 8, 4, 2, backend="torch")
    layer = kind(16, 8, 4, 2, **options)
    layer.load_state_dict(moe.state_dict())
    x = torch.randn(30, 16).to(dtype)
    out = layer(x)[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out, moe(x)[0], rtol=0.05, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)[0]
        assert out.dtype == moe(x)[0].dtype == torch.bfloat16
    out.sum().backward()
    assert layer.down_proj.grad.dtype == torch.float32 and layer.down_proj.grad.any()
    refuses(lambda: layer.bfloat16()(x.float()), "x")


@pytest.mark.parametrize("kind", [DroppingMoE, SequentialMoE])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("backend", "hopper"), ("backend", "auto"), ("save", "paper"), ("combine", "fused")),
        *(("row_capacity", 10), ("workspace_bytes", 10)),
    ],
)
def test_options_of_other_formulations_are_refused(kind: Any, option: str, value: Any) -> None:
    refuses(lambda: kind(16, 8, 4, 2, **{option: value}), option)
    layer = kind(16, 8, 4, 2)
    refuses(lambda: setattr(layer, option, value), option)
    layer.activation = "geglu"
    assert layer(torch.randn(3, 16))[0].isfinite().all() and copy.deepcopy(layer).activation == "geglu"
    layer.prepare(10)
    assert layer.runs_on() == "torch"
    refuses(lambda: layer.saved_bytes(10), "saved_bytes", NotImplementedError)


@pytest.mark.parametrize("factor", [0, math.inf])
def test_what_is_no_capacity_factor_is_refused(factor: float) -> None:
    refuses(lambda: DroppingMoE(16, 8, 4, 2, capacity_factor=factor), "capacity_factor")


# ---- scripts/train_lm --------------------------------------------------------------------------------------------

TINY = """--device cpu --steps 3 --layers 1 --d-model 16 --heads 2 --context 16 --d-expert 8 --num-experts 4 --batch 2
    --val-every 3 --val-bytes 64 --warmup 1"""
FORMULATIONS = {
    "moe": {"save": "paper"},
    "dropping": {"capacity_factor": 1.5},
    "sequential": {},
    "dmoe": {"d_expert": 128},
    "dense": {},
}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    script = importlib.import_module("scripts.train_lm")
    monkeypatch.setattr(script, "SAMPLE_BYTES", 4)
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    (tmp_path / "text").write_text("a line of text\n" * 60)
    out = ["--out", str(tmp_path)]
    yield lambda *options: script.main([*map(str, options), *out])
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("name", [*settings.FORMULATIONS])
def test_train_lm_trains_each_formulation(name: str, main: Any, tmp_path: Path) -> None:
    """Its checkpoint says which; it goes on with it, refuses another, and text is made of it."""
    given = [f"--{key.replace('_', '-')}={value}" for key, value in FORMULATIONS[name].items()]
    start = [*TINY.split(), "--data", tmp_path / "text", "--name", name]
    assert main(*start, "--formulation", name, *given) == 0
    config = torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["config"]
    assert config == read_config(tmp_path / name / "config.json")
    assert config["formulation"] == name and config.items() >= FORMULATIONS[name].items()
    assert main("--resume", "--steps", 4, "--name", name, "--device", "cpu") == 0
    assert main("--resume", "--steps", 5, "--name", name, "--formulation", "other") == 2
    losses = [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_a_dense_model_is_sharded_too(main: Any, tmp_path: Path) -> None:
    options = ["--formulation", "dense", "--parallel", "fsdp"]
    assert main(*TINY.split(), "--data", tmp_path / "text", *options) == 0


def test_a_checkpoint_of_before_there_were_formulations_is_moes(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And checksums, which is said."""
    assert main(*TINY.split(), "--data", tmp_path / "text", "--name", "old") == 0
    folder = tmp_path / "old"
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for config in (state["config"], of_file := json.loads((folder / "config.json").read_text())):
        del config["formulation"], config["capacity_factor"]
    del state["checksums"], of_file["checksum"]
    torch.save(state, folder / "checkpoint.pt")
    (folder / "config.json").write_text(json.dumps(of_file))
    capsys.readouterr()
    assert main("--resume", "--steps", 4, "--name", "old", "--device", "cpu") == 0
    assert re.search(
        "^warning: checkpoint: .*checkpoint.pt is of an earlier version, without checksums", capsys.readouterr().err
    )


def test_a_capacity_factor_of_0_drops_nothing() -> None:
    config = settings.GPTConfig(layers=1, d_model=16, heads=2, d_expert=8, formulation="dropping", capacity_factor=0.0)
    assert GPT(config).blocks[0].moe.capacity_factor is None


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("formulation", {"formulation": "dmo"}),
        ("capacity_factor", {"capacity_factor": 2.0}),
        ("save", {"formulation": "sequential", "save": "paper"}),
        ("backend", {"formulation": "dropping", "backend": "hopper"}),
        ("capacity_factor", {"formulation": "dropping", "capacity_factor": -1.0}),
    ],
)
def test_settings_that_do_not_fit(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        settings.Config(**given)


@pytest.mark.parametrize("kind", [DroppingMoE, SequentialMoE])
def test_compiled_for_any_number_of_tokens(kind: type[MoE]) -> None:
    layer = kind(D, N, E, 2)
    compiled = torch.compile(layer, dynamic=True, backend="eager")
    for x in (torch.randn(7, D), torch.randn(9, D)):
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
