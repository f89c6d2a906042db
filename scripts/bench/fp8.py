"""The experts in fp8 against themselves in bf16: are the products right, and what do products, quantizing and whole layers take?

    python -m scripts.bench.fp8                        # all shapes -> results/h200/fp8.json on an H200
    python -m scripts.bench.fp8 --parts checks,products --time-budget 60
    python -m scripts.bench.fp8 --cpu                  # layers alone, tiny

check: each product against its formula, bf16's, in float64, of the same quantized operands. The error that a tensor core of 14
bits may add is computed for some rows and columns, with sums taken out of it every 128 elements of the reduction; and for
comparison never. Operands that are positive, and of both signs.

layers: whole `MoE` layers of random data, router included, in bf16 and fp8 with the same weights, in one process, in turn (A B A
B); medians. A step is a forward and backward of one micro-batch, or of two; gradients are not added up. fp8 quantizes x and dO in
every call, and weights once a step (fp8) or in every call (fp8_used: keep_quantized="used"). The optimizer writes nothing, so
that its time does not count. fp8_fwd: forwards alone, as in evaluation, which quantize weights once.
Peaks: over what was allocated before the step; of it, what is kept of weights. In a row: four experts' layers without a router,
each of which takes what the one before it gives; fp8_each: keep_transposed=False.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blazeproto import MoE
from blazeproto.autograd import moe_mlp
from blazeproto.autograd.hopper_backend import rows_of
from blazeproto.autograd.records import new_quantized
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes, down_backward, linear, quantize, up, weight_fp8
from blazeproto.gemm.e4m3 import BLOCK, Quantized, from_e4m3, to_e4m3
from blazeproto.gemm.recipe import FP8
from blazeproto.lab.calls import CALLS, Case
from blazeproto.lab.oracle import EXACT, evaluate
from blazeproto.lab.times import Call
from ptxsim.matrices import multiply_in_14_bits
from scripts.bench import peers
from scripts.bench.common import MIB, cfg_of
from scripts.bench.running import Bench, Item, run
from scripts.bench.timing import Machine, Row, relative_difference, saved_bytes

SHAPES = (
    Sizes(32768, 2048, 768, 128, 8),
    Sizes(32768, 4096, 1024, 64, 4),
    Sizes(16384, 4096, 14336, 8, 2),
    Sizes(16384, 7168, 2048, 256, 8),
)
LAYERS = (
    *SHAPES,
    Sizes(16384, 4096, 1536, 128, 8),
    Sizes(32768, 4096, 1408, 128, 8),
    Sizes(16384, 2048, 1024, 64, 8),
    Sizes(16384, 5120, 8192, 16, 1),
    Sizes(8192, 7168, 2048, 384, 8),
    Sizes(65536, 2048, 768, 128, 8),
)
CHECKED = (Sizes(700, 144, 128, 5, 2), Sizes(600, 256, 8192, 2, 1), Sizes(3000, 1040, 2048, 16, 4))
DEVICE = "cuda"
IN_A_ROW = 4
SAMPLE = 48  # rows and columns whose sums are computed as a tensor core does
STEP = 32  # elements of the reduction that a wgmma multiplies
PRODUCTS = {  # names in the results -> in bf16
    "up": "up_forward",
    "down": "down_forward",
    "dH": "down_backward_act",
    "dX": "up_backward_act",
    "dW_down": "down_backward_weight",
    "dW_up": "up_backward_weight",
}
ROWS = {"H": "h", "act": "act", "Y": "y", "dH": "dh", "A'": "a_scaled", "dX": "dx_rows"}
WEIGHTS = ("up_proj", "down_proj")
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"precision": "fp8"},
    "fp8_each": {"precision": "fp8", "keep_transposed": False},
}


# ------------------------------------------------------------------------------------------------------------- check


def as_tensor_core(a: np.ndarray, b: np.ndarray, promoted: bool) -> np.ndarray:
    """a (M, K), b (N, K) -> (M, N) fp32: a wgmma adds 32 products at a time to a sum of 14 bits.

    promoted: each 128 elements of the reduction by themselves, added in fp32.
    """
    total = kept = np.zeros((len(a), len(b)), np.float32)
    for begin in range(0, a.shape[1], STEP):
        if promoted and begin % BLOCK == 0:
            total, kept = total + kept, np.zeros_like(kept)
        kept = multiply_in_14_bits(a[:, begin : begin + STEP], b[:, begin : begin + STEP], kept)
    return total + kept


def scale_of(name: str) -> str:
    """The elements that share a scale of an operand, by the names of `Operands.q`."""
    of, turned = name.removesuffix("^T"), name.endswith("^T")
    return (FP8.weights if of in WEIGHTS else FP8.of_dw if turned else getattr(FP8, of)).scale  # type: ignore[no-any-return]


class Operands:
    """One layer in bf16, its operands in fp8, and room for what its products make.

    case: the layer.  q: what is quantized, by the names of `lab.calls`; with ^T the transpose.  plain: what is not.
    """

    def __init__(self, shape: Sizes, *, positive: bool = False, one_gradient: bool = False) -> None:
        """one_gradient: those of both weights lie in the same place."""
        one = peers.make_inputs(shape, device=DEVICE)
        x, up, down, scores = (t.detach() for t in (one.x, one.gate_up_proj, one.down_proj, one.scores))
        for tensor in (x, up, down, one.grad_output) if positive else ():
            tensor.abs_()
        dispatch = build_dispatch(one.experts, shape.E)
        self.case, self.at = Case(x, up, down, scores.view(-1), one.grad_output, dispatch, "swiglu"), rows_of(dispatch)
        (T, d, n, E, _, _), R = shape, shape.rows
        turned = quantize.most_blocks(R, E) * BLOCK
        shapes: dict[str, tuple[int, ...]] = {
            "x": (T, d),
            "d_out": (T, d),
            "up_proj": (E, 2 * n, d),
            "up_proj^T": (E, d, 2 * n),
            "down_proj": (E, d, n),
            "down_proj^T": (E, n, d),
            "h": (R, 2 * n),
            "act": (R, n),
            "dh": (R, 2 * n),
            "a_scaled": (R, n),
            "x^T": (d, turned),
            "d_out^T": (d, turned),
            "dh^T": (2 * n, turned),
            "a_scaled^T": (n, turned),
        }
        self.q = {name: new_quantized(x, scale_of(name), *lengths) for name, lengths in shapes.items()}
        d_up = torch.empty_like(up)
        self.plain = {
            "y": x.new_empty(R, d),
            "dx_rows": x.new_empty(R, d),
            "d_scores": torch.empty_like(scores),
            "d_up": d_up,
            "d_down": d_up.view(-1)[: down.numel()].view_as(down) if one_gradient else torch.empty_like(down),
        }
        self.blocks_before = dispatch.expert_token_offsets.new_empty(E + 1)
        self.partials = scores.new_empty(down_backward.score_partials(n), R)

    def calls(self) -> dict[str, Call]:
        """The launches of a forward and a backward, by name, in their order."""
        one, at, q, plain = self.case, self.at, self.q, self.plain
        columns, before = range(one.sizes.d), self.blocks_before

        def turn(name: str, *, gather: bool) -> Call:
            width, out = q[name].values.shape[1], q[f"{name}^T"]
            return partial(quantize.launch_transpose, q[name], at, before, range(width), out, gather=gather)

        def gradient(product: str, left: str, right: str, dw: Tensor) -> Call:
            return partial(weight_fp8.launch, product, q[f"{left}^T"], q[f"{right}^T"], at, before, dw=dw)

        return {
            "quantize x": partial(quantize.launch_rows, one.x, at, q["x"]),
            "quantize up": partial(quantize.launch_weights, one.up_proj, at, q["up_proj"], q["up_proj^T"]),
            "quantize down": partial(quantize.launch_weights, one.down_proj, at, q["down_proj"], q["down_proj^T"]),
            "up": partial(up.launch, q["x"], q["up_proj"], at, activation=one.activation, h=q["h"], act=q["act"]),
            "down": partial(linear.launch, q["act"], q["down_proj"], at, columns=columns, out=plain["y"]),
            "quantize dO": partial(quantize.launch_rows, one.d_out, at, q["d_out"]),
            "dH": partial(
                down_backward.launch,
                q["d_out"],
                q["down_proj^T"],
                q["h"],
                one.scores,
                at,
                activation=one.activation,
                dh=q["dh"],
                a_scaled=q["a_scaled"],
                d_scores=plain["d_scores"],
                workspace=self.partials,
            ),
            "dX": partial(linear.launch, q["dh"], q["up_proj^T"], at, columns=columns, out=plain["dx_rows"]),
            "block offsets": partial(quantize.launch_block_offsets, at, before),
            "turn dO": turn("d_out", gather=True),
            "turn A'": turn("a_scaled", gather=False),
            "dW_down": gradient("down_backward_weight", "d_out", "a_scaled", plain["d_down"]),
            "turn dH": turn("dh", gather=False),
            "turn x": turn("x", gather=True),
            "dW_up": gradient("up_backward_weight", "dh", "x", plain["d_up"]),
        }

    def made(self) -> dict[str, Tensor]:
        """The operands' numbers, and what is not quantized."""
        lying = (name for name in self.q if not name.endswith("^T"))
        return {name: from_e4m3(torch, self.q[name], scale_of(name)) for name in lying} | self.plain


