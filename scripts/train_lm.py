"""Train a byte-level Mixture-of-Experts GPT on real text, on a CPU or a GPU. One file, top to bottom.

    python -m scripts.train_lm                        # the preset that fits the machine, on Python's own library
    python -m scripts.train_lm --data notes/          # on a file or a folder of text
    python -m scripts.train_lm --router aux_free --steps 300 --name balance
    python -m scripts.train_lm --resume               # go on with the newest unfinished run, or --name's

The model and the text are in scripts/lm/model.py. A run is a folder, runs/NAME/:
    config.json      every setting
    metrics.jsonl    a line a step: step, loss, aux_loss, balance, lr, tokens_per_s, and val_loss where validated
    loss.png         both losses, in nats a byte
    checkpoint.pt    weights, the best weights so far, optimizer, random state
    summary.json     how it ended, with the sample

Ctrl-C saves a checkpoint and ends. A resumed run sees the batches and the random numbers that it would have seen, so its
losses are, on one device, those of a run that was never interrupted, to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that cuBLAS repeats itself to the bit
# A waiting CPU thread soon yields its core: beside other programs, training is four times as fast.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor

from blazeproto.router import ROUTERS
from scripts.command import argument_parser
from scripts.lm import run_folder
from scripts.lm.model import GPT, Batches, GPTConfig, SavedBytes, load_data
from scripts.lm.run_folder import CHECKPOINT, CONFIG, METRICS, PICTURE, SUMMARY, CheckpointError

# ---- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Every setting, and option of the command line. The defaults are the CPU preset."""

    layers: int = 4
    d_model: int = 128
    heads: int = 4
    context: int = 256
    d_expert: int = 128
    num_experts: int = 8
    top_k: int = 2
    dropout: float = 0.0
    router: str = "top_k"
    backend: str = "auto"
    save: str = "minimal"
    bf16: bool = False  # autocast; weights and optimizer stay fp32
    # optimizer
    steps: int = 560
    batch: int = 8  # sequences of context bytes
    lr: float = 3e-3
    warmup: int = 50
    final_lr: float = 0.05  # of lr, at the end of the cosine
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    # data, and how often to look
    data: str = ""  # a file or a folder; none: the standard library of this Python
    val_every: int = 80
    val_bytes: int = 1 << 15  # of held-out text that is validated on, spread over all of it
    log_every: int = 10
    checkpoint_every: int = 280

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warmup", "val_every", "val_bytes", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


PRESETS = {
    "cpu": Config(),
    "hopper": Config(
        layers=8,
        d_model=512,
        heads=8,
        context=1024,
        d_expert=256,
        num_experts=64,
        top_k=4,
        dropout=0.1,
        bf16=True,
        steps=1200,
        batch=64,
        lr=1e-3,
        warmup=100,
        val_every=100,
        val_bytes=1 << 20,
        checkpoint_every=1000,
    ),
}
CHOICES = {"router": list(ROUTERS), "backend": ["auto", "hopper", "torch"], "save": ["minimal", "paper", "recompute"]}


def learning_rate(step: int, config: Config) -> float:
    """Linear warmup, then a cosine down to ``final_lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: GPT, config: Config) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices, not on norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), fused=True)


# ---- what a person sees ------------------------------------------------------------------------------------------


class Display:
    """A bar with the latest numbers on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self.console = Console(highlight=False)
        self.steps, self.val_loss, self.saved_bytes = steps, math.nan, 0
        columns = "step", MofNCompleteColumn(), BarColumn(bar_width=None), "{task.description}", TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=steps)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self, line: dict[str, Any]) -> None:
        done = line["step"] + 1
        self.val_loss = line.get("val_loss", self.val_loss)
        numbers = (
            f"loss {line['loss']:.3f}  val {self.val_loss:.3f}  {line['tokens_per_s'] / 1000:.1f}k tokens/s  "
            f"balance {line['balance']:.2f}  saved {self.saved_bytes / 2**20:.0f} MiB"
        )
        if not self.console.is_terminal:
            self.say(f"step {done:5d}/{self.steps}  {numbers}")
            return
        self.progress.update(self.task, completed=done, description=numbers)
        if "val_loss" in line:
            self.say(f"step {done:5d}  validation loss {self.val_loss:.4f} nats/byte")


