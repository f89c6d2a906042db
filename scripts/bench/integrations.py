"""Our experts in other libraries' training: beside transformers' own ``grouped_mm``, in one process, in turn (A B A B).

    python -m scripts.bench.integrations                   # all parts -> results/h200/integrations.json
    python -m scripts.bench.integrations --parts gpt_oss   # one; the others' rows stay

qwen: a whole training step (forward, loss, backward, SGD) of one Qwen3-MoE model of four layers, whose implementation
`set_experts_implementation` switches; bf16, sdpa, no recomputation. Milliseconds between CUDA events around a step, the host's
time included; medians of eight steps after two. Peak: the most that the allocator had given out, weights included.

gpt_oss: the experts module of gpt-oss alone, biases and clamp included, forward + backward; no leaf has a gradient before. Times
are the durations of the kernels, by the profiler, an overlap counted once; the GPU is held until the host has queued a call.

Random weights, tokens and routing. Before it is timed, each experts module computes by both implementations the same output and
gradients, on the same input: in a model that which it has there. A loss would not tell: experts that give zeros move the
one of random weights by 2e-4.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blazeproto.lab.times import elapsed_ms
from scripts.bench.common import MIB, RESULTS, begun, bench_parser, in_turn, read_json, stamped, write_json
from scripts.bench.module import times_of, verdict
from scripts.bench.tables import TABLES
from scripts.bench.timing import Rotation, peak_bytes, relative_difference
from scripts.command import need_hopper, refuse, some_of

Row = dict[str, Any]

IMPLEMENTATIONS = ("grouped_mm", "blazeproto")
ROUNDS, WARM_UPS = 8, 2

SAME_OUTPUT = 0.02  # the norm of the difference over that of the output or gradient, in bf16

QWEN = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN_BATCH = (8, 4096)
QWEN_LEAST_RATIO, QWEN_MOST_PEAK = 1.33, 0.85  # grouped_mm's time over ours; our peak over its

GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
GPT_OSS_TOKENS = 16384
GPT_OSS_LEAST_RATIO = 1.4


# ------------------------------------------------------------------------------------------------- an experts module


class Program:
    """An experts module on fixed tokens (T, d), ids and scores (T, K), and an output gradient (T, d); and its gradients."""

    def __init__(self, experts: Any, x: Tensor, ids: Tensor, scores: Tensor, d_out: Tensor) -> None:
        self.experts, self.ids, self.d_out = experts, ids, d_out
        self.x, self.scores = (tensor.detach().requires_grad_() for tensor in (x, scores))

    def call(self, name: str) -> Callable[[], dict[str, Tensor]]:
        """Forward and backward by an implementation: the output, and the gradients of x, scores and the weights."""

        def forward_backward() -> dict[str, Tensor]:
            self.clear()
            self.experts.config._experts_implementation = name
            out = self.experts(self.x, self.ids, self.scores)
            out.backward(self.d_out)
            # Not those of biases, which transformers' grouped_mm sums in bf16.
            weights = {name: p.grad for name, p in self.experts.named_parameters() if p.dim() == 3}
            return {"out": out.detach(), "x": self.x.grad, "scores": self.scores.grad, **weights}

        return forward_backward

    def clear(self) -> None:
        for leaf in (self.x, self.scores, *self.experts.parameters()):
            leaf.grad = None

    def differences(self) -> dict[str, float]:
        """The norm of ours minus grouped_mm's over that of grouped_mm's. RuntimeError where one is more than `SAME_OUTPUT`."""
        theirs, ours = (self.call(name)() for name in IMPLEMENTATIONS)
        self.clear()
        found = {name: round(relative_difference(ours[name], theirs[name]), 6) for name in theirs}
        if not all(difference <= SAME_OUTPUT for difference in found.values()):
            raise RuntimeError(f"the implementations compute different experts: {found}")
        return found


# ------------------------------------------------------------------------------------------------------ a whole model


def qwen_model(sizes: dict[str, int], device: str) -> Any:
    """Four layers of Qwen3-MoE in training mode, in bf16."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.train()


def most_allocated(call: Callable[[], object]) -> int:
    """The most bytes that were allocated at a time during a call, what was there before included."""
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def programs_of(model: Any, ids: Tensor) -> list[Program]:
    """Each experts module of a model, on the input that it has there, and a random output gradient."""
    inputs: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
    experts = [module for module in model.modules() if hasattr(module, "is_transposed")]
    hooks = [e.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args)) for e in experts]
    model.set_experts_implementation(IMPLEMENTATIONS[0])
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return [Program(module, x, index, scores, torch.randn_like(x)) for module, (x, index, scores) in inputs.items()]


