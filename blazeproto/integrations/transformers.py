"""blazeproto's experts in Hugging Face transformers, by one line.

    from blazeproto.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="blazeproto")

transformers calls what is registered in place of the forward of every experts module that has its decorator
``use_experts_implementation``. The module's activation, hooks and norms decide between two code paths (`explain` tells which):

    in place       an activation of `blazeproto.activations`: `moe_mlp` on the module's own weights, gate_up_proj (E, 2n, d), or
                   up_proj (E, n, d) without a gate, and down_proj (E, d, n); all of them transposed, or gate and up alternating,
                   as the module says. Gradients lie as the weights do
    grouped_mm     another activation, one that a hook listens to, or a norm after each expert: transformers' own ``grouped_mm``
                   implementation

Modules that neither path can take are refused by name, with the reason, before anything is computed: `REFUSED`.

`expert_parallel` leaves each rank E / P of the experts that run in place, and sends tokens to them: each rank has its own batch.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blazeproto.autograd import Dispatcher, LowRank, Options, moe_mlp
from blazeproto.autograd.backends import what_runs
from blazeproto.autograd.call import STORED
from blazeproto.autograd.checks import FLOAT_DTYPES, why_refused
from blazeproto.autograd.mlp import dispatched_mlp
from blazeproto.autograd.operators import autocast_dtype
from blazeproto.autograd.ranks import check_dispatcher, own_factors
from blazeproto.gemm.recipe import Recipe
from blazeproto.integrations.gates import DEFAULT_GATE, activation_of, full_name, gate_name
from blazeproto.runtime.checks import require
from blazeproto.runtime.optional import look, need
from blazeproto.stored.module import held, hold
from blazeproto.stored.weight import StoredWeight

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

__all__ = ["REFUSED", "expert_parallel", "experts_forward", "explain", "register"]

NAME = "blazeproto"

# --- What a module has ---------------------------------------------------------------------------------------------------

FLAGS = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
)  # of the decorator: `moe_mlp` computes what they say
_MOE = "transformers.integrations.moe"
_USES = {
    f"{_MOE}:ALL_EXPERTS_FUNCTIONS.register": (2, ()),
    f"{_MOE}:use_experts_implementation": (1, FLAGS),
    f"{_MOE}:grouped_mm_experts_forward": (4, ()),
    f"{_MOE}:{DEFAULT_GATE.removeprefix(_MOE + '.')}": (2, ()),
    "transformers.integrations.finegrained_fp8:ALL_FP8_EXPERTS_FUNCTIONS.register": (2, ()),
}
QUANTISERS = ("torchao.", "bitsandbytes.")  # packages whose tensors are not what their dtype says


def weight_of(experts: Any, name: str) -> Any:
    """A weight or bias as it lies, or a `StoredWeight`. fp8 modules of transformers hold e4m3, scales and ``block_size``."""
    weight, scales = held(experts, name), getattr(experts, f"{name}_scale_inv", None)
    if isinstance(weight, StoredWeight) or scales is None or weight.dtype != torch.float8_e4m3fn:
        return weight
    rows, columns = experts.block_size or weight.shape[1:]
    whole = (rows * scales.shape[1], columns * scales.shape[2]) == weight.shape[1:] and not hasattr(
        weight, "placements"
    )
    return StoredWeight(f"fp8 {rows} {columns}", weight.detach(), scales.detach()) if whole else weight


def _tensors(experts: Any) -> list[Tensor]:
    """The module's weights and biases as they lie, or stored."""
    return [weight_of(experts, name) for name in _names(experts)]


def is_stored(experts: Any) -> bool:
    """Whether a module is one of experts with a stored weight."""
    return hasattr(experts, "is_transposed") and any(isinstance(t, StoredWeight) for t in _tensors(experts))


