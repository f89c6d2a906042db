"""One MoE layer against its peers: time, saved and peak bytes, on the shapes of both papers.

    python -m scripts.bench.layer                       # all 23 shapes -> results/h200/layer.json
    python -m scripts.bench.layer --quick               # four shapes, fewer rounds
    python -m scripts.bench.layer --configs 13-18,23 --peers blazeproto,sonic
    python -m scripts.bench.layer --resume --time-budget 540   # goes on where the last run of the same sources stopped

One SwiGLU layer in bf16, random data and routing. Top-k is excluded; the dispatch metadata is included. All programs
run in one process on the same inputs, in turn (A B A B); figures are medians of 20 rounds (--rounds) after warm-up (8 beyond 60
ms). Eager times are CUDA events; GPU times replay a CUDA graph of the program whose results were checked, or sum its
kernels where it can't be captured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import (
    MIB,
    QUICK_SHAPES,
    RESULTS,
    SHAPES,
    begun,
    bench_parser,
    cfg_of,
    in_turn,
    read_json,
    rows_of,
    settled,
    stamped,
    with_row,
    write_json,
)  # fmt: skip
from scripts.bench.extras import EXTRAS
from scripts.bench.identity import earlier, rows_in
from scripts.bench.markdown import number
from scripts.bench.result_tables import eager_table, layer_table, memory_table
from scripts.bench.timing import (
    Rotation,
    gpu_ms,
    host_ms,
    interleaved_ms,
    peak_bytes,
    relative_difference,
    tensors_in,
)
from scripts.bench.timing import saved_bytes as measured_saved_bytes
from scripts.command import need_hopper, some_of

OURS, MAIN_PEER = "blazeproto", "sonic"
ROTATE_BELOW = 160 * MIB  # smaller inputs get several sets, or they would sit in the 50 MB L2
MAX_SETS = 3

PROTOCOL = (
    "one SwiGLU MoE layer, bf16, random data and uniform routing; top-k excluded, dispatch metadata included; programs "
    "interleaved in one process; median of {rounds} rounds (8 beyond 60 ms) after >=5 warm-ups; eager: CUDA events "
    "(one_thread: the backward in the calling thread); host: what the host spends in a call, of a few in a row (kernels: "
    "in allocating and launching alone, without autograd); gpu: "
    "CUDA-graph replay, queued before the GPU begins, or the sum of kernel durations where "
    "gpu_method says so; bwd = (fwd+bwd) - fwd; saved_MiB by saved_tensors_hooks without weights, x counted where saved; "
    "peaks over what was allocated before the call"
)
FLOOR = (
    f"sum over the eight kernels of max(operations/{cost.PEAK_OPERATIONS / 1e12:.0f} TFLOP/s, "
    f"least bytes/{cost.PEAK_BYTES / 1e12:.2f} TB/s)"
)


def input_sets(shape: Sizes) -> int:
    bytes_a_set = 2 * (2 * shape.T * shape.d + 3 * shape.E * shape.n * shape.d)
    return max(1, min(MAX_SETS, -(-ROTATE_BELOW // bytes_a_set)))


def build_programs(
    shape: Sizes, names: list[str], routing: str = "uniform"
) -> tuple[dict[str, list[peers.Program]], dict[str, str]]:
    """Programs by name, one for each set of inputs, each run once; and why a peer is absent."""
    inputs = [peers.make_inputs(shape, routing, seed) for seed in range(input_sets(shape))]
    programs: dict[str, list[peers.Program]] = {}
    absent: dict[str, str] = {}
    for name in names:
        if made := peers.if_it_runs(name, partial(peers.build, name, shape, inputs), absent):
            programs[name] = made
    if OURS in absent:
        raise RuntimeError(absent[OURS])
    return programs, absent


def check_agreement(programs: dict[str, list[peers.Program]]) -> dict[str, float]:
    """Largest relative difference of output and input gradient between ours and each peer that computes the same layer."""
    ours = tensors_in(programs[OURS][0].forward_backward())[:2]
    worst = {}
    for name, (program, *_) in programs.items():
        if name != OURS and program.computes_layer:
            theirs = tensors_in(program.forward_backward())[:2]
            worst[name] = max(relative_difference(a, b) for a, b in zip(ours, theirs, strict=True))
    return worst


def measure(shape: Sizes, names: list[str], rounds: int) -> dict[str, Any]:
    """One row of the results: a shape, its floors, and every program's figures."""
    programs, absent = build_programs(shape, names)
    forward = {name: Rotation([p.forward for p in each]) for name, each in programs.items()}
    both = {name: Rotation([p.forward_backward for p in each]) for name, each in programs.items()}

    peak_forward = {name: peak_bytes(call) for name, call in forward.items()}
    peak_both = {name: peak_bytes(call) for name, call in both.items()}
    saved = {name: measured_saved_bytes(each[0].forward, each[0].weights) for name, each in programs.items()}
    gradients = {
        name: sum(t.nbytes for t in tensors_in(each[0].forward_backward())[1:]) for name, each in programs.items()
    }
    agreement = check_agreement(programs)

    eager_forward = interleaved_ms(forward, rounds)
    eager_both = interleaved_ms(both, rounds)
    metadata = interleaved_ms({k: p[0].metadata for k, p in programs.items() if p[0].metadata is not None}, rounds)
    host = {name: host_ms(call, rounds) for name, call in both.items()}
    # By default the engine runs a backward in a thread of its own; below a millisecond its waking up is most of what is timed.
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = interleaved_ms(both, rounds)
    compared = [name for name in (OURS, MAIN_PEER, "bmm_ub") if name in programs]
    gpu_forward = gpu_ms(forward, compared, rounds)
    gpu_both = gpu_ms(both, compared, rounds)

    floor_forward, floor_backward = cost.layer_floor_ms(shape)
    row: dict[str, Any] = {
        "cfg": cfg_of(shape),
        "rounds": rounds,
        "floor_fwd_ms": round(floor_forward, 4),
        "floor_bwd_ms": round(floor_backward, 4),
        "peers": {},
    }
    for name in programs:
        row["peers"][name] = {
            "fwd_ms": round(eager_forward[name], 4),
            "bwd_ms": round(eager_both[name] - eager_forward[name], 4),
            "saved_MiB": round(saved[name] / MIB, 1),
            "peak_fwd_MiB": round(peak_forward[name] / MIB, 1),
            "peak_fwdbwd_MiB": round(peak_both[name] / MIB, 1),
            "grad_MiB": round(gradients[name] / MIB, 1),
            "metadata_ms": round(metadata[name], 4) if name in metadata else None,
            "fwdbwd_one_thread_ms": round(one_thread[name], 4),
            "gpu_fwd_ms": round(gpu_forward.ms[name], 4),
            "gpu_fwdbwd_ms": round(gpu_both.ms[name], 4),
            "gpu_method": f"{gpu_forward.method[name]}/{gpu_both.method[name]}",
            "host_fwdbwd_ms": round(host[name], 4),
        }
    if refused := gpu_forward.refused | gpu_both.refused:
        row["not_captured"] = refused
    if absent:
        row["absent"] = absent
    row["difference_from_ours"] = {name: round(value, 5) for name, value in agreement.items()}
    ours = row["peers"][OURS]
    ours["saved_bytes"] = saved[OURS]
    ours["saved_bytes_by_design"] = cost.saved_bytes(shape)
    program = programs[OURS][0]
    if program.without_dispatch is not None:
        on_a_dispatch_made_beforehand = replace(program, forward=program.without_dispatch).forward_backward
        ours["host_fwdbwd_without_dispatch_ms"] = round(host_ms(on_a_dispatch_made_beforehand, rounds), 4)
        with torch.autograd.set_multithreading_enabled(False):
            ours["host_fwdbwd_single_thread_ms"] = round(host_ms(on_a_dispatch_made_beforehand, rounds), 4)
    if program.kernels is not None:
        same = zip(tensors_in(program.kernels()), tensors_in(program.forward_backward()), strict=True)
        assert all(torch.equal(a, b) for a, b in same), "kernels: expected what the layer computes, to the bit"
        ours["host_fwdbwd_kernels_ms"] = round(host_ms(program.kernels, rounds), 4)
    return row