def measure_qwen(
    rounds: int = ROUNDS, sizes: dict[str, int] = QWEN, batch: tuple[int, int] = QWEN_BATCH, device: str = "cuda"
) -> Row:
    """The row of "qwen". RuntimeError where an experts module's outputs or gradients differ by more than `SAME_OUTPUT`."""
    torch.manual_seed(0)
    model = qwen_model(sizes, device)
    ids = torch.randint(0, sizes["vocab_size"], batch, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: dict[str, list[Tensor]] = {name: [] for name in IMPLEMENTATIONS}

    def step() -> None:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses[model.config._experts_implementation].append(loss.detach())

    differences = [program.differences() for program in programs_of(model, ids)]
    samples: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    peaks = dict.fromkeys(IMPLEMENTATIONS, 0)
    for turn in range(WARM_UPS + rounds):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            if turn < WARM_UPS:
                peaks[name] = max(peaks[name], most_allocated(step))
            else:
                samples[name].append(elapsed_ms(step, 1))
    return {
        "cfg": {**sizes, "sequences": batch[0], "tokens": batch[1]},
        "ms": {name: round(statistics.median(times), 3) for name, times in samples.items()},
        "samples_ms": {name: [round(time, 3) for time in times] for name, times in samples.items()},
        "peak_MiB": {name: round(peak / MIB, 1) for name, peak in peaks.items()},
        "difference": {name: max(each[name] for each in differences) for name in differences[0]},
        "losses": {name: [round(float(loss), 4) for loss in each] for name, each in losses.items()},
    }


def claims_of_qwen(row: Row) -> dict[str, bool]:
    faster, peak = ratio(row["ms"]), 1 / ratio(row["peak_MiB"])
    return {
        f"qwen: {faster:.3f} x as fast as grouped_mm, at least {QWEN_LEAST_RATIO}": faster >= QWEN_LEAST_RATIO,
        f"qwen: peak {peak:.3f} of grouped_mm's, at most {QWEN_MOST_PEAK}": peak <= QWEN_MOST_PEAK,
    }


# --------------------------------------------------------------------------------------------------- gpt-oss's experts


def gpt_oss(sizes: dict[str, int], tokens: int, device: str) -> Program:
    """gpt-oss's experts module in bf16, with random weights, tokens and routing."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    config = GptOssConfig(**sizes)
    with torch.device(device):
        experts = GptOssExperts(config).bfloat16()
        x, d_out = (torch.randn(tokens, config.hidden_size, dtype=torch.bfloat16) for _ in range(2))
        ids = torch.rand(tokens, config.num_local_experts).topk(config.num_experts_per_tok).indices
        scores = torch.rand(ids.shape).softmax(dim=1).bfloat16()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, config.hidden_size**-0.5)
    return Program(experts, x, ids, scores, d_out)


def measure_gpt_oss(
    rounds: int = ROUNDS, sizes: dict[str, int] = GPT_OSS, tokens: int = GPT_OSS_TOKENS, device: str = "cuda"
) -> Row:
    """The row of "gpt_oss". RuntimeError where outputs or gradients differ by more than `SAME_OUTPUT`."""
    program = gpt_oss(sizes, tokens, device)
    differences = program.differences()
    calls = {name: program.call(name) for name in IMPLEMENTATIONS}
    peaks = {}
    for name, call in calls.items():
        program.clear()
        peaks[name] = peak_bytes(call)
    program.clear()
    times = times_of({name: Rotation([call]) for name, call in calls.items()}, rounds)
    return {
        "cfg": {**sizes, "tokens": tokens},
        "ms": {name: round(time.busy, 4) for name, time in times.items()},
        "sum_ms": {name: round(time.total, 4) for name, time in times.items()},
        "peak_MiB": {name: round(peak / MIB, 1) for name, peak in peaks.items()},
        "difference": differences,
    }


def claims_of_gpt_oss(row: Row) -> dict[str, bool]:
    faster = ratio(row["ms"])
    return {
        f"gpt_oss: {faster:.3f} x as fast as grouped_mm, at least {GPT_OSS_LEAST_RATIO}": faster >= GPT_OSS_LEAST_RATIO
    }


# --------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class Part:
    """What measures a row, given how many rounds; and what is asked of the row, in words, and whether it holds.

    A row has "cfg", and by program "ms" and "peak_MiB".
    """

    measure: Callable[[int], Row]
    claims: Callable[[Row], dict[str, bool]]


PARTS = {
    "qwen": Part(measure_qwen, claims_of_qwen),
    "gpt_oss": Part(measure_gpt_oss, claims_of_gpt_oss),
}


def ratio(values: dict[str, float]) -> float:
    """grouped_mm's over ours."""
    return values["grouped_mm"] / values["blazeproto"]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = bench_parser("integrations", __doc__)
    parser.add_argument("--parts", type=some_of(PARTS), default=[*PARTS], help=f"of {', '.join(PARTS)}")
    parser.set_defaults(rounds=ROUNDS, out=RESULTS / "integrations.json")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    need_hopper()
    if importlib.util.find_spec("transformers") is None:
        refuse("transformers is not installed: pip install -e '.[transformers]'; nothing was run")
    from blazeproto.integrations.transformers import register

    register()
    record = begun("integrations", __doc__, 3) | {"parts": {}}
    del record["rows"]
    if options.out.exists():
        record["parts"] = read_json(options.out)["parts"]
    for part in in_turn(options.parts):
        record["parts"][part] = stamped(PARTS[part].measure, options.rounds)
        write_json(options.out, record)
    rows = {part: record["parts"][part] for part in options.parts}
    print(TABLES["integrations"](record | {"parts": rows}))
    for part, row in rows.items():
        for what, holds in PARTS[part].claims(row).items():
            print(verdict(what, holds))


if __name__ == "__main__":
    main()
