"""Each product of the layer alone: against torch's grouped_mm, gathered against contiguous, and in its layer form
against its floor.

    python -m scripts.bench.products                     # -> results/h200/products.json on an H200
    python -m scripts.bench.products --products up_forward,combine
    python -m scripts.bench.products --tune              # every tile configuration of every product -> tune.json

Columns: torch: grouped_mm on rows already gathered. plain: ours on the same rows with nothing after the product but a
store. gathered: the same, rows fetched by index. layer: as the layer runs it (gather, activation and dS included).
GPU time by graph replay, all columns of a product in turn (A B A B), medians. Uniform routing, random data.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from blazeproto import cost, gemm
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes
from blazeproto.gemm.arguments import Array
from scripts.bench.common import SHAPES, cfg_of, route
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row
from scripts.bench.tuning import describe
from scripts.command import some_of

Call = Callable[[], object]
DEFAULT_SHAPES = tuple(SHAPES[number - 1] for number in (1, 5, 7, 9, 14, 21))
TUNED_SHAPES = tuple(
    Sizes(*numbers)
    for numbers in (
        (8192, 7168, 2048, 384, 8),  # Kimi K2: 171 rows an expert
        (8192, 4096, 1536, 256, 6),  # 192
        (1, 2048, 768, 128, 8),  # Qwen3-30B: less than 1, and more
        (16, 2048, 768, 128, 8),
        (128, 2048, 768, 128, 8),
        (1024, 2048, 768, 128, 8),
        (2048, 2048, 768, 128, 8),
        (4096, 2048, 768, 128, 8),
        (16384, 7168, 2048, 256, 8),  # DeepSeek-V3: 512
        (16384, 7168, 2048, 384, 8),  # 341
        (4096, 7168, 2048, 256, 8),  # 128
        (1024, 7168, 2048, 256, 8),  # 32
        (12288, 4096, 1536, 256, 6),  # 288
        (2048, 4096, 1536, 128, 8),  # 128
        (4096, 4096, 1536, 128, 8),  # 256
        (8192, 4096, 1536, 128, 8),  # 512
        (8192, 2048, 768, 128, 8),  # 512
        (16384, 2048, 512, 512, 10),  # Qwen3-Next: 320
        (4096, 2048, 512, 512, 10),  # 80
        (16384, 2880, 2880, 128, 4),  # gpt-oss: 512
        (4096, 2880, 2880, 128, 4),  # 128
        (2048, 4096, 14336, 8, 2),  # Mixtral: 512
        (256, 4096, 14336, 8, 2),  # 64
        (12288, 2048, 768, 128, 8),  # 768
        (16384, 2048, 768, 128, 8),  # 1024
        (4096, 5120, 1536, 160, 6),  # DeepSeek-V2: 154
        (16384, 5120, 1536, 160, 6),  # 614
        (8192, 6144, 2560, 160, 8),  # 410
        (4096, 6144, 2560, 160, 8),  # 205
        (24576, 1536, 256, 128, 8),  # 1536
        (32768, 4096, 1024, 64, 4),  # 2048
        (16384, 4096, 14336, 8, 2),  # Mixtral: 4096
        (2048, 4096, 1024, 64, 4),  # 128
        (6144, 4096, 1024, 64, 4),  # 384
        (4096, 768, 256, 128, 8),  # 256
        (1024, 768, 256, 128, 8),  # 64
    )
)
DEFAULT_PRODUCTS = tuple(name for name, product in gemm.PRODUCTS.items() if product.phases)


class Arrays:
    """Inputs and outputs of all products for one shape, and the routing that joins them. Inputs of one shape are one tensor."""

    def __init__(self, shape: Sizes, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.dispatch = build_dispatch(route(shape, "uniform", self.device, self.generator), shape.E)
        self.ends = self.dispatch.expert_token_offsets[1:].clone()  # torch's offsets leave out the leading zero
        self.input = cache(self._input)

    def output(self, letters: str, dtype: str) -> torch.Tensor:
        """Zeros; letters: of the lengths, as a product's specification has them."""
        lengths = [self.shape.letters[letter] for letter in letters.split()]
        return torch.zeros(lengths, dtype=getattr(torch, dtype), device=self.device)

    def _input(self, letters: str, dtype: str) -> torch.Tensor:
        """At unit scale; weights at 1/√fan-in, scores above 0."""
        made = self.output(letters, dtype)
        if dtype == "float32":
            return made.uniform_(generator=self.generator)
        return made.normal_(0.0, made.shape[-1] ** -0.5 if made.dim() == 3 else 1.0, generator=self.generator)

    def rows(self, array: Array) -> torch.Tensor:
        """An input's rows in expert order."""
        tensor = self.input(array.shape, array.dtype)
        return tensor[self.dispatch.expert_token_indices] if array.index == "token" else tensor


