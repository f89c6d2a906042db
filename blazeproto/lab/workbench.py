"""A kernel on the bench: change its CUDA source, check it against float64, time it, train with it.

>>> bench = Workbench("up_forward", T=4096, d=512, n=512, E=16, K=4)
>>> bench.edit("my_kernels")         # change my_kernels/up.cu in an editor, then
>>> bench.check()                    # right, or a map of where it is wrong; without a GPU too, on the machine
>>> bench.time()
>>> bench.score()                    # the share of the floor on a layer of Qwen3-30B-A3B: one number to beat
>>> bench.timeline()                 # what each warp did, and when; counters(): what ncu counts
>>> with bench.use():
...     loss = layer(x)[0].square().mean()
...     loss.backward()

Without a Hopper GPU `check` and `run` interpret the kernel's PTX (`ptxsim`); `kernel` with its registers and
SASS, compile errors and `diff` need none either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blazeproto import cost
from blazeproto.activations import activation_named
from blazeproto.gemm import PRODUCTS, Kernel, Sizes, TileConfig, product
from blazeproto.gemm.compile import CUDA_SOURCES, compile_many
from blazeproto.gemm.e4m3 import BLOCK
from blazeproto.gemm.product import Build, Product
from blazeproto.gemm.recipe import RECIPES, Recipe, name_of
from blazeproto.gemm.tiles import CHUNK, MAX_EXPERTS
from blazeproto.lab import target
from blazeproto.lab.accuracy import Reference, far_off, reference
from blazeproto.lab.calls import CALLS, Poisoned, everything_read, sums_of, told_stray
from blazeproto.lab.counters import HardwareCounters, counters
from blazeproto.lab.edit import EditedSources
from blazeproto.lab.oracle import ROUTINGS, YARDSTICK, evaluate, make_case, pad_rows
from blazeproto.lab.target import Machine
from blazeproto.lab.timeline import MACRO as TIMELINE
from blazeproto.lab.timeline import Timeline, record, record_steps
from blazeproto.lab.times import ROUNDS, Times, gpu_here, interleaved_ms, score
from blazeproto.lab.verdict import Comparison, Places, Verdict, places_of
from blazeproto.runtime import arch, checks

GPU_RUNS = 20
DELAYS = "INJECT_DELAYS"  # ptx.cuh: a race shows as a wrong answer


class Inputs(NamedTuple):
    """Inputs, outputs and expected values of runs: made once, kept on the device on which the kernel runs.

    arguments: of the product's function, outputs among them.  memory: the outputs', and a workspace's.
    read: all that is read.  sums: of its bits.  yardstick: quantized outputs, with what rounding alone does to them.
    """

    case: Any
    arguments: dict[str, Any]
    memory: dict[str, Poisoned]
    references: dict[str, Reference]
    places: dict[str, Places]
    read: dict[str, Tensor | None]
    sums: dict[str, int]
    yardstick: dict[str, Tensor]

    @property
    def values(self) -> dict[str, Tensor]:
        return {name: memory.values for name, memory in self.memory.items()}

    def used(self, name: str) -> int | None:
        """Lines of an output that are in use, where not all are."""
        return len(self.case.row_pair) if self.memory[name].output.index == "row" else None


class Workbench:
    """One product (a name of `blazeproto.gemm.PRODUCTS`) at one shape, its inputs, and what it should give.

    It runs on a Hopper GPU, or without one on the machine (`ptxsim`); `time` and `counters` need a GPU.

    T tokens, d model width, n expert width, E experts, K experts a token. d and n are multiples of 8, E at most 512.
    activation: of `blazeproto.activations`.  routing: of `lab.oracle.ROUTINGS`.  seed: of the inputs, which are bf16 at unit
    scale, weights at 1/√fan-in.  config: the tiles; default: a layer's of this shape.  device: "cpu" for the
    machine even with a Hopper GPU. precision: "fp8" or "fp8_rollout" for quantized operands, d a multiple of 16 and n of 128;
    outputs are their numbers then. bias_score_grad and expert_row_sum run as in a layer with biases; the other
    products have no biases.

    ValueError or TypeError for arguments that no product takes.
    """

    part = "expert"  # what a line of an output belongs to, in a verdict

    def __init__(
        self,
        product: str,
        T: int = 4096,
        d: int = 512,
        n: int = 512,
        E: int = 16,
        K: int = 4,
        activation: str = "swiglu",
        routing: str = "uniform",
        seed: int = 0,
        config: TileConfig | None = None,
        device: str = "auto",
        precision: str | Recipe = "bf16",
    ) -> None:
        checks.one_of("product", product, tuple(PRODUCTS))
        for name, value in (("T", T), ("d", d), ("n", n), ("E", E), ("K", K)):
            checks.integer(name, value, least=1)
        element = PRODUCTS[product].element_of(precision)
        for name, width, multiple in (("d", d, CHUNK * element.packing), ("n", n, BLOCK if element.scales else CHUNK)):
            if width % multiple:
                raise ValueError(f"{name}: expected a multiple of {multiple}, got {width}")
        if E > MAX_EXPERTS:
            raise ValueError(f"E: expected at most {MAX_EXPERTS}, got {E}")
        checks.one_of("routing", routing, ROUTINGS)
        self._set_up(product, PRODUCTS[product], seed, config, device)
        if config is not None and self.entry.kernel is None:
            raise ValueError(f"config: expected None for {product}, which has no tiles, got {config}")
        self.activation, self.routing, self.precision = activation, routing, name_of(precision)
        self.sizes, self.element = Sizes(T, d, n, E, K, activation_named(activation).halves), element
        self.call, self.operations, self.ragged = CALLS[product], self.entry.operations(self.sizes), E
        self._kernels(Build())  # refuses tiles that it cannot have

    def _set_up(self, product: str, entry: Product, seed: int, config: TileConfig | None, device: str) -> None:
        """What every bench has.  entry: the product in the registry."""
        checks.require(-(2**63) <= checks.integer("seed", seed) < 2**63, "seed", "an int of 64 bits", seed)
        if config is not None and not isinstance(config, TileConfig):
            raise TypeError(f"config: expected a TileConfig or None, got {type(config).__name__}")
        checks.one_of("device", device, ("auto", "cpu"))
        self.product, self.entry, self.seed, self.config = product, entry, seed, config
        self.lacking = _lacking(device)
        self.on_gpu = not self.lacking
        self.edited: EditedSources | None = None
        self.last_kernel: Kernel | None = None

    def __repr__(self) -> str:
        sources = self.edited.folder if self.edited else "the package's sources"
        return f"{type(self).__name__}({self.product}, {self._shape}; {sources})"

    @property
    def _shape(self) -> str:
        s, precision = self.sizes, f", {self.precision}" if self.element.scales else ""
        return f"T={s.T}, d={s.d}, n={s.n}, E={s.E}, K={s.K}, {self.activation}, {self.routing}{precision}"

    # --- The sources and the kernel ------------------------------------------------------------------------------------

    def edit(self, folder: str | Path) -> Path:
        """Copies the CUDA sources, headers included, into ``folder``, and takes them from there from now on; their path.

        A file is compiled as it is when `kernel`, `check`, `time` or `use` next ask. New files and macros are as good as the
        old ones. Kernels compiled from here never enter the package's cache. ValueError for a folder that is not empty.
        """
        self.edited = EditedSources.copied(folder)
        return self.edited.folder

    def reopen(self, folder: str | Path) -> Workbench:
        """Goes on with a folder that `edit` filled before, in another session or for another product; this bench, whose repr
        has the folder's path. ValueError if it does not exist."""
        self.edited = EditedSources(folder)
        return self

    @property
    def kernel(self) -> Kernel:
        """The product's main kernel, compiled from the sources as they are now, the package's too: the same object while they
        are the same. A layer goes on with the package's kernels as it read them.

        CompileError shows file, line and the line itself. Kernels that were compiled before stay usable, the last one
        as ``last_kernel``; a layer that uses one goes on with it.
        """
        self._compiled(self._build())
        assert self.last_kernel is not None
        return self.last_kernel

    def _build(self, *debug: str) -> Build:
        """debug: further macros."""
        return Build((*product.DEBUG, *debug), self.edited.snapshot()) if self.edited else self._unedited(*debug)

    def _unedited(self, *debug: str) -> Build:
        """The package's sources as they are now, compiled apart if they have changed since this process read them."""
        build = Build((*product.DEBUG, *debug))
        changed = any(kernel.is_changed for kernel in self._kernels(build))
        return build._replace(sources=EditedSources(CUDA_SOURCES).snapshot()) if changed else build

    def _compiled(self, *builds: Build) -> None:
        """All kernels of the product, at a time; the first build's main one becomes ``last_kernel``."""
        kernels = [kernel for build in builds for kernel in self._kernels(build)]
        if any(kernel.sources for kernel in kernels):
            (self.edited or EditedSources(CUDA_SOURCES)).compile(kernels)
        else:
            compile_many(kernels)
        self.last_kernel = kernels[0]

    def _kernels(self, build: Build) -> list[Kernel]:
        """Those that a call launches, the main one first."""
        tiles = self.config or self.entry.tiles_of(self.sizes, self.element)
        variant = self.entry.variant._replace(activation=self.activation, element=self.element)
        return self.entry.launches(self.sizes, tiles, variant, build)

    def diff(self) -> str:
        """The changes, as a unified diff against the package's sources; empty without changes."""
        return self.edited.diff() if self.edited else ""

    @contextmanager
    def use(self) -> Iterator[Workbench]:
        """Layers run the edited kernel, as its sources are now, in forward and in backward, in every thread of the process.

        Undone on exit, after an exception too. Tiles, activation and biases are the layer's. Other workbenches don't see it,
        and use theirs at the same time; of two for one product, the inner one holds. A CUDA graph keeps the kernels that it
        was captured with. RuntimeError before `edit`, CompileError where the sources don't compile.
        """
        if self.edited is None:
            raise RuntimeError("use: expected edited sources, got none; call edit(folder) first")
        build = self._build()
        self._compiled(build)
        assert build.sources is not None
        with product.edited(self.entry.name, build.sources):
            yield self

    # --- Running it ----------------------------------------------------------------------------------------------------

    def check(self, runs: int | None = None) -> Verdict:
        """Runs the kernel on poisoned outputs; whether each element is as near to float64 as rounding allows.

        On a GPU 20 runs, every second one with random delays around barriers compiled in, so that a race shows. Elsewhere
        the kernel's PTX runs on the machine (`ptxsim`), which reports races and what a kernel may not do with
        source lines: by default once, run i with the schedule of seed i. The expected time is said on stderr; Ctrl-C ends it.

        Runs must give the same bits (but for down_forward_fused and up_backward_act_fused, which add in no fixed order), write
        every element, and nothing beside the outputs. ``bool(verdict)``; its repr draws the tiles that are wrong and the first
        ten mismatches. CompileError where the sources don't compile, PtxError for an instruction that the machine does not know.
        """
        runs = checks.integer("runs", (GPU_RUNS if self.on_gpu else 1) if runs is None else runs, least=1)
        plain = self._build()
        builds = [plain, plain._replace(debug=(*plain.debug, DELAYS))] if self.on_gpu else [plain]
        self._compiled(*builds)
        inputs = self._inputs
        comparison = Comparison(inputs.references, inputs.places, fixed_order=self.entry.fixed_order)
        touched = {name: memory.words.new_zeros(3, dtype=torch.int64) for name, memory in inputs.memory.items()}
        attended = None if self.on_gpu else self._attended(runs)
        for index in range(runs):
            if attended is None:
                self._run(builds[index % 2])
            elif not attended.run(index, lambda machine: self._run(plain, machine)):
                continue
            comparison.add(self._in_use())
            for name, memory in inputs.memory.items():
                touched[name] = torch.maximum(touched[name], memory.touched(inputs.used(name)))
        stray = [line for name, counts in touched.items() for line in told_stray(name, counts.tolist())]
        stray += [*self._written_over(), *far_off(self._in_use(), inputs.yardstick, inputs.references)]
        verdict = comparison.verdict(self.product, stray, self.part)
        return attended.verdict(verdict) if attended else verdict

    def _attended(self, runs: int) -> target.Attended:
        """For runs on the machine."""
        outputs = [memory.output for memory in self._inputs.memory.values()]
        tiles = sum(prod(output.shape) // prod(output.tile) + self.ragged for output in outputs)
        if self.entry.kernel is None:  # it moves bytes
            steps = target.STEPS_A_BYTE * self.entry.least_bytes(self.sizes)
        else:
            steps = target.STEPS_AN_OUTPUT * sum(prod(output.shape) for output in outputs)
            steps += target.STEPS_A_TILE * tiles + target.STEPS_AN_OPERATION * self.operations
        return target.Attended(self.product, runs, tiles, steps)

    def time(self, rounds: int = ROUNDS) -> Times:
        """Milliseconds of a call, beside the floor (`blazeproto.cost`) and the package's own kernel, in turn with it.

        Medians of ``rounds`` rounds. CUDA graphs are replayed, so the host's time is not in it; inputs that fit lie in the L2
        cache. RuntimeError without a Hopper GPU.
        """
        checks.integer("rounds", rounds, least=1)
        self._needs_hopper("time")
        builds = {"ms": self._build()}
        if self.edited:
            builds["unedited_ms"] = self._unedited()
        self._compiled(*builds.values())
        graphs = {name: self._graph(build) for name, build in builds.items()}
        measured = interleaved_ms({name: graph.replay for name, graph in graphs.items()}, rounds, queued=True)
        gpu = gpu_here()
        return Times(self.product, floor_ms=None if gpu is None else self._floor_ms(gpu), **measured)

    def _floor_ms(self, gpu: str) -> float:
        return cost.product_floor_ms(self.product, self.sizes, gpu, self.precision)

    def score(self, model: str = "Qwen3-30B-A3B") -> Times:
        """One number to beat, ``share`` of what this returns: of the floor's speed, on a layer of a model (`lab.times.MODELS`).

        The kernel is checked there first: ValueError for a wrong one, and for another model. RuntimeError without a Hopper GPU,
        with the stored share of the package's kernel."""
        return score(self, model)

    def timeline(self, tiles: int = 3, cta: int = 0) -> Timeline:
        """The timeline of each warp of one CTA in its first ``tiles`` tiles, by clock reads that are compiled in for this.

        cta: its number in the grid. Without a GPU it runs on the machine: in steps, the order of things and no time.
        ValueError for a product that is not made of tiles. RuntimeError where the grid has no such CTA."""
        self._needs_tiles("timeline")
        build = self._build(TIMELINE)
        self._compiled(build)
        if not self.on_gpu:
            return record_steps(lambda machine: self._run(build, machine), tiles=tiles, cta=cta)
        return record(lambda: self._run(build), tiles=tiles, cta=cta)

    def counters(self) -> HardwareCounters:
        """Hardware counters of one run, by ncu: tensor pipe, L2, memory, why warps wait.

        In a process of its own, with the same inputs. ValueError for a product that is not made of tiles. RuntimeError without
        a Hopper GPU, FileNotFoundError without ncu, CountersRefused where the driver forbids it."""
        self._needs_tiles("counters")
        self._needs_hopper("counters")
        options = {name: getattr(self, name) for name in ("activation", "routing", "seed", "precision", "config")}
        sources = self.edited.snapshot() if self.edited else None
        return counters(self.product, *self.sizes[:5], **options, sources=sources)

    def _needs_tiles(self, what: str) -> None:
        if self.entry.kernel is None:
            raise ValueError(f"{what}: expected a product that is made of tiles, got {self.product}")

    def run(self, *debug: str) -> dict[str, Tensor]:
        """Runs the kernel once on poisoned outputs: these, by name, with the rows in use. They are written again by the next run.

        debug: further macros (ptx.cuh). Without a Hopper GPU on the machine; MachineError then for what a kernel may not do.
        """
        for macro in debug:
            checks.instance("debug", macro, str)
        build = self._build(*debug)
        self._compiled(build)
        self._run(build, None if self.on_gpu else Machine())
        return self._in_use()

    def _needs_hopper(self, what: str) -> None:
        if self.lacking:
            raise RuntimeError(f"{what}: expected {self.lacking}; check(), run(), kernel, sass and diff() need none")

    @cached_property
    def _inputs(self) -> Inputs:
        options: dict[str, Any] = {"activation": self.activation, "biases": bool(self.call.needs), "seed": self.seed}
        options |= {"quantized": bool(self.element.scales), "recipe": RECIPES[self.precision]}
        options |= {"device": "cuda" if self.on_gpu else "cpu"}
        case = make_case(self.sizes, self.routing, **options)
        made = evaluate(YARDSTICK, case)
        references = reference(self.product, case, made)
        given = {name: pad_rows(made[name], case.dispatch.num_rows) for name in self.call.given}
        outputs = self.call.outputs(case, given, self.config)
        memory = {name: Poisoned(output, case.x.device) for name, output in outputs.items()}
        places = {name: places_of(outputs[name], case) for name in references}
        values = {name: one.values for name, one in memory.items()}
        arguments = self.call.arguments(case, given, values, self.config)  # quantizes
        quantized = [name for name, array in self.call.made.items() if self.call.is_quantized(case, array)]
        yardstick = {name: case.in_use(name, made[name]) for name in quantized}
        read = everything_read(case, given)
        return Inputs(case, arguments, memory, references, places, read, sums_of(read), yardstick)

    def _run(self, build: Build, machine: Machine | None = None) -> None:
        for memory in self._inputs.memory.values():
            memory.poison()
        self._launch(build, machine)

    def _launch(self, build: Build, machine: Machine | None = None) -> None:
        run, arguments = self.entry.run, self._inputs.arguments
        with product.alone({self.entry.name: build}):
            target.launch(machine, run, **arguments) if machine else run(**arguments)

    def _in_use(self) -> dict[str, Tensor]:
        """The outputs' numbers."""
        inputs = self._inputs
        return {name: self._numbers(name)[: inputs.used(name)] for name in inputs.references}

    def _numbers(self, name: str) -> Tensor:
        return self.call.numbers(self._inputs.case, name, self._inputs.values)

    def _written_over(self) -> list[str]:
        """Inputs that are not what they were. They are made again then."""
        inputs = self._inputs
        now = sums_of(inputs.read)
        changed = [f"{name}: wrote over this input" for name, value in inputs.sums.items() if now[name] != value]
        if changed:
            del self.__dict__["_inputs"]
        return changed

    def _graph(self, build: Build) -> torch.cuda.CUDAGraph:
        self._run(build)  # loads the kernels: nothing may be loaded during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch(build)
        return graph


def _lacking(device: str) -> str:
    """The GPU that kernels need and a bench for ``device`` has not; "" where it has."""
    asked = "" if device == "auto" else f"a GPU of {arch.HOPPER.wanted}; device={device!r} was asked for"
    return (
        arch.missing(torch.cuda.get_device_capability() if torch.cuda.is_available() else None, name="hopper") or asked
    )
