"""The sentences of docs/review.md, of rows that are made up; and what the page says of points without a figure."""

from __future__ import annotations

import re
from pathlib import Path
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
PAGE = Path(__file__).resolve().parents[2] / "docs" / "review.md"


def layer(activation: str, halves: int, more_MiB: float, **fields: Any) -> dict[str, Any]:
    """MegaBlocks keeps the activation's intermediates and ``more_MiB`` beyond ours."""
    beyond = halves * 2 * 2048 * 2048 / 2**20 + more_MiB
    kept = {"moe_saved_MiB": beyond, "megablocks_saved_MiB": 2 * beyond}
    times = {"moe_fwdbwd_sum_ms": 1.0, "megablocks_fwdbwd_sum_ms": 3.0}
    return {"part": "layers", "cfg": CFG, "activation": activation} | kept | times | OF | fields


def test_what_the_intermediates_are_of_the_bytes() -> None:
    said = SENTENCES["memory_split"]({"rows": [layer("gelu", 1, 8.0), layer("swiglu", 2, 4.0)]})
    assert "50 to 50 % with gelu, 80 to 80 % with swiglu" in said and "earlier" not in said
    assert SENTENCES["memory_split"]({"rows": [layer("gelu", 1, 8.0, **EARLIER)]}).endswith("(of earlier kernels)")


def test_megablocks_over_ours() -> None:
    assert (
        "3.00 times the time (3.00 to 3.00) and 2.00 times the bytes for backward (2.00 to 2.00), geometric means of 1"
        in (SENTENCES["megablocks_claim"]({"rows": [layer("gelu", 1, 8.0)]}))
    )
    without = {key: value for key, value in layer("gelu", 1, 8.0).items() if not key.startswith("megablocks")}
    assert SENTENCES["megablocks_claim"]({"rows": [without]}) == NOT_MEASURED


def test_skew_and_dispatch() -> None:
    skewed = {"zipf": {"fwdbwd_to_uniform": 1.25}, "half_on_one": {"fwdbwd_to_uniform": 0.5}} | OF
    assert SENTENCES["skew_claim"]({"skew": [skewed]}).startswith("0.50 to 1.25 times")
    row = {"sort_ms": 3.0, "tiled_ms": 0.5, "dense_ms": 2.0, "tiled_workspace_share": 0.02} | OF
    said = SENTENCES["dispatch_claim"]({"rows": [row]})
    assert (
        "takes 6.0 to 6.0 times" in said and "1.5 to 1.5 times" in said and said.endswith("at most 2.0 % of that map")
    )


def test_recomputing_is_what_cost_predicts() -> None:
    sizes = Sizes(**CFG)
    share = 100 * cost.saved_bytes(sizes, "recompute") / cost.saved_bytes(sizes)
    longer = 100 * (
        cost.predicted_product_ms("up_forward", sizes, "B200") / sum(cost.predicted_layer_ms(sizes, gpu="B200"))
    )
    said = SENTENCES["recompute_claim"]({"rows": [{"cfg": CFG}]})
    assert f'"recompute" keeps {share:.0f} to {share:.0f} %' in said
    assert said.endswith(f"{longer:.0f} to {longer:.0f} % on a B200")


@pytest.mark.parametrize("name", SENTENCES)
def test_the_page_has_every_sentence(name: str) -> None:
    assert f"<!-- results:{name} -->" in PAGE.read_text()


def test_what_a_choice_costs_is_a_mean_and_how_far_losses_part_a_maximum() -> None:
    of = {"gpu": "NVIDIA H200, driver 1", "measured": "a day", "versions": "torch 2.11.0", "kernels": []}
    losses = {"ours": (1.0, 1.0), "dropping_1.0": (1.1, 1.3), "torch_fp32": (1.0, 1.25)}
    rows = [
        {"run": run, "length": "whole", "seed": seed, "validation": [[500, loss]], "of": of}
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


def test_what_is_not_measured_says_why() -> None:
    written = re.sub(r"<!-- results:.*?<!-- /results:\S+ -->", "", PAGE.read_text(), flags=re.DOTALL)
    text = " ".join(written.split())
    missing = text.split("not measured")[1:]
    assert len(missing) > 5
    assert all("because" in each.split(".")[0] for each in missing), [each[:80] for each in missing]
