"""Weight gradients (cuda/weight.cu): sums over an expert's rows, which stream-K work units may cut into partials.

    dW_down[e] = Σ dO[token]^T A'     MoEBlaze Algorithm 1, line 18; SonicMoE Algorithm 3
    dW_up[e]   = Σ dH^T x[token]      MoEBlaze Algorithm 1, line 29; SonicMoE Algorithm 5

Quantized operands are weight_fp8.py's.

weight_schedule.cuh draws the units. Their partials lie in a workspace; how many units there may be, and so how large it is,
follows from shapes and device alone.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from itertools import product as every
from pathlib import Path
from typing import Any

from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import quantize, weight_fp8
from blazeproto.gemm.arguments import Array
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.e4m3 import Quantized
from blazeproto.gemm.launch import Params, Plan, dense_box, num_sms, persistent_grid, rows_box
from blazeproto.gemm.product import (
    BOTH,
    PACKAGE,
    SHAPES,
    Build,
    Product,
    Sizes,
    Variant,
    build_of,
    tiled_kernel,
    variants,
)
from blazeproto.gemm.specification import Specification, by_tile
from blazeproto.gemm.tiles import (
    BF16,
    BK,
    BM,
    CANDIDATES,
    E4M3,
    FACTOR_GRADIENT,
    SLAB,
    TILES,
    WARPGROUP,
    TileConfig,
    table_of,
    tiles_for,
)
from blazeproto.runtime import checks, driver
from blazeproto.runtime.arch import HOPPER, Arch, arch_on
from blazeproto.runtime.arrays import current_device, view
from blazeproto.runtime.libraries import in_host_memory

DOWN, UP = "down_backward_weight", "up_backward_weight"
GATHERED = Variant(True)
WORKSPACE_PART = 0.2  # of a weight gradient and its ordered rows
LEAST_UNITS = 0.4  # of the clusters
BUSY_ENOUGH = 0.9  # of the clusters, in the mean over the rounds that the tiles of one expert take
SUM_BLOCKS = 8  # of weight_sum.cu for each CTA's tile
SUM_THREADS = 2 * WARPGROUP  # of such a block: as many as weight.cu has consumers

WEIGHT_PARAMS = Params(
    "WeightParams",
    "params.cuh",
    maps=("ordered", "in_order", "out"),
    words=(
        "gathered_rows",
        "ordered_rows",
        "pairs.pair_indices",
        "pairs.pair_tokens",
        "pairs.multiplier",
        "offsets",
        "out_f32",
        "unfinished",
        "partials",
    ),
    numbers=("experts", "gathered_width", "ordered_width", "accumulate", "units"),
)


def down_formula(m: Any, d_out: Any, a_scaled: Any, *, gather: bool = True) -> Any:
    """dW_down[e] = Σ dO_t^T A'_r over an expert's rows, 0 where it has none."""
    return m.outer(m.gather(d_out) if gather else d_out, a_scaled)


def up_formula(m: Any, dh: Any, x: Any, *, gather: bool = True) -> Any:
    """dW_up[e] = Σ dH_r^T x_t over an expert's rows, 0 where it has none."""
    return m.outer(dh, m.gather(x) if gather else x)


def _workspace(name: str, shape: str, letters: Mapping[str, int], config: TileConfig | None) -> tuple[int, ...]:
    """A specification's, of a gradient of this shape."""
    if letters.get("quantized"):
        return ()
    where, dw = (letters["R"], letters["E"], current_device()), tuple(letters[letter] for letter in shape.split())
    elements = workspace_elements(name, where, dw, config, arch_on(where[2]))
    return (elements,) if elements else ()


_DOWN = Specification(
    quantized=True,
    inputs=(Array("d_out", "T d", ordered="R d", fetched=True), Array("a_scaled", "R n")),
    outputs=(Array("dw", "E d n", f32=True, tile=by_tile),),
    formula=down_formula,
    workspace=partial(_workspace, DOWN, "E d n"),
)
# weight.cu has the gathered rows' columns, d of them, down its tiles, which it stores transposed in dW_up.
_UP = Specification(
    quantized=True,
    inputs=(Array("dh", "R h"), Array("x", "T d", ordered="R d", fetched=True, operand="x_of_dw")),
    outputs=(Array("dw", "E h d", f32=True, tile=lambda config, halves: (config.tile_n, BM)),),
    formula=up_formula,
    workspace=partial(_workspace, UP, "E h d"),
)


