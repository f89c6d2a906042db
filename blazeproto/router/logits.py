"""``finish_logits`` and ``split_gradient``: what a router's products on tensor cores need before and after.

Plain functions on device arrays, as `topk_route`: kernels and formulas are in logits_kernels.py.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.losses import lanes_of
from blazeproto.router.public import RowKernel, public
from blazeproto.router.topk import MAX_EXPERTS
from blazeproto.runtime import checks

THREADS = 256  # of a block
MAX_BLOCKS = 132 * 16


def units_of(num_tokens: int, num_experts: int) -> int:
    """What threads of `split_gradient` do: two neighbours each where E is even."""
    return num_tokens * num_experts // (2 - num_experts % 2)


@lru_cache(maxsize=256)
def finish_kernel(num_experts: int, parts: int) -> RowKernel:
    """`logits_kernels.finish_logits`."""
    from blazeproto.router import logits_kernels

    return RowKernel(
        logits_kernels.finish_logits,
        "float32* float32* int64",
        threads=THREADS,
        most_blocks=MAX_BLOCKS,
        min_blocks=4,
        lanes=lanes_of(num_experts),
        num_experts=num_experts,
        parts=parts,
    )


@lru_cache(maxsize=256)
def split_kernel(num_experts: int, parts: int) -> RowKernel:
    """`logits_kernels.split_gradient`; a "row" is one of `units_of`."""
    from blazeproto.router import logits_kernels

    return RowKernel(
        logits_kernels.split_gradient,
        f"float32* float32* {'uint16*' if num_experts % 2 else 'uint32*'} int64",
        threads=THREADS,
        rows=THREADS,
        most_blocks=MAX_BLOCKS,
        min_blocks=4,
        num_experts=num_experts,
        parts=parts,
    )


def _check(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    least, name, columns = (1, "products", sizes["C"]) if "products" in call else (2, "d_logits", sizes["E"])
    parts = checks.integer("parts", call["parts"])
    if parts not in (least, least + 1):
        raise ValueError(f"parts: expected {least} or {least + 1}, got {parts}")
    of = parts if least == 1 else 1  # of the columns
    if columns % of or not 1 <= columns // of <= MAX_EXPERTS:
        raise ValueError(f"{name}: expected {of} E columns with 1 <= E <= {MAX_EXPERTS}, got {columns}")
    sizes |= {"E": columns // of, "columns": parts * columns}


def _check_products(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    _check(sizes, call)
    if call["parts"] == 1:
        if call["out"] is not None:
            raise ValueError("out: expected None with one part, which is finished in place, got an array")
        sizes["out"] = call["products"]


@public(
    {"products": "float32 T C"},
    {"logits": "float32 T E"},
    _check_products,
    lambda place, call, *arrays: finish_kernel(call["E"], call["parts"]).over(call["T"], place, arrays),
    writes=("products",),
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


@public(
    {"d_logits": "float32 T E", "logits": "float32 T E"},
    {"split": "bfloat16 T columns"},
    _check,
    lambda place, call, *arrays: split_kernel(call["E"], call["parts"]).over(
        units_of(call["T"], call["E"]), place, arrays, call["T"]
    ),
)
def split_gradient(d_logits: Any, logits: Any, parts: int = 2, *, out: Any = None, stream: int | None = None) -> Any:
    """A gradient as a sum of bf16 numbers: the nearest, the rest, and with ``parts`` 3 the nearest again.

    d_logits (T, E) fp32, logits (T, E) fp32 → split (T, parts E) bf16; in NumPy fp32 numbers that bf16 has.

    A token whose logits are NaN, as `finish_logits` leaves them, gets zeros.  out: (T, parts E) bf16, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
