"""Two processes that train torchtitan's Qwen3-MoE, in small, under its tensor parallelism: `test_torchtitan_ranks.py`."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.integrations import titan

RANKS, D, N, EXPERTS, WORDS = 2, 32, 16, 4, 64
NEAR = 1e-5


class Case(NamedTuple):
    """spmd_backend: torchtitan's option.  ep: ranks that share the experts; 1: each rank has a part of every expert's width."""

    spmd_backend: str
    ep: int


CASES = (Case("spmd_types", 1), Case("partial_dtensor", 1), Case("partial_dtensor", 2))


def model_config() -> Any:
    """Two blocks, by torchtitan's builders. They have torch's own attention, because the others need a compiler or a GPU."""
    from torchtitan.models import common, qwen3

    rope = common.CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4)
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "moe_hidden_dim": N, "num_experts": EXPERTS, "top_k": 2}
    backends = {"attn_backend": "varlen", "moe_comm_backend": "standard"}
    layers = qwen3._build_qwen3_moe_layers(n_layers=2, dim=D, rope=rope, **sizes, **backends)
    for layer in layers:
        layer.attention.inner_attention = common.ScaledDotProductAttention.Config()
    return qwen3.Qwen3Model.Config(
        vocab_size=WORDS,
        dim=D,
        layers=layers,
        norm=qwen3._qwen3_norm(D),
        tok_embeddings=common.Embedding.Config(num_embeddings=WORDS, embedding_dim=D, param_init={}),
        lm_head=common.Linear.Config(in_features=D, out_features=WORDS, param_init={}),
    )


def built(config: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def experts_of(moe: Any) -> Any:
    return moe.routed_experts.inner_experts


def train(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of this rank's part of every parameter."""
    from torchtitan.components.loss import cross_entropy_loss

    generator = torch.Generator().manual_seed(2)
    tokens, wanted = (torch.randint(WORDS, (2, 8), generator=generator) for _ in range(2))
    loss = cross_entropy_loss(model(tokens), wanted, global_vocab_size=WORDS)
    loss.backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), {name: local(gradient) for name, gradient in gradients.items()}


def run_rank(rank: int, folder: Path) -> None:
    """In every case: the loss of one process with torchtitan's experts; and their gradients on these ranks."""
    torch.set_num_threads(1)
    ours = titan.load()
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    parallel_dims.device_type = "cpu"
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    with titan.products_in_float32():
        utils.set_spmd_backend("partial_dtensor")
        alone, _ = train(built(model_config()))
        for backend, ep in CASES:
            utils.set_spmd_backend(backend)
            ones = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1}
            dims = ParallelDims(**ones, tp=RANKS, ep=ep, world_size=RANKS, spmd_backend=backend)
            dims.build_mesh()
            made = []
            for config in (model_config(), titan.overridden(model_config())):
                set_qwen3_sharding_config(config, enable_sp=True, enable_ep=ep > 1)
                model: Any = built(config)
                model.parallelize(dims)
                with utils.get_spmd_context(parallel_dims=dims)():
                    made.append(train(model))
            block = model.layers["0"]
            assert local(block.attention.wo.weight).shape == (D, D // RANKS)
            assert local(experts_of(block.moe).w1_EFD).shape == (EXPERTS // ep, N * ep // RANKS, D)
            (loss, wanted), (got_loss, got) = made
            assert isinstance(experts_of(block.moe), ours.Experts) and got.keys() == wanted.keys()
            torch.testing.assert_close(torch.stack([loss, got_loss]), alone.expand(2), rtol=NEAR, atol=0)
            for name, gradient in wanted.items():
                assert gradient.any(), name
                torch.testing.assert_close(got[name], gradient, rtol=NEAR, atol=NEAR * float(gradient.abs().max()))
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive
