"""Each product of the layer alone: against torch's grouped_mm, gathered against contiguous, and in its layer form
against its floor.

    python -m scripts.bench.products                     # results/h200/products.json
    python -m scripts.bench.products --configs 1,9 --products up_forward,combine
    python -m scripts.bench.products --tune              # every tile configuration of every product -> results/h200/tune.json

Columns: torch: grouped_mm on rows already gathered. plain: ours on the same rows with nothing after the product but a
store. gathered: the same, rows fetched by index. layer: as the layer runs it (gather, activation and dS included).
GPU time by graph replay, all columns of a product in turn (A B A B), medians. Uniform routing, random data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from blazeproto import cost, gemm
from blazeproto.dispatch import Dispatch, build_dispatch
from scripts.bench.common import (
    RESULTS,
    SHAPES,
    LayerShape,
    finished,
    format_table,
    geometric_mean,
    number,
    parse_shapes,
    part_file,
    provenance,
    route,
    write_json,
)  # fmt: skip
from scripts.bench.timing import gpu_ms
from scripts.command import argument_parser, need_hopper, positive

Call = Callable[[], object]
DEFAULT_SHAPES = "1,5,7,9,14,21"  # of the layer benchmark's 23


class Arrays:
    """Inputs and outputs of all products for one shape, and the routing that joins them."""

    def __init__(self, shape: LayerShape) -> None:
        need_hopper()
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

        self.dispatch = build_dispatch(route(shape, "uniform", device, generator), E)
        self.ends = self.dispatch.expert_token_offsets[1:].clone()  # torch's offsets leave out the leading zero
        self.tokens = self.dispatch.expert_token_indices

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
class Versions:
    """A product's versions as functions of (arrays, tile configuration).

    `plain` and `torch` get their gathered operand ready; None where the product has no such version.
    """

    layer: Callable[[Arrays, gemm.TileConfig | None], Call]
    plain: Callable[[Arrays, gemm.TileConfig | None], Call] | None = None
    gathered: Callable[[Arrays, gemm.TileConfig | None], Call] | None = None
    torch: Callable[[Arrays], Call] | None = None


def _up_forward_plain(a: Arrays, config: gemm.TileConfig | None) -> Call:
    x = a.gathered(a.x)
    return lambda: gemm.grouped_mm(x, a.up_proj, a.dispatch, out=a.h_out, config=config)


def _up_forward_torch(a: Arrays) -> Call:
    x = a.gathered(a.x)
    return lambda: F.grouped_mm(x, a.up_proj.transpose(1, 2), offs=a.ends)


def _down_backward_plain(a: Arrays, config: gemm.TileConfig | None) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: gemm.grouped_mm(d_out, a.down_proj, a.dispatch, transposed=True, out=a.act_out, config=config)


def _down_backward_torch(a: Arrays) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: F.grouped_mm(d_out, a.down_proj, offs=a.ends)


def _down_backward_layer(a: Arrays, config: gemm.TileConfig | None) -> Call:
    partials = gemm.score_partials(a.shape.n, config)
    workspace = torch.empty(partials, a.shape.rows, dtype=torch.float32, device=a.x.device)
    outputs: dict[str, Any] = {"dh": a.h_out, "a_scaled": a.act_out, "d_scores": a.d_scores, "workspace": workspace}
    return lambda: gemm.down_backward_act(a.d_out, a.down_proj, a.h, a.scores, a.dispatch, config=config, **outputs)


def _weight_options(
    product: str, dw: torch.Tensor, dispatch: Dispatch, config: gemm.TileConfig | None
) -> dict[str, Any]:
    elements = gemm.weight_workspace(product, dw, dispatch, config)
    return {"dw": dw, "config": config, "workspace": torch.empty(elements, dtype=torch.float32, device=dw.device)}


def _down_weight_plain(a: Arrays, config: gemm.TileConfig | None) -> Call:
    d_out = a.gathered(a.d_out)
    options = _weight_options("down_backward_weight", a.down_grad, a.dispatch, config)
    return lambda: gemm.down_backward_weight(d_out, a.act, a.dispatch, gather=False, **options)


def _down_weight_torch(a: Arrays) -> Call:
    d_out = a.gathered(a.d_out)
    return lambda: F.grouped_mm(d_out.t(), a.act, offs=a.ends)


def _up_weight_plain(a: Arrays, config: gemm.TileConfig | None) -> Call:
    x = a.gathered(a.x)
    options = _weight_options("up_backward_weight", a.up_grad, a.dispatch, config)
    return lambda: gemm.up_backward_weight(a.h, x, a.dispatch, gather=False, **options)


def _up_weight_torch(a: Arrays) -> Call:
    x = a.gathered(a.x)
    return lambda: F.grouped_mm(a.h.t(), x, offs=a.ends)


def _down_forward(a: Arrays, config: gemm.TileConfig | None) -> Call:
    return lambda: gemm.down_forward(a.act, a.down_proj, a.dispatch, y=a.y_out, config=config)


def _up_backward(a: Arrays, config: gemm.TileConfig | None) -> Call:
    return lambda: gemm.up_backward_act(a.h, a.up_proj, a.dispatch, dx_rows=a.y_out, config=config)


def _down_weight(a: Arrays, config: gemm.TileConfig | None) -> Call:
    options = _weight_options("down_backward_weight", a.down_grad, a.dispatch, config)
    return lambda: gemm.down_backward_weight(a.d_out, a.act, a.dispatch, **options)


def _up_weight(a: Arrays, config: gemm.TileConfig | None) -> Call:
    options = _weight_options("up_backward_weight", a.up_grad, a.dispatch, config)
    return lambda: gemm.up_backward_weight(a.h, a.x, a.dispatch, **options)


VERSIONS: dict[str, Versions] = {
    "up_forward": Versions(
        layer=lambda a, config: (
            lambda: gemm.up_forward(a.x, a.up_proj, a.dispatch, h=a.h_out, act=a.act_out, config=config)
        ),
        plain=_up_forward_plain,
        gathered=lambda a, config: (
            lambda: gemm.grouped_mm(a.x, a.up_proj, a.dispatch, gather=True, out=a.h_out, config=config)
        ),
        torch=_up_forward_torch,
    ),
    "down_forward": Versions(
        layer=_down_forward,
        plain=_down_forward,
        torch=lambda a: lambda: F.grouped_mm(a.act, a.down_proj.transpose(1, 2), offs=a.ends),
    ),
    "down_backward_act": Versions(
        layer=_down_backward_layer,
        plain=_down_backward_plain,
        gathered=lambda a, config: (
            lambda: gemm.grouped_mm(
                a.d_out, a.down_proj, a.dispatch, gather=True, transposed=True, out=a.act_out, config=config
            )
        ),
        torch=_down_backward_torch,
    ),
    "down_backward_weight": Versions(
        layer=_down_weight,
        plain=_down_weight_plain,
        gathered=_down_weight,
        torch=_down_weight_torch,
    ),
    "up_backward_act": Versions(
        layer=_up_backward,
        plain=_up_backward,
        torch=lambda a: lambda: F.grouped_mm(a.h, a.up_proj, offs=a.ends),
    ),
    "up_backward_weight": Versions(
        layer=_up_weight,
        plain=_up_weight_plain,
        gathered=_up_weight,
        torch=_up_weight_torch,
    ),
    "combine": Versions(
        layer=lambda a, config: lambda: gemm.combine(a.y, a.dispatch, scores=a.scores.flatten(), out=a.out),
    ),
}


def measure(name: str, arrays: Arrays, rounds: int) -> dict[str, Any]:
    """One row: every version of a product on one shape, ms of GPU time."""
    versions, shape, config = VERSIONS[name], arrays.shape, None  # the tiles the package picks
    calls: dict[str, Call] = {"layer": versions.layer(arrays, config)}
    if versions.plain is not None and versions.torch is not None:
        calls["plain"] = versions.plain(arrays, config)
        calls["torch"] = versions.torch(arrays)
    if versions.gathered is not None:
        calls["gathered"] = versions.gathered(arrays, config)
    gpu = gpu_ms(calls, ("plain", "torch", "gathered"), rounds)
    floor = cost.product_floor_ms(name, shape.sizes)
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
            calls[label] = VERSIONS[name].layer(arrays, config)
            calls[label]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a configuration that doesn't fit is no reason to lose the others
            calls.pop(label, None)
            failed[label] = f"{type(error).__name__}: {str(error)[:120]}"
    ms = gpu_ms(calls, list(calls), rounds).ms
    floor = cost.product_floor_ms(name, arrays.shape.sizes)
    row: dict[str, Any] = {"product": name, "cfg": arrays.shape.dict(), "floor_ms": round(floor, 4)}
    row["ms"] = {label: round(value, 4) for label, value in sorted(ms.items(), key=lambda item: item[1])}
    if failed:
        row["failed"] = failed
    return row


def describe(config: gemm.TileConfig) -> str:
    """n256 s4 c2 deferred: 256 columns a tile, 4 stages, clusters of 2 CTAs, the epilogue under the next tile's mainloop;
    tickets: CTAs take tiles as they get done."""
    words = [name for name in ("deferred", "tickets") if getattr(config, name)]
    return " ".join([f"n{config.tile_n} s{config.stages} c{config.cluster}", *words])


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
    parser = argument_parser("scripts.bench.products", __doc__)
    parser.add_argument(
        "--configs", type=parse_shapes, default=parse_shapes(DEFAULT_SHAPES), help="as for scripts.bench.layer"
    )
    parser.add_argument("--products", default=",".join(VERSIONS), help="of " + ", ".join(VERSIONS))
    parser.add_argument("--tune", action="store_true", help="time all tile configurations instead")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--quick", action="store_true", help="two shapes, 7 rounds; the results file is left alone")
    parser.add_argument(
        "--time-budget", type=float, default=float("inf"), metavar="SECONDS", help="skip what would start later"
    )
    parser.add_argument("--out", type=Path, default=None, help="results file (default: products.json, if all run)")
    options = parser.parse_args()
    if unknown := set(options.products.split(",")) - VERSIONS.keys():
        parser.error(f"--products: expected some of {', '.join(VERSIONS)}, got {', '.join(sorted(unknown))}")
    if options.quick:
        options.configs, options.rounds = [SHAPES[0], SHAPES[8]], 7
        options.out = options.out or RESULTS / f"{'tune' if options.tune else 'products'}-quick.json"
    name = "tune" if options.tune else "products"
    out = options.out or part_file(name)
    record = provenance() | {"rows": []}
    names = [n for n in options.products.split(",") if not (options.tune and n == "combine")]
    whole = names == [n for n in VERSIONS if not (options.tune and n == "combine")]
    whole &= options.configs == parse_shapes(DEFAULT_SHAPES)
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
    if options.out is None and record["rows"]:
        out = finished(name, whole=whole and not skipped)
    (print_tuning if options.tune else print_products)(record["rows"])
    print(f"wrote {out}" if record["rows"] else "wrote nothing")
    print(
        f"{time.monotonic() - begin:.0f} s; {'skipped for time: ' + ', '.join(skipped) if skipped else 'nothing skipped'}"
    )


if __name__ == "__main__":
    main()
