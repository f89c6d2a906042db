"""Up projection, forward (cuda/up.cu). MoEBlaze Algorithm 1, lines 3-9; SonicMoE Algorithm 2."""

from functools import lru_cache
from typing import Any

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm.arguments import Array, LowRankTerm
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.formulas import Namespace
from blazeproto.gemm.launch import Plan, dense_box, rows_box
from blazeproto.gemm.product import (
    BOTH,
    PACKAGE,
    PLAIN,
    QUANTIZED_VARIANTS,
    SHAPES,
    TRANSPOSED,
    Build,
    Product,
    Variant,
    build_of,
    quantized_kernel,
    tiled_kernel,
    variants,
)
from blazeproto.gemm.rows import address, element_of, h_box, last_maps, rows_plan, scales, shape_of, variant_of, words
from blazeproto.gemm.sending import Sending, all_that_send, that_sends
from blazeproto.gemm.specification import Specification, low_rank
from blazeproto.gemm.stored import alone
from blazeproto.gemm.tiles import BM, CANDIDATES, E4M3, SLAB, TileConfig, chosen, chosen_for_any, table_of
from blazeproto.runtime import driver


def formula(
    m: Namespace,
    x: Any,
    up_proj: Any,
    *,
    activation: str,
    transposed: bool = False,
    bias: Any = None,
    low: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """h_r = x_t W_up^T + b, act = f(gate) g(up)."""
    h = m.stored(m.product(m.gather(x), up_proj, transposed=transposed, bias=bias, low=low))
    return h, m.activate(h, activation)


def _tile(config: TileConfig, halves: int) -> tuple[int, int]:
    return BM, config.tile_n // halves


SPEC = Specification(
    quantized=True,
    inputs=(
        Array("up_proj", "E h d", transposed="E d h"),
        Array("x", "T d", fetched=True),
        Array("bias", "E h", optional=True),
        *low_rank("E h r", transposed="E r h"),
    ),
    outputs=(Array("h", "R h", tile=_tile), Array("act", "R n", tile=_tile)),
    formula=formula,
)


@SPEC.public
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
    bf16. Or x and up_proj `Quantized` (recipe.py), d a multiple of 16, n of 128, gate and up halves of H → h and act likewise.

    activation: a name of `blazeproto.activations`; G is 2 where it has a gate, else 1. act is computed from h as stored.
    transposed: up_proj is (E, d, G n), read as it lies.
    low: rows (R, r) and factor (E, G n, r), with ``transposed`` (E, r, G n), both bf16: h gets rows factor^T too, as of LoRA.

    config: tiles; default: `tiles.chosen` picks them.  stream: a raw cudaStream_t; default: the caller's current one. Outputs
    that are not given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is
    launched.
    """
    return SPEC.run(launch, locals(), "activation", "transposed", "config")


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """variant: activation, transposed, bias, rank, element, floats."""
    macros = activation_named(variant.activation).macros
    if variant.element is E4M3:
        return quantized_kernel("up_fp8.cu", "up_forward_fp8", config, build, macros, variant, floats=variant.floats)
    config = config or table_of(variant.arch)["up_forward"]
    return tiled_kernel(
        "up.cu",
        "up_forward",
        config,
        build,
        tails=True,
        cluster_widths=(128, 256),
        epilogue_warpgroups=1,
        # Making act is quicker with 56, but consumers that add biases to 256 columns need what 40 leave them, and producers that
        # share weights and wait for rows take 8 more.
        epilogue_registers=40
        if variant.bias and config.tile_n == 256
        else 48
        if variant.sends and config.cluster > 1
        else 56,
        GATHER=1,
        B_MN=variant.transposed,
        HAS_BIAS=variant.bias,
        low_rank=variant.low_rank,
        arch=variant.arch,
        **variant.macros,
        **macros,
    )


@lru_cache(maxsize=SHAPES)
def _plan(
    where: tuple[int, int, int], shape: tuple[int, int, int], variant: Variant, config: TileConfig, build: Build
) -> Plan:
    wanted, element = activation_named(variant.activation), variant.element
    halves = 1 if wanted.layout == "ALTERNATING" else wanted.halves  # whose columns lie apart
    width = shape[2 if variant.transposed else 1]
    moved = width // element.packing
    return rows_plan(
        kernel(config, variant, build),
        config,
        where,
        shape,
        variant,
        mn_major=variant.transposed,
        columns=width // halves,
        halves=halves,
        out0=rows_box(h_box(moved // halves, halves, where[0], (SLAB, SLAB, 1), element)),
        out1=rows_box(dense_box((moved // wanted.halves, where[0]), (SLAB, SLAB), element)),
    )


def launch(
    x: Any,
    up_proj: Any,
    at: Addresses,
    *,
    activation: str,
    transposed: bool = False,
    bias: Any = None,
    low: LowRankTerm | None = None,
    h: Any,
    act: Any,
    config: TileConfig | None = None,
    sending: Sending | None = None,
) -> None:
    """`up_forward` of arrays that have been checked (torch tensors or DeviceArrays, or `Quantized` ones).  low: added to h before
    bias and activation.  sending: `PeerMemory.sending` of the rows of x."""
    if not at.num_rows:
        return
    element = element_of(x)
    if config is None:
        config = chosen("up_forward", at.num_rows, at.num_experts, shape_of(x)[1], shape_of(act)[1], element, at.arch)
    options = {
        "transposed": transposed,
        "bias": bias is not None,
        "activation": activation,
        "floats": isinstance(x, Quantized) and len(x.scales.shape) == 2,
    }
    variant = variant_of(x, up_proj, low, at, gather=True, sends=sending is not None, **options)
    config = that_sends(config, bias is not None) if sending else config
    plan = _plan(at.where, shape_of(up_proj), variant, alone(config, variant.stored), build_of("up_forward"))
    h_at, act_at = address(h), address(act)
    filled = plan.fill(
        (address(up_proj), h_at, act_at, *last_maps(low, up_proj)),
        words(at, config=config, source=address(x), out0=h_at, out1=act_at, bias=bias)
        + scales(x, up_proj, None, h, act)
        + (sending.beside(config, shape_of(x)[1]) if sending else ()),
    )
    driver.launch(*filled, at.stream)


VARIANTS = (
    *variants(activation=ACTIVATIONS, bias=BOTH),
    *variants(activation=TRANSPOSED, transposed=[True], bias=BOTH),
    *variants(activation=TRANSPOSED, transposed=BOTH, rank=[16]),
    *variants(rank=(32, 48, 64)),
)
UP_FORWARD = Product(
    "up_forward",
    up_forward,
    SPEC,
    kernels=lambda: [
        *(kernel(None, variant) for variant in VARIANTS),
        *map(kernel, CANDIDATES["up_forward"]),
        *(kernel(each, Variant(bias=bias, sends=True)) for each, bias in all_that_send("up_forward")),
        *(kernel(None, each._replace(floats=floats)) for each in QUANTIZED_VARIANTS for floats in (False, True)),
    ],
    variants=VARIANTS,
    in_layer=lambda sizes, up, down: [
        (sizes, config, up) for config in chosen_for_any("up_forward", sizes.d, sizes.n, up.element, up.arch)
    ],
    tiles=lambda sizes: chosen("up_forward", sizes.rows, sizes.E, sizes.d, sizes.n),
    kernel=kernel,
    options=("activation", "transposed", "bias", "rank"),
    phases=("forward",),
)
