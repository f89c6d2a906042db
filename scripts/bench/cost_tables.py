"""Predictions of `blazeproto.cost` beside measurements: a table, sentences and a plot of whole layers and products."""

from functools import partial
from typing import Any

from blazeproto import cost
from scripts.bench.common import geometric_mean, table_of
from scripts.bench.markdown import (
    SHAPE,
    Record,
    Rows,
    Sentence,
    Table,
    caveat,
    least_to_most,
    number,
    plainly,
    split,
)
from scripts.bench.module_tables import TINY, sizes_of

CLOSE = 0.1  # a prediction within 10 %
SHEETS = [gpu for gpu, rates in cost.GPUS.items() if rates.source.startswith("NVIDIA's data sheet")]


def predicted_and_measured(row: Record) -> tuple[float, float]:
    """ms: forward + backward of a row of module.json, or a product of products.json as the layer runs it."""
    sizes = sizes_of(row)
    if "product" in row:
        return cost.predicted_product_ms(row["product"], sizes), row["layer_ms"]
    return sum(cost.predicted_layer_ms(sizes)), row["ours_fwdbwd_ms"]


def ratio(row: Record) -> float:
    """Predicted over measured time."""
    predicted, measured = predicted_and_measured(row)
    return predicted / measured


def predicted_forward(row: Record) -> float:
    return cost.predicted_layer_ms(sizes_of(row))[0]


def forward_ratio(row: Record) -> float:
    return predicted_forward(row) / float(row["ours_fwd_ms"])


def predicted_elsewhere(gpu: str, row: Record) -> float:
    return sum(cost.predicted_layer_ms(sizes_of(row), gpu=gpu))


TABLES = {
    "predicted": Table(
        "module",
        [
            SHAPE,
            ("forward: predicted", predicted_forward),
            ("measured", "ours_fwd_ms"),
            ("predicted / measured", forward_ratio),
            ("forward + backward: predicted", lambda row: predicted_and_measured(row)[0]),
            ("measured", "ours_fwdbwd_ms"),
            ("predicted / measured", ratio),
            *((f"by data sheet: {gpu.partition(',')[0]}", partial(predicted_elsewhere, gpu)) for gpu in SHEETS),
        ],
        f"ms. {'; '.join(cost.GPUS[gpu].source for gpu in SHEETS)}.",
    )
}


def name_of_product(row: Record) -> str:
    return str(row["product"])


def name_of_table(row: Record) -> str:
    """The table that a layer's sizes come from."""
    return table_of(sizes_of(row)) or "others"


def predicted_claim(rows: Rows) -> str:
    """How many predictions are within 10 % of what was measured, the tiny layer apart; sentences."""
    products, layers = split(rows, lambda row: "product" in row)
    tiny, others = split(layers, lambda row: name_of_table(row) == TINY)
    kinds = {
        "layers, forward + backward,": [ratio(row) for row in others],
        "layers, forward alone,": [forward_ratio(row) for row in others],
        "sizes of one tiny layer, forward + backward,": [ratio(row) for row in tiny],
        "products": [ratio(row) for row in products],
    }
    said = [
        f"{sum(abs(each - 1) <= CLOSE for each in found)} of {len(found)} {what} are predicted within 10 % "
        f"({least_to_most(found, 3)} of the time measured, geometric mean {number(geometric_mean(found))})"
        for what, found in kinds.items()
        if found
    ]
    note = caveat(rows)
    return ". ".join(said) + (f" ({note})." if note else ".")


def of_both(module: Record, products: Record) -> Rows:
    return [*module["rows"], *products["rows"]] if module["rows"] and products["rows"] else []


SENTENCES = {"predicted_claim": Sentence("module products", predicted_claim, of_both, note=plainly)}


def plot_predicted(figure: Any, record: Record) -> None:
    """Measured over predicted times of whole layers or of products, a color for each name, between lines of 10 %."""
    axis, rows = figure.subplots(), record["rows"]
    products = "product" in rows[0]
    name = name_of_product if products else name_of_table
    for each in dict.fromkeys(map(name, rows)):
        points = [predicted_and_measured(row) for row in rows if name(row) == each]
        axis.plot(*zip(*points, strict=True), "o", label=each, markersize=4)
    ends = [end for row in rows for end in predicted_and_measured(row)]
    line = (min(ends) / 1.3, max(ends) * 1.3)
    for factor, style in ((1.0, "k-"), (1 - CLOSE, "k:"), (1 + CLOSE, "k:")):
        axis.plot(line, [factor * end for end in line], style, linewidth=0.8)
    title = f"{'products' if products else 'whole layers, forward + backward'}; lines: 10 %"
    axis.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms", title=title)
    axis.legend(fontsize=8)
