"""``routing_losses``: the load of every expert, the balancing loss and the z-loss of a batch, and the gradient back.

Plain functions on device arrays, as `topk_route`: kernels and pictures are in losses_kernels.py. Nothing waits for the device,
and repetitions have the same bits.
"""

from functools import lru_cache
from typing import Any

from blazeproto.router.scores import Score, score_named
from blazeproto.router.topk import MAX_EXPERTS, power_of_two
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import Kernel

THREADS = 256  # of a block
SUM_THREADS = 1024  # of the one block that adds up
MAX_BLOCKS, MAX_BACKWARD_BLOCKS = 132 * 4, 132 * 8


def _check(
    logits: Any, experts: Any, score: str, balance: bool, z: bool
) -> tuple[arrays.DeviceArray, arrays.DeviceArray]:
    view = _check_logits(logits, score)
    chosen = arrays.expect("experts", experts, "int32", (view.shape[0], None), device=view.device, alignment=4)
    if not chosen.shape[1]:
        raise ValueError(f"experts: expected (T, K) with K >= 1, got {chosen.shape}")
    _check_wanted(balance, z)
    return view, chosen


LOSSES = {"load": "int32", "balance_loss": "float32", "z_loss": "float32"}


@any_library("blazeproto.router.fallback", LOSSES, check=_check, simulated=True)
def routing_losses(
    logits: Any,
    experts: Any,
    *,
    score: Score = "softmax_topk",
    balance: bool = True,
    z: bool = True,
    out: tuple[Any, Any, Any] | None = None,
    workspace: Any = None,
    stream: int | None = None,
) -> tuple[Any, Any, Any]:
    """The load of every expert, the balancing loss and the z-loss. Switch Transformer §2.2, eq. 4; ST-MoE eq. 5.

    logits (T, E) fp32 and the experts (T, K) int32 they chose → load (E,) int32, balance_loss () fp32, z_loss () fp32.

    The load is how many pairs each expert has; ids outside [0, E) count nowhere. The balancing loss is E Σ f P: f the share
    of the T K choices that fell on an expert, P its mean probability (softmax; sigmoid scores divided by their sum). The
    z-loss is the mean of logsumexp(logits)².
    balance, z: whether that loss is wanted; else it is 0 and costs nothing.  score: scores.py says what they are.
    out: the three, to fill.  workspace: (losses_workspace(T, E),) fp32; made where it is not given.  E up to 1024, T at least 1.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view, chosen = _check(logits, experts, score, balance, z)
    elements = (losses_workspace(*view.shape),)
    with memory.on_stream(view, stream) as stream:
        given = out or (None, None, None)
        load, load_view = arrays.output("out[0] (load)", given[0], "int32", view.shape[1:], view, 4)
        balance_loss, balance_view = arrays.output("out[1] (balance_loss)", given[1], "float32", (), view, 4)
        z_loss, z_view = arrays.output("out[2] (z_loss)", given[2], "float32", (), view, 4)
        _, parts = arrays.output("workspace", workspace, "float32", elements, view, 4)
        outputs = load_view, balance_view, z_view
        launch(view, chosen, outputs, parts, (score, balance, z), view.device, stream)
    return load, balance_loss, z_loss


def launch(
    logits: Any,
    experts: Any,
    outputs: tuple[Any, Any, Any],
    workspace: Any,
    options: tuple[str, bool, bool],
    device: int,
    stream: int,
) -> None:
    """`routing_losses` of arrays that have been checked. options: score, balance, z."""
    (num_tokens, num_experts), top_k = logits.shape, experts.shape[1]
    blocks, tokens = _blocks(num_tokens, num_experts)
    size, begin = blocks * num_experts, memory.argument(workspace)
    parts = (
        memory.part(begin, 0, size, "int32"),  # loads
        memory.part(begin, 4 * size, size, "float32"),  # probabilities
        memory.part(begin, 8 * size, blocks, "float32"),  # squares
    )
    partials, sums = forward_kernels(num_experts, *options)
    given = map(memory.argument, (logits, experts))
    partials.launch(device, stream, blocks, 0, *given, *parts, num_tokens, top_k, tokens)
    sums.launch(device, stream, 1, 0, *parts, *map(memory.argument, outputs), blocks, num_tokens, top_k)


def _check_backward(
    logits: Any, load: Any, d_balance_loss: Any, d_z_loss: Any, top_k: int, score: str, balance: bool, z: bool
) -> tuple[arrays.DeviceArray, ...]:
    """Views of the four arrays."""
    view = _check_logits(logits, score)
    checks.integer("top_k", top_k, least=1)
    counts = arrays.expect("load", load, "int32", (view.shape[1],), device=view.device, alignment=4)
    _check_wanted(balance, z)
    d_balance = arrays.expect("d_balance_loss", d_balance_loss, "float32", (), device=view.device, alignment=4)
    d_z = arrays.expect("d_z_loss", d_z_loss, "float32", (), device=view.device, alignment=4)
    return view, counts, d_balance, d_z


@any_library("blazeproto.router.fallback", {"d_logits": "float32"}, check=_check_backward, simulated=True)
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
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """The gradient of both losses of `routing_losses`: Switch Transformer eq. 4 and ST-MoE eq. 5.

    logits (T, E) fp32 and load (E,) int32 of the forward, d_balance_loss () fp32, d_z_loss () fp32 → d_logits (T, E) fp32.

    The load passes no gradient, and a token with a NaN or infinite logit gets zeros.
    top_k: K.  score, balance, z: as in the forward.  out: (T, E) fp32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    given = _check_backward(logits, load, d_balance_loss, d_z_loss, top_k, score, balance, z)
    view = given[0]
    with memory.on_stream(view, stream) as stream:
        d_logits, outgoing = arrays.output("out", out, "float32", view.shape, view, 4)
        launch_backward(*given, outgoing, int(top_k), (score, balance, z), view.device, stream)
    return d_logits


