"""Up projection, forward (cuda/up.cu). MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import product
from blazeproto.gemm.arguments import Arguments
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.launch import Plan, dense_box
from blazeproto.gemm.product import SHAPES, TRANSPOSED, Product, tiled_kernel
from blazeproto.gemm.rows import (
    LowRank,
    h_box,
    low_maps,
    low_rank_of,
    rank_of,
    read_low,
    rows_plan,
    take_low,
    weight_box,
    words,
)
from blazeproto.gemm.tiles import CANDIDATES, OPERAND_BYTES, SLAB, TILES, TileConfig, tiles_of_layer, with_tickets
from blazeproto.runtime import driver
from blazeproto.runtime.libraries import any_library


@any_library("blazeproto.gemm.reference", {"h": "bfloat16", "act": "bfloat16"})
def up_forward(
    x: Any,
    up_proj: Any,
    dispatch: Dispatch,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    bias: Any = None,
    low: tuple[Any, Any] | None = None,
    h: Any = None,
    act: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> tuple[Any, Any]:
    """h = x[token] W_up^T (+ bias), act = f(gate) up. MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2.

    x (T, d), up_proj (E, G n, d), bias (E, G n) or None, all bf16, and a dispatch of E experts → h (R, G n), act (R, n), both
    bf16.

    activation: a name of `blazeproto.activations`; G is 2 where it has a gate, else 1. act is computed from h as stored.
    transposed: up_proj is (E, d, G n), read as it lies.
    low: rows (R, r) and factor (E, G n, r), with ``transposed`` (E, r, G n), both bf16: h gets rows factor^T too, as of LoRA.

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    given = check(Arguments(dispatch, stream, config), x, up_proj, activation, transposed, bias, low, h, act)
    at, added = given.located(), take_low(given.views)
    launch(**given.views, at=at, activation=activation, transposed=transposed, low=added, config=config)
    return given.arrays["h"], given.arrays["act"]


def check(
    given: Arguments, x: Any, up_proj: Any, activation: str, transposed: bool, bias: Any, low: Any, h: Any, act: Any
) -> Arguments:
    """The arrays of `up_forward`."""
    halves = activation_named(activation).halves
    given.read("up_proj", up_proj, "E d h" if transposed else "E h d").read("x", x, "T d", gathered=True)
    given.read("bias", bias, "E h", optional=True)
    read_low(given, low, "E r h" if transposed else "E h r")
    if (width := given.sizes["h"]) % (given.multiple * halves):
        raise ValueError(f"up_proj: expected {halves} times a multiple of {given.multiple} rows an expert, got {width}")
    return given.write("h", h, "R h").write("act", act, f"R {width // halves}")


def kernel(
    config: TileConfig | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    bias: bool = False,
    low_rank: int = 0,
    debug: tuple[str, ...] = (),
    sources: Path | None = None,
) -> Kernel:
    """With these tiles, this activation, with or without a bias.  transposed: weights (E, d, G n).
    low_rank: as `low_rank_of` has it."""
    wanted = activation_named(activation)
    return tiled_kernel(
        "up.cu",
        "up_forward",
        config or TILES["up_forward"],
        debug,
        sources,
        tickets=True,
        epilogue_warpgroups=1,
        # Making act is quicker with 56, but consumers that add biases need what 40 leave them.
        epilogue_registers=40 if bias else 56,
        GATHER=1,
        B_MN=transposed,
        HAS_BIAS=bias,
        low_rank=low_rank,
        **wanted.macros,
    )


@lru_cache(maxsize=SHAPES)
def _plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    activation: str,
    transposed: bool,
    bias: bool,
    rank: int,
    config: TileConfig,
    build: product.Build,
) -> Plan:
    wanted = activation_named(activation)
    halves = 1 if wanted.alternating else wanted.halves  # whose columns lie apart
    width, d = shape[:0:-1] if transposed else shape[1:]
    columns = width // halves
    factor = (shape[0], rank, width) if transposed else (shape[0], width, rank)
    variant: dict[str, Any] = {"activation": activation, "transposed": transposed, "bias": bias}
    return rows_plan(
        kernel(config, **variant, low_rank=low_rank_of(rank), **build._asdict()),
        config,
        where,
        gather=True,
        reduction=d,
        columns=columns,
        tile_columns=config.tile_n // halves,
        weights=weight_box(shape, columns, config, transposed, halves),
        out0=h_box(columns, halves, where[0], (SLAB, SLAB, 1)),
        out1=dense_box((width // wanted.halves, where[0]), (SLAB, SLAB)),
        bias_stride=width,
        rank=rank,
        low_weights=weight_box(factor, columns, config, transposed, halves) if rank else None,
    )


def launch(
    x: Any,
    up_proj: Any,
    at: Addresses,
    *,
    activation: str,
    transposed: bool = False,
    bias: Any = None,
    low: LowRank | None = None,
    h: Any,
    act: Any,
    config: TileConfig | None = None,
) -> None:
    """`up_forward` of arrays that have been checked (torch tensors or DeviceArrays).  low: added to h before bias and
    activation."""
    if not at.num_rows:
        return
    config = config or with_tickets("up_forward", at.num_rows, at.num_experts, x.shape[1])
    build = product.build_of("up_forward")
    plan = _plan(at.where, up_proj.shape, activation, transposed, bias is not None, rank_of(low), config, build)
    h_at, act_at = h.data_ptr(), act.data_ptr()
    filled = plan.fill(
        (up_proj.data_ptr(), h_at, act_at, *low_maps(low)),
        words(at, config=config, source=x.data_ptr(), out0=h_at, out1=act_at, bias=bias),
    )
    driver.launch(*filled, at.stream)


UP_FORWARD = Product(
    "up_forward",
    up_forward,
    kernels=lambda: [
        *(kernel(activation=activation, bias=bias) for activation in ACTIVATIONS for bias in (False, True)),
        *(kernel(activation=name, transposed=True, bias=bias) for name in TRANSPOSED for bias in (False, True)),
        *(kernel(activation=name, transposed=lies, low_rank=1) for name in TRANSPOSED for lies in (False, True)),
        *(kernel(low_rank=count) for count in (2, 3, 4)),
        *(kernel(config) for config in CANDIDATES["up_forward"]),
    ],
    for_layer=lambda layer: [
        kernel(
            config,
            activation=layer.activation,
            transposed=layer.transposed,
            bias=layer.up_bias,
            **product.build_of("up_forward")._asdict(),
        )
        for config in tiles_of_layer("up_forward", layer.d_model)
    ],
    operations=lambda s: 2.0 * s.rows * s.halves * s.n * s.d,
    least_bytes=lambda s: OPERAND_BYTES * (s.T * s.d + s.halves * s.E * s.n * s.d + (s.halves + 1) * s.rows * s.n),
    kernel=kernel,
)
