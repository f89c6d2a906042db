"""Predictions of `blazeproto.cost` beside measurements: a table, sentences and a plot of whole layers and products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blazeproto import cost
from scripts.bench.common import geometric_mean, table_of
from scripts.bench.markdown import NOT_MEASURED, Column, Record, caveat, figure, number, origin, plain_shape, table
from scripts.bench.module_tables import TINY, sizes_of

CLOSE = 0.1  # a prediction within 10 %


def predicted_and_measured(row: Record) -> tuple[float, float]:
    """ms: forward + backward of a row of module.json, or a product of products.json as the layer runs it."""
    sizes = sizes_of(row)
    if "product" in row:
        return cost.predicted_product_ms(row["product"], sizes), row["layer_ms"]
    return sum(cost.predicted_layer_ms(sizes)), row["ours_fwdbwd_ms"]


def ratios(rows: Sequence[Record]) -> list[float]:
    """Predicted over measured time."""
    return [predicted / measured for predicted, measured in map(predicted_and_measured, rows)]


def predicted_forward(row: Record) -> float:
    return cost.predicted_layer_ms(sizes_of(row))[0]


def predicted_table(record: Record) -> str:
    """Whole layers: predicted and measured ms on the GPU that was measured, and predicted ones on others."""

    def elsewhere(gpu: str) -> Callable[[Record], str]:
        return lambda row: number(sum(cost.predicted_layer_ms(sizes_of(row), gpu=gpu)))

    columns: list[Column] = [("T, d, n, E, K", plain_shape)]
    columns += [("forward: predicted", lambda row: number(predicted_forward(row))), ("measured", figure("ours_fwd_ms"))]
    columns += [("predicted / measured", lambda row: number(predicted_forward(row) / row["ours_fwd_ms"]))]
    columns += [("forward + backward: predicted", lambda row: number(predicted_and_measured(row)[0]))]
    columns += [("measured", figure("ours_fwdbwd_ms")), ("predicted / measured", lambda row: number(ratios([row])[0]))]
    sheets = [gpu for gpu, rates in cost.GPUS.items() if rates.source.startswith("NVIDIA's data sheet")]
    columns += [(f"by data sheet: {gpu.partition(',')[0]}", elsewhere(gpu)) for gpu in sheets]
    sources = "; ".join(cost.GPUS[gpu].source for gpu in sheets)
    return f"{table(record['rows'], columns)}\n\nms. {sources}. {origin(record['rows'], 'torch')}"


def predicted_claim(module: Record, products: Record) -> str:
    """How many predictions are within 10 % of what was measured, the tiny layer apart; sentences."""
    if not module["rows"] or not products["rows"]:
        return NOT_MEASURED
    tiny = [row for row in module["rows"] if table_of(sizes_of(row)) == TINY]
    others = [row for row in module["rows"] if row not in tiny]
    said = [
        f"{sum(abs(ratio - 1) <= CLOSE for ratio in found)} of {len(found)} {what} are predicted within 10 % "
        f"({number(min(found))} to {number(max(found))} of the time measured, geometric mean {number(geometric_mean(found))})"
        for what, found in (
            ("layers, forward + backward,", ratios(others)),
            ("layers, forward alone,", [predicted_forward(row) / row["ours_fwd_ms"] for row in others]),
            ("sizes of one tiny layer, forward + backward,", ratios(tiny)),
            ("products", ratios(products["rows"])),
        )
        if found
    ]
    note = caveat([*module["rows"], *products["rows"]])
    return ". ".join(said) + (f" ({note})." if note else ".")


def plot_predicted(axis: Any, rows: Sequence[Record], name: Callable[[Record], str], title: str) -> None:
    """Measured over predicted time, a color for each name, between lines of 10 % more and less."""
    for each in dict.fromkeys(map(name, rows)):
        axis.plot(
            *zip(*(predicted_and_measured(row) for row in rows if name(row) == each), strict=True),
            "o",
            label=each,
            markersize=4,
        )
    ends = [end for pair in map(predicted_and_measured, rows) for end in pair]
    line = (min(ends) / 1.3, max(ends) * 1.3)
    axis.plot(line, line, "k-", linewidth=0.8)
    for factor in (1 - CLOSE, 1 + CLOSE):
        axis.plot(line, [factor * end for end in line], "k:", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms", title=title)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def name_of_table(row: Record) -> str:
    """The table that a layer's sizes come from."""
    return table_of(sizes_of(row)) or "others"
