"""Bytes, operations and times of every step, and the papers' own formulas: what a step must read, write and compute.

    from blazeproto import cost
    from blazeproto.gemm import Sizes

    sizes = Sizes(T=40960, d=768, n=256, E=128, K=8)
    cost.product_floor_ms("up_forward", sizes)      # one kernel
    cost.layer_floor_ms(sizes)                      # (forward, backward) of a layer
    cost.layer_work(sizes, "recompute")             # operations and bytes of all its steps, by save policy
    cost.predicted_layer_ms(sizes)                  # (forward, backward) that it may take; gpu=: of another GPU, in `GPUS`

A product's operations and least bytes follow from its inputs and outputs (`blazeproto.gemm.Product`); here they become times and
sums. A floor reads every input once and writes every output once, whatever the caches hold. All arrays count as bf16, weight
gradients and the router's weight too: an fp32 one has 2 bytes an element more. K is the same for every token; where it varies,
take its mean. Only blazeproto.lab, the scripts and the tests import this module: no kernel is chosen by it.

Every function raises ValueError for a number that is negative, not finite or otherwise impossible, such as K above E, and
TypeError for what is of another type, as a count that is no int. T may be 0, but where a result is by row.

Sources: MoEBlaze; SonicMoE; Soboleva, "MoE at Scale" (Cerebras, 2025), whose formulas are written here in our sizes: b s = T,
h = d, f h = n; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from typing import Any, NamedTuple

from blazeproto.gemm import PRODUCTS, Sizes
from blazeproto.gemm.blocks import BLOCK
from blazeproto.gemm.tiles import BK, BM
from blazeproto.runtime import checks

PEAK_OPERATIONS = 785e12
"""Operations a second, a multiplication and an addition being two; measured on one H200 (cuBLAS, bf16, 8192³, random data)."""
PEAK_BYTES = 4.24e12
"""Bytes a second, read and written ones together; measured on the same H200 (copy)."""


class GPU(NamedTuple):
    """The rates of a GPU. operations: bf16 ones a second, dense.  bytes: read and written, a second.  source: of both rates."""

    operations: float
    bytes: float
    source: str


GPUS = {
    "H200": GPU(PEAK_OPERATIONS, PEAK_BYTES, "measured"),
    "H100": GPU(785e12, 3.35e12, "operations measured, 777 to 785 TFLOP/s; bytes NVIDIA's data sheet's"),
    "H100, data sheet": GPU(
        989e12, 3.35e12, "NVIDIA's data sheet, H100 SXM: 1 979 TFLOP/s with sparsity, twice the dense ones"
    ),
    "H200, data sheet": GPU(989e12, 4.8e12, "NVIDIA's data sheet, H200 SXM: 1 979 TFLOP/s with sparsity"),
    "B200": GPU(2250e12, 8.0e12, "NVIDIA's data sheet, HGX B200: 4 500 TFLOP/s with sparsity"),
}
"""By name. An H200 was measured to reach 79 and 88 % of its data sheet, an H100 79 % of its operations (by the
same product, 11 times in a day); the others were not measured. Compare like with like."""

FORWARD, BACKWARD = (
    tuple(name for name, product in PRODUCTS.items() if phase in product.phases and product.tiles)
    for phase in ("forward", "backward")
)
"""The products that every layer runs; `combine` follows each of the two lists."""
ID_BYTES = SCORE_BYTES = 4  # int32, fp32
BF16_BYTES = 2
EXPOSED = 0.4
"""The part of the shorter of a kernel's operations and bytes that the longer does not hide, in `predicted_ms`: to a tenth, what
fits the products of results/h200/products.json best."""


def _counts(least: int, /, **counts: Any) -> None:
    for name, value in counts.items():
        checks.integer(name, value, least)


def _check_top_k(name: str, top_k: Any, num_experts: int) -> None:
    checks.number(name, top_k, least=0)  # no int where it is a mean
    if top_k > num_experts:
        raise ValueError(f"{name}: expected at most {num_experts}, the number of experts, got {top_k}")


def _checked(sizes: Sizes) -> Sizes:
    checks.instance("sizes", sizes, Sizes)
    _counts(0, T=sizes.T)
    _counts(1, d=sizes.d, n=sizes.n, E=sizes.E)
    _check_top_k("K", sizes.K, sizes.E)
    if checks.integer("halves", sizes.halves) not in (1, 2):
        raise ValueError(f"halves: expected 1 or 2, got {sizes.halves}")
    return sizes


# --- Floors ----------------------------------------------------------------------------------------------------------------


def known_gpu(device: str) -> str | None:
    """The name in `GPUS` of a device by its own, "H100" of "NVIDIA H100 80GB HBM3"; None where it isn't there.
    None for PCIe and NVL cards and MIG slices too: the table has the rates of whole SXM cards, which are faster."""
    checks.instance("device", device, str)
    words = device.replace(",", " ").split()
    return None if {"PCIe", "NVL", "MIG"} & {*words} else next((name for name in GPUS if name in words), None)


def gpu_named(name: str) -> GPU:
    """The rates of a GPU of `GPUS`. ValueError for a name that isn't there."""
    checks.one_of("gpu", name, tuple(GPUS))
    return GPUS[name]


