"""dMoE against `blazeproto.MoE` with the same weights, and its kernels' way, on the machine, against its torch operations."""

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from blazeproto import MoE
from blazeproto.blocksparse import dMoE, dmoe, topology_of
from blazeproto.blocksparse.dmoe import BlockExperts, by_formulas
from blazeproto.dispatch import build_dispatch
from blazeproto.router import Routing
from tests.refusals import refuses

D, N, E = 24, 128, 5


def gradients(layer: Any, x: Tensor, d_out: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.detach().clone().requires_grad_()
    out, stats = layer(x)
    parameters = [layer.router.weight, layer.up_proj_weight, layer.down_proj]
    ones = torch.ones_like(stats.aux_loss)
    return out, list(torch.autograd.grad((out, stats.aux_loss), (x, *parameters), (d_out, ones), allow_unused=True))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("activation", ["swiglu", "relu", "alternating(swiglu)"])
@pytest.mark.parametrize("router", ["topk_softmax", "token_rounding"])
def test_is_the_same_layer(router: str, activation: str, top_k: int) -> None:
    options: dict[str, Any] = {"activation": activation, "router": router, "aux_loss": 0.01, "dtype": torch.float64}
    right, layer = MoE(D, N, E, top_k, backend="torch", **options), dMoE(D, N, E, top_k, **options)
    layer.load_state_dict(right.state_dict())
    x, d_out = torch.randn(2, 70, D, dtype=torch.float64), torch.randn(2, 70, D, dtype=torch.float64)
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected, its = gradients(right, x, d_out)
        torch.manual_seed(seed)
        made, ours = gradients(layer, x, d_out)
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
        its[2], its[3] = its[2].flatten(0, 1), its[3].mT.flatten(0, 1)
        for a, b in zip(ours, its, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_experts_of_unequal_widths() -> None:
    """Each as a layer of one expert of its width."""
    widths = (256, 128, 384)
    layer = dMoE(D, widths, 3, 1, router="topk_softmax", dtype=torch.float64)
    x = torch.randn(200, D, dtype=torch.float64)
    out, _ = layer(x)
    routing = layer.router(x)
    begins = [0, *np.cumsum(widths)]
    for expert, (begin, end) in enumerate(pairwise(begins)):
        gate, up = layer.up_proj_weight[2 * begin : 2 * end].chunk(2)
        y = torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ layer.down_proj[begin:end]
        mine = routing.experts[:, 0] == expert
        assert mine.any()
        torch.testing.assert_close(out[mine], (routing.scores * y)[mine], rtol=1e-12, atol=1e-12)


def test_the_first_weights_are_within_one_by_the_root_of_their_fan_in() -> None:
    layer = dMoE(64, [128, 512], 2, 1)
    for weight, fan_in in ((layer.up_proj_weight, 64), (layer.down_proj[:128], 128), (layer.down_proj[128:], 512)):
        assert 0.9 < weight.abs().max() * fan_in**0.5 <= 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    layer = dMoE(D, N, E, 2, router="topk_softmax", dtype=torch.float64)
    out, found = gradients(
        layer, torch.randn(tokens, D, dtype=torch.float64), torch.ones(tokens, D, dtype=torch.float64)
    )
    assert out.shape == (tokens, D) and all(g.isfinite().all() for g in found)
    assert tokens or not any(g.any() for g in found)


def test_an_id_that_int32_has_no_room_for_is_not_here() -> None:
    layer = dMoE(D, N, E, 2, router="topk_softmax")
    x, scores = torch.randn(3, D), torch.ones(3, 2)
    ids = torch.tensor([[0, 2**32 + 1], [-(2**63), 1], [2**63 - 1, 2**32]])
    up, down, given = layer.up_proj_weight, layer.down_proj, {"num_experts": E, "options": layer.options}
    made, expected = (
        layer._experts(x, up, down, scores, each, **given, pair_tokens=None, token_offsets=None)
        for each in (ids, ids.where((ids >= 0) & (ids < E), -1).int())
    )
    assert torch.equal(made, expected) and not made[2].any() and made[:2].any(1).all()


def test_float64_is_left_alone_by_autocast() -> None:
    layer = dMoE(D, N, E, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(7, D, dtype=torch.float64))[0].dtype == torch.float64


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0,), (1,), (2,), (3,)])
def test_the_kernels_function_on_the_host(wanted: tuple[int, ...]) -> None:
    """`BlockExperts` by the twins: the gradients that are asked for and no others, of a gradient that is not contiguous."""
    layer = dMoE(D, N, E, 2, router="topk_softmax")
    x = torch.randn(70, D)
    routing = layer.router(x)
    dispatch = build_dispatch(routing.experts, E)
    blocked = (dispatch, *topology_of(dispatch, N, 2))
    d_out = torch.randn(D, 70).T
    found = []
    for compute in (BlockExperts.apply, by_formulas):
        given = [t.detach().clone() for t in (x, layer.up_proj_weight, layer.down_proj, routing.scores.flatten())]
        for index in wanted:
            given[index].requires_grad_()
        out = compute(*given, blocked, "swiglu")
        out.backward(d_out)
        found.append([out.detach(), *(t.grad for t in given)])
    for ours, right in zip(*found, strict=True):
        assert (ours is None) == (right is None)
        if right is not None:
            assert (ours - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("d_expert", {"d_expert": 96}),
        ("d_expert", {"d_expert": [128]}),
        ("bias", {"bias": True}),
        ("save", {"save": "paper"}),
    ],
)
def test_bad_input_is_refused(argument: str, given: dict[str, Any]) -> None:
    refuses(lambda: dMoE(**{"d_model": D, "d_expert": N, "num_experts": E, "top_k": 2, **given}), argument)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_kernels_against_moe_s(activation: str) -> None:
    """The two round at the same places but for the padded products: bf16 apart."""
    options: dict[str, Any] = {"activation": activation, "router": "topk_softmax", "aux_loss": 0.01}
    options |= {"device": "cuda", "dtype": torch.bfloat16}
    right = MoE(256, 256, 8, 2, **options)
    layer = dMoE(256, 256, 8, 2, **options)
    layer.load_state_dict(right.state_dict())
    x, d_out = (torch.randn(1000, 256, device="cuda").bfloat16() for _ in range(2))
    (expected, its), (made, ours) = gradients(right, x, d_out), gradients(layer, x, d_out)
    its[2], its[3] = its[2].flatten(0, 1), its[3].mT.flatten(0, 1)
    for a, b in zip((made, *ours), (expected, *its), strict=True):
        assert (a - b).float().norm() < 0.02 * b.float().norm()


