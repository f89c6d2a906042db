"""The products that sum a token's experts themselves (cuda/linear.cu, FUSED_COMBINE); fp32 atomics, so not deterministic.

down forward      O[token] += S (act W_down^T + b)     MoEBlaze §3.1
up backward       dX[token] += dH W_up                 MoEBlaze §3.2, step 3
"""

from itertools import product as every
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import linear
from blazeproto.gemm.arguments import Array, LowRankTerm
from blazeproto.gemm.product import BOTH, Product, Variant, build_of, variants
from blazeproto.gemm.rows import address, last_maps, rank_of, scales, storage_of, words
from blazeproto.gemm.specification import Specification, by_tile, low_rank
from blazeproto.gemm.tiles import CANDIDATES, TILES, TileConfig, tiles_for
from blazeproto.runtime import driver

_DOWN = Specification(
    inputs=(
        Array("down_proj", "E d n", transposed="E n d"),
        Array("act", "R n"),
        Array("scores", "P", "float32"),
        Array("bias", "E d", optional=True),
    ),
    outputs=(Array("out_f32", "T d", "float32", added=True, tile=by_tile),),
    # out_t = Σ over a token's pairs of S_p (act_r W_down^T + b)
    formula=lambda m, act, down_proj, scores, transposed=False, bias=None: m.combine(
        m.product(act, down_proj, transposed=transposed, bias=bias), scores
    ),
)
_UP = Specification(
    inputs=(
        Array("up_proj", "E h d", transposed="E d h"),
        Array("dh", "R h"),
        *low_rank("E r d", transposed="E d r"),
    ),
    outputs=(Array("dx_f32", "T d", "float32", added=True, tile=by_tile),),
    # dX_t = Σ over a token's pairs of dH_r W_up
    formula=lambda m, dh, up_proj, transposed=False, low=None: m.combine(
        m.product(dh, up_proj, transposed=not transposed, low=low)
    ),
)


@_DOWN.public
def down_forward_fused(
    act: Any,
    down_proj: Any,
    scores: Any,
    dispatch: Dispatch,
    *,
    transposed: bool = False,
    bias: Any = None,
    out_f32: Any,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """out_f32[token] += S y, the combination inside the product. MoEBlaze §3.1. Not deterministic: fp32 atomics.

    act (R, n), down_proj (E, d, n) and bias (E, d) or None, all bf16; scores (P,) or (T, K) fp32; and a dispatch of E experts
    → out_f32 (T, d) fp32, zeroed by the caller. JAX arrays are immutable: a new one is returned.

    transposed: down_proj is (E, n, d), read as it lies.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or
    ValueError names the argument, before anything is launched.
    """
    return _DOWN.run(launch, locals(), "transposed", "config")


@_UP.public
def up_backward_act_fused(
    dh: Any,
    up_proj: Any,
    dispatch: Dispatch,
    *,
    transposed: bool = False,
    low: tuple[Any, Any] | None = None,
    dx_f32: Any,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dx_f32[token] += dh W_up, a token's sum inside the product. MoEBlaze §3.2, step 3. Not deterministic: fp32 atomics.

    dh (R, G n) and up_proj (E, G n, d), both bf16, and a dispatch of E experts → dx_f32 (T, d) fp32, zeroed by the caller. JAX
    arrays are immutable: a new one is returned.

    transposed: up_proj is (E, d, G n), read as it lies.
    low: rows (R, r) and factor (E, r, d), with ``transposed`` (E, d, r), both bf16: a row adds rows factor too.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or
    ValueError names the argument, before anything is launched.
    """
    return _UP.run(launch_dx, locals(), "transposed", "config")


def launch(
    act: Any,
    down_proj: Any,
    scores: Any,
    at: Addresses,
    *,
    transposed: bool = False,
    bias: Any = None,
    out_f32: Any,
    config: TileConfig | None = None,
) -> None:
    """`down_forward_fused` of arrays that have been checked: one launch, which adds to out_f32 (T, d) by fp32 atomics.
    transposed: down_proj is (E, n, d)."""
    if not at.num_rows:
        return
    config, build = config or TILES["down_forward"], build_of("down_forward_fused")
    variant = WEIGHED._replace(transposed=transposed, bias=bias is not None, stored=storage_of(down_proj))
    plan = linear.plan(at.where, down_proj.shape, out_f32.shape[1], variant, config, build)
    addresses = words(at, config=config, bias=bias, scores=scores.data_ptr(), sums=out_f32.data_ptr())
    maps = (act.data_ptr(), address(down_proj), *last_maps(None, down_proj))
    driver.launch(*plan.fill(maps, addresses + scales(act, down_proj)), at.stream)


def launch_dx(
    dh: Any,
    up_proj: Any,
    at: Addresses,
    *,
    transposed: bool = False,
    low: LowRankTerm | None = None,
    dx_f32: Any,
    config: TileConfig | None = None,
) -> None:
    """`up_backward_act_fused` of arrays that have been checked: one launch, which adds to dx_f32 (T, d) by fp32 atomics.
    transposed: up_proj is (E, d, G n)."""
    if not at.num_rows:
        return
    columns, build = dx_f32.shape[1], build_of("up_backward_act_fused")
    config = linear.tiles(config, not transposed, columns)
    variant = Variant(transposed=not transposed, rank=rank_of(low), fused=True, stored=storage_of(up_proj))
    plan = linear.plan(at.where, up_proj.shape, columns, variant, config, build)
    maps = (dh.data_ptr(), address(up_proj), *last_maps(low, up_proj))
    addresses = words(at, config=config, sums=dx_f32.data_ptr())
    driver.launch(*plan.fill(maps, addresses + scales(dh, up_proj)), at.stream)


WEIGHED = Variant(fused=True, scores=True)
DOWN_FORWARD_FUSED = Product(
    "down_forward_fused",
    down_forward_fused,
    _DOWN,
    kernels=lambda: [
        *(
            linear.kernel(TILES["down_forward"], variant)
            for variant in variants(transposed=BOTH, bias=BOTH, fused=[True], scores=[True])
        ),
        *(linear.kernel(config, WEIGHED) for config in CANDIDATES["down_forward"]),
    ],
    in_layer=lambda sizes, up, down: [(sizes, TILES["down_forward"], down._replace(scores=True))] if down.fused else [],
    tiles=lambda sizes: TILES["down_forward"],
    kernel=linear.kernel,
    variant=WEIGHED,
    options=("gather", "transposed", "bias", "rank"),
    fixed_order=False,
)
UP_BACKWARD_ACT_FUSED = Product(
    "up_backward_act_fused",
    up_backward_act_fused,
    _UP,
    kernels=lambda: [
        linear.kernel(*call)
        for call in (
            *every(CANDIDATES["up_backward_act"], variants(transposed=BOTH, fused=[True])),
            *every([None], variants(transposed=BOTH, rank=(16, 32, 48, 64), fused=[True])),
        )
    ],
    in_layer=lambda sizes, up, down: (
        [(sizes, tiles_for(linear.name_of(not up.transposed), sizes.d), linear.of_dx(up))] if up.fused else []
    ),
    tiles=lambda sizes: tiles_for("up_backward_act", sizes.d),
    kernel=linear.kernel,
    variant=Variant(transposed=True, fused=True),
    options=("gather", "bias", "rank"),
    fixed_order=False,
)
