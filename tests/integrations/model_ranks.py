"""Two processes that share the experts of transformers' models, started by `test_transformers_ranks.py`."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from blazeproto.autograd import Dispatcher
from blazeproto.distributed import Symmetric
from blazeproto.integrations import peft
from blazeproto.integrations.stored import store_experts
from blazeproto.integrations.transformers import expert_parallel, explain, register
from scripts import finetune_stored
from tests.integrations.families import close, tiny
from tests.refusals import refuses

RANKS = 2
SIZES = ((3, 7), (1, 4))  # of each rank's batch


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return tiny(family, experts_implementation="blazeproto")


def batch(rank: int) -> Tensor:
    return torch.randint(3, 60, SIZES[rank], generator=torch.Generator().manual_seed(rank))


def step(model: nn.Module, rank: int) -> Tensor:
    ids = batch(rank)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def whole(gradient: Any) -> Tensor:
    """A sharded one gathered, a plain one summed over ranks."""
    if hasattr(gradient, "full_tensor"):
        gathered: Tensor = gradient.full_tensor()
        return gathered
    dist.all_reduce(gradient)
    return gradient


def trains_as_one_process(
    family: str,
    rank: int,
    where: Any,
    remake: Callable[[Any], None] = lambda model: None,
    dispatcher: Dispatcher | None = None,
) -> None:
    """Loss and gradients, those of one process that is given both batches; the weights are not all here."""
    alone, model = model_of(family), model_of(family)
    for each in (alone, model):
        remake(each)
    assert expert_parallel(model, where, dispatcher=dispatcher) is model
    ways = explain(model)
    of = str(dispatcher or "AllToAll(ranks=2, num_experts=4)")
    assert ways and all(way.endswith(f", {of})") for way in ways.values()), ways
    wanted = [step(alone, each) for each in range(RANKS)][rank]
    close(step(model, rank), wanted)
    sharded = 0
    for (name, parameter), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        if hasattr(parameter, "placements"):
            sharded += 1
            assert parameter.to_local().untyped_storage().nbytes() == right.nbytes // RANKS, name
        assert (parameter.grad is None) == (right.grad is None), name
        if right.grad is not None:
            close(whole(parameter.grad), right.grad)
    assert sharded == len(ways) * (4 if family == "gpt_oss" else 2)


def checkpointed(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable()


def adapted(model: Any) -> None:
    """With adapters of all weights of the experts, which all ranks have whole. The weights beside them are frozen."""
    peft.register()
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=[], target_parameters=targets))
    ways = peft.explain(model)
    assert ways and {*ways.values()} == {"factors"}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2, generator=generator)


def stored_experts(rank: int) -> None:
    """Adapters beside experts in MXFP4, near to one process's in bf16. A rank holds its experts' bytes."""
    models = [model_of("gpt_oss").bfloat16() for _ in range(2)]
    for model in models:
        adapted(store_experts(model, "mxfp4"))
    alone, model = models
    held = sum(t.nbytes for t in model.state_dict().values() if t.dtype == torch.uint8)
    expert_parallel(model, dist.group.WORLD)
    assert 2 * sum(t.nbytes for t in model.state_dict().values() if t.dtype == torch.uint8) == held
    wanted = [step(alone, each) for each in range(RANKS)][rank]
    assert abs(float(step(model, rank) / wanted) - 1) < 0.01
    for (name, got), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        if "lora_" in name:
            assert right.grad is not None and right.grad.any()
            assert (whole(got.grad) - right.grad).norm() < 0.03 * right.grad.norm(), name
    refuses(lambda: expert_parallel(model, dist.group.WORLD), "model")


def bits_in_bf16(rank: int) -> None:
    """Under autocast and with bf16 weights and scores: the same bits again, and near to one process's."""
    for cast in (False, True):
        models = [model_of("qwen3_moe") for _ in range(3)]
        losses = []
        for model in models:
            if not cast:
                model.bfloat16()
            if model is not models[0]:
                expert_parallel(model, dist.group.WORLD)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                losses.append(step(model, rank))
        assert torch.equal(losses[1], losses[2]) and abs(float(losses[1] / losses[0]) - 1) < 0.01
        for one, other in zip(models[1].parameters(), models[2].parameters(), strict=True):
            gradients: list[Any] = [one.grad, other.grad]
            assert torch.equal(*(g.to_local() if hasattr(g, "to_local") else g for g in gradients))


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    register()
    group = dist.group.WORLD
    trains_as_one_process("qwen3_moe", rank, init_device_mesh("cpu", (RANKS,)))
    trains_as_one_process("qwen3_moe", rank, group, checkpointed)
    trains_as_one_process("gpt_oss", rank, group)  # transposed, gate and up alternating, biases
    trains_as_one_process("nemotron_h", rank, group)  # no gate
    trains_as_one_process("qwen3_moe", rank, group, adapted)
    trains_as_one_process("gpt_oss", rank, group, adapted)
    assert group is not None
    symmetric = Symmetric(group, 4, d_model=32, max_tokens=32, max_pairs=128)
    trains_as_one_process("qwen3_moe", rank, group, adapted, symmetric)
    bits_in_bf16(rank)
    stored_experts(rank)
    given = ["--random=tiny", "--device=cpu", "--tokens=24", "--steps=3", "--lr=0.01", f"--json={folder / 'row.json'}"]
    finetune_stored.main(given)
    with pytest.raises(SystemExit):
        finetune_stored.main([*given, f"--export={folder}"])
    experts = model_of("mixtral").model.layers[0].mlp.experts
    expert_parallel(experts, group)
    refuses(lambda: expert_parallel(experts, group), "model")
    dist.barrier()
    os._exit(0)  # without the interpreter's teardown, which gloo's threads do not always survive
