"""Block-sparse products beside torch.bmm (MegaBlocks Figure 9), and `dMoE` beside MegaBlocks' own, the dropping layer and `MoE`.

    python -m scripts.bench.blocksparse                   # -> results/h200/blocksparse.json on an H200
    python -m scripts.bench.blocksparse --parts stk       # the others' rows stay; stk, bsr: each in its own process
    python -m scripts.bench.blocksparse --edit-megablocks # first has MegaBlocks and stk run beside today's Triton
    python -m scripts.bench.blocksparse --quick           # fewer rounds, few shapes -> blocksparse-quick.json

products: the six products of a two-layer expert, forward and backward, for MoE-XS, S and M: 8 experts with as many rows each, so
that a batched product computes the same. Ours are timed alone, through the kernels and the topology that any set of blocks runs
through; `topology_ms` is what making that topology from a dispatch takes. torch.bmm is timed with both layouts of the operand, or
of the result, and the faster one counts. bf16, random data, CUDA graph replay, in turn.

stk, bsr: the same products by MegaBlocks' own kernels (stanford-stk) and by torch's block-sparse rows, both Triton.

layers: MoEBlaze's Table 1, forward and forward + backward, router excluded, dispatch and topology included; sums of kernel
durations by the profiler; bytes kept for backward, and the peak. MegaBlocks is absent where it is not installed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.blocksparse import Topology, topology_of
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.gemm.blocks import BLOCK
from scripts.bench import megablocks_edits, peers
from scripts.bench.common import MIB, TABLES, cfg_of, geometric_mean
from scripts.bench.peers import layers
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, part_times, relative_difference, saved_bytes
from scripts.lm.ranks import Ranks

EXPERTS = 8
MODELS = {"XS": (512, 2048, 8192), "S": (768, 3072, 4096), "M": (1024, 4096, 1024)}  # d, n, rows an expert
LEAST, LEAST_MEAN = 0.90, 0.95  # of torch.bmm's speed
LARGEST_DIFFERENCE = 1e-2


# ------------------------------------------------------------------------------------------------------------ products


Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""x (E, rows, d), h (E, rows, n), w (E, d, n) and w_t (E, n, d), for torch.bmm; or for the block-sparse products the same as x
(E rows, d), h in blocks, w (d, E n) and w_t (E n, d)."""
Products = dict[str, Callable[[], Tensor]]


