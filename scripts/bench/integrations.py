"""Our experts in other libraries' training: beside transformers' own ``grouped_mm``, in one process, in turn (A B A B).

    python -m scripts.bench.integrations                 # all parts -> results/h200/integrations.json on an H200
    python -m scripts.bench.integrations --parts steps   # one; the others' rows stay

steps: a whole training step (zero_grad, forward, loss, backward, fused AdamW) of a model with the widths of Qwen3-30B-A3B or
gpt-oss-20b and a few layers, in bf16 without recomputation. full: all weights are trained. LoRA: peft's adapters of rank 16 on
attention's projections and on the experts' weights; with ours, `blazeproto.integrations.peft` computes them. Attention: sdpa;
gpt-oss: flex_attention. One model is switched between the implementations, each once as it is and once with every decoder layer
under `torch.compile`. Milliseconds between CUDA events around a step, the host's time included; medians of six steps after two.
Peak: the most that the allocator had given out in the second step, weights and optimizer included.

gpt_oss: the experts module of gpt-oss alone, biases and clamp included, forward + backward; no leaf has a gradient before. Times
are the durations of the kernels, by the profiler, an overlap counted once; the GPU is held until the host has queued a call.

Random weights, tokens and routing. Before it is timed, each experts module that is trained whole computes by both implementations
the same output and gradients, on the same input: in a model that which it has there. A loss would not tell: experts that give
zeros move the one of random weights by 2e-4.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto.lab.times import Call, elapsed_ms
from scripts.bench.common import MIB, free_memory
from scripts.bench.running import Bench, Item, of_case, run
from scripts.bench.timing import Machine, Row, host_ms, relative_difference
from scripts.command import refuse
from scripts.lm.ranks import Ranks

IMPLEMENTATIONS = ("grouped_mm", "blazeproto")
SETTINGS = ("eager", "compiled")
WARM_UPS = 2
LEARNING_RATE = 1e-5
RANK = 16

SAME_OUTPUT = 0.02  # the norm of the difference over that of the output or gradient, in bf16

Sizes = dict[str, Any]
QWEN: Sizes = {
    "model_type": "qwen3_moe",
    "sequences": 8,
    "tokens": 4096,
    "vocab_size": 32768,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
GPT_OSS_20B: Sizes = {
    "model_type": "gpt_oss",
    "sequences": 4,
    "tokens": 4096,
    "vocab_size": 32768,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 10,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}
GPT_OSS: Sizes = {
    "tokens": 16384,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
LEAST_RATIO, LEAST_STEP_RATIO = 1.4, 1.3  # grouped_mm's time over ours, of gpt-oss's experts and of full fine-tuning
MOST_PEAK = 0.85  # our peak over grouped_mm's, in full fine-tuning of Qwen3's model


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
            return {"out": out.detach(), "x": self.x.grad, "scores": self.scores.grad} | {
                # Not those of biases, which transformers' grouped_mm sums in bf16.
                name: p.grad
                for name, p in self.experts.named_parameters()
                if p.dim() == 3
            }

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


# --------------------------------------------------------------------------------------------------- a training step


class Case(NamedTuple):
    """A model by name, and whether all its weights are trained, "full", or adapters, "LoRA"."""

    model: str
    tuning: str
    sizes: Sizes

    @property
    def key(self) -> Row:
        return {"model": self.model, "tuning": self.tuning}

    def __str__(self) -> str:
        return f"{self.model}, {self.tuning}"


def model_of(sizes: Sizes, device: str) -> Any:
    """A model in training mode, in bf16. On a CPU gpt-oss's sinks have no flex_attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**sizes, use_cache=False)
    attention = "sdpa" if config.model_type == "qwen3_moe" else "flex_attention" if device == "cuda" else "eager"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    return model.train()


def add_adapters(model: Any) -> None:
    """peft's adapters into a model, whose own weights are frozen."""
    from peft import LoraConfig, get_peft_model

    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=projections, target_parameters=experts))


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


