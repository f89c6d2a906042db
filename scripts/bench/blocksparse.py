"""Block-sparse products beside torch.bmm (MegaBlocks Figure 9), and `dMoE` beside MegaBlocks' own, the dropping layer and `MoE`.

    python -m scripts.bench.blocksparse                   # -> results/h200/blocksparse.json
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

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.blocksparse import Topology, topology_of
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.gemm.blocks import BLOCK
from scripts.bench import megablocks_edits, peers
from scripts.bench.common import (
    MIB,
    RESULTS,
    TABLES,
    begun,
    bench_parser,
    cfg_of,
    geometric_mean,
    in_turn,
    read_json,
    settled,
    stamped,
    write_json,
)  # fmt: skip
from scripts.bench.module import part_times, verdict
from scripts.bench.peers import dmoe, dropping, megablocks, ours
from scripts.bench.timing import gpu_ms, peak_bytes, relative_difference, saved_bytes
from scripts.command import need_hopper, some_of

Row = dict[str, Any]
EXPERTS = 8
MODELS = {"XS": (512, 2048, 8192), "S": (768, 3072, 4096), "M": (1024, 4096, 1024)}  # d, n, rows an expert
LEAST, LEAST_MEAN = 0.90, 0.95  # of torch.bmm's speed
LARGEST_DIFFERENCE = 1e-2
ACTIVATIONS = ("gelu", "swiglu")


# ------------------------------------------------------------------------------------------------------------ products


class Problem(NamedTuple):
    """The operands of a model's six products: for torch.bmm by expert, and the same for the block-sparse ones."""

    topology: Topology
    values: Tensor  # h, in blocks
    x: Tensor  # (E, rows, d)
    h: Tensor  # (E, rows, n)
    w: Tensor  # (E, d, n)
    w_t: Tensor  # (E, n, d)
    flat_x: Tensor  # (E rows, d)
    flat_w: Tensor  # (d, E n)
    flat_w_t: Tensor  # (E n, d)


def problem_of(model: str, device: str = "cuda") -> Problem:
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
    flat = x.flatten(0, 1), w.transpose(0, 1).flatten(1).contiguous(), w_t.flatten(0, 1)
    return Problem(Topology(host.shape, **lists), in_blocks(h), x, h, w, w_t, *flat)


