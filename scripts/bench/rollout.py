"""precision="fp8_rollout" bit by bit, beside vLLM's formulas in torch and DeepGEMM's kernels.

    PYTHONPATH=FOLDER:. python -m scripts.bench.rollout    # FOLDER has sgl-deep-gemm 0.2.1; nvcc compiles its kernel
    python -m scripts.bench.rollout --parts times

Random layers: 1 to 64 experts, some without rows, 1 to 8 of them a token, up to 3000 rows an expert. A row counts the bytes of
e4m3, the scales and the bf16 numbers that differ, in all layers of these widths.

x, weights: vLLM 0.11.0's formulas, written down in torch, beside the kernels. H: DeepGEMM's, quantized in powers of two, beside
ours, which is stored so. act: vLLM's formula of DeepGEMM's H, beside ours. Y: DeepGEMM's of our act, beside ours. DeepGEMM
(the kernel of m_grouped_fp8_gemm_nt_contiguous) takes the operands of our kernels, each expert's rows filled up to whole blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto.autograd import quantize_weights
from blazeproto.autograd.hopper_backend import place_of, rows_of
from blazeproto.autograd.records import new_quantized
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import linear, quantize, up
from blazeproto.gemm.e4m3 import BLOCK, Quantized, to_e4m3
from blazeproto.gemm.recipe import RECIPES
from scripts.bench import deep_gemm, peers
from scripts.bench.common import cfg_of
from scripts.bench.fp8 import SHAPES, program_of
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row

DEVICE = "cuda"
MOST_EXPERTS, MOST_ROWS, LAYERS = 64, 3000, 50
RECIPE = RECIPES["fp8_rollout"]
Product = Callable[[Quantized, Quantized, Tensor, Tensor], None]  # `deep_gemm.Kernel.__call__`


class Widths(NamedTuple):
    d: int
    n: int


WIDTHS = [
    Widths(*each)
    for each in (
        *((128, 128), (256, 512), (384, 640), (512, 384), (768, 256)),
        *((1024, 1152), (1536, 768), (2048, 768), (4096, 1024), (7168, 2048)),
    )
]


# --------------------------------------------------------------------------------------------------- vLLM's formulas
# On a GPU torch divides by a Python number by multiplying with its reciprocal; here formulas say which of the two it is.


def of_groups(x: Tensor) -> Quantized:
    """per_token_group_quant_fp8: a 448th of the largest magnitude of 128, which is at least 1e-10; divided and cut off."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    largest = groups.abs().amax(2).clamp_min(1e-10)
    scales = largest / torch.full_like(largest, 448)
    return Quantized((groups / scales[..., None]).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn), scales)


def of_blocks(weights: Tensor) -> Quantized:
    """per_block_cast_to_fp8 as it runs on a GPU, of an expert at a time: at least 1e-4, times float32's 1 / 448; multiplied by
    the reciprocal."""
    made = []
    for weight in weights:
        by_block = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scales = by_block.abs().amax((1, 3), keepdim=True).clamp_min(1e-4) * (1 / 448)
        made.append(((by_block * (1.0 / scales)).to(torch.float8_e4m3fn).view_as(weight), scales[:, 0, :, 0]))
    return Quantized(*map(torch.stack, zip(*made, strict=True)))


def act_of(h: Tensor) -> Tensor:
    """silu_and_mul: SiLU is rounded to bf16, and so is its product."""
    gate, linear_half = h.chunk(2, 1)
    return F.silu(gate) * linear_half


# ----------------------------------------------------------------------------------------------------------- a layer


