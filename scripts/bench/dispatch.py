"""Routing at memory speed: the dispatch builders and the fused top-k, against sorting, torch and the bytes.

    python -m scripts.bench.dispatch                     # -> results/h200/dispatch.json and topk.json on an H200
    python -m scripts.bench.dispatch --quick             # three models, no series: dispatch-quick.json, topk-quick.json

Rows are Table 3 of the MoEBlaze paper at T = 2^20, with Qwen3-Next and Kimi K2 added; the paper's two columns (H100)
stand beside. GPU time is a CUDA graph of calls over several sets of inputs and outputs (more than the L2 cache holds),
replayed in turn with the others' graphs, each queued before the GPU begins; medians of 15. CuPy's sort can't be
captured: the durations of its kernels are summed. Host time is a
call's, with calls in a row, none of which waits for the GPU, with preallocated outputs and without (allocating).

Floors, at 4.24 TB/s: dispatch reads 4·T·K bytes and writes 8·T·K; top-k reads T·E logits and writes 8·T·K; its
backward reads T·E logits and 8·T·K, and writes T·E.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from blazeproto import cost
from blazeproto.dispatch import build_dispatch, workspace_bytes
from blazeproto.gemm import Sizes
from blazeproto.router import topk_route, topk_route_backward
from scripts.bench.common import inverse_of, route
from scripts.bench.paper.printed import DISPATCH
from scripts.bench.running import Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row, host_ms

T = 2**20
MODELS = [  # name, E, K
    ("Qwen3", 128, 8),
    ("DeepSeek-V3", 256, 8),
    ("DBRX", 16, 4),
    ("Mixtral 8x22B", 8, 2),
    ("gpt-oss-120b", 128, 4),
    ("Granite", 40, 8),
    ("Qwen3-Next", 512, 10),
    ("Kimi K2", 384, 8),
]
SETS = 3
Call = Callable[[], object]


class Routed(NamedTuple):
    """A case: sizes, and a model's name or none."""

    T: int
    E: int
    K: int
    name: str = ""

    @property
    def key(self) -> Row:
        return ({"name": self.name} if self.name else {}) | {"T": self.T, "E": self.E, "K": self.K}


class TopK(NamedTuple):
    """A case of the fused top-k."""

    T: int
    E: int
    K: int
    dtype: str
    score: str


# ------------------------------------------------------------------------------------------------------------- timing


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def gpu_ms(programs: Mapping[str, Sequence[Call]], machine: Machine) -> dict[str, float]:
    """Median GPU milliseconds of one call, by name; a program is its calls on each set of inputs, four times in a graph."""
    runs: dict[str, Call] = {name: partial(run_all, [*calls] * 4) for name, calls in programs.items()}
    traced = {name: runs.pop(name) for name in [*runs] if name == "sort"}  # CuPy's can't be captured
    times = machine.times(runs, tuple(runs)).ms
    if traced:
        times |= machine.times(traced, graphs=False).ms
    return {name: times[name] / (4 * len(calls)) for name, calls in programs.items()}


# ----------------------------------------------------------------------------------------------------------- dispatch


def random_experts(num_tokens: int, num_experts: int, top_k: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**31, ())))  # other ids in each call
    return route(Sizes(num_tokens, 0, 0, num_experts, top_k), "uniform", device, generator)


def by_torch_sort(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """The same three lists by torch.sort, as a peer would write it."""
    flat = experts.flatten()
    keys, pairs = torch.sort(flat, stable=True)
    offsets = torch.searchsorted(keys, torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype))
    return pairs.int(), offsets.int(), inverse_of(pairs).int()


def prepared(experts: torch.Tensor, num_experts: int, method: str) -> Call:
    """A call with its own outputs and workspace."""
    (num_tokens, top_k), pairs = experts.shape, experts.numel()
    sizes = {"expert_pair_indices": pairs, "token_index_map": pairs, "expert_token_offsets": num_experts + 1}
    out = {name: torch.empty(size, dtype=torch.int32, device=experts.device) for name, size in sizes.items()}
    bytes_needed = workspace_bytes(num_tokens, top_k, num_experts, method)  # type: ignore[arg-type]
    workspace = torch.empty(max(bytes_needed, 4), dtype=torch.uint8, device=experts.device)
    return partial(build_dispatch, experts, num_experts, method=method, out=out, workspace=workspace)  # type: ignore[arg-type]


def check(experts: torch.Tensor, num_experts: int, methods: Sequence[str]) -> None:
    """A benchmark of a wrong kernel is worth nothing."""
    right = by_torch_sort(experts, num_experts)
    for method in methods:
        got = build_dispatch(experts, num_experts, method=method)  # type: ignore[arg-type]
        lists = (got.expert_pair_indices, got.expert_token_offsets, got.token_index_map)
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(lists, right, strict=True)):
            raise RuntimeError(f"method={method!r} differs from torch.sort at E={num_experts}, {tuple(experts.shape)}")


