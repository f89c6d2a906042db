"""The settings of scripts/train_lm.py: each with its default, what it may be, and what it does, in one place.

    Config(router="aux_free", steps=300)    # checked here, and from the command line, alike
    python -m scripts.train_lm --help       # is made from these lines too

argparse is enough for that: it reads the fields of a dataclass, so a library such as typer would add a dependency and a second
place to declare an option, and would still not check what Python code passes to ``Config``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blazeproto import blocksparse
from blazeproto.autograd import SavePolicy
from blazeproto.gemm.quantize import BLOCK
from blazeproto.gemm.recipe import RECIPES
from blazeproto.layer import MoE
from blazeproto.router import ROUTERS
from blazeproto.runtime import arch, checks
from scripts.lm.dense import Dense

# ---- what a setting may be ---------------------------------------------------------------------------------------

ARTICLES = {int: "an int", float: "a number", bool: "True or False", str: "a string"}
RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "an int in [0, 4294967296)": lambda value: 0 <= value < 1 << 32,
    "a number in [0, 1)": lambda value: 0 <= value < 1,
    "a number in [0, 1]": lambda value: 0 <= value <= 1,
    "a number above 0": lambda value: value > 0,
    "a finite number above 0": lambda value: 0 < value < math.inf,
    "a finite number of at least 0": lambda value: 0 <= value < math.inf,
}
"""Where a number may lie: in words, as help and errors say it."""


def check(field: dataclasses.Field[Any], value: Any) -> None:
    """TypeError or ValueError unless ``value`` is one that the setting may have."""
    kind, within, names = type(field.default), field.metadata["within"], field.metadata["names"]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{field.name}: expected {ARTICLES[kind]}, got {value!r}")
    if names:
        checks.one_of(field.name, value, names)
    if within and not RANGES[within](value):
        raise ValueError(f"{field.name}: expected {within}, got {value}")


def setting(default: Any, text: str, within: str = "", *, names: Sequence[str] = ()) -> Any:
    """A field of a settings class.

    default: its type is the setting's.  text: what it does.  within: of RANGES.  names: the strings that are allowed; () for any.
    """
    return dataclasses.field(default=default, metadata={"text": text, "within": within, "names": tuple(names)})


# ---- the experts' formulations ------------------------------------------------------------------------------------

ROUNDING = tuple(name for name, options in ROUTERS.items() if options.get("choose") == "token_rounding")
BALANCED = tuple(name for name, options in ROUTERS.items() if options.get("aux_loss"))

# The layer of each, and which of the settings that not all of them have it takes. A line here is a formulation of train_lm.
FORMULATIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "moe": (MoE, ("backend", "save", "combine", "precision")),
    "dropping": (blocksparse.DroppingMoE, ("capacity_factor",)),
    "sequential": (blocksparse.SequentialMoE, ()),
    "dmoe": (blocksparse.dMoE, ("backend",)),
    "dense": (Dense, ()),
}

PARALLEL = ("none", "fsdp", "hsdp", "ep", "ep+fsdp")  # scripts/lm/sharding.py

# Settings that act in some runs only: the setting that decides it, and its values there.
ACTS_WITH: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("rounding_tile", "router", ROUNDING),
    *(
        (setting, "formulation", tuple(name for name, (_, others) in FORMULATIONS.items() if setting in others))
        for setting in dict.fromkeys(setting for _, settings in FORMULATIONS.values() for setting in settings)
    ),
    ("group_size", "parallel", ("hsdp", "ep+fsdp")),
    ("reshard", "parallel", ("fsdp", "hsdp", "ep+fsdp")),
    ("dispatcher", "parallel", ("ep", "ep+fsdp")),
    ("aux_over", "parallel", PARALLEL[1:]),
    ("aux_over", "router", BALANCED),
    ("aux_over", "formulation", tuple(name for name in FORMULATIONS if name != "dense")),
)


def check_acts(config: GPTConfig, names: Collection[str]) -> None:
    """ValueError for a setting of ``names`` that does nothing in a run of ``config``."""
    for name, other, values in ACTS_WITH:
        if name in names and (got := getattr(config, other)) not in values:
            take = "takes" if len(values) == 1 else "take"
            raise ValueError(f"{name}: expected none with {other} {got}, as {', '.join(values)} {take} it")


# ---- the settings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """The model's sizes, and how its MoE layers run (see `blazeproto.layer.MoE`).

    Raises:
        TypeError, ValueError: a setting is of another type, or outside its range; or two do not fit each other.
    """

    layers: int = setting(4, "blocks of attention and experts", "at least 1")
    d_model: int = setting(128, "the model's width, a multiple of 2 * heads", "at least 1")
    heads: int = setting(4, "of attention, d_model / heads numbers each", "at least 1")
    context: int = setting(256, "positions that the model can look at", "at least 1")
    d_expert: int = setting(128, "an expert's width", "at least 1")
    num_experts: int = setting(8, "of each layer", "at least 1")
    top_k: int = setting(2, "experts a token, at most num_experts", "at least 1")
    dropout: float = setting(0.0, "share of the residual's additions that training leaves out", "a number in [0, 1)")
    router: str = setting("top_k", "how tokens choose experts, see docs/routers.md", names=[*ROUTERS])
    rounding_tile: int = setting(128, "of token rounding: an expert's tokens are a multiple of it", "at least 1")
    formulation: str = setting(
        "moe",
        "how experts are computed, see blazeproto.blocksparse; dense: one MLP in their place",
        names=[*FORMULATIONS],
    )
    capacity_factor: float = setting(
        1.0,
        "of dropping: an expert's places over the mean load; 0 makes as many as the largest load",
        "a finite number of at least 0",
    )
    backend: str = setting("auto", "what computes the experts", names=["auto", *arch.ARCHES, "torch"])
    save: str = setting("minimal", "what is kept for backward", names=[policy.value for policy in SavePolicy])
    combine: str = setting("gather", "where a token's experts are summed", names=["gather", "fused", "fused_both"])
    precision: str = setting(
        "bf16", "what the experts' products multiply: bf16, x's own dtype, or fp8, see docs/fp8.md", names=[*RECIPES]
    )
    attention_tiles: int = setting(
        1, "parts of the batch that go through attention one after the other, computed again in backward", "at least 1"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        for refused, message in self.rules():
            if refused:
                raise ValueError(message)
        # Those of several ranks may be set for runs of several modes; `check_acts` refuses them on the command line.
        check_acts(self, {f.name for f in dataclasses.fields(GPTConfig) if getattr(self, f.name) != f.default})

    def rules(self) -> list[tuple[bool, str]]:
        """Settings that do not fit each other: whether that is so, and the error's words."""
        fp8 = (
            ("d_model", self.d_model % 16 == 0, "a multiple of 16"),
            ("d_expert", self.d_expert % BLOCK == 0, f"a multiple of {BLOCK}"),
            ("combine", self.combine == "gather", "gather"),
            ("save", self.save != SavePolicy.PAPER, "minimal or recompute"),
        )
        return [
            (
                self.d_model % (2 * self.heads) > 0,
                f"d_model: expected a multiple of 2 * heads = {2 * self.heads}, got {self.d_model}",
            ),
            (
                self.top_k > self.num_experts,
                f"top_k: expected at most num_experts={self.num_experts}, got {self.top_k}",
            ),
            (
                self.formulation == "dense" and self.router != GPTConfig.router,
                f"router: expected none with formulation dense, which does not choose, got {self.router!r}",
            ),
            *(
                (
                    self.precision != "bf16" and not fits,
                    f"{name}: expected {expected} with precision {self.precision}, got {getattr(self, name)}",
                )
                for name, fits, expected in fp8
            ),
        ]


