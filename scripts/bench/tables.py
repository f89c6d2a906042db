"""The tables that are plain columns of a results file: one entry each, by the name of its marker."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from blazeproto.gemm.recipe import FP8
from scripts.bench.distributed_tables import dispatcher, over_one_gpu
from scripts.bench.fp8_tables import saved_inside, weights_of
from scripts.bench.markdown import (
    LABELS,
    OURS,
    SHAPE,
    Entry,
    Record,
    Sentence,
    Source,
    Table,
    each_of,
    gpus_of,
    look_up,
    number,
    plain_shape,
    rows_of,
    shape_of,
)

PEERS = ("torch", "sonic-moe", "quack-kernels")  # whose versions stand under tables of layers
GAINS: list[Entry] = [("gain forward", "fwd_gain", 3), ("backward", "bwd_gain", 3), ("both", "fwdbwd_gain", 3)]
TEK: list[Entry] = [(key, key, None) for key in "TEK"]
DISPATCHES = {
    "torch_sort_ms": "torch.sort",
    "sort_ms": "CuPy sort",
    "paper_sort_ms": "MoEBlaze sorting (H100)",
    "paper_hash_ms": "MoEBlaze hash (H100)",
}
LORA = {  # programs of lora.json
    "lora": "`moe_mlp` with factors, weights frozen",
    "wrapped": "the same through peft's wrappers",
    "full": "`moe_mlp`, all weights trained",
    "peft": "peft on transformers' `grouped_mm`",
}
OVER_BEST = f"best.{OURS}.tokens_per_s / best.grouped_mm.tokens_per_s"  # of integrations.json's steps


# ------------------------------------------------------------------------------------------------ rows that are derived


def workspaces(record: Record) -> list[Record]:
    """A row for each program of each shape."""
    return [
        {"cfg": row["cfg"], "of": row["of"], "name": name, **program}
        for row in record.get("workspace", [])
        for name, program in row["programs"].items()
    ]


def experts_alone(record: Record) -> list[Record]:
    return [row | {"label": "gpt-oss's experts, forward + backward"} for row in rows_of("gpt_oss", record["parts"])]


def whole_steps(record: Record) -> list[Record]:
    return rows_of("steps", record.get("parts", {}))


def percent_apart(field: str, result: str, row: Record) -> float:
    return 100 * float(row[field][result])


def trained_with_factors(record: Record) -> list[Record]:
    """A row for each program that has run."""
    [row] = record["rows"]
    fields = ("fwd_ms", "fwdbwd_ms", "peak_fwdbwd_MiB")
    return [
        {"label": label, "of": row["of"], "first": row["lora_fwdbwd_ms"]}
        | {field: row[f"{name}_{field}"] for field in fields}
        for name, label in LORA.items()
        if row.get(f"{name}_fwdbwd_ms")
    ]


def stored_layers(part: str) -> Callable[[Record], list[Record]]:
    """The rows of a part of stored.json, each with a label."""

    def rows(record: Record) -> list[Record]:
        return [
            row
            | {"label": f"({', '.join(map(str, row['cfg'].values()))})", "how": f"{row['format']}, {row['backend']}"}
            for row in record.get(part, [])
        ]

    return rows


def fp8_peers(record: Record) -> list[Record]:
    """The layers, with the products' speeds at the same sizes."""
    tflops = {str(row["cfg"]): row["tflops"] for row in record["products"]}
    return [row | {"tflops": tflops.get(str(row["cfg"]))} for row in record["rows"]]


# ----------------------------------------------------------------------------------------------------- cells and notes


def workspace_label(row: Record) -> str:
    return LABELS.get(row["name"], f"blazeproto, workspace {number((row['workspace_bytes'] or 0) / 2**20, 0)} MiB")


def scientific(*keys: str) -> Source:
    """The error that a row of the router has there; a dash where it has none."""

    def cell(row: Record) -> str:
        found = row
        for key in keys:
            found = found.get(key, {})
        return f"{found:.1e}" if found else number(None)

    return cell


def other_choices(row: Record) -> str:
    found = [row["accuracy"][how] for how in ("plain", "autocast")]
    return f"{sum(each['other_tokens'] for each in found)} of {sum(each['tokens'] for each in found)}"


