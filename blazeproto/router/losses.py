"""``routing_losses``: the load of every expert, the balancing loss and the z-loss of a batch, and the gradient back.

Plain functions on device arrays, as `topk_route`: kernels and pictures are in losses_kernels.py. Nothing waits for the device,
and repetitions have the same bits.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.public import Place, RowKernel, parts_of, public
from blazeproto.router.scores import Score, score_named
from blazeproto.router.topk import check_matrix, power_of_two
from blazeproto.runtime import checks, memory
from blazeproto.runtime.numba_kernel import NumbaKernel

THREADS = 256  # of a block
SUM_THREADS = 1024  # of the one block that adds up
MAX_BLOCKS, MAX_BACKWARD_BLOCKS = 132 * 4, 132 * 8


def losses_workspace(num_tokens: int, num_experts: int) -> int:
    """Elements of the workspace of `routing_losses`: the parts of all blocks."""
    blocks, _ = _blocks(num_tokens, num_experts)
    return blocks * (2 * num_experts + 1)


def lanes_of(num_experts: int) -> int:
    """Threads that share a token: four experts each, up to a warp."""
    return min(32, power_of_two(-(-num_experts // 4)))


def _blocks(num_tokens: int, num_experts: int) -> tuple[int, int]:
    """How many blocks sum up, and how many tokens each has. Few where a block's parts are long."""
    groups = THREADS // lanes_of(num_experts)
    most = MAX_BLOCKS if num_experts <= 128 else MAX_BLOCKS // 2
    tokens = -(-num_tokens // min(most, -(-num_tokens // groups)))
    return -(-num_tokens // tokens), tokens


@lru_cache(maxsize=256)
def kernels(
    num_experts: int, score: str, balance: bool, z: bool, masked: bool
) -> tuple[NumbaKernel, NumbaKernel, RowKernel]:
    """`losses_kernels.routing_partials`, `.routing_sums` and `.routing_losses_backward`."""
    from blazeproto.router import losses_kernels

    sums: dict[str, Any] = {"num_experts": num_experts, "balance": balance, "z": z, "masked": masked}
    by_token = {"threads": THREADS, "lanes": lanes_of(num_experts), "score": score, **sums}
    return (
        NumbaKernel(
            losses_kernels.routing_partials,
            "float32* int32* int32* float32* float32* int64 int64 int64",
            min_blocks=4 if num_experts <= 128 else 2,
            **by_token,
        ),
        NumbaKernel(
            losses_kernels.routing_sums,
            "int32* float32* float32* int32* float32* float32* int64 int64 int64",
            threads=SUM_THREADS,
            columns=power_of_two(num_experts),
            **sums,
        ),
        RowKernel(
            losses_kernels.routing_losses_backward,
            "float32* int32* float32* float32* float32* int64 int64",
            most_blocks=MAX_BACKWARD_BLOCKS,
            min_blocks=4 if num_experts <= 256 else 2,
            **by_token,
        ),
    )


def _wanted(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("score", "balance", "z", "masked")}


def _check(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    score_named(call["score"])
    check_matrix("logits", sizes, sizes["T"] >= 1, "T >= 1")
    checks.require(sizes.get("K", 1) >= 1, "experts", "(T, K) with K >= 1", (sizes["T"], 0))
    checks.integer("top_k", call.get("top_k", 1), least=1)
    sizes["workspace"] = losses_workspace(sizes["T"], sizes["E"])


@public(
    {"logits": "float32 T E", "experts": "int32 T K"},
    {"load": "int32 E", "balance_loss": "float32", "z_loss": "float32"},
    _check,
    lambda place, call, *arrays: launch(place, arrays, **_wanted(call)),
)
def routing_losses(
    logits: Any,
    experts: Any,
    *,
    score: Score = "softmax_topk",
    balance: bool = True,
    z: bool = True,
    masked: bool = False,
    out: tuple[Any, Any, Any] | None = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Any:
    """The load of every expert, the balancing loss and the z-loss. Switch Transformer §2.2, eq. 4; ST-MoE eq. 5.

    logits (T, E) fp32 and the experts (T, K) int32 they chose → load (E,) int32, balance_loss () fp32, z_loss () fp32.

    The load is how many pairs each expert has; ids outside [0, E) count nowhere. The balancing loss is E Σ f P: f the share
    of the T K choices that fell on an expert, P its mean probability (softmax; sigmoid scores divided by their sum). The
    z-loss is the mean of logsumexp(logits)².
    balance, z: whether that loss is wanted; else it is 0 and costs nothing.  score: scores.py says what they are.
    masked: a token whose first expert is negative has no part in either loss, and T is the number of the others, at least 1;
        their experts are all in [0, E), since T is the load's sum over K.
    out: the three, to fill.  workspace: (losses_workspace(T, E),) fp32; made where it is not given.  E up to 1024, T at least 1.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """


def launch(place: Place, operands: tuple[Any, ...], **wanted: Any) -> None:
    """`routing_losses` of checked arrays: logits, experts; load, the two losses; workspace.  wanted: as `kernels` takes it."""
    logits, experts, *made, workspace = operands
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    blocks, tokens = _blocks(num_tokens, num_experts)
    size = blocks * num_experts  # of loads and of probabilities; then come squares
    parts = parts_of(workspace, (size, "int32"), (size, "float32"), (blocks, "float32"))
    partials, sums, _ = kernels(num_experts, **wanted)
    given = map(memory.argument, (logits, experts))
    partials.launch(*place, blocks, 0, *given, *parts, num_tokens, top_k, tokens)
    sums.launch(*place, 1, 0, *parts, *map(memory.argument, made), blocks, num_tokens, top_k)


@public(
    {"logits": "float32 T E", "load": "int32 E", "d_balance_loss": "float32", "d_z_loss": "float32"},
    {"d_logits": "float32 T E"},
    _check,
    lambda place, call, *arrays: kernels(call["E"], **_wanted(call))[2].over(
        call["T"], place, arrays, call["T"], int(call["top_k"])
    ),
)
def routing_losses_backward(
    logits: Any,
    load: Any,
    d_balance_loss: Any,
    d_z_loss: Any,
    top_k: int,
    *,
    score: Score = "softmax_topk",
    balance: bool = True,
    z: bool = True,
    masked: bool = False,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """The gradient of both losses of `routing_losses`: Switch Transformer eq. 4 and ST-MoE eq. 5.

    logits (T, E) fp32 and load (E,) int32 of the forward, d_balance_loss () fp32, d_z_loss () fp32 → d_logits (T, E) fp32.

    The load passes no gradient, and a token with a NaN or infinite logit gets zeros.
    top_k: K.  score, balance, z, masked: as in the forward; a masked token's logits have to be NaN.  out: (T, E) fp32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