@dataclass(frozen=True)
class Config(GPTConfig):
    """Every setting of a run, and option of the command line. The defaults are the CPU preset."""

    bf16: bool = setting(False, "autocast; weights and optimizer stay fp32")
    float64: bool = setting(
        False, "weights, optimizer and all products in float64, from the weights that fp32 begins with"
    )
    # optimizer
    steps: int = setting(560, "updates of the weights", "at least 1")
    batch: int = setting(8, "sequences of context bytes a step", "at least 1")
    lr: float = setting(3e-3, "learning rate after the warmup", "a finite number above 0")
    warmup: int = setting(50, "steps in which the learning rate rises", "at least 1")
    final_lr: float = setting(
        0.05, "the learning rate at the end of the cosine, as a share of lr", "a number in [0, 1]"
    )
    weight_decay: float = setting(0.1, "AdamW's, of matrices", "a finite number of at least 0")
    beta2: float = setting(0.95, "AdamW's memory of squared gradients", "a number in [0, 1)")
    clip: float = setting(1.0, "largest norm of the gradient; inf clips nothing", "a number above 0")
    seed: int = setting(0, "of weights, batches, dropout and the sample", "an int in [0, 4294967296)")
    accumulate: int = setting(1, "parts of the batch whose gradients are added up, one after the other", "at least 1")
    # several ranks
    parallel: str = setting("none", "how ranks share the work, see docs/distributed.md", names=PARALLEL)
    group_size: int = setting(
        2,
        "ranks that share the weights (hsdp), or the experts (ep+fsdp); other groups have copies, or shards",
        "at least 1",
    )
    reshard: bool = setting(
        True, "of fsdp: a block's gathered weights are freed after its forward; else they stay until its backward"
    )
    dispatcher: str = setting(
        "auto",
        "how tokens reach the experts of ep: symmetric (NVLink, bf16, one host), all_to_all, or auto: the first where it fits",
        names=["auto", "symmetric", "all_to_all"],
    )
    row_capacity: float = setting(
        0.0,
        "rows that a rank's experts compute, over the mean; more ends the run; 0: room for all",
        "a finite number of at least 0",
    )
    aux_over: str = setting(
        "rank", "whose loads are in the load-balancing loss: a rank's, or all", names=["rank", "global"]
    )
    # data, and how often to look
    data: str = setting("", "a file or a folder of text; without it, the standard library of this Python")
    val_every: int = setting(80, "steps between validations", "at least 1")
    val_bytes: int = setting(1 << 15, "of held-out text that is validated on, spread over all of it", "at least 1")
    log_every: int = setting(10, "steps between lines of numbers", "at least 1")
    checkpoint_every: int = setting(280, "steps between checkpoints", "at least 1")

    def rules(self) -> list[tuple[bool, str]]:
        of_tile, ep = self.batch // self.attention_tiles, "ep" in self.parallel.split("+")
        tile = "batch" if self.attention_tiles == 1 else "batch / attention_tiles"
        return [
            *super().rules(),
            (
                self.float64 and (self.bf16 or self.backend in arch.ARCHES or self.precision != "bf16"),
                f"float64: expected none with bf16, precision fp8 or backend {' or '.join(arch.ARCHES)}",
            ),
            (
                self.batch % self.attention_tiles > 0,
                f"attention_tiles: expected a divisor of batch={self.batch}, got {self.attention_tiles}",
            ),
            (
                of_tile % self.accumulate > 0,
                f"accumulate: expected a divisor of {tile}={of_tile}, got {self.accumulate}",
            ),
            (
                self.row_capacity > 0 and (not ep or self.dispatcher == "all_to_all"),
                "row_capacity: expected 0 unless tokens travel by --dispatcher symmetric, "
                f"got {self.row_capacity} with parallel={self.parallel!r}",
            ),
            (
                ep and self.formulation != "moe",
                f"parallel: expected none, fsdp or hsdp with formulation {self.formulation}, got {self.parallel!r}",
            ),
        ]


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


# ---- the command line --------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each setting, None where it isn't given. Its help says what it may be, and its defaults."""
    for field in dataclasses.fields(Config):
        kind = type(field.default)
        values = {name: getattr(preset, field.name) for name, preset in PRESETS.items()}
        shown = {name: ("off", "on")[value] if kind is bool else str(value) for name, value in values.items()}
        one, each = shown["cpu"], ", ".join(f"{value} ({name})" for name, value in shown.items())
        default = f"default {one if len({*shown.values()}) == 1 else each}" if one else ""
        notes = "; ".join(filter(None, [field.metadata["within"], ", ".join(field.metadata["names"]), default]))
        text = field.metadata["text"] + (f" [{notes}]" if notes else "")
        letter = {int: "N", float: "X", str: "NAME"}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": letter[kind]}
        parser.add_argument("--" + field.name.replace("_", "-"), default=None, help=text.replace("%", "%%"), **how)


def device_named(name: str | None) -> torch.device:
    """ValueError for a device that is not here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *["cuda"][:count], *(f"cuda:{index}" for index in range(count))]
    if name is not None and name not in here:
        raise ValueError(f"device: expected one of {', '.join(here)} on this machine, got {name!r}")
    return torch.device(name or ("cuda" if count else "cpu"))