def dispatch_entries(rows: list[Record]) -> list[Entry]:
    """Every time that the rows have, and the ratio to the floor."""
    times = [field for field in rows[0] if field.endswith("_ms")]
    named: list[Entry] = [(DISPATCHES.get(each, each[:-3].replace("_", " ")), each, 3) for each in times]
    return [("model", "name"), *TEK, *named, ("tiled / floor", "tiled_ms / floor_ms")]


def dispatch_note(rows: list[Record]) -> str:
    printed = "; the columns marked H100 are the paper's own times (MoEBlaze, Table 3)"
    return f"ms of GPU time{printed if 'paper_sort_ms' in rows[0] else ''}."


def not_compiled(_: Record, rows: list[Record]) -> str:
    """The compilations that failed, or how to measure."""
    if not rows:
        return "`python -m scripts.bench.integrations --parts steps` measures them."
    failed = [(row["model"], row["tuning"], *each) for row in rows for each in row["refused"].items()]
    return " ".join(f"Failed, {model}, {tuning}: {program} ({why})." for model, tuning, program, why in failed)


def steps_claim(rows: list[Record]) -> str:
    """Our tokens/s over grouped_mm's by model, full fine-tuning and LoRA, each by its best setting; part of a sentence."""
    found = {(row["model"], row["tuning"]): number(look_up(row, OVER_BEST)) for row in rows}
    said = [
        f"{model} {over} (LoRA {found.get((model, 'LoRA'), number(None))})"
        for (model, tuning), over in found.items()
        if tuning == "full"
    ]
    return f"{', '.join(said)}, on one {gpus_of(rows)}" if said else ""


def attention_note(rows: list[Record]) -> str:
    cfg = rows[0]["cfg"]
    shape = ", ".join(str(cfg[key]) for key in ("layers", "d", "n", "E", "K"))
    size = f"{cfg['sequences']} sequences of {cfg['T'] // cfg['sequences']} bytes"
    return f"Forward and backward of {size}; layers, d, n, E, K = {shape}."


# ---------------------------------------------------------------------------------------------------------- the tables

TRAIN = Table(
    "train",
    [
        ("device", "summary.device", None),
        ("d, n, E, K", lambda row: ", ".join(str(row["config"][k]) for k in ("d_model", "d_expert", "num_experts", "top_k"))),
        ("parameters, millions", lambda row: row["summary"]["parameters"] / 1e6, 1),
        ("steps", "summary.steps", None),
        ("seconds", "summary.seconds", 0),
        ("validation loss, nats a byte", "summary.val_loss", 3),
    ],
    rows=lambda record: [record],
)  # fmt: skip

