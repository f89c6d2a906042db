"""Our experts in other libraries' training: beside transformers' own ``grouped_mm``, in one process, in turn (A B A B).

    python -m scripts.bench.integrations                   # all parts -> results/h200/integrations.json on an H200
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

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto.lab.times import Call, elapsed_ms
from scripts.bench.common import MIB
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, host_ms, relative_difference
from scripts.command import refuse
from scripts.lm.ranks import Ranks

IMPLEMENTATIONS = ("grouped_mm", "blazeproto")
WARM_UPS = 2

SAME_OUTPUT = 0.02  # the norm of the difference over that of the output or gradient, in bf16

Sizes = dict[str, int]
QWEN: Sizes = {
    "sequences": 8,
    "tokens": 4096,
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
QWEN_LEAST_RATIO, QWEN_MOST_PEAK = 1.33, 0.85  # grouped_mm's time over ours; our peak over its

GPT_OSS: Sizes = {
    "tokens": 16384,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
LEAST_RATIO = {"qwen": QWEN_LEAST_RATIO, "gpt_oss": 1.4}


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
        """The norm of the difference to grouped_mm's, over the norm of grouped_mm's. RuntimeError where one is more than
        `SAME_OUTPUT`."""
        theirs, ours = (self.call(name)() for name in IMPLEMENTATIONS)
        self.clear()
        found = {name: round(relative_difference(ours[name], theirs[name]), 6) for name in theirs}
        if not all(difference <= SAME_OUTPUT for difference in found.values()):
            raise RuntimeError(f"the implementations compute different experts: {found}")
        return found


# ------------------------------------------------------------------------------------------------------ a whole model


def qwen_model(sizes: Sizes, device: str) -> Any:
    """Four layers of Qwen3-MoE in training mode, in bf16."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.train()


def programs_of(model: Any, ids: Tensor) -> list[Program]:
    """Each experts module of a model, on the input that it has there, and a random output gradient."""
    inputs: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def note(module: Any, given: tuple[Any, ...]) -> None:
        if hasattr(module, "is_transposed"):  # as experts modules alone have
            inputs[module] = given

    model.set_experts_implementation(IMPLEMENTATIONS[0])
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    return [Program(module, x, index, scores, torch.randn_like(x)) for module, (x, index, scores) in inputs.items()]


def measure_qwen(sizes: Sizes, machine: Machine) -> Row:
    """RuntimeError where an experts module's outputs or gradients differ by more than `SAME_OUTPUT`."""
    config = dict(sizes)
    batch = {name: config.pop(name) for name in ("sequences", "tokens")}
    model = qwen_model(config, machine.device)
    ids = torch.randint(0, sizes["vocab_size"], (*batch.values(),), device=machine.device)
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
    for turn in range(WARM_UPS + machine.rounds):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            if turn < WARM_UPS:
                # Without a GPU nothing is allocated there.
                peaks[name] = max(peaks[name], torch.cuda.memory_allocated() + machine.peak_bytes(step))
            else:
                samples[name].append(elapsed_ms(step, 1) if machine.on_gpu else host_ms(step, 1, calls=1))
    return {
        "cfg": config | batch,
        "ms": {name: round(statistics.median(times), 3) for name, times in samples.items()},
        "samples_ms": {name: [round(time, 3) for time in times] for name, times in samples.items()},
        "peak_MiB": {name: round(peak / MIB, 1) for name, peak in peaks.items()},
        "difference": {name: max(each[name] for each in differences) for name in differences[0]},
        "losses": {name: [round(float(loss), 4) for loss in each] for name, each in losses.items()},
    }


# --------------------------------------------------------------------------------------------------- gpt-oss's experts


def gpt_oss(sizes: Sizes, device: str) -> Program:
    """gpt-oss's experts module in bf16, with random weights, tokens and routing."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(**{name: value for name, value in sizes.items() if name != "tokens"})
    with torch.device(device):
        experts = GptOssExperts(config).bfloat16()
        x, d_out = (torch.randn(sizes["tokens"], config.hidden_size, dtype=torch.bfloat16) for _ in range(2))
        ids = torch.rand(len(x), config.num_local_experts).topk(config.num_experts_per_tok).indices
        scores = torch.rand(ids.shape).softmax(dim=1).bfloat16()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, config.hidden_size**-0.5)
    return Program(experts, x, ids, scores, d_out)


def measure_gpt_oss(sizes: Sizes, machine: Machine) -> Row:
    """RuntimeError where outputs or gradients differ by more than `SAME_OUTPUT`."""
    program = gpt_oss(sizes, machine.device)
    differences = program.differences()
    calls: dict[str, Call] = {name: program.call(name) for name in IMPLEMENTATIONS}
    peaks = {}
    for name, call in calls.items():
        peaks[name] = round(machine.peak_bytes(call) / MIB, 1)
        program.clear()
    found = machine.kernel_figures(calls, "step")
    return {
        "cfg": sizes,
        "ms": {name: each["step_ms"] for name, each in found.items()},
        "sum_ms": {name: each.get("step_sum_ms") for name, each in found.items()},
        "peak_MiB": peaks,
        "difference": differences,
    }


# --------------------------------------------------------------------------------------------------------- the parts


def bounds(record: Row) -> Iterator[tuple[str, bool]]:
    for part, row in record["parts"].items():
        faster = row["ms"]["grouped_mm"] / row["ms"]["blazeproto"]
        peak, least = row["peak_MiB"]["blazeproto"] / row["peak_MiB"]["grouped_mm"], LEAST_RATIO[part]
        yield f"{part}: {faster:.3f} x as fast as grouped_mm, at least {least}", faster >= least
        if part == "qwen":
            yield f"qwen: peak {peak:.3f} of grouped_mm's, at most {QWEN_MOST_PEAK}", peak <= QWEN_MOST_PEAK


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    if importlib.util.find_spec("transformers") is None:
        refuse("transformers is not installed: pip install -e '.[transformers]'; nothing was run")
    from blazeproto.integrations.transformers import register

    register()


SMALL_QWEN = QWEN | {"sequences": 2, "tokens": 16, "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16}
SMALL_QWEN |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_QWEN |= {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_GPT_OSS = {
    "tokens": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PART = partial(Item, key=lambda case: {}, single=True, rounds=8)
BENCH = Bench(
    "integrations",
    __doc__,
    {
        "qwen": PART(measure_qwen, [QWEN], [SMALL_QWEN], part="parts/qwen"),
        "gpt_oss": PART(measure_gpt_oss, [GPT_OSS], [SMALL_GPT_OSS], part="parts/gpt_oss"),
    },
    paragraphs=3,
    bounds=bounds,
    prepare=prepare,
)

if __name__ == "__main__":
    run(BENCH)
