"""Every public callable refuses what does not fit: each argument is replaced by wrong types, dtypes, shapes, devices and kinds of
array, and the ValueError or TypeError that follows names it. A public name without a sound call below fails.

The walk finds the callables in the rooms' ``__all__`` (in cost and activations, their public functions), and the methods of their
classes. `sound_calls` has a call of each that runs, on NumPy arrays or CPU tensors; `LEFT_OUT` says why some have none, `TAKEN`
and `FREE` what an argument takes though it looks wrong. blazeproto.reference checks nothing: it is the tests' own oracle.
"""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import ptxsim
from blazeproto import (
    MoE,
    Router,
    activations,
    autograd,
    blocksparse,
    cost,
    dispatch,
    distributed,
    gemm,
    lab,
    router,
    stored,
)
from blazeproto.autograd import LowRank, Options
from blazeproto.gemm import registry
from blazeproto.integrations import peft, transformers
from tests import public_docs
from tests.runtime import calls

# --- Sound calls -------------------------------------------------------------------------------------------------------------

T, K, D, N, E = calls.T, calls.K, calls.D, calls.N, calls.E
SIZES = {"d_model": D, "d_expert": N, "num_experts": E, "top_k": K}
COST = gemm.Sizes(64, 32, 16, 4, 2)
OF_SIZES = (
    *(
        "product_floor_ms",
        "predicted_product_ms",
        "layer_operations",
        "layer_floor_ms",
        "router_floor_ms",
        "layer_work",
    ),
    *("saved_bytes", "predicted_layer_ms", "arithmetic_intensity", "weight_bytes", "activation_bytes"),
    *("expert_parallel_ms", "rows_per_expert"),
)
CUDA = 'extern "C" __global__ void nothing() {}'
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry nothing(.param .u64 array) { ret; }
"""
NUMBERS = {"operations": 1e9, "least_bytes": 1e6, "gpu": "H200"}


Call = tuple[Callable[..., Any], dict[str, Any]]


def tensor(array: np.ndarray) -> torch.Tensor:
    made = torch.from_numpy(array.copy())
    return made.float() if made.is_floating_point() else made


EXPERTS = {
    "x": tensor(calls.X),
    "gate_up_proj": tensor(calls.UP),
    "down_proj": tensor(calls.DOWN),
    "up_bias": tensor(calls.UP_BIAS),
    "down_bias": tensor(calls.DOWN_BIAS),
}
FACTORS = {
    "up_factors": LowRank(torch.ones(E, 3, D), torch.ones(E, 2 * N, 3)),
    "down_factors": LowRank(torch.ones(E, 3, N), torch.ones(E, D, 3)),
}
CHOICE = {"scores": torch.rand(T, K), "topk_experts": tensor(calls.IDS)}
FP8 = {"gate_up_proj": torch.ones(2, 256, 16), "down_proj": torch.ones(2, 16, 128)}


def methods(kind: type, width: int = N) -> dict[str, Call]:
    """A layer's."""
    made = kind(D, width, E, K)
    tokens = {"x": tensor(calls.X), "mask": torch.ones(T, dtype=torch.bool)}
    return {
        "forward": (made, tokens),
        "prepare": (made.prepare, {"num_tokens": 3}),
        "max_pairs": (made.max_pairs, {"num_tokens": 3}),
        "saved_bytes": (made.saved_bytes, {"num_tokens": 3, "dtype": torch.float32}),
        "runs_on": (made.runs_on, {"dtype": torch.float32}),
        "store_weights": (lambda storage: MoE(64, 64, 2, 1).store_weights(storage), {"storage": "nf4"}),
        "quantize_weights": (MoE(16, 128, 2, 1, precision="fp8").quantize_weights, {"dtype": torch.float32}),
    }


def mixtral() -> torch.nn.Module:
    import transformers as hugging_face

    transformers.register()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "vocab_size": 32,
    }
    config = hugging_face.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = hugging_face.MixtralForCausalLM(config)
    model.set_experts_implementation("blazeproto")
    return model


