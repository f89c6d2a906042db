"""Train a byte-level Mixture-of-Experts GPT on real text, on a CPU or a GPU. To be read from top to bottom.

    python -m scripts.train_lm                        # the preset that fits the machine, on Python's own library
    python -m scripts.train_lm --data notes/          # on a file or a folder of text
    python -m scripts.train_lm --router aux_free --steps 300 --name balance
    python -m scripts.train_lm --formulation dropping --capacity-factor 1.5
    python -m scripts.train_lm --router token_rounding --rounding-tile 32
    python -m scripts.train_lm --batch 128 --attention-tiles 8  # attention takes 16 sequences at a time, the experts all 128
    torchrun --nproc-per-node 2 -m scripts.train_lm --parallel fsdp   # or hsdp, ep, ep+fsdp; see docs/distributed.md
    python -m scripts.train_lm --resume               # go on with the newest unfinished run, or --name's
    python -m scripts.train_lm --resume --steps 1000  # make the newest run that long, also where it has ended
    python -m scripts.train_lm --sample runs/cpu      # text by the best weights of a run's checkpoint

The settings are in scripts/lm/settings.py, the model and the text in scripts/lm/model.py. A run is a folder, runs/NAME/, which
one process at a time may use, and which is never part of the text:
    config.json      every setting, and their checksum
    metrics.jsonl    a line a step: step, loss, aux_loss, balance, lr, tokens_per_s, and val_loss where validated
    loss.png         both losses, in nats a byte
    checkpoint.pt    weights, the best weights so far, optimizer, random state, checksums of the other files that --resume reads
    shards-STEP/     of a run with --parallel, these but for the random state: each rank writes its part
    summary.json     how it ended, with the sample

Ctrl-C saves a checkpoint and ends. A resumed run sees the batches and the random numbers that it would have seen, so on one
device its losses are bitwise identical to an uninterrupted run's. One that is made longer has from there on the
learning rates of a run of the new length: after its end they rise again. One that is resumed with other --attention-tiles keeps
them from there on, and its losses are the same but for the rounding of sums. A run with --parallel goes on on any number of
ranks, on the same number to the bit. The exit code is 2 where an option, the text or a checkpoint is refused, 1 where training
fails or another rank is gone, 130 where Ctrl-C leaves no checkpoint or no summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that cuBLAS repeats itself to the bit
# A waiting CPU thread soon yields its core: beside other programs, training is four times as fast.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from blazeproto.distributed import check_overflow, clip_grad_norm_
from blazeproto.runtime.arch import arch_of
from blazeproto.runtime.optional import need
from scripts.bench.timing import SavedBytes
from scripts.command import argument_parser, positive
from scripts.lm import run_folder, sharding
from scripts.lm.model import GPT, Batches, load_data
from scripts.lm.ranks import Ranks, joined
from scripts.lm.run_folder import CHECKPOINT, CHECKSUMS, CONFIG, METRICS, PICTURE, SUMMARY, CheckpointError, SaveError
from scripts.lm.settings import PRESETS, Config, add_options, check_acts, device_named

SAMPLE_BYTES = 400
# Settings that may be others when a run goes on.
RESUMED_WITH = {"steps", "data", "attention_tiles", "accumulate", "group_size", "reshard"}

# ---- optimizer ---------------------------------------------------------------------------------------------------


def learning_rate(step: int, config: Config) -> float:
    """Linear warmup, then a cosine down to ``final_lr``."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: GPT, config: Config) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices, not on norms. A group's parameters are sharded alike, as one kernel must find them."""
    groups: dict[Any, list[Tensor]] = {}
    for p in model.parameters():
        groups.setdefault((p.dim() >= 2, getattr(p, "device_mesh", None)), []).append(p)
    decays = [{"params": group, "weight_decay": config.weight_decay * decays} for (decays, _), group in groups.items()]
    return torch.optim.AdamW(decays, lr=config.lr, betas=(0.9, config.beta2), fused=True)


