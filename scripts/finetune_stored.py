"""LoRA on the experts and attention of a transformers checkpoint whose experts stay in 4 or 8 bits.

    python -m scripts.finetune_stored FOLDER --text notes.txt --adapters out      # gpt-oss in MXFP4, as its bytes lie
    python -m scripts.finetune_stored FOLDER --storage nf4 --steps 100            # bf16, quantized after loading; random tokens
    python -m scripts.finetune_stored FOLDER --export merged                      # and a merged checkpoint in bf16

AdamW, activation checkpointing, one sequence a step. Each step prints its loss, tokens per second and the peak of reserved GPU
memory, or of the process on a CPU. Nothing is downloaded. Without --text one sequence of random tokens is repeated.

--export writes one file, model.safetensors, tensor by tensor and expert by expert, with W + BA rounded to bf16. transformers
loads it without blazeproto or peft. docs/stored.md has the memory that models need.
"""

import copy
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
from torch import Tensor

from blazeproto.autograd import LowRank
from blazeproto.integrations import peft as on_peft
from blazeproto.integrations.transformers import register
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
Entry = tuple[torch.dtype, tuple[int, ...], Callable[[], Iterator[Tensor]]]


def loaded(options: Namespace) -> Any:
    """The model with stored experts and adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from blazeproto.integrations.stored import store_experts

    given = {"dtype": torch.bfloat16, "device_map": options.device, "experts_implementation": "blazeproto"}
    model = AutoModelForCausalLM.from_pretrained(options.folder, local_files_only=True, **given)
    if not hasattr(model.config, "quantization_config"):
        store_experts(model, options.storage)
    model.gradient_checkpointing_enable()
    return get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, **TARGETS)).train()


def sequences(options: Namespace, vocabulary: int) -> Tensor:
    """(any, 1, tokens) ids."""
    if options.text is None:
        return torch.randint(vocabulary, (1, 1, options.tokens))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]
    width = min(options.tokens, len(ids))
    return ids[: len(ids) // width * width].view(-1, 1, width)


def train(model: Any, options: Namespace) -> None:
    """Prints a line a step."""
    batches = sequences(options, model.config.get_text_config().vocab_size).to(options.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    for step in range(options.steps):
        start, ids = time.perf_counter(), batches[step % len(batches)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nats, speed = loss.item(), ids.numel() / (time.perf_counter() - start)  # .item() waits for the GPU
        of_process = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_reserved() if batches.is_cuda else of_process
        print(f"step {step + 1}: loss {nats:.4f}, {speed:.0f} tokens/s, peak {peak / 2**30:.2f} GiB", flush=True)


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
    parser.add_argument("folder", type=Path, help="a checkpoint of transformers")
    parser.add_argument("--storage", choices=[*FORMATS], default="nf4", help="for a checkpoint in bf16 (%(default)s)")
    for name, words in (
        ("text", "a file, tokenized by the folder's tokenizer"),
        ("adapters", "a folder for peft's adapters"),
        ("export", "a folder for the merged checkpoint"),
    ):
        parser.add_argument(f"--{name}", type=Path, help=words)
    for name, value in (("tokens", 4096), ("steps", 20), ("rank", 8)):
        parser.add_argument(f"--{name}", type=positive, default=value, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    options = parser.parse_args(arguments)
    register(storage="mxfp4")
    on_peft.register()
    model = loaded(options)
    if options.export is not None and model.config.quantization_config.quant_method not in ("mxfp4", "blazeproto"):
        refuse("--export: expected a checkpoint in bf16 or MXFP4, got one whose other layers are quantized too")
    train(model, options)
    if options.adapters is not None:
        model.save_pretrained(options.adapters)
    if options.export is not None:
        export(model, options.export)


if __name__ == "__main__":
    main()