@_DOWN.public
def down_backward_weight(
    d_out: Any,
    a_scaled: Any,
    dispatch: Dispatch,
    *,
    dw: Any = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of d_out[token]^T a_scaled over an expert's rows. MoEBlaze Algorithm 1, line 18; SonicMoE Algorithm 3.

    d_out (T, d) or (R, d), a_scaled (R, n), both bf16, and a dispatch of E experts → dw (E, d, n) bf16, or fp32 if ``dw`` is.
    Or d_out and a_scaled `Quantized`, d_out by token.

    Experts without rows get zeros.
    gather: False where d_out's rows are in expert order already, (R, d).  accumulate: add to an fp32 ``dw``.
    workspace: (weight_workspace(),) fp32; made where it is not given. Reductions over very many rows are cut and their partials
    summed, in order.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return _checked_launch(DOWN, _DOWN, locals(), ("d_out", "a_scaled"))


@_UP.public
def up_backward_weight(
    dh: Any,
    x: Any,
    dispatch: Dispatch,
    *,
    dw: Any = None,
    gather: bool = True,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> Any:
    """dw[e] = sum of dh^T x[token] over an expert's rows. MoEBlaze Algorithm 1, line 29; SonicMoE Algorithm 5.

    dh (R, G n), x (T, d) or (R, d), both bf16, and a dispatch of E experts → dw (E, G n, d) bf16, or fp32 if ``dw`` is.
    Or dh and x `Quantized`, x by token.

    gather: False where x's rows are in expert order already, (R, d).  accumulate: add to an fp32 ``dw``.
    workspace: (weight_workspace(),) fp32, as of `down_backward_weight`.

    config: tiles; default: from `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    return _checked_launch(UP, _UP, locals(), ("x", "dh"))


def _checked_launch(name: str, spec: Specification, call: Mapping[str, Any], operands: tuple[str, str]) -> Any:
    """Either product; the gradient. operands: names, the gathered one first."""
    given = spec.check(call)
    out = given.views["dw"]
    adds = out.dtype == "float32" or not call["accumulate"]
    checks.require(adds, "accumulate", "an fp32 dw to add to", "bfloat16")
    rows, ordered = (given.operands()[operand] for operand in operands)
    options = {option: call[option] for option in ("accumulate", "config")} | {"f32": out.dtype == "float32"}
    if isinstance(rows, Quantized):
        checks.require(call["gather"], "gather", "True with quantized operands", False)
        weight_fp8.launch_all(name, rows, ordered, given.located(), transposed=name == UP, dw=out, **options)
    else:
        options |= {"gather": call["gather"], "workspace": given.views.get("workspace")}
        launch(name, rows, ordered, given.located(), dw=out, **options)
    return spec.results(given)


def weight_workspace(product: str, dw: Any, dispatch: Dispatch, config: TileConfig | None = None) -> int:
    """fp32 elements of the workspace of a weight gradient: by shapes and device alone; may be 0, and is in host memory.

    product: "down_backward_weight" or "up_backward_weight".  dw: (E, d, n) or (E, G n, d), bf16 or fp32.
    dispatch: that it will be called with.  config: tiles; default: from `TILES`. ValueError for another product, TypeError
    or ValueError for a dw that is no array.
    """
    checks.one_of("product", product, (DOWN, UP))
    checks.instance("dispatch", dispatch, Dispatch)
    checks.instance("config", config, TileConfig, optional=True)
    if in_host_memory(dw):
        return 0
    shape, where = view(dw, "dw").shape, (dispatch.num_rows, dispatch.num_experts, current_device())
    return workspace_elements(product, where, shape, config, arch_on(where[2]))


# --- Kernels ---------------------------------------------------------------------------------------------------------------


def kernel(config: TileConfig | None = None, variant: Variant = GATHERED, build: Build = PACKAGE) -> Kernel:
    """variant: transposed, f32, gather, element."""
    if variant.element is E4M3:
        return weight_fp8.kernel(config, variant, build)
    config = config or table_of(variant.arch)[UP if variant.transposed else DOWN]
    macros = {"GATHER": variant.gather, "TRANSPOSED": variant.transposed, "OUT_F32": variant.f32}
    options: dict[str, Any] = {"cluster_widths": (128, 256), "widths": (64, 128, 256), "arch": variant.arch}
    return tiled_kernel("weight.cu", "weight_gradient", config, build, **options, **macros)


@cache
def sum_kernel(tile_n: int, sources: Path | None = None) -> Kernel:
    """The kernel that sums the partials of a weight gradient with tiles of that width."""
    macros = {"BM": BM, "BN": tile_n, "SLICES": SUM_BLOCKS, "THREADS": SUM_THREADS, "WARPGROUP": WARPGROUP}
    return Kernel("weight_sum.cu", "weight_sum", macros, sources=sources)


# --- Work units of stream-K and their workspace --------------------------------------------------------------------------------


def _widths(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Widths of the gathered and of the ordered rows of a weight gradient of ``shape``."""
    _, outer, inner = shape
    return (inner, outer) if name == UP else (outer, inner)


def _tiles(config: TileConfig, experts: int, d: int, width: int) -> int:
    return experts * -(-d // (BM * config.cluster)) * -(-width // config.tile_n)


def _partials_offset(units: int) -> int:
    """Bytes of the workspace before the partials: an int2 a unit, then 16-byte aligned."""
    return -(-8 * units // 16) * 16


def _unit_bytes(config: TileConfig) -> int:
    """Bytes of the two partials that a unit may leave."""
    return 2 * config.cluster * BM * config.tile_n * 4


@lru_cache(maxsize=SHAPES)
def _units(name: str, where: tuple[int, int, int], shape: tuple[int, ...], config: TileConfig) -> int:
    """Slices that a weight gradient may be cut into (weight_schedule.cuh): one a cluster of CTAs, if their partials take no
    more than WORKSPACE_PART of the gradient and its ordered rows, for there a layer's memory may peak. None, 0, if
    they would be too few to gain anything, or if the whole tiles of one expert keep the clusters busy."""
    (num_rows, _, device), experts = where, shape[0]
    d, width = _widths(name, shape)
    clusters = persistent_grid(device, config.cluster, _tiles(config, experts, d, width)) // config.cluster
    tiles = _tiles(config, 1, d, width)
    if tiles >= BUSY_ENOUGH * clusters * -(-tiles // clusters):
        return 0
    budget = WORKSPACE_PART * BF16.bytes * (experts * d * width + num_rows * width)
    units = min(clusters, int(budget / _unit_bytes(config))) if num_rows else 0
    return units if units >= LEAST_UNITS * clusters else 0


def workspace_elements(
    name: str,
    where: tuple[int, int, int],
    shape: tuple[int, ...],
    config: TileConfig | None = None,
    arch: Arch = HOPPER,
) -> int:
    """`weight_workspace` by (rows, experts, device) and the gradient's shape. 0 but for Hopper's kernels: others cut no sums."""
    config = config or table_of(arch)[name]
    units = _units(name, where, shape, config) if arch is HOPPER else 0
    return (_partials_offset(units) + units * _unit_bytes(config)) // 4


# --- Launch ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=SHAPES)
def _plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    accumulate: bool,
    units: int,
    variant: Variant,
    config: TileConfig,
    build: Build,
) -> tuple[Plan, Kernel, tuple[int, int], tuple[int, ...]]:
    """The plan of the gradient; and the kernel, the grid and the numbers of the sum of its partials."""
    num_rows, _, device = where
    experts, outer, inner = shape
    (d, width), element = _widths(UP if variant.transposed else DOWN, shape), variant.element
    ordered = rows_box(dense_box((width, num_rows), (SLAB, BK), element)) if num_rows else None
    in_order = rows_box(dense_box((d, num_rows), (SLAB, BK), element)) if num_rows and not variant.gather else None
    out = None if variant.f32 else dense_box((inner, outer, experts), (SLAB, SLAB, 1))
    gradient = Plan(
        kernel(config, variant, build),
        WEIGHT_PARAMS,
        (ordered, in_order, out),
        (experts, d, width, int(accumulate), units),
        grid=persistent_grid(device, config.cluster, _tiles(config, experts, d, width)),
        device=device,
    )
    sum_numbers = (units, config.cluster, d, width, int(variant.transposed), int(variant.f32), int(accumulate))
    sum_grid = (min(num_sms(device), units * config.cluster * SUM_BLOCKS), 1)
    return gradient, sum_kernel(config.tile_n, build.sources), sum_grid, sum_numbers


def launch(
    name: str,
    rows: Any,
    ordered: Any,
    at: Addresses,
    *,
    dw: Any,
    gather: bool = True,
    f32: bool,
    accumulate: bool = False,
    workspace: Any = None,
    config: TileConfig | None = None,
) -> None:
    """Either product (``name``) of arrays that have been checked. rows: the gathered operand, or, with gather False, in order.
    f32: whether dw is.  workspace: None makes every tile whole."""
    config = config or table_of(at.arch)[name]
    units = 0 if workspace is None or at.arch is not HOPPER else _units(name, at.where, dw.shape, config)
    variant, build = Variant(gather, name == UP, f32=f32, arch=at.arch), build_of(name)
    gradient, summing, sum_grid, numbers = _plan(at.where, dw.shape, accumulate, units, variant, config, build)
    rows_at, ordered_at, dw_at = rows.data_ptr(), ordered.data_ptr(), dw.data_ptr()
    unfinished = workspace.data_ptr() if units else 0
    partials = unfinished + _partials_offset(units)
    by_rows = (ordered_at,) if gather else (ordered_at, rows_at)
    maps = (*(by_rows if at.num_rows else ()), *(() if f32 else (dw_at,)))
    inputs = (rows_at, ordered_at, *at.pair_to_token, at.expert_token_offsets)
    driver.launch(*gradient.fill(maps, (*inputs, dw_at if f32 else 0, unfinished, partials)), at.stream)
    if units:
        words = (unfinished, partials, dw_at, *numbers)
        driver.launch(summing.handle(at.device), sum_grid, SUM_THREADS, 0, at.stream, words)


def _kernels(name: str) -> list[Kernel]:
    configs, transposed = dict.fromkeys((TILES[name], *CANDIDATES[name])), [name == UP]
    calls = (
        *every(configs, variants(gather=[True], transposed=transposed, f32=BOTH)),
        *every((TILES[name], FACTOR_GRADIENT), variants(gather=BOTH, transposed=transposed, f32=BOTH)),
    )
    quantized = [kernel(None, variant) for variant in variants(f32=BOTH, element=[E4M3])]
    return [*(kernel(*call) for call in calls), *(sum_kernel(config.tile_n) for config in configs), *quantized]


def _parts(sizes: Sizes, config: TileConfig, variant: Variant, build: Build) -> list[Kernel]:
    """The gradient's, and what sums its partials or transposes its operands."""
    others = quantize.transposing() if variant.element is E4M3 else [sum_kernel(config.tile_n, build.sources)]
    return [kernel(config, variant, build), *others]


def _product(name: str, run: Callable[..., Any], spec: Specification) -> Product:
    return Product(
        name,
        run,
        spec,
        kernels=lambda: _kernels(name),
        variants=tuple(variants(gather=BOTH, transposed=[name == UP], f32=BOTH)),
        parts=_parts,
        in_layer=lambda sizes, up, down: [
            (
                sizes,
                tiles_for(name, sizes.d, up.element, up.arch),
                Variant(True, name == UP, f32=down.f32, element=up.element, arch=up.arch),
            )
        ],
        tiles=lambda sizes: TILES[name],
        kernel=kernel,
        variant=Variant(True, name == UP),
        options=("gather", "f32"),
        phases=("backward",),
    )


DOWN_BACKWARD_WEIGHT = _product(DOWN, down_backward_weight, _DOWN)
UP_BACKWARD_WEIGHT = _product(UP, up_backward_weight, _UP)
