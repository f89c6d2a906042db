"""The tables and measured sentences of README and docs/*.md, made from results/. `plot_results.py` puts them there.

A page marks each place by `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between is replaced: by a table, which
stands between empty lines, or by a sentence, which stands in its paragraph. Where the results are missing, the text stays.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from scripts.bench.markdown import (
    LABELS,
    NOT_MEASURED,
    OURS,
    Record,
    dagger,
    layer_shape,
    markdown_table,
    measured_on,
    number,
    rows_measured_on,
    shape_of,
)
from scripts.bench.module_tables import module_claim, module_table, readme_table, router_table


def load(name: str, results: Path) -> Record | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


HOST_FIGURES = {
    "host_fwdbwd_without_dispatch_ms": "with autograd's thread",
    "host_fwdbwd_single_thread_ms": "in one thread",
    "host_fwdbwd_kernels_ms": "its kernels alone, allocated for and launched",
}


def backward_ms(figures: Record) -> float:
    return float(figures["gpu_fwdbwd_ms"] - figures["gpu_fwd_ms"])


def with_extra_note(table: str, record: Record, name: str) -> str:
    """An extra's table, with a note if it was measured with other sources than the rows of its file."""
    mark = record.get("extras_of_other_sources", {}).get(name)
    return f"{table}\n\nMeasured {mark['measured']}, sources `{mark['sources_sha256'][:12]}`." if mark else table


def layer_peers(record: Record) -> list[str]:
    """The peers in a record other than ours, in the order of LABELS."""
    return [name for name in LABELS if name != OURS and any(name in row["peers"] for row in record["rows"])]


def layer_table(record: Record) -> str:
    """Time by shape: ours and the peers, forward and backward, with the ratio to SonicMoE and to the floor."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "forward ms: ours", *(LABELS[name] for name in others), "floor"]
    header += ["backward ms: ours", *(LABELS[name] for name in others), "floor", "SonicMoE / ours: fwd", "fwd + bwd"]
    rows = []
    for row in record["rows"]:
        peers, ours = row["peers"], row["peers"][OURS]
        line = [layer_shape(row), f"**{number(ours['gpu_fwd_ms'])}**"]
        line += [number(peers[name]["gpu_fwd_ms"]) if name in peers else "–" for name in others]
        line += [number(row["floor_fwd_ms"]), f"**{number(backward_ms(ours))}**"]
        line += [number(backward_ms(peers[name])) if name in peers else "–" for name in others]
        line.append(number(row["floor_bwd_ms"]))
        for field in ("gpu_fwd_ms", "gpu_fwdbwd_ms"):
            line.append(number(peers["sonic"][field] / ours[field]) if "sonic" in peers else "–")
        rows.append(line)
    means = []
    for name in others:
        pairs = [(row["peers"][name], row["peers"][OURS]) for row in record["rows"] if name in row["peers"]]
        forward = statistics.geometric_mean([peer["gpu_fwd_ms"] / ours["gpu_fwd_ms"] for peer, ours in pairs])
        backward = statistics.geometric_mean([backward_ms(peer) / backward_ms(ours) for peer, ours in pairs])
        means.append(f"{LABELS[name]} {number(forward)}× forward, {number(backward)}× backward ({len(pairs)} shapes)")
    note = f"GPU time, ms. Times of ours, geometric means: {'; '.join(means)}. {rows_measured_on(record)}"
    return f"{markdown_table(header, rows)}\n\n{note}"


def layer_claim(record: Record) -> str:
    """On how many shapes the experts are faster than SonicMoE's, and how much memory they take; one sentence."""
    pairs = [(row["peers"][OURS], row["peers"]["sonic"]) for row in record["rows"] if "sonic" in row["peers"]]
    if not pairs:
        return NOT_MEASURED
    times = [sonic["gpu_fwdbwd_ms"] / ours["gpu_fwdbwd_ms"] for ours, sonic in pairs]
    peaks = [ours["peak_fwdbwd_MiB"] / sonic["peak_fwdbwd_MiB"] for ours, sonic in pairs]
    return (
        f"faster than SonicMoE's on {sum(time > 1 for time in times)} of {len(times)} shapes of both papers, "
        f"{number(statistics.geometric_mean(times))} times in the geometric mean ({number(min(times))} to "
        f"{number(max(times))}), at {number(statistics.geometric_mean(peaks))} of its peak memory "
        f"({number(min(peaks))} to {number(max(peaks))})"
    )


