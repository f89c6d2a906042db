"""LoRA on the experts and attention of a transformers checkpoint whose experts stay in 4 or 8 bits.

    python -m scripts.finetune_stored FOLDER --text notes.txt --adapters out      # gpt-oss in MXFP4, as its bytes lie
    python -m scripts.finetune_stored FOLDER --storage nf4 --steps 100            # bf16, quantized after loading; random tokens
    python -m scripts.finetune_stored FOLDER --export merged                      # and a merged checkpoint in bf16
    python -m scripts.finetune_stored FOLDER --export merged --quantized          # its experts quantized again
    python -m scripts.finetune_stored --random gpt-oss-120b --json 120b.json      # no checkpoint: its sizes, random numbers

AdamW, activation checkpointing, one sequence a step. Each step prints its loss and tokens per second, the last line the peaks of
GPU memory, or of the process on a CPU. Nothing is downloaded. Without --text one sequence of random tokens is repeated.

`torchrun --nproc-per-node P -m scripts.finetune_stored ...` shares the experts between P ranks. Each loads the whole model, keeps
1 / P of its experts, and trains on its own sequences.

gpt-oss's attention runs without a matrix of tokens x tokens, and logits exist for 1024 tokens at a time.

--export writes one file, model.safetensors, tensor by tensor and expert by expert, with W + BA rounded to bf16. With --quantized
experts are in MXFP4 (gpt-oss) or in e4m3 blocks (Qwen, DeepSeek-V3, GLM-4), and the error is printed. transformers loads
both without blazeproto or peft. docs/stored.md has the memory that models need.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import resource
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blazeproto.autograd import LowRank
from blazeproto.integrations import peft as on_peft
from blazeproto.integrations.transformers import expert_parallel, register
from blazeproto.runtime.arch import ARCHES
from blazeproto.runtime.checks import require
from blazeproto.stored import FORMATS, StoredWeight, fp8, int4, quantize
from blazeproto.stored.module import held, hold
from scripts.command import argument_parser, positive, refuse

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}  # in safetensors' words
TARGETS = {  # of adapters
    "target_modules": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # DeepSeek's
    ],
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
IN_FP8 = (
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
)  # models whose fp8 checkpoints have a tensor for each expert
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
    elif (method := method_of(options.folder)) in PARTS:
        model = of_tensors_per_expert(options.folder, method, options.device)
    else:
        given = {"dtype": torch.bfloat16, "device_map": options.device, "experts_implementation": "blazeproto"}
        model = AutoModelForCausalLM.from_pretrained(options.folder, local_files_only=True, **given)
    if not hasattr(model.config, "quantization_config"):
        store_experts(model, options.storage or "nf4")
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


# --- A checkpoint with a tensor for each expert --------------------------------------------------------------------------

PARTS = {  # the tensors of a weight, by a checkpoint's quant_method
    "fp8": ("weight", "weight_scale_inv"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point"),
}


def method_of(folder: Path) -> str | None:
    """The quant_method of a checkpoint; None for one in bf16."""
    entry = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    return cast(str | None, entry.get("quant_method"))


def check_settings(entry: dict[str, Any]) -> None:
    """ValueError for a quantization_config whose weights `of_tensors_per_expert` would misread."""
    if entry["quant_method"] == "fp8":
        block = entry.get("weight_block_size")
        require(isinstance(block, list | tuple) and len(block) == 2, "weight_block_size", "[rows, columns]", block)
        return
    for name, group in (entry.get("config_groups") or {"": {}}).items():
        group = group if isinstance(group, dict) else {}
        of = group.get("weights") or {}
        for setting, got, allowed in (
            ("format", group.get("format") or entry.get("format"), ("pack-quantized",)),
            ("weights.num_bits", of.get("num_bits"), (4,)),
            ("weights.type", of.get("type", "int"), ("int",)),
            ("weights.strategy", of.get("strategy"), ("group", "channel", None)),
            ("weights.actorder", of.get("actorder"), ("weight", "static", False, None)),
            ("input_activations", group.get("input_activations"), (None,)),
        ):
            require(got in allowed, f"{setting} of {name or 'config_groups'}", " or ".join(map(str, allowed)), got)


@torch.no_grad()
def of_tensors_per_expert(folder: Path, method: str, device: str) -> Any:
    """A model whose experts are stored as the checkpoint's bytes. All else is decoded to bf16, tensor by tensor."""
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from blazeproto.integrations.stored import StoredConfig

    files = [safe_open(path, "pt", device=device) for path in sorted(folder.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_settings(config.quantization_config)
    ordered = [name for name in places if name.endswith(".weight_g_idx")]
    require(not ordered, "weight_g_idx", "no such tensor (actorder weight or none)", ", ".join(ordered[:3]))
    block = config.quantization_config.get("weight_block_size")
    groups = (config.quantization_config.get("config_groups") or {}).values()
    symmetric = all(group["weights"].get("symmetric", True) for group in groups)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def complete(lacking: list[str]) -> None:
        if lacking:
            refuse(f"{folder}: expected all tensors of {type(model).__name__}, without {', '.join(lacking[:3])}")

    def weight_of(paths: list[str], halves: int) -> StoredWeight:
        """The experts' weight, each of one tensor or of gate's and up's."""
        made: list[Tensor | None] = []
        for part in PARTS[method]:
            names = [f"{path}.{part}" for path in paths]
            lacking = [name for name in names if name not in places]
            if part == "weight_zero_point" and symmetric and lacking == names:
                made.append(None)
                continue
            complete(lacking)
            first = places[names[0]].get_tensor(names[0])
            whole = first.new_empty(len(paths), *first.shape)
            for place, name in zip(whole, names, strict=True):
                place.copy_(places[name].get_tensor(name))
            made.append(whole.view(-1, halves * whole.shape[1], whole.shape[2]))
        values, scales, *zeros = cast(list[Tensor], made)
        if method == "fp8":
            return fp8(values, scales, block=tuple(block))
        return int4(values, scales, zeros[0], group=8 * values.shape[2] // scales.shape[2])

    state = {}
    for key, t in model.state_dict().items():
        path, _, leaf = key.rpartition(".")
        if hasattr(model.get_submodule(path), "is_transposed"):
            continue
        if f"{path}.weight_packed" in places and leaf == "weight":
            state[key] = weight_of([path], 1).decode(0)
        elif key in places:
            numbers = places[key].get_tensor(key)
            if numbers.dtype == torch.float8_e4m3fn:
                name = f"{key}_scale_inv"
                complete([] if name in places else [name])
                scales = places[name].get_tensor(name).float()
                for axis, side in enumerate(block):  # the last blocks may be smaller
                    scales = scales.repeat_interleave(side, axis).narrow(axis, 0, numbers.shape[axis])
                numbers = numbers.float() * scales
            state[key] = numbers.to(t.dtype)
        elif not t.is_meta:  # a buffer
            complete([key])
    model.load_state_dict(state, strict=False, assign=True)
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed"):
            module.stored = {}
            for weight, halves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                paths = [f"{name}.{expert}.{half}" for expert in range(module.num_experts) for half in halves]
                hold(module, weight, weight_of(paths, len(halves)))
    model.tie_weights()
    complete([name for name, t in model.named_parameters() if t.is_meta])
    model.set_experts_implementation("blazeproto")
    model.config.quantization_config = StoredConfig("fp8" if method == "fp8" else "int4")
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.to(device)


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

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
        ids = torch.tensor(tokenizer(options.text.read_text()).input_ids, dtype=torch.int64)
    except (OSError, ValueError) as error:
        refuse(f"--text: expected text, and a tokenizer in {options.folder}, got {str(error).splitlines()[0]}")
    if len(ids) < 2:
        refuse(f"--text: expected at least 2 tokens by the tokenizer in {options.folder}, got {len(ids)}")
    width = min(options.tokens, len(ids))
    return ids[: len(ids) // width * width].view(-1, 1, width)


def train(model: Any, options: Namespace) -> dict[str, float]:
    """Prints a line a step and one of memory. The losses, tokens per second after the first step, and the peaks in GiB."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(rank)
    batches = sequences(options, model.config.get_text_config().vocab_size).to(options.device)
    batches = batches[rank % len(batches) :: ranks]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=True)
    losses, times = [], [time.perf_counter()]
    for step, ids in zip(range(options.steps), itertools.cycle(batches), strict=False):
        loss = loss_of(model, ids)
        loss.backward()
        for p in trained if ranks > 1 else ():  # a rank has its experts' gradients, and all others of its own tokens
            dist.all_reduce(p.grad)
            p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(time.perf_counter())
        speed = ids.numel() / (times[-1] - times[-2])
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {speed:.0f} tokens/s", flush=True)
    if batches.is_cuda:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peaks = 2 * (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,)
    later = min(1, options.steps - 1)  # the first step compiles
    speed = ids.numel() * (options.steps - later) / (times[-1] - times[later])
    row = {"first_loss": losses[0], "last_loss": losses[-1], "tokens_per_s": speed}
    row |= {f"{name}_GiB": peak / 2**30 for name, peak in zip(("allocated", "reserved"), peaks, strict=True)}
    if rank == 0:
        print(f"peak {row['allocated_GiB']:.2f} GiB allocated, {row['reserved_GiB']:.2f} GiB reserved", flush=True)
    return row


# --- The merged checkpoint -----------------------------------------------------------------------------------------------


def merged(base: Any, storage: str | None, errors: dict[str, list[float]]) -> Iterator[tuple[str, Entry]]:
    """Each tensor of a model without its adapters: name, dtype, shape, and what makes its parts one at a time.
    storage: of the experts, "mxfp4" or "fp8"; None for bf16.  errors: as of `again`."""
    for key, t in base.state_dict().items():
        owner, _, leaf = key.rpartition(".")
        if ".lora_" in key:
            continue
        name, module = key.replace(".base_layer", ""), base.get_submodule(owner)
        outer, stored = base.get_submodule(name.rpartition(".")[0]), vars(module).get("stored", {})
        if leaf in stored:
            (count, out, width), parts = held(module, leaf).shape, partial(experts, module, outer, leaf)
            if storage == "mxfp4":
                made = [partial(again, parts, storage, part, errors.setdefault(leaf, [0, 0])) for part in (0, 1)]
                yield f"{name}_blocks", (torch.uint8, (count, out, width // 32, 16), made[0])
                yield f"{name}_scales", (torch.uint8, (count, out, width // 32), made[1])
            elif storage == "fp8":
                halves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
                for expert, (half, of) in itertools.product(range(count), enumerate(halves)):
                    rows = out // len(halves)
                    which = partial(parts, [expert], slice(half * rows, (half + 1) * rows))
                    path, of_errors = f"{name.removesuffix(leaf)}{expert}.{of}.weight", errors.setdefault(of, [0, 0])
                    yield path, (torch.float8_e4m3fn, (rows, width), partial(again, which, storage, 0, of_errors))
                    scales = torch.float32, (rows // 128, width // 128), partial(again, which, storage, 1, of_errors)
                    yield f"{path}_scale_inv", scales
            else:
                shape = (count, width, out) if module.is_transposed else (count, out, width)
                yield name, (torch.bfloat16, shape, partial(rounded, parts, module.is_transposed))
        elif not (stored and leaf in module._buffers):
            yield name, (t.dtype, tuple(t.shape), partial(dense, t, outer if leaf == "weight" else module))


def dense(weight: Tensor, owner: Any) -> Iterator[Tensor]:
    """A weight, with its adapter if its owner has one."""
    adapted = hasattr(owner, "get_delta_weight")
    yield (weight.float() + owner.get_delta_weight("default")).to(weight.dtype) if adapted else weight


def experts(
    module: Any, wrapper: Any, name: str, which: Iterable[int] | None = None, rows: slice = slice(None)
) -> Iterator[Tensor]:
    """(out, in) W + BA of each expert in float32.  which: the experts, of all.  rows: of out."""
    while wrapper is not module and wrapper.parameter_name != name:
        wrapper = wrapper.base_layer
    weight, factors = held(module, name), cast(LowRank, on_peft.factors(wrapper))
    for expert in range(len(weight)) if which is None else which:
        numbers = weight.decode(expert, torch.float32) + factors.b[expert].float() @ factors.a[expert].float()
        yield numbers[rows]


def rounded(parts: Callable[..., Iterator[Tensor]], transposed: bool) -> Iterator[Tensor]:
    """Each expert in bf16, as the module's own weight would lie."""
    for numbers in parts():
        yield (numbers.mT if transposed else numbers).bfloat16()


def again(parts: Callable[..., Iterator[Tensor]], storage: str, part: int, errors: list[float]) -> Iterator[Tensor]:
    """Values (part 0) or scales (part 1) of each expert, quantized.  errors: values add their squared errors and squares."""
    for numbers in parts():
        made = quantize(numbers[None], storage)
        if part == 0:
            squares = (made.decode(0, torch.float32) - numbers).square().sum(), numbers.square().sum()
            errors[:] = (error + float(square) for error, square in zip(errors, squares, strict=True))
        yield cast(Tensor, made.tensors[part])


@torch.no_grad()
def export(model: Any, folder: Path, storage: str | None) -> None:
    """Write config.json, generation_config.json and model.safetensors: a header and the tensors' bytes one after another, since
    safetensors' own writer needs all of them in memory.  storage: as of `merged`."""
    base, config = model.get_base_model(), copy.deepcopy(model.config)
    del config.quantization_config
    if storage is not None:
        dense_layers = [name for name, module in base.named_modules() if "Linear" in type(module).__name__]
        names = sorted({name.replace(".base_layer", "") for name in dense_layers if ".lora_" not in name})
        config.quantization_config = {"quant_method": storage, "modules_to_not_convert": names}
        config.quantization_config |= {"weight_block_size": [128, 128]} if storage == "fp8" else {}
    config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    errors: dict[str, list[float]] = {}
    entries, header, end = dict(merged(base, storage, errors)), {}, 0
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
    for name, (error, square) in errors.items():
        print(f"{name} in {storage}: relative RMS error {math.sqrt(error / square):.4f}")


def check_options(parser: ArgumentParser, options: Namespace) -> None:
    """End with one line for options that do not fit together, and for places that cannot be read or written."""
    if options.folder is not None and not (options.folder / "config.json").is_file():
        parser.error(f"folder: expected one with config.json, got {options.folder}")
    method = "mxfp4" if options.random else method_of(options.folder)
    places = [path.resolve() for path in (options.folder, options.adapters, options.export) if path is not None]
    for wrong, words in (
        (options.text and not options.text.is_file(), f"--text: expected a file, got {options.text}"),
        (options.tokens < 2, f"--tokens: expected at least 2, got {options.tokens}"),
        (options.quantized and not options.export, "--quantized: expected --export too, got none"),
        (options.storage and method, f"--storage: expected none for experts in {method}, got {options.storage}"),
        (
            len(places) > len({*places}),
            f"folder, --adapters, --export: expected different folders, got {', '.join(map(str, places))}",
        ),
    ):
        if wrong:
            parser.error(words)
    for name in ("adapters", "export", "json"):
        if (path := getattr(options, name)) is None:
            continue
        if path.exists() and path.is_dir() == (name == "json"):
            parser.error(f"--{name}: expected a {'file' if name == 'json' else 'folder'}, got {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name}: expected a path that can be written, got {error}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argument_parser("scripts.finetune_stored", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint of transformers")
    parser.add_argument(
        "--random", choices=[*RANDOM], help="no folder: a model of these sizes, of random numbers in MXFP4"
    )
    parser.add_argument("--storage", choices=[*FORMATS], help="for a checkpoint in bf16 (nf4)")
    for name, words in (
        ("text", "a file, tokenized by the folder's tokenizer"),
        ("adapters", "a folder for peft's adapters"),
        ("export", "a folder for the merged checkpoint"),
        ("json", "a file for one row: losses, speed and memory"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=words)
    for name, value in (("tokens", 4096), ("steps", 20), ("rank", 8)):
        parser.add_argument(f"--{name}", type=positive, default=value, help="(%(default)s)")
    parser.add_argument("--quantized", action="store_true", help="with --export: experts in MXFP4 or e4m3 again")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument(
        "--backend", choices=("auto", *ARCHES, "torch"), default="auto", help="of experts (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if (options.folder is None) == (options.random is None) or (options.random and options.text):
        parser.error("expected a folder, or --random without --text")
    check_options(parser, options)
    if options.text is not None:
        sequences(options, 0)  # refuses a text before the model is loaded
    torch.manual_seed(0)
    register(storage="mxfp4", backend=options.backend)
    on_peft.register()
    if "LOCAL_RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        options.device = f"cuda:{os.environ['LOCAL_RANK']}" if options.device.startswith("cuda") else options.device
    if dist.is_initialized() and options.export is not None:
        refuse("--export: expected one rank, got several, each with some of the experts")
    model = loaded(options)
    if dist.is_initialized():
        expert_parallel(model, cast(dist.ProcessGroup, dist.group.WORLD))
    if options.export is not None and model.config.quantization_config.quant_method not in ("mxfp4", "blazeproto"):
        refuse("--export: expected a checkpoint in bf16 or MXFP4, got one whose other layers are quantized too")
    if options.quantized and model.config.model_type not in ("gpt_oss", *IN_FP8):
        refuse(f"--quantized: expected gpt_oss, {', '.join(IN_FP8)}, got {model.config.model_type}")
    row = train(model, options)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    if options.adapters is not None:
        model.save_pretrained(options.adapters)
    if options.export is not None:
        storage = "mxfp4" if model.config.model_type == "gpt_oss" else "fp8"
        export(model, options.export, storage if options.quantized else None)
    if options.json is not None:
        of = {name: getattr(options, name) for name in ("backend", "tokens", "steps", "rank")}
        gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else "none"
        of |= {"model": options.random or options.folder.name, "gpu": gpu}
        options.json.write_text(json.dumps(of | row) + "\n")


if __name__ == "__main__":
    main()