class Interrupt:
    """``with Interrupt() as interrupt``: Ctrl-C, or a SIGTERM, asks the loop to end after its step; a second one ends at once."""

    def __enter__(self) -> Interrupt:
        self.asked = False
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


# ---- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """Model, optimizer, text and position of a run: what a checkpoint holds, and the loop over it."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks) -> None:
        sharding.check(config, ranks)
        self.config, self.folder, self.ranks, self.device = config, folder, ranks, (device := ranks.device)
        self.sharded = config.parallel != "none"
        texts = load_data(config.data, config.context, runs=folder.parent)
        sizes = [len(text) for text in texts]  # the same bytes, divided otherwise, are another text
        self.data = hashlib.sha256(b"".join([repr(sizes).encode(), *(t.numpy().tobytes() for t in texts)])).hexdigest()
        if self.data != ranks.told(self.data):
            raise ValueError(f"data: expected the text of rank 0 on all ranks, got another one on rank {ranks.rank}")
        self.text_bytes = len(texts[0])
        batches = config.batch, config.batch // config.accumulate  # no validation's is larger than a part of a step
        self.train_batches, self.val_batches = (
            Batches(text.to(device), config.context, batch, config.seed)
            for text, batch in zip(texts, batches, strict=True)
        )
        torch.manual_seed(config.seed)
        self.model = GPT(config).to(device, torch.float64 if config.float64 else torch.float32)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.sharding = sharding.Sharding(self.model, config, ranks)
        self.optimizer = make_optimizer(self.model, config)
        self.precision = torch.autocast(device.type, torch.bfloat16, enabled=config.bf16)
        self.step, self.seconds, self.saved_bytes = 0, 0.0, 0
        self.best: dict[str, Any] = {"val_loss": math.inf, "step": 0, "model": {}}
        self.metrics: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)

    def save(self) -> None:
        """Write a checkpoint. SaveError on all ranks if that fails; then the one before is there, and no part of a new one."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "model": {} if self.sharded else self.model.state_dict(),
            "best": self.best | ({"model": {}} if self.sharded else {}),
            "optimizer": {} if self.sharded else self.optimizer.state_dict(),
            "step": self.step,
            "random": random,
            "seconds": self.seconds,
            "saved_bytes": self.saved_bytes,
            "config": dataclasses.asdict(self.config),
            "data": self.data,
        }
        written: Any = nullcontext({CHECKSUMS: {}})
        if self.sharded:
            shards = self.shards() | {"best": self.best["model"]}
            written = sharding.written_shards(self.folder, self.step, shards, self.ranks)
        with written as made:
            checksums = made[CHECKSUMS] | {METRICS: run_folder.checksum_of(self.metrics)}
            state |= made | {CHECKSUMS: checksums}
            self.ranks.of_first(partial(run_folder.save_checkpoint, self.folder / CHECKPOINT, state))

    def shards(self) -> dict[str, Any]:
        """This rank's part of the weights and of the optimizer, which has zeros before the first step."""
        return {
            "model": self.model.state_dict(),
            "optimizer": dict(get_optimizer_state_dict(self.model, self.optimizer)),
        }

    def load(self) -> None:
        """Go back to where the checkpoint was made. CheckpointError if it cannot be read or does not fit this run."""
        path = self.folder / CHECKPOINT
        state = run_folder.load_checkpoint(path)
        if state["data"] != self.data:
            raise CheckpointError(f"checkpoint: {path} was trained on another text than this run has")
        # A setting that came after the checkpoint has its default there.
        then, now = dataclasses.asdict(Config()) | state["config"], dataclasses.asdict(self.config)
        # The text has been compared; where it lies may have changed.
        differing = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)} - RESUMED_WITH
        if differing:
            raise CheckpointError(f"checkpoint: {path} and {CONFIG} differ in {', '.join(sorted(differing))}")
        if CHECKSUMS in state:
            run_folder.read_config(self.folder / CONFIG, checked=True)
        elif self.ranks.first:
            run_folder.warn_of_no_checksums(path)
        checksum = state.get(CHECKSUMS, {}).get(METRICS)
        read = partial(run_folder.read_metrics, self.folder / METRICS, state["step"], checksum)
        self.metrics = self.ranks.of_first(read)
        try:
            if self.sharded:
                self.load_shards(state)
            else:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and "cuda" in state["random"]:
                torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint: {path} holds another model ({error})") from error
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        if then["attention_tiles"] == now["attention_tiles"]:  # else the next step counts them
            self.saved_bytes = state["saved_bytes"]
        if self.sharded and self.ranks.first:  # what a killed process has left takes space
            sharding.keep_only(self.folder, state["shards"])

    def load_shards(self, state: dict[str, Any]) -> None:
        """Read this rank's part of a sharded checkpoint, the best weights into ``state``."""
        shards = self.shards()
        if state["best"]["step"]:  # of a validation
            shards["best"] = state["best"]["model"] = sharding.clones(shards["model"])
        sharding.load_shards(self.folder, state, shards, self.ranks)
        set_optimizer_state_dict(self.model, self.optimizer, shards["optimizer"])

    def train_step(self) -> Tensor:
        """One update. Returns (3,) on the device: loss, auxiliary loss, balance; of all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        if self.sharded:
            # A function of seed, step and rank: a checkpoint need not hold each rank's state.
            torch.manual_seed((self.config.seed << 31) + self.step * self.ranks.size + self.ranks.rank)
        parts = self.config.accumulate
        losses, loads = torch.zeros(2, device=self.device), torch.zeros((), dtype=torch.int32, device=self.device)
        for ids, targets in zip(*(self.ranks.rows(t, parts) for t in self.train_batches[self.step]), strict=True):
            with self.precision:
                if self.saved_bytes or self.sharded:  # where gathered weights would be counted too
                    out = self.model(ids, targets)
                else:  # once a run
                    with (saved := SavedBytes(self.model.parameters())).hooks:
                        out = self.model(ids, targets)
                    self.saved_bytes = saved.total
            assert out.loss is not None
            ((out.loss + out.aux_loss) / parts).backward()
            aux_loss = torch.as_tensor(out.aux_loss, dtype=torch.float32, device=self.device)
            losses += torch.stack([out.loss.detach(), aux_loss.detach()]) / parts
            loads = loads + out.loads
        self.sharding.reduce()
        if math.isfinite(self.config.clip):
            clip_grad_norm_(self.model.parameters(), self.config.clip)
        if self.config.row_capacity:
            check_overflow(self.model, dist.group.WORLD)  # OverflowError on all ranks, before any steps
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loads = self.ranks.sum(loads)
        self.model.update_router_biases(loads)
        self.step += 1
        loads = loads.float()
        balance = (loads.amax(1) / loads.mean(1).clamp(min=1e-9)).mean()  # 1 where all experts have the same work
        return torch.cat([self.ranks.mean(losses), balance[None]])

    def validate(self, num_bytes: int) -> float:
        """Mean cross-entropy in nats a byte. Draws no random number, so training is as if it had not been there."""
        self.model.eval()
        total, count, ranks = torch.zeros((), device=self.device), 0, self.ranks
        with torch.no_grad(), self.precision:
            for ids, targets in self.val_batches.spread(num_bytes):
                count += targets.numel()
                own = slice(ranks.rank, None, ranks.size)
                # A rank without a sequence takes part in what the ranks exchange all the same.
                size = targets[own].numel()
                ids, targets = (t[own] if size else t[:1] for t in (ids, targets))
                total += self.model(ids, targets).loss * size
        self.model.train()
        if self.config.row_capacity:
            check_overflow(self.model)  # or the loss would be of fewer experts
        return float(ranks.sum(total)) / count

    def run(self) -> bool:
        """Train to the last step, or until interrupted. Returns whether it is done."""
        config, path = self.config, self.folder / METRICS
        waiting: list[Tensor] = []  # numbers still on the device: reading them waits for it, so they are read together
        since = time.perf_counter()
        began = since - self.seconds
        self.ranks.of_first(partial(run_folder.write_lines, path, self.metrics))
        last = self.step == config.steps
        with Interrupt() as interrupt:
            while not last:
                waiting.append(self.train_step())
                last = self.step == config.steps or self.ranks.any(interrupt.asked)
                validating = self.step % config.val_every == 0 or self.step == config.steps
                saving = last or self.step % config.checkpoint_every == 0
                if not (saving or validating or self.step % config.log_every == 0):
                    continue
                rows = torch.stack(waiting).tolist()
                speed = round(len(rows) * config.batch * config.context / (time.perf_counter() - since), 1)
                names = ("step", "loss", "aux_loss", "balance", "lr", "tokens_per_s")
                steps = range(self.step - len(rows), self.step)
                lines = [
                    dict(zip(names, (step, *row, learning_rate(step, config), speed), strict=True))
                    for step, row in zip(steps, rows, strict=True)
                ]
                waiting.clear()
                if validating:
                    lines[-1]["val_loss"] = val_loss = self.validate(config.val_bytes)
                    if val_loss < self.best["val_loss"]:
                        weights = sharding.clones(self.model.state_dict())
                        self.best = {"val_loss": val_loss, "step": self.step, "model": weights}
                self.ranks.of_first(partial(run_folder.append_lines, path, lines))
                self.metrics += lines
                self.say(self.progress())
                if not math.isfinite(loss := lines[-1]["loss"] + lines[-1].get("val_loss", 0.0)):
                    raise FloatingPointError(
                        f"loss: expected a finite number, got {loss} at step {self.step}; try a lower --lr"
                    )
                self.seconds = time.perf_counter() - began
                if saving:
                    self.save()
                since = time.perf_counter()
        self.ranks.of_first(partial(run_folder.plot, self.folder / PICTURE, self.metrics))
        return self.step == config.steps

    def progress(self) -> str:
        """The numbers of the last step, in a line."""
        line = self.metrics[-1]
        validated = f"val {line['val_loss']:.4f}  " if "val_loss" in line else ""
        saved = f"  saved {self.saved_bytes / 2**20:.0f} MiB" if self.saved_bytes else ""
        numbers = f"{validated}{line['tokens_per_s'] / 1000:.1f}k tokens/s  balance {line['balance']:.2f}{saved}"
        return f"step {self.step:5d}/{self.config.steps}  loss {line['loss']:.3f}  {numbers}"

    def finish(self) -> dict[str, Any]:
        """Validate the best weights on more text, let them write some, and note how the run went."""
        self.model.load_state_dict(self.best["model"])
        with self.precision:
            text = self.model.generate(b"\0", SAMPLE_BYTES, seed=self.config.seed)
        summary = {
            "val_loss": self.validate(4 * self.config.val_bytes),
            "best_step": self.best["step"],
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "parameters": self.parameters,
            "saved_activation_bytes": self.saved_bytes,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "sample": text[1:].decode(errors="replace"),
        }
        self.ranks.of_first(partial(run_folder.write_lines, self.folder / SUMMARY, [summary], indent=2))
        return summary


# ---- the command line --------------------------------------------------------------------------------------------


def options() -> argparse.ArgumentParser:
    parser = argument_parser("scripts.train_lm", __doc__)
    parser.add_argument("--preset", choices=[*PRESETS], help="hopper where there is such a GPU, else cpu")
    parser.add_argument("--out", type=Path, help="folder of the runs [default runs]")
    parser.add_argument("--name", help="of the run's folder [default the preset's, with a number if it is taken]")
    parser.add_argument("--resume", action="store_true", help="go on from a checkpoint, with the run's own settings")
    parser.add_argument(
        "--sample", type=Path, metavar="CHECKPOINT", help="train nothing, write text: a file or a run's folder"
    )
    parser.add_argument("--prompt", help="what the text of --sample begins with [default the beginning of a file]")
    parser.add_argument("--device", help="cpu, cuda or cuda:N [default cuda where there is one, else cpu]")
    wait = "seconds that a rank waits for another under torchrun [default 300]"
    parser.add_argument("--timeout", type=positive, metavar="N", help=wait)
    add_options(parser)
    return parser


@contextmanager
def opened_run(args: argparse.Namespace, ranks: Ranks) -> Iterator[Trainer]:
    """A new run, or one that goes on; rank 0 has locked its folder.

    Raises:
        ValueError: an option, or the text, isn't what it must be.
        CheckpointError: there is no such run to go on with, or it is in use.
    """
    if args.prompt is not None:
        raise ValueError("prompt: expected none without --sample")
    if args.timeout is not None and ranks.size == 1:
        raise ValueError(f"timeout: expected none on one rank, which waits for no other, got {args.timeout}")
    given = given_settings(args)
    with ExitStack() as held:
        folder, config = ranks.of_first(lambda: held.enter_context(locked_run(args, given, ranks.device)))
        trainer = Trainer(config, folder, ranks)
        if args.resume:
            trainer.load()
            if given.keys() & (RESUMED_WITH - {"data"}):
                ranks.of_first(partial(run_folder.write_config, folder / CONFIG, dataclasses.asdict(config)))
            if ranks.first and "steps" in given:
                (folder / SUMMARY).unlink(missing_ok=True)  # it goes on
        yield trainer


@contextmanager
def locked_run(args: argparse.Namespace, given: dict[str, Any], device: torch.device) -> Iterator[tuple[Path, Config]]:
    """The folder and the settings of the run that the options name."""
    if args.name is not None:
        run_folder.check_name(args.name)
    if args.resume:
        if args.preset:
            raise ValueError(f"preset: expected none with --resume, a run keeps its settings, got {args.preset!r}")
        with run_folder.old_run(args.out, args.name, ended="steps" in given) as folder:
            yield folder, settings_of(folder, given)
        return
    hopper = device.type == "cuda" and arch_of(torch.cuda.get_device_capability(device)) is not None
    preset = args.preset or ("hopper" if hopper else "cpu")
    config = dataclasses.replace(PRESETS[preset], **given)
    check_acts(config, given)
    with run_folder.new_run(args.out, args.name, preset) as folder:
        run_folder.write_config(folder / CONFIG, dataclasses.asdict(config))
        yield folder, config


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line has. ValueError for an empty path."""
    given = {f.name: value for f in dataclasses.fields(Config) if (value := getattr(args, f.name)) is not None}
    if given.get("data") == "":
        raise ValueError("data: expected a file or a folder, got ''")
    # A run may be resumed from another folder.
    return given | ({"data": str(Path(given["data"]).absolute())} if "data" in given else {})


