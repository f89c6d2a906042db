"""``hash_route``: token ids to experts by a hash, in one kernel (hash_kernels.py). `choices.Hash` is the same in torch."""

from functools import lru_cache
from typing import Any

from blazeproto.router.kinds import GOLDEN, MASK_32
from blazeproto.router.public import RowKernel, public
from blazeproto.runtime import checks

MAX_TOP_K, MAX_EXPERTS = 32, 1024
THREADS = 256
MAX_BLOCKS = 132 * 32  # then a warp goes on with further tokens


def start_of(seed: int) -> int:
    """The 32-bit word that is added to every token id."""
    return GOLDEN * (seed + 1) & MASK_32


@lru_cache(maxsize=256)
def hash_kernel(num_experts: int, top_k: int) -> RowKernel:
    """`hash_kernels.hash_route` for one E and K. A warp has a token."""
    from blazeproto.router import hash_kernels

    sizes = {"num_experts": num_experts, "top_k": top_k}
    parameters, rows = "int64* int32* int64 int64", THREADS // 32
    return RowKernel(hash_kernels.hash_route, parameters, threads=THREADS, rows=rows, most_blocks=MAX_BLOCKS, **sizes)


def _check(sizes: dict[str, Any], call: dict[str, Any]) -> None:
    num_experts, top_k, _ = (checks.integer(name, call[name]) for name in ("num_experts", "top_k", "seed"))
    checks.require(1 <= num_experts <= MAX_EXPERTS, "num_experts", f"1 to {MAX_EXPERTS}", num_experts)
    most = min(MAX_TOP_K, num_experts)
    checks.require(1 <= top_k <= most, "top_k", f"1 to {most} for E={num_experts}", top_k)


@public(
    {"token_ids": "int64 T"},
    {"experts": "int32 T top_k"},
    _check,
    lambda place, call, *arrays: hash_kernel(call["num_experts"], call["top_k"]).over(
        call["T"], place, arrays, start_of(call["seed"]), call["T"]
    ),
)
def hash_route(
    token_ids: Any, num_experts: int, top_k: int, *, seed: int = 0, out: Any = None, stream: int | None = None
) -> Any:
    """Experts by a hash of the token's id: those with the K largest weights, ties to the lower. Roller et al. 2021, §3.1.

    token_ids (T,) int64 → experts (T, K) int32.

    num_experts, top_k: E, up to 1024, and K, up to 32.  seed: of the hash.  out: (T, K) int32, to fill.

    stream: a raw cudaStream_t; default: the caller's current one. Raises TypeError or ValueError naming the argument, what was
    expected and what came.
    """
