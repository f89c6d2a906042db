"""A GPT over several ranks: which weights are where, how gradients are reduced, and checkpoints of shards.

    mode        experts                             attention, embedding, head            norms, routers
    fsdp        1 / N on each of N ranks            1 / N                                 on all
    hsdp        1 / G in each group of G ranks      1 / G                                 on all
    ep          E / N experts on each rank          on all                                on all
    ep+fsdp     E / G experts, and of these         1 / N                                 on all
                1 / (N / G) on each

fsdp is FSDP2 block by block: weights are gathered, in bf16 if the run is of bf16, before a block runs, and freed after it, or,
with reshard=False, after its backward, which then need not gather them again; gradients are reduced in fp32. Norms and routers
are small and decide much: they stay in fp32, whole. ep is `blazeproto.distributed.expert_parallel`: tokens travel instead of
weights. Every gradient becomes the gradient of the mean of the ranks' losses.

A checkpoint is a folder that `torch.distributed.checkpoint` writes, each rank its shards, and reads on any number of ranks. The
checksums of its files are in checkpoint.pt, which has its own, and are compared before anything is loaded.
"""

from __future__ import annotations

import logging
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from blazeproto.autograd.backends import missing_for_kernels
from blazeproto.distributed import AllToAll, Symmetric, expert_parallel
from blazeproto.distributed.symmetric import hosts_of
from blazeproto.router import Routing, fallback
from blazeproto.router.router import Router
from scripts.lm.model import GPT
from scripts.lm.ranks import Ranks, join
from scripts.lm.run_folder import (
    CHECKSUMS,
    METRICS,
    UNREADABLE,
    CheckpointError,
    SaveError,
    checksum_of_file,
    not_written,
)
from scripts.lm.settings import Config

PREFIX = "shards-"  # and the step
EXPERT_PARALLEL = ("ep", "ep+fsdp")
GROUPED = ("hsdp", "ep+fsdp")

# A sum over two dimensions of a mesh takes two reductions, of which torch warns for each: their order is the same on all ranks.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def check(config: Config, ranks: Ranks) -> None:
    """ValueError unless the run fits this number of ranks."""
    if config.parallel == "none" and ranks.size > 1:
        raise ValueError(f"parallel: expected fsdp, hsdp, ep or ep+fsdp on {ranks.size} ranks, got 'none'")
    if config.parallel in GROUPED and ranks.size % config.group_size:
        raise ValueError(f"group_size: expected a divisor of the {ranks.size} ranks, got {config.group_size}")
    parts, factors = ranks.size * config.accumulate * config.attention_tiles, "ranks * accumulate * attention_tiles"
    if config.batch % parts:
        raise ValueError(f"batch: expected a multiple of {factors} = {parts}, got {config.batch}")


