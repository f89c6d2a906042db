"""Each product of the layer alone: against torch's grouped_mm, gathered against contiguous, and in its layer form
against its floor.

    python scripts/bench_products.py                     # results/h200/products.json
    python scripts/bench_products.py --configs 1,9 --products up_forward,combine
    python scripts/bench_products.py --tune              # every tile configuration of every product -> results/h200/tune.json

Columns: torch: grouped_mm on rows already gathered. plain: ours on the same rows with nothing after the product but a
store. gathered: the same, rows fetched by index. layer: as the layer runs it (gather, activation and dS included).
GPU time by graph replay, all columns of a product in turn (A B A B), medians. Uniform routing, random data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_common import (
    BF16,
    F32,
    RESULTS,
    SHAPES,
    LayerShape,
    floor_ms,
    format_table,
    geometric_mean,
    number,
    provenance,
    route,
    write_json,
)  # fmt: skip
from bench_layer import parse_shapes
from timing import gpu_ms

from blazeproto import gemm

Call = Callable[[], object]
DEFAULT_SHAPES = "1,5,7,9,14,21"  # of the layer benchmark's 23


class Arrays:
    """Inputs and outputs of all products for one shape, and the routing that joins them."""

    def __init__(self, shape: LayerShape) -> None:
        self.shape = shape
        T, d, n, E, R = shape.T, shape.d, shape.n, shape.E, shape.rows
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0.0, scale, generator=generator)

        self.up_proj, self.down_proj = normal(E, 2 * n, d, scale=d**-0.5), normal(E, d, n, scale=n**-0.5)
        self.x, self.d_out = normal(T, d), normal(T, d)
        self.h, self.act, self.y = normal(R, 2 * n), normal(R, n), normal(R, d)
        self.scores = torch.rand(T, shape.K, device=device, generator=generator)

        experts = route(shape, "uniform", device, generator).flatten()
        order = torch.sort(experts, stable=True).indices
        counts = torch.bincount(experts, minlength=E)
        self.ends = counts.cumsum(0).to(torch.int32)  # torch's offsets leave out the leading zero
        offsets = F.pad(self.ends, (1, 0))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(R, device=device)
        self.tokens = order // shape.K
        self.rows = gemm.Rows(order.to(torch.int32), offsets, inverse.to(torch.int32), shape.K)

        # outputs, so that nothing is allocated while timing
        self.h_out, self.act_out, self.y_out = (
            torch.empty_like(self.h),
            torch.empty_like(self.act),
            torch.empty_like(self.y),
        )
        self.up_grad, self.down_grad = torch.empty_like(self.up_proj), torch.empty_like(self.down_proj)
        self.d_scores = torch.empty(R, dtype=torch.float32, device=device)
        self.out = torch.empty_like(self.x)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.tokens]


@dataclass(frozen=True)
class Product:
    """One product: what it costs at the least, and its versions as functions of (arrays, tile configuration).

    `plain` and `torch` get their gathered operand ready; None where the product has no such version.
    """

    operations: Callable[[LayerShape], float]
    least_bytes: Callable[[LayerShape], float]  # of the layer's version
    layer: Callable[[Arrays, Any], Call]
    plain: Callable[[Arrays, Any], Call] | None = None
    gathered: Callable[[Arrays, Any], Call] | None = None
    torch: Callable[[Arrays], Call] | None = None


def _up_forward_plain(a: Arrays, config: Any) -> Call:
    x = a.gathered(a.x)
    return lambda: gemm.grouped_mm(x, a.up_proj, a.rows, out=a.h_out, config=config)


def _up_forward_torch(a: Arrays) -> Call:
    x = a.gathered(a.x)
    return lambda: F.grouped_mm(x, a.up_proj.transpose(1, 2), offs=a.ends)


def _down_backward_plain(a: Arrays, config: Any) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: gemm.grouped_mm(d_out, a.down_proj, a.rows, transposed=True, out=a.act_out, config=config)


def _down_backward_torch(a: Arrays) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: F.grouped_mm(d_out, a.down_proj, offs=a.ends)


def _down_backward_layer(a: Arrays, config: Any) -> Call:
    partials = gemm.score_partials(a.shape.n, config)
    workspace = torch.empty(partials, a.shape.rows, dtype=torch.float32, device=a.x.device)
    outputs: dict[str, Any] = {"dh": a.h_out, "a_scaled": a.act_out, "d_scores": a.d_scores, "workspace": workspace}
    return lambda: gemm.down_backward_act(a.d_out, a.down_proj, a.h, a.scores, a.rows, config=config, **outputs)


def _weight_options(product: str, dw: torch.Tensor, rows: gemm.Rows, config: Any) -> dict[str, Any]:
    elements = gemm.weight_workspace(product, dw, rows, config)
    return {"dw": dw, "config": config, "workspace": torch.empty(elements, dtype=torch.float32, device=dw.device)}


def _down_weight_plain(a: Arrays, config: Any) -> Call:
    d_out = a.gathered(a.d_out)
    options = _weight_options("down_backward_weight", a.down_grad, a.rows, config)
    return lambda: gemm.down_backward_weight(d_out, a.act, a.rows, gather=False, **options)


def _down_weight_torch(a: Arrays) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: F.grouped_mm(d_out.t(), a.act, offs=a.ends)


def _up_weight_plain(a: Arrays, config: Any) -> Call:
    x = a.gathered(a.x)
    options = _weight_options("up_backward_weight", a.up_grad, a.rows, config)
    return lambda: gemm.up_backward_weight(a.h, x, a.rows, gather=False, **options)


def _up_weight_torch(a: Arrays) -> Call:
    x = a.gathered(a.x)
    return lambda: F.grouped_mm(a.h.t(), x, offs=a.ends)


def _down_forward(a: Arrays, config: Any) -> Call:
    return lambda: gemm.down_forward(a.act, a.down_proj, a.rows, y=a.y_out, config=config)


def _up_backward(a: Arrays, config: Any) -> Call:
    return lambda: gemm.up_backward_act(a.h, a.up_proj, a.rows, dx_rows=a.y_out, config=config)


def _down_weight(a: Arrays, config: Any) -> Call:
    options = _weight_options("down_backward_weight", a.down_grad, a.rows, config)
    return lambda: gemm.down_backward_weight(a.d_out, a.act, a.rows, **options)


def _up_weight(a: Arrays, config: Any) -> Call:
    options = _weight_options("up_backward_weight", a.up_grad, a.rows, config)
    return lambda: gemm.up_backward_weight(a.h, a.x, a.rows, **options)


PRODUCTS: dict[str, Product] = {
    "up_forward": Product(
        operations=lambda s: 4.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (s.T * s.d + 2 * s.E * s.n * s.d + 3 * s.rows * s.n),
        layer=lambda a, config: (
            lambda: gemm.up_forward(a.x, a.up_proj, a.rows, h=a.h_out, act=a.act_out, config=config)
        ),
        plain=_up_forward_plain,
        gathered=lambda a, config: (
            lambda: gemm.grouped_mm(a.x, a.up_proj, a.rows, gather=True, out=a.h_out, config=config)
        ),
        torch=_up_forward_torch,
    ),
    "down_forward": Product(
        operations=lambda s: 2.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (s.rows * s.n + s.E * s.n * s.d + s.rows * s.d),
        layer=_down_forward,
        plain=_down_forward,
        torch=lambda a: lambda: F.grouped_mm(a.act, a.down_proj.transpose(1, 2), offs=a.ends),
    ),
    "down_backward_act": Product(
        operations=lambda s: 2.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (s.T * s.d + s.E * s.n * s.d + 5 * s.rows * s.n),
        layer=_down_backward_layer,
        plain=_down_backward_plain,
        gathered=lambda a, config: (
            lambda: gemm.grouped_mm(
                a.d_out, a.down_proj, a.rows, gather=True, transposed=True, out=a.act_out, config=config
            )
        ),
        torch=_down_backward_torch,
    ),
    "down_backward_weight": Product(
        operations=lambda s: 2.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (s.rows * s.n + s.T * s.d + s.E * s.n * s.d),
        layer=_down_weight,
        plain=_down_weight_plain,
        gathered=_down_weight,
        torch=_down_weight_torch,
    ),
    "up_backward_act": Product(
        operations=lambda s: 4.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (2 * s.rows * s.n + 2 * s.E * s.n * s.d + s.rows * s.d),
        layer=_up_backward,
        plain=_up_backward,
        torch=lambda a: lambda: F.grouped_mm(a.h, a.up_proj, offs=a.ends),
    ),
    "up_backward_weight": Product(
        operations=lambda s: 4.0 * s.rows * s.n * s.d,
        least_bytes=lambda s: BF16 * (2 * s.rows * s.n + s.T * s.d + 2 * s.E * s.n * s.d),
        layer=_up_weight,
        plain=_up_weight_plain,
        gathered=_up_weight,
        torch=_up_weight_torch,
    ),
    "combine": Product(
        operations=lambda s: 0.0,
        least_bytes=lambda s: (
            BF16 * (s.rows * s.d + s.T * s.d) + F32 * 2 * s.rows
        ),  # Y, O; scores and the rows' indices
        layer=lambda a, config: lambda: gemm.combine(a.y, a.rows, scores=a.scores.flatten(), out=a.out),
    ),
}


def measure(name: str, arrays: Arrays, rounds: int) -> dict[str, Any]:
    """One row: every version of a product on one shape, ms of GPU time."""
    product, shape, config = PRODUCTS[name], arrays.shape, None  # the tiles the package picks
    calls: dict[str, Call] = {"layer": product.layer(arrays, config)}
    if product.plain is not None and product.torch is not None:
        calls["plain"] = product.plain(arrays, config)
        calls["torch"] = product.torch(arrays)
    if product.gathered is not None:
        calls["gathered"] = product.gathered(arrays, config)
    gpu = gpu_ms(calls, ("plain", "torch", "gathered"), rounds)
    floor = floor_ms(product.operations(shape), product.least_bytes(shape))
    row: dict[str, Any] = {"product": name, "cfg": shape.dict(), "floor_ms": round(floor, 4)}
    row |= {f"{version}_ms": round(ms, 4) for version, ms in gpu.ms.items()}
    row["gpu_method"] = gpu.method["layer"]
    row["layer_to_floor"] = round(gpu.ms["layer"] / floor, 3)
    if "plain" in gpu.ms:
        row["plain_to_torch_speed"] = round(gpu.ms["torch"] / gpu.ms["plain"], 3)
    if "gathered" in gpu.ms:
        row["gathered_to_plain_speed"] = round(gpu.ms["plain"] / gpu.ms["gathered"], 3)
    if gpu.refused:
        row["not_captured"] = gpu.refused
    return row


def tune(name: str, arrays: Arrays, rounds: int) -> dict[str, Any]:
    """The layer's version of a product with every tile configuration, ms by configuration."""
    configs = {describe(config): config for config in gemm.candidates(name)}
    calls, failed = {}, {}
    for label, config in configs.items():
        try:
            calls[label] = PRODUCTS[name].layer(arrays, config)
            calls[label]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a configuration that doesn't fit is no reason to lose the others
            calls.pop(label, None)
            failed[label] = f"{type(error).__name__}: {str(error)[:120]}"
    ms = gpu_ms(calls, list(calls), rounds).ms
    floor = floor_ms(PRODUCTS[name].operations(arrays.shape), PRODUCTS[name].least_bytes(arrays.shape))
    row: dict[str, Any] = {"product": name, "cfg": arrays.shape.dict(), "floor_ms": round(floor, 4)}
    row["ms"] = {label: round(value, 4) for label, value in sorted(ms.items(), key=lambda item: item[1])}
    if failed:
        row["failed"] = failed
    return row


