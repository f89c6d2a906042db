"""Random layers that the checks share: inputs of the products and of ``moe_mlp``, and one call with its backward.

`scripts.checks.fuzz` holds them against float64, `scripts.checks.compare` against another checkout, and
`scripts.checks.sanitize_target` runs some under compute-sanitizer. A seed says all about a layer.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from blazeproto import moe_mlp
from blazeproto.activations import ACTIVATIONS, activation_named, with_parameters
from blazeproto.autograd import LowRank, SavePolicy
from blazeproto.autograd.policy import padded_rank
from blazeproto.gemm import Sizes
from blazeproto.gemm.product import TRANSPOSED
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import ROUTINGS, make_case

# Other parameters than the table's. Few values are near to these limits: the slope jumps there, and a rounded value may lie on
# the other side than the exact one.
OTHERS = [
    with_parameters(name, **{p.name: factor * p.value if p.above_zero else drift * p.value for p in row.parameters})
    for name, row in ((name, activation_named(name)) for name in ACTIVATIONS if "(" not in name)
    for factor, drift in ((1.3, 1.0), (0.36, 0.76), (0.57, -0.41))
    if row.parameters
]
OTHERS += ["alternating(swiglu)", "alternating(geglu_tanh)"]  # gate and up in turn
FP8_ACTIVATIONS = [
    name for name in ACTIVATIONS if activation_named(name).gated and activation_named(name).layout == "HALVES"
]
# (E, K) of ``moe_mlp``: few, for Numba compiles the dispatch's kernels for each. K > E: most experts are elsewhere.
EXPERTS = [(1, 1), (1, 8), (2, 1), (2, 20), (3, 6), (5, 3), (8, 2), (13, 5), (16, 16), (64, 8), (128, 4), (512, 10)]
RANKS = [0, 0, 0, 3, 8, 20, 64, 136]  # of factors; 0: none


@dataclass(frozen=True)
class Layer:
    """A layer, and a call of ``moe_mlp``.

    inputs: options of `make_case`.  options: of ``moe_mlp``.  ranks: of the up and the down projection's low-rank terms, or 0.
    frozen: gradients that aren't asked for, by name.  f32: whether the weights are float32, and so their gradients.
    """

    sizes: Sizes
    inputs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (0, 0)
    frozen: tuple[str, ...] = ()
    f32: bool = False

    def __str__(self) -> str:
        sizes = " ".join(f"{letter}{getattr(self.sizes, letter)}" for letter in "TdnEK")
        given = {
            **self.inputs,
            **self.options,
            "ranks": self.ranks,
            "frozen": "+".join(self.frozen),
            "f32": self.f32 or None,
        }
        return ", ".join(
            [sizes, *(f"{name}={value}" for name, value in given.items() if value not in (None, "", (0, 0)))]
        )


# --- Draws ---------------------------------------------------------------------------------------------------------------


def draw_layer(rng: random.Random, experts: int, top_k: int) -> tuple[Sizes, dict[str, Any]]:
    """A layer of ``experts`` experts, and the options of `make_case`."""
    tokens = rng.choice([0, 1, *(rng.randint(2, 64),) * 3, *(rng.randint(65, 700),) * 4, rng.randint(701, 4000)])
    d, n = (8 * rng.choice([rng.randint(1, 12), rng.randint(8, 48), 8, 16, 32, 64]) for _ in range(2))
    pairs = tokens * top_k
    options = {
        "routing": rng.choice(ROUTINGS),
        "activation": rng.choice([*ACTIVATIONS, "swiglu", "swiglu", *OTHERS]),
        "biases": rng.random() < 0.3,
        "sentinels": rng.choice([0.0, 0.0, 0.0, 0.1, 0.6]),
        "varying": rng.random() < 0.2,
        "unit_weights": rng.random() < 0.3,
        "row_capacity": rng.choice([*[None] * 5, 0, pairs // 8, pairs // 2, max(0, pairs - 1), 2 * pairs]),
    }
    if rng.random() < 0.15:
        n = d  # then Y may lie over act
    more = random.Random(f"{tokens} {d} {n} {experts} {top_k}")
    share = 1.0 if options["activation"] in TRANSPOSED else 0.1  # of all others there would be thousands of kernels
    options["transposed"] = more.random() < 0.5 * share
    options["rank"] = more.choice([8, 24, 64, 136]) if more.random() < 0.8 * share else 0
    return Sizes(tokens, d, n, experts, top_k), options


def draw_products(seed: int) -> Layer:
    """A layer whose products are called one by one."""
    rng = random.Random(seed)
    experts = rng.choice(
        [1, 2, rng.randint(3, 16), rng.randint(3, 16), rng.randint(17, 64), rng.choice([96, 128, 512])]
    )
    elsewhere = experts <= 16 and rng.random() < 0.2  # most experts are: K may be larger than E
    top_k = rng.choice([k for k in (1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 16, 20) if elsewhere or k <= experts])
    sizes, inputs = draw_layer(rng, experts, top_k)
    return Layer(sizes, inputs, ranks=(inputs["rank"], inputs["rank"]))


def draw_experts(seed: int) -> Layer:
    """A call of ``moe_mlp``."""
    rng = random.Random(f"experts {seed}")
    sizes, inputs = draw_layer(rng, *rng.choice(EXPERTS))
    inputs["rank"] = 0  # of products alone
    ranks = (rng.choice(RANKS), rng.choice(RANKS))
    up, down = map(padded_rank, ranks)
    # About what a chunk needs, with float32 sums of a single expert's rows.
    bytes_per_token = 2 * sizes.K * (3 * sizes.n + sizes.d + 2 * up + 5 * down) + 2 * sizes.d
    chunks = rng.choice([None, 2, 3, 7])
    workspace_bytes = None if chunks is None or inputs["varying"] else bytes_per_token * (sizes.T // chunks + 1)
    options = {"save": rng.choice([*SavePolicy]).value, "workspace_bytes": workspace_bytes}
    drawn = 1.0 if ranks[1] else rng.random()
    options["combine"] = "fused_both" if drawn < 0.15 else "fused" if drawn < 0.3 else "gather"
    frozen = tuple(name for name in ("d_up", "d_down", "d_up_bias", "d_down_bias") if rng.random() < 0.3)
    return Layer(sizes, inputs, options, ranks, frozen)


def draw_fp8(seed: int) -> Layer:
    """A call of ``moe_mlp`` in fp8. Every other one has weights in float32."""
    rng = random.Random(f"fp8 {seed}")
    sizes, inputs = draw_layer(rng, *rng.choice(EXPERTS))
    inputs |= {"activation": rng.choice(FP8_ACTIVATIONS), "biases": False, "unit_weights": False}
    inputs |= {"transposed": False, "rank": 0}
    options = {"precision": "fp8", "save": rng.choice(["minimal", "recompute"])}
    sizes = sizes._replace(d=16 * rng.randint(1, 40), n=128 * rng.randint(1, 5))
    return Layer(sizes, inputs, options, f32=bool(seed % 2))


def draw_quantized(seed: int) -> Layer:
    """A layer of `draw_fp8`, perhaps with biases, low-rank factors, frozen weights or the other recipe."""
    layer, rng = draw_fp8(seed), random.Random(f"quantized {seed}")
    precision = rng.choice(["fp8", "fp8", "fp8_rollout"])
    sizes = layer.sizes._replace(d=128 * rng.randint(1, 5)) if precision == "fp8_rollout" else layer.sizes
    biases, ranks = rng.random() < 0.4, (rng.choice((0, *RANKS)), rng.choice((0, *RANKS)))
    frozen = tuple(name for name in ("d_up", "d_down") if rng.random() < 0.3)
    of: dict[str, Any] = {
        "inputs": layer.inputs | {"biases": biases},
        "options": layer.options | {"precision": precision},
    }
    return replace(layer, sizes=sizes, ranks=ranks, frozen=frozen, **of)


def on_ampere(layer: Layer) -> Layer:
    """A call of ``moe_mlp`` as ampere's kernels take it: `combine` sums its rows."""
    return replace(layer, options=layer.options | {"combine": "gather", "backend": "ampere"})


