"""torchtitan's own MoE block with `blazeproto.integrations.torchtitan` and without."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import Options
from blazeproto.lab.accuracy import Pool
from tests.integrations import titan
from tests.integrations.titan import EXPERTS, OVERRIDE, D, N, blocks, train
from tests.refusals import refuses

ours: Any = titan.load()

from torchtitan.config import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
BLOCKS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "softmax, normed": {"score_func": "softmax", "route_norm": True, "top_k": 3},
    "shared expert": {"shared": True},
    "one expert a token": {"top_k": 1, "route_scale": 2.5},
    "groups": {"num_expert_groups": 3, "num_limited_groups": 2},
    "widths no kernel has": {"d": 36, "n": 20},
}


def batch(
    dtype: torch.dtype = torch.float32, d: int = D, tokens: int = 24, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, tokens, d).to(device, dtype) for _ in range(2))  # type: ignore[return-value]


def experts_of(block: Any) -> Any:
    return block.routed_experts.inner_experts


def close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# --- The block -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_the_block_trains_as_without(options: dict[str, Any], save: str) -> None:
    """In float32: the output, dX and every parameter's gradient."""
    plain, with_ours = blocks(save=save, **options)
    assert type(experts_of(plain)) is GroupedExperts and type(experts_of(with_ours)) is ours.Experts
    x, d_out = batch(d=options.get("d", D))
    with titan.products_in_float32():
        wanted = train(plain, x, d_out)
        assert len(wanted) == (9 if options.get("shared") else 6) and all(t.any() for t in wanted.values())
        close(train(with_ours, x, d_out), wanted)
    torch.testing.assert_close(with_ours.tokens_per_expert_E, plain.tokens_per_expert_E)


def as_near(plain: nn.Module, with_ours: nn.Module, x: Tensor, d_out: Tensor) -> Pool:
    """How far both are from the block in float32 with the same weights and inputs, and the same choice of experts."""
    for block in (plain, with_ours):
        block.router._debug_force_load_balance = True  # or one that is almost a tie would fall otherwise in float32
    pool, yardstick, got = Pool(), train(plain, x, d_out), train(with_ours, x, d_out)
    with titan.products_in_float32():
        exact = train(plain.float(), x.float(), d_out.float())
    for name, reference in exact.items():
        assert got[name].dtype == yardstick[name].dtype
        pool.add(name, got[name], yardstick[name], reference)
    return pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_bf16_it_is_as_near_to_float32_as_without(dtype: torch.dtype) -> None:
    """Also where tokens and weights are float32, for torchtitan multiplies those in bf16 too."""
    pool = as_near(*blocks(dtype, d=64, n=48), *batch(dtype, d=64, tokens=100))
    assert not pool.failures(slack=1.5)


