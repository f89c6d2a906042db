"""The reference that products are compared with: their own formulas, evaluated twice in torch.

`EXACT` evaluates them in float64. `YARDSTICK` multiplies bf16 matrices with fp32 accumulation and rounds to bf16 where
the kernels do (H, act, Y, dH, S·act, dX̃): its distance from EXACT is what rounding costs anyone, and kernels may err
little more.

`evaluate` runs all products. Chained (no ``given``), each takes what the one before it made; with ``given``, each takes
its inputs from there, so that an error shows in the product that made it. `run_kernels` does either with the kernels.
Both return the same names. Shapes: T tokens, E experts, d and n widths, R rows, P pairs, G = 2 for a gated activation, else 1.

The block-sparse products (`gemm.BLOCK_PRODUCTS`) are compared with dense products of masked matrices: `evaluate_blocks` and
`run_block_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blazeproto import gemm
from blazeproto.activations import activate, activate_backward, activation_named
from blazeproto.blocksparse import Topology
from blazeproto.dispatch import Dispatch, build_dispatch, build_dispatch_varying
from blazeproto.gemm import Sizes, TileConfig
from blazeproto.gemm.blocks import BLOCK
from blazeproto.gemm.e4m3 import in_e4m3
from blazeproto.gemm.recipe import FP8, Recipe
from blazeproto.lab.calls import ROW_OUTPUTS, Case, calls_of

ROUTINGS = ("uniform", "zipf", "same", "half_empty")
Lists = TypeVar("Lists", Dispatch, Topology)
BY_ROW_BYTES = 2**28  # up to this size each row's weight matrix is gathered, instead of looping over experts


# --- A layer's inputs -----------------------------------------------------------------------------------------------------


def make_case(
    sizes: Sizes,
    routing: str = "uniform",
    *,
    activation: str = "swiglu",
    biases: bool = False,
    sentinels: float = 0.0,
    varying: bool = False,
    row_capacity: int | None = None,
    unit_weights: bool = False,
    transposed: bool = False,
    rank: int = 0,
    quantized: bool = False,
    recipe: Recipe = FP8,
    device: str = "cuda",
    seed: int = 0,
) -> Case:
    """Random data at unit scale, weights at 1/√fan-in or at unit scale too. G of ``sizes`` is the activation's.

    sentinels: share of the pairs whose expert lives elsewhere.  varying: the number of experts per token varies (sentinels
    leave no trace but unused capacity at the end of the pairs).  row_capacity: the most rows, as in `build_dispatch`.
    transposed, rank, quantized, recipe: as `Case` has them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    T, d, n, E, _, halves = sizes._replace(halves=activation_named(activation).halves)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device=device, generator=generator).mul_(scale).bfloat16()

    def weights(*size: int) -> Tensor:
        return normal(*size, scale=1.0 if unit_weights else 1 / math.sqrt(size[-1]))

    def operand(name: str, made: Tensor) -> Tensor:
        return in_e4m3(torch, made, FP8.operand(name).scale).bfloat16() if quantized else made  # type: ignore[union-attr]

    experts = route(sizes, routing, sentinels, generator)
    return Case(
        x=operand("x", normal(T, d)),
        up_proj=operand("up_proj", weights(E, halves * n, d)),
        down_proj=operand("down_proj", weights(E, d, n)),
        scores=torch.rand(experts.numel(), dtype=torch.float32, device=device, generator=generator) + 0.05,
        d_out=operand("d_out", normal(T, d)),
        dispatch=(dispatch_varying if varying else dispatch_fixed)(experts, E, row_capacity),
        activation=activation,
        up_bias=normal(E, halves * n) if biases else None,
        down_bias=normal(E, d) if biases else None,
        transposed=transposed,
        rank=rank,
        quantized=quantized,
        recipe=recipe,
    )


