"""LoRA on the experts and attention of a transformers checkpoint whose experts stay in 4 or 8 bits.

    python -m scripts.finetune_stored FOLDER --text notes.txt --adapters out      # gpt-oss in MXFP4, as its bytes lie
    python -m scripts.finetune_stored FOLDER --storage nf4 --steps 100            # bf16, quantized after loading; random tokens
    python -m scripts.finetune_stored FOLDER --export merged                      # and a merged checkpoint in bf16
    python -m scripts.finetune_stored --random gpt-oss-120b --json 120b.json      # no checkpoint: its sizes, random numbers

AdamW, activation checkpointing, one sequence a step. Each step prints its loss and tokens per second, the last line the peaks of
GPU memory, or of the process on a CPU. Nothing is downloaded. Without --text one sequence of random tokens is repeated.

gpt-oss's attention runs without a matrix of tokens x tokens, and logits exist for 1024 tokens at a time.

--export writes one file, model.safetensors, tensor by tensor and expert by expert, with W + BA rounded to bf16. transformers
loads it without blazeproto or peft. docs/stored.md has the memory that models need.
"""

import copy
import itertools
import json
import math
import resource
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import LowRank
from blazeproto.integrations import peft as on_peft
from blazeproto.integrations.transformers import register
from blazeproto.runtime.arch import ARCHES
from blazeproto.stored import FORMATS
from blazeproto.stored.module import held
from scripts.command import argument_parser, positive, refuse

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
}  # in safetensors' words
TARGETS = {  # of adapters
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": [f"experts.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")],
}
SIZES = (
    *(
        "num_hidden_layers",
        "num_local_experts",
        "hidden_size",
        "intermediate_size",
        "num_experts_per_tok",
        "vocab_size",
    ),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"),
)
RANDOM = {  # for --random: gpt-oss's, by `SIZES`
    "gpt-oss-20b": (24, 32, 2880, 2880, 4, 201088, 64, 8, 64, 128),
    "gpt-oss-120b": (36, 128, 2880, 2880, 4, 201088, 64, 8, 64, 128),
    "tiny": (2, 4, 64, 64, 2, 256, 4, 2, 16, 8),
}
CHUNK = 1024  # tokens whose logits exist at a time
QUERIES = 512  # a slice of a sliding window's queries
SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale")  # of a config: logits are not the head's alone
Entry = tuple[torch.dtype, tuple[int, ...], Callable[[], Iterator[Tensor]]]


def loaded(options: Namespace) -> Any:
    """The model with stored experts and adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from blazeproto.integrations.stored import store_experts

    if options.random is not None:
        model = of_random_numbers(options.random, options.device)
    else:
        given = {"dtype": torch.bfloat16, "device_map": options.device, "experts_implementation": "blazeproto"}
        model = AutoModelForCausalLM.from_pretrained(options.folder, local_files_only=True, **given)
    if not hasattr(model.config, "quantization_config"):
        store_experts(model, options.storage)
    if model.config.model_type == "gpt_oss":
        attention_with_sinks(model)
    model.gradient_checkpointing_enable()
    with torch.device(options.device):  # where adapters draw their numbers
        return get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, **TARGETS)).train()


@torch.no_grad()
def of_random_numbers(name: str, device: str) -> Any:
    """A model of `RANDOM`. Its experts are random bytes in MXFP4 from the beginning, of a standard deviation of 0.018."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    from blazeproto.integrations.stored import store_experts

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            GptOssConfig(**dict(zip(SIZES, RANDOM[name], strict=True))), dtype=torch.bfloat16
        )
    store_experts(model, "mxfp4").to_empty(device=device)
    for module in model.modules():
        module._is_hf_initialized = False  # it was, on meta
        for weight in vars(module).get("stored", {}):
            values = getattr(module, weight)
            values.random_(256)
            values._is_hf_initialized = True
            getattr(module, f"{weight}_scales").random_(119, 121)  # 2^-8 and 2^-7
    model.initialize_weights()
    return model


# --- Attention and loss --------------------------------------------------------------------------------------------------


