"""``hash_route``: token ids to experts by a hash, in one kernel (hash_kernels.py). `choices.Hash` is the same in torch."""

from functools import lru_cache
from typing import Any

from blazeproto.router.kinds import GOLDEN, MASK_32
from blazeproto.runtime import arrays, checks, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import Kernel

MAX_TOP_K, MAX_EXPERTS = 32, 1024
THREADS = 256
MAX_BLOCKS = 132 * 32  # then a warp goes on with further tokens


def _check(token_ids: Any, num_experts: int, top_k: int, seed: int) -> arrays.DeviceArray:
    view = arrays.expect("token_ids", token_ids, "int64", (None,), alignment=8)
    checks.integer("num_experts", num_experts)
    checks.integer("top_k", top_k)
    checks.integer("seed", seed)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")
    most = min(MAX_TOP_K, num_experts)
    if not 1 <= top_k <= most:
        raise ValueError(f"top_k: expected 1 to {most} for E={num_experts}, got {top_k}")
    return view


@any_library("blazeproto.router.fallback", {"experts": "int32"}, check=_check, simulated=True)
def hash_route(
    token_ids: Any, num_experts: int, top_k: int, *, seed: int = 0, out: Any = None, stream: int | None = None
) -> Any:
    """Experts by a hash of the token's id: those with the K largest weights, ties to the lower. Roller et al. 2021, §3.1.

    token_ids (T,) int64 → experts (T, K) int32.

    num_experts, top_k: E, up to 1024, and K, up to 32.  seed: of the hash.  out: (T, K) int32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
    view = _check(token_ids, num_experts, top_k, seed)
    with memory.on_stream(view, stream) as stream:
        experts, experts_view = arrays.output("out", out, "int32", (view.shape[0], top_k), view, 4)
        launch(view, experts_view, num_experts, seed, view.device, stream)
    return experts


def launch(token_ids: Any, experts: Any, num_experts: int, seed: int, device: int, stream: int) -> None:
    """`hash_route` of arrays that have been checked."""
    num_tokens, top_k = experts.shape
    kernel = hash_kernel(num_experts, top_k)
    blocks = min(-(-num_tokens // (kernel.threads // 32)), MAX_BLOCKS)
    start = GOLDEN * (seed + 1) & MASK_32  # is added to every id
    if blocks:
        given = memory.argument(token_ids), memory.argument(experts)
        kernel.launch(device, stream, blocks, 0, *given, start, num_tokens)


@lru_cache(maxsize=256)
def hash_kernel(num_experts: int, top_k: int) -> Kernel:
    """`hash_kernels.hash_route` for one E and K."""
    from blazeproto.router import hash_kernels

    return Kernel(
        hash_kernels.hash_route, "int64* int32* int64 int64", threads=THREADS, num_experts=num_experts, top_k=top_k
    )