@cache
def sound_calls() -> dict[str, Call]:
    """By the public name: what is called, and arguments with which it runs."""
    found: dict[str, Call] = {}
    rows = dispatch.build_dispatch(calls.IDS, E, row_capacity=calls.R)
    for room, name in calls.NAMES:
        given = calls.CALLS[room][name] | ({"dispatch": rows} if room == "gemm" else {})
        found["build_dispatch" if name == "build_dispatch" else f"{room}.{name}"] = (
            getattr(calls.ROOMS[room], name),
            given,
        )
    up, _, padding = blocksparse.topology_of(rows, 128, 2)
    a, b = np.ones((up.shape[0], 24)), np.ones((up.shape[1], 24))
    values, padded = gemm.sdd(a, b.T.copy(), up), blocksparse.padded_gather(calls.X, padding, rows)
    beside = {"padding": padding, "dispatch": rows}
    group = dist.group.WORLD
    symmetric = {"group": group, "num_experts": E, "d_model": 8, "max_tokens": 8, "max_pairs": 8}
    kernel, at_top_k = gemm.kernel_for("up_forward"), {"num_tokens": 8, "num_experts": E, "top_k": K, "itemsize": 4}
    launch = {"kernel": PTX, "grid": 1, "block": 32, "arguments": (np.zeros(4, np.float32),)}
    routing = Router(D, E, K)(tensor(calls.X))
    found |= {
        "moe_mlp": (autograd.moe_mlp, {**EXPERTS, **FACTORS, **CHOICE, "num_experts": E}),
        "MoE": (MoE, SIZES),
        "Router": (Router, {"d_model": D, "num_experts": E, "top_k": K}),
        "Router.forward": (Router(D, E, K), {"x": tensor(calls.X), "mask": torch.ones(T, dtype=torch.bool)}),
        "Router.update_bias": (Router(D, E, K, bias_update_rate=0.1).update_bias, {"load": torch.ones(E)}),
        "autograd.Options": (Options, {}),
        "autograd.grouped_experts": (
            autograd.grouped_experts,
            {**EXPERTS, **FACTORS, "counts": torch.tensor([3, 3, 3, 3])},
        ),
        "autograd.quantize_weights": (autograd.quantize_weights, FP8),
        "autograd.saved_bytes": (autograd.saved_bytes, {"save": "minimal", "num_tokens": 3, **SIZES}),
        "stored.mxfp4": (
            stored.mxfp4,
            {"blocks": torch.zeros(2, 8, 2, 16).byte(), "scales": torch.ones(2, 8, 2).byte()},
        ),
        "stored.nf4": (
            stored.nf4,
            {"packed": torch.zeros(512, 1).byte(), "absmax": torch.ones(16), "shape": (2, 8, 64)},
        ),
        "stored.int4": (
            stored.int4,
            {"packed": torch.zeros(2, 8, 8).int(), "scales": torch.ones(2, 8, 2), "group": 32},
        ),
        "stored.quantize": (stored.quantize, {"weight": torch.ones(2, 8, 64), "format": "nf4"}),
        "gemm.TileConfig": (gemm.TileConfig, {}),
        "gemm.candidates": (gemm.candidates, {"name": "up_forward"}),
        "gemm.kernel_for": (gemm.kernel_for, {"name": "up_forward"}),
        "gemm.prepare": (gemm.prepare, {"d_model": 64, "d_expert": 64, "num_experts": 4, "top_k": 2}),
        "gemm.score_partials": (gemm.score_partials, {"n": 64}),
        "gemm.weight_workspace": (
            gemm.weight_workspace,
            {"product": "down_backward_weight", "dw": calls.DOWN.astype(np.float32), "dispatch": rows},
        ),
        "gemm.sdd": (gemm.sdd, {"a": a, "b": b.T.copy(), "topology": up}),
        "gemm.dsd": (gemm.dsd, {"values": values, "b": b, "topology": up}),
        "gemm.dds": (gemm.dds, {"a": a.T.copy(), "values": values, "topology": up}),
        "dispatch.prepare_dispatch": (dispatch.prepare_dispatch, {"num_tokens": 4, "top_k": 2, "num_experts": 4}),
        "dispatch.workspace_bytes": (dispatch.workspace_bytes, {"num_tokens": 4, "top_k": 2, "num_experts": 4}),
        "router.make_router": (
            router.make_router,
            {"name": "top_k", "d_model": D, "num_experts": E, "top_k": K},
        ),
        "router.routing_stats": (router.routing_stats, {"routing": routing, "top_k": K}),
        "blocksparse.padded_gather": (blocksparse.padded_gather, {"x": calls.X, **beside, "scores": calls.SCORES}),
        "blocksparse.padded_scatter": (blocksparse.padded_scatter, {"rows": padded, **beside, "scores": calls.SCORES}),
        "blocksparse.score_grad": (blocksparse.score_grad, {"d_out": calls.D_OUT, "rows": padded, **beside}),
        "blocksparse.topology_of": (blocksparse.topology_of, {"dispatch": rows, "widths": 128, "halves": 2}),
        "blocksparse.Topology.of_blocks": (blocksparse.Topology.of_blocks, {"mask": np.ones((2, 3), bool)}),
        "blocksparse.dMoE": (blocksparse.dMoE, {**SIZES, "d_expert": 128}),
        "blocksparse.DroppingMoE": (blocksparse.DroppingMoE, SIZES),
        "blocksparse.SequentialMoE": (blocksparse.SequentialMoE, SIZES),
        "activations.with_parameters": (activations.with_parameters, {"name": "clamped_swiglu", "limit": 3.0}),
        "activations.clamped_swiglu": (activations.clamped_swiglu, {"limit": 7.0, "alpha": 1.0}),
        "activations.alternating": (activations.alternating, {"name": "swiglu"}),
        "activations.activation_named": (activations.activation_named, {"name": "swiglu"}),
        "cost.known_gpu": (cost.known_gpu, {"device": "NVIDIA H100 80GB HBM3"}),
        "cost.gpu_named": (cost.gpu_named, {"name": "H200"}),
        "cost.floor_ms": (cost.floor_ms, NUMBERS),
        "cost.predicted_ms": (cost.predicted_ms, NUMBERS),
        "cost.block_operations": (cost.block_operations, {"num_blocks": 3, "size": 64}),
        "cost.dispatch_bytes": (cost.dispatch_bytes, {"num_pairs": 3}),
        "cost.topk_bytes": (cost.topk_bytes, at_top_k),
        "cost.topk_backward_bytes": (cost.topk_backward_bytes, at_top_k),
        "cost.routed_buffer_bytes": (cost.routed_buffer_bytes, {"num_tokens": 3, "d_model": 8, "top_k": 2}),
        "cost.intermediate_bytes": (cost.intermediate_bytes, {"num_tokens": 3, "d_hidden": 8}),
        "cost.attention_bytes": (cost.attention_bytes, {"batch": 2, "sequence": 8, "d_model": 8, "heads": 2}),
        "cost.predicted_work_ms": (cost.predicted_work_ms, {"work": cost.layer_work(COST)[0], "sizes": COST}),
        "distributed.AllToAll": (distributed.AllToAll, {"group": group, "num_experts": E}),
        "distributed.Symmetric": (distributed.Symmetric, symmetric),
        "distributed.check_overflow": (distributed.check_overflow, {"module": MoE(**SIZES), "group": group}),
        "distributed.clip_grad_norm_": (
            distributed.clip_grad_norm_,
            {"parameters": [torch.nn.Parameter(torch.ones(2))], "max_norm": 1.0},
        ),
        "distributed.expert_parallel": (
            distributed.expert_parallel,
            {"moe": lambda: MoE(**SIZES), "mesh_or_group": group},
        ),
        "integrations.transformers.explain": (transformers.explain, {"model": torch.nn.Linear(2, 2)}),
        "integrations.transformers.expert_parallel": (
            transformers.expert_parallel,
            {"model": mixtral, "mesh_or_group": group},
        ),
        "integrations.transformers.register": (transformers.register, {"precision": "bf16"}),
        "integrations.peft.explain": (peft.explain, {"model": torch.nn.Linear(2, 2)}),
        "lab.Workbench": (lab.Workbench, {"product": "combine", "T": 8, "d": 16, "n": 16, "E": 4, "K": 2}),
        "lab.BlockWorkbench": (lab.BlockWorkbench, {}),
        "lab.explain": (lab.explain, {"layer": MoE(**SIZES), "x": tensor(calls.X)}),
        "lab.fragment": (lab.fragment, {}),
        "lab.swizzle": (lab.swizzle, {}),
        "lab.machine_code": (lab.machine_code, {"kernel": kernel}),
        "ptxsim.compile": (ptxsim.compile, {"kernel": CUDA}),
        "ptxsim.tensor_map": (ptxsim.tensor_map, {"array": np.zeros((8, 16), np.float32), "box": (4, 8)}),
        "ptxsim.run": (ptxsim.run, launch),
        "ptxsim.step": (ptxsim.step, launch),
        "ptxsim.run_together": (ptxsim.run_together, {"streams": [[launch]]}),
    }
    for function in OF_SIZES:
        more = {"name": "up_forward"} if "product" in function else {}
        found[f"cost.{function}"] = (getattr(cost, function), {**more, "sizes": COST})
    found |= {f"MoE.{name}": call for name, call in methods(MoE).items()}
    for kind, width in ((blocksparse.DroppingMoE, N), (blocksparse.SequentialMoE, N), (blocksparse.dMoE, 128)):
        found |= {f"blocksparse.{kind.__name__}.{name}": call for name, call in methods(kind, width).items()}
    found["blocksparse.DroppingMoE.capacity"] = (blocksparse.DroppingMoE(**SIZES).capacity, {"num_tokens": 3})
    return found