def eager_table(record: Record) -> str:
    """Eager time, host time included, of the same programs."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "forward ms: ours", *(LABELS[name] for name in others)]
    header += ["forward + backward ms: ours", *(LABELS[name] for name in others), "host ms of ours"]
    rows = []
    for row in record["rows"]:
        peers, names = row["peers"], [OURS, *others]
        line = [layer_shape(row)]
        line += [number(peers[name]["fwd_ms"]) if name in peers else "–" for name in names]
        line += [number(peers[name]["fwd_ms"] + peers[name]["bwd_ms"]) if name in peers else "–" for name in names]
        rows.append([*line, number(peers[OURS].get("host_fwdbwd_ms"))])
    known = [row["peers"][OURS] for row in record["rows"] if row["peers"][OURS].keys() >= HOST_FIGURES.keys()]
    note = rows_measured_on(record)
    if known:
        medians = [
            f"{what} {number(statistics.median(r[field] for r in known))}" for field, what in HOST_FIGURES.items()
        ]
        note += f" The host in a forward + backward of ours on a dispatch made beforehand, medians of {len(known)} shapes, ms: "
        note += f"{'; '.join(medians)}."
    return f"{markdown_table(header, rows)}\n\n{note}"


def memory_table(record: Record) -> str:
    """Saved and peak MiB by shape."""
    others = layer_peers(record)
    header = ["T, d, n, E, K", "saved MiB: ours", *(LABELS[name] for name in others)]
    header += ["peak MiB: ours", *(LABELS[name] for name in others)]
    rows = []
    for row in record["rows"]:
        line = [layer_shape(row)]
        for field in ("saved_MiB", "peak_fwdbwd_MiB"):
            line += [number(row["peers"][n][field], 0) if n in row["peers"] else "–" for n in (OURS, *others)]
        rows.append(line)
    means = []
    for name in others:
        pairs = [(row["peers"][OURS], row["peers"][name]) for row in record["rows"] if name in row["peers"]]
        ratios = [ours["peak_fwdbwd_MiB"] / peer["peak_fwdbwd_MiB"] for ours, peer in pairs]
        span = f"{number(min(ratios))} to {number(max(ratios))}"
        means.append(f"{number(statistics.geometric_mean(ratios))} of {LABELS[name]} ({span})")
    note = f"Our peak, geometric means: {'; '.join(means)}. " if means else ""
    return f"{markdown_table(header, rows)}\n\n{note}{rows_measured_on(record)}"


def workspace_table(record: Record) -> str:
    """Bounded workspaces: peak and time, from the same file as the layer's."""
    rows = []
    for row in record.get("workspace", []):
        for name, program in row["programs"].items():
            bound = program["workspace_bytes"]
            label = LABELS.get(name, f"blazeproto, workspace {number((bound or 0) / 2**20, 0)} MiB")
            ratios = [number(program["time_to_unbounded"]), number(program["peak_to_sonic"])]
            figures = [number(program["gpu_fwdbwd_ms"]), number(program["peak_fwdbwd_MiB"], 0)]
            rows.append([shape_of(row)[0], label, *figures, *ratios])
    header = ["T (d = n = 256, E = 128, K = 4)", "program", "forward + backward ms", "peak MiB"]
    header += ["time / unbounded", "peak / SonicMoE"]
    return with_extra_note(markdown_table(header, rows), record, "workspace")


