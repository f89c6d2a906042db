"""The workbench without a GPU: edited sources, compile errors, what launches take; and the comparison, on made-up outputs."""

import os
import shutil
import threading
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_bugs import BUGS, SHAPE, Bug, plant
from torch import Tensor

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm
from blazeproto.gemm import (
    TileConfig,
    compile,
    product,
)
from blazeproto.gemm.compile import CUDA_SOURCES, CompileError, Kernel
from blazeproto.gemm.product import Build, Sizes, Variant
from blazeproto.lab import Workbench, edit, machine_code, target, workbench
from blazeproto.lab.calls import CALLS, MOST_GUARD, POISON, Case, Output, Poisoned, told_stray
from blazeproto.lab.target import Machine
from blazeproto.lab.verdict import Comparison
from blazeproto.runtime import cache as compile_cache
from tests.python import python
from tests.refusals import refuses

FAST = "combine"  # which compiles in a third of a second
LINE = "    if (token >= num_tokens) return;\n"


@pytest.fixture
def bench() -> Workbench:
    return Workbench(FAST, T=64, d=256, n=64, E=4, K=2)


@pytest.fixture
def folder(bench: Workbench, tmp_path: Path) -> Path:
    return bench.edit(tmp_path / "sources")


# ---- editing ------------------------------------------------------------------------------------------------------


