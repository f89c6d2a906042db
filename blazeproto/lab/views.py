"""Views of what this package makes: `Dispatch`, `Kernel`, `TileConfig`, `MoE`, in terminals (rich) and notebooks (HTML).

    dispatch            # in Jupyter and IPython; elsewhere rich.print(dispatch), and in colours after `%load_ext rich`
    view(dispatch)      # the same, wherever rich or Jupyter shows objects
    print(view(dispatch).text())

The classes show themselves through `blazeproto.runtime.shown.Shown`, which asks `view`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from blazeproto.dispatch import Dispatch
from blazeproto.gemm import Kernel, TileConfig
from blazeproto.gemm.tiles import BF16, BK, BM, TILES, WARPGROUP
from blazeproto.lab.tables import Bar, Cell, Table, View, in_bytes
from blazeproto.runtime.arch import HOPPER
from blazeproto.runtime.optional import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from blazeproto.lab.target import Stepper
    from blazeproto.layer import MoE

__all__ = ["imbalance", "loads_of", "plot_load", "ring", "view"]

# A Hopper multiprocessor (CUDA C++ programming guide, compute capability 9.0).
REGISTERS, QUARTERS, REGISTER_UNIT = 65536, 4, 256  # of which each quarter has as many; a warp takes whole units
SHARED_BYTES, SHARED_RESERVED, SHARED_UNIT = 228 * 1024, 1024, 128  # of a CTA, the system reserves some
MOST_THREADS, MOST_CTAS, WARP = 2048, 32, 32
MOST_BARS = 32  # experts whose load a view draws; of more, those with the most and the least
EXAMPLE_TOKENS, EXAMPLE_PAIRS = 12, 36  # up to these a view shows who is where, as MoEBlaze §4.1 does
CONSUMERS = 2  # warpgroups that multiply a tile


def view(thing: Any) -> View:
    """A picture of ``thing``: a `Dispatch`, `Kernel`, `TileConfig` or `MoE`, or an object of a class made from one.

    A dispatch is read back, which waits for its device; a kernel is compiled if need be. TypeError for anything else.
    """
    for kind in type(thing).__mro__:
        if kind.__name__ in _VIEWS and kind.__module__.startswith("blazeproto."):
            return _VIEWS[kind.__name__](thing)
    raise TypeError(f"thing: expected one of {', '.join(_VIEWS)}, got {type(thing).__name__}")


# --- A dispatch ------------------------------------------------------------------------------------------------------------


def loads_of(dispatch: Any) -> list[int]:
    """Rows of each expert of ``dispatch``, E ints; waits for the device.

    A `MoEStats` or a `Routing`, which have the load too, is taken in its place. TypeError for anything else.
    """
    if isinstance(dispatch, Dispatch):
        return [end - begin for begin, end in pairwise(dispatch.expert_token_offsets.tolist())]
    load: Any = getattr(dispatch, "load", None)
    if load is None:
        raise TypeError(
            f"dispatch: expected a Dispatch, or the MoEStats or Routing of a layer, got {type(dispatch).__name__}"
        )
    return [int(rows) for rows in load.tolist()]


def imbalance(loads: list[int]) -> float:
    """The largest of ``loads`` over their mean: 1 at best, E where all pairs have one expert, NaN without a pair."""
    return max(loads) * len(loads) / total if (total := sum(loads)) else float("nan")


def _of_dispatch(dispatch: Dispatch) -> View:
    loads = loads_of(dispatch)
    mean = sum(loads) / len(loads)
    per_token = "varies" if dispatch.top_k is None else str(dispatch.top_k)
    facts = {
        "tokens T": f"{dispatch.num_tokens:,}",
        "experts E": f"{dispatch.num_experts:,}",
        "experts a token K": per_token,
        "rows": f"{sum(loads):,} of {dispatch.num_rows:,} places, {dispatch.num_pairs:,} pairs",
        "load": f"least {min(loads):,}, mean {mean:,.1f}, most {max(loads):,}",
        "imbalance": f"{imbalance(loads):.2f} (most over mean)",
    }
    if dispatch.overflow is not None:
        facts["overflow"] = f"{int(dispatch.overflow[0]):,} pairs beyond the row capacity"
    if dispatch.num_tokens <= EXAMPLE_TOKENS and dispatch.num_pairs <= EXAMPLE_PAIRS:
        return View("Dispatch", facts, _example(dispatch, loads))
    shown = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    caption = "┊ the mean load"
    if len(shown) > MOST_BARS:
        half = MOST_BARS // 2
        caption += f"; the {half} experts with the most rows and the {half} with the least of {len(shown)}"
        shown = shown[:half] + shown[-half:]
    else:
        shown.sort()
    rows: list[list[Cell]] = [[str(e), f"{loads[e]:,}", Bar(loads[e], max(loads), mean)] for e in shown]
    return View("Dispatch", facts, [Table(["expert", "load", ""], rows, caption, left=[""])])


def _example(dispatch: Dispatch, loads: list[int]) -> list[Table]:
    """By expert, by token, and the lists themselves, as MoEBlaze §4.1 prints them."""
    pairs = dispatch.expert_pair_indices.tolist()
    offsets = dispatch.expert_token_offsets.tolist()
    tokens = dispatch.expert_token_indices.tolist()
    expert_of = {pair: e for e, ends in enumerate(pairwise(offsets)) for pair in pairs[slice(*ends)]}
    places = dispatch.token_index_map.tolist()
    of_tokens = dispatch.token_offsets
    begins = range(0, dispatch.num_pairs + 1, dispatch.top_k or 1) if of_tokens is None else of_tokens.tolist()

    def numbers(values: list[Any]) -> str:
        return " ".join(map(str, values))

    mean = sum(loads) / len(loads)
    by_expert: list[list[Cell]] = [
        [
            str(e),
            str(loads[e]),
            Bar(loads[e], max(loads), mean),
            f"{begin} to {end - 1}" if end > begin else "–",
            numbers(pairs[begin:end]),
            numbers(tokens[begin:end]),
        ]
        for e, (begin, end) in enumerate(pairwise(offsets))
    ]
    by_token = [
        [
            str(token),
            numbers([expert_of.get(pair, "–") for pair in range(begin, end)]),
            numbers([row if row >= 0 else "–" for row in places[begin:end]]),
        ]
        for token, (begin, end) in enumerate(pairwise(begins))
    ]
    names = [
        "token_expert_indices",
        "expert_pair_indices",
        "expert_token_offsets",
        "token_index_map",
        "expert_token_indices",
    ]
    lists = [[name, numbers(getattr(dispatch, name).tolist())] for name in names if getattr(dispatch, name) is not None]
    words = ["", "rows", "pairs", "tokens", "experts", "list", "values"]
    return [
        Table(["expert", "load", "", "rows", "pairs", "tokens"], by_expert, "┊ the mean load", left=words),
        Table(["token", "experts", "rows"], by_token, "– no row", left=words),
        Table(["list", "values"], lists, left=words),
    ]


def plot_load(dispatch: Any, ax: Axes | None = None) -> Axes:
    """The load of each expert of ``dispatch`` as bars and the mean as a line, by matplotlib, on ``ax`` or new axes.

    Returns the Axes. Waits for the device. `loads_of` says what it takes besides a `Dispatch`, and what it refuses.
    """
    loads = loads_of(dispatch)
    if ax is None:
        need("matplotlib")
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(8, 3), layout="constrained")
    ax.bar(range(len(loads)), loads, width=0.8 if len(loads) <= 64 else 1.0)
    mean = sum(loads) / len(loads)
    ax.axhline(mean, color="C1", linestyle="--", label=f"mean {mean:.1f}")
    ax.set(xlabel="expert", ylabel="rows", title=f"load; imbalance {imbalance(loads):.2f}")
    ax.legend()
    return ax


# --- Kernels and tiles -----------------------------------------------------------------------------------------------------


def _of_kernel(kernel: Kernel) -> View:
    has = resources(kernel)
    facts = {
        "source": kernel.file,
        "registers": f"{has.registers} a thread" + (" at the start" if kernel.start_registers else ""),
        "spills": in_bytes(has.spills),
        "shared memory": in_bytes(has.smem_bytes),
        "threads": f"{has.threads} a CTA",
        "CTAs": f"{has.ctas} a multiprocessor",
        "wgmma": "– (pip install nvidia-cuda-nvdisasm)" if has.wgmma is None else f"{has.wgmma} in the machine code",
        "cubin": in_bytes(len(kernel.cubin)),
        "macros": " ".join(macro[2:] for macro in kernel.macros),
    }
    return View(f"Kernel {kernel.entry}", facts, note=".source .ptx .sass .log")


def _of_tiles(config: TileConfig) -> View:
    stage = BF16.bytes * BK * (BM + config.tile_n)
    users = [name for name, tiles in TILES.items() if tiles == config]
    yes = {True: "yes", False: "no"}
    return View(
        f"TileConfig {BM} x {config.tile_n}",
        {
            "stages": f"{config.stages} of {in_bytes(stage)}: {BM} x {BK} and {config.tile_n} x {BK} bf16",
            "ring": f"{in_bytes(stage * config.stages)} of {in_bytes(HOPPER.smem_limit)}",
            "accumulators": f"{BM * config.tile_n // (CONSUMERS * WARPGROUP)} fp32 a consumer thread",
            "wgmma": f"m64n{config.tile_n}k16, {BK // 16} a stage and consumer warpgroup",
            "deferred epilogue": yes[config.deferred],
            "cluster": f"{config.cluster} CTA" + "s" * (config.cluster > 1),
            "tickets": yes[config.tickets],
            "runs by default": ", ".join(users) or "nowhere",
        },
    )


# --- What a kernel takes of a multiprocessor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """registers: that a thread starts with.  spills: bytes a thread stores and loads for want of them.
    smem_bytes: shared memory of a CTA.  threads: of a CTA.  ctas: of a multiprocessor at a time.
    wgmma: instructions in the machine code, each counted once however often it runs; None without nvdisasm.
    """

    registers: int
    spills: int
    smem_bytes: int
    threads: int
    ctas: int
    wgmma: int | None


def resources(kernel: Kernel, *, sass: bool = True) -> Resources:
    """The resources of a kernel, which is compiled if need be. CompileError if the compiler refuses it.

    sass: whether to disassemble it, half a second, and count its wgmma.
    """
    threads = threads_of(kernel)
    registers, smem = kernel.registers, kernel.smem_bytes
    ctas = ctas_per_multiprocessor(registers, threads, smem)
    return Resources(registers, kernel.spills, smem, threads, ctas, wgmma_count(kernel) if sass else None)


def threads_of(kernel: Kernel) -> int:
    """The threads of a CTA: what the kernel says, or the bound that its source declares (``__launch_bounds__``)."""
    if kernel.threads:
        return kernel.threads
    declared = re.search(rf"\.entry {re.escape(kernel.entry)}\(.*?\.maxntid (\d+), (\d+), (\d+)", kernel.ptx, re.DOTALL)
    if declared is None:
        raise ValueError(f"kernel: expected __launch_bounds__ at {kernel.entry} in {kernel.file}, found none")
    x, y, z = map(int, declared.groups())
    return x * y * z


def ctas_per_multiprocessor(registers: int, threads: int, smem_bytes: int) -> int:
    """How many CTAs fit on a Hopper multiprocessor: by registers, threads, shared memory, and 32 at most."""
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = QUARTERS * (REGISTERS // QUARTERS // warp_registers) // (-(-warps // QUARTERS) * QUARTERS)
    smem = -(-smem_bytes // SHARED_UNIT) * SHARED_UNIT + SHARED_RESERVED
    return min(by_registers, MOST_THREADS // (warps * WARP), SHARED_BYTES // smem, MOST_CTAS)


def wgmma_count(kernel: Kernel) -> int | None:
    """Instructions in the kernel's machine code that wgmma becomes, ``HGMMA`` on bf16 and ``QGMMA`` on fp8; None without
    nvdisasm."""
    if "wgmma.mma_async" not in kernel.ptx:
        return 0
    try:
        sass = kernel.sass
    except FileNotFoundError:
        return None
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", sass, flags=re.MULTILINE)  # others, name, text, name, ...
    return sum(
        len(re.findall(r"\b[HQ]GMMA\b", code))
        for name, code in zip(sections[1::2], sections[2::2], strict=True)
        if name == kernel.entry
    )


# --- A layer ---------------------------------------------------------------------------------------------------------------


def _of_layer(layer: MoE) -> View:
    of_experts = (layer.up_name, "down_proj", f"{layer.up_name}_bias", "down_proj_bias")
    parameters = dict(layer.named_parameters())
    counts = {name: p.numel() for name, p in parameters.items()}
    met = {name: n * layer.top_k // layer.num_experts if name in of_experts else n for name, n in counts.items()}
    total, active = sum(counts.values()), sum(met.values())
    rows = [
        [name, " x ".join(map(str, p.shape)), str(p.dtype).removeprefix("torch."), f"{p.numel():,}", in_bytes(p.nbytes)]
        for name, p in parameters.items()
    ]
    rows.append(["all", "", "", f"{total:,}", in_bytes(sum(p.nbytes for p in parameters.values()))])
    tokens = 4096
    facts = {
        "sizes": f"d={layer.d_model}, n={layer.d_expert}, E={layer.num_experts}, K={layer.top_k}",
        "experts": f"{layer.activation}, combine={layer.combine}, backend={layer.backend}",
        "runs on": layer.runs_on(),
        "router": f"{type(layer.router).__name__}({getattr(layer.router, 'extra_repr', str)()})",
        "device": ", ".join(dict.fromkeys(str(p.device) for p in parameters.values())),
        "parameters": f"{total:,}, of which a token meets {active:,} ({100 * active / max(total, 1):.1f} %)",
    }
    with suppress(RuntimeError):  # from a layer that does not know beforehand
        of_none = layer.saved_bytes(0)
        kept = (layer.saved_bytes(tokens) - of_none) / tokens
        facts["save"] = f"{layer.save}: {kept:,.0f} B a token and {of_none:,} B kept by the experts for backward"
    columns = ["parameter", "shape", "dtype", "elements", "bytes"]
    return View("MoE", facts, [Table(columns, rows, left=columns[:3], last=1)])


def __dir__() -> list[str]:
    return __all__


_VIEWS: dict[str, Callable[[Any], View]] = {
    "Dispatch": _of_dispatch,
    "Kernel": _of_kernel,
    "TileConfig": _of_tiles,
    "MoE": _of_layer,
}


def ring(stepper: Stepper, cta: int = 0) -> View:
    """The ring of stages of one CTA of a launch that runs step by step, a line a stage.

    stepper: a launch of a product made of tiles, as ``Machine().step`` returns it.  cta: its number in the cluster that runs.
    A stage is free, filling or full. A barrier is shown as its phase, and the arrivals and bytes that this phase still expects.
    The last column shows the last ``wgmma`` of each warpgroup: the first and the last byte that it reads of the stage.

    TypeError for a launch of another kernel; ValueError for a CTA that does not exist.
    """
    macros = getattr(getattr(stepper, "kernel", None), "defines", {})
    if "STAGES" not in macros:
        raise TypeError(f"stepper: expected a launch of a product made of tiles, got {type(stepper).__name__}")
    count, a, b = int(macros["STAGES"]), *(int(macros[size]) * BK * BF16.bytes for size in ("BM", "BN"))
    barriers: list[Any] = [one for one in stepper.barriers(cta).values() if "made at mainloop.cuh" in one.place]
    read: list[list[str]] = [[] for _ in range(count)]
    for group in range(stepper.warps(cta) * WARP // WARPGROUP):
        if reads := stepper.reads(group, cta):
            read[reads["A"].first // (a + b)].append(
                f"{group}: {', '.join(f'{one.name} {one.first % (a + b)}–{one.last % (a + b)}' for one in reads.values())}"
            )
    # None before the barriers are made.
    rows = [
        [
            str(stage),
            "full" if full.phase > empty.phase else "filling" if full.pending < full.expected or full.bytes else "free",
            f"{stepper.shared(stage * (a + b), a + b, cta)[1].mean():.0%}",
            *(f"{one.phase}: {one.pending} of {one.expected}, {one.bytes} B" for one in (full, empty)),
            "; ".join(read[stage]) or "–",
        ]
        for stage, (full, empty) in enumerate(zip(barriers[:count], barriers[count:], strict=True))
    ]
    words = ["state", "full barrier", "empty barrier", "warpgroup: bytes that its last wgmma reads"]
    return View(
        f"{stepper.kernel.entry}: ring of {count} stages",
        {"a stage": f"{a + b} bytes: A from 0, B from {a}"},
        [Table(["stage", "state", "written", *words[1:]], rows, left=words)],
        "A barrier: its phase, the arrivals that the phase still expects, the bytes that are still to come.",
    )
