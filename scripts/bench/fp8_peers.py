"""Published fp8 programs for Hopper beside ours: torchao's experts in training, and DeepGEMM's grouped products.

    python -m scripts.bench.fp8_peers              # -> results/h200/fp8_peers.json on an H200
    python -m scripts.bench.fp8_peers --cpu        # tiny, on a CPU, where neither runs

Each expert has as many rows as any other, and a multiple of 128: torchao 0.18 wants multiples of 16, DeepGEMM of 128. One SwiGLU
layer's experts, dispatch included, router excluded, all in turn (A B A B), medians. torchao: its grouped product with a scale for
a row, which quantizes its operands in each call, between torch's gather, SwiGLU and combine, as torch's own grouped_mm in bf16
beside it. DeepGEMM: forward's two products alone, of operands that are quantized (1x128, 128x128) and rows that lie in order.
"""

import importlib
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.gemm import Sizes
from scripts.bench import peers
from scripts.bench.fp8 import SHAPES
from scripts.bench.peers import LayerInputs, Program
from scripts.bench.peers.layers import ours, torch_grouped
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, relative_difference


def balanced(shape: Sizes, device: str) -> Tensor:
    """Expert ids (T, K) int32: K neighbours for each token, tokens in random order; T K is a multiple of E."""
    order = torch.randperm(shape.T, device=device)
    return ((order[:, None] * shape.K + torch.arange(shape.K, device=device)) % shape.E).int()


def torchao(shape: Sizes, one: LayerInputs) -> Program:
    """torch's layer, made while torchao's grouped product is in the place of torch's own."""
    module = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    product = partial(module._to_fp8_rowwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False)
    with mock.patch.object(F, "grouped_mm", product):
        return torch_grouped(shape, one)


def layers(shape: Sizes, machine: Machine) -> Row:
    """Forward, and forward and backward, of all that run; how far outputs are from ours in bf16."""
    one = replace(peers.make_inputs(shape, device=machine.device), experts=balanced(shape, machine.device))
    builds: dict[str, peers.Build] = {
        "ours bf16": ours,
        "ours fp8": partial(ours, precision="fp8"),
        "torch grouped_mm bf16": torch_grouped,
        "torchao fp8": torchao,
    }
    programs, absent = peers.build_all(builds, shape, [one])
    off = {name: round(found, 5) for name, found in peers.output_differences(programs, "ours bf16").items()}
    row = Row(absent=absent, off=off)
    for part, what in (("fwdbwd_ms", "forward_backward"), ("fwd_ms", "forward")):
        calls = {name: getattr(program, what) for name, (program,) in programs.items()}
        row[part] = machine.eager(calls, warmups=3, queued=True)
    return row


def deep_gemm(shape: Sizes, machine: Machine) -> Row:
    """TFLOP/s of the up and the down projection, and how far they are from the products of what was quantized."""
    row, device = Row(absent={}, tflops={}, off={}), machine.device
    library = peers.if_it_runs("DeepGEMM", lambda: importlib.import_module("deep_gemm"), row["absent"])
    if library is None:
        return row
    math = importlib.import_module("deep_gemm.utils.math")
    each = shape.rows // shape.E
    of_row = torch.arange(shape.E, dtype=torch.int32, device=device).repeat_interleave(each)
    for name, (width, reduction) in {"up": (shape.h, shape.d), "down": (shape.d, shape.n)}.items():
        a = torch.randn(shape.rows, reduction, dtype=torch.bfloat16, device=device)
        weights = [torch.randn(width, reduction, dtype=torch.bfloat16, device=device) for _ in range(shape.E)]
        left = math.per_token_cast_to_fp8(a, use_ue8m0=False)
        cast = partial(math.per_block_cast_to_fp8, use_ue8m0=False)
        right = tuple(map(torch.stack, zip(*map(cast, weights), strict=True)))
        out = torch.empty(shape.rows, width, dtype=torch.bfloat16, device=device)
        call = partial(library.m_grouped_fp8_gemm_nt_contiguous, left, right, out, of_row)
        peers.if_it_runs("DeepGEMM", call, row["absent"])
        if row["absent"]:
            break
        row["off"][name] = round(relative_difference(out[:each], a[:each] @ weights[0].T), 5)
        ms = machine.eager({name: call}, warmups=3, queued=True)[name]
        row["tflops"][name] = round(2 * shape.rows * width * reduction / ms / 1e9)
    return row


SMALL = [Sizes(128, 256, 128, 4, 2)]
BENCH = Bench(
    "fp8_peers",
    __doc__,
    {
        "layers": Item(layers, SHAPES, SMALL, rounds=7),
        "products": Item(deep_gemm, SHAPES, SMALL, part="products", rounds=7),
    },
)

if __name__ == "__main__":
    run(BENCH)