def test_the_sources_are_copied(bench: Workbench, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {path.name for path in CUDA_SOURCES.iterdir()}
    assert bench.diff() == "" and str(folder) in repr(bench)


@pytest.mark.parametrize("held", ["a file in it", "a file"])
def test_a_folder_that_is_not_empty_is_refused(bench: Workbench, tmp_path: Path, held: str) -> None:
    path = tmp_path / "taken" if held == "a file" else tmp_path / ".hidden"
    path.write_text("mine")
    refuses(lambda: bench.edit(path if held == "a file" else tmp_path), "folder")
    assert bench.edited is None
    (tmp_path / "empty").mkdir()
    assert bench.edit(tmp_path / "empty") == tmp_path / "empty"


def test_a_folder_is_gone_on_with(bench: Workbench, folder: Path, tmp_path: Path) -> None:
    (folder / "combine.cu").write_text((folder / "combine.cu").read_text() + "// mine\n")
    other = Workbench("up_forward", T=64, d=64, n=64, E=4, K=2)
    assert other.reopen(folder) is other and str(folder) in repr(other)
    assert "+// mine" in other.diff() and other.diff() == bench.diff()
    for wrong, error in ((tmp_path / "absent", ValueError), (tmp_path, ValueError), (3, TypeError)):
        refuses(lambda wrong=wrong: other.reopen(wrong), "folder", error)


def test_a_saved_file_is_compiled_and_named_in_the_diff(bench: Workbench, folder: Path) -> None:
    before = bench.kernel
    assert bench.kernel is before and before.cubin[:4] == b"\x7fELF" and before.registers > 0
    source = folder / "combine.cu"
    original = source.read_text()
    source.write_text(original.replace(LINE, LINE + "    if (token == 5) return;\n"))
    after = bench.kernel
    assert after is not before and after.cubin != before.cubin and "token == 5" in after.source
    assert bench.diff().splitlines()[:2] == ["--- a/combine.cu", "+++ b/combine.cu"]
    assert "+    if (token == 5) return;" in bench.diff().splitlines()
    source.write_text(original)
    assert bench.kernel is before  # by content


@pytest.mark.parametrize(
    ("include", "header"),
    [
        ("<mine.cuh>", "mine.cuh"),
        ('"sub/outer.cuh"', "sub/inner.cuh"),
        ("MINE", "mine.cuh"),
        ('"../mine.cuh"', "../mine.cuh"),
    ],
)
def test_an_edited_header_is_compiled_however_it_is_included(
    bench: Workbench, folder: Path, include: str, header: str
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/outer.cuh").write_text('#include "inner.cuh"\n')
    source = (folder / "combine.cu").read_text().replace("weight * bf16_low", "WEIGHT * weight * bf16_low")
    (folder / header).write_text("#define WEIGHT 2.0f\n")
    (folder / "combine.cu").write_text(f'#define MINE "mine.cuh"\n#include {include}\n{source}')
    if header.startswith(".."):
        with pytest.raises(CompileError, match="cannot open source file"):
            _ = bench.kernel
        return
    doubled = bench.kernel.cubin
    assert "+++ b/" + header in bench.diff() and "--- /dev/null" in bench.diff()
    (folder / header).write_text("#define WEIGHT 3.0f\n")
    assert bench.kernel.cubin != doubled


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the package's own CUDA sources, which stands for them."""
    path = tmp_path / "package"
    shutil.copytree(compile.CUDA_SOURCES, path)
    for module in (compile, edit, workbench):
        monkeypatch.setattr(module, "CUDA_SOURCES", path)
    return path


@pytest.mark.parametrize("file", ["combine.cu", "ptx.cuh"])
def test_the_package_s_sources_are_those_that_are_there_now(package: Path, file: str) -> None:
    """Edited in place, a header too, after this process compiled them: no verdict is about the code before."""
    bench = Workbench("combine", T=8, d=64, n=64, E=2, K=1, device="cpu")
    before = bench.kernel
    assert bench.check() and bench.kernel is before
    source, original = package / file, (package / file).read_text()
    at, mistake = (
        (LINE, LINE + "    if (token == 5) return;\n") if file == FAST + ".cu" else ("(packed << 16)", "(packed)")
    )
    assert at in original
    source.write_text(original.replace(at, mistake))
    assert bench.kernel is not before and bench.kernel.cubin != before.cubin
    verdicts = bench.check(), Workbench("combine", T=8, d=64, n=64, E=2, K=1, device="cpu").check()
    assert not any(verdicts)
    refuses(lambda: machine_code(before), "kernel")
    (package / "combine.cu").write_text("mistake")
    with pytest.raises(CompileError, match=rf"{package}/combine\.cu\(1\): error"):
        bench.check()


def test_a_source_that_is_gone_and_an_error_in_a_header_are_named_in_the_users_folder(
    bench: Workbench, folder: Path
) -> None:
    header = folder / "ptx.cuh"
    header.write_text(header.read_text() + "DEVICE int broken() { return absent; }\n")
    with pytest.raises(CompileError, match=rf"^{header}:{len(header.read_text().splitlines())}: error: "):
        _ = bench.kernel
    (folder / "combine.cu").unlink()
    refuses(lambda: bench.kernel, f"{folder}/combine.cu", FileNotFoundError)


def test_a_comment_that_is_no_utf8_is_compiled(bench: Workbench, folder: Path) -> None:
    source = folder / "combine.cu"
    source.write_bytes("// gr\u00fcn\n".encode("latin-1") + source.read_bytes())
    assert bench.kernel.registers > 0 and "gr\ufffdn" in bench.diff()


def test_a_compile_error_shows_the_line_and_the_old_kernel_stays(bench: Workbench, folder: Path) -> None:
    good = bench.kernel
    source = folder / "combine.cu"
    original = source.read_text()
    source.write_text(original.replace(LINE, "    if (token >= no_such_name) return;\n"))
    line = original[: original.index(LINE)].count("\n") + 1
    for _ in range(2):  # as often as it is asked for
        with pytest.raises(CompileError) as error:
            _ = bench.kernel
    message = str(error.value)
    assert message.startswith(f"{source}:{line}: error:") and "no_such_name" in message.splitlines()[0]
    assert bench.last_kernel is good and good.cubin[:4] == b"\x7fELF" and good.registers > 0
    with pytest.raises(CompileError), bench.use():
        pass
    source.write_text(original)
    assert bench.kernel is good


def test_an_edited_kernel_never_enters_the_packages_cache(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path / "cache"))
    folder = bench.edit(tmp_path / "sources")
    (folder / "combine.cu").write_text((folder / "combine.cu").read_text() + "// mine\n")
    _ = bench.kernel
    assert not compile_cache.folder().exists()


FORK = """
import os, sys
from blazeproto.lab.edit import EditedSources

sources = EditedSources.copied(sys.argv[1])
made = sources.snapshot()
if os.fork() == 0:
    own = sources.snapshot()
    assert own != made and own.is_dir()
    sys.exit()
assert os.wait()[1] == 0
assert (made / "up.cu").is_file() and sources.snapshot() == made
print(made.parent)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_leaves_its_parents_sources(tmp_path: Path) -> None:
    printed = python("-c", FORK, str(tmp_path / "sources"), variables={"TMPDIR": str(tmp_path)})
    assert not Path(printed.strip()).exists() and not [*tmp_path.glob("blazeproto-lab-*")]  # each has removed its own


# ---- which kernels a launch takes ---------------------------------------------------------------------------------


def sources_for(name: str) -> Path | None:
    return product.build_of(name).sources


def test_use_is_for_every_thread_and_undone(bench: Workbench, folder: Path) -> None:
    with bench.use():
        edited = sources_for(FAST)
        assert edited is not None and sources_for("up_forward") is None
        seen: list[Path | None] = []
        thread = threading.Thread(target=lambda: seen.append(sources_for(FAST)))
        thread.start()
        thread.join()
        assert seen == [edited]
        layer = (Sizes(0, 256, 64, 4, 2), Variant(), Variant())
        assert {kernel.sources for kernel in gemm.PRODUCTS[FAST].for_layer(*layer)} == {
            edited
        }  # what `prepare` compiles
    assert sources_for(FAST) is None
    with pytest.raises(KeyboardInterrupt), bench.use():
        raise KeyboardInterrupt
    assert sources_for(FAST) is None


def test_two_workbenches(bench: Workbench, folder: Path, tmp_path: Path) -> None:
    second = Workbench(FAST, T=64, d=256, n=64, E=4, K=2)
    (second.edit(tmp_path / "second") / "mine.cuh").write_text("// mine\n")
    with bench.use():
        first = sources_for(FAST)
        with product.alone({FAST: Build()}):  # as another's check
            assert sources_for(FAST) is None
        outer, inner = bench.use(), second.use()
        outer.__enter__()
        inner.__enter__()
        assert sources_for(FAST) not in (None, first)
        outer.__exit__(None, None, None)  # not in the order of entering
        assert sources_for(FAST) not in (None, first)
        inner.__exit__(None, None, None)
        assert sources_for(FAST) == first
    assert sources_for(FAST) is None


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("up_forward", (100, 64, 64, 32, 4), 140_441),
        ("up_forward", (300, 256, 256, 8, 2), 262_391),
        ("up_forward", (200, 2048, 128, 4, 2), 270_491),
        ("down_backward_act", (100, 64, 64, 32, 4), 241_095),
        ("down_backward_weight", (100, 64, 64, 4, 2), 38_164),
    ],
)
def test_a_run_s_steps_are_estimated_within_a_factor(name: str, sizes: tuple[int, ...], steps: int) -> None:
    """``steps``: warp instructions that a run on the machine took."""
    estimated = Workbench(name, *sizes, device="cpu")._attended(1).steps
    assert steps / 2.5 < estimated < 2.5 * steps


@pytest.fixture(scope="module")
def benches() -> list[Workbench]:
    return [Workbench(name, T=64, d=256, n=64, E=4, K=2, device="cpu") for name in gemm.PRODUCTS]


@pytest.mark.parametrize("name", gemm.PRODUCTS)
def test_launches_take_the_edited_kernels_of_this_product_alone(
    name: str, tmp_path: Path, benches: list[Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched() -> list[Kernel]:
        """By one call of every product."""
        taken = list[Kernel]()
        monkeypatch.setattr(Machine, "launch", lambda self, kernel, *_, **__: taken.append(kernel))
        for bench in benches:
            target.launch(Machine(), bench.entry.run, **bench._inputs.arguments)
        return taken

    plain = launched()
    assert len(plain) >= len(benches) and not any(kernel.sources for kernel in plain)
    with product.edited(name, tmp_path):
        edited = launched()
        with product.alone({}):
            assert launched() == plain
    (own,) = (bench._kernels(Build((), tmp_path)) for bench in benches if bench.product == name)
    assert [kernel.entry for kernel in edited] == [kernel.entry for kernel in plain]
    changed = {kernel for kernel in edited if kernel.sources}
    assert changed and changed <= {*own}  # the very objects that the workbench compiles
    assert launched() == plain


@pytest.mark.parametrize("name", gemm.PRODUCTS)
def test_every_product_has_a_call_and_a_kernel(name: str) -> None:
    bench = Workbench(name, T=512, d=512, n=256, E=4, K=2)
    kernels = bench._kernels(Build())
    assert {kernel.sources for kernel in bench._kernels(Build((), Path("/elsewhere")))} == {Path("/elsewhere")}
    up = Variant(bias=bool(bench.call.needs), fused="fused" in name)
    layer = (Sizes(0, 512, 256, 4, 2), up, up)
    if gemm.PRODUCTS[name].in_layer and name not in ("bias_score_grad", "expert_row_sum"):
        assert set(kernels) <= set(gemm.PRODUCTS[name].for_layer(*layer)), name


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"product": "up_foward"}, "product"),
        ({"T": 0}, "T"),
        ({"d": 60}, "d"),
        ({"E": 513}, "E"),
        ({"activation": "swigl"}, "activation"),
        ({"routing": "none"}, "routing"),
        ({"config": TileConfig(cluster=2, tickets=True)}, "config"),
        ({"product": "combine", "config": TileConfig()}, "config"),
    ],
)
def test_what_no_product_takes_is_refused(options: dict[str, Any], argument: str) -> None:
    refuses(lambda: Workbench(**{"product": "up_forward", **options}), argument)


@pytest.mark.parametrize("config", [TileConfig(tile_n=128), TileConfig(cluster=2)])
def test_other_tiles_than_a_layers_are_taken(config: TileConfig) -> None:
    assert Workbench("up_forward", config=config).config == config


def test_a_macro_that_is_no_text_is_refused(bench: Workbench) -> None:
    refuses(lambda: bench.run(1), "debug", TypeError)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("what", ["time", "counters"])
def test_what_needs_a_gpu_says_so(what: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{what}: expected a GPU of .* there is none"):
        getattr(Workbench("up_forward", T=64, d=64, n=64, E=4, K=2), what)()


def test_use_before_edit_is_refused(bench: Workbench) -> None:
    with pytest.raises(RuntimeError, match=r"call edit\(folder\) first"), bench.use():
        pass


# ---- the planted bugs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_sources(tmp_path: Path, bug: Bug) -> None:
    bench = Workbench(bug.product, **SHAPE)
    plant(bench.edit(tmp_path / "sources"), bug.edits)
    assert bench.diff()


# ---- the comparison -----------------------------------------------------------------------------------------------


@cache
def bench_of(name: str, activation: str) -> Workbench:
    """200 rows an expert, two row tiles."""
    return Workbench(name, T=300, d=40, n=72, E=3, K=2, activation=activation, device="cpu")


def made(name: str, activation: str = "swiglu") -> tuple[Case, Comparison, dict[str, Tensor]]:
    """A product's comparison, and outputs that are exact but for their rounding."""
    bench = bench_of(name, activation)
    inputs = bench._inputs
    values = {output: value.exact.to(inputs.values[output].dtype) for output, value in inputs.references.items()}
    return inputs.case, Comparison(inputs.references, inputs.places, fixed_order=bench.entry.fixed_order), values


@pytest.mark.parametrize("name", ["up_forward", "down_backward_act"])
@pytest.mark.parametrize("activation", ["geglu", "clamped_swiglu", "relu2", "silu"])
def test_right_outputs_are_right_whatever_the_activation(name: str, activation: str) -> None:
    _, comparison, values = made(name, activation)
    comparison.add(values)
    assert comparison.verdict(name)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("bias_score_grad", "expert_row_sum")])