def floor_ms(operations: float, least_bytes: float, gpu: str = "H200") -> float:
    """Milliseconds that one kernel needs at the least: for its operations or for its bytes, whichever takes longer.
    gpu: a name of `GPUS`. ValueError for another, and for operations or bytes that are negative or not finite."""
    return max(_both_ms(operations, least_bytes, gpu))


def _both_ms(operations: float, least_bytes: float, gpu: str) -> tuple[float, float]:
    rates = gpu_named(gpu)
    checks.number("operations", operations, least=0)
    checks.number("least_bytes", least_bytes, least=0)
    return 1e3 * operations / rates.operations, 1e3 * least_bytes / rates.bytes


def product_floor_ms(name: str, sizes: Sizes, gpu: str = "H200", precision: str = "bf16") -> float:
    """Milliseconds that a product of `gemm.PRODUCTS` needs at the least.  precision: of its operands. ValueError for another."""
    return floor_ms(*_product_work(name, sizes, precision=precision)[2:], gpu)


def block_operations(num_blocks: int, size: int) -> float:
    """Operations of a block-sparse product: each of its 128 x 128 blocks with ``size`` rows or columns (MegaBlocks §5.1).
    ValueError for less than 0 of either."""
    _counts(0, num_blocks=num_blocks, size=size)
    return 2.0 * num_blocks * BLOCK**2 * size


def layer_operations(sizes: Sizes) -> tuple[float, float]:
    """(forward, backward) operations of a layer's products: with a gate 6·T·K·n·d and 12·T·K·n·d."""
    forward, backward = (sum(_product_work(name, sizes).operations for name in names) for names in (FORWARD, BACKWARD))
    return forward, backward


def layer_floor_ms(sizes: Sizes, gpu: str = "H200") -> tuple[float, float]:
    """(forward, backward) milliseconds that a layer's experts need at the least: the sum over their eight kernels.

    No index list is counted, so `combine` is taken without the rows' places, which its own least bytes have, and in backward
    without scores, which it does not read there.
    """
    forward, backward = (
        sum(
            floor_ms(work.operations, work.least_bytes, gpu)
            for work in layer_work(sizes)
            if work.phase == phase and work.name in PRODUCTS
        )
        for phase in ("forward", "backward")
    )
    return forward, backward


def router_floor_ms(sizes: Sizes, gpu: str = "H200") -> tuple[float, float]:
    """(forward, backward) ms that a bf16 router needs at the least: each of its three products passed over once, or its bytes.

    Forward reads x and the weight and writes fp32 logits, scores and ids. dX and dW each read the logits' gradient in fp32, from
    which they could be made; one writes dX, the other reads x and writes dW.
    """
    operations, least_bytes = _logits_work(sizes)
    forward = floor_ms(operations, least_bytes + (SCORE_BYTES + ID_BYTES) * sizes.rows, gpu)
    return forward, 2 * floor_ms(operations, least_bytes, gpu)