class Interrupt:
    """Ctrl-C, or a SIGTERM, asks the loop to end after its step; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


# ---- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """Model, optimizer, text and position of a run: what a checkpoint holds, and the loop over it."""

    def __init__(self, config: Config, folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        texts = load_data(config.data, config.context)
        self.data = hashlib.sha256(b"".join(text.numpy().tobytes() for text in texts)).hexdigest()
        self.text_bytes = len(texts[0])
        self.train_batches, self.val_batches = (
            Batches(text.to(device), config.context, config.batch, config.seed) for text in texts
        )
        torch.manual_seed(config.seed)
        sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTConfig)}
        self.model = GPT(GPTConfig(**sizes)).to(device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = make_optimizer(self.model, config)
        self.precision = torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)
        self.step, self.seconds, self.saved_bytes = 0, 0.0, 0
        self.best: dict[str, Any] = {"val_loss": math.inf, "step": 0, "model": {}}
        self.metrics: list[dict[str, Any]] = []

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "random": run_folder.random_state(self.device),
            "seconds": self.seconds,
            "saved_bytes": self.saved_bytes,
            "config": dataclasses.asdict(self.config),
            "data": self.data,
        }
        run_folder.save_checkpoint(self.folder / CHECKPOINT, state)

    def load(self) -> None:
        """Go back to where the checkpoint was made. CheckpointError if it cannot be read or does not fit this run."""
        path = self.folder / CHECKPOINT
        state = run_folder.load_checkpoint(path)
        if state["data"] != self.data:
            raise CheckpointError(f"checkpoint: {path} was trained on another text than there is now")
        if state["config"] != (now := dataclasses.asdict(self.config)):
            differing = {key for key in now.keys() | state["config"].keys() if now.get(key) != state["config"].get(key)}
            raise CheckpointError(f"checkpoint: {path} and {CONFIG} differ in {', '.join(sorted(differing))}")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint: {path} holds another model ({error})") from error
        self.step, self.seconds, self.saved_bytes = state["step"], state["seconds"], state["saved_bytes"]
        self.best = state["best"]
        run_folder.set_random_state(state["random"], self.device)
        self.metrics = run_folder.read_metrics(self.folder / METRICS, self.step)

    def train_step(self) -> Tensor:
        """One update. Returns (3,) on the device: loss, auxiliary loss, balance."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        ids, targets = self.train_batches[self.step]
        with self.precision:
            if self.saved_bytes:
                out = self.model(ids, targets)
            else:  # once a run
                with (saved := SavedBytes(self.model)).hooks:
                    out = self.model(ids, targets)
                self.saved_bytes = saved.total
        assert out.loss is not None
        (out.loss + out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.update_router_biases(out.loads)
        self.step += 1
        loads = out.loads.float()
        balance = (loads.amax(1) / loads.mean(1).clamp(min=1e-9)).mean()  # 1 where all experts have the same work
        aux_loss = torch.as_tensor(out.aux_loss, dtype=torch.float32, device=self.device)
        return torch.stack([out.loss.detach(), aux_loss.detach(), balance])

    def validate(self, num_bytes: int) -> float:
        """Mean cross-entropy in nats a byte. Draws no random number, so training is as if it had not been there."""
        self.model.eval()
        total, count = torch.zeros((), device=self.device), 0
        with torch.no_grad(), self.precision:
            for ids, targets in self.val_batches.spread(num_bytes):
                total += self.model(ids, targets).loss * targets.numel()
                count += targets.numel()
        self.model.train()
        return float(total) / count

    def run(self, display: Display) -> bool:
        """Train to the last step, or until interrupted. Returns whether it is done."""
        config, interrupt = self.config, Interrupt()
        waiting: list[Tensor] = []  # numbers still on the device: reading them waits for it, so they are read together
        since = time.perf_counter()
        began = since - self.seconds
        display.saved_bytes = self.saved_bytes
        with display.progress, (self.folder / METRICS).open("w") as log:
            log.writelines(json.dumps(line) + "\n" for line in self.metrics)
            while self.step < config.steps:
                waiting.append(self.train_step())
                last = self.step == config.steps or interrupt.asked
                validating = self.step % config.val_every == 0 or self.step == config.steps
                if not (last or validating or self.step % config.log_every == 0):
                    continue
                rows = torch.stack(waiting).tolist()
                speed = len(rows) * config.batch * config.context / (time.perf_counter() - since)
                lines = []
                for step, (loss, aux_loss, balance) in enumerate(rows, self.step - len(rows)):
                    line = {"step": step, "loss": loss, "aux_loss": aux_loss, "balance": balance}
                    lines.append(line | {"lr": learning_rate(step, config), "tokens_per_s": round(speed, 1)})
                waiting.clear()
                if validating:
                    lines[-1]["val_loss"] = val_loss = self.validate(config.val_bytes)
                    if val_loss < self.best["val_loss"]:
                        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                        self.best = {"val_loss": val_loss, "step": self.step, "model": weights}
                log.writelines(json.dumps(line) + "\n" for line in lines)
                log.flush()
                self.metrics += lines
                display.saved_bytes = self.saved_bytes
                display.update(lines[-1])
                if not math.isfinite(lines[-1]["loss"]):
                    raise FloatingPointError(f"the loss was {lines[-1]['loss']} at step {self.step}; try a lower --lr")
                self.seconds = time.perf_counter() - began
                if last or self.step % config.checkpoint_every == 0:
                    self.save()
                if last:
                    break
                since = time.perf_counter()
        run_folder.plot(self.folder / PICTURE, self.metrics)
        return self.step == config.steps

    def finish(self) -> dict[str, Any]:
        """Validate the best weights on more text, let them write some, and note how the run went."""
        self.model.load_state_dict(self.best["model"])
        with self.precision:
            sample = self.model.generate(b"\0", 400, seed=self.config.seed)
        summary = {
            "val_loss": self.validate(4 * self.config.val_bytes),
            "best_step": self.best["step"],
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "parameters": self.parameters,
            "saved_activation_bytes": self.saved_bytes,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "sample": sample[1:].decode(errors="replace"),
        }
        run_folder.write_json(self.folder / SUMMARY, summary)
        return summary


# ---- the command line --------------------------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    parser = argument_parser("scripts.train_lm", __doc__)
    parser.add_argument("--preset", choices=[*PRESETS], help="hopper where there is such a GPU, else cpu")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (runs)")
    parser.add_argument("--name", help="of the run (its preset's)")
    parser.add_argument("--resume", action="store_true", help="go on from a checkpoint")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    for field in dataclasses.fields(Config):
        flag, kind = "--" + field.name.replace("_", "-"), type(field.default)
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(flag, type=kind, choices=CHOICES.get(field.name))
    return parser


def open_run(args: argparse.Namespace, device: torch.device) -> Trainer:
    """A new run, or one that goes on."""
    given = {f.name: value for f in dataclasses.fields(Config) if (value := getattr(args, f.name)) is not None}
    if args.resume:
        folder = args.out / args.name if args.name else run_folder.newest_unfinished(args.out)
        try:
            config = Config(**json.loads((folder / CONFIG).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"checkpoint: {folder / CONFIG} cannot be read ({error})") from error
        for name, value in given.items():
            if value != getattr(config, name):
                raise CheckpointError(f"{name}: expected {getattr(config, name)!r} as {folder} began, got {value!r}")
        (trainer := Trainer(config, folder, device)).load()
        return trainer
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    config = dataclasses.replace(PRESETS[preset := args.preset or ("hopper" if hopper else "cpu")], **given)
    folder = args.out / (args.name or run_folder.unused_name(args.out, preset))
    if (folder / CONFIG).exists():
        raise ValueError(f"name: expected a new run, but {folder} exists; --resume goes on with it")
    trainer = Trainer(config, folder, device)
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(folder / CONFIG, dataclasses.asdict(config))
    return trainer


def main(arguments: list[str] | None = None) -> int:
    args = options().parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward would not repeat itself
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention never does
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only costs time
    try:
        trainer = open_run(args, device)
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    display = Display(trainer.config.steps)
    display.say(
        f"{trainer.folder}: {trainer.parameters / 1e6:.1f} M parameters, {trainer.text_bytes / 1e6:.1f} MB of text, "
        f"{trainer.config.batch * trainer.config.context} bytes a step, router {trainer.config.router}, on {device}"
    )
    if not trainer.run(display):
        command = f"python -m scripts.train_lm --resume --out {args.out} --name {trainer.folder.name}"
        display.say(f"stopped after step {trainer.step} of {trainer.config.steps}; to go on: {command}")
        return 0
    summary = trainer.finish()
    result = f"validation loss {summary['val_loss']:.4f} nats/byte, by the weights of step {summary['best_step']}"
    display.say(f"\n{summary['sample']}\n\n{result}; {summary['seconds']:.0f} s; {trainer.folder}/{PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