# --- A call of moe_mlp ---------------------------------------------------------------------------------------------------


def make_layer(layer: Layer, seed: int, device: str) -> tuple[Case, dict[str, Tensor]]:
    """The case, and the arrays of ``moe_mlp`` by their gradients' names, trained ones as leaves.

    Weights that lie transposed are so in the arrays alone: to ``moe_mlp`` a view, to the formulas nothing.
    """
    case = make_case(layer.sizes, **layer.inputs | {"transposed": False}, seed=seed, device=device)
    made = {"dx": case.x, "d_up": case.up_proj, "d_down": case.down_proj, "d_scores": case.scores}
    if layer.inputs.get("transposed"):
        made |= {name: made[name].mT.contiguous().mT for name in ("d_up", "d_down")}
    if layer.f32:
        made |= {name: made[name].float() for name in ("d_up", "d_down")}
    if case.up_bias is not None and case.down_bias is not None:
        made |= {"d_up_bias": case.up_bias, "d_down_bias": case.down_bias}
    generator = torch.Generator(device).manual_seed(seed)
    for name, rank in zip(("d_up", "d_down"), layer.ranks, strict=True):  # b a is of the size of a weight at 1/√fan-in
        E, width_out, width_in = made[name].shape
        for side, shape in {"a": (E, rank, width_in), "b": (E, width_out, rank)}.items() if rank else ():
            factor = torch.randn(shape, device=device, generator=generator).mul_(shape[2] ** -0.5)
            made[f"{name}_{side}"] = factor.bfloat16()
    return case, {name: each.detach().requires_grad_(name not in layer.frozen) for name, each in made.items()}


def factors_in(arrays: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """The low-rank factors among `make_layer`'s arrays, by the name of the weight that they are beside."""
    return {
        side: LowRank(arrays[f"d_{side}_a"], arrays[f"d_{side}_b"])
        for side in ("up", "down")
        if f"d_{side}_a" in arrays
    }


def run_layer(layer: Layer, case: Case, arrays: Mapping[str, Tensor], **others: Any) -> dict[str, Tensor]:
    """``out``, and the gradients of the leaves among the arrays by their names. others: options of ``moe_mlp``."""
    made = case.dispatch
    shape = (len(case.x), made.top_k) if made.top_k else (-1,)
    options = {"pair_tokens": made.pair_tokens, "token_offsets": made.token_offsets, "num_experts": made.num_experts}
    options |= {"activation": case.activation, "row_capacity": layer.inputs.get("row_capacity"), **layer.options}
    options |= {f"{side}_bias": arrays.get(f"d_{side}_bias") for side in ("up", "down")}
    options |= {f"{side}_factors": factors for side, factors in factors_in(arrays).items()}
    x, up, down, scores = (arrays[name] for name in ("dx", "d_up", "d_down", "d_scores"))
    out = moe_mlp(x, up, down, scores.view(shape), made.token_expert_indices.view(shape), **options | others)
    trained = {name: array for name, array in arrays.items() if array.requires_grad}
    gradients = torch.autograd.grad(out, [*trained.values()], case.d_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(trained, gradients, strict=True))}
