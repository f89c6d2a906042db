"""The one list of products: compile-all, `prepare`, the tuner, benchmarks and tests read it."""

from pathlib import Path
from typing import Any

from blazeproto.activations import activation_named
from blazeproto.gemm import logits, quantize
from blazeproto.gemm.combine import COMBINE
from blazeproto.gemm.compile import Kernel, compile_many
from blazeproto.gemm.down_backward import DOWN_BACKWARD_ACT
from blazeproto.gemm.dsd import DDS, DSD
from blazeproto.gemm.e4m3 import BLOCK
from blazeproto.gemm.fused import DOWN_FORWARD_FUSED, UP_BACKWARD_ACT_FUSED
from blazeproto.gemm.linear import DOWN_FORWARD, GROUPED_MM, UP_BACKWARD_ACT, grouped_mm
from blazeproto.gemm.product import BOTH, PACKAGE, Build, Product, Sizes, Variant, variants
from blazeproto.gemm.recipe import RECIPES, Recipe, name_of
from blazeproto.gemm.reduce import BIAS_SCORE_GRAD, EXPERT_ROW_SUM
from blazeproto.gemm.sdd import SDD
from blazeproto.gemm.tiles import BF16, CANDIDATES, CHUNK, E4M3, MAX_EXPERTS, QUANTIZED_CANDIDATES, TileConfig
from blazeproto.gemm.up import UP_FORWARD
from blazeproto.gemm.weight import DOWN_BACKWARD_WEIGHT, UP_BACKWARD_WEIGHT
from blazeproto.runtime import checks, optional
from blazeproto.runtime.arch import AMPERE, ARCHES, HOPPER, arch_of, arch_on, capability_of

PRODUCTS = {
    entry.name: entry
    for entry in (
        UP_FORWARD,
        DOWN_FORWARD,
        DOWN_FORWARD_FUSED,
        COMBINE,
        DOWN_BACKWARD_ACT,
        BIAS_SCORE_GRAD,
        DOWN_BACKWARD_WEIGHT,
        UP_BACKWARD_ACT,
        UP_BACKWARD_ACT_FUSED,
        UP_BACKWARD_WEIGHT,
        EXPERT_ROW_SUM,
    )
}


BLOCK_PRODUCTS = {entry.name: entry for entry in (SDD, DSD, DDS)}
"""Those that take a topology (blocks.py) and no dispatch; `MoE` has none of them."""

TWINS = {name: entry.spec.twin_of(entry.run) for name, entry in (PRODUCTS | BLOCK_PRODUCTS).items()}
TWINS["grouped_mm"] = GROUPED_MM.twin_of(grouped_mm)
"""The specification of each public function of arrays, by its name: the same computed by NumPy, with ``round_to`` beside
(specification.py)."""


def kernel_for(
    name: str,
    config: TileConfig | None = None,
    *,
    debug: tuple[str, ...] = (),
    sources: Path | None = None,
    low_rank: int = 0,
    precision: str | Recipe = "bf16",
    **variant: Any,
) -> Kernel:
    """The kernel of a product, by default with the tiles it runs with.

    name: of a product that has tiles.  config: its tiles; default: from `TILES`.
    variant: what the product can be compiled for, of the fields of `blazeproto.gemm.product.Variant`: activation, bias, f32, ...
    low_rank: wgmma in the last stage of low-rank factors.  precision: "bf16", or "fp8" or "fp8_rollout" for quantized operands.
    debug: further macros (ptx.cuh).  sources: in place of the package's.
    ValueError for an unknown product, activation or impossible tiles, TypeError for an unknown variant.
    """
    checks.instance("config", config, TileConfig, optional=True)
    checks.instance("debug", debug, tuple)
    checks.instance("sources", sources, Path, optional=True)
    checks.integer("low_rank", low_rank, least=0)
    products = PRODUCTS | BLOCK_PRODUCTS
    kernels = {key: entry.kernel for key, entry in products.items() if entry.kernel}
    checks.one_of("product", name, tuple(kernels))
    if low_rank:
        variant["rank"] = low_rank * BF16.k
    entry, element = products[name], products[name].element_of(precision)
    options = [each for each in entry.options if not element.scales or each not in ("gather", "transposed")]
    if unknown := variant.keys() - {*options}:
        raise TypeError(f"{name}: expected of {', '.join(options)}, got {', '.join(sorted(unknown))}")
    variant |= {"element": element, "floats": RECIPES[name_of(precision)].floats}
    return kernels[name](config, entry.variant._replace(**variant), Build(debug, sources))


def candidates(name: str, precision: str | Recipe = "bf16") -> list[TileConfig]:
    """Tile configurations worth timing for the product called ``name``. ValueError for one that has no tiles.
    precision: as for `kernel_for`."""
    checks.one_of("product", name, tuple(CANDIDATES))
    return list(QUANTIZED_CANDIDATES if RECIPES[name_of(precision)].element.scales else CANDIDATES[name])


def kernels_by_use() -> dict[Kernel, str]:
    """Every kernel that the layers of tests and benchmarks reach, and every candidate of the tuner, once; not yet compiled. By
    kernel the first product that has it, or what else it is for."""
    of_products = {name: [*entry.kernels(), *_of_ampere(entry)] for name, entry in (PRODUCTS | BLOCK_PRODUCTS).items()}
    uses = of_products | {
        "router's logits": logits.kernels(),
        "quantize": [*quantize.kernels(), *quantize.kernels(floats=True)],
    }
    found: dict[Kernel, str] = {}
    for name, kernels in uses.items():
        for kernel in kernels:
            found.setdefault(kernel, name)
    return found