def _logits_work(sizes: Sizes) -> tuple[float, float]:
    """Operations of the router's product; bytes of x, its weight and fp32 logits."""
    T, d, E = _checked(sizes).T, sizes.d, sizes.E
    return 2.0 * T * d * E, float(BF16_BYTES * (T * d + E * d) + SCORE_BYTES * T * E)


# --- Every step ------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The operations and bytes of one step of a layer. phase: "forward" or "backward".  name: as in `blazeproto.lab.explain`.

    operations: a multiplication and an addition being two, of quantized operands one.  least_bytes: all is moved once.
    """

    phase: str
    name: str
    operations: float
    least_bytes: float


def _product_work(name: str, sizes: Sizes, phase: str = "", precision: str = "bf16") -> Work:
    checks.one_of("product", name, tuple(PRODUCTS))
    product, rate = PRODUCTS[name], PRODUCTS[name].element_of(precision).rate
    return Work(phase, name, product.operations(_checked(sizes)) / rate, product.least_bytes(sizes, precision))


def layer_work(sizes: Sizes, save: str = "minimal") -> list[Work]:
    """Every step of a forward and backward of `MoE` with a top-k router and an auxiliary loss, in the order in which they run.

    save: a save policy (`saved_bytes` counts its bytes). "recompute" runs the up projection again in backward; "paper" writes and
    reads no more than "minimal", as act is written for the down projection anyway, and backward makes its own.
    ValueError for another policy.
    """
    product, of_logits = _logits_work(sizes)
    T, E, pairs = sizes.T, sizes.E, sizes.rows
    logits = float(SCORE_BYTES * T * E)
    x, weight = BF16_BYTES * T * sizes.d, BF16_BYTES * E * sizes.d
    combine = PRODUCTS["combine"].least_bytes(sizes) - ID_BYTES * pairs

    def products(phase: str, names: tuple[str, ...]) -> list[Work]:
        return [_product_work(name, sizes, phase) for name in names]

    again = [work._replace(name="up_forward again") for work in products("backward", FORWARD[:1])]
    return [
        Work("forward", "router product", product, of_logits),
        Work("forward", "top-k", 0.0, topk_bytes(T, E, sizes.K, SCORE_BYTES)),
        Work("forward", "load and losses", 0.0, logits + ID_BYTES * (pairs + E)),
        Work("forward", "dispatch", 0.0, dispatch_bytes(pairs) + ID_BYTES * (E + 1)),
        *products("forward", FORWARD),
        Work("forward", "combine", 0.0, combine),
        *(again if _recomputes(save) else []),
        *products("backward", BACKWARD[:-1]),
        Work("backward", "combine", 0.0, combine - SCORE_BYTES * pairs),
        *products("backward", BACKWARD[-1:]),
        Work("backward", "top-k", 0.0, topk_backward_bytes(T, E, sizes.K, SCORE_BYTES)),
        Work("backward", "load and losses", 0.0, 2 * logits + ID_BYTES * E),
        Work("backward", "sum of dlogits", 0.0, 3 * logits),
        Work("backward", "router product", 2 * product, of_logits + x + weight),
        Work("backward", "sum of dX", 0.0, 3 * x),
    ]


def _recomputes(save: str) -> bool:
    if not isinstance(save, str) or save != "minimal":
        from blazeproto.autograd import SavePolicy  # torch is part of it

        checks.one_of("save", save, tuple(map(str, SavePolicy)))
    return save == "recompute"


def saved_bytes(sizes: Sizes, policy: str = "minimal") -> int:
    """Bytes that the expert MLP keeps for backward of bf16 tokens under a save policy, weights excluded.

    For each token 2d + 12K, and G·2nK for H ("minimal", "paper") and 2nK for act ("paper"); then 4(E+1) of offsets. The count is
    `blazeproto.autograd.saved_bytes`, of which torch is part, so it is imported at a call.
    ValueError for another policy.
    """
    from blazeproto import autograd

    checks.one_of("policy", policy, tuple(map(str, autograd.SavePolicy)))
    return autograd.saved_bytes(
        policy,
        num_tokens=_checked(sizes).T,
        d_model=sizes.d,
        d_expert=sizes.n,
        num_experts=sizes.E,
        top_k=sizes.K,
        activation="swiglu" if sizes.halves == 2 else "silu",
    )


def dispatch_bytes(num_pairs: int) -> int:
    """Least bytes to dispatch T·K pairs: reads their expert ids, writes each row's pair, each pair's row. ValueError below 0."""
    checks.number("num_pairs", num_pairs, least=0)  # no int where K is a mean
    return 3 * ID_BYTES * num_pairs


def topk_bytes(num_tokens: int, num_experts: int, top_k: int, itemsize: int) -> int:
    """Least bytes of the fused top-k: reads (T, E) logits of ``itemsize`` bytes, writes K scores and ids a token.
    ValueError for K above E, less than 0 of any, or no itemsize."""
    _counts(0, num_tokens=num_tokens, num_experts=num_experts)
    _check_top_k("top_k", top_k, num_experts)
    return num_tokens * (checks.integer("itemsize", itemsize, 1) * num_experts + (SCORE_BYTES + ID_BYTES) * top_k)


def topk_backward_bytes(num_tokens: int, num_experts: int, top_k: int, itemsize: int) -> int:
    """Least bytes of its backward: reads the logits, the ids and the scores' gradients, writes the logits' gradients.
    ValueError as for `topk_bytes`."""
    return topk_bytes(num_tokens, num_experts, top_k, itemsize) + itemsize * num_tokens * num_experts


# --- What a step may take --------------------------------------------------------------------------------------------------


def predicted_ms(operations: float, least_bytes: float, gpu: str = "H200") -> float:
    """Milliseconds that one kernel may take: the longer of its operations and its bytes, and `EXPOSED` times the shorter.

    Start and end of a kernel are not counted. ValueError as for `floor_ms`.
    """
    shorter, longer = sorted(_both_ms(operations, least_bytes, gpu))
    return longer + EXPOSED * shorter


def predicted_work_ms(work: Work, sizes: Sizes, gpu: str = "H200") -> float:
    """`predicted_ms` of a step, with the rows that its tiles compute: half a tile more an expert in the mean, 64 rows, and 32 in
    a weight gradient, whose reduction goes over rows."""
    checks.instance("work", work, Work)
    name, operations, pairs = f"{work.name}".removesuffix(" again"), work.operations, _checked(sizes).rows
    if name in PRODUCTS and pairs:
        rows = BK if name.endswith("_weight") else BM
        operations *= 1 + min(sizes.E, pairs) * rows / 2 / pairs
    return predicted_ms(operations, work.least_bytes, gpu)


def predicted_product_ms(name: str, sizes: Sizes, gpu: str = "H200", precision: str = "bf16") -> float:
    """Milliseconds that a product may take; arguments and errors as of `product_floor_ms`."""
    return predicted_work_ms(_product_work(name, sizes, precision=precision), sizes, gpu)


def predicted_layer_ms(sizes: Sizes, save: str = "minimal", gpu: str = "H200") -> tuple[float, float]:
    """(forward, backward) milliseconds that a whole layer may take, `MoE` with its router: the sum over `layer_work`."""
    steps = layer_work(sizes, save)
    forward, backward = (
        sum(predicted_work_ms(work, sizes, gpu) for work in steps if work.phase == phase)
        for phase in ("forward", "backward")
    )
    return forward, backward


# --- The papers' formulas --------------------------------------------------------------------------------------------------


def arithmetic_intensity(sizes: Sizes) -> float:
    """Operations a byte of one expert's forward with a gate, 3 / (2/d + 2/n + 3/T_e), where T_e = T K / E: SonicMoE equation 4,
    which leaves out that H is written, and reads every gathered row from memory. ValueError for sizes without rows."""
    checks.number("T K", _checked(sizes).rows, above=0)
    return 3 / (2 / sizes.d + 2 / sizes.n + 3 / rows_per_expert(sizes))


def routed_buffer_bytes(num_tokens: int, d_model: int, top_k: int) -> int:
    """2 L d k: the tokens copied for their experts, which the index lists replace (MoEBlaze §2.1).

    98 GB for the paper's L = 2 million, d = 6144, k = 4. The paper prints 94 GB. ValueError for less than 0 of any.
    """
    _counts(0, num_tokens=num_tokens, d_model=d_model, top_k=top_k)
    return BF16_BYTES * num_tokens * d_model * top_k


def intermediate_bytes(num_tokens: int, d_hidden: int) -> int:
    """2 L h: one intermediate of the expert MLP (MoEBlaze §2.2). 98 GB for L = 2 million, h = 24576. ValueError below 0."""
    _counts(0, num_tokens=num_tokens, d_hidden=d_hidden)
    return BF16_BYTES * num_tokens * d_hidden


def weight_bytes(sizes: Sizes, layers: int = 1, bytes_a_parameter: int = 4) -> int:
    """3 h f h E a layer, with a gate ("MoE at Scale", GPU). bytes_a_parameter: 4 for weights and gradients in bf16, 16 for mixed
    precision with Adam's states. ValueError for less than 0 layers or 1 byte."""
    a_layer = (_checked(sizes).halves + 1) * sizes.n * sizes.d * sizes.E
    return a_layer * checks.integer("layers", layers, 0) * checks.integer("bytes_a_parameter", bytes_a_parameter, 1)


