"""Down projection that sums a token's experts itself (cuda/linear.cu, FUSED_COMBINE). MoEBlaze §3.1; fp32 atomics, so not
deterministic."""

from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import linear, product
from blazeproto.gemm.arguments import Arguments
from blazeproto.gemm.product import Product
from blazeproto.gemm.rows import words
from blazeproto.gemm.tiles import CANDIDATES, OPERAND_BYTES, TILES, TileConfig
from blazeproto.runtime import driver
from blazeproto.runtime.libraries import any_library


@any_library("blazeproto.gemm.reference", {"out_f32": "float32"})
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
    given = check(Arguments(dispatch, stream, config), act, down_proj, scores, transposed, bias, out_f32)
    launch(**given.views, at=given.located(), transposed=transposed, config=config)
    return out_f32


def check(
    given: Arguments, act: Any, down_proj: Any, scores: Any, transposed: bool, bias: Any, out_f32: Any
) -> Arguments:
    """The arrays of `down_forward_fused`."""
    given.read("down_proj", down_proj, "E n d" if transposed else "E d n").read("act", act, "R n")
    given.read("scores", scores, "P", "float32")
    return given.read("bias", bias, "E d", optional=True).update("out_f32", out_f32, "T d", "float32")


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
    shape, config, build = down_proj.shape, config or TILES["down_forward"], product.build_of("down_forward_fused")
    plan = linear.plan(at.where, shape, out_f32.shape[1], False, transposed, bias is not None, True, 0, config, build)
    addresses = words(at, config=config, bias=bias, scores=scores.data_ptr(), sums=out_f32.data_ptr())
    driver.launch(*plan.fill((act.data_ptr(), down_proj.data_ptr()), addresses), at.stream)


DOWN_FORWARD_FUSED = Product(
    "down_forward_fused",
    down_forward_fused,
    kernels=lambda: [
        *(
            linear.kernel(TILES["down_forward"], fused=True, bias=bias, transposed=transposed)
            for bias in (False, True)
            for transposed in (False, True)
        ),
        *(linear.kernel(config, fused=True) for config in CANDIDATES["down_forward"]),
    ],
    for_layer=lambda layer: (
        [
            linear.kernel(
                TILES["down_forward"],
                transposed=layer.transposed,
                bias=layer.down_bias,
                fused=True,
                **product.build_of("down_forward_fused")._asdict(),
            )
        ]
        if layer.fused
        else []
    ),
    operations=lambda s: 2.0 * s.rows * s.n * s.d,
    least_bytes=lambda s: OPERAND_BYTES * (s.rows * s.n + s.E * s.n * s.d) + 4 * (s.T * s.d + s.rows),
    kernel=lambda config=None, **variant: linear.kernel(config, fused=True, **variant),
)
