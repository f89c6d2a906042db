"""The kernels for few rows of an expert: bits and time. On one H200:  PYTHONPATH=$PWD python3 .gpu_few.py [SECONDS]

SECONDS: all that it may take, 60 by default; compiling is part of it. Every line is printed as soon as it is known.

    discover    a process without a GPU walks through all layers on a stand-in and prints which kernels they launch
    compile     processes compile these meanwhile; PTX of ampere kernels becomes machine code by the driver's own linker
    1 bits      random layers of few rows, with LoRA in every second: stored on either backend against decoded bf16 on hopper
    3 few       forward by graph replay, T = 1, 8, 64: bf16 and each format
    4 sweep     MXFP4 with other loads under way and CTAs a multiprocessor, as long as time is left
    5 rule      forward with more rows: the kernels for few, Ampere's others, and those with a ring
"""

import ctypes
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

BEGAN = float(os.environ.setdefault("GPU_FEW_BEGAN", str(time.time())))
WORK = Path(os.environ.get("GPU_FEW_WORK") or tempfile.mkdtemp(prefix="gpu_few_"))
os.environ["GPU_FEW_WORK"] = str(WORK)
os.environ.setdefault("BLAZEPROTO_CACHE", str(WORK / "cache"))
os.environ.setdefault("CUDA_CACHE_PATH", str(WORK / "driver"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
BUDGET = float(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1][0].isdigit() else 60.0
FORMATS = ("mxfp4", "nf4", "int4", "fp8")
TIMED = ("mxfp4", "nf4", "fp8")
RANK, LAYERS = 16, 20
SHAPES = ((32768, 2048, 768, 128, 8), (16384, 2880, 2880, 128, 4), (16384, 4096, 1536, 128, 8))  # T, d, n, E, K
TOKENS = (1, 8, 64)
CALLS, SETS = 8, 2  # of one graph, and weights that its calls take in turn, so that none lies in L2
ACTIVATIONS = ("swiglu", "alternating(clamped_swiglu)")
COPY_RATE = 4.3e12  # bytes a second
TABLE: list[str] = []


def say(*words: object, table: bool = False) -> None:
    line = " ".join(map(str, words))
    print(f"[{time.time() - BEGAN:6.1f}] {line}", flush=True)
    if table:
        TABLE.append(line)


def left() -> float:
    return BUDGET - (time.time() - BEGAN)


# ------------------------------------------------------------------------------------------------------------- layers


def layers() -> list[dict]:
    """Random layers, the same for every format; d and n are multiples of 64, or of 32 where a format's blocks allow it."""
    made = []
    for seed in range(LAYERS):
        draw = random.Random(seed)
        experts = draw.choice((3, 5, 8, 16, 40))
        made.append(
            {
                "seed": seed,
                "T": draw.choice((1, 2, 5, 17, 40, 64, 100)),
                "d": 64 * draw.choice((1, 2, 3, 4, 5, 6, 8, 12, 17)),
                "n": 64 * draw.choice((1, 2, 3, 4, 5, 7, 9)),
                "E": experts,
                "K": draw.randint(1, min(experts, 4)),
                "idle": draw.choice((0, 0, 1, experts // 2)),
                "bias": draw.random() < 0.5,
                "activation": ACTIVATIONS[seed % 2],
                "save": draw.choice(("minimal", "minimal", "recompute", "paper")),
                "odd": draw.random() < 0.4,  # 32 columns less, where blocks allow it
                "zeros": draw.random() < 0.5,  # of int4
                "poison": draw.random() < 0.7,  # scales of experts without rows become NaN
            }
        )
    return made


def fitted(layer: dict, fmt: str) -> dict:
    """The layer for a format: block, d and n."""
    d, n = layer["d"], layer["n"]
    if fmt in ("mxfp4", "int4") and layer["odd"]:
        d, n = d - 32, n - 32
    return layer | {"d": d, "n": n, "block": block_of(fmt, d, n)}


def block_of(fmt: str, d: int, n: int) -> tuple[int, int]:
    wide = d % 128 == n % 128 == 0
    return {"mxfp4": (1, 32), "nf4": (1, 64), "int4": (1, 32), "fp8": (128, 128) if wide else (64, 64)}[fmt]


# ---------------------------------------------------------------------------------------------------------- discovery


def discover() -> None:
    """Prints a kernel a line as it is met: phase, and what it is made again from."""
    import math
    from unittest.mock import patch

    import numpy as np
    import torch

    from blazeproto import stored
    from blazeproto.autograd import LowRank, moe_mlp
    from blazeproto.gemm import stored as st
    from blazeproto.gemm.compile import Kernel
    from scripts.bench.identity import described
    from scripts.checks.stand_in import launches

    told: set[str] = set()
    bf16 = {"dtype": torch.bfloat16}

    def empty_stored(fmt: str, shape: tuple[int, int, int], block: tuple[int, int], zeros: bool) -> object:
        experts, out, width = shape
        scales = experts, out // block[0], width // block[1]
        if fmt == "fp8":
            return stored.StoredWeight(
                f"fp8 {block[0]} {block[1]}", torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.zeros(scales)
            )
        dtype = {"mxfp4": torch.uint8, "nf4": torch.float32, "int4": torch.bfloat16}[fmt]
        values, points = torch.zeros(experts, out, width // 2, dtype=torch.uint8), None
        if zeros:
            points = torch.zeros(experts, out // 8, width // block[1], dtype=torch.int32)
        return stored.StoredWeight(f"{fmt} {block[0]} {block[1]}", values, torch.zeros(scales, dtype=dtype), points)

    def walk(phase: int, backend: str, at: dict, fmt: str | None, *, lora: bool = False) -> None:
        T, d, n, E, K = (at[name] for name in "TdnEK")
        shapes = (E, 2 * n, d), (E, d, n)
        weights = [
            torch.zeros(s, **bf16)
            if fmt is None
            else empty_stored(fmt, s, at["block"], fmt == "int4" and at.get("zeros", False))
            for s in shapes
        ]
        leaf = partial(torch.zeros, **bf16)
        x, scores = leaf(T, d), torch.zeros(T, K)
        given = {}
        if lora:
            given = {
                name: LowRank(leaf(E, RANK, s[2]), leaf(E, s[1], RANK))
                for name, s in zip(("up_factors", "down_factors"), shapes, strict=True)
            }
        if at.get("bias"):
            given |= {"up_bias": torch.zeros(E, 2 * n, **bf16), "down_bias": torch.zeros(E, d, **bf16)}
        ids = torch.arange(K, dtype=torch.int32).expand(T, K).contiguous()
        with torch.no_grad():
            moe_mlp(
                x, *weights, scores, ids, num_experts=E, backend=backend,
                activation=at.get("activation", "swiglu"), save=at.get("save", "minimal"), **given,
            )  # fmt: skip
        for kernel in seen.kernels:
            is_nvrtc = isinstance(kernel, Kernel)
            line = json.dumps([phase, kernel.arch.name if is_nvrtc else "", described(kernel)], sort_keys=True)
            key = line.partition(",")[2]
            if key not in told:
                told.add(key)
                print(line, flush=True)
        seen.kernels.clear()

    def lazily(real: object) -> object:
        """Zeros whose pages nobody has touched."""

        def zeros(*given: object, dtype: object = None, requires_grad: bool = False, **_: object) -> torch.Tensor:
            like = given[0] if isinstance(given[0], torch.Tensor) else None
            shape = like.shape if real == "zeros_like" else given[real == "new_zeros" :]
            shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            dtype = dtype or (torch.float32 if like is None else like.dtype)
            buffer = np.zeros(max(1, math.prod(shape)) * dtype.itemsize, np.uint8)
            made = torch.from_numpy(buffer).view(dtype)[: math.prod(shape)].view(tuple(shape))
            return made.requires_grad_() if requires_grad else made

        return zeros

    for owner, name in ((torch, "zeros"), (torch, "zeros_like"), (torch.Tensor, "new_zeros")):
        setattr(owner, name, lazily(name))

    with launches() as seen:

        def code_for(kernel: Kernel, _: int) -> tuple:
            seen.kernels.append(kernel)
            return b"", kernel.entry, 0

        with patch.object(Kernel, "_code_for", code_for):
            done = set()
            for layer in layers():
                for fmt in FORMATS:
                    at = fitted(layer, fmt)
                    key = fmt, at["block"], at["activation"], at["bias"], at["seed"] % 2, fmt == "int4" and at["zeros"]
                    if key not in done:
                        done.add(key)
                        walk(1, "hopper", at, fmt, lora=at["seed"] % 2 == 1)
                walk(1, "hopper", layer, None, lora=layer["seed"] % 2 == 1)
            for _, d, n, E, K in SHAPES:
                for T in TOKENS:
                    at = dict(zip("TdnEK", (T, d, n, E, K), strict=True))
                    for fmt in (None, *TIMED):
                        walk(3, "hopper", at | {"block": block_of(fmt, d, n) if fmt else None}, fmt)


# ---------------------------------------------------------------------------------------------------------- compiling


def linked(ptx: bytes) -> bytes:
    """Machine code that the driver makes of PTX for the current GPU: what it would make when it loads the PTX."""
    import cupy

    cupy.cuda.runtime.setDevice(0)
    cupy.cuda.runtime.free(0)
    cuda = ctypes.CDLL("libcuda.so.1")
    state, code, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: object) -> None:
        if error := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {error}")

    call("cuLinkCreate_v2", 0, None, None, ctypes.byref(state))
    text = ptx.rstrip(b"\0") + b"\0"
    call("cuLinkAddData_v2", state, 1, text, ctypes.c_size_t(len(text)), b"kernel", 0, None, None)
    call("cuLinkComplete", state, ctypes.byref(code), ctypes.byref(size))
    made = ctypes.string_at(code, size.value)
    call("cuLinkDestroy", state)
    return made


def made_ready(arch: str, description: dict, gpu: bool) -> tuple[str, float, str]:
    """In a process of its own: a kernel into the caches. What it is, seconds, and what went wrong."""
    began, wrong, given = time.time(), "", dict(description)
    try:
        if "file" not in given:
            from blazeproto.runtime.numba_kernel import NumbaKernel

            module, _, name = given.pop("make").rpartition(".")
            make = getattr(importlib.import_module(module), name)
            kernel = NumbaKernel(make, given.pop("parameters"), **given.pop("constants"), **given)
            kernel.cubin((9, 0))
            return name, time.time() - began, ""
        from blazeproto.gemm.compile import Kernel
        from blazeproto.runtime.arch import ARCHES

        kernel = Kernel(**given | {"options": tuple(given["options"]), "arch": ARCHES[arch]})
        _ = kernel.cubin if arch == "hopper" else kernel.ptx
        if arch == "ampere" and gpu:
            try:
                code = linked(kernel.ptx.encode())
                beside = WORK / f"{kernel.key}.{os.getpid()}"
                beside.write_bytes(code)
                beside.rename(WORK / f"{kernel.key}.cubin")
            except Exception as error:  # noqa: BLE001
                wrong = f"linker: {error}"
                kernel.load(0)  # at least into the driver's own cache
        return kernel.entry, time.time() - began, wrong
    except Exception as error:  # noqa: BLE001
        return str(description)[:120], time.time() - began, f"{type(error).__name__}: {str(error)[:300]}"


class Compilers:
    """The kernels that `discover` finds, compiled as they are found."""

    def __init__(self, jobs: int, gpu: bool = True) -> None:
        self.pool, self.gpu = ProcessPoolExecutor(jobs, get_context("spawn")), gpu
        self.found: dict[int, list] = {1: [], 2: [], 3: []}
        self.child = subprocess.Popen(
            [sys.executable, __file__, "discover"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"},
        )
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.child.stdout:
            phase, arch, description = json.loads(line)
            self.found[phase].append(self.pool.submit(made_ready, arch, description, self.gpu))

    def wait(self, phase: int) -> None:
        while self.reader.is_alive() and not any(self.found[later] for later in range(phase + 1, 4)):
            time.sleep(0.05)
        results = [future.result() for future in self.found[phase]]
        slow = sorted((round(s, 1) for _, s, _ in results), reverse=True)[:3]
        say(f"kernels of part {phase}: {len(results)}, the slowest took {slow} s")
        for name, _, wrong in [r for r in results if r[2]][:5]:
            say(f"  {name}: {wrong}")
        if not self.reader.is_alive() and self.child.wait():
            say("  discover failed: kernels that it did not find compile when they are first launched")


def use_linked_code() -> None:
    from blazeproto.gemm.compile import Kernel

    original = Kernel._code_for

    def code_for(kernel: Kernel, device: int) -> tuple:
        path = WORK / f"{kernel.key}.cubin" if kernel.arch.name == "ampere" else None
        if path is not None and path.exists():
            return path.read_bytes(), kernel.entry, kernel.dynamic_smem
        began = time.time()
        made = original(kernel, device)
        if (took := time.time() - began) > 1:
            say(f"  compiled late ({took:.1f} s): {kernel.arch.name} {kernel.entry}")
        return made

    Kernel._code_for = code_for


# --------------------------------------------------------------------------------------------------------------- bits

OUTPUTS = ("out", "dX", "dS", "dA_up", "dB_up", "dA_down", "dB_down")


def quantized(weight, fmt: str, block: tuple[int, int], *, zeros: bool = False):
    import torch

    from blazeproto import stored

    made = stored.quantize(weight, fmt, block)
    if zeros:
        points = torch.randint(-(2**31), 2**31, (len(weight), weight.shape[1] // 8, made.scales.shape[2]), device="cuda")
        made = stored.int4(made.values.view(torch.int32), made.scales, points.int(), group=block[1])
    return made


def scaled_by_block(*shape: int):
    """A weight whose scales differ from block to block."""
    import torch

    powers = torch.randint(-3, 3, (shape[0], shape[1], shape[2] // 32), device="cuda").float().exp2()
    return (torch.randn(shape, device="cuda") * powers.repeat_interleave(32, 2) * shape[2] ** -0.5).bfloat16()


def factors_of(shape: tuple[int, int, int]):
    import torch

    from blazeproto.autograd import LowRank

    a = torch.randn(shape[0], RANK, shape[2], device="cuda") * shape[2] ** -0.5
    b = torch.randn(shape[0], shape[1], RANK, device="cuda") * 0.5 * RANK**-0.5
    return LowRank(a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_())


def compare_bits(layer: dict, fmt: str, tally: dict) -> None:
    import torch

    from blazeproto.autograd import moe_mlp

    at = fitted(layer, fmt)
    T, d, n, E, K = (at[name] for name in "TdnEK")
    torch.manual_seed(layer["seed"])
    new = partial(torch.randn, device="cuda")
    weights = [
        quantized(scaled_by_block(*shape), fmt, at["block"], zeros=fmt == "int4" and at["zeros"])
        for shape in ((E, 2 * n, d), (E, d, n))
    ]
    decoded = [weight.decode() for weight in weights]
    x, scores = new(T, d).bfloat16().requires_grad_(), torch.rand(T, K, device="cuda").requires_grad_()
    order = torch.rand(T, E, device="cuda")
    order[:, : min(at["idle"], E - K)] -= 2  # idle experts
    ids = order.topk(K, dim=1).indices.int()
    if layer["seed"] % 3 == 0:
        ids[torch.rand(T, K, device="cuda") < 0.2] = -1  # pairs that are not here
    busy = torch.zeros(E + 1, dtype=torch.bool, device="cuda")
    busy[torch.where(ids < 0, E, ids).long().flatten()] = True
    if at["poison"]:
        for weight in weights:
            weight.scales.view(torch.uint8)[~busy[:E]] = 255
    given = {"num_experts": E, "activation": at["activation"]}
    if layer["seed"] % 2:
        given |= dict(zip(("up_factors", "down_factors"), [factors_of(tuple(weight.shape)) for weight in decoded], strict=True))
    if at["bias"]:
        given |= {"up_bias": new(E, 2 * n).bfloat16(), "down_bias": new(E, d).bfloat16()}

    def out_of(backend: str, pair: list):
        with torch.no_grad():
            return moe_mlp(x, *pair, scores, ids, backend=backend, **given)

    expected, sides = out_of("hopper", decoded), {"hopper": out_of("hopper", weights), "ampere": out_of("ampere", weights)}
    differ = {name: int((made.view(torch.int16) != expected.view(torch.int16)).sum()) for name, made in sides.items()}
    tally["layers"] += 1
    tally["numbers"] += expected.numel()
    tally["empty"] += int((~busy[:E]).sum())
    finite = bool(expected.isfinite().all())
    tally["not finite"] += not finite
    for name, count in differ.items():
        tally[name] += count
    if any(differ.values()) or not finite:
        tally["wrong"] += 1
        if tally["wrong"] <= 4:
            say(f"  DIFFERS {fmt} {at} {differ}{'' if finite else ' NOT FINITE'}")


def part_1(until: float) -> None:
    import torch

    zero = {"layers": 0, "empty": 0, "numbers": 0, "not finite": 0, "wrong": 0, "hopper": 0, "ampere": 0}
    tallies = {fmt: dict(zero) for fmt in FORMATS}
    for layer in layers():
        for fmt in FORMATS:
            if time.time() - BEGAN > until:
                break
            try:
                compare_bits(layer, fmt, tallies[fmt])
            except Exception as error:  # noqa: BLE001
                say(f"  FAILED {fmt} {fitted(layer, fmt)}: {type(error).__name__}: {str(error)[:300]}")
                if "CUDA" in str(error) or "cuda" in str(error).lower():
                    torch.cuda.synchronize()  # raises for good if the context is gone
    for fmt, t in tallies.items():
        say(f"bits {fmt:6} {t}", table=True)


# --------------------------------------------------------------------------------------------------------------- time


def repeated(fmt: str | None, shape: tuple[int, int, int], block: tuple[int, int], base):
    """Of 8 experts' numbers, repeated: the stored weight of all experts, and the same decoded."""
    made, times = quantized(base, fmt, block), shape[0] // len(base)
    return made._map(lambda t: t.repeat(times, 1, 1)), made.decode().repeat(times, 1, 1)


def timed(calls: dict, rounds: int, hold: int = 6_000_000) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, in turn, the GPU being held until the host has queued a call."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 2):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(hold)
            start.record()
            call()
            end.record()
            end.synchronize()
            if index >= 2:
                samples[name].append(start.elapsed_time(end))
    return samples


# ---------------------------------------------------------------------------------------------------------- few tokens


def part_3(rounds: int = 21) -> None:
    import torch

    from blazeproto.autograd import moe_mlp

    for _, d, n, E, K in SHAPES:
        if left() < 6:
            say(f"few {(d, n, E, K)}: no time left", table=True)
            continue
        torch.manual_seed(1)
        shapes = (E, 2 * n, d), (E, d, n)
        bases = [(torch.randn(8, *s[1:], device="cuda") * s[2] ** -0.5).bfloat16() for s in shapes]
        programs = {}
        for fmt in TIMED:
            pairs = [[repeated(fmt, s, block_of(fmt, d, n), base) for s, base in zip(shapes, bases, strict=True)] for _ in range(SETS)]
            programs[fmt] = ("hopper", [[p[0] for p in pair] for pair in pairs])
            if fmt == "mxfp4":
                programs = {"bf16": ("hopper", [[p[1] for p in pair] for pair in pairs])} | programs
            del pairs
        for T in TOKENS:
            xs = [torch.randn(T, d, device="cuda").bfloat16() for _ in range(CALLS)]
            scores = torch.rand(T, K, device="cuda")
            draws = [torch.rand(T, E, device="cuda").topk(K, dim=1).indices.int() for _ in range(CALLS)]
            if T == 1:  # experts that no other call has
                draws = [*torch.randperm(E, device="cuda").int()[: CALLS * K].view(CALLS, 1, K)]
            touched = sum(each.unique().numel() for each in draws) / CALLS

            @torch.no_grad()
            def forward(backend: str, sets: list) -> list:
                return [
                    moe_mlp(x, *sets[index % SETS], scores, ids, num_experts=E, backend=backend)
                    for index, (x, ids) in enumerate(zip(xs, draws, strict=True))
                ]

            graphs, outs, wrong = {}, {}, {}
            for name, (backend, sets) in programs.items():
                try:
                    stream = torch.cuda.Stream()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        expected = forward(backend, sets)
                        forward(backend, sets)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream):
                        outs[name] = forward(backend, sets)
                    for out in outs[name]:
                        out.fill_(float("nan"))
                    graph.replay()
                    torch.cuda.synchronize()
                    if not all(map(torch.equal, outs[name], expected)):
                        wrong[name] = "replay differs"
                    graphs[name] = graph
                except Exception as error:  # noqa: BLE001
                    wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
            samples = timed({name: graph.replay for name, graph in graphs.items()}, rounds, hold=1_000_000)
            us = {name: round(1e3 * statistics.median(values) / CALLS, 1) for name, values in samples.items()}
            numbers = touched * 3 * d * n
            floors = [round(1e6 * numbers * bits / 8 / COPY_RATE, 1) for bits in (16, 4.25)]
            us |= {f"{name}/bf16": round(us[name] / us["bf16"], 3) for name in TIMED if name in us and "bf16" in us}
            say(
                f"few d={d} n={n} E={E} K={K} T={T:<3} us a forward: "
                + ", ".join(f"{name} {value}" for name, value in us.items())
                + f"; {touched:.1f} experts, their bytes alone {floors[0]} bf16, {floors[1]} MXFP4"
                + (f"; WRONG {wrong}" if wrong else ""),
                table=True,
            )
            del graphs, outs
        del programs, forward
        torch.cuda.empty_cache()


def set_few(ahead: int, ctas: int) -> None:
    from blazeproto.gemm import linear, product, rows, up

    product.FEW_AHEAD, product.FEW_CTAS, rows.FEW_CTAS = ahead, ctas, ctas
    for each in (product.tiled_kernel, product._kernel_of_ampere, up._plan, linear.plan):
        each.cache_clear()


def graphed(call):
    """A graph of it, once it has run."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        call(), call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), torch.no_grad():
        made = call()
    return graph, made


def part_4(rounds: int = 15) -> None:
    import torch

    from blazeproto.autograd import moe_mlp

    for _, d, n, E, K in SHAPES[1:]:
        torch.manual_seed(1)
        shapes = (E, 2 * n, d), (E, d, n)
        bases = [(torch.randn(8, *s[1:], device="cuda") * s[2] ** -0.5).bfloat16() for s in shapes]
        sets = [[repeated("mxfp4", s, (1, 32), base)[0] for s, base in zip(shapes, bases, strict=True)] for _ in range(SETS)]
        for T in TOKENS:
            xs, scores = [torch.randn(T, d, device="cuda").bfloat16() for _ in range(CALLS)], torch.rand(T, K, device="cuda")
            draws = [torch.rand(T, E, device="cuda").topk(K, dim=1).indices.int() for _ in range(CALLS)]

            def forward() -> list:
                each = enumerate(zip(xs, draws, strict=True))
                return [moe_mlp(x, *sets[i % SETS], scores, ids, num_experts=E, backend="hopper") for i, (x, ids) in each]

            graphs = {}
            for ahead, ctas in ((3, 4), (2, 4), (4, 4), (3, 3), (4, 3), (2, 5)):
                if left() < 4:
                    break
                set_few(ahead, ctas)
                graphs[ahead, ctas] = graphed(forward)
            samples = timed({name: graph.replay for name, (graph, _) in graphs.items()}, rounds, hold=1_000_000)
            us = {name: round(1e3 * statistics.median(values) / CALLS, 1) for name, values in samples.items()}
            say(f"sweep d={d} n={n} T={T} MXFP4, us by (AHEAD, CTAS): {us}", table=True)
        set_few(3, 4)


def part_5(rounds: int = 7) -> None:
    import torch

    from blazeproto.autograd import hopper_backend, moe_mlp
    from blazeproto.gemm import stored as st

    few = hopper_backend.few_rows
    for _, d, n, E, K in SHAPES[:2]:
        torch.manual_seed(1)
        shapes = (E, 2 * n, d), (E, d, n)
        bases = [(torch.randn(8, *s[1:], device="cuda") * s[2] ** -0.5).bfloat16() for s in shapes]
        weights, plain = zip(*(repeated("mxfp4", s, (1, 32), base) for s, base in zip(shapes, bases, strict=True)), strict=True)
        for rows in (4, 8, 16, 24, 32, 48):
            if left() < 3:
                break
            T = rows * E // K
            x, scores = torch.randn(T, d, device="cuda").bfloat16(), torch.rand(T, K, device="cuda")
            ids = torch.rand(T, E, device="cuda").topk(K, dim=1).indices.int()

            def forward(which: str):
                hopper_backend.few_rows = few if which == "few" else lambda *_: False
                st.FEW_ROWS = 0 if which == "ring" else 64
                with torch.no_grad():
                    pair = plain if which == "bf16" else weights
                    return moe_mlp(x, *pair, scores, ids, num_experts=E, backend="hopper")

            samples = timed({name: partial(forward, name) for name in ("bf16", "few", "ampere", "ring")}, rounds)
            us = {name: round(1e3 * statistics.median(values), 1) for name, values in samples.items()}
            say(f"rule d={d} n={n} MXFP4 rows/expert {rows}: us {us}", table=True)
    hopper_backend.few_rows, st.FEW_ROWS = few, 64


def main() -> None:
    compilers = Compilers(max(2, min(15, (os.cpu_count() or 2) - 1)))
    import torch

    say(torch.cuda.get_device_name(), f"torch {torch.__version__}, {os.cpu_count()} cores, {BUDGET:.0f} s")
    torch.zeros(1, device="cuda")
    use_linked_code()
    for number, part in ((1, partial(part_1, 0.4 * BUDGET)), (3, part_3), (4, part_4), (5, part_5)):
        try:
            if number in (1, 3):
                compilers.wait(number)
            if number == 3:  # no other process is on the GPU while things are timed
                compilers.pool.shutdown(wait=True)
            part()
        except Exception as error:  # noqa: BLE001
            say(f"part {number} FAILED: {type(error).__name__}: {str(error)[:500]}", table=True)
    compilers.pool.shutdown(wait=False, cancel_futures=True)
    print("\n== all results\n" + "\n".join(TABLE), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu_few.txt").write_text("\n".join(TABLE) + "\n")


if __name__ == "__main__":
    discover() if sys.argv[1:] == ["discover"] else main()