def skew_table(record: Record) -> str:
    """Skewed routings over the uniform one's time, from the same file as the layer's."""
    rows = []
    for row in record.get("skew", []):
        line = [", ".join(shape_of(row)), number(row["uniform"]["gpu_fwdbwd_ms"])]
        for kind in ("zipf", "half_on_one"):
            line += [number(row[kind]["fwd_to_uniform"]), number(row[kind]["fwdbwd_to_uniform"])]
        rows.append(line)
    header = ["T, d, n, E, K", "uniform, fwd + bwd ms", "Zipf(1.2): fwd ×", "fwd + bwd ×"]
    header += ["half on one expert: fwd ×", "fwd + bwd ×"]
    return with_extra_note(markdown_table(header, rows), record, "skew")


def many_tokens(record: Record) -> str:
    """The largest batch that was run, one sentence."""
    if (row := record.get("four_million_tokens")) is None:
        return NOT_MEASURED
    return (
        f"{number(row['cfg']['T'], 0)} tokens at (d, n, E, K) = ({', '.join(shape_of(row)[1:])}): forward + backward "
        f"{number(row['fwdbwd_ms'])} ms, peak {number(row['peak_fwdbwd_MiB'], 0)} of the GPU's {number(row['gpu_MiB'], 0)} MiB"
    )


def gather_cost(record: Record) -> str:
    """Least speed of gathered rows over contiguous ones, products by rows and weight gradients apart; one sentence."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for row in record["rows"]:
        if row.get("gathered_to_plain_speed") is not None:
            speeds[row["product"].endswith("weight")].append(row["gathered_to_plain_speed"])
    if not all(speeds.values()):
        return NOT_MEASURED
    by_rows, weights = (min(found) for found in speeds.values())
    least = f"gathered rows reach at least {number(by_rows, 3)} of the speed of contiguous rows in the products by rows"
    return f"{least}, and at least {number(weights, 3)} in the weight gradients"


def products_table(record: Record) -> str:
    """Each product alone against torch's grouped_mm, gathered against contiguous, and its layer form against its floor."""
    rows = []
    for row in record["rows"]:
        times = [number(row.get(f"{version}_ms"), 3) for version in ("torch", "plain", "gathered", "layer")]
        ratios = [
            number(row.get(field)) for field in ("plain_to_torch_speed", "gathered_to_plain_speed", "layer_to_floor")
        ]
        rows.append([row["product"], ", ".join(shape_of(row)), *times, number(row["floor_ms"], 3), *ratios])
    header = ["product", "T, d, n, E, K", "torch grouped_mm", "plain store", "gathered", "in the layer", "floor"]
    header += ["speed to grouped_mm", "gathered to contiguous", "layer / floor"]
    return f"{markdown_table(header, rows)}\n\nms of GPU time. {measured_on(record)}"


DISPATCH_COLUMNS = {
    "torch_sort_ms": "torch.sort",
    "sort_ms": "CuPy sort",
    "paper_sort_ms": "MoEBlaze sorting (H100)",
    "paper_hash_ms": "MoEBlaze hash (H100)",
}


def dispatch_table(record: Record) -> str:
    """Dispatch builders by model: every column that ends in _ms, and the ratio to the floor. What the paper reports was
    measured on an H100, and its columns say so."""
    fields = [field for field in record["rows"][0] if field.endswith("_ms")]
    names = [DISPATCH_COLUMNS.get(field, field[:-3].replace("_", " ")) for field in fields]
    rows = []
    for row in record["rows"]:
        line = [str(row["name"]), *(str(row[key]) for key in "TEK"), *(number(row.get(f), 3) for f in fields)]
        rows.append([*line, number(row["tiled_ms"] / row["floor_ms"])])
    paper = (
        "; the columns marked H100 are the paper's own times (MoEBlaze, Table 3)" if "paper_sort_ms" in fields else ""
    )
    table = markdown_table(["model", "T", "E", "K", *names, "tiled / floor"], rows)
    return f"{table}\n\nms of GPU time{paper}. {measured_on(record)}"


def experts_growth(record: Record) -> str:
    """What a dispatch for the most experts takes over one for the fewest, one sentence."""
    rows = sorted(record.get("series", {}).get("E", []), key=lambda row: row["E"])
    if not rows:
        return NOT_MEASURED
    least, most = rows[0], rows[-1]
    return (
        f"A dispatch for {most['E']} experts takes {number(most['tiled_ms'] / least['tiled_ms'])} times one for "
        f"{least['E']} (T = {least['T']}, K = {least['K']})"
    )