def describe(config: Any) -> str:
    """128x256 coop c2 s4: tile, consumers, cluster, stages."""
    kind = "ping" if config.pingpong else "coop"
    return f"{config.tile_m}x{config.tile_n} {kind} c{config.cluster} s{config.stages}"


def print_products(rows: list[dict[str, Any]]) -> None:
    fields = ("floor_ms", "torch_ms", "plain_ms", "gathered_ms", "layer_ms")
    ratios = ("plain_to_torch_speed", "gathered_to_plain_speed", "layer_to_floor")
    lines = [
        [row["product"], *(str(row["cfg"][key]) for key in "TdnEK"), *(number(row.get(f), 4) for f in fields),
         *(number(row.get(r)) for r in ratios), row["gpu_method"]]
        for row in rows
    ]  # fmt: skip
    header = [
        "product",
        *"TdnEK",
        "floor",
        "torch",
        "plain",
        "gathered",
        "layer",
        "plain/torch",
        "gathered/plain",
        "x floor",
        "by",
    ]
    print(format_table(header, lines))
    print("ms; plain/torch and gathered/plain: speeds (1 is equal); x floor: the layer's version over its floor")
    for field in ratios:
        values = [row[field] for row in rows if field in row]
        if values:
            print(
                f"{field}: geometric mean {geometric_mean(values):.3f}, least {min(values):.3f}, most {max(values):.3f}"
            )