def attention_with_sinks(model: Any) -> None:
    """Let a gpt-oss model attend by `attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register("slices", attention)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.set_attn_implementation("slices")


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, s_aux: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """Causal attention with sinks, (B, heads, T, head_dim) of whole sequences without padding, by torch's kernels.

    A sink is a score beside the tokens' whose value is 0. A token before the first one has it: one more column holds 1 in each
    query, and in that token's key the sink. Each query sees it. With a sliding window, 512 queries at a time see their own keys.
    """
    groups, (tokens, width) = query.shape[1] // key.shape[1], query.shape[2:]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    query, key, value = (F.pad(t, (0, 8, 1, 0)) for t in (query, key, value))
    query[..., width] = 1 / scaling
    key[:, :, 0, width] = s_aux
    attend = partial(F.scaled_dot_product_attention, scale=scaling)
    window = more.get("sliding_window") or tokens
    made = [attend(query, key, value, is_causal=True)[:, :, 1:]] if window >= tokens else []
    for start in range(1, tokens + 1, QUERIES) if window < tokens else ():
        end, first = min(start + QUERIES, tokens + 1), max(1, start - window + 1)
        places = torch.arange(first, end, device=query.device)
        distance = places[start - first :, None] - places
        seen = F.pad((distance >= 0) & (distance < window), (1, 0), value=True)
        keys, values = (torch.cat((t[:, :, :1], t[:, :, first:end]), 2) for t in (key, value))
        made.append(attend(query[:, :, start:end], keys, values, attn_mask=seen))
    out = torch.cat(made, 2)
    return out[..., :width].transpose(1, 2).contiguous(), None


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The mean of -log p of each token but the first. Logits exist for `CHUNK` tokens, and again in backward."""
    base = model.get_base_model()
    if any(getattr(base.config.get_text_config(), name, None) for name in SCALED):
        return base(input_ids=ids, labels=ids).loss
    hidden, head = (
        base.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1],
        base.get_output_embeddings(),
    )

    def nats(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(rows).float(), labels, reduction="sum")

    chunks = zip(hidden.flatten(0, 1).split(CHUNK), ids[:, 1:].flatten().split(CHUNK), strict=True)
    return sum(checkpoint(nats, *chunk, use_reentrant=False) for chunk in chunks) / hidden[..., 0].numel()


# --- Training ------------------------------------------------------------------------------------------------------------


def sequences(options: Namespace, vocabulary: int) -> Tensor:
    """(any, 1, tokens) ids."""
    if options.text is None:
        return torch.randint(vocabulary, (1, 1, options.tokens))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]
    width = min(options.tokens, len(ids))
    return ids[: len(ids) // width * width].view(-1, 1, width)


def train(model: Any, options: Namespace) -> dict[str, float]:
    """Prints a line a step and one of memory. The losses, tokens per second after the first step, and the peaks in GiB."""
    batches = sequences(options, model.config.get_text_config().vocab_size).to(options.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr, fused=True)
    losses, times = [], [time.perf_counter()]
    for step, ids in zip(range(options.steps), itertools.cycle(batches), strict=False):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter())
        speed = ids.numel() / (times[-1] - times[-2])
        print(f"step {step + 1}: loss {losses[-1]:.4f}, {speed:.0f} tokens/s", flush=True)
    if batches.is_cuda:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peaks = 2 * (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,)
    later = min(1, options.steps - 1)  # the first step compiles
    speed = ids.numel() * (options.steps - later) / (times[-1] - times[later])
    row = {"first_loss": losses[0], "last_loss": losses[-1], "tokens_per_s": speed}
    row |= {f"{name}_GiB": peak / 2**30 for name, peak in zip(("allocated", "reserved"), peaks, strict=True)}
    print(f"peak {row['allocated_GiB']:.2f} GiB allocated, {row['reserved_GiB']:.2f} GiB reserved", flush=True)
    return row


# --- The merged checkpoint -----------------------------------------------------------------------------------------------