def _weights(experts: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Up (E, 2n, d) or (E, n, d), down (E, d, n), and their biases."""
    up, down, *biases = _tensors(experts)
    up, down = (w.mT if experts.is_transposed and isinstance(w, Tensor) else w for w in (up, down))
    up_bias, down_bias = biases or (None, None)
    return up, down, up_bias, down_bias


def _names(experts: Any) -> tuple[str, ...]:
    """The names of the weights, and of the biases if there are any."""
    weights = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
    return (*weights, *(f"{name}_bias" for name in weights)) if experts.has_bias else weights


def _is_watched(act_fn: Any) -> bool:
    """Whether somebody listens to a call of act_fn, or of a module in it, or has changed it: in place nothing calls it."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = act_fn.modules() if isinstance(act_fn, nn.Module) else ()
    return any("forward" in module.__dict__ or any(module.__dict__[name] for name in hooks) for module in modules)


# --- What is refused -----------------------------------------------------------------------------------------------------


def _quantised(experts: nn.Module) -> bool:
    return getattr(experts, "activation_scheme", "dynamic") != "dynamic" or any(  # that scheme is fp8's
        t.dtype not in FLOAT_DTYPES or full_name(type(t)).startswith(QUANTISERS) for t in _tensors(experts)
    )


def _offloaded(experts: nn.Module) -> bool:
    """accelerate's hook brings the weights for one call and takes them away after it, or they are nowhere yet."""
    hook = getattr(experts, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(one, "offload", False) for one in hooks) or _tensors(experts)[1].device.type == "meta"


REFUSED: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "offloaded": (_offloaded, "weights on the device while the model is trained or run: load it without offloading"),
    "quantised": (_quantised, "weights in bfloat16, float16, float32 or float64: dequantise them, or use another one"),
    "stored": (
        lambda experts: is_stored(experts) and _why_grouped_mm(experts) is not None,
        "stored experts in a module that runs in place, with biases in bfloat16 and no hook on act_fn",
    ),
}
"""What is refused: how it is recognised in an experts module, and what was expected instead."""


def _refuse(experts: nn.Module) -> None:
    for what, (found, expected) in REFUSED.items():
        if found(experts):
            weight = _tensors(experts)[1]
            raise ValueError(
                f'experts_implementation="{NAME}": {type(experts).__name__} has {what} experts; expected {expected}; '
                f"got {weight.dtype} on {weight.device}"
            )


# --- Which code path ----------------------------------------------------------------------------------------------------------


def _why_grouped_mm(experts: nn.Module) -> str | None:
    """What keeps a module from `moe_mlp`; None where nothing does."""
    for name in [] if torch.compiler.is_compiling() else experts.__dict__:  # torch.compile cannot walk it
        if name.startswith(("has_", "is_")) and name not in FLAGS and getattr(experts, name) is True:
            return "a norm after each expert" if name == "has_post_expert_norm" else f"{name}, which is not known here"
    if activation_of(experts) is None:
        gate, act_fn = gate_name(experts), type(getattr(experts, "act_fn", None)).__name__
        own = experts.has_gate and gate != DEFAULT_GATE
        return f"its own gate, {gate.removeprefix(f'{experts.__module__}.')}" if own else f"the activation {act_fn}"
    if _is_watched(getattr(experts, "act_fn", None)):
        return "a hook on act_fn, or another forward of it"
    if len({tensor.dtype for tensor in _tensors(experts)}) > 1:
        return "weights of several dtypes"
    if not hasattr(experts, "dispatcher") and any(hasattr(tensor, "placements") for tensor in _tensors(experts)):
        return "weights that are DTensors"
    return None