def topk_table(record: Record) -> str:
    """The fused top-k against torch's."""
    rows = []
    for row in record.get("rows", [record]):
        ratios = [number(row["fused_ms"] / row["floor_ms"]), number(row["torch_ms"] / row["fused_ms"], 1)]
        times = [number(row[field], 3) for field in ("fused_ms", "torch_ms", "floor_ms")]
        rows.append([row["score"], row["dtype"], str(row["T"]), str(row["E"]), str(row["K"]), *times, *ratios])
    header = ["scores", "logits", "T", "E", "K", "fused ms", "torch ms", "floor ms", "fused / floor", "torch / fused"]
    return f"{markdown_table(header, rows)}\n\nms of GPU time; torch: its topk and softmax or sigmoid. {measured_on(record)}"


def small_dispatch_table(record: Record) -> str:
    """A dispatch of few tokens, where launching counts."""
    fields = ("gpu_us", "host_us", "host_us_allocating")
    rows = [[*(str(row[key]) for key in "TEK"), *(number(row[key], 1) for key in fields)] for row in record["small"]]
    table = markdown_table(["T", "E", "K", "GPU µs", "host µs, into arrays given", "host µs, allocating"], rows)
    return f"{table}\n\n{measured_on(record)}"


def rounding_table(record: Record) -> str:
    """Token rounding against plain top-k: model TFLOP/s of both, and the gain."""
    rows = []
    for row in record["rows"]:
        plain, rounded = row["top_k"], row["rounded"]
        line = [", ".join(shape_of(row)), number(100 * (plain["padded_rows"] / plain["rows"] - 1), 1)]
        for part in ("fwd", "bwd"):
            line += [number(figures[f"{part}_tflops"], 0) for figures in (plain, rounded)]
        rows.append(line + [number(row[f"{part}_gain"], 3) for part in ("fwd", "bwd", "fwdbwd")])
    header = ["T, d, n, E, K", "empty rows of tiles, %", "forward: top-k", "rounded", "backward: top-k", "rounded"]
    header += ["gain forward", "backward", "both"]
    return f"{markdown_table(header, rows)}\n\nModel TFLOP/s. {measured_on(record)}"


def rounding_layers_table(record: Record) -> str:
    """The same in whole layers: time with each router, and the gain in model TFLOP/s."""
    names = {"top_k": "top-k", "rounded": "rounded", "down": "DOWN", "up": "UP"}
    rows = []
    for row in record["rows"]:
        if (layers := row.get("layers")) is None:
            continue
        line = [", ".join(shape_of(row))]
        for part in ("gpu_fwd_ms", "gpu_fwdbwd_ms"):
            line += [number(layers[name][part]) for name in names]
        rows.append(line + [number(layers[f"{part}_gain"], 3) for part in ("fwd", "bwd", "fwdbwd")])
    if not rows:
        return NOT_MEASURED
    first, *others = names.values()
    header = ["T, d, n, E, K", f"forward ms: {first}", *others, f"forward + backward ms: {first}", *others]
    header += ["gain forward", "backward", "both"]
    return f"{markdown_table(header, rows)}\n\nGPU time; gain: model TFLOP/s, rounded over top-k. {measured_on(record)}"


def training_table(record: Record) -> str:
    """One preset of scripts/train_lm.py: its model, its length and where it ended."""
    summary, config = record["summary"], record["config"]
    row = [summary["device"], ", ".join(str(config[key]) for key in ("d_model", "d_expert", "num_experts", "top_k"))]
    row += [number(summary["parameters"] / 1e6, 1), str(summary["steps"])]
    row += [number(summary["seconds"], 0), number(summary["val_loss"], 3)]
    header = ["device", "d, n, E, K", "parameters, millions", "steps", "seconds", "validation loss, nats a byte"]
    origin = measured_on({"gpu": record.get("machine"), **record})
    return f"{markdown_table(header, [row])}\n\n{origin}"


