"""The sentences of docs/review.md, of rows that are made up."""

from typing import Any

import pytest

from blazeproto import cost
from blazeproto.gemm import Sizes
from scripts.bench.markdown import NOT_MEASURED
from scripts.bench.review_tables import SENTENCES
from scripts.bench.training_tables import TRAINING_CLAIMS

OF = {
    "of": {"gpu": "a GPU", "measured": "a day", "versions": "torch 2.11.0", "kernels": []}
}  # no kernels: none are earlier
EARLIER = {"of": {"gpu": "a GPU", "measured": "a day", "versions": "torch 2.11.0"}}
CFG = {"T": 1024, "d": 512, "n": 2048, "E": 4, "K": 2}


def layer(activation: str, halves: int, more_MiB: float, **fields: Any) -> dict[str, Any]:
    """MegaBlocks keeps the activation's intermediates and ``more_MiB`` beyond ours."""
    beyond = halves * 2 * 2048 * 2048 / 2**20 + more_MiB
    kept = {"moe_saved_MiB": beyond, "megablocks_saved_MiB": 2 * beyond}
    times = {"moe_fwdbwd_sum_ms": 1.0, "megablocks_fwdbwd_sum_ms": 3.0}
    return {"part": "layers", "cfg": CFG, "activation": activation} | kept | times | OF | fields


GELU, SWIGLU = layer("gelu", 1, 8.0), layer("swiglu", 2, 4.0)
ALONE = {key: value for key, value in GELU.items() if not key.startswith("megablocks")}
SKEWED = {"zipf": {"fwdbwd_to_uniform": 1.25}, "half_on_one": {"fwdbwd_to_uniform": 0.5}} | OF
SORTED = {"sort_ms": 3.0, "tiled_ms": 0.5, "dense_ms": 2.0, "tiled_workspace_share": 0.02} | OF


@pytest.mark.parametrize(
    ("name", "record", "parts"),
    [
        (
            "memory_split",
            {"rows": [GELU, SWIGLU]},
            ["(by formula) make up 50 to 50 % with gelu, 80 to 80 % with swiglu"],
        ),
        ("memory_split", {"rows": [GELU | EARLIER]}, ["(of earlier kernels)"]),
        (
            "megablocks_claim",
            {"rows": [GELU]},
            [
                "3.00 times our time (3.00 to 3.00) and 2.00 times the bytes for backward (2.00 to 2.00), geometric means of 1"
            ],
        ),
        ("megablocks_claim", {"rows": [ALONE]}, [NOT_MEASURED]),
        ("skew_claim", {"skew": [SKEWED]}, ["0.50 to 1.25 times what"]),
        (
            "dispatch_claim",
            {"rows": [SORTED]},
            ["takes 6.0 to 6.0 times", "1.5 to 1.5 times", "most 2.0 % of that map"],
        ),
    ],
)
def test_sentences_are_made_of_rows(name: str, record: dict[str, Any], parts: list[str]) -> None:
    said = SENTENCES[name](record)
    assert all(part in said for part in parts)


def test_recomputing_is_what_cost_predicts() -> None:
    sizes = Sizes(**CFG)
    share = 100 * cost.saved_bytes(sizes, "recompute") / cost.saved_bytes(sizes)
    longer = 100 * (
        cost.predicted_product_ms("up_forward", sizes, "B200") / sum(cost.predicted_layer_ms(sizes, gpu="B200"))
    )
    said = SENTENCES["recompute_claim"]({"rows": [{"cfg": CFG}]})
    assert f'"recompute" keeps {share:.0f} to {share:.0f} %' in said
    assert said.endswith(f"{longer:.0f} to {longer:.0f} % on a B200")


def test_what_a_choice_costs_is_a_mean_and_how_far_losses_part_a_maximum() -> None:
    of = {"gpu": "NVIDIA H200, driver 1", "measured": "a day", "versions": "torch 2.11.0", "kernels": []}
    losses = {"ours": (1.0, 1.0), "dropping_1.0": (1.1, 1.3), "torch_fp32": (1.0, 1.25)}
    rows = [
        {"run": run, "length": "whole", "seed": seed, "validation": [[500, loss]], "cfg": CFG, "of": of}
        for run, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    claims = {
        name: claim({"rows": rows})
        for name, (_, claim) in TRAINING_CLAIMS.items()
        if name.startswith(("cap", "training"))
    }
    assert "by 0.2000 nats a byte (dropping, capacity factor 1.0)" in claims["capacity_claim"]
    assert "at most 20.00 % (ours, bf16)" in claims["training_claim"]
