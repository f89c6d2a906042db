"""The router's linear map and losses: kernels and operators against twins, torch and float64."""

import pytest
import torch
from stand_ins import play_kernels
from test_topk import check_kernel

from blazeproto.router import fallback, linear, logits, losses, ops
from blazeproto.router.scores import SCORES

FULL = pytest.mark.full


@pytest.mark.parametrize("num_experts", [128, *(pytest.param(E, marks=FULL) for E in (8, 37, 512, 1024))])
def test_kernels_compile(num_experts, tmp_path, monkeypatch):
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    pytest.importorskip("cuda.core", reason="needs cuda.core")
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path))
    score, masked = ("sigmoid", False) if num_experts in (37, 128) else ("softmax_topk", True)
    for kernel in (
        *losses.kernels(num_experts, score, True, True, masked),
        logits.finish_kernel(num_experts),
        logits.split_kernel(num_experts, 3),
    ):
        check_kernel(kernel)


# ---- losses ------------------------------------------------------------------------------------------------------


def draw(num_tokens=40, num_experts=7, top_k=3):
    values = (2 * torch.randn(num_tokens, num_experts, dtype=torch.float64)).requires_grad_()
    return values, torch.rand(num_tokens, num_experts).topk(top_k).indices.int()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("balance", "z"), [(1.0, 1.0), (0.3, 0.0), (0.0, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_losses_and_their_gradient_are_torch_s(score, balance, z, by_kernels, monkeypatch):
    """Those of the operators, which also call what stands for the kernels; the coefficients are theirs."""
    if by_kernels:
        play_kernels(monkeypatch)
        monkeypatch.setattr(ops, "kernels_take", lambda logits: True)  # float64 too
    values, experts = draw()
    balance_loss, z_loss, load, _ = ops.routing_losses(values, experts, score, balance, z, False)
    counts = fallback.expert_load(experts, 7)
    plain = (
        counts,
        balance * fallback.load_balancing_loss(values, counts, experts.shape[1], score),
        z * fallback.z_loss(values),
    )
    for made, expected in zip((load, balance_loss, z_loss), plain, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-15)
    d_values = torch.autograd.grad(0.7 * balance_loss - 1.3 * z_loss, values)[0]
    expected = torch.autograd.grad(0.7 * plain[1] - 1.3 * plain[2], values)[0]
    torch.testing.assert_close(d_values, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kernels", [False, True])
def test_an_id_that_int32_has_no_room_for_counts_nowhere(kernels, monkeypatch):
    values, experts = draw()
    with torch.no_grad():
        experts = experts.long()
        experts[0, 0], experts[1, 0], experts[2, 1] = 2**32, -(2**63), 2**63 - 1
    expected = ops.routing_losses(
        values, experts.where((experts >= 0) & (experts < 7), -1).int(), "sigmoid", 0.5, 0.1, False
    )
    launched = play_kernels(monkeypatch) if kernels else set()
    if kernels:
        monkeypatch.setattr(ops, "kernels_take", lambda logits: True)
    made = ops.routing_losses(values, experts, "sigmoid", 0.5, 0.1, False)
    assert launched == ({"routing_losses"} if kernels else set())
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_operators_are_sound():
    values, experts = draw(num_tokens=5)
    torch.library.opcheck(torch.ops.blazeproto.routing_losses.default, (values, experts, "sigmoid", 0.5, 0.1, True))
    x, weight = torch.randn(5, 16, dtype=torch.float64).requires_grad_(), torch.randn(7, 16).requires_grad_()
    for mask in (None, torch.ones(5, dtype=torch.bool)):  # a NaN is none to opcheck
        torch.library.opcheck(torch.ops.blazeproto.router_logits.default, (x, weight, mask))


# ---- the linear map, its tensor cores played by fp32 products ----------------------------------------------------


@pytest.fixture
def tensor_cores(monkeypatch):
    """The code path of a Hopper GPU, with the fallback for the kernels and products in fp32."""

    def product(a, b):
        assert a.dtype == b.dtype == torch.bfloat16
        return a.float() @ b.float()

    monkeypatch.setattr(linear, "_on_tensor_cores", lambda x, weight: x.dtype == torch.bfloat16)
    monkeypatch.setattr(linear, "_product", product)
    play_kernels(monkeypatch)
    monkeypatch.setattr(linear, "LONGEST_SUM", 24)
    monkeypatch.setattr(linear, "PARTS_AT_ONCE", 2)


def check_linear(x, weight, tolerance):
    """Logits and gradients against float64; the relative error, in norms, of what has fp32, and of bf16 beside its rounding."""
    made = linear.router_logits(x, weight, None)
    d_logits = torch.randn_like(made)
    d_x, d_weight = torch.autograd.grad(made, (x, weight), d_logits)
    x64, w64, d64 = (t.detach().double() for t in (x, weight, d_logits))
    for name, t, exact in (("logits", made, x64 @ w64.t()), ("dX", d_x, d64 @ w64), ("dW", d_weight, d64.t() @ x64)):
        assert t.shape == exact.shape
        allowed = (
            tolerance[name] if t.dtype == torch.float32 else 1.05 * (exact.to(t.dtype) - exact).norm() / exact.norm()
        )
        assert (t - exact).norm() <= allowed * exact.norm(), name


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 24, 60, 100])
@pytest.mark.parametrize("num_experts", [1, 7, 8])
def test_split_operands_keep_the_accuracy(tensor_cores, weight_dtype, num_tokens, num_experts):
    x = torch.randn(num_tokens, 40).bfloat16().requires_grad_()
    weight = torch.randn(num_experts, 40).to(weight_dtype).requires_grad_()
    check_linear(x, weight, {"logits": 1e-5, "dW": 2e-5})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_x_is_saved_for_a_trained_weight_alone(tensor_cores, dtype):
    """Not for dX, which has the bits that it has beside dW."""
    x, weight = torch.randn(50, 40, dtype=dtype).requires_grad_(), torch.randn(7, 40).requires_grad_()
    d_logits = torch.randn(50, 7)
    expected = torch.autograd.grad(linear.router_logits(x, weight, None), (x, weight), d_logits)[0]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        made = linear.router_logits(x, weight.detach(), None)
    assert x.shape not in saved and made.shape in saved
    assert torch.equal(torch.autograd.grad(made, x, d_logits)[0], expected)


def test_a_broken_token_passes_no_gradient(tensor_cores):
    x, weight = torch.randn(50, 40).bfloat16(), torch.randn(7, 40).requires_grad_()
    clean = linear.router_logits(x, weight, None)
    x[3, 0] = torch.inf
    made = linear.router_logits(x, weight, None)
    assert made[3].isnan().all() and torch.equal(made[4:], clean[4:])
    x[3, 0] = 0  # what is multiplied by a gradient of 0 must be finite
    d_logits = torch.ones_like(made)
    d_weight = linear.router_logits_backward.gradients((False, True), d_logits, x, weight, None, made)[1]
    rest = linear.router_logits_backward.gradients((False, True), d_logits[4:], x[4:], weight, None, made[4:])[1]
    first = linear.router_logits_backward.gradients((False, True), d_logits[:3], x[:3], weight, None, made[:3])[1]
    torch.testing.assert_close(d_weight, rest + first, rtol=1e-5, atol=1e-5)


# ---- on the GPU --------------------------------------------------------------------------------------------------

SHAPES = [(1, 8, 1), (300, 72, 8), (5000, 4104, 37), (9001, 256, 1000), (4096, 64, 1024), (270_000, 16, 4)]


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [*SHAPES, (32768, 2048, 128), (16384, 4096, 512)])
def test_accuracy(sizes, weight_dtype):
    num_tokens, d_model, num_experts = sizes
    x = torch.randn(num_tokens, d_model, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(num_experts, d_model, device="cuda") * d_model**-0.5).to(weight_dtype).requires_grad_()
    assert linear._on_tensor_cores(x, weight)
    check_linear(x, weight, {"logits": 1e-5, "dW": 2e-5})


@pytest.mark.gpu
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (300, 8, 2), (5000, 37, 5), (33_000, 128, 8), (3000, 1000, 3)])
def test_losses_against_float64(sizes, score):
    num_tokens, num_experts, top_k = sizes
    values = (3 * torch.randn(num_tokens, num_experts, device="cuda")).requires_grad_()
    experts = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices.int()
    made = ops.routing_losses(values, experts, score, 0.5, 0.1, False)
    exact_values = values.detach().double().requires_grad_()
    exact = ops.routing_losses(exact_values, experts, score, 0.5, 0.1, False)
    for a, b in zip(made, exact, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=3e-6, atol=1e-12)
    d_values, exact_d = (
        torch.autograd.grad(b + 2 * z, v)[0] for (b, z, *_), v in ((made, values), (exact, exact_values))
    )
    assert (d_values - exact_d).norm() <= 1e-5 * exact_d.norm()
    again = ops.routing_losses(values, experts, score, 0.5, 0.1, False)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))
