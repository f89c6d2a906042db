"""Down projection, backward to the activations (cuda/down_backward.cu): MoEBlaze Algorithm 1, lines 20-28."""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.dispatch.structures import Addresses, Dispatch
from blazeproto.gemm import reduce
from blazeproto.gemm.arguments import Array, LowRankTerm
from blazeproto.gemm.compile import Kernel
from blazeproto.gemm.formulas import Namespace
from blazeproto.gemm.launch import Plan, dense_box, rows_box
from blazeproto.gemm.product import (
    BOTH,
    PACKAGE,
    PLAIN,
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
from blazeproto.gemm.specification import Specification, by_tile, low_rank
from blazeproto.gemm.stored import alone
from blazeproto.gemm.tiles import BM, CANDIDATES, E4M3, SLAB, TILES, TileConfig, chosen, chosen_for_any, table_of
from blazeproto.runtime import checks, driver


def formula(
    m: Namespace,
    d_out: Any,
    down_proj: Any,
    h: Any,
    scores: Any,
    *,
    activation: str,
    transposed: bool = False,
    low: tuple[Any, Any] | None = None,
    act: Any = None,
    needs: Collection[str] = ("dh", "a_scaled", "d_scores"),
) -> tuple[Any, Any, Any]:
    """dA' = dO_t W_down; dS = ⟨dA', act⟩ (SonicMoE §3: no need for Y); A' = S act; dH from the gradient S dA' of act.

    act: where it was kept; else it is made again from h.  needs: the outputs that are made; the others are None.
    """
    dh = a_scaled = d_scores = None
    score = m.of_rows(scores)
    if act is None and ("a_scaled" in needs or "d_scores" in needs):
        act = m.activate(h, activation)
    if "a_scaled" in needs:
        a_scaled = score * act
    if "dh" in needs or "d_scores" in needs:
        d_act = m.product(m.gather(d_out), down_proj, transposed=not transposed, low=low)
        dh = m.activate_backward(h, score * d_act, activation) if "dh" in needs else None
        d_scores = m.by_pair(m.dot(d_act, act)) if "d_scores" in needs else None
    return dh, a_scaled, d_scores


SPEC = Specification(
    quantized=True,
    inputs=(
        Array("down_proj", "E d n", transposed="E n d", quantized="E n d"),
        Array("d_out", "T d", fetched=True),
        Array("h", "R h"),
        Array("scores", "P", "float32"),
        *low_rank("E r n", transposed="E n r", quantized="E n r"),
    ),
    outputs=(
        Array("dh", "R h", over="h", tile=by_tile),
        Array("a_scaled", "R n", tile=by_tile),
        Array("d_scores", "P", "float32"),
    ),
    formula=formula,
    workspace=lambda letters, config: (score_partials(letters["n"], config), letters["R"]),
)


@SPEC.public
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

    d_out, down_proj (the transpose, E, n, d) and h may be `Quantized` (`up_forward`); then dh and a_scaled are too.

    dA' = d_out[token] W_down; d_scores = ⟨dA', act⟩, which spares keeping Y; dh is the gradient S dA' of act, through f.
    activation: a name of `blazeproto.activations`.  transposed: down_proj is (E, n, d), read as it lies.
    low: rows (R, r) and factor (E, r, n), with ``transposed`` or quantized operands (E, n, r), both bf16: dA' gets rows factor
    too, as of LoRA.
    workspace: (score_partials(n), R) fp32; made where it is not given.

    config: tiles; default: `tiles.chosen` picks them.  stream: a raw cudaStream_t; default: the caller's current one. Outputs
    that are not given are made, of the kind of array that came. TypeError or ValueError names the argument, before anything is
    launched.
    """
    return SPEC.run(launch, locals(), "activation", "transposed", "config")


def score_partials(n: int, config: TileConfig | None = None) -> int:
    """Column tiles of `down_backward_act` for width n, each of which leaves one partial dS a row.

    config: its tiles; default: from `TILES`. TypeError or ValueError for an n that is no int of 0 or more.
    """
    checks.integer("n", n, least=0)
    checks.instance("config", config, TileConfig, optional=True)
    return -(-n // (config or TILES["down_backward_act"]).tile_n)


def kernel(config: TileConfig | None = None, variant: Variant = PLAIN, build: Build = PACKAGE) -> Kernel:
    """With tiles that are 256 wide and not deferred.  variant: activation, transposed, rank, element."""
    macros = activation_named(variant.activation).macros
    if variant.element is E4M3:
        macros = {**macros, "HAS_BIAS": 0}
        return quantized_kernel("down_backward_fp8.cu", "down_backward_fp8", config, build, macros, variant)
    config = config or table_of(variant.arch)["down_backward_act"]
    # A stage holds gate, up and A' of 64 hidden units; dA' stays in the accumulators, beside which nothing can be deferred.
    fits = config.tile_n == 256 and not config.deferred
    checks.require(fits, "config", "tile_n=256 and deferred=False for down_backward_act", config)
    return tiled_kernel(
        "down_backward.cu",
        "down_backward",
        config,
        build,
        tails=True,
        cluster_widths=(256,),
        GATHER=1,
        B_MN=not variant.transposed,
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
    n = shape[1 if variant.transposed else 2]
    moved = n // element.packing
    of_h = moved * wanted.halves // halves
    return rows_plan(
        kernel(config, variant, build),
        config,
        where,
        shape,
        variant,
        mn_major=not variant.transposed,
        columns=n,
        h=h_box(of_h, halves, where[0], (SLAB, BM, halves), element),
        out0=rows_box(h_box(of_h, halves, where[0], (SLAB, SLAB, 1), element)),
        out1=rows_box(dense_box((moved, where[0]), (SLAB, SLAB), element)),
        biased=False,
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
    low: LowRankTerm | None = None,
    dh: Any,
    a_scaled: Any,
    d_scores: Any,
    workspace: Any,
    config: TileConfig | None = None,
    sending: Sending | None = None,
) -> None:
    """`down_backward_act` of arrays that have been checked; the partial dS of the column tiles are summed behind it.
    low: added to dA'.  A quantized down_proj is the transpose.  sending: `PeerMemory.sending` of the rows of d_out."""
    if at.num_rows:
        element, widths = element_of(d_out), (shape_of(d_out)[1], shape_of(a_scaled)[1])
        config = config or chosen("down_backward_act", at.num_rows, at.num_experts, *widths, element, at.arch)
        lies = transposed or element is E4M3
        options = {"transposed": lies, "activation": activation, "sends": sending is not None}
        variant = variant_of(d_out, down_proj, low, at, gather=True, **options)
        config = that_sends(config) if sending else config
        plan = _plan(
            at.where, shape_of(down_proj), variant, alone(config, variant.stored), build_of("down_backward_act")
        )
        dh_at, a_at = address(dh), address(a_scaled)
        addresses = words(
            at,
            config=config,
            source=address(d_out),
            out0=dh_at,
            out1=a_at,
            scores=scores.data_ptr(),
            sums=workspace.data_ptr(),
        )
        maps = (address(down_proj), address(h), dh_at, a_at, *last_maps(low, down_proj))
        addresses += sending.beside(config, widths[0]) if sending else ()
        driver.launch(*plan.fill(maps, addresses + scales(d_out, down_proj, h, dh, a_scaled)), at.stream)
    reduce.launch_reduce_scores_grad(workspace, d_scores, at)


VARIANTS = (
    *variants(activation=ACTIVATIONS),
    *variants(activation=TRANSPOSED, transposed=[True]),
    *variants(activation=TRANSPOSED, transposed=BOTH, rank=[16]),
    *variants(rank=(32, 48, 64)),
)
DOWN_BACKWARD_ACT = Product(
    "down_backward_act",
    down_backward_act,
    SPEC,
    kernels=lambda: [
        *(kernel(None, variant) for variant in VARIANTS),
        *map(kernel, CANDIDATES["down_backward_act"]),
        *(kernel(each, Variant(sends=True)) for each, _ in all_that_send("down_backward_act")),
        *(kernel(None, variant) for variant in variants(element=[E4M3], rank=(0, 16))),
    ],
    parts=lambda sizes, config, variant, build: [
        kernel(config, variant, build),
        reduce.kernel("reduce_scores_grad", 0, build.sources),
    ],
    variants=VARIANTS,
    in_layer=lambda sizes, up, down: [
        (sizes, config, down)
        for config in chosen_for_any("down_backward_act", sizes.d, sizes.n, down.element, down.arch)
    ],
    tiles=lambda sizes: chosen("down_backward_act", sizes.rows, sizes.E, sizes.d, sizes.n),
    kernel=kernel,
    options=("activation", "transposed", "rank"),
    phases=("backward",),
)
