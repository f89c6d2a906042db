"""scripts/lm/settings.py: the same checks for the command line and for Python, and a help that says them."""

import argparse
import dataclasses
import math
import re
from typing import Any

import pytest

from scripts.lm.settings import PRESETS, Config, add_options, check_acts

REFUSED: list[tuple[str, Any, str]] = [
    ("steps", 0, "steps: expected at least 1, got 0"),
    ("clip", -1.0, "clip: expected a number above 0, got -1.0"),
    ("clip", math.nan, "clip: expected a number above 0, got nan"),
    ("lr", 0.0, "lr: expected a finite number above 0, got 0.0"),
    ("lr", math.inf, "lr: expected a finite number above 0, got inf"),
    ("final_lr", -3.0, "final_lr: expected a number in [0, 1], got -3.0"),
    ("weight_decay", -1.0, "weight_decay: expected a finite number of at least 0, got -1.0"),
    ("beta2", 1.0, "beta2: expected a number in [0, 1), got 1.0"),
    ("dropout", 1.0, "dropout: expected a number in [0, 1), got 1.0"),
    ("seed", 2**32, "seed: expected an int in [0, 4294967296), got 4294967296"),
    ("top_k", 9, "top_k: expected at most num_experts=8, got 9"),
    ("heads", 3, "d_model: expected a multiple of 2 * heads = 6, got 128"),
    ("accumulate", 3, "accumulate: expected a divisor of batch=8, got 3"),
    ("group_size", 0, "group_size: expected at least 1, got 0"),
    ("parallel", "ddp", "parallel: expected one of ('none', 'fsdp', 'hsdp', 'ep', 'ep+fsdp'), got 'ddp'"),
    ("attention_tiles", 0, "attention_tiles: expected at least 1, got 0"),
    (
        "rounding_tile",
        64,
        "rounding_tile: expected none with router top_k, as token_rounding, token_rounding_sr_f, "
        "token_rounding_nr_s, token_rounding_balance_f, token_rounding_up, token_rounding_down take it",
    ),
    ("attention_tiles", 3, "attention_tiles: expected a divisor of batch=8, got 3"),
]


@pytest.mark.parametrize(("name", "value"), [("steps", 2.0), ("steps", True), ("lr", "1"), ("bf16", 1), ("data", None)])
def test_a_setting_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected .*, got {value!r}"):
        Config(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: value}, f"^{re.escape(message)}$") for name, value, message in REFUSED),
        ({"formulation": "dense", "router": "hash"}, "router: expected none with formulation dense"),
        (
            {"formulation": "dense", "combine": "fused"},
            "combine: expected none with formulation dense, as moe takes it",
        ),
        (
            {"row_capacity": 1.25, "parallel": "fsdp"},
            "row_capacity: expected 0 unless tokens travel by --dispatcher symmetric, got 1.25 with parallel='fsdp'",
        ),
        (
            {"row_capacity": 1.25, "parallel": "ep", "dispatcher": "all_to_all"},
            "row_capacity: expected 0 unless tokens travel by --dispatcher symmetric, got 1.25 with parallel='ep'",
        ),
        ({"precision": "fp8", "d_model": 24}, "d_model: expected a multiple of 16 with precision fp8, got 24"),
        ({"precision": "fp8", "d_expert": 96}, "d_expert: expected a multiple of 128 with precision fp8, got 96"),
        ({"precision": "fp8", "save": "paper"}, "save: expected minimal or recompute with precision fp8, got paper"),
        ({"precision": "fp8", "combine": "fused"}, "combine: expected gather with precision fp8, got fused"),
        (
            {"precision": "fp8", "formulation": "dmoe"},
            "precision: expected none with formulation dmoe, as moe takes it",
        ),
        (
            {"float64": True, "bf16": True},
            "float64: expected none with bf16, precision fp8 or backend hopper or ampere",
        ),
        *(
            ({"float64": True, "backend": name}, "float64: .* backend hopper or ampere")
            for name in ("hopper", "ampere")
        ),
    ],
)
def test_settings_outside_their_range_or_that_exclude_each_other_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"group_size": 4, "parallel": "fsdp"},
            "group_size: expected none with parallel fsdp, as hsdp, ep+fsdp take it",
        ),
        (
            {"reshard": True, "parallel": "ep"},
            "reshard: expected none with parallel ep, as fsdp, hsdp, ep+fsdp take it",
        ),
        (
            {"dispatcher": "auto", "parallel": "hsdp"},
            "dispatcher: expected none with parallel hsdp, as ep, ep+fsdp take it",
        ),
        ({"aux_over": "global"}, "aux_over: expected none with parallel none, as fsdp, hsdp, ep, ep+fsdp take it"),
        (
            {"aux_over": "global", "parallel": "ep", "router": "hash"},
            "aux_over: expected none with router hash, as top_k, ",
        ),
        (
            {"aux_over": "rank", "parallel": "fsdp", "formulation": "dense"},
            "aux_over: expected none with formulation dense",
        ),
        (
            {"combine": "gather", "formulation": "dense"},
            "combine: expected none with formulation dense, as moe takes it",
        ),
    ],
)
def test_what_does_nothing_in_a_run_is_refused_where_it_is_asked_for(given: dict[str, Any], message: str) -> None:
    """Its default too; it is no error in a preset, which serves runs of several modes."""
    with pytest.raises(ValueError) as error:
        check_acts(Config(**given), given)
    assert str(error.value).startswith(message)
    check_acts(Config(**given), {"parallel", "router", "formulation"})


def test_the_ends_of_ranges() -> None:
    Config(clip=math.inf, final_lr=0.0, beta2=0.0, dropout=0, seed=2**32 - 1, weight_decay=0)
    Config(final_lr=1)


def test_help_says_the_range_and_the_default_of_every_setting() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    helps = {action.dest: str(action.help).replace("%%", "%") for action in parser._actions}
    for field in dataclasses.fields(Config):
        text, within = helps[field.name], field.metadata["within"]
        assert text.startswith(field.metadata["text"])
        assert within in text and all(name in text for name in field.metadata["names"])
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert within, f"{field.name}: a number has a range"
            assert all(str(getattr(preset, field.name)) in text for preset in PRESETS.values())
