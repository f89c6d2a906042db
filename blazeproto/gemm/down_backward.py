"""Down projection, backward to the activations (cuda/down_backward.cu): MoEBlaze Algorithm 1, lines 20-28."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import product, reduce
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
from blazeproto.gemm.tiles import BM, CANDIDATES, OPERAND_BYTES, SLAB, TILES, TileConfig, tiles_of_layer, with_tickets
from blazeproto.runtime import checks, driver
from blazeproto.runtime.libraries import any_library


@any_library("blazeproto.gemm.reference", {"dh": "bfloat16", "a_scaled": "bfloat16", "d_scores": "float32"})
def down_backward_act(
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    dispatch: Dispatch,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    low: tuple[Any, Any] | None = None,
    dh: Any = None,
    a_scaled: Any = None,
    d_scores: Any = None,
    workspace: Any = None,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> tuple[Any, Any, Any]:
    """Through the down projection and the activation. MoEBlaze Algorithm 1, lines 20-28; SonicMoE appendix D.

    d_out (T, d), down_proj (E, d, n), h (R, G n), all bf16, scores (P,) or (T, K) fp32, and a dispatch of E experts
    → dh (R, G n) bf16, a_scaled (R, n) bf16 = S act, and d_scores (P,) fp32, zero for pairs without a row. dh may be h itself.

    dA' = d_out[token] W_down; d_scores = ⟨dA', act⟩, which spares keeping Y; dh is the gradient S dA' of act, through f.
    activation: a name of `blazeproto.activations`.  transposed: down_proj is (E, n, d), read as it lies.
    low: rows (R, r) and factor (E, r, n), with ``transposed`` (E, n, r), both bf16: dA' gets rows factor too, as of LoRA.
    workspace: (score_partials(n), R) fp32; made where it is not given.

    config: tiles; default: those of `TILES`.  stream: a raw cudaStream_t; default: the caller's current one. Outputs that are not
    given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is launched.
    """
    arrays = (d_out, down_proj, h, scores, activation, transposed, low, dh, a_scaled, d_scores)
    given = check(Arguments(dispatch, stream, config), *arrays)
    given.write("workspace", workspace, f"{score_partials(given.sizes['n'], config)} R", "float32")
    at, added = given.located(), take_low(given.views)
    launch(**given.views, at=at, activation=activation, transposed=transposed, low=added, config=config)
    return given.arrays["dh"], given.arrays["a_scaled"], given.arrays["d_scores"]


def check(
    given: Arguments,
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    activation: str,
    transposed: bool,
    low: Any,
    dh: Any,
    a_scaled: Any,
    d_scores: Any,
) -> Arguments:
    """The arrays of `down_backward_act`, but for the workspace."""
    halves = activation_named(activation).halves
    given.read("down_proj", down_proj, "E n d" if transposed else "E d n").read("d_out", d_out, "T d", gathered=True)
    width = halves * given.sizes["n"]
    given.read("h", h, f"R {width}").read("scores", scores, "P", "float32")
    read_low(given, low, "E n r" if transposed else "E r n")
    return (
        given.write("dh", dh, f"R {width}", over="h")
        .write("a_scaled", a_scaled, "R n")
        .write("d_scores", d_scores, "P", "float32")
    )


def score_partials(n: int, config: TileConfig | None = None) -> int:
    """Column tiles of `down_backward_act` for width n, each of which leaves one partial dS a row.

    config: its tiles; default: those of `TILES`. TypeError or ValueError for an n that is no int of 0 or more.
    """
    checks.integer("n", n, least=0)
    return -(-n // (config or TILES["down_backward_act"]).tile_n)


def kernel(
    config: TileConfig | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    low_rank: int = 0,
    debug: tuple[str, ...] = (),
    sources: Path | None = None,
) -> Kernel:
    """With these tiles, which must be 256 wide and not deferred, and this activation.  transposed: weights (E, n, d).
    low_rank: as `low_rank_of` has it."""
    config = config or TILES["down_backward_act"]
    # A stage holds gate, up and A' of 64 hidden units; dA' stays in the accumulators, beside which nothing can be deferred.
    if config.tile_n != 256 or config.deferred:
        raise ValueError(f"config: expected tile_n=256 and deferred=False for down_backward_act, got {config}")
    return tiled_kernel(
        "down_backward.cu",
        "down_backward",
        config,
        debug,
        sources,
        tickets=True,
        GATHER=1,
        B_MN=not transposed,
        low_rank=low_rank,
        **activation_named(activation).macros,
    )


@lru_cache(maxsize=SHAPES)
def _plan(
    where: tuple[int, int, int],
    shape: tuple[int, int, int],
    activation: str,
    transposed: bool,
    rank: int,
    config: TileConfig,
    build: product.Build,
) -> Plan:
    wanted = activation_named(activation)
    halves = 1 if wanted.alternating else wanted.halves  # whose columns lie apart
    n, d = shape[1:] if transposed else shape[:0:-1]
    of_h = n * wanted.halves // halves
    factor = (shape[0], n, rank) if transposed else (shape[0], rank, n)
    return rows_plan(
        kernel(config, activation=activation, transposed=transposed, low_rank=low_rank_of(rank), **build._asdict()),
        config,
        where,
        gather=True,
        reduction=d,
        columns=n,
        tile_columns=config.tile_n,
        weights=weight_box(shape, n, config, transposed=not transposed),
        h=h_box(of_h, halves, where[0], (SLAB, BM, halves)),
        out0=h_box(of_h, halves, where[0], (SLAB, SLAB, 1)),
        out1=dense_box((n, where[0]), (SLAB, SLAB)),
        rank=rank,
        low_weights=weight_box(factor, n, config, transposed=not transposed) if rank else None,
    )


def launch(
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    at: Addresses,
    *,
    activation: str,
    transposed: bool = False,
    low: LowRank | None = None,
    dh: Any,
    a_scaled: Any,
    d_scores: Any,
    workspace: Any,
    config: TileConfig | None = None,
) -> None:
    """`down_backward_act` of arrays that have been checked; the partial dS of the column tiles are summed behind it.
    low: added to dA'."""
    if at.num_rows:
        config = config or with_tickets("down_backward_act", at.num_rows, at.num_experts, d_out.shape[1])
        build = product.build_of("down_backward_act")
        plan = _plan(at.where, down_proj.shape, activation, transposed, rank_of(low), config, build)
        dh_at, a_at = dh.data_ptr(), a_scaled.data_ptr()
        addresses = words(
            at,
            config=config,
            source=d_out.data_ptr(),
            out0=dh_at,
            out1=a_at,
            scores=scores.data_ptr(),
            sums=workspace.data_ptr(),
        )
        maps = (down_proj.data_ptr(), h.data_ptr(), dh_at, a_at, *low_maps(low))
        driver.launch(*plan.fill(maps, addresses), at.stream)
    reduce.launch_reduce_scores_grad(workspace, d_scores, at)


DOWN_BACKWARD_ACT = Product(
    "down_backward_act",
    down_backward_act,
    kernels=lambda: [
        *(kernel(activation=activation) for activation in ACTIVATIONS),
        *(kernel(activation=activation, transposed=True) for activation in TRANSPOSED),
        *(kernel(activation=name, transposed=lies, low_rank=1) for name in TRANSPOSED for lies in (False, True)),
        *(kernel(low_rank=count) for count in (2, 3, 4)),
        *(kernel(config) for config in CANDIDATES["down_backward_act"]),
    ],
    for_layer=lambda layer: [
        *(
            kernel(
                config,
                activation=layer.activation,
                transposed=layer.transposed,
                **product.build_of("down_backward_act")._asdict(),
            )
            for config in tiles_of_layer("down_backward_act", layer.d_model)
        ),
        reduce.kernel("reduce_scores_grad", 0, product.build_of("down_backward_act").sources),
    ],
    operations=lambda s: 2.0 * s.rows * s.n * s.d,
    least_bytes=lambda s: OPERAND_BYTES * (s.T * s.d + s.E * s.n * s.d + (2 * s.halves + 1) * s.rows * s.n),
    kernel=kernel,
)