def ids_of(experts: int) -> Tensor:
    """(T, K) ids: some experts are chosen more often than others, some never."""
    chosen = int(torch.randint(1, experts + 1, ()))  # by any token
    top_k = int(torch.randint(1, min(8, chosen) + 1, ()))
    num_tokens = int(torch.exp(torch.rand(()) * torch.tensor(float(MOST_ROWS)).log()).ceil())
    likely = torch.randn(experts).mul(2).index_fill(0, torch.randperm(experts)[chosen:], -torch.inf)
    gumbel = -torch.empty(num_tokens, experts).exponential_().log()
    return (likely + gumbel).topk(top_k, 1).indices.int().to(DEVICE)


def tokens_of(num_tokens: int, d: int) -> Tensor:
    """bf16: of many magnitudes, some groups of 128 all zero or below 1e-10."""
    x = torch.randn(num_tokens, d // BLOCK, BLOCK, device=DEVICE) * torch.randn(num_tokens, 1, 1, device=DEVICE).exp()
    x *= torch.randn(num_tokens, d // BLOCK, 1, device=DEVICE).exp()
    kind = torch.rand(num_tokens, d // BLOCK, 1, device=DEVICE)
    return torch.where(kind < 0.02, 0.0, torch.where(kind < 0.04, x * 1e-12, x)).flatten(1).bfloat16()


def weights_of(experts: int, m: int, k: int) -> Tensor:
    """bf16: each block of 128 x 128 of its own magnitude, one block all zero."""
    weights = torch.randn(experts, m, k, dtype=torch.bfloat16, device=DEVICE) * k**-0.5
    blocks = torch.randn(experts, m // BLOCK, k // BLOCK, dtype=torch.bfloat16, device=DEVICE).mul(0.5).exp_()
    blocks[0, 0, 0] = 0
    return weights.mul_(blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2))


class Padded:
    """Rows in expert order as DeepGEMM wants them: each expert's filled up to whole blocks."""

    def __init__(self, counts: Tensor) -> None:
        padded = (counts + BLOCK - 1) // BLOCK * BLOCK
        self.expert_of = torch.arange(len(counts), device=counts.device).repeat_interleave(padded).int()
        begins, padded_begins = counts.cumsum(0) - counts, padded.cumsum(0) - padded
        self.rows = torch.arange(int(counts.sum()), device=counts.device)
        self.rows += (padded_begins - begins).repeat_interleave(counts)

    def filled(self, t: Tensor) -> Tensor:
        """Zeros between."""
        made = torch.zeros(len(self.expert_of), t.shape[1], dtype=t.dtype, device=t.device)
        bits = torch.uint8 if t.element_size() == 1 else t.dtype
        made.view(bits)[self.rows] = t.view(bits)
        return made

    def product(self, library: Product, rows: Quantized, weights: Quantized) -> Tensor:
        """rows: values (R, k), scales (R, k / 128) -> (R, m) bf16."""
        out = torch.empty(len(self.expert_of), weights.values.shape[1], dtype=torch.bfloat16, device=DEVICE)
        library(Quantized(*map(self.filled, rows)), weights, out, self.expert_of)
        return out[self.rows]


def compared(name: str, ours: Quantized | Tensor, theirs: Quantized | Tensor) -> Iterator[tuple[str, int]]:
    """The count of numbers, and of those whose bits differ."""
    parts: Any = zip(
        ("", " scales"), *([each] if isinstance(each, Tensor) else each for each in (ours, theirs)), strict=False
    )
    for part, a, b in parts:
        bits: Any = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        a, b = a.contiguous().view(bits), b.contiguous().view(bits)
        yield f"{name}{part}", a.numel()
        yield f"{name}{part} differ", int((a != b).sum())


def layer(widths: Widths, weights: list[Quantized], library: Product | None, found: Counter[str]) -> None:
    """One random layer of these weights' first experts."""
    d, n = widths
    experts = int(torch.randint(1, MOST_EXPERTS + 1, ()))
    ids = ids_of(experts)
    host = build_dispatch(ids.cpu().numpy(), experts)  # on a GPU it would compile kernels for these sizes
    lists: Any = {name: torch.from_numpy(t).to(DEVICE) for name, t in host.arrays.items() if t is not None}
    dispatch = replace(host, **lists)
    at, x = rows_of(dispatch), tokens_of(len(ids), d)
    up_proj, down_proj = (Quantized(*(part[:experts] for part in of)) for of in weights)
    x_q = new_quantized(x, RECIPE.x.scale, *x.shape)
    quantize.launch_rows(x, at, x_q)
    found.update(dict(compared("x", x_q, of_groups(x))))
    h, act = (new_quantized(x, "1x128", ids.numel(), width) for width in (2 * n, n))
    y = x.new_empty(ids.numel(), d)
    up.launch(x_q, up_proj, at, activation="swiglu", h=h, act=act)
    linear.launch(act, down_proj, at, columns=range(d), out=y)
    found["layers"] += 1
    found["rows"] += ids.numel()
    if library is None:
        return
    padded = Padded(dispatch.expert_token_offsets.diff().long())
    token = dispatch.expert_pair_indices.long() // ids.shape[1]
    its_h = padded.product(
        library, Quantized(*(part.view(torch.uint8)[token].view(part.dtype) for part in x_q)), weights[0]
    )
    found.update(dict(compared("H", h, to_e4m3(torch, its_h, *RECIPE.h[1:]))))
    its_act = of_groups(act_of(its_h))
    found.update(dict(compared("act", act, Quantized(its_act.values, its_act.scales.T))))
    its_y = padded.product(library, Quantized(act.values, act.scales.T.contiguous()), weights[1])
    found.update(dict(compared("Y", y, its_y)))


def bits(widths: Widths, machine: Machine) -> Row:
    """All layers of these widths."""
    torch.manual_seed(sum(widths))
    d, n = widths
    absent, found, made = dict[str, str](), Counter[str](), list[Quantized]()
    library = peers.if_it_runs("DeepGEMM", lambda: deep_gemm.Kernel(MOST_EXPERTS), absent)
    for name, shape in (("up_proj", (MOST_EXPERTS, 2 * n, d)), ("down_proj", (MOST_EXPERTS, d, n))):
        weights = weights_of(*shape)
        out, turned = (new_quantized(weights, "128x128", *each) for each in (shape, (shape[0], *shape[:0:-1])))
        quantize.launch_weights(weights, place_of(weights), out, turned, scale_values="float32")
        theirs = of_blocks(weights)
        found.update(dict(compared(name, out, theirs)))
        of_turned = Quantized(theirs.values.view(torch.uint8).mT.contiguous(), theirs.scales.mT)
        found.update(dict(compared(f"{name}^T", turned, of_turned)))
        made.append(out)
    for _ in range(LAYERS):
        layer(widths, made, library, found)
    return Row(absent=absent, found=dict(found))


def times(shape: Any, machine: Machine) -> Row:
    """Milliseconds of the experts' forward with weights that are quantized before, and with those that are not; with backward."""
    one, calls = peers.make_inputs(shape, device=machine.device), dict[str, Any]()
    for precision in ("fp8", "fp8_rollout"):
        kept = quantize_weights(one.gate_up_proj, one.down_proj, precision=precision)
        calls[f"{precision}, weights quantized before"] = program_of(one, precision=precision, quantized=kept).forward
        calls[precision] = program_of(one, precision=precision).forward
        calls[f"{precision}, with backward"] = program_of(one, precision=precision).forward_backward
    return Row(ms={name: round(t, 4) for name, t in machine.eager(calls, warmups=3, queued=True).items()})


BENCH = Bench(
    "rollout",
    __doc__,
    {
        "bits": Item(bits, WIDTHS, key=lambda widths: {"cfg": widths._asdict()}, part="rows"),
        "times": Item(times, SHAPES[:3], key=lambda shape: {"cfg": cfg_of(shape)}, part="times", rounds=7),
    },
)

if __name__ == "__main__":
    run(BENCH)