# ------------------------------------------------------------------------------------------------------------ tables


def ratio(row: dict[str, Any], peer: str, field: str) -> float | None:
    """How many times ours the peer's figure is; above 1 we are ahead."""
    figures = row["peers"]
    return float(figures[peer][field] / figures[OURS][field]) if {peer, OURS} <= figures.keys() else None


def summary(row: dict[str, Any]) -> str:
    """One line on a row, printed as soon as it is measured."""
    ours, sonic = row["peers"][OURS], row["peers"].get(MAIN_PEER, {})
    forward, both = (number(ratio(row, MAIN_PEER, field), 2) for field in ("gpu_fwd_ms", "gpu_fwdbwd_ms"))
    return (
        f"{Sizes(**row['cfg'])}: ours {ours['gpu_fwd_ms']:.3f}, {ours['gpu_fwdbwd_ms']:.3f} ms; "
        f"{MAIN_PEER} x {forward}, {both} ({ours['gpu_method']}, {sonic.get('gpu_method', 'absent')}); "
        f"eager {ours['fwd_ms'] + ours['bwd_ms']:.3f}, in one thread {ours['fwdbwd_one_thread_ms']:.3f}; "
        f"differs {row['difference_from_ours']}{' ' + str(row['not_captured']) if 'not_captured' in row else ''}"
    )