def route(sizes: Sizes, routing: str, sentinels: float, generator: torch.Generator) -> Tensor:
    """(T, K) distinct expert ids; a share of them replaced by ids outside [0, E). If K > E they are ids of K + E experts, of
    which the first E are here."""
    device = generator.device
    num_experts = sizes.E + (sizes.K if sizes.K > sizes.E else 0)
    size = (sizes.T, num_experts)
    preference = torch.zeros(num_experts, device=device)
    if routing == "zipf":
        ranks = torch.randperm(num_experts, device=device, generator=generator) + 1
        preference = -1.2 * ranks.log()
    elif routing == "same":
        preference = 1e6 * torch.rand(num_experts, device=device, generator=generator)
    elif routing == "half_empty":
        preference[max(sizes.K, num_experts // 2) :] = -1e4
    noise = -torch.empty(size, device=device).exponential_(generator=generator).log()  # Gumbel: draws by preference
    experts = (preference + noise).topk(sizes.K, dim=1).indices
    elsewhere = torch.rand(experts.shape, device=device, generator=generator) < sentinels
    below = torch.rand(experts.shape, device=device, generator=generator) < 0.5
    return torch.where(elsewhere, torch.where(below, -1, sizes.E), experts)


def dispatch_fixed(experts: Tensor, num_experts: int, row_capacity: int | None = None) -> Dispatch:
    """The dispatch of (T, K) ids, without the kernels."""
    return _moved(build_dispatch(experts.int().cpu(), num_experts, row_capacity=row_capacity), experts.device)


def dispatch_varying(experts: Tensor, num_experts: int, row_capacity: int | None = None) -> Dispatch:
    """Each token keeps the ids inside [0, E); the capacity stays T·K pairs, those left over carry expert -1."""
    here = (experts >= 0) & (experts < num_experts)
    spare = experts.numel() - int(here.sum())
    pair_experts, pair_tokens = F.pad(experts[here], (0, spare), value=-1), F.pad(here.nonzero()[:, 0], (0, spare))
    token_offsets = F.pad(here.sum(dim=1).cumsum(0), (1, 0))
    lists = (pair_experts.int().cpu(), pair_tokens.int().cpu(), token_offsets.int().cpu())
    return _moved(build_dispatch_varying(*lists, num_experts, row_capacity=row_capacity), experts.device)


def _moved(made: Lists, device: torch.device) -> Lists:
    """A dispatch or a topology with its arrays on a device."""
    arrays = {name: value for name, value in vars(made).items() if isinstance(value, Tensor | np.ndarray)}
    moved: dict[str, Any] = {name: torch.as_tensor(value).to(device) for name, value in arrays.items()}
    return replace(made, **moved)


# --- The formulas --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    dtype: torch.dtype  # of sums
    rounds: bool  # results to bf16

    def over(self, case: Case) -> Formulas:
        """The operations of the products' formulas on the case's rows."""
        return Formulas(self, case)


class Formulas:
    """`blazeproto.gemm.formulas.Namespace` in torch. Rows are those in use; sums are in the arithmetic's dtype."""

    def __init__(self, arithmetic: Arithmetic, case: Case) -> None:
        self.dtype, self.rounds, self.case = arithmetic.dtype, arithmetic.rounds, case
        self.bounds = list(pairwise(case.dispatch.expert_token_offsets.tolist()))

    def gather(self, values: Tensor) -> Tensor:
        return values[self.case.row_token]

    def of_rows(self, scores: Tensor) -> Tensor:
        return scores.to(self.dtype).flatten()[self.case.row_pair, None]

    def product(
        self,
        rows: Tensor,
        weights: Tensor,
        *,
        transposed: bool,
        bias: Tensor | None = None,
        low: tuple[Tensor, Tensor] | None = None,
        columns: range | None = None,
    ) -> Tensor:
        some = slice(None) if columns is None else slice(columns.start, columns.stop)
        made = self._by_expert(rows, (weights if transposed else weights.mT)[..., some])
        if low is not None:
            made = made + self._by_expert(low[0], (low[1] if transposed else low[1].mT)[..., some])
        return made if bias is None else made + bias[self.case.row_expert, some]

    def _by_expert(self, rows: Tensor, weights: Tensor) -> Tensor:
        """(R, k), (E, k, m) → (R, m)."""
        if rows.shape[0] * weights[0].numel() * self.dtype.itemsize <= BY_ROW_BYTES:
            return self._matmul(rows[:, None], weights[self.case.row_expert])[:, 0]
        parts = [self._matmul(rows[a:b], w) for (a, b), w in zip(self.bounds, weights, strict=True) if a < b]
        return torch.cat(parts)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda and a.dim() == 2 and a.dtype == b.dtype == torch.bfloat16 and self.rounds:
            return torch.mm(a, b, out_dtype=self.dtype)  # tensor cores, as anyone would
        return a.to(self.dtype) @ b.to(self.dtype)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        out = left.new_zeros(len(self.bounds), left.shape[1], right.shape[1], dtype=self.dtype)
        if left.shape[0] * out[0].numel() * self.dtype.itemsize <= BY_ROW_BYTES:
            return _add_in_one_order(out, self.case.row_expert, self._matmul(left[:, :, None], right[:, None]))
        for e, (a, b) in enumerate(self.bounds):
            if a < b:
                out[e] = self._matmul(left[a:b].T, right[a:b])
        return out

    def expert_sum(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(len(self.bounds), values.shape[1], dtype=self.dtype)
        return _add_in_one_order(zeros, self.case.row_expert, values.to(self.dtype))

    def combine(self, values: Tensor, scores: Tensor | None = None) -> Tensor:
        """Takes rows as plain torch would have stored them, which the fused product does not."""
        values = self.stored(values).to(self.dtype)
        weighted = values if scores is None else self.of_rows(scores) * values
        zeros = values.new_zeros(len(self.case.x), values.shape[1])
        return _add_in_one_order(zeros, self.case.row_token, weighted)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.to(self.dtype) * right.to(self.dtype)).sum(dim=1, keepdim=True)

    def dot_expert(self, rows: Tensor, vectors: Tensor) -> Tensor:
        return self.dot(rows, vectors[self.case.row_expert])

    def by_pair(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.case.scores)).index_copy_(0, self.case.row_pair, values[:, 0])

    def activate(self, h: Tensor, activation: str) -> Tensor:
        """Rounded, as plain torch would have it."""
        return self.stored(cast(Tensor, activate(h.to(self.dtype), activation)))

    def activate_backward(self, h: Tensor, d_act: Tensor, activation: str) -> Tensor:
        return cast(Tensor, activate_backward(h.to(self.dtype), d_act, activation))

    def stored(self, values: Tensor) -> Tensor:
        return values.bfloat16() if self.rounds else values


def _add_in_one_order(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``out.index_add_(0, index, values)``, which by itself adds in another order every time on a GPU: a yardstick would move."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    try:
        return out.index_add_(0, index, values)
    finally:
        torch.set_deterministic_debug_mode(before)


EXACT = Arithmetic(torch.float64, rounds=False)
YARDSTICK = Arithmetic(torch.float32, rounds=True)


def evaluate(arithmetic: Arithmetic, case: Case, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every output of forward and backward (`lab.calls.LAYER`). Row outputs hold the rows in use only."""
    m, result, exact_sums = arithmetic.over(case), dict[str, Tensor](), dict[str, Any]()
    inputs = result if given is None else {name: case.in_use(name, value) for name, value in given.items()}
    for call in calls_of(case):
        if not call.f32:  # another output of the same sums
            formula = call.entry.spec.formula
            values = formula(m, **call.takes(formula, case, inputs))
            exact_sums[call.product] = values if isinstance(values, tuple) else (values,)
        for (name, array), value in zip(call.made.items(), exact_sums[call.product], strict=True):
            stored = m.stored(value) if array.dtype == "bfloat16" and not call.f32 else value
            if arithmetic.rounds and call.is_quantized(case, array):
                stored = in_e4m3(torch, stored, *array.operand_of(case.recipe)[1:]).bfloat16()  # type: ignore[index]
            result[name] = result[name] + stored if array.added and name in result else stored
    return result


# --- The kernels ---------------------------------------------------------------------------------------------------------


def run_kernels(
    case: Case, given: Mapping[str, Tensor] | None = None, configs: Mapping[str, TileConfig] | None = None
) -> dict[str, Tensor]:
    """Every output by the kernels, into memory poisoned with NaN. Row outputs have all R rows; those not in use stay NaN."""
    result = dict[str, Tensor]()
    rows = case.dispatch.num_rows
    inputs = result if given is None else {k: pad_rows(v, rows) if k in ROW_OUTPUTS else v for k, v in given.items()}
    for call in calls_of(case):
        config = (configs or {}).get(call.product)
        made: dict[str, Tensor] = {}
        for name, output in call.outputs(case, inputs, config).items():
            fill = 0.0 if output.zeroed else math.nan
            fresh = torch.full(output.shape, fill, dtype=output.dtype, device=case.x.device)
            made[name] = result[name] if output.zeroed and name in result else fresh
        call.run(case, inputs, made, config)
        for name, array in call.made.items():
            numbers = call.numbers(case, name, made)
            result[name] = numbers.bfloat16() if call.is_quantized(case, array) else numbers
    return result


def pad_rows(value: Tensor, num_rows: int) -> Tensor:
    """The rows in use, then NaN up to R rows: nothing may read those."""
    padding = value.new_full((num_rows - value.shape[0], value.shape[1]), math.nan)
    return torch.cat([value, padding])


def stray_writes(case: Case, result: Mapping[str, Tensor]) -> list[str]:
    """Outputs of `run_kernels` in which a row that no pair has was written."""
    used = len(case.row_pair)
    return [f"{name}: wrote past row {used}" for name in ROW_OUTPUTS if not result[name][used:].isnan().all()]


# --- Block-sparse products ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCase:
    """S (M, N) with values (B, 128, 128), all B in use; dense matrices of k and m columns. bf16."""

    topology: Topology
    values: Tensor
    x: Tensor  # (M, k)
    w: Tensor  # (k, N)
    right: Tensor  # (N, m)
    left: Tensor  # (M, m)

    def dense(self, values: Tensor) -> Tensor:
        """(B, 128, 128) → (M, N), zeros where no block is."""
        M, N = self.topology.shape
        made = values.new_zeros(M // BLOCK, N // BLOCK, BLOCK, BLOCK)
        made[self.topology.row_indices.long(), self.topology.column_indices.long()] = values
        return made.transpose(1, 2).reshape(M, N)

    def blocks(self, matrix: Tensor) -> Tensor:
        """(M, N) → (B, 128, 128)."""
        M, N = self.topology.shape
        parts = matrix.view(M // BLOCK, BLOCK, N // BLOCK, BLOCK).transpose(1, 2)
        return parts[self.topology.row_indices.long(), self.topology.column_indices.long()]


def make_block_case(mask: np.ndarray, k: int, m: int, *, device: str = "cuda", seed: int = 0) -> BlockCase:
    """mask (M / 128, N / 128) bool: the blocks in use.  k, m: multiples of 8. Random data at unit scale, w and the factors of
    sums over N or M at 1/√fan-in."""
    topology = _moved(Topology.of_blocks(mask), torch.device(device))
    generator, (M, N) = torch.Generator(device).manual_seed(seed), topology.shape

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return torch.randn(size, device=device, generator=generator).mul_(1 / math.sqrt(max(fan_in, 1))).bfloat16()

    values = normal(int(topology.row_offsets[-1]), BLOCK, BLOCK)
    return BlockCase(
        topology, values, normal(M, k), normal(k, N, fan_in=k), normal(N, m, fan_in=N), normal(M, m, fan_in=M)
    )


def evaluate_blocks(arithmetic: Arithmetic, case: BlockCase) -> dict[str, Tensor]:
    """Every product of MegaBlocks §5.1 by its name there."""
    S = case.dense(case.values)

    def times(a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda and arithmetic.rounds and a.numel() and b.numel():
            made: Tensor = torch.mm(a, b, out_dtype=arithmetic.dtype)
        else:
            made = a.to(arithmetic.dtype) @ b.to(arithmetic.dtype)
        return made.bfloat16() if arithmetic.rounds else made

    sampled, ahead, back = case.blocks(times(case.x, case.w)), times(S, case.right), times(S.T, case.left)
    return {
        "SDD": sampled,
        "SDD^T": sampled,
        "DSD": ahead,
        "DSD^T": ahead,
        "DS^TD": back,
        "DS^TD^T": back,
        "DDS": back.T,
        "DD^TS": back.T,
        "DDS^T": ahead.T,
        "DD^TS^T": ahead.T,
    }


BLOCK_CALLS: dict[str, tuple[str, tuple[str, str], dict[str, bool]]] = {
    "SDD": ("sdd", ("x", "w"), {}),
    "SDD^T": ("sdd", ("x", "w^T"), {"transpose_b": True}),
    "DSD": ("dsd", ("values", "right"), {}),
    "DSD^T": ("dsd", ("values", "right^T"), {"transpose_b": True}),
    "DS^TD": ("dsd", ("values", "left"), {"transpose_s": True}),
    "DS^TD^T": ("dsd", ("values", "left^T"), {"transpose_s": True, "transpose_b": True}),
    "DDS": ("dds", ("left^T", "values"), {}),
    "DD^TS": ("dds", ("left", "values"), {"transpose_a": True}),
    "DDS^T": ("dds", ("right^T", "values"), {"transpose_s": True}),
    "DD^TS^T": ("dds", ("right", "values"), {"transpose_s": True, "transpose_a": True}),
}
"""By the products' names: function, arrays of a case, and options."""


def operands(case: BlockCase, name: str) -> tuple[Tensor, ...]:
    """The arrays of a product, in memory as it takes them."""
    given = [(getattr(case, array.removesuffix("^T")), array.endswith("^T")) for array in BLOCK_CALLS[name][1]]
    return tuple(array.T.contiguous() if transposed else array for array, transposed in given)


def run_block_kernels(case: BlockCase) -> dict[str, Tensor]:
    """Results by the products' names, in memory poisoned with NaN. On a CPU by the twins."""
    made = {}
    for name, (function, _, options) in BLOCK_CALLS.items():
        call = partial(getattr(gemm, function), *operands(case, name), case.topology, **options)
        made[name] = call(out=torch.full_like(call(), math.nan))
    return made