def activation_bytes(sizes: Sizes, layers: int = 1) -> int:
    """2 b s h (1 + 3 k f) a layer, with a gate: x, H and act ("MoE at Scale", GPU). Ours are `saved_bytes`.
    ValueError for less than 0 layers."""
    layers = checks.integer("layers", layers, 0)
    return BF16_BYTES * _checked(sizes).T * (sizes.d + (sizes.halves + 1) * sizes.K * sizes.n) * layers


def expert_parallel_ms(
    sizes: Sizes,
    *,
    gpus: int = 8,
    operations: float = 500e12,
    link_bytes: float = 350e9,
    exchanges: int = 2,
    senders: int = 1,
) -> tuple[float, float]:
    """(experts, exchanges) ms of a layer under expert parallelism: 18 b s h f h k / (GPUs x operations a second), and 2 b s k h
    bytes an exchange over the link ("MoE at Scale", GPU).

    gpus: that share the products of forward and backward.  operations: a second that each of them reaches.
    link_bytes: a second, of one GPU's link.  exchanges: all-to-alls.  senders: GPUs whose tokens b s are.

    The article takes the forward and backward of eight GPUs, but the two exchanges of a forward, and sends all tokens over one
    GPU's link: 77 % of the time for Qwen3. Tokens of eight GPUs have eight links, and backward has two exchanges more: 45 %.
    ValueError for less than one GPU, exchange or sender, and for rates that are not above 0.
    """
    _counts(1, gpus=gpus, exchanges=exchanges, senders=senders)
    checks.number("operations", operations, above=0)
    checks.number("link_bytes", link_bytes, above=0)
    computed = 1e3 * sum(layer_operations(sizes)) / (gpus * operations)
    return computed, 1e3 * exchanges * BF16_BYTES * sizes.rows * sizes.d / (senders * link_bytes)


