"""The layer in PyTorch's other uses: meta tensors, export, operation counts, torch.func, reentrant checkpoints."""

import io
import shutil

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from blazeproto import MoE
from blazeproto.autograd import moe_mlp
from blazeproto.router.router import ROUTERS

T, D, N, E, K = 9, 16, 24, 4, 2


@pytest.mark.parametrize(
    "options",
    [*({"router": name} for name in ROUTERS), {"workspace_bytes": 10_000}, {"row_capacity": 10, "bias": True}],
)
def test_meta_tensors_give_shapes(options):
    layer = MoE(D, N, E, K, d_shared=8, device="meta", **options)
    x = torch.randn(T, D, device="meta", requires_grad=True)
    ids = (torch.zeros(T, dtype=torch.int64, device="meta"),) if options.get("router") == "hash" else ()
    out, stats = layer(x, *ids)
    (out.sum() + stats.aux_loss).backward()
    assert out.is_meta and out.shape == (T, D) and stats.load.shape == (E,)
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in (x, layer.gate_up_proj, layer.down_proj))


@pytest.mark.parametrize("router", ["top_k", "expert_choice"])
def test_an_exported_layer_is_saved_and_loaded(router):
    layer, x = MoE(D, N, E, K, router=router), torch.randn(T, D)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    out, stats = torch.export.load(file).module()(x)
    expected, expected_stats = layer(x)
    assert torch.equal(out, expected) and torch.equal(stats.load, expected_stats.load)


@pytest.mark.parametrize("router", ["top_k", "capacity"])
def test_an_exported_layer_takes_masks_of_other_sizes(router):
    layer = MoE(D, N, E, K, router=router, d_shared=8)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    given = {0: batch, 1: length}
    inputs = [(torch.randn(*sizes, D), None, torch.rand(*sizes) < 0.5) for sizes in ((3, 7), (5, 11))]
    exported = torch.export.export(layer, inputs[0], dynamic_shapes=(given, None, given)).module()
    torch.testing.assert_close(exported(*inputs[1])[0], layer(*inputs[1])[0])


@pytest.mark.parametrize(("activation", "halves"), [("swiglu", 2), ("relu", 1)])
@pytest.mark.parametrize(("options", "again"), [({}, 0), ({"save": "recompute"}, 1), ({"workspace_bytes": 10_000}, 0)])
def test_operations_are_counted(activation, halves, options, again):
    layer, x = MoE(D, N, E, K, activation=activation, **options), torch.randn(200, D, requires_grad=True)
    up, down = 2 * 200 * K * halves * N * D, 2 * 200 * K * N * D
    with FlopCounterMode(display=False) as counter:
        out, _ = layer(x)
    assert _of_experts(counter) == up + down
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert _of_experts(counter) == 2 * (up + down) + again * up


def test_operations_of_the_gradients_that_are_asked_for():
    layer, x = MoE(D, N, E, K), torch.randn(200, D)
    layer.up_proj_weight.requires_grad_(False)
    layer.router.requires_grad_(False)
    out, _ = layer(x)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert _of_experts(counter) == 2 * 200 * K * N * D  # of down_proj alone


def _of_experts(counter: FlopCounterMode) -> int:
    return sum(count for op, count in counter.get_flop_counts()["Global"].items() if "blazeproto" in str(op))


REFUSED = r"expected a call outside torch\.func's grad, vmap, jvp and forward-mode AD.*use backward\(\)"


def test_transforms_are_refused():
    layer, x = MoE(D, N, E, K), torch.randn(T, D)
    weights = dict(layer.named_parameters())

    def loss(weights):
        return torch.func.functional_call(layer, weights, (x,))[0].sum()

    for transformed in (
        lambda: torch.func.grad(loss)(weights),
        lambda: torch.vmap(lambda x: layer(x)[0])(x.expand(3, T, D)),
        lambda: torch.func.jvp(lambda x: layer(x)[0], (x,), (x,)),
        lambda: torch.func.jacrev(lambda x: layer(x)[0])(x),
    ):
        with pytest.raises(RuntimeError, match="Router: " + REFUSED):
            transformed()
    assert torch.func.functional_call(layer, weights, (x,))[0].requires_grad  # which is no transform


def test_batches_of_gradients_are_refused():
    layer, x = MoE(D, N, E, K), torch.randn(T, D, requires_grad=True)
    out, _ = layer(x)
    for batched in (
        lambda: torch.autograd.grad(out, x, torch.ones(2, T, D), is_grads_batched=True, retain_graph=True),
        lambda: torch.vmap(lambda d_out: torch.autograd.grad(out, x, d_out, retain_graph=True))(torch.ones(2, T, D)),
        lambda: torch.autograd.functional.jacobian(lambda x: layer(x)[0], x, vectorize=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"^backward: expected a plain gradient of the output, got one inside vmap"
        ):
            batched()

    def inside(weight):  # of another batch: the gradient is plain
        return weight * torch.autograd.grad(out, x, torch.ones(T, D), retain_graph=True)[0].sum()

    assert torch.vmap(inside)(torch.ones(3)).unique().numel() == 1
    assert torch.autograd.grad(out, x, torch.ones(T, D))[0].shape == x.shape


def test_a_tangent_is_refused():
    x = torch.randn(T, D)
    up, down, scores = torch.randn(E, 2 * N, D), torch.randn(E, D, N), torch.rand(T, K)
    experts = torch.rand(T, E).topk(K).indices
    with forward_ad.dual_level():
        moe_mlp(x, up, down, scores, experts, num_experts=E)  # has none
        with pytest.raises(RuntimeError, match="moe_mlp: " + REFUSED):
            moe_mlp(forward_ad.make_dual(x, x), up, down, scores, experts, num_experts=E)


@pytest.mark.parametrize("taken", ["in the stats", "from a module", "beside the output"])
def test_auxiliary_losses_under_a_reentrant_checkpoint(taken):
    """Inside another object the checkpoint can't see them: an error, or their gradient were lost. Beside the output it can."""
    layer = MoE(D, N, E, K, aux_loss=1.0, z_loss=0.1, dtype=torch.float64)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    out, stats = layer(x)
    expected = torch.autograd.grad(out.square().sum() + stats.aux_loss, layer.router.weight)[0]
    if taken == "in the stats":
        out, stats = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(
            RuntimeError, match=r"stats\.aux_losses: expected .* got one inside checkpoint\(use_reentrant=True\)"
        ):
            (out.square().sum() + stats.aux_loss).backward()
        return

    def flat(x):
        out, stats = layer(x)
        layer.kept = stats.aux_loss
        return out, stats.aux_loss

    out, aux_loss = checkpoint(flat, x, use_reentrant=True)
    if taken == "from a module":
        with pytest.raises(RuntimeError, match=r"stats\.aux_losses: expected .* got one inside checkpoint"):
            layer.kept.backward()
        return
    (out.square().sum() + aux_loss).backward()
    torch.testing.assert_close(layer.router.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_evaluation_without_gradients_leaves_the_losses_alone():
    layer = MoE(D, N, E, K, aux_loss=1.0)
    with torch.no_grad():
        _, stats = layer(torch.randn(T, D))
    assert not stats.aux_loss.requires_grad


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_shared_expert_compiles_for_any_number_of_tokens():
    """With inductor, whose pass over a cumsum of torch.full fails where the value is symbolic."""
    layer = MoE(D, N, E, K, d_shared=8, router="topk_softmax")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (9, 5):
        x = torch.randn(tokens, D)
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])