def problem_of(model: str, device: str) -> tuple[Topology, Operands, Operands]:
    """The topology of a model's six products, and their operands, for block-sparse ones and for torch.bmm."""
    d, n, rows = MODELS[model]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, generator=generator).mul_(fan_in**-0.5).bfloat16()

    host = Topology.of_blocks(np.kron(np.eye(EXPERTS), np.ones((rows // BLOCK, n // BLOCK))) > 0)
    lists: dict[str, Any] = {
        name: torch.from_numpy(value).to(device) for name, value in vars(host).items() if isinstance(value, np.ndarray)
    }
    x, h = normal(EXPERTS, rows, d), normal(EXPERTS, rows, n)
    w, w_t = normal(EXPERTS, d, n, fan_in=d), normal(EXPERTS, n, d, fan_in=n)
    flat = rows_of(x), in_blocks(h), columns_of(w).contiguous(), rows_of(w_t)
    return Topology(host.shape, **lists), flat, (x, h, w, w_t)


def products_of(topology: Topology, operands: Operands) -> Products:
    """Ours, by the paper's names."""
    x, values, w, w_t = operands
    return {
        "SDD": lambda: gemm.sdd(x, w, topology),
        "DSD": lambda: gemm.dsd(values, w_t, topology),
        "SDD^T": lambda: gemm.sdd(x, w_t, topology, transpose_b=True),
        "DS^TD": lambda: gemm.dsd(values, x, topology, transpose_s=True),
        "DSD^T": lambda: gemm.dsd(values, w, topology, transpose_b=True),
        "DD^TS": lambda: gemm.dds(x, values, topology, transpose_a=True),
    }


def rows_of(made: Tensor) -> Tensor:
    return made.flatten(0, 1)


def columns_of(made: Tensor) -> Tensor:
    return made.transpose(0, 1).flatten(1)


def batched_products_of(operands: Operands) -> dict[str, tuple[list[Callable[[], Tensor]], Callable[[Tensor], Tensor]]]:
    """torch.bmm with each layout, and how the first one's result lies as ours does."""
    x, h, w, w_t = operands
    w_lies, w_t_lies = w.mT.contiguous().mT, w_t.mT.contiguous().mT
    return {
        "SDD": ([lambda: torch.bmm(x, w), lambda: torch.bmm(x, w_lies)], in_blocks),
        "DSD": ([lambda: torch.bmm(h, w_t), lambda: torch.bmm(h, w_t_lies)], rows_of),
        "SDD^T": ([lambda: torch.bmm(x, w_t.mT), lambda: torch.bmm(x, w_t_lies.mT)], in_blocks),
        "DS^TD": ([lambda: torch.bmm(h.mT, x), lambda: torch.bmm(x.mT, h)], rows_of),
        "DSD^T": ([lambda: torch.bmm(h, w.mT), lambda: torch.bmm(h, w_lies.mT)], rows_of),
        "DD^TS": ([lambda: torch.bmm(x.mT, h), lambda: torch.bmm(h.mT, x)], columns_of),
    }


def stk_products_of(topology: Topology, operands: Operands) -> Products:
    """Those of stanford-stk, MegaBlocks' own (Triton)."""
    import stk

    x, values, w, w_t = operands
    rows, columns = topology.row_indices.short(), topology.column_indices.short()
    transposed = (rows[topology.block_offsets_t], topology.column_offsets, topology.block_offsets_t)
    s = stk.Matrix(topology.shape, values, rows, columns, topology.row_offsets, *transposed)
    return {
        "SDD": lambda: stk.ops.sdd(x, w, s).data,
        "DSD": lambda: stk.ops.dsd(s, w_t),
        "SDD^T": lambda: stk.ops.sdd(x, w_t.t(), s).data,
        "DS^TD": lambda: stk.ops.dsd(s.t(), x),
        "DSD^T": lambda: stk.ops.dsd(s, w.t()),
        "DD^TS": lambda: stk.ops.dds(x.t(), s),
    }


def bsr_products_of(topology: Topology, operands: Operands) -> Products:
    """Those of torch's block-sparse rows (Triton), which have no transposed sparse operand."""
    from torch.sparse import _triton_ops as triton

    x, values, w, w_t = operands
    s = torch.sparse_bsr_tensor(topology.row_offsets, topology.column_indices, values, topology.shape)
    return {
        "SDD": lambda: triton.sampled_addmm(s, x, w, beta=0.0).values(),
        "DSD": lambda: triton.bsr_dense_mm(s, w_t),
        "SDD^T": lambda: triton.sampled_addmm(s, x, w_t.t(), beta=0.0).values(),
        "DSD^T": lambda: triton.bsr_dense_mm(s, w.t()),
    }


def in_blocks(h: Tensor) -> Tensor:
    """(E, rows, n) → (B, 128, 128): each expert's blocks, row by row."""
    E, rows, n = h.shape
    return h.view(E, rows // BLOCK, BLOCK, n // BLOCK, BLOCK).transpose(2, 3).reshape(-1, BLOCK, BLOCK).contiguous()


def topology_ms(model: str, machine: Machine) -> float:
    """From a dispatch, on the device."""
    _, n, rows = MODELS[model]
    ids = torch.arange(EXPERTS, device=machine.device, dtype=torch.int32).repeat_interleave(rows)[:, None]
    dispatch = build_dispatch(ids, EXPERTS)
    topology_of(dispatch, n)
    return round(machine.times({"topology": lambda: topology_of(dispatch, n)}).ms["topology"], 4)


def measure_products(case: tuple[str, str], machine: Machine) -> list[Row]:
    """A row a product. RuntimeError where ours computes something else."""
    _, model = case
    made, making = [], topology_ms(model, machine)
    topology, flat, by_expert = problem_of(model, machine.device)
    ours = products_of(topology, flat)
    for name, (bmms, as_ours) in batched_products_of(by_expert).items():
        difference = relative_difference(ours[name](), as_ours(bmms[0]()))
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name} of {model}: differs from torch.bmm by {difference:.3g}")
        calls = {"ours": ours[name]} | {f"bmm {index}": bmm for index, bmm in enumerate(bmms)}
        ms = {call: round(value, 5) for call, value in machine.times(calls, tuple(calls)).ms.items()}
        row: Row = {
            "product": name,
            "ours_ms": ms.pop("ours"),
            "bmm_ms": min(ms.values()),
            "bmm_layouts_ms": [*ms.values()],
        }
        made.append(row | {"topology_ms": making, "difference": round(difference, 6)})
    return made


def measure_others(case: tuple[str, str], machine: Machine) -> list[Row]:
    """A row a product that runs and computes what ours does."""
    part, model = case
    topology, flat, _ = problem_of(model, machine.device)
    ours, made, absent = products_of(topology, flat), list[Row](), dict[str, str]()
    theirs = {"stk": stk_products_of, "bsr": bsr_products_of}[part]
    for name, product in theirs(topology, flat).items():
        result = peers.if_it_runs(f"{part} {name}", product, absent)
        if result is not None and relative_difference(result, ours[name]()) < LARGEST_DIFFERENCE:
            ms = machine.times({part: product}, [part]).ms[part]
            made.append({"product": name, f"{part}_ms": round(ms, 5)})
    return [row | ({"absent": absent} if absent else {}) for row in made]


# -------------------------------------------------------------------------------------------------------------- layers


def measure_layers(case: tuple[Sizes, str], machine: Machine) -> Row:
    """RuntimeError where a program computes something else than `MoE`."""
    shape, activation = case
    builds: dict[str, Any] = {
        "dmoe": layers.dmoe,
        "dropping": layers.dropping,
        "moe": layers.ours,
        "megablocks": layers.megablocks,
    }
    with_activation: dict[str, peers.Build] = {
        name: partial(build, activation=activation) for name, build in builds.items()
    }
    programs, absent = peers.build_all(with_activation, shape, [peers.make_inputs(shape, device=machine.device)])
    found = peers.output_differences(programs, "moe")
    differences = {name: round(each, 6) for name, each in found.items() if name != "moe"}
    if wrong := {name: each for name, each in differences.items() if not each < LARGEST_DIFFERENCE}:
        raise RuntimeError(f"outputs differ from MoE's: {wrong}")
    row: Row = {"differences": differences}
    for name, (program,) in programs.items():
        row[f"{name}_saved_MiB"] = round(saved_bytes(program.forward, program.weights) / MIB, 1)
        row[f"{name}_peak_fwdbwd_MiB"] = round(machine.peak_bytes(program.forward_backward) / MIB, 1)
    row |= part_times(programs, machine)
    return row | ({"absent": absent} if absent else {})


# ---------------------------------------------------------------------------------------------------------------- parts


def bounds(record: Row) -> list[tuple[str, bool]]:
    speeds = [row["bmm_ms"] / row["ours_ms"] for row in record["rows"] if row["part"] == "products"]
    if not speeds:
        return []
    least, mean = min(speeds), geometric_mean(speeds)
    return [
        (f"of torch.bmm's speed at least {LEAST}: {least:.3f}", least >= LEAST),
        (f"of torch.bmm's speed in the mean at least {LEAST_MEAN}: {mean:.3f}", mean >= LEAST_MEAN),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--edit-megablocks", action="store_true", help="the installed files: see megablocks_edits.py")


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    if options.edit_megablocks:
        print("edited", *megablocks_edits.edit())


def of_part(case: tuple[str, str]) -> Row:
    return {"part": case[0], "model": case[1]}


def of_layer(case: tuple[Sizes, str]) -> Row:
    return {"part": "layers", "cfg": cfg_of(case[0]), "activation": case[1]}


LAYERS = [
    (shape._replace(halves=halves), activation)
    for shape in TABLES["moeblaze-1"]
    for activation, halves in (("gelu", 1), ("swiglu", 2))
]
SMALL = [(Sizes(64, 32, BLOCK, 4, 2, halves=1), "gelu")]
PRODUCTS, STK, BSR = ([(part, model) for model in MODELS] for part in ("products", "stk", "bsr"))
BENCH = Bench(
    "blocksparse",
    __doc__,
    {
        "products": Item(measure_products, PRODUCTS, (), PRODUCTS, of_part),
        "stk": Item(measure_others, STK, (), STK, of_part),
        "bsr": Item(measure_others, BSR, (), BSR, of_part),
        "layers": Item(measure_layers, LAYERS, SMALL, LAYERS[:4], of_layer, rounds=5),
    },
    default=("products", "layers"),
    paragraphs=4,
    bounds=bounds,
    options=add_options,
    prepare=prepare,
)

if __name__ == "__main__":
    run(BENCH)