def merged(base: Any) -> Iterator[tuple[str, Entry]]:
    """Each tensor of a model without its adapters: name, dtype, shape, and what makes its parts one at a time."""
    for key, t in base.state_dict().items():
        owner, _, leaf = key.rpartition(".")
        if ".lora_" in key:
            continue
        name, module = key.replace(".base_layer", ""), base.get_submodule(owner)
        outer, stored = base.get_submodule(name.rpartition(".")[0]), vars(module).get("stored", {})
        if leaf in stored:
            shape, parts = held(module, leaf).shape, partial(experts, module, outer, leaf)
            order = (0, 2, 1) if module.is_transposed else (0, 1, 2)
            yield name, (torch.bfloat16, tuple(shape[axis] for axis in order), parts)
        elif not (stored and leaf in module._buffers):
            yield name, (t.dtype, tuple(t.shape), partial(dense, t, outer if leaf == "weight" else module))


def dense(weight: Tensor, owner: Any) -> Iterator[Tensor]:
    """A weight, with its adapter if its owner has one."""
    adapted = hasattr(owner, "get_delta_weight")
    yield (weight.float() + owner.get_delta_weight("default")).to(weight.dtype) if adapted else weight


def experts(module: Any, wrapper: Any, name: str) -> Iterator[Tensor]:
    """Each expert's W + BA in bf16, as the module's own weight would lie."""
    while wrapper is not module and wrapper.parameter_name != name:
        wrapper = wrapper.base_layer
    weight, factors = held(module, name), cast(LowRank, on_peft.factors(wrapper))
    for expert in range(len(weight)):
        numbers = weight.decode(expert, torch.float32) + factors.b[expert].float() @ factors.a[expert].float()
        yield (numbers.mT if module.is_transposed else numbers).bfloat16()


@torch.no_grad()
def export(model: Any, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors: a header and the tensors' bytes one after another, since
    safetensors' own writer needs all of them in memory."""
    base, config = model.get_base_model(), copy.deepcopy(model.config)
    del config.quantization_config
    config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    entries, header, end = dict(merged(base)), {}, 0
    for name, (dtype, shape, _) in entries.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    words = json.dumps({"__metadata__": {"format": "pt"}, **header})
    words += " " * (-len(words) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words.encode())
        for *_, parts in entries.values():
            for part in parts():
                file.write(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argument_parser("scripts.finetune_stored", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint of transformers")
    parser.add_argument(
        "--random", choices=[*RANDOM], help="no folder: a model of these sizes, of random numbers in MXFP4"
    )
    parser.add_argument("--storage", choices=[*FORMATS], default="nf4", help="for a checkpoint in bf16 (%(default)s)")
    for name, words in (
        ("text", "a file, tokenized by the folder's tokenizer"),
        ("adapters", "a folder for peft's adapters"),
        ("export", "a folder for the merged checkpoint"),
        ("json", "a file for one row: losses, speed and memory"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=words)
    for name, value in (("tokens", 4096), ("steps", 20), ("rank", 8)):
        parser.add_argument(f"--{name}", type=positive, default=value, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument(
        "--backend", choices=("auto", *ARCHES, "torch"), default="auto", help="of experts (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if (options.folder is None) == (options.random is None) or (options.random and options.text):
        parser.error("expected a folder, or --random without --text")
    torch.manual_seed(0)
    register(storage="mxfp4", backend=options.backend)
    on_peft.register()
    model = loaded(options)
    if options.export is not None and model.config.quantization_config.quant_method not in ("mxfp4", "blazeproto"):
        refuse("--export: expected a checkpoint in bf16 or MXFP4, got one whose other layers are quantized too")
    row = train(model, options)
    if options.json is not None:
        of = {name: getattr(options, name) for name in ("backend", "tokens", "steps", "rank")}
        gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else "none"
        of |= {"model": options.random or options.folder.name, "gpu": gpu}
        options.json.write_text(json.dumps(of | row) + "\n")
    if options.adapters is not None:
        model.save_pretrained(options.adapters)
    if options.export is not None:
        export(model, options.export)


if __name__ == "__main__":
    main()
