"""Down projection that sums a token's experts itself (cuda/linear.cu, FUSED_COMBINE). MoEBlaze §3.1; fp32 atomics, so not
deterministic."""

from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import linear, product
from blazeproto.gemm.arguments import Array
from blazeproto.gemm.product import BOTH, Product, Variant, variants
from blazeproto.gemm.rows import words
from blazeproto.gemm.specification import Specification, by_tile
from blazeproto.gemm.tiles import CANDIDATES, TILES, TileConfig
from blazeproto.runtime import driver

SPEC = Specification(
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


@SPEC.public
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
    → out_f32 (T, d) fp32, zeroed by the caller. Of JAX arrays a new one is returned, for they are immutable.

    transposed: down_proj is (E, n, d), read as it lies.

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. TypeError or
    ValueError names the argument, before anything is launched.
    """
    return SPEC.run(launch, locals(), "transposed", "config")


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
    config, build = config or TILES["down_forward"], product.build_of("down_forward_fused")
    variant = Variant(transposed=transposed, bias=bias is not None, fused=True)
    plan = linear.plan(at.where, down_proj.shape, out_f32.shape[1], variant, config, build)
    addresses = words(at, config=config, bias=bias, scores=scores.data_ptr(), sums=out_f32.data_ptr())
    driver.launch(*plan.fill((act.data_ptr(), down_proj.data_ptr()), addresses), at.stream)


DOWN_FORWARD_FUSED = Product(
    "down_forward_fused",
    down_forward_fused,
    SPEC,
    kernels=lambda: [
        *(
            linear.kernel(TILES["down_forward"], variant)
            for variant in variants(transposed=BOTH, bias=BOTH, fused=[True])
        ),
        *(linear.kernel(config, Variant(fused=True)) for config in CANDIDATES["down_forward"]),
    ],
    in_layer=lambda sizes, up, down: [(sizes, TILES["down_forward"], down)] if down.fused else [],
    tiles=lambda sizes: TILES["down_forward"],
    kernel=linear.kernel,
    variant=Variant(fused=True),
    options=("gather", "transposed", "bias", "rank"),
    fixed_order=False,
)
