"""A byte-level GPT whose feed-forward layers are Mixture-of-Experts layers, and the text that it learns.

    model = GPT(GPTConfig(layers=4, d_model=128, heads=4, context=256, d_expert=128, num_experts=8, top_k=2))
    out = model(ids, targets)                        # ids, targets (B, T) of bytes
    (out.loss + out.aux_loss).backward()
    model.generate(b"import ", 100)

A block is x + attention(norm(x)), then x + experts(norm(x)): RMSNorm (Zhang and Sennrich 2019) before each, rotary
positions (Su et al. 2021) on queries and keys that are normalised (Henry et al. 2020), no biases.

With ``attention_tiles`` = G above 1 the sequences go through a block's attention in G tiles, one after the other, and each tile
is computed again in backward: the activations of at most one tile exist inside attention. The experts get all
sequences at once (Batch Tiling on Attention, Soboleva 2025).

The text: Python's own standard library, or any file or folder, as one tensor of bytes for training and one that is held
out, and batches that are a function of the seed and the step.

B is the number of sequences, T of positions in one, d the model's width, V = 256 the number of bytes.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.lm.run_folder import LOCK
from scripts.lm.settings import FORMULATIONS, ROUNDING, GPTConfig

VOCABULARY = 256  # every byte is a token, so there is no tokenizer and any file is data


class Output(NamedTuple):
    """The results of a forward pass."""

    logits: Tensor  # (B, T, V)
    loss: Tensor | None  # cross-entropy in nats a byte, where there were targets
    aux_loss: Tensor | float  # the routers' auxiliary losses, coefficients in, summed over layers
    loads: Tensor  # (layers, E) int32: pairs of each expert


class Attention(nn.Module):
    """Causal self-attention. x (B, T, d) -> (B, T, d)."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, d / heads)
        q, k = rotate(F.rms_norm(qkv[:2], qkv.shape[-1:]), rotation).to(qkv.dtype)
        mixed = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then experts. x (B, T, d), ids (B, T) -> x, the routers' auxiliary loss, the load (E,)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_tiles = config.attention_tiles
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config.d_model, config.heads)
        self.moe_norm = nn.RMSNorm(config.d_model)
        layer, settings = FORMULATIONS[config.formulation]
        # A dynamic capacity factor is 0 there, as in Tutel, and None here.
        own = {name: getattr(config, name) or None for name in settings}
        own |= {"tile": config.rounding_tile} if config.router in ROUNDING else {}
        sizes = (config.d_model, config.d_expert, config.num_experts, config.top_k)
        self.moe = layer(*sizes, router=config.router, **own)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, ids: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
        x = x + self.dropout(self.attend(x, rotation))  # one mask of the whole batch, for any number of tiles
        out, stats = self.moe(self.moe_norm(x), ids)  # hash routing alone looks at the bytes themselves
        return x + self.dropout(out), stats.aux_loss, stats.load

    def attend(self, x: Tensor, rotation: Tensor) -> Tensor:
        """attention(norm(x)), in ``attention_tiles`` tiles of ceil(B / attention_tiles) sequences. x (B, T, d) -> (B, T, d).

        A tile keeps its part of x alone, and is computed again when backward comes to it.
        """

        def attended(tile: Tensor) -> Tensor:
            return self.attention(self.attention_norm(tile), rotation)

        if self.attention_tiles == 1:
            return attended(x)
        tiles = x.split(-(-len(x) // self.attention_tiles))
        device = x.device.type
        # Each tile casts the weights anew: the tiles' gradients of one cast, which autocast would keep, would be summed in bf16.
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device), cache_enabled=False):
            # No random number is drawn there, so none has to be drawn again.
            kept = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=False)
            return torch.cat([kept(tile) for tile in tiles])