def launch_backward(
    logits: Any,
    load: Any,
    d_balance_loss: Any,
    d_z_loss: Any,
    d_logits: Any,
    top_k: int,
    options: tuple[str, bool, bool],
    device: int,
    stream: int,
) -> None:
    """`routing_losses_backward` of arrays that have been checked."""
    num_tokens, num_experts = logits.shape
    kernel = backward_kernel(num_experts, *options)
    blocks = min(-(-num_tokens // (THREADS // kernel.constants["lanes"])), MAX_BACKWARD_BLOCKS)
    given = map(memory.argument, (logits, load, d_balance_loss, d_z_loss, d_logits))
    kernel.launch(device, stream, blocks, 0, *given, num_tokens, top_k)


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


# --- Kernels ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def forward_kernels(num_experts: int, score: str, balance: bool, z: bool) -> tuple[Kernel, Kernel]:
    """`losses_kernels.routing_partials` and `.routing_sums`."""
    from blazeproto.router import losses_kernels

    partials = Kernel(
        losses_kernels.routing_partials,
        "float32* int32* int32* float32* float32* int64 int64 int64",
        threads=THREADS,
        min_blocks=4 if num_experts <= 128 else 2,
        lanes=lanes_of(num_experts),
        num_experts=num_experts,
        score=score,
        balance=balance,
        z=z,
    )
    sums = Kernel(
        losses_kernels.routing_sums,
        "int32* float32* float32* int32* float32* float32* int64 int64 int64",
        threads=SUM_THREADS,
        columns=power_of_two(num_experts),
        num_experts=num_experts,
        balance=balance,
        z=z,
    )
    return partials, sums


@lru_cache(maxsize=256)
def backward_kernel(num_experts: int, score: str, balance: bool, z: bool) -> Kernel:
    """`losses_kernels.routing_losses_backward`."""
    from blazeproto.router import losses_kernels

    return Kernel(
        losses_kernels.routing_losses_backward,
        "float32* int32* float32* float32* float32* int64 int64",
        threads=THREADS,
        min_blocks=4 if num_experts <= 256 else 2,
        lanes=lanes_of(num_experts),
        num_experts=num_experts,
        score=score,
        balance=balance,
        z=z,
    )


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check_logits(logits: Any, score: str) -> arrays.DeviceArray:
    score_named(score)
    view = arrays.expect("logits", logits, "float32", (None, None), alignment=4)
    if not (1 <= view.shape[1] <= MAX_EXPERTS and view.shape[0] >= 1):
        raise ValueError(f"logits: expected (T, E) with T >= 1 and 1 <= E <= {MAX_EXPERTS}, got {view.shape}")
    return view


def _check_wanted(balance: bool, z: bool) -> None:
    checks.boolean("balance", balance)
    checks.boolean("z", z)
