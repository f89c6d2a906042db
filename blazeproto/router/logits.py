"""``logits_product``, ``finish_logits`` and ``split_gradient``: a router's product on tensor cores, and what is beside it.

Plain functions on device arrays, as `topk_route`. The product's kernel is gemm/cuda/logits.cu, the others are in
logits_kernels.py.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from blazeproto.gemm.tiles import ALIGNMENT, CHUNK
from blazeproto.router.losses import lanes_of
from blazeproto.router.public import Place, RowKernel, public
from blazeproto.router.topk import MAX_EXPERTS, power_of_two
from blazeproto.runtime import checks
from blazeproto.runtime.warp import WARP

THREADS = 256  # of a block
MAX_BLOCKS = 132 * 16


def units_of(num_tokens: int, num_experts: int) -> int:
    """The elements that a thread of `split_gradient` takes: two neighbours if E is even."""
    return num_tokens * num_experts // (2 - num_experts % 2)


@lru_cache(maxsize=256)
def finish_kernel(num_experts: int) -> RowKernel:
    """`logits_kernels.finish_logits`."""
    from blazeproto.router import logits_kernels

    return RowKernel(
        logits_kernels.finish_logits,
        "float32* int64",
        threads=THREADS,
        most_blocks=MAX_BLOCKS,
        min_blocks=4,
        lanes=lanes_of(num_experts),
        num_experts=num_experts,
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


@lru_cache(maxsize=256)
def halve_kernel(columns: int, gradient: bool) -> RowKernel:
    """`halve_kernels.halve_rows`."""
    from blazeproto.router import halve_kernels

    return RowKernel(
        halve_kernels.halve_rows,
        f"{'float32' if gradient else 'uint16'}* float32* float32* uint32* float32* int64",
        threads=THREADS if gradient else WARP,
        most_blocks=MAX_BLOCKS,
        min_blocks=4,
        lanes=min(WARP, power_of_two(columns // CHUNK)),
        columns=columns,
        gradient=gradient,
    )


def multiply(place: Place, call: Mapping[str, Any], x: Any, weight: Any, out: Any) -> None:
    """`logits_product` of checked arrays, views or tensors."""
    from blazeproto.gemm import logits

    (num_rows, reduction), (device, stream) = x.shape, place
    sizes = {"num_rows": num_rows, "columns": call["E"], "reduction": reduction, "parts": call["parts"]}
    logits.launch(x.data_ptr(), weight.data_ptr(), out.data_ptr(), **sizes, device=device, stream=stream)


def _check_product(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    parts, rows, width = checks.integer("parts", call["parts"]), sizes["C"], sizes["d"]
    checks.require(parts in (1, 2), "parts", "1 or 2", parts)
    sizes["E"], rest = divmod(rows, parts)
    expected = f"{parts} E rows with 1 <= E <= {MAX_EXPERTS}"
    checks.require(rest == 0 and 1 <= sizes["E"] <= MAX_EXPERTS, "weight", expected, rows)
    checks.require(width > 0 and width % CHUNK == 0, "x", f"rows of a positive multiple of {CHUNK} numbers", width)


def _check_experts(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    num_experts, name = sizes["E"], "products" if "products" in call else "d_logits"
    checks.require(1 <= num_experts <= MAX_EXPERTS, name, f"1 to {MAX_EXPERTS} columns", num_experts)
    parts = checks.integer("parts", call.get("parts", 2))
    checks.require(parts in (2, 3), "parts", "2 or 3", parts)
    sizes |= {"columns": parts * num_experts, "out": call.get("products", call.get("out"))}


@public(
    {"x": "bfloat16 T d", "weight": "bfloat16 C d"},
    {"logits": "float32 T E"},
    _check_product,
    multiply,
    alignment=ALIGNMENT,
    simulated=False,
)
def logits_product(x: Any, weight: Any, parts: int = 1, *, out: Any = None, stream: int | None = None) -> Any:
    """x times the sum of the weight's ``parts`` (1 or 2), transposed; in fp32 sums, in an order that d decides.

    x (T, d) bf16, weight (parts E, d) bf16, one part over the other → logits (T, E) fp32.

    d is a multiple of 8, and arrays are 16-byte aligned.  out: (T, E) fp32, to fill.

    A row's bits depend neither on other rows nor on their number (docs/batch_invariance.md).

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


@public(
    {"products": "float32 T E"},
    {"logits": "float32 T E"},
    _check_experts,
    lambda place, call, products, _: finish_kernel(call["E"]).over(call["T"], place, (products,)),
    writes=("products",),
)
def finish_logits(products: Any, *, stream: int | None = None) -> Any:
    """The products, but for tokens with a NaN or infinite one, which get NaN throughout.

    products (T, E) fp32 → logits (T, E) fp32.

    So such a token shows in its own output and in no other's. The products are written over and returned; in host memory, and of
    JAX arrays, a new array is.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


@public(
    {"d_logits": "float32 T E", "logits": "float32 T E"},
    {"split": "bfloat16 T columns"},
    _check_experts,
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
