"""Routing at memory speed: the dispatch builders and the fused top-k, against sorting, torch and the bytes.

    python -m scripts.bench.dispatch                     # results/h200/dispatch.json, results/h200/topk.json
    python -m scripts.bench.dispatch --quick             # three models, no series: dispatch-quick.json, topk-quick.json

Rows are Table 3 of the MoEBlaze paper at T = 2^20, with Qwen3-Next and Kimi K2 added; the paper's two columns (H100)
stand beside. GPU time is a CUDA graph of calls over several sets of inputs and outputs (more than the L2 cache holds),
replayed in turn with the others' graphs, each queued before the GPU begins; medians of 15. CuPy's sort can't be
captured: the durations of its kernels are summed. Host time is that of a
call, calls in a row, none of which waits for the GPU, with preallocated outputs and without (allocating).

Floors, at 4.24 TB/s: dispatch reads 4·T·K bytes and writes 8·T·K; top-k reads T·E logits and writes 8·T·K; its
backward reads T·E logits and 8·T·K, and writes T·E.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blazeproto import cost
from blazeproto.dispatch import build_dispatch, workspace_bytes
from blazeproto.gemm import Sizes
from blazeproto.router import topk_route, topk_route_backward
from scripts.bench import timing
from scripts.bench.common import RESULTS, begun, route, stamped, write_json
from scripts.bench.tables import TABLES
from scripts.bench.timing import host_ms
from scripts.command import argument_parser, need_hopper

T = 2**20
# name, E, K, the paper's sorting and hash columns in ms (Table 3, 1 M tokens, H100)
MODELS = [
    ("Qwen3", 128, 8, 5.1, 2.1),
    ("DeepSeek-V3", 256, 8, 6.8, 3.0),
    ("DBRX", 16, 4, 1.7, 0.9),
    ("Mixtral 8x22B", 8, 2, 1.9, 1.4),
    ("gpt-oss-120b", 128, 4, 3.6, 1.9),
    ("Granite", 40, 8, 3.8, 1.6),
    ("Qwen3-Next", 512, 10, None, None),
    ("Kimi K2", 384, 8, None, None),
]
# T, E, K, dtype, options; the first is the one that README states
TOPK = [
    (T, 128, 8, torch.float32, {"score": "softmax_topk"}),
    (T, 128, 8, torch.float32, {"score": "topk_softmax"}),
    (T, 256, 8, torch.float32, {"score": "sigmoid"}),
    (T, 128, 8, torch.bfloat16, {"score": "softmax_topk"}),
    (T, 8, 2, torch.float32, {"score": "topk_softmax"}),
    (T, 512, 10, torch.float32, {"score": "softmax_topk"}),
]
ROUNDS = 15
SETS = 3
Call = Callable[[], object]


# ------------------------------------------------------------------------------------------------------------- timing


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def gpu_ms(programs: Mapping[str, Sequence[Call]], eager: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, float]:
    """Median GPU milliseconds of one call, by name; a program is its calls on each set of inputs, four times in a graph."""
    runs = {name: partial(run_all, [*calls] * 4) for name, calls in programs.items()}
    graphs = {name: run for name, run in runs.items() if name not in eager}
    times = timing.gpu_ms(graphs, list(graphs), rounds).ms
    if traced := {name: run for name, run in runs.items() if name in eager}:
        times |= {name: found.total for name, found in timing.kernel_times(traced, rounds).items()}
    return {name: times[name] / (4 * len(calls)) for name, calls in programs.items()}


# ----------------------------------------------------------------------------------------------------------- dispatch


def random_experts(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(int(torch.randint(2**31, ())))  # other ids in each call
    return route(Sizes(num_tokens, 0, 0, num_experts, top_k), "uniform", "cuda", generator)


def by_torch_sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """The same three lists by torch.sort, as a peer would write it."""
    flat = experts.flatten()
    keys, pairs = torch.sort(flat, stable=True)
    offsets = torch.searchsorted(keys, torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype))
    index_map = torch.empty_like(pairs)
    index_map[pairs] = torch.arange(len(flat), device=flat.device)
    return pairs.int(), offsets.int(), index_map.int()


def prepared(experts: torch.Tensor, num_experts: int, method: str) -> Call:
    """A call with its own outputs and workspace."""
    num_tokens, top_k = experts.shape
    sizes = {"expert_pair_indices": experts.numel(), "token_index_map": experts.numel()}
    sizes["expert_token_offsets"] = num_experts + 1
    out = {name: torch.empty(size, dtype=torch.int32, device="cuda") for name, size in sizes.items()}
    bytes_needed = workspace_bytes(num_tokens, top_k, num_experts, method)  # type: ignore[arg-type]
    workspace = torch.empty(max(bytes_needed, 4), dtype=torch.uint8, device="cuda")
    options: dict[str, Any] = {"method": method, "out": out, "workspace": workspace}
    return lambda: build_dispatch(experts, num_experts, **options)


def check(experts: torch.Tensor, num_experts: int, methods: Sequence[str]) -> None:
    """A benchmark of a wrong kernel is worth nothing."""
    right = by_torch_sort(experts, num_experts)
    for method in methods:
        got = build_dispatch(experts, num_experts, method=method)  # type: ignore[arg-type]
        lists = (got.expert_pair_indices, got.expert_token_offsets, got.token_index_map)
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(lists, right, strict=True)):
            raise RuntimeError(f"method={method!r} differs from torch.sort at E={num_experts}, {tuple(experts.shape)}")


def dispatch_row(
    num_tokens: int, num_experts: int, top_k: int, methods: Sequence[str], rounds: int = ROUNDS
) -> dict[str, Any]:
    sets = max(2, min(SETS, 2**27 // (12 * num_tokens * top_k)))  # 384 MB of lists at most, but always two sets
    experts = [random_experts(num_tokens, num_experts, top_k) for _ in range(sets)]
    ours = [method for method in methods if method != "torch_sort"]
    check(experts[0], num_experts, ours)
    programs: dict[str, Sequence[Call]] = {name: [prepared(ids, num_experts, name) for ids in experts] for name in ours}
    if "torch_sort" in methods:
        programs["torch_sort"] = [partial(by_torch_sort, ids, num_experts) for ids in experts]
    times = gpu_ms(programs, eager=["sort"], rounds=rounds)
    row: dict[str, Any] = {"T": num_tokens, "E": num_experts, "K": top_k}
    row |= {f"{name}_ms": times[name] for name in methods}
    row["floor_ms"] = cost.floor_ms(0.0, cost.dispatch_bytes(num_tokens * top_k))
    row["tiled_over_floor"] = row["tiled_ms"] / row["floor_ms"]
    row["tiled_workspace_share"] = workspace_bytes(num_tokens, top_k, num_experts) / (8 * num_tokens * top_k)
    return row


def table3(models: Sequence[tuple[str, int, int, float | None, float | None]]) -> list[dict[str, Any]]:
    rows = []
    for name, num_experts, top_k, paper_sort, paper_hash in models:
        row = stamped(dispatch_row, T, num_experts, top_k, ("tiled", "dense", "sort", "torch_sort"))
        rows.append({"name": name, **row, "paper_sort_ms": paper_sort, "paper_hash_ms": paper_hash})
        torch.cuda.empty_cache()
    return rows


def small_row(num_tokens: int) -> dict[str, Any]:
    """GPU and host time where a call is short."""
    experts = random_experts(num_tokens, 128, 8)
    call = prepared(experts, 128, "tiled")
    call()
    row: dict[str, Any] = {"T": num_tokens, "E": 128, "K": 8}
    row["gpu_us"] = 1e3 * gpu_ms({"tiled": [call]})["tiled"]
    row["host_us"] = 1e3 * host_ms(call)
    row["host_us_allocating"] = 1e3 * host_ms(partial(build_dispatch, experts, 128))
    return row


# -------------------------------------------------------------------------------------------------------------- top-k


def by_torch_topk(logits: torch.Tensor, top_k: int, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    if score == "topk_softmax":
        values, experts = logits.topk(top_k)
        return values.float().softmax(1), experts.int()
    dense = logits.float().softmax(1) if score == "softmax_topk" else logits.float().sigmoid()
    values, experts = dense.topk(top_k)
    return values / values.sum(1, keepdim=True) if score == "sigmoid" else values, experts.int()


def topk_row(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, Any]:
    logits = [torch.randn(num_tokens, num_experts, device="cuda").to(dtype) for _ in range(2)]
    out = [
        (
            torch.empty(num_tokens, top_k, device="cuda"),
            torch.empty(num_tokens, top_k, dtype=torch.int32, device="cuda"),
        )
        for _ in logits
    ]
    d_logits = torch.empty_like(logits[0])
    scores, experts = topk_route(logits[0], top_k, **options)
    right, _ = by_torch_topk(logits[0], top_k, options["score"])
    torch.testing.assert_close(scores, right, rtol=1e-4, atol=1e-6)
    forward = [partial(topk_route, x, top_k, out=o, **options) for x, o in zip(logits, out, strict=True)]
    backward = [partial(topk_route_backward, x, experts, scores, out=d_logits, **options) for x in logits]
    plain = [partial(by_torch_topk, x, top_k, options["score"]) for x in logits]
    times = gpu_ms({"fused": forward, "backward": backward, "torch": plain}, rounds=9)
    sizes = (num_tokens, num_experts, top_k, logits[0].element_size())
    return {
        "T": num_tokens,
        "E": num_experts,
        "K": top_k,
        "dtype": str(dtype).removeprefix("torch."),
        **options,
        "fused_ms": times["fused"],
        "torch_ms": times["torch"],
        "floor_ms": cost.floor_ms(0.0, cost.topk_bytes(*sizes)),
        "backward_ms": times["backward"],
        "backward_floor_ms": cost.floor_ms(0.0, cost.topk_backward_bytes(*sizes)),
        "fused_over_floor": times["fused"] / cost.floor_ms(0.0, cost.topk_bytes(*sizes)),
        "torch_over_fused": times["torch"] / times["fused"],
    }


# --------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argument_parser("scripts.bench.dispatch", __doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of dispatch.json and topk.json")
    parser.add_argument("--quick", action="store_true", help="three models, two top-k shapes, no series")
    options = parser.parse_args()
    need_hopper()
    dispatch_file, topk_file = (
        options.out / f"{name}{'-quick' if options.quick else ''}.json" for name in ("dispatch", "topk")
    )
    torch.manual_seed(0)
    record = begun("dispatch", (__doc__ or "").rpartition("\n\n")[0])
    record["rows"] = table3(MODELS[:3] if options.quick else MODELS)
    record["small"] = [stamped(small_row, num_tokens) for num_tokens in (1, 1024, 8192, 65536)]
    record["series"] = {}
    if not options.quick:
        methods = ("tiled", "dense", "torch_sort")
        record["series"] = {
            "T": [stamped(dispatch_row, 2**power, 128, 8, methods, 7) for power in range(12, 23, 2)],
            "E": [stamped(dispatch_row, T, experts, 8, methods, 7) for experts in (8, 16, 32, 64, 128, 256, 512)],
        }
    write_json(dispatch_file, record)
    print(f"{TABLES['dispatch'](record)}\n\n{TABLES['small_dispatch'](record)}\n", flush=True)
    rows = [stamped(topk_row, *row) for row in (TOPK[:2] if options.quick else TOPK)]
    record = {key: value for key, value in record.items() if key not in ("small", "series")}
    record |= {"benchmark": "topk", "rows": rows}
    write_json(topk_file, record)
    print(f"{TABLES['topk'](record)}\n\nwrote {dispatch_file} and {topk_file.name}")


if __name__ == "__main__":
    main()