def explain(model: nn.Module) -> dict[str, str]:
    """The code path of each experts module of a model, by its name.

    "in place (...)" with the backend, and the dispatcher of several ranks, in parentheses, "grouped_mm: ..." or "refused: ...",
    as this file's docstring tells them; with the reason. "fp8": the precision, where `register` was given it. "batch-invariant":
    a token's output and dx are the same bits in any batch (docs/batch_invariance.md).
    If another implementation than "blazeproto" is set, its name, and what "blazeproto" would do. Hugging Face transformers,
    ``integrations/moe.py``, has the layouts.

    Args:
        model: a transformers model, or an experts module.

    Returns:
        The code paths, in the order of ``model.named_modules()``; {} where no module has the decorator.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return {name: _path(module) for name, module in model.named_modules() if hasattr(module, "is_transposed")}


def _path(experts: Any) -> str:
    implementation = experts.config._experts_implementation or "eager"
    path = _our_path(experts)
    return path if implementation == NAME else f'{implementation}; experts_implementation="{NAME}" would be {path}'


def _our_path(experts: Any) -> str:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for what, (found, expected) in REFUSED.items():
        if found(experts):
            return f"refused: {what}; expected {expected}"
    if why := _why_grouped_mm(experts):
        return f"grouped_mm: {why}"
    up, down, up_bias, down_bias = _weights(experts)
    options = Options(str(activation_of(experts)), **getattr(ALL_EXPERTS_FUNCTIONS.get(NAME), "keywords", {}))
    if options.precision != "bf16" and (why := why_refused(up, down, up_bias, down_bias, options)):
        return f"refused: {why}"
    dtype = autocast_dtype(down.device.type) or down.dtype
    dispatcher = getattr(experts, "dispatcher", None)
    backend = what_runs(options.backend, down.device, dtype, *down.shape, needs=STORED * is_stored(experts))
    notes = (
        (options.precision != "bf16", str(options.precision)),
        (backend == "hopper", "batch-invariant"),
        (dispatcher, str(dispatcher)),
    )
    return f"in place ({', '.join([backend, *(note for holds, note in notes if holds)])})"


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    low_rank: tuple[LowRank | None, LowRank | None] | None = None,
    precision: str | Recipe = "bf16",
    backend: str = "auto",
) -> Tensor:
    """out_t = sum_k S_tk MLP_e(t,k)(x_t), by the weights of an experts module of transformers. MoEBlaze §2.1.

    bfloat16 on compute capability 8.0 or later runs on the kernels, every other dtype and device on plain torch operations
    (`moe_mlp`'s ``backend="auto"``). Outside autocast tokens are cast to the weights' dtype, as ``grouped_mm`` does.

    Args:
        experts: a module with the decorator ``use_experts_implementation``; its weights are of one dtype.
        hidden_states: (T, d) tokens, bfloat16, float16, float32 or float64.
        top_k_index: (T, K) expert ids, int32 or int64; of an id outside [0, E), the sentinel of expert parallelism, nothing is
            read, and its gradients are zero.
        top_k_weights: (T, K) the router's scores, any floating dtype.
        low_rank: factors of the up and the down weight, a (E, r, in) and b (E, out, r),
            in and out in the module's order, E experts of all ranks. For experts that run in place.
        precision: as in `moe_mlp`, for experts that run in place.
        backend: as in `moe_mlp`, for experts that run in place.

    Returns:
        (T, d) in the dtype of ``hidden_states``.

    Raises:
        ValueError: the module is one of `REFUSED`; or what `moe_mlp` raises.
    """
    _refuse(experts)
    if (why := _why_grouped_mm(experts)) is not None:
        if low_rank is not None:
            raise ValueError(f"low_rank: expected None, since {type(experts).__name__} has {why}")
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    up, down, up_bias, down_bias = _weights(experts)
    x = hidden_states if torch.is_autocast_enabled(hidden_states.device.type) else hidden_states.to(down.dtype)
    up_factors, down_factors = low_rank or (None, None)
    given: dict[str, Any] = {
        "num_experts": getattr(experts, "num_experts", len(down)),
        "up_bias": up_bias,
        "down_bias": down_bias,
        "options": Options(str(activation_of(experts)), backend=backend, precision=precision),
        "up_factors": own_factors(up_factors, experts),
        "down_factors": own_factors(down_factors, experts),
    }
    tensors = (x, up, down, top_k_weights, top_k_index)
    dispatcher = getattr(experts, "dispatcher", None)
    out = moe_mlp(*tensors, **given) if dispatcher is None else dispatched_mlp(dispatcher, *tensors, **given)[0]
    return out.to(hidden_states.dtype)


def expert_parallel(
    model: nn.Module,
    mesh_or_group: "DeviceMesh | ProcessGroup",
    *,
    dispatcher: Dispatcher | None = None,
) -> nn.Module:
    """Leaves a model E / P of each layer's experts on each of P ranks, and sends tokens there. MegaBlocks §5.3.

    All ranks have loaded the same model, with ``experts_implementation="blazeproto"``; each then runs it on a batch of its own,
    of any size, all as often and in the same order. The experts' parameters become DTensors sharded over E, so an optimizer comes
    afterwards; all others stay, and their gradients are of the rank's own batch: the caller, or DDP, reduces them. An expert
    gets the gradient of the sum of the ranks' losses, complete after backward. ``docs/distributed.md`` says what else holds.
    Stored weights stay plain tensors, of the rank's own experts; adapters are added before.

    Args:
        model: a transformers model, or an experts module, on its device; changed, and returned.
        mesh_or_group: a process group or a mesh of one dimension, ``ep``; or ``(dp, ep)``, with copies along dp, whose gradients
            a backward sums.
        dispatcher: another one for these ranks, for all layers; default: a `blazeproto.distributed.AllToAll` each.

    Raises:
        TypeError, ValueError: an argument does not fit, as a model without experts, or with some that don't run in place; it is
            named, with what was expected and what came, and the model is as it was.
    """
    from blazeproto.distributed import AllToAll
    from blazeproto.distributed.parallel import keep_own_experts, mesh_of

    made = []
    for name, path in explain(model).items():
        experts: Any = model.get_submodule(name)
        require(
            path.startswith("in place"),
            "model",
            f'experts that run in place with "{NAME}"',
            f"{name or 'some'}: {path}",
        )
        plain = not hasattr(experts, "dispatcher") and is_stored(experts) <= hasattr(experts, "stored")
        require(plain, "model", "experts without a dispatcher, not transformers' in fp8", f"{name or 'some'}: {path}")
        mesh, num_experts = mesh_of(mesh_or_group, experts.down_proj.device.type), len(experts.down_proj)
        ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        require(
            num_experts % ranks == 0, "model", f"{name or 'experts'} to be a multiple of {ranks} ranks", num_experts
        )
        own = AllToAll(mesh.get_group(mesh.ndim - 1), num_experts) if dispatcher is None else dispatcher
        check_dispatcher(own, Options(), num_experts, num_experts // ranks, _weights(experts)[1].shape[1], mesh)
        made.append((experts, mesh, own, slice(rank * num_experts // ranks, (rank + 1) * num_experts // ranks)))
    require(bool(made), "model", "one with experts of transformers", type(model).__name__)
    for experts, mesh, own, mine in made:
        stored, names = getattr(experts, "stored", {}), _names(experts)
        keep_own_experts(experts, {name: getattr(experts, name) for name in names if name not in stored}, mesh)
        for name in stored:
            hold(
                experts, name, held(experts, name)[mine]._map(torch.clone)
            )  # so that the other experts' memory is free
        experts.dispatcher, experts.device_mesh = own, mesh
    return model


def register(*, precision: str | Recipe = "bf16", storage: str | None = None, backend: str = "auto") -> None:
    """Give transformers the experts implementation "blazeproto". Once a process, before a model is made; again is harmless.

    Then ``from_pretrained(..., experts_implementation="blazeproto")``, or ``model.set_experts_implementation("blazeproto")``.
    Hugging Face transformers, ``integrations/moe.py``.
    precision: of all such experts, see docs/fp8.md; the products of LoRA's factors are bf16.
    storage: "mxfp4" loads gpt-oss's MXFP4 checkpoints as their bytes lie (docs/stored.md); None leaves them to transformers.
    backend: of experts that run in place, as in `moe_mlp`.

    Raises:
        ImportError: transformers is missing, not of a version 5 from 5.17 on, or without what this uses of it.
        ValueError: no such precision, storage or backend.
    """
    need("transformers")
    look("transformers", _USES)
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    options = Options(backend=backend, precision=precision)
    for functions, name in ((ALL_EXPERTS_FUNCTIONS, options.precision), (ALL_FP8_EXPERTS_FUNCTIONS, "bf16")):
        functions.register(NAME, partial(experts_forward, precision=name, backend=options.backend))
    from blazeproto.integrations.stored import load_stored

    load_stored(storage)
