"""The experts in fp8 against themselves in bf16: are the products right, and what do products, quantizing and whole layers take?

    python -m scripts.bench.fp8                        # all four shapes -> results/h200/fp8.json
    python -m scripts.bench.fp8 --configs 1 --parts check,products --time-budget 60
    python -m scripts.bench.fp8 --smoke                # the layer alone, tiny, on a CPU

check: each product's sums against float64 of the same quantized operands. What a tensor core of 14 bits may cost is computed for
some rows and columns, sums being taken out of it every 128 elements of the reduction; and for comparison never. Operands that are
positive, and of both signs.

One SwiGLU layer's experts, random data, uniform routing, dispatch included, router excluded. bf16 and fp8 in one process, in
turn (A B A B); medians. fp8 quantizes x, dO and every weight in every call: each order of a weight before the product that reads
it, or with keep_transposed both orders in one pass in forward; or all weights were quantized before (fp8_fwd, fp8_kept_fwdbwd).
Peaks: over what was allocated before the call. In a row: four experts' layers, each of which takes what the one before it gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.autograd import moe_mlp, quantize_weights
from blazeproto.autograd.hopper_backend import rows_of
from blazeproto.autograd.records import E4M3
from blazeproto.dispatch import build_dispatch
from blazeproto.gemm import Sizes, down_backward, fp8, quantize
from blazeproto.gemm.quantize import BLOCK, Quantized, blocks
from blazeproto.lab.times import interleaved_ms
from scripts.bench import peers
from scripts.bench.common import (
    MIB,
    RESULTS,
    begun,
    bench_parser,
    cfg_of,
    folder_of,
    gpu_name,
    in_turn,
    stamped,
    write_json,
)
from scripts.bench.timing import captured, peak_bytes, saved_bytes
from scripts.command import need_hopper, some_of

Row = dict[str, Any]

SHAPES = (
    Sizes(32768, 2048, 768, 128, 8),
    Sizes(32768, 4096, 1024, 64, 4),
    Sizes(16384, 4096, 14336, 8, 2),
    Sizes(16384, 7168, 2048, 256, 8),
)
CHECKED = (Sizes(700, 144, 128, 5, 2), Sizes(600, 256, 8192, 2, 1), Sizes(3000, 1040, 2048, 16, 4))
DEVICE = "cuda"
PARTS = ("check", "products", "layers", "row")
IN_A_ROW = 4
SAMPLE = 48  # rows and columns whose sums are computed as a tensor core does
FRACTION = 13  # bits of a sum behind its largest addend's first


# ------------------------------------------------------------------------------------------------------------- check


def as_tensor_core(a: Tensor, b: Tensor, promoted: bool) -> Tensor:
    """a (M, K), b (N, K) -> (M, N) float64: 32 products at a time are added to a sum, all cut off below 2^-13 of the largest.

    promoted: each 128 elements of the reduction by themselves, added in fp32.
    """
    total = torch.zeros(len(a), len(b), device=a.device)
    kept = torch.zeros_like(total, dtype=torch.float64)
    for begin in range(0, a.shape[1], 32):
        part = slice(begin, begin + 32)
        if promoted and begin % BLOCK == 0:
            total, kept = total + kept.float(), torch.zeros_like(kept)
        addends = torch.cat((a[:, None, part] * b[None, :, part], kept[..., None]), 2)
        unit = torch.exp2(torch.frexp(addends.abs().amax(2, True)).exponent - 1.0 - FRACTION)
        kept = ((addends / unit).trunc() * unit).sum(2)
    return (total + kept.float()).double()


class Operands:
    """The operands of one layer, quantized; its dispatch, and room for what its products make."""

    def __init__(self, shape: Sizes, positive: bool = False, one_gradient: bool = False) -> None:
        self.shape, self.inputs = shape, peers.make_inputs(shape, device=DEVICE)
        with torch.no_grad():
            for tensor in (self.inputs.x, self.inputs.grad_output, self.inputs.gate_up_proj, self.inputs.down_proj):
                if positive:
                    tensor.abs_()
        self.dispatch = build_dispatch(self.inputs.experts, shape.E)
        self.at = rows_of(self.dispatch)
        T, d, n, E, R = shape.T, shape.d, shape.n, shape.E, shape.rows
        self.x, self.d_out = (Quantized(self.e4m3(T, d), self.fp32(T)) for _ in range(2))
        self.up, self.up_t = self.weight(E, 2 * n, d), self.weight(E, d, 2 * n)
        self.down, self.down_t = self.weight(E, d, n), self.weight(E, n, d)
        self.h, self.dh = self.rows(R, 2 * n), self.rows(R, 2 * n)
        self.act, self.a_scaled = self.rows(R, n), self.rows(R, n)
        self.wide = torch.empty(R, d, dtype=torch.bfloat16, device=DEVICE)
        self.d_scores = self.fp32(R)
        made = quantize.most_blocks(R, E)
        self.x_t, self.d_out_t, self.dh_t, self.a_t = (
            Quantized(self.e4m3(width, made * BLOCK), self.fp32(blocks(width), made)) for width in (d, d, 2 * n, n)
        )
        self.before = torch.empty(E + 1, dtype=torch.int32, device=DEVICE)
        self.d_up = torch.empty_like(self.inputs.gate_up_proj.detach())
        down = self.inputs.down_proj.detach()  # in the same place, where that is asked for
        self.d_down = self.d_up.view(-1)[: down.numel()].view_as(down) if one_gradient else torch.empty_like(down)
        self.partials = self.fp32(down_backward.score_partials(n, fp8.TILES), R)

    def e4m3(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=E4M3, device=DEVICE)

    def fp32(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=DEVICE)

    def weight(self, experts: int, m: int, k: int) -> Quantized:
        return Quantized(self.e4m3(experts, m, k), self.fp32(experts, blocks(m), blocks(k)))

    def rows(self, count: int, width: int) -> Quantized:
        return Quantized(self.e4m3(count, width), self.fp32(width // BLOCK, count))

    def calls(self) -> dict[str, Callable[[], None]]:
        """The launches of a forward and a backward, by name, in their order."""
        one, at, d = self.inputs, self.at, self.shape.d
        swiglu = {"activation": "swiglu"}
        return {
            "quantize x": partial(quantize.launch_rows, one.x, at, self.x),
            "quantize up": partial(quantize.launch_weights, one.gate_up_proj, at, self.up, self.up_t),
            "quantize down": partial(quantize.launch_weights, one.down_proj, at, self.down, self.down_t),
            "up": partial(fp8.launch_up, self.x, self.up, at, **swiglu, h=self.h, act=self.act),
            "down": partial(fp8.launch_linear, self.act, self.down, at, columns=range(d), out=self.wide),
            "quantize dO": partial(quantize.launch_rows, one.grad_output, at, self.d_out),
            "dH": partial(
                fp8.launch_down_backward,
                self.d_out,
                self.down_t,
                self.h,
                one.scores,
                at,
                **swiglu,
                dh=self.dh,
                a_scaled=self.a_scaled,
                d_scores=self.d_scores,
                workspace=self.partials,
            ),
            "dX": partial(fp8.launch_linear, self.dh, self.up_t, at, columns=range(d), out=self.wide),
            "block offsets": partial(quantize.launch_block_offsets, at, self.before),
            "turn dO": partial(self.turn, self.d_out, self.d_out_t, gather=True),
            "turn A'": partial(self.turn, self.a_scaled, self.a_t, gather=False),
            "dW_down": partial(fp8.launch_weight, self.d_out_t, self.a_t, at, self.before, dw=self.d_down),
            "turn dH": partial(self.turn, self.dh, self.dh_t, gather=False),
            "turn x": partial(self.turn, self.x, self.x_t, gather=True),
            "dW_up": partial(fp8.launch_weight, self.dh_t, self.x_t, at, self.before, dw=self.d_up),
        }

    def turn(self, rows: Quantized, out: Quantized, *, gather: bool) -> None:
        columns = range(rows.values.shape[1])
        quantize.launch_transpose(rows, self.at, self.before, columns, out, gather=gather)


def same_bits(a: Quantized, b: Quantized) -> bool:
    """Whether values and scales are the same."""
    values = torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8).contiguous())
    return values and torch.equal(a.scales, b.scales.contiguous())


def check(shape: Sizes, positive: bool) -> Row:
    """What each product's output is off float64 by, relative to its largest magnitude; of dS, and of samples of Y and dX, beside
    what a tensor core's sums cost, taken out every 128 elements or never."""
    o = Operands(shape, positive)
    calls, row = o.calls(), Row(cfg=cfg_of(shape), positive=positive)
    for tensor in (o.h, o.act, o.dh, o.a_scaled):
        tensor.values.view(torch.uint8).fill_(0x7F)
    for name in ("quantize x", "quantize up", "quantize down", "quantize dO", "up", "down"):
        calls[name]()
    one = o.inputs
    twins = [quantize.of_tokens(torch, one.x.detach()), quantize.of_tokens(torch, one.grad_output)]
    twins += [quantize.of_weights(torch, weight.detach()) for weight in (one.gate_up_proj, one.down_proj)]
    turned = [Quantized(twin.values.mT, twin.scales.mT) for twin in twins[2:]]
    made = (o.x, o.d_out, o.up, o.down, o.up_t, o.down_t)
    row["quantized_alike"] = [same_bits(a, b) for a, b in zip(made, (*twins, *turned), strict=True)]
    x, d_out = (quantize.tokens_of(torch, t).double() for t in (o.x, o.d_out))
    up, down = (quantize.weights_of(torch, t).double() for t in (o.up, o.down))
    ends = o.dispatch.expert_token_offsets.tolist()
    token, pair = o.dispatch.expert_token_indices.long(), o.dispatch.expert_pair_indices.long()
    experts = [slice(*ends[i : i + 2]) for i in range(shape.E)]
    act = quantize.rows_of(torch, o.act).double()

    def multiplied(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([rows[r] @ weight.mT for r, weight in zip(experts, weights, strict=True)])

    def off(got: Tensor, exact: Tensor) -> float:
        return round(float(((got.double() - exact).abs().amax(1) / exact.abs().amax(1)).max()), 6)

    def sums(name: str, got: Tensor, rows: Tensor, weights: Tensor) -> None:
        """Root mean squares of errors, relative to the exact values'."""
        largest = max(range(shape.E), key=lambda e: ends[e + 1] - ends[e])
        here = experts[largest]
        some = torch.arange(here.start, here.stop, max(1, (here.stop - here.start) // SAMPLE), device=DEVICE)[:SAMPLE]
        columns = torch.arange(0, weights.shape[1], max(1, weights.shape[1] // SAMPLE), device=DEVICE)[:SAMPLE]
        a, b = rows[some], weights[largest][columns]
        exact = a @ b.mT
        error = {
            "got": got[some][:, columns].double(),
            "promoted": as_tensor_core(a, b, True).bfloat16().double(),
            "never": as_tensor_core(a, b, False).bfloat16().double(),
        }
        row[f"{name}_rms"] = {k: float(f"{((v - exact).norm() / exact.norm()).item():.3e}") for k, v in error.items()}

    exact_h = multiplied(x[token], up)
    row["H"] = off(quantize.rows_of(torch, o.h), exact_h)
    exact_act = gemm_activation(exact_h)
    row["act"] = off(act, exact_act)
    row["Y"] = off(o.wide, multiplied(act, down))
    sums("Y", o.wide, act, down)
    calls["dH"]()
    d_act = multiplied(d_out[token], down.mT)
    h, scores = quantize.rows_of(torch, o.h).double(), one.scores.detach().double().view(-1)[pair, None]
    leaf = h.requires_grad_()
    (d_h,) = torch.autograd.grad(gemm_activation(leaf), leaf, scores * d_act)
    row["dH"] = off(quantize.rows_of(torch, o.dh), d_h)
    row["A'"] = off(quantize.rows_of(torch, o.a_scaled), scores * gemm_activation(h.detach()))
    d_scores = (d_act * gemm_activation(h.detach())).sum(1)
    row["dS"] = round(float((o.d_scores[pair].double() - d_scores).abs().max() / d_scores.abs().max()), 7)
    calls["dX"]()
    dh = quantize.rows_of(torch, o.dh).double()
    row["dX"] = off(o.wide, multiplied(dh, up.mT))
    sums("dX", o.wide, dh, up.mT)
    for name in ("block offsets", "turn dO", "turn A'", "dW_down", "turn dH", "turn x", "dW_up"):
        calls[name]()
    a_scaled, x = quantize.rows_of(torch, o.a_scaled).double(), x[token]
    d_out = d_out[token]
    for name, got, left, right in (("dW_down", o.d_down, d_out, a_scaled), ("dW_up", o.d_up, dh, x)):
        exact = torch.stack([left[r].mT @ right[r] for r in experts])
        row[name] = round(float((got.double() - exact).norm() / exact.norm()), 6)
    again = [t.clone() for t in (o.wide, o.dh.values.view(torch.uint8), o.d_scores)]
    for name in ("up", "dH", "dX"):
        calls[name]()
    row["repeats"] = all(
        torch.equal(a, b) for a, b in zip(again, (o.wide, o.dh.values.view(torch.uint8), o.d_scores), strict=True)
    )
    return row


def graph(shape: Sizes) -> Row:
    """Whether a replayed graph of a forward and a backward gives an eager one's bits, twice."""
    one, row = peers.make_inputs(shape), Row(cfg=cfg_of(shape))
    weights = (one.gate_up_proj, one.down_proj)
    forward = partial(moe_mlp, one.x, *weights, one.scores, one.experts, num_experts=shape.E, precision="fp8")
    program, made = peers.layer_program(one, forward), list[tuple[Tensor, ...]]()

    def both() -> tuple[Tensor, ...]:
        out, gradients = program.forward_backward()
        made.append((out.detach(), *gradients))
        return made[-1]

    first, second = both(), both()
    captured(both, torch.cuda.graph_pool_handle())()
    torch.cuda.synchronize()
    pairs = [zip(first, other, strict=True) for other in (second, made[-1])]
    row["graph_alike"] = [[torch.equal(a, b) for a, b in pair] for pair in pairs]
    return row


def gemm_activation(h: Tensor) -> Tensor:
    """SwiGLU of (R, 2n)."""
    gate, up = h.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


# ---------------------------------------------------------------------------------------------------------- products


def products(shape: Sizes, rounds: int) -> Row:
    """Milliseconds, and TFLOP/s, of the products in bf16 and fp8, and of quantizing."""
    o = Operands(shape, one_gradient=True)
    calls, one, R = o.calls(), o.inputs, shape.rows
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    h, act = torch.empty(R, 2 * shape.n, **bf16), torch.empty(R, shape.n, **bf16)
    dh, a_scaled = torch.empty_like(h), torch.empty_like(act)
    spare = [
        torch.empty(gemm.weight_workspace(name, dw, o.dispatch), device=DEVICE)
        for name, dw in (("down_backward_weight", o.d_down), ("up_backward_weight", o.d_up))
    ]
    x, up, down = (t.detach() for t in (one.x, one.gate_up_proj, one.down_proj))
    ours: dict[str, Callable[[], Any]] = {
        "up": partial(gemm.up_forward, x, up, o.dispatch, h=h, act=act),
        "down": partial(gemm.down_forward, act, down, o.dispatch, y=o.wide),
        "dH": partial(
            gemm.down_backward_act,
            one.grad_output,
            down,
            h,
            one.scores.detach(),
            o.dispatch,
            dh=dh,
            a_scaled=a_scaled,
            d_scores=o.d_scores,
            workspace=o.partials,
        ),
        "dX": partial(gemm.up_backward_act, dh, up, o.dispatch, dx_rows=o.wide),
        "dW_down": partial(
            gemm.down_backward_weight, one.grad_output, a_scaled, o.dispatch, dw=o.d_down, workspace=spare[0]
        ),
        "dW_up": partial(gemm.up_backward_weight, dh, x, o.dispatch, dw=o.d_up, workspace=spare[1]),
    }

    timed: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        call()
        if name in ours:
            ours[name]()
            timed |= {f"{name} bf16": ours[name], f"{name} fp8": call}
        else:
            timed[name] = call
    ms = interleaved_ms(timed, rounds, warmups=3, queued=True)
    operations = 2.0 * R * shape.n * shape.d
    once, twice = ("down", "dH", "dW_down"), ("up", "dX", "dW_up")
    rate = dict.fromkeys(once, operations) | dict.fromkeys(twice, 2 * operations)
    row = Row(cfg=cfg_of(shape), ms={name: round(t, 4) for name, t in ms.items()})
    row["tflops"] = {name: round(rate[name.split()[0]] / t / 1e9) for name, t in ms.items() if name.split()[0] in rate}
    return row


# ------------------------------------------------------------------------------------------------------------ layers


def layer(shape: Sizes, rounds: int, device: str = "cuda") -> Row:
    """The row of the results."""
    one = peers.make_inputs(shape, device=device)
    weights = (one.gate_up_proj, one.down_proj)
    kept = quantize_weights(*weights)
    ways: dict[str, dict[str, Any]] = {
        "bf16": {},
        "fp8": {"precision": "fp8"},
        "fp8_transposed": {"precision": "fp8", "keep_transposed": True},
        "fp8_kept": {"precision": "fp8", "quantized": kept},
    }
    programs = {name: peers.layer_program(one, partial(experts, one, **way)) for name, way in ways.items()}
    row, names = Row(cfg=cfg_of(shape)), ("out", "x", "up", "down", "scores")
    made = {name: some_of_results(program) for name, program in programs.items()}
    off = (difference(b, a) for a, b in zip(made["bf16"], made["fp8"], strict=True))
    row["fp8_off_bf16"] = dict(zip(names, off, strict=True))
    row["fp8_alike"] = [all(map(torch.equal, made["fp8"], made[name])) for name in ("fp8_transposed", "fp8_kept")]
    del made
    for name, program in programs.items():
        saved = saved_bytes(program.forward, (*weights, kept.up, kept.down))
        row[f"{name}_saved_MiB"] = round(saved / MIB, 1)
    row["fp8_weights_MiB"] = round(kept.nbytes / MIB, 1)
    if device == "cpu":
        return row
    for name, program in programs.items():
        row[f"{name}_peak_MiB"] = round(peak_bytes(program.forward_backward) / MIB, 1)
    timed: dict[str, Callable[[], Any]] = {f"{k}_fwdbwd": program.forward_backward for k, program in programs.items()}
    timed |= {"bf16_fwd": programs["bf16"].forward, "fp8_fwd": programs["fp8_kept"].forward}
    timed |= {"fp8_fwd_with_weights": programs["fp8"].forward, "quantize": partial(quantize_weights, *weights)}
    return row | {
        f"{name}_ms": round(t, 4) for name, t in interleaved_ms(timed, rounds, warmups=3, queued=True).items()
    }


def experts(one: peers.LayerInputs, **options: Any) -> Tensor:
    """One layer's."""
    weights = (one.gate_up_proj, one.down_proj)
    return moe_mlp(one.x, *weights, one.scores, one.experts, num_experts=len(one.down_proj), **options)


def in_a_row(shape: Sizes, rounds: int, device: str = "cuda") -> Row:
    """Layers one after the other, as in a model: what is saved, the peak, and the time of a forward and a backward of all."""
    layers = [peers.make_inputs(shape, device=device) for _ in range(IN_A_ROW)]

    def forward(**options: Any) -> Tensor:
        x = layers[0].x
        for one in layers:
            x = experts(replace(one, x=x), **options)
        return x

    leaves = [layers[0].x, *(t for one in layers for t in (one.gate_up_proj, one.down_proj, one.scores))]

    def both(**options: Any) -> Any:
        return torch.autograd.grad(forward(**options), leaves, layers[0].grad_output)

    fp8 = {"precision": "fp8"}
    ways: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": fp8, "fp8_transposed": {**fp8, "keep_transposed": True}}
    row, weights = Row(cfg=cfg_of(shape), layers=IN_A_ROW), [t for t in leaves if t.dim() == 3]
    for name, way in ways.items():
        row[f"{name}_saved_MiB"] = round(saved_bytes(partial(forward, **way), weights) / MIB, 1)
        if device != "cpu":
            row[f"{name}_peak_MiB"] = round(peak_bytes(partial(both, **way)) / MIB, 1)
    if device != "cpu":
        timed = {f"{name}_fwdbwd_ms": partial(both, **way) for name, way in ways.items()}
        row |= {name: round(t, 4) for name, t in interleaved_ms(timed, rounds, warmups=3, queued=True).items()}
    return row


def some_of_results(program: peers.Program) -> list[Tensor]:
    """Output and gradients, of two experts' weights."""
    out, gradients = program.forward_backward()
    return [t.detach()[:2].clone() if t.dim() == 3 else t.detach() for t in (out, *gradients)]


def difference(a: Tensor, b: Tensor) -> float:
    """Norm of a - b over b's."""
    return round(float((a.float() - b.float()).norm() / b.float().norm()), 5)


# -------------------------------------------------------------------------------------------------------------- main


def main(words: list[str] | None = None) -> None:
    parser = bench_parser("fp8", __doc__, configs=SHAPES, time_budget=True)
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--smoke", action="store_true", help="the layer alone, tiny, on a CPU")
    options = parser.parse_args(words)
    if options.smoke:
        for measure in (layer, in_a_row):
            print(measure(Sizes(200, 144, 128, 5, 2), 1, device="cpu"))
        return
    need_hopper()
    record, begin, rounds = begun("fp8", __doc__), time.monotonic(), options.rounds or 7
    record |= {"checks": [], "products": [], "in_a_row": []}
    shapes = options.configs or SHAPES
    jobs: list[tuple[str, Any, Callable[..., Any], tuple[Any, ...]]] = []
    if "check" in options.parts:
        jobs += [("checks", shape, check, (shape, positive)) for shape in CHECKED for positive in (False, True)]
        jobs.append(("checks", CHECKED[0], graph, (CHECKED[0],)))
    for shape in shapes:
        if "products" in options.parts:
            jobs.append(("products", shape, products, (shape, rounds)))
        if "layers" in options.parts:
            jobs.append(("rows", shape, layer, (shape, rounds)))
    if "row" in options.parts:
        jobs.append(("in_a_row", shapes[0], in_a_row, (shapes[0], rounds)))
    for where, _, measure, arguments in in_turn(jobs, options.time_budget):
        row = stamped(measure, *arguments)
        record[where].append(row)
        print(f"{time.monotonic() - begin:.0f} s", where, {k: v for k, v in row.items() if k != "of"}, flush=True)
        write_json(options.out or RESULTS.parent / folder_of(gpu_name()) / "fp8.json", record)


if __name__ == "__main__":
    main()