def dispatch_row(case: Routed, machine: Machine) -> Row:
    num_tokens, num_experts, top_k, name = case
    pairs = num_tokens * top_k
    sets = max(2, min(SETS, 2**27 // (12 * pairs)))  # 384 MB of lists at most, but always two sets
    experts = [random_experts(num_tokens, num_experts, top_k, machine.device) for _ in range(sets)]
    ours = ["tiled", "dense", *(["sort"] if name and machine.on_gpu else [])]
    check(experts[0], num_experts, ours)
    programs: dict[str, Sequence[Call]] = {each: [prepared(ids, num_experts, each) for ids in experts] for each in ours}
    programs["torch_sort"] = [partial(by_torch_sort, ids, num_experts) for ids in experts]
    times, floor = gpu_ms(programs, machine), cost.floor_ms(0.0, cost.dispatch_bytes(pairs))
    row: Row = {f"{name}_ms": ms for name, ms in times.items()}
    row |= {"floor_ms": floor, "tiled_over_floor": times["tiled"] / floor}
    row["tiled_workspace_share"] = workspace_bytes(num_tokens, top_k, num_experts) / (8 * pairs)
    printed = zip(("paper_sort_ms", "paper_hash_ms"), DISPATCH.get(name, (None, None)), strict=True)
    return row | (dict(printed) if name else {})


def small_row(case: Routed, machine: Machine) -> Row:
    """GPU and host time where a call is short."""
    experts = random_experts(case.T, case.E, case.K, machine.device)
    call = prepared(experts, case.E, "tiled")
    call()
    row = {"gpu_us": 1e3 * gpu_ms({"tiled": [call]}, machine)["tiled"], "host_us": 1e3 * host_ms(call)}
    return row | {"host_us_allocating": 1e3 * host_ms(partial(build_dispatch, experts, case.E))}


# -------------------------------------------------------------------------------------------------------------- top-k


def by_torch_topk(logits: torch.Tensor, top_k: int, score: str) -> tuple[torch.Tensor, torch.Tensor]:
    if score == "topk_softmax":
        values, experts = logits.topk(top_k)
        return values.float().softmax(1), experts.int()
    dense = logits.float().softmax(1) if score == "softmax_topk" else logits.float().sigmoid()
    values, experts = dense.topk(top_k)
    return values / values.sum(1, keepdim=True) if score == "sigmoid" else values, experts.int()


def topk_row(case: TopK, machine: Machine) -> Row:
    options: dict[str, Any] = {"score": case.score}
    (T, E, K), device = case[:3], machine.device
    logits = [torch.randn(T, E, device=device).to(getattr(torch, case.dtype)) for _ in range(2)]
    out = [(torch.empty(T, K, device=device), torch.empty(T, K, dtype=torch.int32, device=device)) for _ in logits]
    scores, experts = topk_route(logits[0], K, **options)
    torch.testing.assert_close(scores, by_torch_topk(logits[0], K, case.score)[0], rtol=1e-4, atol=1e-6)
    back = partial(topk_route_backward, experts=experts, d_scores=scores, out=torch.empty_like(logits[0]), **options)
    programs: dict[str, Sequence[Call]] = {
        "fused": [partial(topk_route, x, K, out=o, **options) for x, o in zip(logits, out, strict=True)],
        "backward": [partial(back, x) for x in logits],
        "torch": [partial(by_torch_topk, x, K, case.score) for x in logits],
    }
    times, sizes = gpu_ms(programs, machine), (T, E, K, logits[0].element_size())
    floor = cost.floor_ms(0.0, cost.topk_bytes(*sizes))
    return {
        "fused_ms": times["fused"],
        "torch_ms": times["torch"],
        "floor_ms": floor,
        "backward_ms": times["backward"],
        "backward_floor_ms": cost.floor_ms(0.0, cost.topk_backward_bytes(*sizes)),
        "fused_over_floor": times["fused"] / floor,
        "torch_over_fused": times["torch"] / times["fused"],
    }


# --------------------------------------------------------------------------------------------------------------- cases

TABLE_3 = [Routed(T, E, K, name) for name, E, K in MODELS]
FEW = [Routed(tokens, 128, 8) for tokens in (1, 1024, 8192, 65536)]
OVER_T = [Routed(2**power, 128, 8) for power in range(12, 23, 2)]
OVER_E = [Routed(T, experts, 8) for experts in (8, 16, 32, 64, 128, 256, 512)]
TOPK = [  # the first is the one that README states
    TopK(T, 128, 8, "float32", "softmax_topk"),
    TopK(T, 128, 8, "float32", "topk_softmax"),
    TopK(T, 256, 8, "float32", "sigmoid"),
    TopK(T, 128, 8, "bfloat16", "softmax_topk"),
    TopK(T, 8, 2, "float32", "topk_softmax"),
    TopK(T, 512, 10, "float32", "softmax_topk"),
]
SMALL = [Routed(300, 16, 4, "small")]
BENCH = Bench(
    "dispatch",
    __doc__,
    {
        "models": Item(dispatch_row, TABLE_3, SMALL, TABLE_3[:3], of_case, rounds=15),
        "small": Item(small_row, FEW, SMALL, FEW, of_case, part="small", rounds=15),
        "series_T": Item(dispatch_row, OVER_T, SMALL, (), of_case, part="series/T", rounds=7),
        "series_E": Item(dispatch_row, OVER_E, SMALL, (), of_case, part="series/E", rounds=7),
        "topk": Item(topk_row, TOPK, [TOPK[0]._replace(T=300)], TOPK[:2], TopK._asdict, file="topk", rounds=9),
    },
    paragraphs=2,
)

if __name__ == "__main__":
    run(BENCH)
