"""``expert_parallel``: the experts of a layer over ranks, E / P on each, as DTensors; router and shared expert on all.
``clip_grad_norm_``: torch's, where some parameters are sharded so and others are not, which torch's own refuses to mix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from blazeproto.autograd import moe_mlp
from blazeproto.autograd.ranks import Dispatcher, check_dispatcher
from blazeproto.distributed.all_to_all import AllToAll
from blazeproto.layer import MoE
from blazeproto.runtime.checks import number, require


def expert_parallel(
    moe: MoE, mesh_or_group: DeviceMesh | dist.ProcessGroup, *, dispatcher: Dispatcher | None = None
) -> MoE:
    """Leaves a layer E / P of its experts on each of P ranks, and gives it a dispatcher. MegaBlocks §5.3.

    All ranks have built the same layer (the same seed, or the same checkpoint, or on "meta"): nothing is sent here. Each keeps
    its slice of the experts' parameters, rank p from p E / P on, as a DTensor sharded over E. They are new parameters, so an
    optimizer comes afterwards. Router and shared expert stay as they are.

    An expert gets the gradient of the sum of the ranks' losses; it is never reduced over the ranks of ``ep``, for each has
    other experts. The router's and the shared expert's gradients are of the rank's own tokens: DDP, FSDP or the caller reduces
    them over all ranks.

    Args:
        moe: a `MoE`, before DDP and FSDP wrap it; changed, and returned.
        mesh_or_group: a process group or a mesh of one dimension, ``ep``; or a mesh of two, ``(dp, ep)``: then experts are
            copied along dp, and a backward sums their gradients over it. For ``fully_shard`` to do that, give ``mesh["ep"]``.
        dispatcher: another one, made for these ranks and this layer's sizes; default: an `AllToAll`.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came, and the layer is as
            it was.
    """
    if not isinstance(moe, MoE):
        raise TypeError(f"moe: expected a MoE, got {type(moe).__name__}")
    if moe._experts is not moe_mlp:
        raise TypeError(f"moe: expected a layer whose experts moe_mlp computes, got {type(moe).__name__}")
    require(not moe.stored, "moe", "weights that are not stored", f"stored {', '.join(moe.stored)}")
    require(moe.dispatcher is None, "moe", "one without a dispatcher", f"one with {moe.dispatcher}")
    names = (moe.up_name, "down_proj", f"{moe.up_name}_bias", "down_proj_bias")
    weights = {name: weight for name in names if (weight := getattr(moe, name)) is not None}
    sharded = any(isinstance(weight, DTensor) for weight in weights.values())
    require(not sharded, "moe", "plain parameters, before fully_shard", "DTensors")
    mesh = mesh_of(mesh_or_group, moe.down_proj.device.type)
    ranks = mesh.size(mesh.ndim - 1)
    require(moe.num_experts % ranks == 0, "moe", f"num_experts to be a multiple of {ranks} ranks", moe.num_experts)
    dispatcher = AllToAll(mesh.get_group(mesh.ndim - 1), moe.num_experts) if dispatcher is None else dispatcher
    check_dispatcher(dispatcher, moe.options, moe.num_experts, moe.num_experts // ranks, moe.d_model, mesh)
    keep_own_experts(moe, weights, mesh)
    moe.dispatcher = dispatcher
    return moe


def keep_own_experts(module: nn.Module, weights: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Puts DTensors in the place of a module's parameters, by name, each (E, ...): this rank's E / P along the last dimension of
    ``mesh``, copies along the first of two. P divides E."""
    last = mesh.ndim - 1
    placements = [Replicate()] * last + [Shard(0)]
    for name, weight in weights.items():
        # A copy, so that the other experts' memory is free.
        own = weight.detach().chunk(mesh.size(last))[mesh.get_local_rank(last)].clone()
        sharded = DTensor.from_local(own, mesh, placements, run_check=False)
        setattr(module, name, nn.Parameter(sharded, requires_grad=weight.requires_grad))


def mesh_of(mesh_or_group: object, device_type: str) -> DeviceMesh:
    """A mesh whose last dimension is ``ep``. device_type: the layer's; one on "meta" goes to whatever device the mesh is of."""
    if isinstance(mesh_or_group, dist.ProcessGroup):
        if device_type == "meta":
            device_type = "cuda" if "nccl" in dist.get_backend_config(mesh_or_group) else "cpu"
        return DeviceMesh.from_group(mesh_or_group, device_type)
    mesh = mesh_or_group
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh_or_group: expected a DeviceMesh or a ProcessGroup that this rank is in, got {type(mesh).__name__}"
        )
    name, of = "mesh_or_group", mesh.device_type
    require(mesh.ndim in (1, 2), name, "a mesh of one dimension or (dp, ep)", f"{mesh.ndim} dimensions")
    if (coordinate := mesh.get_coordinate()) is None:
        raise ValueError(f"mesh_or_group: expected a mesh that this rank is in, got ranks {mesh.mesh.tolist()}")
    require(device_type in (of, "meta"), name, f"one for {device_type}, where moe is", f"one for {of}")
    own = mesh.mesh[tuple(coordinate[:-1])].tolist()
    ranks = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    # A DTensor's place follows the mesh, the exchange the group.
    require(own == ranks, name, f"the ranks of ep in their group's order, {ranks}", own)
    return mesh


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients by one factor so that their norm, of all ranks' experts together, is at most ``max_norm``.

    parameters: one, or any mixture of plain ones (...), whose gradients are the same on all ranks, as they are after a reduction,
    and of DTensors on any meshes; of any float dtype. Those without a gradient are left out.

    Returns the norm before, (), the same on all ranks, in the gradients' dtype as torch's function does: where that is fp16 and
    the norm beyond its range, gradients become 0. All ranks call it. Raises TypeError for ``parameters`` that are no
    tensors, TypeError or ValueError for a ``max_norm`` that is no number from 0 on.
    """
    number("max_norm", max_norm, least=0)
    several = isinstance(parameters, Iterable) and not hasattr(parameters, "ndim")  # a tensor iterates over its rows
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters if several else (parameters,):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters: expected a Tensor or an iterable of Tensors, got {type(parameter).__name__}")
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms: list[Any] = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    total = get_total_norm([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms])
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