def test_one_wrong_chunk_is_found(name: str) -> None:
    """16 bytes whose values are their neighbours', in each output."""
    values = made(name)[2]
    for output in values:
        wrong = {n: value.clone() for n, value in values.items()}
        lines = wrong[output].reshape(-1, wrong[output].shape[-1])
        if lines.shape[0] == 1:
            lines[0, 16:20] = lines[0, 20:24].clone()
        else:
            lines[100, 16:24] = lines[101, 16:24].clone()
        _, fresh, _ = made(name)
        fresh.add(wrong)
        verdict = fresh.verdict(name)
        assert not verdict and {tile.output for tile in verdict.tiles} == {output}
        assert 1 <= sum(tile.wrong for tile in verdict.tiles) <= 8
        if lines.shape[0] > 1:
            assert len(verdict.tiles) == 1 and {m.index[0] for m in verdict.mismatches} == {100}


def test_a_tile_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    case, comparison, values = made("up_forward")
    start = int(case.dispatch.expert_token_offsets[2])
    values["h"][start + 130, 72 + 5] += 1  # up of unit 5, in the second row tile of expert 2
    comparison.add(values)
    verdict = comparison.verdict("up_forward")
    (tile,) = verdict.tiles
    assert (tile.output, tile.expert, tile.row_tile, tile.column_tile, tile.wrong) == ("h", 2, 1, 0, 1)
    (mismatch,) = verdict.mismatches
    assert (mismatch.index, mismatch.row_in_expert) == ((start + 130, 77), 130)
    assert mismatch.token == int(case.row_token[start + 130]) and mismatch.other_run is None
    assert mismatch.got == pytest.approx(mismatch.expected + 1, abs=0.1) and mismatch.bound < 0.1
    beside = [n for n in mismatch.beside if n.line == start + 130]
    assert [n.column for n in beside] == [75, 76, 77, 78, 79] and len(mismatch.beside) == 5 + 2
    assert [n.wrong for n in beside] == [False, False, True, False, False]
    assert "row tile 1    x" in repr(verdict) and verdict.experts == [2]


