"""One MoE layer against its peers: time, saved and peak bytes, on the shapes of both papers.

    python -m scripts.bench.layer                       # 23 shapes, and further parts -> results/h200/layer.json on an H200
    python -m scripts.bench.layer --quick               # four shapes, fewer rounds
    python -m scripts.bench.layer --parts shapes --configs 13-18,23
    python -m scripts.bench.layer --resume --time-budget 540   # goes on where the last run of the same sources stopped

One SwiGLU MoE layer, bf16, random data and uniform routing; top-k excluded, dispatch metadata included. Programs run in one
process, in turn (A B A B); medians of 20 rounds (8 beyond 60 ms) after at least 5 warm-ups. eager: CUDA events (one_thread: the
backward in the calling thread). host: what the host spends in a call, of a few in a row (kernels: in allocating and launching
alone, without autograd). gpu: CUDA-graph replay, queued before the GPU begins, or the sum of kernel durations where gpu_method
says so. bwd: fwdbwd less fwd. saved_MiB: by saved_tensors_hooks, without weights. Peaks: over what was allocated before.
"""

from functools import partial

import torch

from blazeproto import cost
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.common import MIB, SHAPES, TABLES
from scripts.bench.markdown import OURS
from scripts.bench.peers import LayerInputs, Program
from scripts.bench.peers.layers import DEFAULT_PEERS, builds_of, launch_kernels, ours
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import (
    PARTS,
    Machine,
    Row,
    host_ms,
    relative_difference,
    rotations,
    saved_bytes,
    step_times,
    tensors_in,
)

MAIN_PEER = "sonic"
ROTATE_BELOW = 160 * MIB  # smaller inputs get several sets, or they would sit in the 50 MB L2
MAX_SETS = 3
FLOOR = (
    f"sum over the eight kernels of max(operations/{cost.PEAK_OPERATIONS / 1e12:.0f} TFLOP/s, "
    f"least bytes/{cost.PEAK_BYTES / 1e12:.2f} TB/s)"
)