def versions(name: str, a: Arrays, config: gemm.TileConfig | None) -> dict[str, Call]:
    """A product's versions, with what they need ready: "layer"; of one that multiplies matrices "plain" and "torch" too, and
    "gathered", if it gathers rows."""
    product = gemm.PRODUCTS[name]
    spec, options = product.spec, {"dispatch": a.dispatch, **({"config": config} if product.kernel else {})}
    counted = [array for array in spec.inputs if not array.optional or array.counted]
    inputs = {array.name: a.input(array.shape, array.dtype) for array in counted}
    outputs = {array.name: a.output(array.shape, array.dtype) for array in spec.outputs}
    if spec.workspace is not None:
        lengths = spec.workspace(a.shape.letters, config)
        outputs["workspace"] = torch.empty(lengths or (0,), dtype=torch.float32, device=a.device)
    calls: dict[str, Call] = {"layer": partial(product.run, **inputs, **outputs, **options)}
    matrices = [array for array in (*counted, *spec.outputs) if array.shape.count(" ") == 2]
    if not matrices:
        return calls

    (matrix,) = matrices
    _, outer, inner = matrix.shape.split()
    by_letter = {array.shape[-1]: array for array in counted if array.index in ("row", "token")}
    if matrix in spec.outputs:
        left, right = by_letter[outer], by_letter[inner]
        ordered = {array.name: a.rows(array) for array in (left, right)}
        plain = partial(product.run, **ordered, **outputs, **options, gather=False)
        by_torch = partial(F.grouped_mm, ordered[left.name].t(), ordered[right.name], offs=a.ends)
        return calls | {"plain": plain, "torch": by_torch, "gathered": calls["layer"]}
    transposed = inner not in by_letter
    rows, weights = by_letter[outer if transposed else inner], inputs[matrix.name]
    made, ordered_rows = a.output(f"R {inner if transposed else outer}", "bfloat16"), a.rows(rows)
    ours: Any = partial(cast(Any, gemm.grouped_mm), weights=weights, transposed=transposed, out=made, **options)
    calls["plain"] = partial(ours, ordered_rows)
    calls["torch"] = partial(F.grouped_mm, ordered_rows, weights if transposed else weights.mT, offs=a.ends)
    if rows.index == "token":
        calls["gathered"] = partial(ours, inputs[rows.name], gather=True)
    return calls


MADE: dict[tuple[Sizes, str], Arrays] = {}


def arrays_of(shape: Sizes, device: str) -> Arrays:
    """The last shape's are kept for its other products; they go before others are made."""
    if (shape, device) not in MADE:
        MADE.clear()
        MADE[shape, device] = Arrays(shape, device)
    return MADE[shape, device]


def measure(case: tuple[Sizes, str], machine: Machine) -> Row:
    """Every version of a product on one shape, ms of GPU time."""
    shape, name = case
    gpu = machine.times(versions(name, arrays_of(shape, machine.device), None), ("plain", "torch", "gathered"))
    floor = cost.product_floor_ms(name, shape)
    row: Row = {"floor_ms": round(floor, 4)} | {f"{version}_ms": round(ms, 4) for version, ms in gpu.ms.items()}
    row |= {"gpu_method": gpu.method["layer"], "layer_to_floor": round(gpu.ms["layer"] / floor, 3)}
    if "plain" in gpu.ms:
        row["plain_to_torch_speed"] = round(gpu.ms["torch"] / gpu.ms["plain"], 3)
    if "gathered" in gpu.ms:
        row["gathered_to_plain_speed"] = round(gpu.ms["plain"] / gpu.ms["gathered"], 3)
    return row | ({"not_captured": gpu.refused} if gpu.refused else {})


def tune(case: tuple[Sizes, str], machine: Machine) -> Row:
    """The layer's version of a product with every tile configuration, ms by configuration."""
    shape, name = case
    arrays = arrays_of(shape, machine.device)
    calls, failed = dict[str, Call](), dict[str, str]()
    for config in gemm.candidates(name):
        label = describe(config)
        try:
            call = versions(name, arrays, config)["layer"]
            call()
            torch.cuda.synchronize()
            calls[label] = call
        except Exception as error:  # noqa: BLE001  a configuration that doesn't fit is no reason to lose the others
            failed[label] = f"{type(error).__name__}: {str(error)[:120]}"
    ms = machine.times(calls, tuple(calls)).ms
    row: Row = {"floor_ms": round(cost.product_floor_ms(name, shape), 4)}
    row["ms"] = {label: round(value, 4) for label, value in sorted(ms.items(), key=lambda item: item[1])}
    return row | ({"failed": failed} if failed else {})


def add_options(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(gemm.PRODUCTS)}"
    parser.add_argument("--products", type=some_of(gemm.PRODUCTS), default=[*DEFAULT_PRODUCTS], help=names)
    parser.add_argument("--tune", dest="parts", action="store_const", const=["tune"], help="time all tiles instead")


def of_product(case: tuple[Sizes, str]) -> Row:
    return {"product": case[1], "cfg": cfg_of(case[0])}


ALL, TUNED = (
    [(shape, name) for shape in shapes for name in gemm.PRODUCTS] for shapes in (DEFAULT_SHAPES, TUNED_SHAPES)
)
WITH_TILES = [(shape, name) for shape, name in TUNED if gemm.PRODUCTS[name].tiles]
QUICK = [case for case in ALL if case[0] in (SHAPES[0], SHAPES[8])]
BENCH = Bench(
    "products",
    __doc__,
    {
        "products": Item(measure, ALL, (), QUICK, of_product),
        "tune": Item(tune, WITH_TILES, (), (), of_product, file="tune"),
    },
    default=("products",),
    options=add_options,
    asked=lambda options, case: case[1] in options.products,
)

if __name__ == "__main__":
    run(BENCH)