class Step:
    """A training step on one batch, which adds its loss to ``losses``."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.losses = model, ids, list[Tensor]()
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True
        )
        # Code is not shared between backends. Else, with peft, ours would run in pieces that grouped_mm was compiled in, and
        # layers of both would count against one `recompile_limit`.
        own = {name: partial(torch._dynamo.lookup_backend("inductor")) for name in IMPLEMENTATIONS}
        self.forwards = {
            layer: (layer.forward, {name: torch.compile(layer.forward, backend=each) for name, each in own.items()})
            for layer in model.model.layers
        }

    def use(self, implementation: str, setting: str) -> None:
        self.model.set_experts_implementation(implementation)
        for layer, (eager, compiled) in self.forwards.items():
            layer.forward = compiled[implementation] if setting == "compiled" else eager

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())


def step_of(case: Case, device: str) -> tuple[Step, list[dict[str, float]]]:
    """The step, and in full fine-tuning the differences of each experts module.

    RuntimeError where an experts module's outputs or gradients differ by more than `SAME_OUTPUT`.
    """
    sizes = {name: size for name, size in case.sizes.items() if name not in ("sequences", "tokens")}
    model = model_of(sizes, device)
    ids = torch.randint(0, sizes["vocab_size"], (case.sizes["sequences"], case.sizes["tokens"]), device=device)
    if case.tuning == "full":
        return Step(model, ids), [program.differences() for program in programs_of(model, ids)]
    add_adapters(model)
    return Step(model, ids), []


def measure_steps(case: Case, machine: Machine) -> Row:
    """Each implementation as it is and compiled, which a CPU leaves out; a compilation that fails is under "refused"."""
    torch.compiler.reset()  # what it compiled may hold an earlier case's model
    free_memory()
    step, differences = step_of(case, machine.device)
    samples: dict[tuple[str, str], list[float]] = {}
    peaks, refused = dict[tuple[str, str], int](), dict[str, str]()
    for program in [(name, setting) for name in IMPLEMENTATIONS for setting in SETTINGS[: 1 + machine.on_gpu]]:
        step.use(*program)
        try:
            for _ in range(WARM_UPS):
                free_memory()  # else garbage that the step frees counts twice
                # Without a GPU nothing is allocated there.
                peaks[program] = torch.cuda.memory_allocated() + machine.peak_bytes(step)
            samples[program] = []
        except Exception as error:
            if program[1] == "eager":
                raise
            refused[" ".join(program)] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for _ in range(machine.rounds):
        for program, times in samples.items():
            step.use(*program)
            times.append(elapsed_ms(step, 1) if machine.on_gpu else host_ms(step, 1, calls=1))
    found: dict[str, dict[str, Row]] = {name: {} for name in IMPLEMENTATIONS}
    for (name, setting), times in samples.items():
        found[name][setting] = {
            "setting": setting,
            "ms": round(ms := statistics.median(times), 3),
            "tokens_per_s": round(1e3 * step.ids.numel() / ms),
            "peak_MiB": round(peaks[name, setting] / MIB, 1),
            "samples_ms": [round(time, 3) for time in times],
        }
    return {
        "cfg": case.sizes,
        "programs": found,
        "best": {name: min(settings.values(), key=lambda each: each["ms"]) for name, settings in found.items()},
        "refused": refused,
        "difference": {name: max(each[name] for each in differences) for name in (differences or [{}])[0]},
        "losses": [round(float(loss), 4) for loss in step.losses],
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
    for row in record["parts"].get("steps", []):
        case, (theirs, ours) = f"{row['model']}, {row['tuning']}", (row["best"][name] for name in IMPLEMENTATIONS)
        if row["tuning"] == "full":
            faster, peak = theirs["ms"] / ours["ms"], ours["peak_MiB"] / theirs["peak_MiB"]
            yield (
                f"{case}: {faster:.3f} x as fast as grouped_mm, at least {LEAST_STEP_RATIO}",
                faster >= LEAST_STEP_RATIO,
            )
            if row["cfg"]["model_type"] == "qwen3_moe":
                yield f"{case}: peak {peak:.3f} of grouped_mm's, at most {MOST_PEAK}", peak <= MOST_PEAK
    if row := record["parts"].get("gpt_oss"):
        faster = row["ms"]["grouped_mm"] / row["ms"]["blazeproto"]
        yield f"gpt_oss: {faster:.3f} x as fast as grouped_mm, at least {LEAST_RATIO}", faster >= LEAST_RATIO


def prepare(options: argparse.Namespace, ranks: Ranks) -> None:
    if not all(map(importlib.util.find_spec, ("transformers", "peft"))):
        refuse("transformers or peft is not installed: pip install -e '.[peft]'; nothing was run")
    from blazeproto.integrations.peft import register

    register()


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_experts_per_tok": 2}
SMALL_MODEL = SMALL | {
    "sequences": 2,
    "tokens": 16,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SMALL_QWEN = QWEN | SMALL_MODEL | {"moe_intermediate_size": 16, "num_experts": 4}
SMALL_GPT_OSS_20B = GPT_OSS_20B | SMALL_MODEL | {"num_local_experts": 4}
SMALL_GPT_OSS = SMALL | {"tokens": 40, "num_local_experts": 4}


def cases(qwen: Sizes, gpt_oss: Sizes) -> list[Case]:
    return [
        Case(model, tuning, sizes)
        for model, sizes in (("Qwen3-30B-A3B", qwen), ("gpt-oss-20b", gpt_oss))
        for tuning in ("full", "LoRA")
    ]


BENCH = Bench(
    "integrations",
    __doc__,
    {
        "steps": Item(
            measure_steps,
            cases(QWEN, GPT_OSS_20B),
            cases(SMALL_QWEN, SMALL_GPT_OSS_20B),
            key=of_case,
            part="parts/steps",
            rounds=6,
        ),
        "gpt_oss": Item(
            measure_gpt_oss,
            [GPT_OSS],
            [SMALL_GPT_OSS],
            key=lambda case: {},
            part="parts/gpt_oss",
            single=True,
            rounds=8,
        ),
    },
    paragraphs=3,
    bounds=bounds,
    prepare=prepare,
)

if __name__ == "__main__":
    run(BENCH)