def input_sets(shape: Sizes, machine: Machine) -> int:
    bytes_a_set = 2 * (2 * shape.T * shape.d + 3 * shape.E * shape.n * shape.d)
    return max(1, min(MAX_SETS, -(-ROTATE_BELOW // bytes_a_set))) if machine.on_gpu else 1


def inputs_of(shape: Sizes, machine: Machine) -> list[LayerInputs]:
    """The sets of inputs that a layer is timed on, in turn."""
    return [peers.make_inputs(shape, seed=seed, device=machine.device) for seed in range(input_sets(shape, machine))]


def check_agreement(programs: dict[str, list[Program]]) -> dict[str, float]:
    """Largest relative difference of output and input gradient between ours and each peer that computes the same layer."""
    compared = {name: each[0] for name, each in programs.items() if each[0].computes_layer}
    mine = tensors_in(compared.pop(OURS).forward_backward())[:2]
    made = ((name, tensors_in(program.forward_backward())[:2]) for name, program in compared.items())
    return {name: round(max(map(relative_difference, mine, theirs)), 5) for name, theirs in made}


def measure(shape: Sizes, machine: Machine) -> Row:
    """A shape's floors, and every program's figures."""
    inputs = inputs_of(shape, machine)
    programs, absent = peers.build_all(builds_of(DEFAULT_PEERS), shape, inputs)
    forward, both = (rotations(programs, step) for step in ("forward", "forward_backward"))
    saved = {name: saved_bytes(each[0].forward, each[0].weights) for name, each in programs.items()}
    bytes_of = {
        name: {
            "saved_MiB": saved[name],
            "peak_fwd_MiB": machine.peak_bytes(forward[name]),
            "peak_fwdbwd_MiB": machine.peak_bytes(both[name]),
            "grad_MiB": sum(t.nbytes for t in tensors_in(each[0].forward_backward())[1:]),
        }
        for name, each in programs.items()
    }
    agreement = check_agreement(programs)

    eager_forward, eager_both = machine.eager(forward), machine.eager(both)
    metadata = machine.eager({name: p.metadata for name, (p, *_) in programs.items() if p.metadata is not None})
    host = {name: host_ms(call, machine.rounds) for name, call in both.items()}
    # By default the engine runs a backward in a thread of its own; below a millisecond its waking up is most of what is timed.
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = machine.eager(both)
    gpu, refused = step_times(programs, machine, (OURS, MAIN_PEER, "bmm_ub"), "gpu_")

    floors = zip(("floor_fwd_ms", "floor_bwd_ms"), cost.layer_floor_ms(shape), strict=True)
    row: Row = {"rounds": machine.rounds} | {name: round(floor, 4) for name, floor in floors} | {"peers": {}}
    for name in programs:
        row["peers"][name] = {
            "fwd_ms": round(eager_forward[name], 4),
            "bwd_ms": round(eager_both[name] - eager_forward[name], 4),
            **{field: round(each / MIB, 1) for field, each in bytes_of[name].items()},
            "metadata_ms": round(metadata[name], 4) if name in metadata else None,
            "fwdbwd_one_thread_ms": round(one_thread[name], 4),
            **gpu[name],
            "host_fwdbwd_ms": round(host[name], 4),
        }
    row |= {"not_captured": refused} if refused else {}
    row |= {"absent": absent} if absent else {}
    row["peers"][OURS] |= {"saved_bytes": saved[OURS], "saved_bytes_by_design": cost.saved_bytes(shape)}
    row["peers"][OURS] |= host_times(shape, inputs[0], machine)
    return row | {"difference_from_ours": agreement}


def host_times(shape: Sizes, inputs: LayerInputs, machine: Machine) -> Row:
    """The host's milliseconds in a step of ours on a dispatch made beforehand, and in its kernels alone."""
    dispatch = build_dispatch(inputs.experts, shape.E)
    program = ours(shape, inputs, dispatch=dispatch)
    row = {"host_fwdbwd_without_dispatch_ms": round(host_ms(program.forward_backward, machine.rounds), 4)}
    with torch.autograd.set_multithreading_enabled(False):
        row["host_fwdbwd_single_thread_ms"] = round(host_ms(program.forward_backward, machine.rounds), 4)
    if machine.on_gpu:
        kernels = partial(launch_kernels, inputs, dispatch)
        same = zip(tensors_in(kernels()), tensors_in(program.forward_backward()), strict=True)
        assert all(torch.equal(a, b) for a, b in same), "kernels: expected what the layer computes, to the bit"
        row["host_fwdbwd_kernels_ms"] = round(host_ms(kernels, machine.rounds), 4)
    return row


# ------------------------------------------------------------- bounded workspaces, four million tokens, skewed routings

# workspace_bytes over T. Each token of a chunk takes 6 KiB in these shapes, so these make twelve chunks and four.
WORKSPACE_BYTES_A_TOKEN = (512, 1536)
LARGE_SHAPES = tuple(shape for shape in TABLES["moeblaze-2"] if shape.T >= 1 << 19)
FOUR_MILLION = Sizes(1 << 22, 256, 256, 128, 4)
SKEW_SHAPES = (
    Sizes(40960, 768, 256, 128, 8),
    Sizes(32768, 4096, 1024, 64, 4),
    Sizes(65536, 1024, 4096, 8, 2),
    Sizes(131072, 256, 256, 128, 4),
)
ROUTINGS = ("uniform", "zipf", "half_on_one")


def bounded_workspace(shape: Sizes, machine: Machine) -> Row:
    """Ours in token chunks against ours whole and SonicMoE: time and peak, forward + backward."""
    bounds = {f"bounded_{share}": share * shape.T for share in WORKSPACE_BYTES_A_TOKEN}
    builds: dict[str, peers.Build] = {OURS: ours}
    builds |= {name: partial(ours, workspace_bytes=bound) for name, bound in bounds.items()}
    inputs = peers.make_inputs(shape, device=machine.device)
    programs, absent = peers.build_all(builds | builds_of(["sonic"]), shape, [inputs])
    calls = rotations(programs, "forward_backward")
    peak = {name: machine.peak_bytes(call) / MIB for name, call in calls.items()}
    eager, gpu = machine.eager(calls), machine.times(calls, tuple(calls))
    return {
        "programs": {
            name: {
                "workspace_bytes": bounds.get(name),
                "fwdbwd_ms": round(eager[name], 3),
                "gpu_fwdbwd_ms": round(gpu.ms[name], 3),
                "gpu_method": gpu.method[name],
                "peak_fwdbwd_MiB": round(peak[name], 1),
                "time_to_unbounded": round(gpu.ms[name] / gpu.ms[OURS], 3),
                "peak_to_sonic": round(peak[name] / peak["sonic"], 3) if "sonic" in peak else None,
            }
            for name in calls
        }
    } | ({"absent": absent} if absent else {})


def four_million_tokens(shape: Sizes, machine: Machine) -> Row:
    """Forward and backward of 4 Mi tokens: it fits, its gradients are finite, and what it takes."""
    step = ours(shape, peers.make_inputs(shape, device=machine.device)).forward_backward
    finite = all(bool(part.isfinite().all()) for gradient in step()[1] for part in gradient.split(1 << 18))
    peak, ms = machine.peak_bytes(step), machine.eager({OURS: step})[OURS]
    row = {"finite": finite, "fwdbwd_ms": round(ms, 2), "peak_fwdbwd_MiB": round(peak / MIB, 1)}
    if machine.on_gpu:
        row["gpu_MiB"] = round(torch.cuda.get_device_properties(0).total_memory / MIB)
    return row


def skewed_routing(shape: Sizes, machine: Machine) -> Row:
    """Time under skewed routings over the uniform one's: the same number of rows everywhere, so the same work."""
    inputs = {kind: peers.make_inputs(shape, kind, device=machine.device) for kind in ROUTINGS}
    programs = {kind: [ours(shape, one)] for kind, one in inputs.items()}
    for (program,) in programs.values():
        program.forward_backward()
    found, _ = step_times(programs, machine, ROUTINGS, "gpu_")
    row: Row = {"gpu_method": found["uniform"]["gpu_method"].rpartition("/")[2]}
    for kind, each in found.items():
        ms = {field: each[field] for field in ("gpu_fwd_ms", "gpu_fwdbwd_ms")}
        ratios = {part: ms[f"gpu_{part}_ms"] / found["uniform"][f"gpu_{part}_ms"] for part in PARTS}
        row[kind] = ms | {f"{part}_to_uniform": round(ratio, 3) for part, ratio in ratios.items()}
    return row


# --------------------------------------------------------------------------------------------------------------- parts

SMALL = Sizes(64, 32, 16, 8, 2)
BENCH = Bench(
    "layer",
    __doc__,
    {
        "shapes": Item(measure, SHAPES, (SMALL,), (SHAPES[0], SHAPES[8], SHAPES[15], SHAPES[20])),
        "workspace": Item(bounded_workspace, LARGE_SHAPES, (SMALL,), part="workspace"),
        "four_million_tokens": Item(
            four_million_tokens,
            (FOUR_MILLION,),
            (SMALL,),
            part="four_million_tokens",
            single=True,
            rounds=5,
        ),
        "skew": Item(skewed_routing, SKEW_SHAPES, (SMALL,), part="skew"),
    },
    head={"floor": FLOOR},
)

if __name__ == "__main__":
    run(BENCH)