def _of_ampere(entry: Product) -> list[Kernel]:
    variants = [variant._replace(arch=AMPERE) for variant in entry.variants]
    return [entry.kernel(None, variant, PACKAGE) for variant in variants if entry.kernel]


def all_kernels() -> list[Kernel]:
    """Those of `kernels_by_use`."""
    return list(kernels_by_use())


def quantized_kernels(
    activation: str = "swiglu", precision: str | Recipe = "fp8", *, up_bias: bool = False, down_bias: bool = False
) -> list[Kernel]:
    """Those of the products that a layer of quantized operands launches."""
    every = variants(activation=[activation], element=[E4M3], f32=BOTH, floats=[RECIPES[name_of(precision)].floats])
    entries = [entry for entry in PRODUCTS.values() if E4M3 in entry.elements]
    launched = (
        kernel
        for entry in entries
        for each in every
        for kernel in entry.for_layer(
            Sizes(0, BLOCK, BLOCK, 1, 1), each._replace(bias=up_bias), each._replace(bias=down_bias)
        )
    )
    return [*dict.fromkeys(launched)]


def prepare(
    d_model: int,
    d_expert: int,
    num_experts: int,
    top_k: int | None,
    *,
    activation: str = "swiglu",
    up_bias: bool = False,
    down_bias: bool = False,
    fused: bool = False,
    fused_backward: bool = False,
    f32_weight_grads: bool = False,
    transposed: bool = False,
    precision: str | Recipe = "bf16",
    backend: str = "auto",
    device: int | None = None,
    jobs: int | None = None,
) -> list[Kernel]:
    """Compile, and with a GPU load, all kernels of this package that a layer's forward and backward launch, whatever the number
    of tokens: a CUDA-graph capture can do neither. A wide layer may sum its rows in slices of
    columns, each width by a kernel of its own.

    d_model, d_expert, num_experts: d, n, E.  top_k: K, None where the number of experts per token varies.
    activation: a name of `blazeproto.activations`.
    up_bias, down_bias: whether the projections have biases.  fused: whether `down_forward_fused` runs instead of
    `down_forward` and `combine`.  fused_backward: whether `up_backward_act_fused` runs instead of `up_backward_act` and
    `combine`.  f32_weight_grads: whether weight gradients are fp32 (as they are in chunks).
    transposed: whether the weights are (E, d, G n) and (E, n, d), as in gpt-oss.
    precision: as in `moe_mlp`; of quantized operands their kernels too.
    backend: whose kernels: "hopper", "ampere" or "auto", the GPU's, without a GPU Hopper's.
    device: CUDA ordinal; default: CuPy's current device if that runs the kernels, else nothing is loaded.
    jobs: compilers that run at a time, in processes of their own; default: one a core.

    Returns the kernels. ValueError for a layer that the products don't take; CompileError if the compiler refuses.
    """
    activation_named(activation)
    for name, width in (("d_model", d_model), ("d_expert", d_expert)):
        whole = checks.integer(name, width) % CHUNK == 0
        checks.require(whole and width >= 1, name, f"a positive multiple of {CHUNK}", width)
    few = 1 <= checks.integer("num_experts", num_experts) <= MAX_EXPERTS
    checks.require(few, "num_experts", f"1 to {MAX_EXPERTS}", num_experts)
    some = top_k is None or checks.integer("top_k", top_k) >= 1
    checks.require(some, "top_k", "at least 1, or None if it varies", top_k)
    for name, value, least in (("device", device, 0), ("jobs", jobs, 1)):
        if value is not None:
            checks.integer(name, value, least)
    flags = {"up_bias": up_bias, "down_bias": down_bias, "fused": fused, "fused_backward": fused_backward}
    for name, flag in (flags | {"f32_weight_grads": f32_weight_grads, "transposed": transposed}).items():
        checks.boolean(name, flag)
    sizes = Sizes(0, d_model, d_expert, num_experts, top_k or 0)
    checks.one_of("backend", backend, ("auto", *ARCHES))
    device = _current_device() if device is None else device
    own = HOPPER if device is None else arch_on(device)
    arch = own if backend == "auto" else ARCHES[backend]
    needs = ["fp8"] * bool(RECIPES[name_of(precision)].element.scales) + ["fused"] * (fused or fused_backward)
    checks.require({*needs} <= {*arch.extras}, "backend", f"one with kernels for {' and '.join(needs)}", arch.name)
    if backend != "auto" and device is not None:
        checks.require(arch.runs_on(capability_of(device)), "backend", f"one for this GPU ({arch.wanted})", arch.name)
    up = Variant(False, transposed, up_bias, activation, fused=fused_backward, f32=f32_weight_grads, arch=arch)
    down = up._replace(bias=down_bias, fused=fused)
    wanted = dict.fromkeys(kernel for entry in PRODUCTS.values() for kernel in entry.for_layer(sizes, up, down))
    if (recipe := RECIPES[name_of(precision)]).element.scales:
        of_layer = quantized_kernels(activation, precision, up_bias=up_bias, down_bias=down_bias)
        wanted |= dict.fromkeys((*quantize.kernels(floats=recipe.floats), *of_layer))
    made = compile_many(wanted, jobs)
    if device is not None:
        for kernel in made:
            kernel.handle(device)
    return made


def _current_device() -> int | None:
    """CuPy's current device, None where there is none that runs the kernels."""
    try:
        device = int(optional.cupy().cuda.runtime.getDevice())
        return device if arch_of(capability_of(device)) else None
    except (ImportError, RuntimeError):  # no CuPy, no driver, no GPU
        return None
