"""The layer by PyTorch's grouped products: sort, gather, grouped_mm, SiLU * up, grouped_mm, gather and combine.

Where K is 2 or 4, bmm's gradient of each token's rows has a reduction of 1 and rows of K, for which cuBLAS takes tiles of 32 x 32
of the Ampere kind. docs/results.md says how much longer than forward backward takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blazeproto.gemm import Sizes
from scripts.bench.peers import LayerInputs, Program, layer_program


def build(shape: Sizes, inputs: LayerInputs) -> Program:
    grouped_mm = F.grouped_mm

    def metadata() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token of each row, row of each pair, end of each expert's rows)."""
        flat = inputs.experts.flatten()
        by_expert, pairs = torch.sort(flat, stable=True)
        ends = torch.searchsorted(
            by_expert, torch.arange(shape.E, dtype=torch.int32, device=flat.device), right=True, out_int32=True
        )
        rows = torch.empty_like(pairs)
        rows[pairs] = torch.arange(pairs.numel(), device=pairs.device)
        return pairs // shape.K, rows, ends

    def forward() -> torch.Tensor:
        tokens, rows, ends = metadata()
        h = grouped_mm(inputs.x[tokens], inputs.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = h.chunk(2, dim=1)
        y = grouped_mm(F.silu(gate) * up, inputs.down_proj.transpose(1, 2), offs=ends)
        per_token = y[rows].view(shape.T, shape.K, shape.d)
        return torch.bmm(inputs.scores.to(y.dtype).unsqueeze(1), per_token).squeeze(1)

    return layer_program(inputs, forward, metadata=metadata)