def settings_of(folder: Path, given: dict[str, Any]) -> Config:
    """The settings that a run began with. Options that are given must agree with them, except for RESUMED_WITH."""
    try:
        config = Config(**run_folder.read_config(folder / CONFIG))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {folder / CONFIG} cannot be read ({error})") from error
    ended = (folder / SUMMARY).exists()
    least, when = config.steps + ended, "has ended" if ended else "began"
    if given.get("steps", least) < least:
        now = f"{folder} {when} with {config.steps}"
        raise CheckpointError(f"steps: expected at least {least}, as {now}, got {given['steps']}")
    for name, value in given.items():
        if value != getattr(config, name) and name not in RESUMED_WITH:
            raise CheckpointError(f"{name}: expected {getattr(config, name)!r} as {folder} began, got {value!r}")
    check_acts(config, given)
    return dataclasses.replace(config, **given)


def resume_command(trainer: Trainer, args: argparse.Namespace) -> str:
    """To be pasted into a shell."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    words = [sys.executable, *(launcher if trainer.ranks.size > 1 else []), "-m", "scripts.train_lm", "--resume"]
    words += ["--out", str(args.out.absolute()), "--name", trainer.folder.name]
    return shlex.join(words + (["--device", args.device] if args.device else []))


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    """Run to the end, or until interrupted, and say how it went."""
    need("matplotlib")  # which draws when the run ends
    config, folder, ranks = trainer.config, trainer.folder, trainer.ranks
    on = str(trainer.device) if ranks.size == 1 else f"{ranks.size} ranks ({config.parallel}, {trainer.device.type})"
    trainer.say(
        f"{folder}: {trainer.parameters / 1e6:.1f} M parameters, {trainer.text_bytes / 1e6:.1f} MB of text, "
        f"{config.batch * config.context} bytes a step, router {config.router}, on {on}"
    )
    if not trainer.run():
        trainer.say(f"stopped after step {trainer.step} of {config.steps}; to go on: {resume_command(trainer, args)}")
        return
    summary = trainer.finish()
    result = f"validation loss {summary['val_loss']:.4f} nats/byte, by the weights of step {summary['best_step']}"
    trainer.say(f"\n{summary['sample']}\n\n{result}; {summary['seconds']:.0f} s; {folder / PICTURE}")


def sample(args: argparse.Namespace) -> None:
    """Print text by the best weights of a checkpoint, whatever device and backend they were trained on."""
    others = {name: getattr(args, name) for name in ("preset", "name", "out", "timeout")} | given_settings(args)
    others |= {"resume": args.resume or None, "seed": None}
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}: expected none with --sample, got {value!r}")
    device = device_named(args.device)
    path = args.sample / CHECKPOINT if args.sample.is_dir() else args.sample
    if not path.is_file():
        raise ValueError(f"sample: expected a checkpoint, or the folder of a run with one, got {args.sample}")
    state = run_folder.load_checkpoint(path)
    try:
        config = dataclasses.replace(Config(**state["config"]), backend="auto")
        model = GPT(config).to(device)
        weights = state["best"]["model"] or state["model"]  # none is the best before it is validated
        if "shards" in state:
            if CHECKSUMS not in state:
                run_folder.warn_of_no_checksums(path)
            weights = model.state_dict()
            which = "best" if state["best"]["step"] else "model"
            sharding.load_shards(path.parent, state, {which: weights}, Ranks(device), alone=True)
        model.load_state_dict(weights)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {path} holds another model ({error})") from error
    prompt = args.prompt.encode(errors="surrogateescape") if args.prompt else b"\0"
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        text = model.generate(prompt, SAMPLE_BYTES, seed=config.seed if args.seed is None else args.seed)
    print(text.removeprefix(b"\0").decode(errors="replace"))


def main(arguments: list[str] | None = None) -> int:
    args = options().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: before and after training, KeyboardInterrupt
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    trainer = ranks = None
    try:
        torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward would not repeat itself
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention never does
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only costs time
        if args.sample is not None:
            sample(args)
            return 0
        args.out = args.out or Path("runs")
        with joined(args.device, args.timeout or 300) as ranks, opened_run(args, ranks) as trainer:
            train(trainer, args)
        return 0
    except (ValueError, CheckpointError) as error:
        if trainer is not None and trainer.step > 0:
            raise  # no option's fault: the traceback is wanted
        code, line = 2, str(error)
    except (FloatingPointError, OverflowError) as error:
        code, line = 1, str(error)
    except (OSError, SaveError) as error:
        code, line = 1, str(error) + go_on(trainer, args)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        hint = "try more --attention-tiles, a smaller --batch, --context or model"
        code, line = 1, f"out of memory; {hint} ({str(error).splitlines()[0]})" + go_on(trainer, args)
    except KeyboardInterrupt:
        code, line = 130, "interrupted" + go_on(trainer, args)
    if ranks is None or not ranks.repeats_first():
        print(f"error: {line}", file=sys.stderr)
    return code


def go_on(trainer: Trainer | None, args: argparse.Namespace) -> str:
    """The end of an error's line."""
    if trainer is None or not trainer.folder.exists():
        return ""
    if not (trainer.folder / CHECKPOINT).exists():
        return f"; it has no checkpoint yet: to start it again remove {trainer.folder}"
    return f"; to go on from the last checkpoint: {resume_command(trainer, args)}"


if __name__ == "__main__":
    sys.exit(main())
