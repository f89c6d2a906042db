"""``finish_logits`` and ``split_gradient``: what a router's products on tensor cores need before and after.

Plain functions on device arrays, as `topk_route`: kernels and formulas are in logits_kernels.py.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.losses import lanes_of
from blazeproto.router.topk import MAX_EXPERTS
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import Kernel

THREADS = 256  # of a block
MAX_BLOCKS = 132 * 16


def _check_parts(parts: int, least: int) -> int:
    if checks.integer("parts", parts) not in (least, least + 1):
        raise ValueError(f"parts: expected {least} or {least + 1}, got {parts}")
    return int(parts)


def _experts(name: str, columns: int, parts: int) -> int:
    if columns % parts or not 1 <= columns // parts <= MAX_EXPERTS:
        raise ValueError(f"{name}: expected {parts} E columns with 1 <= E <= {MAX_EXPERTS}, got {columns}")
    return columns // parts


def _check_products(products: Any, parts: int, out: Any) -> arrays.DeviceArray:
    _check_parts(parts, 1)
    view = arrays.expect("products", products, "float32", (None, None), alignment=4)
    _experts("products", view.shape[1], parts)
    if parts == 1 and out is not None:
        raise ValueError("out: expected None with one part, which is finished in place, got an array")
    return view


def _check_gradient(d_logits: Any, logits: Any, parts: int) -> tuple[arrays.DeviceArray, arrays.DeviceArray]:
    _check_parts(parts, 2)
    view = arrays.expect("d_logits", d_logits, "float32", (None, None), alignment=4)
    _experts("d_logits", view.shape[1], 1)
    return view, arrays.expect("logits", logits, "float32", view.shape, device=view.device, alignment=4)


@any_library(
    "blazeproto.router.fallback", {"logits": "float32"}, writes=("products",), check=_check_products, simulated=True
)
def finish_logits(products: Any, parts: int = 1, *, out: Any = None, stream: int | None = None) -> Any:
    """Logits as the sum of the ``parts`` (1 or 2) that a product on tensor cores leaves, each a neighbouring E columns.

    products (T, parts E) fp32 → logits (T, E) fp32.

    A token with a NaN or infinite logit gets NaN throughout, so that it shows in that token's output and in no other's.
    With one part that is written over the products, which are returned (in host memory, and of JAX arrays, a new array is).
    out: (T, E) fp32, to fill, where there are two parts.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view = _check_products(products, parts, out)
    logits, made = products, view
    with memory.on_stream(view, stream) as stream:
        if parts == 2:
            logits, made = arrays.output("out", out, "float32", (view.shape[0], view.shape[1] // 2), view, 4)
        launch_finish(view, made, parts, view.device, stream)
    return logits


def launch_finish(products: Any, logits: Any, parts: int, device: int, stream: int) -> None:
    """`finish_logits` of arrays that have been checked; with one part they are the same array."""
    num_tokens, num_experts = logits.shape
    kernel = finish_kernel(num_experts, parts)
    blocks = min(-(-num_tokens // (THREADS // kernel.constants["lanes"])), MAX_BLOCKS)
    if num_tokens:
        kernel.launch(device, stream, blocks, 0, memory.argument(products), memory.argument(logits), num_tokens)


@any_library("blazeproto.router.fallback", {"split": "bfloat16"}, check=_check_gradient, simulated=True)
def split_gradient(d_logits: Any, logits: Any, parts: int = 2, *, out: Any = None, stream: int | None = None) -> Any:
    """A gradient as a sum of bf16 numbers: the nearest, the rest, and with ``parts`` 3 the nearest again.

    d_logits (T, E) fp32, logits (T, E) fp32 → split (T, parts E) bf16; in NumPy fp32 numbers that bf16 has.

    A token whose logits are NaN, as `finish_logits` leaves them, gets zeros.  out: (T, parts E) bf16, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view, marks = _check_gradient(d_logits, logits, parts)
    with memory.on_stream(view, stream) as stream:
        split, made = arrays.output("out", out, "bfloat16", (view.shape[0], parts * view.shape[1]), view, 4)
        launch_split(view, marks, made, parts, view.device, stream)
    return split


def launch_split(d_logits: Any, logits: Any, split: Any, parts: int, device: int, stream: int) -> None:
    """`split_gradient` of arrays that have been checked."""
    num_tokens, num_experts = logits.shape
    units, word = num_tokens * num_experts, "uint16"
    if num_experts % 2 == 0:  # two bf16 numbers at a time
        units, word = units // 2, "uint32"
    if units:
        words = memory.part(memory.argument(split), 0, parts * units, word)
        given = memory.argument(d_logits), memory.argument(logits), words
        blocks = min(-(-units // THREADS), MAX_BLOCKS)
        split_kernel(num_experts, parts).launch(device, stream, blocks, 0, *given, num_tokens)


@lru_cache(maxsize=256)
def finish_kernel(num_experts: int, parts: int) -> Kernel:
    """`logits_kernels.finish_logits`."""
    from blazeproto.router import logits_kernels

    return Kernel(
        logits_kernels.finish_logits,
        "float32* float32* int64",
        threads=THREADS,
        min_blocks=4,
        lanes=lanes_of(num_experts),
        num_experts=num_experts,
        parts=parts,
    )


@lru_cache(maxsize=256)
def split_kernel(num_experts: int, parts: int) -> Kernel:
    """`logits_kernels.split_gradient`."""
    from blazeproto.router import logits_kernels

    kind = "uint32*" if num_experts % 2 == 0 else "uint16*"
    return Kernel(
        logits_kernels.split_gradient,
        f"float32* float32* {kind} int64",
        threads=THREADS,
        min_blocks=4,
        num_experts=num_experts,
        parts=parts,
    )
