"""Bytes, operations and floors of every step: what a step must read, write and compute, and how long an H200 needs for that.

    from blazeproto import cost
    from blazeproto.gemm import Sizes

    sizes = Sizes(T=40960, d=768, n=256, E=128, K=8)
    cost.product_floor_ms("up_forward", sizes)      # one kernel
    cost.layer_floor_ms(sizes)                      # (forward, backward) of a layer

A product's operations and least bytes follow from its inputs and outputs (`blazeproto.gemm.Product`); here they become times and
sums. A floor reads every input once and writes every output once, whatever the caches hold. All arrays count as bf16, weight
gradients too: an fp32 one has 2 bytes an element more. K is the same for every token; where it varies, take its mean. Only
blazeproto.lab, the scripts and the tests import this module: no kernel is chosen by it.
"""

from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.runtime import checks

PEAK_OPERATIONS = 785e12
"""Operations a second, a multiplication and an addition being two; measured on one H200 (cuBLAS, bf16, 8192³, random data)."""
PEAK_BYTES = 4.24e12
"""Bytes a second, read and written ones together; measured on the same H200 (copy)."""

FORWARD, BACKWARD = (
    tuple(name for name, product in PRODUCTS.items() if phase in product.phases and product.tiles)
    for phase in ("forward", "backward")
)
"""The products that every layer runs; `combine` follows each of the two lists."""
ID_BYTES = SCORE_BYTES = 4  # int32, fp32


def floor_ms(operations: float, least_bytes: float) -> float:
    """Milliseconds that one kernel needs at the least: for its operations or for its bytes, whichever takes longer."""
    return 1e3 * max(operations / PEAK_OPERATIONS, least_bytes / PEAK_BYTES)


def product_floor_ms(name: str, sizes: Sizes) -> float:
    """Milliseconds that a product of `blazeproto.gemm.PRODUCTS` needs at the least. ValueError for a name that isn't there."""
    checks.one_of("product", name, tuple(PRODUCTS))
    product = PRODUCTS[name]
    return floor_ms(product.operations(sizes), product.least_bytes(sizes))


def layer_operations(sizes: Sizes) -> tuple[float, float]:
    """(forward, backward) operations of a layer's products: with a gate 6·T·K·n·d and 12·T·K·n·d."""
    forward, backward = (sum(PRODUCTS[name].operations(sizes) for name in names) for names in (FORWARD, BACKWARD))
    return forward, backward


def layer_floor_ms(sizes: Sizes) -> tuple[float, float]:
    """(forward, backward) milliseconds that a layer needs at the least: the sum over its eight kernels.

    No index list is counted, so `combine` is taken without the rows' places, which its own least bytes have, and in backward
    without scores, which it does not read there.
    """
    combine = PRODUCTS["combine"].least_bytes(sizes) - ID_BYTES * sizes.rows
    forward = sum(product_floor_ms(name, sizes) for name in FORWARD) + floor_ms(0.0, combine)
    backward = sum(product_floor_ms(name, sizes) for name in BACKWARD)
    return forward, backward + floor_ms(0.0, combine - SCORE_BYTES * sizes.rows)


def saved_bytes(sizes: Sizes, policy: str = "minimal") -> int:
    """Bytes that the expert MLP keeps for backward of bf16 tokens under a save policy, weights excluded.

    For each token 2d + 12K, and G·2nK for H ("minimal", "paper") and 2nK for act ("paper"); then 4(E+1) of offsets. The count is
    `blazeproto.autograd.saved_bytes`, of which torch is part, so it is imported at a call.
    """
    from blazeproto.autograd import saved_bytes as saved_by_a_call

    return saved_by_a_call(
        policy,
        num_tokens=sizes.T,
        d_model=sizes.d,
        d_expert=sizes.n,
        num_experts=sizes.E,
        top_k=sizes.K,
        activation="swiglu" if sizes.halves == 2 else "silu",
    )


def dispatch_bytes(num_pairs: int) -> int:
    """Least bytes of a dispatch of T·K pairs: reads their expert ids, writes the pair of each row and the row of each pair."""
    return 3 * ID_BYTES * num_pairs


def topk_bytes(num_tokens: int, num_experts: int, top_k: int, itemsize: int) -> int:
    """Least bytes of the fused top-k: reads (T, E) logits of ``itemsize`` bytes, writes K scores and ids a token."""
    return num_tokens * (itemsize * num_experts + (SCORE_BYTES + ID_BYTES) * top_k)


def topk_backward_bytes(num_tokens: int, num_experts: int, top_k: int, itemsize: int) -> int:
    """Least bytes of its backward: reads the logits, the ids and the scores' gradients, writes the logits' gradients."""
    return num_tokens * (2 * itemsize * num_experts + (SCORE_BYTES + ID_BYTES) * top_k)