def test_weights_of_float16_are_cast_as_torchtitan_does() -> None:
    plain, with_ours = (experts_of(block).half() for block in blocks())
    x, counts = torch.randn(20, D).half(), torch.tensor([3, 0, 10, 2, 4, 1])
    outs = [experts(x, counts) for experts in (plain, with_ours)]
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.05)
    for experts, out in zip((plain, with_ours), outs, strict=True):
        out.square().sum().backward()
        assert out.dtype == torch.float16 and experts.w1_EFD.grad.dtype == torch.float16
    torch.testing.assert_close(with_ours.w2_EDF.grad, plain.w2_EDF.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_the_block_gives_the_same_bits(use_reentrant: bool) -> None:
    _, block = blocks(torch.bfloat16)
    x, d_out = batch(torch.bfloat16)
    wanted = train(block, x, d_out)
    recomputed = train(Recomputed(block, use_reentrant), x, d_out)
    assert all(torch.equal(recomputed["block." + n if "." in n else n], t) for n, t in wanted.items())


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return out


def test_the_block_compiles_without_a_graph_break() -> None:
    _, block = blocks()
    x, d_out = batch()
    torch._dynamo.reset()
    wanted = train(block, x, d_out)
    experts_of(block).compile(backend="aot_eager", fullgraph=True)
    close(train(block, x, d_out), wanted)


def test_checkpoints_are_the_same() -> None:
    """Names, shapes and layout of what is saved, and what an optimizer keeps; built on no device, as torchtitan does."""
    plain, with_ours = blocks()
    wanted = {name: (tensor.shape, tensor.stride()) for name, tensor in plain.state_dict().items()}
    assert {name: (tensor.shape, tensor.stride()) for name, tensor in with_ours.state_dict().items()} == wanted
    plain.load_state_dict(with_ours.state_dict())
    with torch.device("meta"):
        made = titan.overridden(titan.block_config()).build()
    made.to_empty(device="cpu")
    made.init_states(buffer_device=None)
    assert {name: (tensor.shape, tensor.stride()) for name, tensor in made.state_dict().items()} == wanted
    assert experts_of(made).w1_EFD.std() > 0.5, "initialised as the configuration says"


def test_sharding_goes_along() -> None:
    config = titan.block_config().routed_experts.inner_experts
    config.sharding_config = object()
    changed = ours.experts(config, save="paper")
    same = [field.name for field in dataclasses.fields(GroupedExperts.Config)]
    assert all(getattr(changed, name) is getattr(config, name) for name in same) and changed.save == "paper"


@pytest.fixture
def one_rank(group: Any) -> Any:
    return init_device_mesh("cpu", (1,))


def test_weights_that_are_dtensors_are_made_local(one_rank: Any) -> None:
    plain, with_ours = (experts_of(block) for block in blocks())
    x, counts = torch.randn(20, D), torch.tensor([3, 0, 10, 2, 4, 1])
    for experts in (plain, with_ours):
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), one_rank, [Shard(0)])))
    with titan.products_in_float32():
        outs = [experts(x, counts) for experts in (plain, with_ours)]
        for out in outs:
            out.square().sum().backward()
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    for name, parameter in with_ours.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (Shard(0),)
        wanted = plain.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted, rtol=1e-5, atol=1e-5)


def test_fsdp_frees_the_weights_between_forward_and_backward(one_rank: Any) -> None:
    plain, with_ours = blocks()
    x, d_out = batch()
    fully_shard(with_ours, mesh=one_rank, reshard_after_forward=True)
    with titan.products_in_float32():
        got, wanted = train(with_ours, x, d_out), train(plain, x, d_out)
    close({name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}, wanted)


def test_rows_that_a_collective_still_brings(one_rank: Any) -> None:
    """What an all-to-all between ranks hands over is waited for where it is read."""
    _, block = blocks()
    x, counts = torch.randn(20, D).bfloat16(), torch.tensor([3, 0, 10, 2, 4, 1])
    wanted = experts_of(block)(x, counts)
    assert torch.equal(experts_of(block)(AsyncCollectiveTensor(x), AsyncCollectiveTensor(counts)), wanted)


def test_padding_is_nobodys() -> None:
    """Zeros come out, whatever was in it."""
    _, block = blocks()
    x, counts = torch.randn(20, D), torch.tensor([3, 0, 10, 2, 1, 1])
    x[17:] = torch.nan
    x.requires_grad_()
    out = experts_of(block)(x, counts)
    out.backward(torch.ones_like(out))
    assert x.grad is not None and not out[17:].any() and not x.grad[17:].any()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in experts_of(block).parameters())


# --- What is refused -----------------------------------------------------------------------------------------------------


