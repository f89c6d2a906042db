"""Each product of the registry called alone, into memory that it is given: its inputs, outputs and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.activations import activation_named
from blazeproto.gemm import Kernel, Sizes, TileConfig, weight
from blazeproto.gemm.product import Build
from blazeproto.gemm.reduce import row_sum_slots
from blazeproto.gemm.tiles import BM, TILES
from blazeproto.lab.oracle import Case

SIMPLE_TILE = (128, 256)  # lines and columns that a mismatch map puts together where a kernel has no tiles


class Setting(NamedTuple):
    """A product, and what decides its kernel."""

    product: str
    sizes: Sizes
    activation: str
    config: TileConfig | None

    @property
    def width(self) -> int:
        """Columns of H."""
        return self.sizes.halves * self.sizes.n

    @property
    def tiles(self) -> TileConfig:
        """What the launch takes."""
        tiles = gemm.PRODUCTS[self.product].tiles
        return self.config or (tiles(self.sizes) if tiles else TILES["down_forward"])

    def kernels(self, build: Build) -> list[Kernel]:
        """Those that a call launches, the main one first."""
        entry = gemm.PRODUCTS[self.product]
        return entry.launches(self.sizes, self.tiles, entry.variant._replace(activation=self.activation), build)


@dataclass(frozen=True)
class Output:
    """One output or workspace. index: what a line of it belongs to, "row", "expert", "token", "pair"; "" for a workspace.

    tile: lines and columns that one CTA makes at a time.  halves: 2 where gate and up of a hidden unit are one tile's.
    """

    index: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    tile: tuple[int, int] = SIMPLE_TILE
    halves: int = 1
    zeroed: bool = False  # the product adds to it


@dataclass(frozen=True)
class Call:
    """given: the inputs that other products make (`lab.oracle.evaluate`'s names).

    outputs: by the names of `lab.oracle.evaluate`; "workspace" is not compared.  run: ``run(case, given, outputs, config)``.
    biases: whether the layer has biases.
    """

    given: tuple[str, ...]
    outputs: Callable[[Setting, Case], dict[str, Output]]
    run: Callable[[Case, Mapping[str, Tensor], Mapping[str, Tensor], TileConfig | None], object]
    biases: bool = False


# --- The row products ------------------------------------------------------------------------------------------------------


def _up_outputs(s: Setting, _: Case) -> dict[str, Output]:
    tile = (BM, s.tiles.tile_n // s.sizes.halves)
    return {
        "h": Output("row", (s.sizes.rows, s.width), tile=tile, halves=s.sizes.halves),
        "act": Output("row", (s.sizes.rows, s.sizes.n), tile=tile),
    }


def _down_backward_outputs(s: Setting, _: Case) -> dict[str, Output]:
    tile, lines = (BM, s.tiles.tile_n), gemm.score_partials(s.sizes.n, s.config)
    return {
        "dh": Output("row", (s.sizes.rows, s.width), tile=tile, halves=s.sizes.halves),
        "a_scaled": Output("row", (s.sizes.rows, s.sizes.n), tile=tile),
        "d_scores": Output("pair", (s.sizes.rows,), torch.float32),
        "workspace": Output("", (lines, s.sizes.rows), torch.float32),
    }


def _rows_of_d(name: str) -> Callable[[Setting, Case], dict[str, Output]]:
    return lambda s, _: {name: Output("row", (s.sizes.rows, s.sizes.d), tile=(BM, s.tiles.tile_n))}


def _run_up(case: Case, _: Mapping[str, Tensor], out: Mapping[str, Tensor], config: TileConfig | None) -> object:
    operands = (case.x, case.up_proj, case.dispatch)
    return gemm.up_forward(*operands, activation=case.activation, h=out["h"], act=out["act"], config=config)


def _run_down_backward(
    case: Case, given: Mapping[str, Tensor], out: Mapping[str, Tensor], config: TileConfig | None
) -> object:
    options: dict[str, Any] = {**out, "activation": case.activation, "config": config}
    return gemm.down_backward_act(case.d_out, case.down_proj, given["h"], case.scores, case.dispatch, **options)


def _run_fused(case: Case, given: Mapping[str, Tensor], out: Mapping[str, Tensor], config: TileConfig | None) -> object:
    operands = (given["act"], case.down_proj, case.scores, case.dispatch)
    return gemm.down_forward_fused(*operands, out_f32=out["fused"], config=config)


# --- The weight gradients --------------------------------------------------------------------------------------------------


def _weight_outputs(name: str) -> Callable[[Setting, Case], dict[str, Output]]:
    def outputs(s: Setting, case: Case) -> dict[str, Output]:
        E, d, n = s.sizes.E, s.sizes.d, s.sizes.n
        down = name == weight.DOWN
        shape = (E, d, n) if down else (E, s.width, d)
        dw = torch.empty(shape, dtype=torch.bfloat16, device=case.x.device)
        elements = gemm.weight_workspace(name, dw, case.dispatch, s.config)
        # weight.cu has the gathered rows' columns, d of them, down its tiles, which it stores transposed in dW_up.
        tile = (BM, s.tiles.tile_n) if down else (s.tiles.tile_n, BM)
        return {
            "d_down" if down else "d_up": Output("expert", shape, tile=tile),
            "workspace": Output("", (elements,), torch.float32),
        }

    return outputs


# --- The table -------------------------------------------------------------------------------------------------------------


def _row_sum_outputs(s: Setting, _: Case) -> dict[str, Output]:
    return {
        "d_up_bias": Output("expert", (s.sizes.E, 1, s.width), tile=(1, SIMPLE_TILE[1])),
        "workspace": Output("", (row_sum_slots(s.sizes.rows, s.sizes.E), s.width), torch.float32),
    }


CALLS: dict[str, Call] = {
    "up_forward": Call(
        (),
        _up_outputs,
        _run_up,
    ),
    "down_forward": Call(
        ("act",),
        _rows_of_d("y"),
        lambda case, given, out, config: gemm.down_forward(
            given["act"], case.down_proj, case.dispatch, y=out["y"], config=config
        ),
    ),
    "down_forward_fused": Call(
        ("act",),
        lambda s, _: {
            "fused": Output("token", (s.sizes.T, s.sizes.d), torch.float32, (BM, s.tiles.tile_n), zeroed=True)
        },
        _run_fused,
    ),
    "combine": Call(
        ("y",),
        lambda s, _: {"out": Output("token", (s.sizes.T, s.sizes.d))},
        lambda case, given, out, config: gemm.combine(given["y"], case.dispatch, scores=case.scores, out=out["out"]),
    ),
    "down_backward_act": Call(
        ("h",),
        _down_backward_outputs,
        _run_down_backward,
    ),
    "bias_score_grad": Call(
        (),
        lambda s, _: {"bias_scores": Output("pair", (s.sizes.rows,), torch.float32, zeroed=True)},
        lambda case, given, out, config: gemm.bias_score_grad(
            case.d_out, case.down_bias, case.dispatch, d_scores=out["bias_scores"]
        ),
        biases=True,
    ),
    "down_backward_weight": Call(
        ("a_scaled",),
        _weight_outputs(weight.DOWN),
        lambda case, given, out, config: gemm.down_backward_weight(
            case.d_out, given["a_scaled"], case.dispatch, dw=out["d_down"], workspace=out["workspace"], config=config
        ),
    ),
    "up_backward_act": Call(
        ("dh",),
        _rows_of_d("dx_rows"),
        lambda case, given, out, config: gemm.up_backward_act(
            given["dh"], case.up_proj, case.dispatch, dx_rows=out["dx_rows"], config=config
        ),
    ),
    "up_backward_weight": Call(
        ("dh",),
        _weight_outputs(weight.UP),
        lambda case, given, out, config: gemm.up_backward_weight(
            given["dh"], case.x, case.dispatch, dw=out["d_up"], workspace=out["workspace"], config=config
        ),
    ),
    "expert_row_sum": Call(
        ("dh",),
        _row_sum_outputs,
        lambda case, given, out, config: gemm.expert_row_sum(
            given["dh"], case.dispatch, out=out["d_up_bias"][:, 0], workspace=out["workspace"]
        ),
        biases=True,
    ),
}
"""By the registry's names (`blazeproto.gemm.PRODUCTS`)."""


def setting_of(
    product: str, sizes: tuple[int, int, int, int, int], activation: str, config: TileConfig | None
) -> Setting:
    """sizes: T, d, n, E, K."""
    return Setting(product, Sizes(*sizes, halves=activation_named(activation).halves), activation, config)


# --- Memory that shows what is written to it -------------------------------------------------------------------------------

POISON = 0x7FE5  # in every 16 bits: a NaN in bf16 and in fp32, and no NaN that arithmetic makes
GUARD_LINES, MOST_GUARD = 128, 4 << 20  # of an output, before and after it: as many lines, but no more bytes
ALIGNMENT = 512  # bytes


class Poisoned:
    """An output between two guards, all of it poisoned before each run."""

    def __init__(self, output: Output, device: Any) -> None:
        line = output.shape[-1] * output.dtype.itemsize
        guard = -(-min(GUARD_LINES * line, MOST_GUARD) // ALIGNMENT) * ALIGNMENT // 2  # of 16 bits each
        size = output.dtype.itemsize // 2 * torch.Size(output.shape).numel()
        self.words = torch.empty(2 * guard + size, dtype=torch.int16, device=device)
        self.guards = (self.words[:guard], self.words[guard + size :])
        self.values = self.words[guard : guard + size].view(output.dtype).view(output.shape)
        self.zeroed = output.zeroed

    def poison(self) -> None:
        self.words.fill_(POISON)
        if self.zeroed:
            self.values.zero_()

    def touched(self) -> Tensor:
        """(2,) int64: elements of 16 bits that were written before the output and after it."""
        return torch.stack([(guard != POISON).sum() for guard in self.guards])

    def spare(self, used: int | None) -> Tensor:
        """() int64: elements of 16 bits that were written from line ``used`` on; None: there are no such lines."""
        if used is None:
            return self.words.new_zeros((), dtype=torch.int64)
        line = self.values[0].numel() * self.values.element_size() // 2
        end = self.words.numel() - self.guards[1].numel()
        return (self.words[self.guards[0].numel() + used * line : end] != POISON).sum()