def rows_per_expert(sizes: Sizes, tiles: int = 1) -> float:
    """b k / E, the rows of an expert in the mean, of a batch of T tokens.

    tiles: G of Batch Tiling on Attention: attention takes T tokens at a time, the experts G T at once, so each has G b k / E
    ("MoE at Scale", Cerebras WSE). ValueError for less than 1.
    """
    return checks.integer("tiles", tiles, 1) * _checked(sizes).rows / sizes.E


def attention_bytes(batch: int, sequence: int, d_model: int, heads: int, tiles: int = 1) -> float:
    """Bytes that an attention block keeps for backward, 11 s b h + 5 a s² b (Korthikanti et al. §4.1).

    batch, sequence, d_model, heads: b, s, h, a.  tiles: G, of which one is kept at a time.  The term in s² is of scores, their
    softmax and its dropout mask; FlashAttention keeps none of them.
    ValueError for tiles that do not divide the batch, and for less than 0 of the others.
    """
    _counts(0, batch=batch, sequence=sequence, d_model=d_model, heads=heads)
    if batch % checks.integer("tiles", tiles, 1):
        raise ValueError(f"tiles: expected a divisor of batch={batch}, got {tiles}")
    return batch / tiles * sequence * (11 * d_model + 5 * heads * sequence)