def low_precision(prefix: str, parent: type) -> Any:
    """As torchtitan's converters derive a class; theirs need torchao and a GPU."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(parent.Config):  # type: ignore[misc, name-defined]
        pass

    return type(parent)(f"{prefix}{parent.__name__}", (parent,), {"Config": Config})


def gpt_oss() -> Any:
    module = pytest.importorskip(
        "torchtitan.models.gpt_oss.moe", reason="torchtitan's models need a later torch", exc_type=ImportError
    )
    return module.GptOssGroupedExperts


OTHERS = {  # one of each line of `REFUSED`, and others
    "GptOss": (gpt_oss, "GptOssGroupedExperts: biases and a clamped SwiGLU, gate and up alternating"),
    "MXFP8": (lambda: low_precision("MXFP8", GroupedExperts), "MXFP8GroupedExperts: MXFP8 products"),
    "Float8": (lambda: low_precision("Float8", GroupedExperts), "Float8GroupedExperts: float8 products"),
    "Fused": (lambda: low_precision("Fused", GroupedExperts), "gate and up weights in one parameter"),
    "both": (lambda: low_precision("MXFP8", gpt_oss()), "MXFP8 products and biases"),
    "unknown": (lambda: low_precision("My", GroupedExperts), "MyGroupedExperts: a class of its own"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_experts_are_refused_by_name(name: str) -> None:
    make, words = OTHERS[name]
    config = titan.block_config()
    config.routed_experts.inner_experts = make().Config(dim=D, hidden_dim=N, num_experts=EXPERTS)
    assert words in refuses(lambda: titan.overridden(config), "experts").got


def test_a_class_made_of_ours_is_refused() -> None:
    """As a converter that comes after the override would make it: its low-precision product would never be called."""
    config = low_precision("MXFP8", ours.Experts).Config(dim=D, hidden_dim=N, num_experts=EXPERTS)
    assert "MXFP8Experts: MXFP8 products" in refuses(config.build, "experts").got


class Wrapped(Tensor):
    __module__ = "torchao.prototype.moe_training.tensor"


@pytest.mark.parametrize(
    "change", [lambda weight: weight.to(torch.float8_e4m3fn), lambda weight: weight.as_subclass(Wrapped)]
)
def test_quantised_weights_are_refused(change: Any) -> None:
    experts = experts_of(blocks()[1])
    experts.w3_EFD = nn.Parameter(change(experts.w3_EFD.detach()), requires_grad=False)
    refuses(lambda: experts(torch.randn(3, D), torch.tensor([3, 0, 0, 0, 0, 0])), "w3_EFD")


def test_a_wrong_policy_is_refused_when_it_is_set() -> None:
    for option in ("save", "backend"):
        refuses(lambda: titan.overridden(titan.block_config(), **{option: "all"}), option)  # noqa: B023


def test_type_checking_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.spmd, "is_type_checking", lambda: True)
    experts = experts_of(blocks()[1])
    refuses(lambda: experts(torch.randn(3, D), torch.tensor([3, 0, 0, 0, 0, 0])), "debug.spmd_typechecking")


def test_a_missing_triton_is_told() -> None:
    """torch's builds for CPUs have none, and torchtitan's models import it."""
    code = "import sys; sys.modules['triton'] = None; import blazeproto.integrations.torchtitan"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(
        "ImportError: torchtitan: expected triton, which its models import, got none; "
    )


def test_the_command_line_names_it() -> None:
    """As it stands in the docs."""
    from torchtitan.config.override import parse_cli_imports

    config = titan.block_config()
    words = [f'{OVERRIDE}={{"save": "recompute", "backend": "ampere"}}']
    apply_overrides(OverrideConfig(imports=parse_cli_imports(words)), config)
    assert experts_of(config.build()).options == Options(save="recompute", backend="ampere")


# --- On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_the_block_on_the_kernels(weights: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float32 as torchtitan's own grouped products are."""
    from blazeproto.autograd import hopper_backend

    launched: set[str] = set()
    launch = hopper_backend.up.launch
    monkeypatch.setattr(hopper_backend.up, "launch", lambda *a, **k: (launched.add(a[2].arch.name), launch(*a, **k))[1])
    options = {"d": 512, "n": 256, "num_experts": 16, "top_k": 4, "score_func": "softmax", "device": "cuda"}
    plain, with_ours = blocks(weights, backend=backend, **options)
    pool = as_near(plain, with_ours, *batch(weights, d=512, tokens=2048, device="cuda"))
    assert launched == {backend}, "the kernels didn't run"
    assert not pool.failures()