def print_tables(record: dict[str, Any]) -> None:
    """Those of the documentation, and what the host takes."""
    rows = [row for row in record["rows"] if not earlier(row)]
    if rows:
        print("\n\n".join(make(record | {"rows": rows}) for make in (layer_table, eager_table, memory_table)))
        exact = sum(row["peers"][OURS]["saved_bytes"] == row["peers"][OURS]["saved_bytes_by_design"] for row in rows)
        print(f"saved bytes as designed, to the byte: {exact} of {len(rows)} shapes")
    for name in EXTRAS:
        if name in record:
            print(name, json.dumps(record[name]))


# -------------------------------------------------------------------------------------------------------------- main


def arguments() -> argparse.Namespace:
    quick = "four shapes, 7 rounds, no extras; the results file is left alone"
    parser = bench_parser("layer", __doc__, quick=quick, configs=SHAPES, resume=True)
    names = "of " + ", ".join(peers.PEERS)
    parser.add_argument("--peers", type=some_of(peers.PEERS), default=[*peers.DEFAULT_PEERS], help=names)
    parser.add_argument("--only-ours", action="store_true")
    what = f"of {', '.join(EXTRAS)}; 'none' for none (default: all, if all shapes run)"
    parser.add_argument("--extras", type=some_of([*EXTRAS, "none"]), help=what)
    options = settled(parser.parse_args(), "layer", rounds=20)
    options.peers = list(dict.fromkeys([OURS, *([] if options.only_ours else options.peers)]))
    full = options.configs is None and not options.quick
    options.extras = [name for name in options.extras or (EXTRAS if full else ()) if name != "none"]
    options.configs = options.configs or list(QUICK_SHAPES if options.quick else SHAPES)
    whole = set(peers.DEFAULT_PEERS) <= set(options.peers)  # a row with fewer would take the place of one with all
    options.out = options.out or RESULTS / ("layer.json" if whole else "layer-quick.json")
    return options


def main() -> None:
    options = arguments()
    need_hopper()
    record = begun("layer", PROTOCOL.format(rounds=options.rounds), floor=FLOOR)
    if options.out.exists():
        kept = read_json(options.out)
        record |= {name: kept[name] for name in ("rows", *EXTRAS) if name in kept}

    def has(row: dict[str, Any]) -> bool:
        return options.resume and set(options.peers) <= row["peers"].keys() | row.get("absent", {}).keys()

    def is_there(name: str) -> bool:
        return options.resume and name in record and not any(map(earlier, rows_in(record[name])))

    left = [shape for shape in options.configs if not any(map(has, rows_of(shape, record["rows"])))]
    left += [name for name in options.extras if not is_there(name)]
    for each in in_turn(left, options.time_budget):
        if isinstance(each, Sizes):
            row = stamped(measure, each, options.peers, options.rounds)
            record["rows"] = with_row(record["rows"], row)
            print(summary(row), flush=True)
        else:
            record[each] = EXTRAS[each](options.rounds)
        write_json(options.out, record)
    print_tables(record)


if __name__ == "__main__":
    main()
