"""The kernels of the ladder, by name, from the naive one on."""

from typing import Any

import torch
from rung import Rung
from torch import Tensor

from blazeproto.lab.accuracy import FUNCTION, ROUNDING, STEP, Reference
from blazeproto.lab.verdict import Places
from blazeproto.runtime.arch import HOPPER

RING_BYTES = 4 * 48 * 1024 + 64  # of rungs 4 to 6: four stages, and their barriers


class Grouped(Rung):
    """Rung 6. Sizes: tokens, d, n, experts and top_k; each token's experts are random ones."""

    numbers = ("tokens", "d", "n", "experts", "top_k")
    timed = (32768, 2048, 768, 128, 8)
    part = "expert"

    def operands(self, sizes: tuple[int, ...], device: str) -> dict[str, Tensor]:
        tokens, d, n, experts, top_k = sizes
        generator = torch.Generator(device).manual_seed(0)
        how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        x = torch.randn(tokens, d, generator=generator, **how)
        w = torch.randn(experts, 2, n, d, generator=generator, **how) / d**0.5
        pairs, offsets = (lists.to(device) for lists in self.routed(tokens, experts, top_k))
        return {"w": w, "x": x, "pairs": pairs, "offsets": offsets, "act": torch.empty(tokens * top_k, n, **how)}

    @staticmethod
    def routed(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
        """The rows' pairs, and where each expert's rows begin: ``top_k`` random experts a token."""
        chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices.flatten()
        ends = chosen.bincount(minlength=experts).cumsum(0)
        return chosen.argsort(stable=True).int(), torch.cat([torch.zeros(1), ends]).int()

    def exact(self, operands: dict[str, Tensor]) -> dict[str, Reference]:
        w, x, pairs = operands["w"].double(), operands["x"].double(), operands["pairs"]
        expert, terms = self.expert(operands["offsets"]), x.shape[1] / 16 + 16
        rows = x[pairs // (len(pairs) // len(x))]
        gate, up = (torch.einsum("rd,rnd->rn", rows, w[expert, half]) for half in (0, 1))
        wrong = [terms * STEP * torch.einsum("rd,rnd->rn", rows.abs(), w[expert, half].abs()) for half in (0, 1)]
        silu = gate * gate.sigmoid()
        moved = 1.1 * wrong[0] + FUNCTION * gate.abs()  # 1.1: the steepest slope of SiLU
        moved = moved * (up.abs() + wrong[1]) + silu.abs() * wrong[1]
        return {"act": Reference(silu * up, ROUNDING * (silu * up).abs() + moved)}

    def places(self, operands: dict[str, Tensor], name: str) -> Places:
        output, offsets = operands[name], operands["offsets"].long()
        expert = self.expert(offsets)
        inside = torch.arange(len(expert), device=output.device) - offsets[expert]
        columns = torch.arange(output.shape[1], device=output.device)
        token = operands["pairs"] // (len(expert) // len(operands["x"]))
        tiles = inside // self.tile[0], columns // self.tile[1]
        return Places((len(expert), len(columns)), expert, inside, token, *tiles)

    @staticmethod
    def expert(offsets: Tensor) -> Tensor:
        """Each row's expert, (R,)."""
        return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())

    def work(self, sizes: tuple[int, ...]) -> tuple[float, float]:
        tokens, d, n, experts, top_k = sizes
        return 4 * tokens * top_k * d * n, 2 * (tokens * d + 2 * experts * n * d + tokens * top_k * n)

    def tiles(self, sizes: tuple[int, ...]) -> int:
        """At most: each expert's last tile may have few rows."""
        tokens, _, n, experts, top_k = sizes
        return (tokens * top_k // self.tile[0] + experts) * -(-n // self.tile[1])


RUNGS = {
    rung.entry: rung
    for rung in (
        Rung("1-threads.cu", "threads", tile=(16, 16), threads=256, sizes=(32, 32, 32)),
        Rung("1-threads.cu", "tiles", tile=(64, 64), threads=256, sizes=(128, 64, 64)),
        Rung("2-tensor-cores.cu", "tensor_cores", tile=(128, 128), threads=256, sizes=(128, 256, 128)),
        Rung("3-ring.cu", "ring", tile=(128, 128), threads=256, sizes=(128, 256, 320), smem=3 * 32 * 1024),
        Rung(
            "4-tma.cu",
            "tma",
            tile=(128, 256),
            threads=256,
            sizes=(128, 256, 448),
            smem=RING_BYTES,
            boxes={"a": (128, 64), "b": (256, 64)},
            arch=HOPPER,
        ),
        Rung(
            "5-wgmma.cu",
            "specialised",
            tile=(128, 256),
            threads=384,
            sizes=(256, 512, 320),
            smem=RING_BYTES,
            boxes={"a": (128, 64), "b": (256, 64)},
            persistent=True,
            arch=HOPPER,
        ),
        Grouped(
            "6-grouped.cu",
            "grouped",
            tile=(128, 128),
            threads=384,
            sizes=(200, 320, 72, 3, 2),
            smem=RING_BYTES,
            boxes={"w": (1, 2, 128, 64)},
            persistent=True,
            arch=HOPPER,
        ),
    )
}