def print_tuning(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        shape = LayerShape(**row["cfg"])
        times = ", ".join(f"{label} {ms:.4f}" for label, ms in row["ms"].items())
        print(f"{row['product']:21s} {shape.name:30s} floor {row['floor_ms']:.4f} | {times} {row.get('failed', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--configs", type=parse_shapes, default=parse_shapes(DEFAULT_SHAPES), help="as for bench_layer.py"
    )
    parser.add_argument("--products", default=",".join(PRODUCTS), help="of " + ", ".join(PRODUCTS))
    parser.add_argument("--tune", action="store_true", help="time all tile configurations instead")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two shapes, 7 rounds; the results file is left alone")
    parser.add_argument(
        "--time-budget", type=float, default=float("inf"), metavar="SECONDS", help="skip what would start later"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.quick:
        options.configs, options.rounds = [SHAPES[0], SHAPES[8]], 7
    name = "tune" if options.tune else "products-quick" if options.quick else "products"
    out = options.out or RESULTS / f"{name}.json"
    record = provenance() | {"rows": []}
    names = [n for n in options.products.split(",") if not (options.tune and n == "combine")]
    begin, skipped = time.monotonic(), []
    for shape in options.configs:
        arrays = Arrays(shape)
        for product in names:
            if time.monotonic() - begin > options.time_budget:
                skipped.append(f"{product} {shape.name}")
                continue
            record["rows"].append((tune if options.tune else measure)(product, arrays, options.rounds))
            write_json(out, record)
        del arrays
        torch.cuda.empty_cache()
    (print_tuning if options.tune else print_products)(record["rows"])
    print(
        f"{time.monotonic() - begin:.0f} s; {'skipped for time: ' + ', '.join(skipped) if skipped else 'nothing skipped'}"
    )


if __name__ == "__main__":
    main()
