"""A user's GPU: oracle checks of the kernels there, and times of ampere's tiles.

    python -m blazeproto doctor --check      # `check`, in a process of its own
    python -m blazeproto tune T,d,n,E,K      # `tune`

A check compares a small MoE layer, forward and backward in bf16, with `blazeproto.reference` in float64. `lab.accuracy` has the
tolerances; the torch backend in bf16 is the yardstick. The first check is of a router's logits.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm, reference
from blazeproto.autograd import moe_mlp
from blazeproto.gemm.tiles import OF_AMPERE, TUNED
from blazeproto.lab.accuracy import Pool, sum_error
from blazeproto.lab.calls import CALLS, MADE, Case
from blazeproto.lab.oracle import make_case
from blazeproto.lab.times import interleaved_ms
from blazeproto.router.logits import logits_product
from blazeproto.runtime import arch, notes

# No width or number of rows fills its last tile; over the seeds each output has 10,000 elements.
SIZES, SEEDS = gemm.Sizes(2000, 520, 392, 16, 4), 2
LAYERS: tuple[tuple[str, str, bool, bool], ...] = (  # activation, routing, biases, transposed weights
    ("swiglu", "uniform", False, False),
    ("swiglu", "half_empty", True, False),
    ("swiglu", "zipf", False, True),
    ("geglu", "uniform", False, False),
    ("alternating(clamped_swiglu)", "half_empty", True, True),
    ("relu2", "zipf", True, False),
    ("gelu", "half_empty", False, True),
)
WORTH = 0.99  # of the time of 256 columns: what 128 may take to be chosen


def check(device: str, backend: str) -> None:
    """Prints the name of each check, then what is wrong. SystemExit where any failed."""
    failed = 0
    for layer in (None, *LAYERS):
        options = () if layer is None else (*layer[:2], *["biases"] * layer[2], *["transposed weights"] * layer[3])
        print(f"{backend}: {', '.join(options) or 'logits of a router'}", end=": ", flush=True)
        errors = _logits_errors(device) if layer is None else layer_errors(device, backend, *layer)
        print("\n  ".join(["FAILED" if errors else "ok", *errors]), flush=True)
        failed += bool(errors)
    if failed:
        raise SystemExit(f"{failed} of {1 + len(LAYERS)} checks failed")


def layer_errors(device: str, backend: str, activation: str, routing: str, biases: bool, transposed: bool) -> list[str]:
    """The bounds that a layer exceeds on ``backend``, one line each."""
    pool, options = Pool(), dict[str, Any](up_bias=biases, down_bias=biases, transposed=transposed)
    gemm.prepare(*SIZES[1:5], activation=activation, backend=backend, **options)  # compiles in parallel
    for seed in range(SEEDS):
        case = make_case(SIZES, routing, activation=activation, biases=biases, device=device, seed=seed)
        torch.full((2**26,), torch.nan, device=device)  # what the memory of outputs holds before
        runs = (partial(moe_mlp, backend=backend), partial(moe_mlp, backend="torch"), reference.moe_mlp)
        pool.add_all(*(_results(case, transposed, run, exact=run is runs[2]) for run in runs))
    return pool.failures()


def _results(case: Case, transposed: bool, run: Any, *, exact: bool) -> dict[str, Tensor]:
    """The output and all gradients. Gradients in float64: an fp32 one of scores is as wrong as the bf16 numbers behind it."""
    names = ("x", "up_proj", "down_proj", "scores", "up_bias", "down_bias")
    arrays = {name: array.detach() for name in names if (array := getattr(case, name)) is not None}
    turned = {name for name, array in arrays.items() if transposed and array.dim() == 3}
    stored = {name: array.mT.contiguous() if name in turned else array for name, array in arrays.items()}
    leaves = {k: (t.double() if exact else t.detach()).requires_grad_() for k, t in stored.items()}
    given = {name: t.mT if name in turned else t for name, t in leaves.items()}
    experts = case.row_expert[case.row_pair.argsort()].view(-1, SIZES.K)
    given |= {"gate_up_proj": given.pop("up_proj"), "scores": given["scores"].view(experts.shape)}
    out = run(**given, topk_experts=experts, num_experts=case.sizes.E, activation=case.activation)
    made = torch.autograd.grad(out, [*leaves.values()], case.d_out.to(out.dtype))
    return {"out": out.detach()} | {f"d_{name}": t.double() for name, t in zip(leaves, made, strict=True)}


def _logits_errors(device: str) -> list[str]:
    x, weight = (torch.randn(rows, SIZES.d, device=device).bfloat16() for rows in (SIZES.T, SIZES.E))
    error = (logits_product(x, weight).double() - x.double() @ weight.double().T).abs()
    bound = sum_error(SIZES.d, x.double().abs() @ weight.double().abs().T)
    wrong = int((~(error <= bound)).sum())  # NaN is
    return [f"{wrong} of {error.numel()} exceed what sums in fp32 may cost"] if wrong else []


def tune(sizes: gemm.Sizes, backend: str = "auto") -> tuple[str, str, dict[str, tuple[float, float]]]:
    """Times the tiles of ampere's products in a layer of these ``sizes``, and keeps the fastest for the current GPU.

    Tiles of 128 columns are kept only where they are clearly faster than the plain ones of 256.
    backend: "ampere" tunes on a GPU that hopper's kernels serve too.

    Returns the GPU's name, the file, and by product the milliseconds of a call with 256 columns and with 128. ValueError where
    ampere does not run or, with "auto", is not the GPU's backend, and for sizes that do not fit in its memory.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if lacks := arch.missing(capability):
        raise ValueError(f"tune: expected {lacks}")
    if backend == "auto" and arch.arch_of(capability) is not arch.AMPERE:
        raise ValueError(
            f"backend: expected ampere, which tuning is for, got a GPU of {arch.HOPPER.name}: --backend ampere"
        )
    gpu = torch.cuda.get_device_name()
    notes.note(
        "tiles", gpu, **notes.noted("tiles", gpu)
    )  # where none can be written, it shows before anything is timed
    try:
        times = _times(make_case(sizes))
    except torch.OutOfMemoryError as error:
        raise ValueError(f"T,d,n,E,K: expected sizes that fit in the GPU's memory, got {error}") from error
    widths = {product: 128 if narrow < WORTH * wide else 256 for product, (wide, narrow) in times.items()}
    return gpu, str(notes.note("tiles", gpu, **widths)), times


def _times(case: Case) -> dict[str, tuple[float, float]]:
    found = {}
    with arch.kernels_of("ampere"):
        for product in TUNED:
            call, calls = CALLS[product], dict[str, Any]()
            given = {name: case.draw(name, array) for name, array in call.inputs.items() if name in MADE}
            for width, config in OF_AMPERE.items():
                made = call.outputs(case, given, config).items()
                out = {name: torch.empty(o.shape, dtype=o.dtype, device=case.x.device) for name, o in made}
                calls[str(width)] = partial(call.entry.run, **call.arguments(case, given, out, config))
            ms = interleaved_ms(calls, queued=True)
            found[product] = ms["256"], ms["128"]
    return found