def test_on_meta_there_are_shapes_alone() -> None:
    with torch.device("meta"):
        layer = dMoE(64, [128, 256, 128, 128], 4, 2)
        x = torch.randn(2, 5, 64, requires_grad=True)
        out, _ = layer(x)
        out.sum().backward()
    assert out.is_meta and out.shape == x.shape
    assert x.grad is not None and all(parameter.grad is not None for parameter in layer.parameters())


# --- What a hunt for bugs found, so that it stays mended -----------------------------------------------------------------


class Given(nn.Module):
    """A router that chooses what it is given."""

    def __init__(self, experts: Tensor, scores: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.scores, self.num_experts, self.top_k = experts, scores, num_experts, experts.shape[1]

    def forward(self, x: Tensor) -> Routing:
        load = torch.zeros(self.num_experts, dtype=torch.int32)
        return Routing(self.scores, self.experts, x @ x.T, load, {})


def test_a_checkpoint_of_other_widths_is_refused() -> None:
    """As many hidden units in all, but other experts': they were dealt out wrongly, without a word."""
    given = MoE(D, 256, 3, 1, backend="torch").state_dict()
    layer = dMoE(D, [256, 128, 384], 3, 1)
    before = layer.down_proj.clone()
    with pytest.raises(RuntimeError, match="size mismatch for gate_up_proj"):
        layer.load_state_dict(given)
    assert torch.equal(layer.down_proj, before)


def test_weights_that_are_assigned_are_contiguous() -> None:
    layer = dMoE(D, N, 1, 1)
    layer.load_state_dict(MoE(D, N, 1, 1, backend="torch").state_dict(), assign=True)
    assert layer.down_proj.is_contiguous()


def test_a_dtype_that_moe_refuses_is_refused() -> None:
    """It was rounded to x's, without a word."""
    layer = dMoE(D, N, 2, 1, dtype=torch.float64)
    refuses(lambda: layer(torch.zeros(3, D, dtype=torch.bfloat16)), "x")


def test_a_transform_is_refused_where_no_router_runs() -> None:
    layer, scores = dMoE(128, 128, 4, 2), torch.rand(3, 2)
    chosen = {"experts": torch.tensor([[0, 1]]).expand(3, 2), "scores": scores}
    with pytest.raises(RuntimeError, match=r"^dMoE: expected a call outside torch\.func's grad"):
        torch.func.grad(lambda x: layer(x, **chosen)[0].sum())(torch.randn(3, 128))


def test_what_the_kernels_get_is_contiguous_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse anything else; slices of x, of scores and of ids are normal input."""
    seen: list[Tensor] = []

    class Experts:
        @staticmethod
        def apply(*arrays: Any) -> Tensor:
            seen.extend(arrays[:4])
            return arrays[0]

    def dispatch_of(ids: Tensor, num_experts: int) -> Any:
        seen.append(ids)
        return build_dispatch(ids, num_experts)

    monkeypatch.setattr(dmoe, "BlockExperts", Experts)
    monkeypatch.setattr(dmoe, "build_dispatch", dispatch_of)
    monkeypatch.setattr(dMoE, "runs_on", lambda self, dtype=None: "hopper")
    sorted_ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    router = Given(sorted_ids[:, :1], torch.rand(3, 2)[:, :1], 2)
    layer = dMoE(D, N, 2, 1, router=router, dtype=torch.bfloat16)
    layer.down_proj = nn.Parameter(layer.down_proj.detach().t().contiguous().t())
    for x in (torch.randn(3, 2 * D)[:, :D].bfloat16(), torch.zeros(3 * D + 1).bfloat16()[1:].view(3, D)):
        layer(x if x.is_contiguous() else torch.cat([x, x], 1)[:, :D])
    assert len(seen) == 10 and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in seen)


@pytest.mark.parametrize("router", ["topk_softmax", "hash", "expert_choice"])
def test_prepare_without_gradients_and_for_any_router(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, watched = dMoE(D, N, 2, 1, router=router), Mock(wraps=dmoe.by_formulas)
    # The check says that the kernels run; the products are torch's all the same.
    monkeypatch.setattr(dMoE, "runs_on", lambda self, dtype=None: "torch" if dtype else "hopper")
    monkeypatch.setattr(dmoe, "by_formulas", watched)
    with torch.no_grad():
        layer.prepare(5)
    layer.requires_grad_(False).prepare(0)
    assert [call.args[0].dtype for call in watched.call_args_list] == [torch.bfloat16] * 2


def test_compiled_it_breaks_once_at_the_experts() -> None:
    """Nothing of the dispatch, its NumPy arrays and its launches is traced."""
    layer = dMoE(D, N, 2, 1, router="topk_softmax")
    x = torch.randn(9, D)
    right = layer(x)[0]
    torch._dynamo.reset()
    counted = CompileCounter()
    torch.testing.assert_close(torch.compile(layer, backend=counted)(x)[0], right)
    assert counted.frame_count <= 3