# --- Wrong arguments ---------------------------------------------------------------------------------------------------------


class Interface:
    """What says that it is an array, and is none."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


class NoDlpack:
    def __init__(self, device: Any) -> None:
        self.device = device

    def __dlpack_device__(self) -> Any:
        if self.device is None:
            raise RuntimeError("no device")
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no array")


ANYTHING: dict[str, Any] = {
    "an object": object(),
    "a string": "nonsense",
    "a number": 2.5,
    "None": None,
    "strings": ["a", "b"],
    "a negative": -1,
    "a bool": True,
}
ARRAYS = {  # where none is wanted
    "an array": np.array([1, 2]),
    "a number in an array": np.array(2.5),
    "a number in a tensor": torch.tensor(2.5),
    "a bool in a tensor": torch.tensor(True),
}
BROKEN: dict[str, Any] = {
    "an empty interface": Interface(__cuda_array_interface__={}),
    "an interface without data": Interface(__cuda_array_interface__={"shape": (2,), "typestr": "<f4", "version": 3}),
    "no interface": Interface(__cuda_array_interface__=3),
    "DLPack without a device": NoDlpack(None),
    "DLPack of an odd device": NoDlpack(3),
    "DLPack that raises": NoDlpack((2, 0)),
}


@cache
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


def wrong_arrays_like(value: Any) -> Iterator[tuple[str, Any]]:
    """Like a sound array, but for one thing."""
    as_it_was = (lambda t: t) if isinstance(value, torch.Tensor) else (lambda t: t.numpy())
    t = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    for dtype in (torch.complex64, torch.bool, torch.int8, torch.float64 if not t.is_floating_point() else torch.int64):
        if dtype != t.dtype:
            yield f"of {dtype}", as_it_was(t.to(dtype))
    yield "another dimension", as_it_was(t[None].contiguous())
    if t.dim():
        yield "a number of it", as_it_was(t.flatten()[0])
        yield "longer", as_it_was(torch.cat((t, t)))
        yield "wider", as_it_was(torch.cat((t, t[..., :1]), -1).contiguous())
    yield "on meta", t.to("meta")
    yield "sparse", t.to_sparse()
    if t.dim() == 2:
        yield "sparse rows", t.to_sparse_csr()
    yield "quantized", torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8)
    yield "nested", torch.nested.nested_tensor([t, t])
    yield "jagged", torch.nested.nested_tensor([t[None], t[None]], layout=torch.jagged)
    if isinstance(value, np.ndarray):  # whether tensors take one among them is its mode's to say
        yield "fake", FakeTensorMode(allow_non_fake_inputs=True).from_tensor(t.clone())
    yield "distributed", distribute_tensor(t, mesh())
    yield from BROKEN.items()


SHAPES = ("another dimension", "longer", "wider")


def wrong_values(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (ANYTHING if isinstance(value, (np.ndarray, torch.Tensor, *RECORDS)) else ANYTHING | ARRAYS).items()
    if isinstance(value, np.ndarray | torch.Tensor):
        yield from wrong_arrays_like(value)
    elif isinstance(value, RECORDS):
        for field in value._fields if isinstance(value, tuple) else vars(value):
            for what, wrong in (
                () if (inside := getattr(value, field)) is None or field in UNREAD else wrong_values(inside)
            ):
                changed = value._replace if isinstance(value, tuple) else partial(dataclasses.replace, value)
                yield f".{field}: {what}", changed(**{field: wrong})


# --- What is looked at -------------------------------------------------------------------------------------------------------

RECORDS = (LowRank, dispatch.Dispatch, gemm.Sizes, blocksparse.Topology, blocksparse.Padding)
UNREAD = ("token_expert_indices", "overflow")  # what a caller may want of a dispatch, and no product
DISPATCHERS = ("autograd.Dispatcher", "distributed.AllToAll", "distributed.Symmetric")
FORMULAS = ("activate", "activate_backward", "gate_and_up", "mathematics", "side_by_side")
BENCHES, METHODS = ("Workbench", "BlockWorkbench"), ("check", "edit", "reopen", "score", "time", "timeline")
RECORD, CALLED, UNSAVED = (
    "a record, checked where it is taken",
    "called by a layer, which has checked",
    "not in these layers",
)
LEFT_OUT = {
    **dict.fromkeys(("Dispatch", "Recipe", "gemm.Kernel", "gemm.Product", "gemm.Sizes", "router.Routing"), RECORD),
    **dict.fromkeys((f"autograd.{name}" for name in ("Arrived", "LowRank", "QuantizedWeights")), RECORD),
    **dict.fromkeys(("stored.Nested", "stored.StoredWeight"), RECORD),
    "stored.fp8": "torch has no sparse tensor of its dtype: tests/stored",
    "stored.StoredWeight.decode": "its expert is an index, its dtype torch's",
    "stored.StoredWeight.to": "its device is torch's",
    **dict.fromkeys(("blocksparse.Padding", "blocksparse.Topology"), RECORD),
    **{f"{of}.{name}": CALLED for of in DISPATCHERS for name in ("check", "combine", "dispatch", "overflow")},
    "autograd.Options.policy": CALLED,
    **{
        f"gemm.Product.{name}": CALLED
        for name in ("for_layer", "launches", "least_bytes", "operations", "element_of", "tiles_of")
    },
    "Recipe.operand": CALLED,
    **dict.fromkeys(("gemm.Kernel.function", "gemm.Kernel.handle", "gemm.Kernel.load"), "needs a GPU"),
    **{f"activations.{name}": CALLED for name in FORMULAS},
    **{f"blocksparse.{kind}.saved_bytes": UNSAVED for kind in ("DroppingMoE", "SequentialMoE", "dMoE")},
    "autograd.checkpoint_policy": "called by torch",
    "integrations.transformers.experts_forward": "called by transformers",
    "integrations.torchtitan.Experts": "called by torchtitan",
    "integrations.torchtitan.Experts.forward": "called by torchtitan",
    "integrations.torchtitan.experts": "called by torchtitan",
    "SavePolicy": "an Enum's constructor is Enum's",
    "Dispatch.plot": "its Axes are matplotlib's",
    "lab.ring": "a session's: tests/lab",
    **{f"lab.{bench}.{name}": "a session's: tests/lab" for bench in BENCHES for name in METHODS},
    "distributed.Symmetric.take_overflow": CALLED,
    "ptxsim.unwritten": "`run` judges the array",
}
NAMED_OTHERWISE = {  # by what the argument is, which callers of the function have as a keyword
    **{(f"gemm.{name}", "name"): "product" for name in ("candidates", "kernel_for")},
    **{(f"cost.{name}", "name"): "product" for name in ("product_floor_ms", "predicted_product_ms")},
    **{(f"lab.{name}", "product"): "product" for name in ("fragment", "swizzle")},
    **{
        (f"activations.{name}", "name"): "activation" for name in ("activation_named", "alternating", "with_parameters")
    },
    ("cost.gpu_named", "name"): "gpu",
    ("ptxsim.tensor_map", "array"): "tensor map",
    ("router.make_router", "name"): "router",
}
TAKEN = {  # on purpose, beside what a signature allows
    ("activations.clamped_swiglu", "alpha", "a negative"),
    ("router.hash_route", "seed", "a negative"),
    *((f"lab.{name}", "seed", "a negative") for name in ("Workbench", "BlockWorkbench")),
    *((f"ptxsim.{name}", "seed", "a negative") for name in ("run", "step", "run_together")),
    *((f"cost.{name}", "top_k", "a number") for name in ("topk_bytes", "topk_backward_bytes")),
    *((f"cost.{name}", "sizes", ".K: a number") for name in (*OF_SIZES, "predicted_work_ms")),  # a mean
    ("cost.known_gpu", "device", "a string"),
    ("stored.mxfp4", "blocks", f"of {torch.int8}"),
    ("cost.dispatch_bytes", "num_pairs", "a number"),
    ("Router", "scale", "a negative"),
    *(("distributed.clip_grad_norm_", "parameters", f"a {kind} in a tensor") for kind in ("number", "bool")),
    ("autograd.saved_bytes", "top_k", "a number"),  # a mean
    *(("ptxsim.tensor_map", "array", f"of {dtype}") for dtype in (torch.complex64, torch.int64)),
    *((f"ptxsim.{name}", "options", "strings") for name in ("run", "step")),  # for PTX, which is not compiled
    *((f"ptxsim.{name}", "kernel", "a string") for name in ("compile", "run", "step")),  # a FileNotFoundError
    *(("Router.update_bias", "load", f"of {dtype}") for dtype in (torch.int8, torch.int64)),
}
FREE = {  # whose lengths no other argument decides
    **{
        f"{of}.forward": "x"
        for of in ("MoE", *(f"blocksparse.{kind}" for kind in ("dMoE", "DroppingMoE", "SequentialMoE")))
    },
    "Router.forward": "mask",
    "build_dispatch": "topk_experts",
    "dispatch.build_dispatch_varying": "token_offsets",
    "autograd.grouped_experts": "x",
    "blocksparse.Topology.of_blocks": "mask",
    "blocksparse.padded_gather": "x scores dispatch padding",
    "blocksparse.padded_scatter": "rows scores dispatch padding",
    "blocksparse.score_grad": "dispatch padding",
    "blocksparse.topology_of": "dispatch",
    "gemm.bias_score_grad": "d_scores dispatch",
    "gemm.combine": "y scores",
    "gemm.dds": "a",
    "gemm.dsd": "b",
    "gemm.down_backward_act": "scores",
    "gemm.down_backward_weight": "a_scaled d_out",
    "gemm.down_forward_fused": "scores",
    "gemm.expert_row_sum": "values",
    "gemm.grouped_mm": "dispatch",
    "gemm.up_backward_act": "up_proj",
    "gemm.up_backward_weight": "dh x",
    "gemm.up_forward": "dispatch",
    "lab.explain": "x",
    "ptxsim.tensor_map": "array",
    "router.choose_pairs": "experts scores",
    "router.finish_logits": "products",
    "router.hash_route": "token_ids",
    "router.logits_product": "weight x",
    "router.routing_losses": "experts logits",
    "router.routing_losses_backward": "logits",
    "router.score_pairs": "logits pair_experts",
    "router.score_pairs_backward": "logits",
    "router.topk_route": "logits",
    "router.topk_route_backward": "logits",
    "stored.nf4": "packed absmax",
    "stored.quantize": "weight",
}
UNRUN = {"dispatch.prepare_dispatch", "lab.machine_code"}  # they need a GPU, or compile
PENDING: set[tuple[str, str]] = set()
"""Refused one day: an entry whose function refuses all of it fails, and is to be taken out."""


def is_right(name: str, parameter: inspect.Parameter, sound: Any, what: str, wrong: Any) -> bool:
    """Whether a value that looks wrong is none."""
    if parameter.name == "workspace":  # which a twin has no use for
        return True
    if name == "gemm.weight_workspace" and (
        what.startswith(".") or isinstance(wrong, np.ndarray | torch.Tensor)
    ):  # 0 for any on a host
        return True
    if (name, parameter.name) == ("lab.machine_code", "lines"):  # searched once the kernel is compiled
        return True
    kind = str(parameter.annotation)
    if wrong is None:
        return parameter.default is None or "None" in kind
    return (isinstance(wrong, bool) and "bool" in kind) or (isinstance(wrong, int | float) and "float" in kind)


def public_callables() -> dict[str, Any]:
    """Those with parameters, by name; methods as "room.Class.method"."""
    found = {name.removeprefix("blazeproto."): thing for name, thing in public_docs.public_names()}
    for room in (cost, activations):
        for name, thing in vars(room).items():
            if inspect.isfunction(thing) and thing.__module__ == room.__name__ and not name.startswith("_"):
                found[f"{room.__name__.removeprefix('blazeproto.')}.{name}"] = thing
    for name, thing in [*found.items()]:
        if inspect.isclass(thing):
            found |= {f"{name}.{method}": function for method, function in public_docs.own_methods(thing)}
    return {name: thing for name, thing in found.items() if callable(thing) and parameters_of(thing)}


def parameters_of(function: Any) -> list[inspect.Parameter]:
    function = function.forward if isinstance(function, torch.nn.Module) else function
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters.values()
    return [parameter for parameter in found if parameter.name != "self" and parameter.kind not in several]


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of a call, made anew where it would change them."""
    return {key: value() if inspect.isfunction(value) else value for key, value in arguments.items()}


