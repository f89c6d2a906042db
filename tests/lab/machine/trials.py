"""A call for each kernel of the package, small, with what makes a shape awkward: an expert's tail behind a whole tile, experts
without rows, pairs without an expert, widths that no tile divides, reductions of more stages than the ring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from blazeproto import router
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.blocksparse import Topology
from blazeproto.dispatch.structures import addresses_of_rows
from blazeproto.gemm import PRODUCTS, Kernel, Sizes, TileConfig, logits
from blazeproto.gemm.arguments import LOW, Array
from blazeproto.gemm.combine import layout
from blazeproto.gemm.linear import GROUPED_MM, grouped_mm
from blazeproto.gemm.specification import Specification
from blazeproto.lab.accuracy import POOL_ELEMENTS, Bounds, Near, Pool
from blazeproto.lab.calls import DTYPES, Case, Output, Poisoned
from blazeproto.lab.oracle import EXACT, YARDSTICK, dispatch_fixed, dispatch_varying, make_case
from blazeproto.lab.target import Machine, hosted, launch
from blazeproto.runtime.arch import AMPERE, HOPPER, Arch
from blazeproto.runtime.arrays import view
from blazeproto.runtime.target import launches_on
from ptxsim.schedule import Report
from tests.blocksparse import block_cases

ROWS, FEW = 131, 9  # of the two experts that have some
SLACK = 2.0  # of `Pool.failures`, for outputs of fewer elements than its rule is for


def awkward(sizes: Sizes, activation: str = "swiglu", varying: bool = False) -> Case:
    """T rows for expert 0, FEW for expert 2, none for the others; pairs that are left over have an expert elsewhere."""
    ids = torch.full((sizes.T, sizes.K), -1)
    ids[:, 0] = 0
    ids[3 : 3 + FEW, -1] = 2
    ids[3 + FEW :, 1:] = sizes.E
    if sizes.K == 1:
        ids[-2:] = -1
    made = make_case(sizes, activation=activation, device="cpu")
    return replace(made, dispatch=(dispatch_varying if varying else dispatch_fixed)(ids, sizes.E))


@dataclass
class Trial:
    """A public function's call.

    options: of the call.  rank: of its low-rank term.  given: optional inputs that it is given.  f32: whether outputs that may
    be fp32 are.  widths: what letters of shapes are beside the case's.  made: the outputs of the last run, by name.
    """

    function: Callable[..., Any]
    spec: Specification
    case: Case
    options: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    given: tuple[str, ...] = ()
    f32: bool = False
    widths: Mapping[str, int] = field(default_factory=dict)
    config: TileConfig | None = None
    made: dict[str, Tensor] = field(default_factory=dict)

    def letters(self) -> dict[str, int]:
        return {**self.case.letters, **self.widths, "r": self.rank}

    def inputs(self) -> dict[str, Tensor]:
        """At unit scale, matrices at 1/√width, scores positive as a router's; rows of no pair are NaN."""
        made, generator = {}, torch.Generator().manual_seed(1)
        for array in self.spec.inputs:
            if array.optional and array.name not in self.given and not (array.name in LOW and self.rank):
                continue
            shape = [self.letters()[letter] for letter in array.shape_in(self.options).split()]
            values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 3 else 1)
            values = values.abs() if array.name == "scores" else values
            made[array.name] = values.to(DTYPES[array.dtype])
            if array.shape_in(self.options)[0] == "R":
                made[array.name][len(self.case.row_pair) :] = torch.nan
        return made

    def arguments(self, function: Callable[..., Any], inputs: Mapping[str, Tensor], **others: Any) -> dict[str, Any]:
        known: dict[str, Any] = {"dispatch": self.case.dispatch, "config": self.config} | self.options | inputs | others
        if self.rank:
            known["low"] = tuple(inputs[name] for name in LOW)
        return {name: known[name] for name in inspect.signature(function).parameters if name in known}

    def outputs(self) -> dict[str, Poisoned]:
        return {
            array.name: Poisoned(
                Output(
                    array.index,
                    tuple(self.letters()[letter] for letter in array.shape.split()),
                    torch.float32 if self.f32 and array.f32 else DTYPES[array.dtype],
                    zeroed=array.added,
                ),
                "cpu",
            )
            for array in self.spec.outputs
        }

    def run(self, machine: Machine) -> list[str]:
        """What is wrong with it."""
        inputs, outputs, used = self.inputs(), self.outputs(), len(self.case.row_pair)
        self.made = {}
        for memory in outputs.values():
            memory.poison()
        values = {name: memory.values for name, memory in outputs.items()}
        launch(machine, self.function, **self.arguments(self.function, inputs, **values))
        rows = {array.name for array in self.spec.inputs if array.shape_in(self.options)[0] == "R"}
        in_use = {name: value[:used] if name in rows else value for name, value in inputs.items()}
        exact, bounds, yardstick = (self._formula(m, in_use) for m in (EXACT, None, YARDSTICK))
        wrong, pool = [], Pool()
        for index, array in enumerate(self.spec.outputs):
            memory, rounded = outputs[array.name], outputs[array.name].values.dtype == torch.bfloat16
            if any(counts := memory.touched(used if array.index == "row" else None).tolist()):
                wrong.append(f"{array.name}: wrote beside it, {counts}")
            got = self.made[array.name] = memory.values[: used if array.index == "row" else None]
            wrong += _beyond(array, got, bounds[index], rounded, Bounds(self.case))
            fair = yardstick[index].bfloat16() if rounded else yardstick[index]
            pool.add(array.name, got, fair.float(), exact[index].double())
        return wrong + failures(pool) + of_reports(machine.reports)

    def _formula(self, arithmetic: Any, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        m = arithmetic.over(self.case) if arithmetic else Bounds(self.case)
        formula = self.spec.formula
        made = formula(m, **self.arguments(formula, inputs))
        return made if isinstance(made, tuple) else (made,)


def _beyond(array: Array, got: Tensor, value: Near, rounded: bool, m: Bounds) -> list[str]:
    exact, error = m.stored(value) if rounded else value
    bad = ~((got.double() - exact).abs() <= error + 2.0**-126)
    where = [tuple(place) for place in bad.nonzero()[:4].tolist()]
    return [f"{array.name}: {int(bad.sum())} of {bad.numel()} beyond their bounds, {where}"] if where else []


def failures(pool: Pool) -> list[str]:
    """What the GPU's rule finds (DESIGN §6), with SLACK where a pool is small: the yardstick's worst of few numbers is small by
    chance. A bound of each element holds those too (`Bounds`)."""
    strict, wide = (
        {name: [line for line in lines if line.startswith(f"{name}: ")] for name in pool.elements}
        for lines in (pool.failures(), pool.failures(slack=SLACK))
    )
    return [
        line for name, count in pool.elements.items() for line in (strict if count >= POOL_ELEMENTS else wide)[name]
    ]


def of_reports(reports: list[Report]) -> list[str]:
    return [f"{report.entry}, seed {report.seed}: {race}" for report in reports for race in report.races]


# --- By kernel -------------------------------------------------------------------------------------------------------------


MACROS = {name: {key: str(value) for key, value in activation_named(name).macros.items()} for name in ACTIVATIONS}


def _activation(of: Mapping[str, Any]) -> str:
    """The activation whose macros these are."""
    known = set().union(*MACROS.values())
    macros = {key: str(value) for key, value in of.items() if key in known}
    return next(name for name, own in MACROS.items() if own == macros)


def trial_of(kernel: Kernel) -> Trial | Logits | RouterGradient | Sparse:
    """A call that launches it, under `kernels_of` its architecture."""
    of: Mapping[str, Any] = kernel.defines
    if kernel.file in ("sdd.cu", "dsd.cu"):
        return Sparse(of)
    if kernel.entry == "logits":
        return Logits(of["BN"], of["WEIGHT_PARTS"], kernel.arch)
    if "FP16" in of:
        return RouterGradient(kernel.entry, of["BN"])
    if kernel.entry in _SMALL:
        return _SMALL[kernel.entry](of)
    if kernel.entry == "weight_sum":
        return stream_k()
    if kernel.arch is AMPERE:
        return with_tiles(kernel.entry, ampere_tiles(of["BN"]), of)
    config = TileConfig(
        of["BN"], of["STAGES"], bool(of["DEFERRED"]), of["CLUSTER"], bool(of["TICKETS"]), "FEW_ROWS" in of
    )
    return with_tiles(kernel.entry, config, of)


def ampere_tiles(width: int) -> TileConfig:
    return TileConfig(tile_n=width, stages=2, deferred=False)


def with_tiles(entry: str, config: TileConfig, of: Mapping[str, Any]) -> Trial:
    """A call of up_forward, down_backward, linear or weight_gradient.  of: macros."""
    deep = 64 * config.stages + 8  # a reduction of one stage more than the ring
    rank = max(0, 16 * int(of.get("LOW_RANK", 0)) - 8)
    given = ("bias",) if of.get("HAS_BIAS") else ()
    if entry in ("up_forward", "down_backward"):
        name = "up_forward" if entry == "up_forward" else "down_backward_act"
        activation = _activation(of)
        halves = activation_named(activation).halves
        n = config.tile_n // (halves if entry == "up_forward" else 1) + 8
        options = {"activation": activation, "transposed": bool(of["B_MN"]) == (entry == "up_forward")}
        case = awkward(Sizes(ROWS, deep, n, 4, 2), activation)
        return Trial(PRODUCTS[name].run, PRODUCTS[name].spec, case, options, rank, given, config=config)
    if entry == "weight_gradient":
        name = "up_backward_weight" if of["TRANSPOSED"] else "down_backward_weight"
        case = awkward(Sizes(deep, 136, config.tile_n + 8, 4, 2), "relu")
        options = {"gather": bool(of["GATHER"])}
        return Trial(PRODUCTS[name].run, PRODUCTS[name].spec, case, options, f32=bool(of["OUT_F32"]), config=config)
    width = config.tile_n + 8
    options = {"transposed": bool(of["B_MN"])}
    if of.get("FUSED_COMBINE") == 1:
        case, product = awkward(Sizes(ROWS, width, deep, 4, 2)), PRODUCTS["down_forward_fused"]
        return Trial(product.run, product.spec, case, options, 0, (*given, "scores"), config=config)
    if of.get("FUSED_COMBINE") == 2:
        case, product = awkward(Sizes(ROWS, width, deep, 4, 2), "relu"), PRODUCTS["up_backward_act_fused"]
        options["transposed"] = not options["transposed"]
        return Trial(product.run, product.spec, case, options, rank, config=config)
    options["gather"] = bool(of["GATHER"])
    widths = {"width": width, "reduction": deep}
    case = awkward(Sizes(ROWS, 8, 8, 4, 2))
    return Trial(grouped_mm, GROUPED_MM, case, options, rank, given, widths=widths, config=config)


def stream_k(cluster: int = 1) -> Trial:
    """A weight gradient on twice as many multiprocessors as ``cluster``: one expert's rows are so many that its tile is cut in
    two, and so many places for rows are empty that the partials find room."""
    case = awkward(Sizes(3200, 64, 256, 3, 2 * cluster), "relu")
    product = PRODUCTS["down_backward_weight"]
    return Trial(product.run, product.spec, case, {"gather": True}, config=TileConfig(cluster=cluster))


def _combine(of: Mapping[str, Any]) -> Trial:
    top_k, product = of["TOP_K"], PRODUCTS["combine"]
    d = next(d for d in (64, 256, 768, 2880, 4096) if layout(d, top_k) == (of["LANES"], of["VECTORS"]))
    sizes = Sizes(5, d, 8, top_k + 2, top_k or 3)
    case = make_case(sizes, sentinels=0.2, varying=not top_k, device="cpu")
    return Trial(product.run, product.spec, case, given=("scores",) if of["HAS_SCORES"] else ())


def _reduction(name: str, of: Mapping[str, Any]) -> Trial:
    """Whichever macros the second kernel of a sum has, it is the same program."""
    top_k = of["TOP_K"]
    sizes = Sizes(70, 264, 264, 10, top_k or 3)
    case = make_case(sizes, sentinels=0.2, varying=not top_k, device="cpu", activation="relu")
    if name == "down_backward_act":
        case = awkward(Sizes(20, 72, 264, 4, 2), "relu")
    options = {"activation": "relu"} if name == "down_backward_act" else {}
    return Trial(PRODUCTS[name].run, PRODUCTS[name].spec, case, options)


_SMALL: dict[str, Callable[[Mapping[str, Any]], Trial]] = {
    "combine": _combine,
    "bias_score_grad": lambda of: _reduction("bias_score_grad", of),
    "expert_row_sum": lambda of: _reduction("expert_row_sum", of),
    "expert_row_sum_finish": lambda of: _reduction("expert_row_sum", of),
    "reduce_scores_grad": lambda of: _reduction("down_backward_act", of),
}


@dataclass
class Logits:
    """`router.logits_product` with as many experts as have it choose tiles of this width."""

    width: int
    parts: int
    arch: Arch = HOPPER

    def run(self, machine: Machine) -> list[str]:
        """What is wrong with it."""
        parts, reduction = self.parts, 584
        experts = {(128, 1): 136, (64, 1): 40, (256, 2): 136, (128, 2): 40, (64, 2): 24}[self.width, parts]
        experts = 136 if self.arch is AMPERE else experts
        generator = torch.Generator().manual_seed(1)
        x, weight = (torch.randn(rows, reduction, generator=generator).bfloat16() for rows in (ROWS, parts * experts))
        memory = Poisoned(Output("token", (ROWS, experts), torch.float32), "cpu")
        memory.poison()
        launch(machine, router.logits_product, x=x, weight=weight, parts=parts, out=memory.values)
        exact, absolute = (
            a @ b.unflatten(0, (parts, -1)).sum(dim=0).T
            for a, b in ((x.double(), weight.double()), (x.double().abs(), weight.double().abs()))
        )
        bad = ~((memory.values.double() - exact).abs() <= (parts * reduction / 16 + 16) * 2.0**-22 * absolute)
        wrong = [f"logits: {int(bad.sum())} beyond their bounds"] if bad.any() else []
        wrong += ["logits: wrote beside them"] if memory.touched().any() else []
        return wrong + of_reports(machine.reports)


def halved(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `router.halve_kernels.halve_rows`: fp16 numbers below 2^15, and the power of two of each row, 0 for one of zeros."""
    largest = rows.abs().amax(1)
    scales = torch.where(largest > 0, torch.exp2(torch.frexp(largest)[1] - 15.0), 0)
    return torch.where(largest[:, None] > 0, rows / scales[:, None], 0).half(), scales


@dataclass
class RouterGradient:
    """`gemm.logits.backward_rows` or, by its kernel's entry, `backward_weight`, of gradients that grow from token to token, so
    that fp16.cuh lets its factor fall. Every seventh token has none; one of them is infinite in a column of x, which alone is
    NaN.

    width: of the kernel's tiles.  tokens: several work units' for many.
    """

    entry: str
    width: int
    tokens: int = ROWS

    def run(self, machine: Machine) -> list[str]:
        """What is wrong with it."""
        generator = torch.Generator().manual_seed(1)
        dense = {256: 264, 128: 72, 192: 136}[self.width]
        experts, d = (dense, 264) if self.entry == "weight_gradient" else (136, self.width + 8)
        x, weight, gradient = (
            torch.randn(*shape, generator=generator)
            for shape in ((self.tokens, d), (experts, d), (self.tokens, experts))
        )
        gradient *= torch.exp2(torch.arange(self.tokens)[:, None] * (60 / self.tokens) - 70)
        gradient[::7], x, weight = 0, x.bfloat16(), weight.half()
        halves, scales = halved(gradient)
        rows = halves.double() * scales[:, None].double()
        weighs = self.entry == "weight_gradient"
        shape, dtype = ((experts, d), torch.float32) if weighs else ((self.tokens, d), torch.bfloat16)
        memory = Poisoned(Output("token", shape, dtype), "cpu")
        memory.poison()
        exact, absolute = rows.T @ x.double() if weighs else rows @ weight.double(), rows.abs()
        absolute = absolute.T @ x.double().abs() if weighs else absolute @ weight.double().abs()
        noise = (halves.double().abs().sum(0)[:, None] * (scales[:, None] * x.float().abs()).max()).double() * 2.0**-32
        allowed = (self.tokens / 16 + 16) * 2.0**-22 * absolute + (noise if weighs else exact.abs() * 2.0**-8)
        if weighs:
            x[7, 5], exact[:, 5] = torch.inf, torch.nan
        padded = torch.zeros(-(-self.tokens // 64) * 64)
        padded[: self.tokens] = scales
        offsets = torch.tensor([0, self.tokens], dtype=torch.int32)
        with launches_on(machine):
            views = [
                view(hosted(t.view(torch.uint16) if t.dtype == torch.float16 else t), "a")
                for t in (halves, x if weighs else weight[None], padded, offsets, memory.values)
            ]
            a, b, c, starts, out = views
            at = addresses_of_rows(self.tokens, starts.data_ptr(), a.device, 0)
            if weighs:
                elements = logits.backward_workspace(*x.shape[:1], experts, d, a.device)
                workspace = view(machine.empty((elements,), "float32"), "workspace")
                logits.backward_weight(a, b, c, at, view(hosted(memory.values[None]), "out"), workspace)
            else:
                logits.backward_rows(a, b, c, at, out)
        bad = ~((memory.values.double() - exact).abs() <= allowed) & ~(exact.isnan() & memory.values.isnan())
        wrong = [f"{self.entry}: {int(bad.sum())} of {bad.numel()} beyond their bounds"] if bad.any() else []
        wrong += [f"{self.entry}: wrote beside it"] if memory.touched().any() else []
        return wrong + of_reports(machine.reports)


# --- Block-sparse products -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """One on a random topology, with whole numbers. of: a kernel's macros."""

    of: Mapping[str, Any]

    def run(self, machine: Machine) -> list[str]:
        of = self.of
        transposed = (of.get(name) for name in ("S_TRANSPOSED", "OUT_TRANSPOSED"))
        name = {
            (None, None): "SDD" if of["B_MN"] else "SDD^T",
            (False, False): "DSD" if of["B_MN"] else "DSD^T",
            (True, False): "DS^TD" if of["B_MN"] else "DS^TD^T",
            (True, True): "DD^TS" if of["B_MN"] else "DDS",
            (False, True): "DD^TS^T" if of["B_MN"] else "DDS^T",
        }[tuple(transposed)]  # type: ignore[index]
        topology = Topology.of_blocks(block_cases.MASKS["random"])
        function, arrays, options, right = block_cases.cases(topology)[name]
        config = TileConfig(of["BN"], of["STAGES"], bool(of["DEFERRED"]))
        with launches_on(machine):
            made = function(*map(block_cases.bits, arrays), topology, **options, config=config)
        wrong = made != block_cases.bits(right)
        return [f"{name}: {int(wrong.sum())} wrong"] * bool(wrong.any()) + of_reports(machine.reports)
