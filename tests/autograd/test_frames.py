"""How deep a launch lies: frames of this package from `MoE.forward`, or from a node's backward, to the driver. A stand-in for
the GPU counts them."""

from typing import Any

import pytest
import torch

from blazeproto import MoE, moe_mlp
from blazeproto.autograd import LowRank, grouped_experts
from blazeproto.distributed import Symmetric, expert_parallel, symmetric
from blazeproto.distributed.exchanges import PeerExchange
from blazeproto.distributed.peer_memory import MemoryLayout, PeerMemory
from blazeproto.router.router import ROUTERS
from scripts.checks.stand_in import launches

SEVEN, EIGHT = 7, 8
T, D, N, E, K = 2048, 256, 128, 16, 4
DISPATCH = {"count_pairs", "place_pairs"}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"bias": True},
    "fused": {"activation": "geglu", "combine": "fused"},
    "fused_both": {"combine": "fused_both"},
    "recompute": {"save": "recompute", "bias": True},
    "chunks": {"workspace_bytes": 4_000_000, "save": "recompute", "bias": True},
    "ungated": {"activation": "relu", "save": "paper"},
    "losses": {"aux_loss": 0.01, "z_loss": 0.001},
    "groups": {"router": "aux_free", "num_groups": 4, "top_groups": 2},
}
OF_TOP_K = {"logits", "finish_logits", "topk_route", "routing_partials", "routing_sums"}
OF_BACKWARD = {"topk_route_backward", "split_gradient", "down_backward", "reduce_scores_grad", "weight_gradient"}


def step(layer: MoE, *ids: torch.Tensor) -> dict[str, list[str]]:
    """The deepest frames to each kernel of a forward and a backward."""
    pytest.importorskip("numba.cuda", reason="needs numba-cuda")
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    with launches() as seen:
        out, stats = layer(x, *ids)
        (out.float().square().sum() + stats.aux_loss).backward()
    found = {kernel: max(stacks, key=len) for kernel, stacks in seen.frames.items()}
    assert all(frames[-1] == "driver.launch" for frames in found.values())
    assert {frames[0] for frames in found.values()} >= {"layer.forward", "node.backward", "linear._backward"}
    return found


def deeper(found: dict[str, list[str]], most: int) -> dict[str, list[str]]:
    return {kernel: frames for kernel, frames in found.items() if len(frames) > most}


def made(**options: Any) -> MoE:
    with launches():
        return MoE(D, N, E, K, **{"backend": "hopper", "dtype": torch.bfloat16, **options})


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "hopper") for name in PLAIN), *((name, "ampere") for name in PLAIN if "fused" not in name)],
)
def test_seven_frames_in_bf16(name: str, backend: str) -> None:
    found = step(layer := made(backend=backend, **PLAIN[name]))
    assert found.keys() >= OF_TOP_K | OF_BACKWARD | DISPATCH | {"up_forward", "linear"}
    assert ("combine" in found) == (layer.combine != "fused_both") and not deeper(found, SEVEN)


@pytest.mark.parametrize("name", ROUTERS)
def test_eight_frames_to_the_rarer_kernels_of_a_router(name: str) -> None:
    found = step(made(router=name), *([torch.arange(T) % 100] if name == "hash" else []))
    usual = step(made(z_loss=0.001)).keys()
    assert bool(found.keys() - usual) == (name not in {"top_k", "topk_softmax", "aux_free"})
    for kernel in found:
        assert not deeper({kernel: found[kernel]}, SEVEN if kernel in usual else EIGHT)


RARER = {
    "row_capacity": (4000, {"limit_rows"}),
    "precision": ("fp8", {"quantize_weights", "quantize_rows", "transpose_rows", "up_forward_fp8"}),
}


@pytest.mark.parametrize("option", RARER)
def test_eight_frames_with_a_row_capacity_and_in_fp8(option: str) -> None:
    value, kernels = RARER[option]
    found = step(made(**{option: value}))
    assert kernels <= found.keys() and not deeper(found, EIGHT)


def test_eight_frames_with_a_dispatcher(group: Any) -> None:
    found = step(expert_parallel(made(), group))
    assert found.keys() >= OF_TOP_K | OF_BACKWARD | DISPATCH and not deeper(found, EIGHT)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_eight_frames_to_the_kernels_of_an_exchange(
    group: Any, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Symmetric's, with a CPU's memory in the place of what GPUs see of each other."""

    def between_gpus(group: Any, layout: MemoryLayout) -> PeerExchange:
        exchange = object.__new__(PeerExchange)
        exchange.layout, exchange.places = layout, T
        exchange.memory = torch.zeros(layout.size, dtype=torch.uint8)
        exchange.end = PeerMemory(layout, 0, bases=0, progress=0, device=-1, blocks=1, patience=1.0)
        return exchange

    monkeypatch.setattr(symmetric, "GatheredExchange", between_gpus)
    dispatcher = Symmetric(group, E, d_model=D, max_tokens=T, max_pairs=T * K, device="cpu")
    found = step(expert_parallel(made(precision=precision), group, dispatcher=dispatcher))
    assert ("quantize_rows" in found) == (precision == "fp8")
    assert {"share", "send", "add_up", "send_back"} <= found.keys() and "combine" not in found
    quantizing = {"quantize_rows", "quantize_weights"} if precision == "fp8" else set()  # eight without a dispatcher
    assert deeper(found, EIGHT).keys() == quantizing and not deeper(found, EIGHT + 1)


def trained(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)


def test_launches_with_factors_and_of_rows_that_have_arrived_are_as_deep() -> None:
    """A layer has no factors: `moe_mlp` is the first."""
    x, up, down = trained(T, D), trained(E, 2 * N, D), trained(E, D, N)
    factors = {"up_factors": LowRank(trained(E, 8, D), trained(E, 2 * N, 8))}
    factors["down_factors"] = LowRank(trained(E, 8, N), trained(E, D, 8))
    scores, experts = torch.randn(T, E).topk(K)
    with launches() as seen:
        for options in ({}, {"workspace_bytes": 4_000_000, "save": "recompute"}):
            moe_mlp(
                x, up, down, scores, experts, num_experts=E, backend="hopper", **factors, **options
            ).sum().backward()
        grouped_experts(x, up, down, torch.full((E,), T // E), backend="hopper", **factors).sum().backward()
    assert seen.frames.keys() >= OF_BACKWARD - {"topk_route_backward", "split_gradient"}
    assert not deeper({kernel: max(stacks, key=len) for kernel, stacks in seen.frames.items()}, SEVEN)