def complaints(name: str) -> Iterator[tuple[str, str]]:
    """Parameters of one callable, and what became of a wrong value, where that was not refused by name."""
    function, arguments = sound_calls()[name]
    parameters = parameters_of(function)
    for parameter in parameters:
        sound = arguments.get(parameter.name, parameter.default)
        for what, wrong in wrong_values(sound):
            if is_right(name, parameter, sound, what, wrong) or (name, parameter.name, what) in TAKEN:
                continue
            try:
                function(**{**given(arguments), parameter.name: wrong})
            except (TypeError, ValueError) as error:
                expected = {parameter.name, NAMED_OTHERWISE.get((name, parameter.name), "")} - {""}
                if what.startswith("."):
                    expected.add(what[1:].partition(":")[0])
                if what.endswith((*SHAPES, "a number of it", "on meta")):  # two arrays disagree, or one of each device
                    expected |= {other.name for other in parameters}
                if not any(re.search(rf"\b{word}\b", str(error)) for word in expected):
                    yield parameter.name, f"{what}: not named by {error!r}"
            except Exception as error:  # noqa: BLE001 - any other is a complaint
                yield parameter.name, f"{what}: {error!r}"
            else:
                if not (what.endswith(SHAPES) and parameter.name in FREE.get(name, "").split()):
                    yield parameter.name, f"{what}: taken"


# --- The tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A rank, for distributed tensors and dispatchers; and nothing is compiled."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(registry, "compile_many", return_value=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and nested tensors are a beta of torch's
        yield
    sound_calls.cache_clear()
    mesh.cache_clear()
    dist.destroy_process_group()


def test_every_public_callable_is_looked_at() -> None:
    """Or stands above, with the reason why not."""
    assert (public := public_callables().keys()) - sound_calls().keys() - LEFT_OUT.keys() == set()
    assert LEFT_OUT.keys() <= public


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name.startswith("integrations.") else [])
        for name in sorted(public_callables().keys() - LEFT_OUT.keys())
    ],
)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    function, arguments = sound_calls()[name]
    if name not in UNRUN:
        function(**given(arguments))
    found = list(complaints(name))
    assert [f"{parameter} {what}" for parameter, what in found if (name, parameter) not in PENDING] == []
    assert {parameter for parameter, _ in found} >= {parameter for of, parameter in PENDING if of == name}