class GPT(nn.Module):
    """Bytes in, a distribution of the next byte out."""

    rotations: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks: Any = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        self.register_buffer("rotations", rotations(config.context, config.d_model // config.heads), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Layers start as torch's and blazeproto's own; what writes to the residual is scaled down with depth (GPT-2).

        The head starts at zero, so an untrained model's loss is ln 256 = 5.55 nats a byte.
        """
        self.embedding.weight.normal_(std=1.0)
        self.head.weight.zero_()
        scale = (2 * self.config.layers) ** -0.5
        for block in self.blocks:
            block.attention.out.weight.mul_(scale)
            block.moe.down_proj.mul_(scale)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Output:
        """ids (B, T) integers in [0, 256), T <= context; targets the same, or None for no loss.

        In training attention_tiles divides B. Otherwise, as in validation, B is any number, and the last tile may be smaller.
        """
        length, tiles = ids.shape[1], self.config.attention_tiles
        if length > self.config.context:
            raise ValueError(f"ids: expected at most context = {self.config.context} positions, got {length}")
        if self.training and len(ids) % tiles:
            raise ValueError(f"ids: expected a multiple of attention_tiles = {tiles} sequences, got {len(ids)}")
        rotation = torch.view_as_complex(self.rotations[:length].float())
        ids = ids.long()
        x = self.dropout(at_least_fp32(self.embedding(ids)))  # FSDP2 may give the table in bf16
        aux_loss: Tensor | float = 0.0
        loads = []
        for block in self.blocks:
            x, aux_loss_of_block, load = block(x, ids, rotation)
            aux_loss = aux_loss + aux_loss_of_block
            loads.append(load)
        logits = at_least_fp32(self.head(self.norm(x)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())
        return Output(logits, loss, aux_loss, torch.stack(loads))

    def update_router_biases(self, loads: Tensor) -> None:
        """One step of the balancing without auxiliary loss, where routers do that. loads (layers, E) of the whole batch."""
        for block, load in zip(self.blocks, loads, strict=True):
            if getattr(block.moe.router, "expert_bias", None) is not None:
                block.moe.router.update_bias(load)

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """The prompt, at least a byte, and ``num_bytes`` more bytes, each drawn from softmax(logits / temperature)."""
        generator, training = torch.Generator().manual_seed(seed), self.training
        self.eval()
        ids = list(prompt)
        for _ in range(num_bytes):
            context = torch.tensor([ids[-self.config.context :]], device=self.head.weight.device)
            probabilities = torch.softmax(self(context).logits[0, -1].cpu() / temperature, dim=-1)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        self.train(training)
        return bytes(ids)


def rotations(length: int, width: int) -> Tensor:
    """(length, width / 2, 2): cos and sin of position times frequency, frequencies from 1 down to 1 / 10000."""
    frequency = 10000.0 ** -torch.linspace(0, 1, width // 2)
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x (..., T, width), each pair of numbers turned by its position's angle; rotation (T, width / 2) complex.

    The result is in fp32, or float64 where x is.
    """
    pairs = torch.view_as_complex(at_least_fp32(x).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- text --------------------------------------------------------------------------------------------------------

HELD_OUT = 16  # one file of this number
OF_PACKAGES = ("site-packages", "dist-packages", "__pycache__")


def text_files(place: Path, pattern: str = "*", runs: Path | None = None) -> dict[str, bytes]:
    """Content of each UTF-8 file below a folder by its relative path, in the order of their paths.

    Files that training writes are left out: the folders of runs, and all of ``runs``, if it lies below the folder.
    """
    place, runs = place.resolve(), runs.resolve() if runs else None
    by_training = cache(lambda folder: folder == runs or (folder / LOCK).exists())
    found = {}
    for path in sorted(place.rglob(pattern)):
        parts = path.relative_to(place).parts
        hidden = any(part in OF_PACKAGES or part.startswith(".") for part in parts)
        below = {*path.resolve().parents} - {place, *place.parents}
        if hidden or any(map(by_training, below)):
            continue
        with suppress(OSError, UnicodeDecodeError):
            content = path.read_bytes() if path.is_file() else b""
            if b"\0" not in content and content.decode():
                found["/".join(parts)] = content
    return found


def load_data(data: str, context: int, runs: Path | None = None) -> tuple[Tensor, Tensor]:
    """Training and validation bytes, each file ended by a zero byte.

    A file is held out by a hash of its path, so the split is the same on every machine. A single file, and a folder too
    small to split so, gives its last tenth. A folder's text is without ``runs`` and other folders of runs, see `text_files`.

    Raises:
        ValueError: there is no such file or folder, it cannot be read, or it has too little text.
    """
    place = Path(data) if data else Path(sysconfig.get_paths()["stdlib"])
    try:
        if place.is_dir():
            os.scandir(place).close()  # OSError where it cannot be listed, which looks empty otherwise
            files = text_files(place, "*" if data else "*.py", runs)
        elif place.exists() and not place.is_file():
            raise OSError("a pipe or a device cannot be read again, as --resume must")
        else:
            files = {place.name: place.read_bytes()}
    except OSError as error:
        raise ValueError(f"data: expected a file or a folder that can be read, got {place} ({error})") from error
    names = {name: hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest() for name in files}
    held_out = {name for name, digest in names.items() if int(digest, 16) % HELD_OUT == 0}
    train = b"".join(content + b"\0" for name, content in files.items() if name not in held_out)
    validation = b"".join(files[name] + b"\0" for name in files if name in held_out)
    if len(validation) <= context or len(train) <= context or len(files) == 1:
        everything = b"".join(content + b"\0" for content in files.values())
        cut = len(everything) - len(everything) // 10
        train, validation = everything[:cut], everything[cut:]
    if len(validation) <= context:
        size = len(train) + len(validation)
        raise ValueError(f"data: expected text of over {10 * context + 10} bytes, got {size} in {place}")
    return as_bytes(train), as_bytes(validation)


def as_bytes(text: bytes) -> Tensor:
    """(len(text),) uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Batch i is a function of i and the seed alone, so a resumed run needs no memory of the ones before.

    Each epoch cuts the text into windows from another beginning, and shuffles them.
    """

    def __init__(self, text: Tensor, context: int, batch: int, seed: int = 0) -> None:
        self.text, self.context, self.batch, self.seed = text, context, batch, seed
        self.per_epoch = max((len(text) - 1) // context - 1, 1)
        self.epoch, self.starts = -1, torch.empty(0)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, context)."""
        starts = [self.start(step * self.batch + i) for i in range(self.batch)]
        return self.windows(torch.tensor(starts), self.context)

    def start(self, index: int) -> int:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            slack = len(self.text) - self.per_epoch * self.context
            phase = torch.randint(min(slack, self.context), (1,), generator=generator)
            order = torch.randperm(self.per_epoch, generator=generator)
            self.epoch, self.starts = epoch, order * self.context + phase
        return int(self.starts[place])

    def windows(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        places = starts.to(self.text.device, non_blocking=True)[:, None]
        sequences = self.text[places + torch.arange(length + 1, device=self.text.device)]
        return sequences[:, :-1], sequences[:, 1:]

    def spread(self, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of windows spread evenly over the text: about ``num_bytes`` of it, or all, the last, shorter window too."""
        whole, rest = divmod(len(self.text) - 1, self.context)
        count = max(1, min(num_bytes // self.context, whole))
        starts = torch.arange(count) * whole // count * self.context
        for some in starts.split(self.batch):
            yield self.windows(some, self.context)
        if rest and num_bytes > whole * self.context:
            yield self.windows(torch.tensor([whole * self.context]), rest)