def same_bits(a: Quantized, b: Quantized) -> bool:
    """Whether values and scales are the same."""
    return all(torch.equal(x.view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b, strict=True))


def quantized_alike(o: Operands) -> list[bool]:
    """Whether x, dO, both weights and their transposes are the twins' bits."""
    given = {name: getattr(o.case, name) for name in ("x", "d_out", *WEIGHTS)}
    given |= {f"{name}^T": given[name].mT for name in WEIGHTS}
    return [same_bits(o.q[name], to_e4m3(torch, of, scale_of(name))) for name, of in given.items()]


def off(got: Tensor, exact: Tensor) -> float:
    """The largest error of a row, relative to the row's largest magnitude."""
    return round(float(((got.double() - exact).abs().amax(1) / exact.abs().amax(1)).max()), 7)


def sums_off(o: Operands, got: Tensor, rows: Tensor, weights: Tensor) -> dict[str, float]:
    """Root mean squares of errors of some rows and columns of rows W^T, relative to the exact values': the kernel's, and of sums
    that are taken out of a tensor core or never."""
    ends = o.case.dispatch.expert_token_offsets.tolist()
    largest = max(range(len(weights)), key=lambda e: ends[e + 1] - ends[e])
    count, width = ends[largest + 1] - ends[largest], weights.shape[1]
    some = ends[largest] + torch.arange(0, count, max(1, count // SAMPLE), device=DEVICE)[:SAMPLE]
    columns = torch.arange(0, width, max(1, width // SAMPLE), device=DEVICE)[:SAMPLE]
    a, b = rows[some].cpu(), weights[largest][columns].cpu()
    exact, made = a.double() @ b.double().mT, {"got": got[some][:, columns].cpu()}
    for name, promoted in (("promoted", True), ("never", False)):
        made[name] = torch.from_numpy(as_tensor_core(a.numpy(), b.numpy(), promoted)).bfloat16()
    return {name: float(f"{((each.double() - exact).norm() / exact.norm()).item():.3e}") for name, each in made.items()}


def check(case: tuple[Sizes, bool], machine: Machine) -> Row:
    """Each product's error against float64, relative to its largest magnitude; for dS, and samples of Y and dX, beside the error
    of a tensor core's sums, taken out every 128 elements or never."""
    shape, positive = case
    o = Operands(shape, positive=positive)
    calls = o.calls()
    for of in o.q.values():
        of.values.view(torch.uint8).fill_(0x7F)
    for call in calls.values():
        call()
    made = o.made()
    numbers: Any = {name: made[name] for name in ("x", "d_out", *WEIGHTS)}
    exact = evaluate(EXACT, replace(o.case, **numbers), made)
    row = {name: off(made[output], exact[output]) for name, output in ROWS.items()}
    row |= {f"dW_{of}": round(relative_difference(made[f"d_{of}"], exact[f"d_{of}"]), 6) for of in ("down", "up")}
    results = (o.plain["dx_rows"], o.plain["d_scores"], o.q["dh"].values.view(torch.uint8))
    before = [t.clone() for t in results]
    for name in ("up", "dH", "dX"):
        calls[name]()
    return Row(
        quantized_alike=quantized_alike(o),
        **row,
        dS=off(made["d_scores"].view(1, -1), exact["d_scores"].view(1, -1)),
        Y_rms=sums_off(o, made["y"], made["act"], made["down_proj"]),
        dX_rms=sums_off(o, made["dx_rows"], made["dh"], made["up_proj"].mT),
        repeats=all(map(torch.equal, before, results)),
    )


# ---------------------------------------------------------------------------------------------------------- products


def in_bf16(o: Operands) -> dict[str, Call]:
    """The products' calls in bf16, by their names in the results; each one's inputs are what those before it make."""
    calls, memory = dict[str, Call](), dict(o.plain)
    for name, product in PRODUCTS.items():
        call = CALLS[product]
        outputs = call.outputs(o.case, memory).items()
        memory |= {
            each: torch.empty(out.shape, dtype=out.dtype, device=DEVICE) for each, out in outputs if each not in memory
        }
        calls[name] = partial(call.entry.run, **call.arguments(o.case, memory, memory))
        memory.pop("workspace", None)
    return calls


def products(shape: Sizes, machine: Machine) -> Row:
    """Milliseconds, and TFLOP/s, of the products in bf16 and fp8, and of quantizing."""
    o, timed = Operands(shape, one_gradient=True), dict[str, Call]()
    ours = in_bf16(o)
    for name, call in o.calls().items():
        timed |= {f"{name} bf16": ours[name], f"{name} fp8": call} if name in ours else {name: call}
    ms = machine.eager(timed, warmups=3, queued=True)  # warms up in the order of a layer
    rates = {
        f"{name} {precision}": round(CALLS[product].entry.operations(shape) / ms[f"{name} {precision}"] / 1e9)
        for name, product in PRODUCTS.items()
        for precision in ("bf16", "fp8")
    }
    return Row(ms={name: round(t, 4) for name, t in ms.items()}, tflops=rates)


# ------------------------------------------------------------------------------------------------------------ layers


def program_of(*layers: peers.LayerInputs, **options: Any) -> peers.Program:
    """Layers of experts one after the other, each of which takes what the one before it gives. options: of `moe_mlp`."""
    first, weights = layers[0], tuple(t for one in layers for t in (one.gate_up_proj, one.down_proj))

    def forward() -> Tensor:
        x = first.x
        for one in layers:
            tensors = (one.gate_up_proj, one.down_proj, one.scores, one.experts)
            x = moe_mlp(x, *tensors, num_experts=len(one.down_proj), **options)
        return x

    leaves = (first.x, *weights, *(one.scores for one in layers))
    return peers.Program(forward, leaves, first.grad_output, weights)


class WritesNothing(torch.optim.Optimizer):
    """After whose step nothing is kept of the weights, as after any other's."""

    def __init__(self, layer: MoE) -> None:
        super().__init__(layer.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        """closure: any function, so that all weights count as stepped."""


def stepped(layer: MoE, optimizer: WritesNothing, given: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A step of micro-batches, which are x and dO. -> output and gradients of the last one."""
    made: list[Tensor] = []
    for x, d_out in given:
        made.clear()  # before the next forward
        out = layer(x)[0]
        made += [out.detach(), *torch.autograd.grad(out, (x, *layer.parameters()), d_out)]
        del out
    optimizer.step(list)
    return made


def layer(shape: Sizes, machine: Machine) -> Row:
    """One whole layer in both precisions, of the same weights."""
    T, d, n, E, K = shape[:5]
    torch.manual_seed(0)
    where: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16}
    layers = {"bf16": MoE(d, n, E, K, **where)}
    for name, keep in (("fp8", "step"), ("fp8_used", "used")):
        layers[name] = MoE(d, n, E, K, precision="fp8", keep_quantized=keep, device="meta", dtype=torch.bfloat16)
        layers[name].load_state_dict(layers["bf16"].state_dict(), assign=True)
    given = [(torch.randn(T, d, **where).requires_grad_(), torch.randn(T, d, **where)) for _ in range(2)]
    optimizers = {name: WritesNothing(each) for name, each in layers.items()}
    optimizers["fp8"].step(list)  # of weights that none has stepped nothing is kept
    calls = {
        f"{name}_{count}": partial(stepped, each, optimizers[name], given[:count])
        for name, each in layers.items()
        for count in (1, 2)
    }
    made = {  # output and gradients, of two experts' weights
        name: [t[:2].clone() if t.dim() == 3 else t for t in calls[f"{name}_1"]()] for name in layers
    }
    differences = [round(relative_difference(a, b), 5) for a, b in zip(made["fp8"], made["bf16"], strict=True)]
    names = ("out", "x", *(name for name, _ in layers["bf16"].named_parameters()))
    row = Row(
        off_bf16=dict(zip(names, differences, strict=True)),
        alike=all(map(torch.equal, made["fp8"], made["fp8_used"])),
    )
    del made
    row |= {f"{name}_peak_MiB": round(machine.peak_bytes(call) / MIB, 1) for name, call in calls.items()}
    forwards = {f"{name}_fwd": partial(forward, layers[name], given[0][0]) for name in ("bf16", "fp8")}
    forwards["fp8_fwd"]()
    row["kept_MiB"] = round(layers["fp8"].kept.nbytes / MIB, 1)
    optimizers["fp8"].step(list)
    ms = machine.eager(calls, warmups=2, queued=True) | machine.eager(forwards, warmups=3, queued=True)
    return row | {f"{name}_ms": round(t, 4) for name, t in ms.items()}


def forward(layer: MoE, x: Tensor) -> Tensor:
    """In evaluation."""
    with torch.no_grad():
        out: Tensor = layer(x)[0]
    return out


def in_a_row(shape: Sizes, machine: Machine) -> Row:
    """Layers one after the other, as in a model: what is saved, the peak, and the time of a forward and a backward of all."""
    layers = [peers.make_inputs(shape, device=machine.device) for _ in range(IN_A_ROW)]
    programs = {name: program_of(*layers, **way) for name, way in WAYS.items()}
    both = {name: program.forward_backward for name, program in programs.items()}
    saved = {name: saved_bytes(program.forward, program.weights) for name, program in programs.items()}
    row = Row(layers=IN_A_ROW) | {f"{name}_saved_MiB": round(each / MIB, 1) for name, each in saved.items()}
    row |= {f"{name}_peak_MiB": round(machine.peak_bytes(call) / MIB, 1) for name, call in both.items()}
    ms = machine.eager({f"{name}_fwdbwd": call for name, call in both.items()}, warmups=3, queued=True)
    return row | {f"{name}_ms": round(t, 4) for name, t in ms.items()}


# -------------------------------------------------------------------------------------------------------------- parts


CHECKS = [(shape, positive) for shape in CHECKED for positive in (False, True)]
SMALL = [Sizes(200, 144, 128, 5, 2)]
BENCH = Bench(
    "fp8",
    __doc__,
    {
        "checks": Item(check, CHECKS, key=lambda case: {"cfg": cfg_of(case[0]), "positive": case[1]}, part="checks"),
        "products": Item(products, SHAPES, part="products", rounds=7),
        "layers": Item(layer, LAYERS, SMALL, rounds=7),
        "in_a_row": Item(in_a_row, SHAPES[:1], SMALL, part="in_a_row", rounds=7),
    },
)

if __name__ == "__main__":
    run(BENCH)