TABLES = {
    "workspace": Table(
        "layer",
        [
            ("T (d = n = 256, E = 128, K = 4)", lambda row: shape_of(row)[0]),
            ("program", workspace_label),
            ("forward + backward ms", "gpu_fwdbwd_ms"),
            ("peak MiB", "peak_fwdbwd_MiB", 0),
            ("time / unbounded", "time_to_unbounded"),
            ("peak / SonicMoE", "peak_to_sonic"),
        ],
        rows=workspaces,
        packages=PEERS,
    ),
    "skew": Table(
        "layer",
        [
            SHAPE,
            ("uniform, fwd + bwd ms", "uniform.gpu_fwdbwd_ms"),
            ("Zipf(1.2): fwd ×", "zipf.fwd_to_uniform"),
            ("fwd + bwd ×", "zipf.fwdbwd_to_uniform"),
            ("half on one expert: fwd ×", "half_on_one.fwd_to_uniform"),
            ("fwd + bwd ×", "half_on_one.fwdbwd_to_uniform"),
        ],
        rows="skew",
        packages=(),
    ),
    "products": Table(
        "products",
        [
            ("product", "product"),
            SHAPE,
            ("torch grouped_mm", "torch_ms", 3),
            ("plain store", "plain_ms", 3),
            ("gathered", "gathered_ms", 3),
            ("in the layer", "layer_ms", 3),
            ("floor", "floor_ms", 3),
            ("speed to grouped_mm", "plain_to_torch_speed"),
            ("gathered to contiguous", "gathered_to_plain_speed"),
            ("layer / floor", "layer_to_floor"),
        ],
        "ms of GPU time.",
    ),
    "router": Table(
        "router",
        [
            ("T, d, E, K", lambda row: ", ".join(str(row["cfg"][key]) for key in "TdEK")),
            ("router weight", "weight"),
            ("forward ms", "fwd_ms", 3),
            ("floor", "floor_fwd_ms", 3),
            ("forward + backward ms", "fwdbwd_ms", 3),
            ("floor", "floor_fwdbwd_ms", 3),
            ("error of logits", scientific("accuracy", "plain", "logits")),
            ("torch's in fp32", scientific("torch_fp32_logits")),
            ("of dX", scientific("accuracy", "plain", "dX")),
            ("of dW", scientific("accuracy", "plain", "dW")),
            ("tokens that chose otherwise than float64", other_choices),
        ],
        "GPU time. Errors: norm of the difference from float64 over its norm; dX is bf16, dW has the weight's type.",
    ),
    "dispatch": Table("dispatch", dispatch_entries, dispatch_note),
    "small_dispatch": Table(
        "dispatch",
        [
            *TEK,
            ("GPU µs", "gpu_us", 1),
            ("host µs, into arrays given", "host_us", 1),
            ("host µs, allocating", "host_us_allocating", 1),
        ],
        rows="small",
        packages=(),
    ),
    "topk": Table(
        "topk",
        [
            ("scores", "score"),
            ("logits", "dtype"),
            *TEK,
            *each_of({name: f"{name} ms" for name in ("fused", "torch", "floor")}, "{}_ms", 3),
            ("fused / floor", "fused_ms / floor_ms"),
            ("torch / fused", "torch_ms / fused_ms", 1),
        ],
        "ms of GPU time; torch: its topk and softmax or sigmoid.",
    ),
    "rounding": Table(
        "rounding",
        [
            SHAPE,
            *each_of({"top_k": "forward ms: top-k", "rounded": "rounded", "down": "DOWN", "up": "UP"}, "{}.gpu_fwd_ms"),
            *each_of(
                {"top_k": "forward + backward ms: top-k", "rounded": "rounded", "down": "DOWN", "up": "UP"},
                "{}.gpu_fwdbwd_ms",
            ),
            *GAINS,
        ],
        "GPU time; gain: model TFLOP/s, rounded over top-k.",
        packages=(),
    ),
    "few_tokens": Table(
        "few_tokens",
        [
            ("T", "cfg.T", 0),
            ("experts drawn", "experts", 0),
            ("floor, µs", "floor_us", 1),
            ("forward, µs", "forward_us", 1),
            ("over the floor", "over_floor"),
        ],
        "GPU time by graph replay.",
        packages=(),
    ),
    "integrations": Table(
        "integrations",
        [
            ("", "label"),
            ("blazeproto, ms", f"ms.{OURS}"),
            ("grouped_mm, ms", "ms.grouped_mm"),
            ("grouped_mm / ours", f"ms.grouped_mm / ms.{OURS}"),
            ("peak memory, ours / grouped_mm", f"peak_MiB.{OURS} / peak_MiB.grouped_mm"),
        ],
        rows=experts_alone,
        packages=("torch", "transformers"),
    ),
    "whole_steps": Table(
        "integrations",
        [
            ("model", "model"),
            ("trained", "tuning"),
            ("layers", "cfg.num_hidden_layers", 0),
            ("tokens", lambda row: row["cfg"]["sequences"] * row["cfg"]["tokens"], 0),
            *(
                (
                    f"{name}, tokens/s: eager" if setting == "eager" else setting,
                    f"programs.{name}.{setting}.tokens_per_s",
                    0,
                )
                for name in (OURS, "grouped_mm")
                for setting in ("eager", "compiled")
            ),
            ("best setting: blazeproto", f"best.{OURS}.setting", None),
            ("grouped_mm", "best.grouped_mm.setting", None),
            ("tokens/s of the best, ours / grouped_mm", OVER_BEST),
            ("peak MiB of the best: blazeproto", f"best.{OURS}.peak_MiB", 0),
            ("grouped_mm", "best.grouped_mm.peak_MiB", 0),
        ],
        rows=whole_steps,
        packages=("torch", "transformers", "peft"),
        after=not_compiled,
    ),
    "lora": Table(
        "lora",
        [
            ("", "label"),
            ("forward, ms", "fwd_ms"),
            ("forward + backward, ms", "fwdbwd_ms"),
            ("forward + backward / first row", "fwdbwd_ms / first"),
            ("peak memory, MiB", "peak_fwdbwd_MiB", 0),
        ],
        rows=trained_with_factors,
        packages=("torch", "transformers", "peft"),
    ),
    "stored": Table(
        "stored",
        [
            ("layer (T, d, n, E, K)", "label"),
            ("format, backend", "how"),
            ("bf16, ms", "bf16_ms", 2),
            ("stored, ms", "stored_ms", 2),
            ("stored / bf16", "stored_ms / bf16_ms", 2),
            ("weights, MiB: bf16", "bf16_weights_MiB", 0),
            ("stored", "stored_weights_MiB", 0),
            ("peak beside them, MiB: bf16", "bf16_peak_MiB", 0),
            ("stored", "stored_peak_MiB", 0),
        ],
        rows=stored_layers("training"),
    ),
    "stored_few": Table(
        "stored",
        [
            ("layer (T, d, n, E, K)", "label"),
            ("format, backend", "how"),
            ("bf16, µs", "bf16_us", 1),
            ("stored, µs", "stored_us", 1),
            ("stored / bf16", "stored_us / bf16_us", 2),
        ],
        rows=stored_layers("few"),
    ),
    "finetune_stored": Table(
        "finetune_stored",
        [
            ("model", "model"),
            ("backend", "backend"),
            ("tokens", "tokens", 0),
            ("loss, first step", "first_loss", 2),
            ("last", "last_loss", 2),
            ("tokens/s", "tokens_per_s", 0),
            ("peak allocated, GiB", "allocated_GiB", 1),
            ("reserved, GiB", "reserved_GiB", 1),
        ],
    ),
    "attention_tiles": Table(
        "attention_tiles",
        [
            ("G", "tiles", 0),
            ("ms", "tiled_ms", 1),
            ("saved, MiB", "tiled_saved_MiB", 0),
            ("peak, MiB", "tiled_peak_MiB", 0),
            ("G micro-batches, ms", "micro_ms", 1),
            ("saved, MiB", "micro_saved_MiB", 0),
            ("peak, MiB", "micro_peak_MiB", 0),
        ],
        attention_note,
    ),
    "clock": Table(
        "clock",
        [
            *((letter, f"cfg.{letter}", None) for letter in "dEKn"),
            ("parameters, millions: MoE", lambda row: row["parameters"]["moe"] / 1e6, 0),
            ("dense", lambda row: row["parameters"]["dense"] / 1e6, 0),
            ("a step, ms: MoE", "eager_ms.moe", 1),
            ("dense", "eager_ms.dense", 1),
            ("MoE / dense", "eager"),
            ("MoE / dense by CUDA graph", "graph"),
            ("the host in a step, ms: MoE", "host_ms.moe", 1),
            ("dense", "host_ms.dense", 1),
            ("kernels, MoE minus dense, ms: products", "more_ms.products", 1),
            ("router, dispatch, combine", "more_ms.routing", 1),
            ("optimizer, clipping", "more_ms.optimizer", 1),
            ("casts", "more_ms.casts", 1),
            ("rest", "more_ms.rest", 1),
        ],
        "8 layers, 32 sequences of 1024 bytes a step.",
    ),
    "train": TRAIN,
    "train_cpu": replace(TRAIN, file="../cpu/train"),
    "weak_scaling": Table(
        "distributed",
        [
            ("mode", "mode"),
            ("GPUs", "gpus", 0),
            ("tokens/s a GPU", "tokens_per_s_per_gpu", 0),
            ("one GPU alone", "tokens_per_s_alone", 0),
            ("efficiency", "efficiency", 3),
        ],
        rows="weak_scaling",
    ),
    "rank_losses": Table(
        "distributed",
        [
            ("mode", "mode"),
            ("GPUs", "gpus", 0),
            ("steps", "steps", 0),
            ("largest difference of the smoothed losses, %", lambda row: 100 * row["largest_difference"]),
            ("at step", "step", 0),
        ],
        rows="losses",
    ),
    "expert_parallel": Table(
        "distributed",
        [
            ("T of a rank, d, n, E, K", plain_shape),
            ("GPUs", "gpus", 0),
            ("dispatcher", dispatcher),
            ("forward, TFLOP/s a GPU", "fwd_tflops", 0),
            ("backward", "bwd_tflops", 0),
            ("out, GB/s", "dispatch_gbps", 0),
            ("back", "combine_gbps", 0),
            ("peak MiB", "peak_MiB", 0),
            ("peak over one GPU's", "of_one"),
        ],
        rows=over_one_gpu,
    ),
    "fp8_ranks": Table(
        "fp8_ranks",
        [
            ("T of a rank, d, n, E, K", plain_shape),
            ("GPUs", "gpus", 0),
            ("fwd ms: bf16", "bf16_fwd_ms"),
            ("fp8", "fp8_fwd_ms"),
            ("fwd + bwd ms: bf16", "bf16_fwdbwd_ms"),
            ("fp8", "fp8_fwdbwd_ms"),
            ("bf16 / fp8", "bf16_fwdbwd_ms / fp8_fwdbwd_ms"),
            *(
                (f"from one GPU's {name}, %: out" if of == "out" else of, partial(percent_apart, f"{name}_apart", of))
                for name in ("bf16", "fp8")
                for of in ("out", "dx", "d_up", "d_down")
            ),
        ],
    ),
    "fp8_layers": Table(
        "fp8",
        [
            SHAPE,
            ("two micro-batches, ms: bf16", "bf16_2_ms"),
            ("fp8", "fp8_2_ms"),
            ("bf16 / fp8", "bf16_2_ms / fp8_2_ms"),
            ("one, ms: bf16", "bf16_1_ms"),
            ("fp8", "fp8_1_ms"),
            ("bf16 / fp8", "bf16_1_ms / fp8_1_ms"),
            ('one, `keep_quantized="used"`', "fp8_used_1_ms"),
            ("fwd ms: bf16", "bf16_fwd_ms"),
            ("fp8", "fp8_fwd_ms"),
        ],
    ),
    "fp8_ways": Table(
        "fp8",
        [
            SHAPE,
            ("weights, 10^9", weights_of),
            ("GB of one micro-batch: a pass", lambda row: 6 * weights_of(row)),
            ("inside", lambda row: 4 * weights_of(row)),
            ("less, ms", saved_inside),
            ("of the step", lambda row: saved_inside(row) / row["fp8_1_ms"]),
        ],
    ),
    "fp8_peaks": Table(
        "fp8",
        [
            SHAPE,
            ("peak MiB of two micro-batches: bf16", "bf16_2_peak_MiB", 0),
            ("fp8 without what is kept", lambda row: row["fp8_2_peak_MiB"] - row["kept_MiB"], 0),
            ("kept", "kept_MiB", 0),
            ('fp8, `keep_quantized="used"`', "fp8_used_2_peak_MiB", 0),
        ],
    ),
    "fp8_in_a_row": Table(
        "fp8",
        [
            SHAPE,
            ("layers", "layers", 0),
            ("saved MiB: bf16", "bf16_saved_MiB", 0),
            ("fp8", "fp8_saved_MiB", 0),
            ("fp8, `keep_transposed=False`", "fp8_each_saved_MiB", 0),
            ("peak MiB: bf16", "bf16_peak_MiB", 0),
            ("fp8", "fp8_peak_MiB", 0),
            ("fp8, `keep_transposed=False`", "fp8_each_peak_MiB", 0),
            ("fwd + bwd ms: bf16", "bf16_fwdbwd_ms"),
            ("fp8", "fp8_fwdbwd_ms"),
            ("fp8, `keep_transposed=False`", "fp8_each_fwdbwd_ms"),
        ],
        rows="in_a_row",
    ),
    "fp8_products": Table(
        "fp8",
        [
            SHAPE,
            *(
                (f"{name}: bf16" if precision == "bf16" else "fp8", f"tflops.{name} {precision}", 0)
                for name in FP8.products
                for precision in ("bf16", "fp8")
            ),
        ],
        rows="products",
    ),
    "fp8_peers": Table(
        "fp8_peers",
        [
            SHAPE,
            *(
                (f"fwd + bwd ms: {name}", f"fwdbwd_ms.{name}")
                for name in ("ours bf16", "ours fp8", "torch grouped_mm bf16", "torchao fp8")
            ),
            *((f"DeepGEMM, TFLOP/s: {name}", f"tflops.{name}", 0) for name in ("up", "down")),
        ],
        rows=fp8_peers,
        packages=lambda record: (
            "torch",
            "torchao",
            *["sgl-deep-gemm"] * any(row["tflops"] for row in record["products"]),
        ),
        only_measured=True,
    ),
}

SENTENCES = {"steps_claim": Sentence("integrations", steps_claim, whole_steps)}