PARTS = {  # of integrations.json
    "qwen": "training step of Qwen3-MoE, 4 layers",
    "gpt_oss": "gpt-oss's experts, forward + backward",
}


def integrations_table(record: Record) -> str:
    """Our experts beside transformers' grouped_mm, by part: milliseconds, and peak memory."""
    rows = []
    for part, label in PARTS.items():
        if (row := record["parts"].get(part)) is not None:
            ours, theirs = (row["ms"][name] for name in (OURS, "grouped_mm"))
            peak = row["peak_MiB"][OURS] / row["peak_MiB"]["grouped_mm"]
            marked = label + (" †" if "other_sources" in row else "")
            rows.append([marked, f"**{number(ours)}**", number(theirs), number(theirs / ours), number(peak)])
    header = ["", "blazeproto, ms", "grouped_mm, ms", "grouped_mm / ours", "peak memory, ours / grouped_mm"]
    notes = dagger(row["other_sources"] for row in record["parts"].values() if "other_sources" in row)
    return f"{markdown_table(header, rows)}\n\n{measured_on(record)} {notes}".rstrip()


LORA = {  # programs of lora.json
    "lora": "`moe_mlp_lora`",
    "wrapped": "the same through peft's wrappers",
    "full": "`moe_mlp`, all weights trained",
    "peft": "peft on transformers' `grouped_mm`",
}


def lora_table(record: Record) -> str:
    """Frozen experts with low-rank factors beside full fine-tuning and peft: milliseconds, and peak memory."""
    [row] = record["rows"]
    rows = []
    for name, label in LORA.items():
        if both := row.get(f"{name}_fwdbwd_ms"):
            figures = (row[f"{name}_fwd_ms"], both, both / row["lora_fwdbwd_ms"])
            rows.append([label, *map(number, figures), number(row[f"{name}_peak_fwdbwd_MiB"], 0)])
    header = ["", "forward, ms", "forward + backward, ms", "of `moe_mlp_lora`'s", "peak memory, MiB"]
    return f"{markdown_table(header, rows)}\n\n{measured_on(record)}"


# name of a table -> (results file, what makes it)
TABLES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "readme": ("module", readme_table),
    "module": ("module", module_table),
    "router": ("router", router_table),
    "layer": ("layer", layer_table),
    "eager": ("layer", eager_table),
    "memory": ("layer", memory_table),
    "workspace": ("layer", workspace_table),
    "skew": ("layer", skew_table),
    "products": ("products", products_table),
    "dispatch": ("dispatch", dispatch_table),
    "small_dispatch": ("dispatch", small_dispatch_table),
    "topk": ("topk", topk_table),
    "rounding": ("rounding", rounding_table),
    "rounding_layers": ("rounding", rounding_layers_table),
    "integrations": ("integrations", integrations_table),
    "lora": ("lora", lora_table),
    "train": ("train", training_table),
    "train_cpu": ("../cpu/train", training_table),
}

# name of a sentence -> (results file, what makes it)
SENTENCES: dict[str, tuple[str, Callable[[Record], str]]] = {
    "module_claim": ("module", module_claim),
    "layer_claim": ("layer", layer_claim),
    "many_tokens": ("layer", many_tokens),
    "gather_cost": ("products", gather_cost),
    "experts_growth": ("dispatch", experts_growth),
}


MARKED = re.compile(r"<!-- results:(?P<name>\S+) -->.*?<!-- /results:(?P=name) -->", flags=re.DOTALL)


def fill(text: str, results: Path) -> str:
    """The text with every marked table and sentence made from the results. Doing it twice changes nothing.

    ValueError: a marker names neither a table nor a sentence.
    """

    def replacement(found: re.Match[str]) -> str:
        name = found["name"]
        known = TABLES | SENTENCES
        if name not in known:
            raise ValueError(f"results marker: expected one of {', '.join(known)}, got {name!r}")
        file, make = known[name]
        record = load(file, results)
        if record is None:
            return found[0]
        space = "\n\n" if name in TABLES else ""
        return f"<!-- results:{name} -->{space}{make(record)}{space}<!-- /results:{name} -->"

    return MARKED.sub(replacement, text)