def test_a_run_that_differs_is_told_and_shown() -> None:
    case, comparison, values = made("down_backward_act")
    row = int(case.dispatch.expert_token_offsets[1]) + 140
    pair = int(case.row_pair[row])
    for run in range(5):
        again = values["d_scores"].clone()
        again.view(torch.int32)[pair] ^= run == 3  # its last bit, within bounds
        comparison.add({**values, "d_scores": again})
    verdict = comparison.verdict("down_backward_act")
    assert not verdict and "differ from run to run" in verdict.summary and "~" in repr(verdict)
    (tile,) = verdict.tiles
    assert (tile.expert, tile.row_tile, tile.column_tile, tile.wrong, tile.differing) == (1, 1, 0, 0, 1)
    (mismatch,) = verdict.mismatches
    assert not mismatch.wrong and mismatch.other_run not in (None, mismatch.got)
    assert (mismatch.index, mismatch.token, mismatch.row_in_expert) == ((pair, 0), pair // 2, 140)


def test_a_late_run_that_is_wrong_is_shown_with_its_value() -> None:
    _, comparison, values = made("combine")
    for run in range(3):
        again = values["out"].clone()
        again[7, 9] += 100 * (run == 2)
        comparison.add({"out": again})
    (mismatch,) = comparison.verdict("combine").mismatches
    assert mismatch.wrong and mismatch.got > 90 and mismatch.other_run == pytest.approx(mismatch.got - 100, abs=1)


@pytest.mark.parametrize(("name", "output"), [("down_forward_fused", "fused"), ("up_backward_act_fused", "dx_fused")])
def test_what_has_no_fixed_order_may_differ(name: str, output: str) -> None:
    _, comparison, values = made(name)
    for run in range(2):
        again = values[output].clone()
        again.view(torch.int32)[3, 3] ^= run
        comparison.add({output: again})
    assert comparison.verdict(name)


@pytest.mark.parametrize(
    ("write", "counts"),
    [
        (lambda memory, words, guard: words[guard - 1].fill_(0), [1, 0, 0]),
        (lambda memory, words, guard: words[-guard:][:8].fill_(0), [0, 8, 0]),
        (lambda memory, words, guard: memory.values[6:].zero_(), [0, 0, 2 * 16]),
        (lambda memory, words, guard: memory.values[:5].zero_(), [0, 0, 0]),
    ],
    ids=["before", "after", "spare rows", "inside"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stray_writes_are_counted(write: Callable, counts: list[int], dtype: torch.dtype) -> None:
    memory = Poisoned(Output("row", (8, 16), dtype), "cpu")
    memory.poison()
    assert memory.values.isnan().all() and memory.values.shape == (8, 16)
    guard = memory.guards[0].numel()
    assert 2 * guard % 512 == 0
    write(memory, memory.words, guard)
    expected = [counts[0], counts[1], counts[2] * dtype.itemsize // 2]
    got = memory.touched(5 if counts[2] == 0 else 6).tolist()
    assert got == expected and len(told_stray("y", got)) == sum(count > 0 for count in expected)


def test_guards_of_a_long_workspace_are_bounded() -> None:
    memory = Poisoned(Output("", (1 << 20,), torch.float32), "cpu")
    assert [guard.nbytes for guard in memory.guards] == [MOST_GUARD, MOST_GUARD]
    assert Poisoned(Output("", (0,), torch.float32), "cpu").values.shape == (0,)


# ---- all of a check but the launches ------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Workbench]:
    """``on_a_cpu(product, spoil)``: a workbench whose launches write what is exact, then ``spoil(run, outputs, given)``."""
    monkeypatch.setattr(workbench, "_lacking", lambda device: "a GPU")
    monkeypatch.setattr(Workbench, "_compiled", lambda self, *builds: None)

    def make(name: str, spoil: Callable[..., None]) -> Workbench:
        bench, runs = Workbench(name, T=60, d=72, n=40, E=3, K=2), count()

        def launch(*_: object, **__: object) -> None:
            inputs = bench._inputs
            out = inputs.values
            for output, value in inputs.references.items():
                out[output].view(-1)[: value.exact.numel()] = value.exact.flatten().to(out[output].dtype)
            spoil(next(runs), out, inputs.read)

        monkeypatch.setattr(target, "launch", launch)
        return bench

    return make


@pytest.mark.parametrize("name", CALLS)
def test_a_check_of_right_outputs(name: str, on_a_cpu: Callable[..., Workbench]) -> None:
    bench = on_a_cpu(name, lambda run, out, given: None)
    verdict = bench.check(3)
    assert verdict and verdict.runs == 3 and set(bench.run()) == set(bench._inputs.references)


def test_a_check_poisons_before_every_run(on_a_cpu: Callable[..., Workbench]) -> None:
    def spoil(run: int, out: dict[str, Tensor], given: dict[str, Tensor]) -> None:
        if run == 2:
            out["y"][5] = torch.from_numpy(np.full(72, POISON, np.int16)).view(torch.bfloat16)

    verdict = on_a_cpu("down_forward", spoil).check(4)
    assert not verdict and {m.index[0] for m in verdict.mismatches} == {5} and verdict.experts == [0]


def test_a_check_tells_of_inputs_that_were_written_over(on_a_cpu: Callable[..., Workbench]) -> None:
    spoils = [True]

    def spoil(run: int, out: dict[str, Tensor], given: dict[str, Tensor]) -> None:
        if spoils.pop() if spoils else False:
            given["act"][3, 3] = 9

    bench = on_a_cpu("down_forward", spoil)
    verdict = bench.check(2)
    assert not verdict and verdict.stray == ("act: wrote over this input",)
    assert bench.check(2)  # they are made again
