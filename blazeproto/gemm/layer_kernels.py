"""The kernels that one layer launches, compiled and loaded before they are needed: a CUDA-graph capture can do neither."""

from __future__ import annotations

from blazeproto.gemm import unchecked
from blazeproto.gemm.compile import Kernel, compile_many
from blazeproto.gemm.config import ACTIVATIONS, DEFAULTS, MAX_EXPERTS, kernel_for, weight_sum_kernel
from blazeproto.gemm.rowops import combine_kernel, reduce_kernel, slice_widths


def prepare(
    d_model: int,
    d_expert: int,
    num_experts: int,
    top_k: int | None,
    *,
    activation: str = "swiglu",
    up_bias: bool = False,
    down_bias: bool = False,
    fused: bool = False,
    f32_weight_grads: bool = False,
    device: int | None = None,
    jobs: int | None = None,
) -> list[Kernel]:
    """Compile, and load where there is a GPU, all that the forward and the backward of a layer launch from this package,
    whatever the number of tokens: a wide layer may sum its rows in slices of columns, each width by a kernel of its own.

    d_model, d_expert, num_experts: d, n, E.  top_k: K, None where the number of experts per token varies.
    up_bias, down_bias: whether the projections have biases.  fused: whether `down_forward_fused` runs instead of
    `down_forward` and `combine`.  f32_weight_grads: whether weight gradients are fp32 (as they are in chunks).
    device: CUDA ordinal; default: CuPy's current device if that is of compute capability 9.0, else nothing is loaded.
    jobs: compilers that run at a time, in processes of their own; default: one a core.

    Returns the kernels. ValueError for a layer that the products don't take; CompileError if the compiler refuses.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    for name, width in (("d_model", d_model), ("d_expert", d_expert)):
        if width < 1 or width % 8:
            raise ValueError(f"{name}: expected a positive multiple of 8, got {width}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")
    if top_k is not None and not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1 to num_experts={num_experts}, or None if it varies, got {top_k}")

    made = compile_many(
        [
            *_products(activation, up_bias, down_bias, fused, f32_weight_grads),
            *_row_operations(d_model, top_k or 0, up_bias, down_bias, fused),
        ],
        jobs,
    )
    device = _hopper_device() if device is None else device
    if device is not None:
        for kernel in made:
            kernel.handle(device)
    return made


def _products(activation: str, up_bias: bool, down_bias: bool, fused: bool, f32_weight_grads: bool) -> list[Kernel]:
    """Asked for with the very arguments of `unchecked`: `kernel_for` keeps one kernel for each way of asking."""
    debug, weights = unchecked.DEBUG, ("down_backward_weight", "up_backward_weight")
    linear = {"gather": False, "debug": debug}
    return [
        kernel_for("up_forward", DEFAULTS["up_forward"], activation=activation, bias=up_bias, debug=debug),
        kernel_for("down_forward", DEFAULTS["down_forward"], bias=down_bias, fused=fused, **linear),
        kernel_for("down_backward_act", DEFAULTS["down_backward_act"], activation=activation, debug=debug),
        kernel_for("up_backward_act", DEFAULTS["up_backward_act"], bias=False, fused=False, **linear),
        *(
            kernel_for(product, DEFAULTS[product], f32=f32_weight_grads, gather=True, debug=debug)
            for product in weights
        ),
        *(weight_sum_kernel(DEFAULTS[product]) for product in weights),
    ]


def _row_operations(d: int, top_k: int, up_bias: bool, down_bias: bool, fused: bool) -> list[Kernel]:
    kernels = [reduce_kernel("reduce_scores_grad", 0)]
    for has_scores in (False,) if fused else (False, True):
        kernels += dict.fromkeys(combine_kernel(width, top_k, has_scores) for width in slice_widths(d))
    if down_bias:
        kernels.append(reduce_kernel("bias_score_grad", top_k))
    if up_bias or down_bias:
        kernels += [reduce_kernel("expert_row_sum", top_k), reduce_kernel("expert_row_sum_finish", 0)]
    return kernels


def _hopper_device() -> int | None:
    """CuPy's current device, None where there is none that runs the kernels."""
    try:
        import cupy

        device = int(cupy.cuda.runtime.getDevice())
        return device if cupy.cuda.Device(device).compute_capability == "90" else None
    except (ImportError, RuntimeError):  # no CuPy, no driver, no GPU
        return None
