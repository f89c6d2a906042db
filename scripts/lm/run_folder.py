"""What scripts/train_lm.py leaves on disk: runs/NAME/ with a checkpoint, metrics and a picture."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHECKPOINT, METRICS, CONFIG, SUMMARY, PICTURE = (
    "checkpoint.pt",
    "metrics.jsonl",
    "config.json",
    "summary.json",
    "loss.png",
)
FIELDS = {"step", "model", "best", "optimizer", "random", "seconds", "saved_bytes", "config", "data"}


class CheckpointError(Exception):
    """A checkpoint cannot be read, or belongs to something else."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Written beside and then renamed: whenever the program ends, there is one whole checkpoint."""
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    os.replace(beside, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state, on the CPU.

    Raises:
        CheckpointError: there is none, it is damaged, or it is no checkpoint of the training script.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint: {path} does not exist") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, AttributeError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"checkpoint: {path} cannot be read, it seems damaged ({reason})") from error
    missing = FIELDS - state.keys() if isinstance(state, dict) else FIELDS
    if missing:
        raise CheckpointError(f"checkpoint: {path} is not one of this script, it lacks {', '.join(sorted(missing))}")
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of the generators that dropout and initialisation draw from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def unused_name(runs: Path, name: str) -> str:
    """``name``, or name-2, name-3, …: a run is never written over."""
    count = 1
    while (runs / (name if count == 1 else f"{name}-{count}")).exists():
        count += 1
    return name if count == 1 else f"{name}-{count}"


def newest_unfinished(runs: Path) -> Path:
    """The folder whose checkpoint is the youngest, of those without a summary.

    Raises:
        CheckpointError: there is none.
    """
    found = [path for path in runs.glob(f"*/{CHECKPOINT}") if not (path.parent / SUMMARY).exists()]
    if not found:
        raise CheckpointError(f"checkpoint: {runs} has no unfinished run with one; --name chooses a run")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def read_metrics(path: Path, steps: int) -> list[dict[str, Any]]:
    """The lines of the steps before ``steps``. Later ones came after the checkpoint, and are made again."""
    metrics: list[dict[str, Any]] = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break  # it was being written when the program was killed
        if line["step"] < steps:
            metrics.append(line)
    return metrics


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def plot(path: Path, metrics: list[dict[str, Any]]) -> None:
    """Training and validation loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], color="#8fb3d9", lw=1, label="training")
    val = [m for m in metrics if "val_loss" in m]
    axes.plot([m["step"] for m in val], [m["val_loss"] for m in val], "o-", color="#c0392b", ms=3, label="validation")
    axes.set(xlabel="step", ylabel="cross-entropy, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