class Sharding:
    """Shards a model, which all ranks have built alike; afterwards come the optimizer and `reduce`."""

    def __init__(self, model: GPT, config: Config, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.experts: list[nn.Parameter] = []  # whose gradients nobody divides by the number of ranks
        if config.parallel == "none":
            return
        if not dist.is_initialized():
            join(ranks.device, timeout=60)
        kind, size, mode, inner = ranks.device.type, ranks.size, config.parallel, config.group_size
        world, names = init_device_mesh(kind, (size,)), ("outer", "inner")
        mesh = init_device_mesh(kind, (size // inner, inner), mesh_dim_names=names) if mode in GROUPED else world
        for block in model.blocks:
            if config.aux_over == "global" and getattr(block.moe.router, "aux_loss", None):
                block.moe.router.register_forward_hook(self.balance_over_ranks)
        if mode in EXPERT_PARALLEL:
            over_experts = mesh["inner"] if mode in GROUPED else world
            dispatcher = dispatcher_of(model, config, over_experts.get_group(), ranks)  # of all blocks
            for block in model.blocks:
                expert_parallel(block.moe, over_experts, dispatcher=dispatcher)
                if config.row_capacity and isinstance(dispatcher, Symmetric):
                    mean = dispatcher.layout.max_tokens * config.top_k
                    block.moe.row_capacity = math.ceil(config.row_capacity * mean)
        if mode == "ep":
            self.experts = [p for p in model.parameters() if isinstance(p, DTensor)]
            return
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.bf16 else None,
            reduce_dtype=None if config.float64 else torch.float32,
            cast_forward_inputs=False,  # the residual stream stays what autocast makes it
        )
        small = {p for name, p in model.named_parameters() if p.dim() < 2 or ".router." in name}
        over: dict[str, Any] = {"mp_policy": policy, "ignored_params": small}
        over |= {} if config.reshard else {"reshard_after_forward": False}
        for block in model.blocks:
            if mode == "ep+fsdp":
                fully_shard(block.moe, mesh=mesh["outer"], **over)
                block.moe.set_gradient_divide_factor(size)
                block.moe.set_force_sum_reduction_for_comms(True)  # gloo divides by no factor
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh if mode == "hsdp" else world, **over)
        # Nothing is written to that view.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

    def balance_over_ranks(self, router: Router, given: Any, routing: Routing) -> Routing:
        """A routing whose load-balancing loss has the loads of all ranks: Switch Transformer eq. 4 of the global batch.

        The loss is linear in the mean probabilities P, so the mean over ranks of E * sum_e f_e P_e, each with its own P and the
        f of all, is the loss of all; and so are the gradients.
        """
        if not router.training:
            return routing
        load = routing.load
        if routing.pair_tokens is not None:  # the load that the loss is of comes before any rounding
            keys = fallback.selection_keys(routing.logits.detach(), router.score, router.expert_bias)
            chosen = fallback.choose_top_k(keys, router.top_k, router.num_groups, router.top_groups)
            load = fallback.expert_load(chosen, router.num_experts)
        mean = self.ranks.mean(load.to(torch.float32))
        loss = router.aux_loss * fallback.load_balancing_loss(routing.logits, mean, router.top_k, router.score)
        return routing._replace(aux_losses=routing.aux_losses | {"load_balancing": loss})

    @torch.no_grad()
    def reduce(self) -> None:
        """After the last backward of a step: what FSDP2 has not reduced becomes the mean over ranks."""
        whole = [p.grad for p in self.model.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
        if self.ranks.size > 1 and whole:
            flat = self.ranks.mean(torch.cat([gradient.flatten() for gradient in whole]))
            for gradient, mean in zip(whole, flat.split([g.numel() for g in whole]), strict=True):
                gradient.copy_(mean.view_as(gradient))
        for parameter in self.experts:
            assert parameter.grad is not None
            parameter.grad.div_(self.ranks.size)


def dispatcher_of(model: GPT, config: Config, group: dist.ProcessGroup, ranks: Ranks) -> AllToAll | Symmetric:
    """How tokens reach the experts of all blocks, by ``--dispatcher``."""
    sizes = (config.num_experts // group.size(), config.d_model, config.d_expert)
    has_kernels = config.bf16 and missing_for_kernels(ranks.device, torch.bfloat16, *sizes) is None
    fits = has_kernels and len(hosts_of(group)) == 1
    if config.dispatcher == "all_to_all" or (config.dispatcher == "auto" and not fits):
        if config.row_capacity:
            raise ValueError(f"row_capacity: expected 0 where tokens travel by AllToAll, got {config.row_capacity}")
        return AllToAll(group, config.num_experts)
    tokens = config.batch // config.accumulate // ranks.size * config.context
    pairs = max(tokens * config.top_k, model.blocks[0].moe.max_pairs(tokens))  # of a validation, of a training step
    most = {"d_model": config.d_model, "max_tokens": tokens, "max_pairs": pairs}
    return Symmetric(group, config.num_experts, **most, device=ranks.device, timeout=ranks.timeout)


# ---- checkpoints -------------------------------------------------------------------------------------------------


@contextmanager
def written_shards(folder: Path, step: int, state: dict[str, Any], ranks: Ranks) -> Iterator[dict[str, Any]]:
    """A new folder with a state of DTensors and tensors; all ranks write it. Yields what checkpoint.pt is to say of it.

    When that is written, the shards of earlier checkpoints go; if anything fails, the new ones.

    Raises:
        SaveError: the disk is full, or the like, on any rank.
    """
    place = folder / f"{PREFIX}{step}"
    # A killed run may have left some, perhaps of another number of ranks.
    ranks.of_first(partial(shutil.rmtree, place, ignore_errors=True))
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=place)
        names = ranks.of_first(lambda: sorted(f"{place.name}/{path.name}" for path in place.iterdir()))
        yield {"shards": place.name, CHECKSUMS: checksums_of(folder, names, ranks)}
    except BaseException as error:
        if ranks.first:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, CheckpointException):  # raised on all ranks
            failure, _ = next(iter(error.failures.values()))
            raise SaveError(ranks.told(str(not_written(place, failure)))) from error
        raise
    if ranks.first:
        keep_only(folder, place.name)


def checksums_of(folder: Path, names: Iterable[str], ranks: Ranks) -> dict[str, int]:
    """The checksums of files, of which each rank reads some. OSError on all ranks where one cannot be read."""

    def own() -> dict[str, int]:
        return {name: checksum_of_file(folder / name) for name in sorted(names)[ranks.rank :: ranks.size]}

    return {name: checksum for each in ranks.of_each(own) for name, checksum in each.items()}


def load_shards(
    folder: Path, saved: dict[str, Any], state: dict[str, Any], ranks: Ranks, *, alone: bool = False
) -> None:
    """Fill the tensors of ``state`` from the shards of a checkpoint. saved: what checkpoint.pt holds; without checksums, of an
    earlier version, none is compared.  alone: without the other ranks.

    Raises:
        CheckpointError: they cannot be read, are damaged, or are of another model.
    """
    expected = {name: checksum for name, checksum in saved.get(CHECKSUMS, {}).items() if name != METRICS}
    try:
        found = checksums_of(folder, expected, ranks)
    except OSError as error:
        raise CheckpointError(f"checkpoint: {error.filename} cannot be read ({error})") from error
    for name, checksum in found.items():
        if checksum != expected[name]:
            raise CheckpointError(
                f"checkpoint: {folder / name} cannot be read, it seems damaged (its checksum does not match)"
            )
    place = folder / str(saved.get("shards"))
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=place, no_dist=alone)
    except (CheckpointException, *UNREADABLE) as error:
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        raise CheckpointError(f"checkpoint: {place} cannot be read, or holds another model ({reason})") from error


def keep_only(folder: Path, name: str) -> None:
    """Remove the shards of earlier checkpoints."""
    for other in {*folder.glob(f"{PREFIX}*")} - {folder / name}:
        shutil.rmtree(other, ignore_errors=True)


def clones(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}
