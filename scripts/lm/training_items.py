"""The training runs that are compared: each with its changes of the preset, and the questions that they answer.

A run belongs to several questions, and is made once. Its settings are `BASE`'s, with the run's own over them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lm.settings import PRESETS, Config

Settings = dict[str, Any]

# Rows an expert has of a batch of the Hopper preset, over a tile of this size, are what SonicMoE's Tables 1 and 6 have: 4.
COARSE_TILE = 1024
OURS: Settings = {"backend": "hopper"}
ROUNDED: Settings = OURS | {"router": "token_rounding", "rounding_tile": COARSE_TILE}


@dataclass(frozen=True)
class Run:
    """label: in tables.  settings: what it has other than `BASE`."""

    label: str
    settings: Settings


RUNS = {
    "float64": Run("torch, float64", {"backend": "torch", "bf16": False, "float64": True, "attention_tiles": 8}),
    "torch_fp32": Run("torch, fp32", {"backend": "torch", "bf16": False}),
    "torch_bf16": Run("torch, bf16", {"backend": "torch"}),
    "ours": Run("ours, bf16", OURS),
    "fp8": Run("ours, fp8", OURS | {"precision": "fp8"}),
    "fused": Run('ours, `combine="fused"`', OURS | {"combine": "fused"}),
    "block_sparse": Run("block-sparse, bf16", OURS | {"formulation": "dmoe"}),
    "dense": Run("dense, as many active parameters", {"formulation": "dense"}),
    **{
        f"dropping_{factor}": Run(f"dropping, capacity factor {factor}", {"formulation": "dropping", "capacity_factor": factor})
        for factor in (1.0, 1.25, 1.5, 2.0)
    },
    # By the loads that train_lm prints, up to 8 times the mean in the first steps, a whole batch would want more than 80 GB.
    "dynamic": Run(
        "padded to the largest load, the batch in 4 parts",
        {"formulation": "dropping", "capacity_factor": 0.0, "accumulate": 4},
    ),
    "rounded_128": Run("rounded to 128, nearest", OURS | {"router": "token_rounding"}),
    "rounded": Run("rounded, nearest (NR-f)", ROUNDED),
    "rounded_sr_f": Run("rounded, stochastic (SR-f)", ROUNDED | {"router": "token_rounding_sr_f"}),
    "rounded_nr_s": Run("rounded, by scores (NR-s)", ROUNDED | {"router": "token_rounding_nr_s"}),
    "rounded_balance_f": Run("rounded, balanced (Balance-f)", ROUNDED | {"router": "token_rounding_balance_f"}),
    "rounded_up": Run("rounded up (UP)", ROUNDED | {"router": "token_rounding_up"}),
    "rounded_down": Run("rounded down (DOWN, token drop)", ROUNDED | {"router": "token_rounding_down"}),
    "expert_choice": Run("expert choice (EC)", OURS | {"router": "expert_choice"}),
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A question, and the runs that answer it, in the order of their value.

    changes: of `BASE`, in all of its runs.  length: which tells runs of these changes from the others.
    """

    question: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1)
    changes: tuple[tuple[str, Any], ...] = ()
    length: str = "whole"


# One rate of dropout parts runs whose dtypes differ: the masks' random numbers depend on the dtype. So there is none.
BASE = dataclasses.replace(PRESETS["hopper"], dropout=0.0, steps=500, checkpoint_every=500)
FIRST = (
    ("steps", 20),
    ("batch", 8),
    ("val_every", 20),
    ("val_bytes", 1 << 16),
    ("checkpoint_every", 20),
    ("log_every", 5),
)

ITEMS = {
    "float64": Item(
        "How far are the losses of the first steps from float64's?",
        ("float64", "ours", "torch_bf16", "torch_fp32", "fused", "block_sparse"),
        seeds=(0,),
        changes=FIRST,
        length="first steps",
    ),
    "accuracy": Item(
        "Does it train as well as plain torch, and when has it the loss of a dense model?",
        ("ours", "torch_bf16", "dense", "torch_fp32", "block_sparse", "dropping_1.25", "fused"),
    ),
    "capacity": Item(
        "What do dropped tokens cost? (MegaBlocks, Figure 2)",
        ("ours", "dropping_1.0", "dropping_1.5", "dropping_2.0", "dense", "dynamic"),
    ),
    "routers": Item(
        "Does token rounding train as well as top-k? (SonicMoE, Tables 1 and 6)",
        ("ours", "rounded", "expert_choice", "rounded_down", "rounded_up", "rounded_sr_f", "rounded_nr_s",
         "rounded_balance_f", "rounded_128"),
    ),
    "fp8": Item(
        "Does it train as well in fp8?",
        ("ours", "fp8"),
        changes=(("steps", 1000), ("checkpoint_every", 1000)),
        length="1000 steps",
    ),
}  # fmt: skip

SHORT = dataclasses.replace(
    PRESETS["cpu"],
    layers=1,
    d_model=32,
    heads=2,
    context=32,
    d_expert=128,
    num_experts=4,
    batch=4,
    steps=6,
    warmup=2,
    val_every=3,
    val_bytes=256,
    log_every=2,
    checkpoint_every=6,
    bf16=True,
    data=str(Path(__file__).parent),
)
SHORT_VALUES = {"hopper": "torch", COARSE_TILE: 16}  # in the short form, in place of a run's own
SHORT_STEPS = {"first steps": 4, "1000 steps": 8}  # by length


def config_of(item: str, run: str, seed: int, *, short: bool) -> Config:
    """The settings of a run. short: of a CPU's short form, whose kernels are plain torch."""
    own = RUNS[run].settings
    if not short:
        return dataclasses.replace(BASE, seed=seed, **{**dict(ITEMS[item].changes), **own})
    own = {
        name: SHORT_VALUES.get(value, value) if not isinstance(value, bool) else value for name, value in own.items()
    }
    own.pop("attention_tiles", None)
    steps = SHORT_STEPS.get(ITEMS[item].length, SHORT.steps)
    return dataclasses.replace(SHORT, seed=seed, **{"steps": steps, "checkpoint_every": steps, **own})