def products_of(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Ours, by the paper's names."""
    topology, values, *_, flat_x, flat_w, flat_w_t = problem
    return {
        "SDD": lambda: gemm.sdd(flat_x, flat_w, topology),
        "DSD": lambda: gemm.dsd(values, flat_w_t, topology),
        "SDD^T": lambda: gemm.sdd(flat_x, flat_w_t, topology, transpose_b=True),
        "DS^TD": lambda: gemm.dsd(values, flat_x, topology, transpose_s=True),
        "DSD^T": lambda: gemm.dsd(values, flat_w, topology, transpose_b=True),
        "DD^TS": lambda: gemm.dds(flat_x, values, topology, transpose_a=True),
    }


def batched_products_of(
    problem: Problem,
) -> dict[str, tuple[list[Callable[[], Tensor]], Callable[[Tensor], Tensor]]]:
    """torch.bmm with each layout, and how the first one's result lies as ours does."""
    _, _, x, h, w, w_t, *_ = problem
    w_lies, w_t_lies = w.mT.contiguous().mT, w_t.mT.contiguous().mT

    def rows_of(made: Tensor) -> Tensor:
        return made.flatten(0, 1)

    def columns_of(made: Tensor) -> Tensor:
        return made.transpose(0, 1).flatten(1)

    return {
        "SDD": ([lambda: torch.bmm(x, w), lambda: torch.bmm(x, w_lies)], in_blocks),
        "DSD": ([lambda: torch.bmm(h, w_t), lambda: torch.bmm(h, w_t_lies)], rows_of),
        "SDD^T": ([lambda: torch.bmm(x, w_t.mT), lambda: torch.bmm(x, w_t_lies.mT)], in_blocks),
        "DS^TD": ([lambda: torch.bmm(h.mT, x), lambda: torch.bmm(x.mT, h)], rows_of),
        "DSD^T": ([lambda: torch.bmm(h, w.mT), lambda: torch.bmm(h, w_lies.mT)], rows_of),
        "DD^TS": ([lambda: torch.bmm(x.mT, h), lambda: torch.bmm(h.mT, x)], columns_of),
    }


def stk_products_of(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Those of stanford-stk, MegaBlocks' own (Triton)."""
    import stk

    topology, values, *_, flat_x, flat_w, flat_w_t = problem
    rows, columns = topology.row_indices.short(), topology.column_indices.short()
    transposed = (rows[topology.block_offsets_t], topology.column_offsets, topology.block_offsets_t)
    s = stk.Matrix(topology.shape, values, rows, columns, topology.row_offsets, *transposed)
    return {
        "SDD": lambda: stk.ops.sdd(flat_x, flat_w, s).data,
        "DSD": lambda: stk.ops.dsd(s, flat_w_t),
        "SDD^T": lambda: stk.ops.sdd(flat_x, flat_w_t.t(), s).data,
        "DS^TD": lambda: stk.ops.dsd(s.t(), flat_x),
        "DSD^T": lambda: stk.ops.dsd(s, flat_w.t()),
        "DD^TS": lambda: stk.ops.dds(flat_x.t(), s),
    }


def bsr_products_of(problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Those of torch's block-sparse rows (Triton), which have no transposed sparse operand."""
    from torch.sparse import _triton_ops as triton

    topology, values, *_, flat_x, flat_w, flat_w_t = problem
    s = torch.sparse_bsr_tensor(topology.row_offsets, topology.column_indices, values, topology.shape)

    def sampled(b: Tensor) -> Tensor:
        made: Tensor = triton.sampled_addmm(s, flat_x, b, beta=0.0).values()
        return made

    return {
        "SDD": lambda: sampled(flat_w),
        "DSD": lambda: triton.bsr_dense_mm(s, flat_w_t),
        "SDD^T": lambda: sampled(flat_w_t.t()),
        "DSD^T": lambda: triton.bsr_dense_mm(s, flat_w.t()),
    }


def in_blocks(h: Tensor) -> Tensor:
    """(E, rows, n) → (B, 128, 128): each expert's blocks, row by row."""
    E, rows, n = h.shape
    return h.view(E, rows // BLOCK, BLOCK, n // BLOCK, BLOCK).transpose(2, 3).reshape(-1, BLOCK, BLOCK).contiguous()


def topology_ms(model: str, rounds: int) -> float:
    """From a dispatch, on the device."""
    _, n, rows = MODELS[model]
    ids = torch.arange(EXPERTS, device="cuda", dtype=torch.int32).repeat_interleave(rows)[:, None]
    dispatch = build_dispatch(ids, EXPERTS)
    call = {"topology": lambda: topology_of(dispatch, n)}
    topology_of(dispatch, n)
    return gpu_ms(call, [], rounds).ms["topology"]


def measure_products(model: str, rounds: int) -> list[Row]:
    """A row a product. RuntimeError where ours computes something else."""
    made, topology = [], round(topology_ms(model, rounds), 4)
    problem = problem_of(model)
    ours, batched = products_of(problem), batched_products_of(problem)
    for name, (bmms, as_ours) in batched.items():
        difference = relative_difference(ours[name](), as_ours(bmms[0]()))
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name} of {model}: differs from torch.bmm by {difference:.3g}")
        calls = {"ours": ours[name]} | {f"bmm {index}": bmm for index, bmm in enumerate(bmms)}
        ms = gpu_ms(calls, list(calls), rounds).ms
        row: Row = {"part": "products", "model": model, "product": name, "ours_ms": round(ms.pop("ours"), 5)}
        row |= {"bmm_ms": round(min(ms.values()), 5), "bmm_layouts_ms": [round(value, 5) for value in ms.values()]}
        made.append(row | {"topology_ms": topology, "difference": round(difference, 6)})
    return made


def measure_others(part: str, model: str, rounds: int) -> list[Row]:
    """A row a product that runs and computes what ours does."""
    problem = problem_of(model)
    ours, made = products_of(problem), []
    theirs = {"stk": stk_products_of, "bsr": bsr_products_of}[part](problem)
    for name, product in theirs.items():
        difference = peers.if_it_runs(f"{part} {name}", partial(difference_of, product, ours[name]), {})
        if difference is not None and difference < LARGEST_DIFFERENCE:
            ms = gpu_ms({part: product}, [part], rounds).ms[part]
            made.append({"part": part, "model": model, "product": name, f"{part}_ms": round(ms, 5)})
    return made


def difference_of(product: Callable[[], Tensor], expected: Callable[[], Tensor]) -> float:
    return relative_difference(product(), expected())


# -------------------------------------------------------------------------------------------------------------- layers


def measure_layers(shape: Sizes, activation: str, rounds: int) -> list[Row]:
    """One row."""
    inputs, absent = peers.make_inputs(shape), dict[str, str]()
    builds: dict[str, Callable[[], peers.Program]] = {
        "dmoe": lambda: dmoe.build(shape, inputs, activation),
        "dropping": lambda: dropping.build(shape, inputs, activation),
        "moe": lambda: ours.build(shape, inputs, activation=activation),
        "megablocks": lambda: megablocks.build(shape, inputs, activation),
    }
    programs = {name: made for name, build in builds.items() if (made := peers.if_it_runs(name, warmed(build), absent))}
    row: Row = {"part": "layers", "cfg": cfg_of(shape), "activation": activation}
    row["differences"] = differences(programs)
    for name, program in programs.items():
        row[f"{name}_saved_MiB"] = round(saved_bytes(program.forward, program.weights) / MIB, 1)
        row[f"{name}_peak_fwdbwd_MiB"] = round(peak_bytes(program.forward_backward) / MIB, 1)
    row |= part_times({name: [program] for name, program in programs.items()}, rounds)
    return [row | ({"absent": absent} if absent else {})]


def differences(programs: dict[str, peers.Program]) -> dict[str, float]:
    """How far the outputs of those that compute the layer are from `MoE`'s. RuntimeError where one computes something else."""
    others = {name: program for name, program in programs.items() if program.computes_layer and name != "moe"}
    if "moe" not in programs:
        return {}
    expected = programs["moe"].forward().detach()
    found = {name: relative_difference(program.forward().detach(), expected) for name, program in others.items()}
    for name, difference in found.items():
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{name}: its output differs from MoE's by {difference:.3g}")
    return {name: round(difference, 6) for name, difference in found.items()}


def warmed(build: Callable[[], peers.Program]) -> Callable[[], peers.Program]:
    """With a first step behind it."""

    def run() -> peers.Program:
        program = build()
        program.forward_backward()
        return program

    return run


# -------------------------------------------------------------------------------------------------------------- table


def print_rows(rows: list[Row]) -> None:
    products = [row for row in rows if row["part"] == "products"]
    for row in products:
        speed = row["bmm_ms"] / row["ours_ms"]
        line = (
            f"{row['model']:3s} {row['product']:6s} ours {row['ours_ms']:.4f} bmm {row['bmm_ms']:.4f} ms: {speed:.3f}"
        )
        print(f"{line} of bmm's speed; topology {row['topology_ms']:.4f}")
    for row in rows:
        if row["part"] in ("stk", "bsr"):
            print(*(row[key] for key in ("part", "model", "product", f"{row['part']}_ms")))
        if row["part"] == "layers":
            times = {key.removesuffix("_fwdbwd_ms"): row[key] for key in row if key.endswith("_fwdbwd_ms")}
            saved = {key: row[key] for key in row if key.endswith("MiB")}
            print(Sizes(**row["cfg"]), row["activation"], times, saved, row.get("absent", ""))
    speeds = [row["bmm_ms"] / row["ours_ms"] for row in products]
    if speeds:
        least, mean = min(speeds), geometric_mean(speeds)
        print(verdict(f"of torch.bmm's speed at least {LEAST}: {least:.3f}", least >= LEAST))
        print(verdict(f"of torch.bmm's speed in the mean at least {LEAST_MEAN}: {mean:.3f}", mean >= LEAST_MEAN))


# --------------------------------------------------------------------------------------------------------------- main


def wanted(options: argparse.Namespace) -> Iterator[tuple[Callable[..., list[Row]], tuple[Any, ...]]]:
    if "products" in options.parts:
        for model in MODELS:
            yield measure_products, (model, options.rounds)
    for part in [part for part in ("stk", "bsr") if part in options.parts]:
        for model in MODELS:
            yield measure_others, (part, model, options.rounds)
    if "layers" in options.parts:
        for shape in TABLES["moeblaze-1"][: 2 if options.quick else None]:
            for activation in ACTIVATIONS:
                sizes = shape._replace(halves=2 if activation == "swiglu" else 1)
                yield measure_layers, (sizes, activation, min(options.rounds, 5))


def main() -> None:
    parser = bench_parser(
        "blocksparse", __doc__, quick="fewer rounds, two layers -> blocksparse-quick.json", time_budget=True
    )
    default = ["products", "layers"]
    parts = (*default, "stk", "bsr")
    said = f"some of {', '.join(parts)}; default: {','.join(default)}"
    parser.add_argument("--parts", type=some_of(parts), default=default, help=said)
    parser.add_argument(
        "--edit-megablocks", action="store_true", help="edit the installed files, see megablocks_edits.py"
    )
    options = settled(parser.parse_args(), "blocksparse", rounds=20)
    need_hopper()
    if options.edit_megablocks:
        print("edited", *megablocks_edits.edit())
    out = options.out or RESULTS / "blocksparse.json"
    record = begun("blocksparse", __doc__, 4)
    if out.exists():
        record["rows"] = [row for row in read_json(out)["rows"] if row["part"] not in options.parts]
    for measure, arguments in in_turn(wanted(options), options.time_budget):
        record["rows"] += stamped(measure, *arguments)
        write_json(out, record)
    print_rows(record["rows"])
    print("wrote", out)


if __name__ == "__main__":
    main()
