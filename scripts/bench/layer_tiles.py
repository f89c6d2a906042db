"""The tiles that the products take in a layer of some sizes, as a kernel's macros say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from blazeproto import gemm
from blazeproto.gemm import Sizes, TileConfig
from blazeproto.gemm.product import PACKAGE, Variant
from blazeproto.gemm.tiles import CHOSEN, FACTOR_GRADIENT, FACTOR_ROWS, FACTORS, NARROW, WIDTHS, tiles_for
from blazeproto.runtime.arch import AMPERE

TILE_MACROS = ("BN", *(field.name.upper() for field in fields(TileConfig) if field.name != "tile_n"))


CHANGED_TO_SEND = ("TICKETS", "CLUSTER")  # macros that `gemm.sending.that_sends` changes


def _tiles(entry: str, defines: Mapping[str, Any], left_out: Sequence[str] = ()) -> tuple[Any, ...]:
    return entry, *(0 if macro in left_out else int(defines.get(macro, 0)) for macro in TILE_MACROS)


def _by_macros(config: TileConfig) -> dict[str, int]:
    return {"BN": config.tile_n} | {field.name.upper(): getattr(config, field.name) for field in fields(config)}


@cache
def _tiles_of_layer(sizes: Sizes, left_out: Sequence[str] = ()) -> frozenset[tuple[Any, ...]]:
    """The tiles that products have in layers of these sizes, whatever their weights, the number of their tokens, and the columns
    that are made at a time. left_out: macros that count as 0."""
    variants = (Variant(), Variant()._replace(f32=True), Variant()._replace(transposed=True))
    described: list[tuple[str, Mapping[str, Any]]] = [
        (kernel.entry, kernel.defines)
        for variant in variants
        for product in gemm.PRODUCTS.values()
        for kernel in product.for_layer(sizes, variant, variant)
    ]
    row_products = [tiles_for(name, columns) for name in NARROW for columns in WIDTHS] + [FACTOR_ROWS]
    configs = [("linear", config) for config in row_products] + [("weight_gradient", FACTOR_GRADIENT)]
    described += [(entry, _by_macros(config)) for entry, config in configs]
    return frozenset(_tiles(*each, left_out) for each in described)


@cache
def _tiles_chosen(sizes: Sizes, left_out: Sequence[str] = ()) -> dict[str, tuple[Any, ...]]:
    """By the kernel's entry: of the products whose tiles follow from the number of rows too."""
    products = (gemm.PRODUCTS[name] for name in CHOSEN)
    made = [each.kernel(each.tiles(sizes), Variant(True), PACKAGE) for each in products if each.kernel and each.tiles]
    return {kernel.entry: _tiles(kernel.entry, kernel.defines, left_out) for kernel in made}


def has_other_tiles(row: Mapping[str, Any], descriptions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether kernels that a row launched have tiles that their products do not take in a layer of the row's ``cfg``.

    row_counts: numbers of rows that it had besides T K.  ranks: over which the experts are spread.  several_sizes: it launched
    products of other numbers of rows too, a validation's, say: then it need only have launched today's tiles of its cfg, and
    other tiles beside them tell nothing.
    """
    cfg, rows = row.get("cfg", {}), row.get("row_counts", ())
    cfg = {**cfg, "E": cfg["E"] // row["ranks"]} if "ranks" in row else cfg
    if not row.get("several_sizes"):
        return any(other_tiles(each, cfg, rows) for each in descriptions)
    made = {_tiles(each["entry"], each["defines"]) for each in descriptions if {"BN"} <= each.get("defines", {}).keys()}
    exact = [_tiles_chosen(each) for each in _all_sizes(cfg, rows)]
    return any(
        made.isdisjoint(each[entry] for each in exact) for entry in exact[0].keys() & {entry for entry, *_ in made}
    )


def _all_sizes(cfg: Mapping[str, int], rows: Sequence[int]) -> list[Sizes]:
    sizes = Sizes(**{letter: cfg[letter] for letter in "TdnEK"}, halves=cfg.get("halves", 2))
    return [sizes, *(sizes._replace(T=count, K=1) for count in rows)]


def other_tiles(description: Mapping[str, Any], cfg: Mapping[str, int], rows: Sequence[int] = ()) -> bool:
    """Whether a kernel has tiles that its product does not take in a layer of these sizes; False without tiles, and for
    fp8 and stored weights, which have rules of their own. rows: numbers of rows that it may have besides T K, as with a router
    that drops some."""
    defines = description.get("defines", {})
    if "BN" not in defines or {"FP8", "STORED"} & defines.keys() or not set("TdnEK") <= cfg.keys():
        return False
    if str(description.get("file")).startswith(f"{AMPERE.folder}/"):  # whose tiles no size chooses
        return defines["BN"] not in {config.tile_n for config in (*AMPERE.tiles.values(), FACTORS[AMPERE])}
    entry, left_out = description["entry"], CHANGED_TO_SEND if "SENDS" in defines else ()
    tiles = _tiles(entry, defines, left_out)
    exact = [_tiles_chosen(each, left_out) for each in _all_sizes(cfg, rows)]
    if entry in exact[0]:
        return all(tiles != each[entry] for each in exact)
    possible = _tiles_of_layer(_all_sizes(cfg, ())[0], left_out)
    return entry in {each for each, *_ in possible} and tiles not in possible
