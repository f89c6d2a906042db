"""The compiler's wrapper, and every kernel of the package compiled to machine code without a spill. Needs no GPU."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra cu12 or cu13")

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS
from blazeproto.gemm import compile, down_backward, linear, nvrtc, tiles, up, weight_fp8
from blazeproto.gemm.combine import slice_widths
from blazeproto.gemm.compile import CompileError, Kernel, compile_in_subprocess, compile_many
from blazeproto.gemm.launch import MAP_BYTES, Params
from blazeproto.gemm.product import PACKAGE, TRANSPOSED, Sizes, Variant, variants
from blazeproto.gemm.rows import QUANTIZED_ROWS_PARAMS, ROWS_PARAMS, SENDING_ROWS_PARAMS, STORED_ROWS_PARAMS
from blazeproto.gemm.stored import Storage
from blazeproto.gemm.tiles import (
    CHOSEN,
    FORCED,
    PLAIN,
    TILES,
    TileConfig,
    chosen,
    chosen_for_any,
    force,
    tiles_for,
)
from blazeproto.gemm.tuned import MEASURED
from blazeproto.gemm.up import UP_FORWARD
from blazeproto.gemm.weight import WEIGHT_PARAMS
from blazeproto.runtime import cache, driver
from blazeproto.runtime.arch import AMPERE, HOPPER
from tests.refusals import refuses

SOURCE = """
#include "ptx.cuh"
#include <cuda_bf16.h>
#include <cuda/std/cstdint>
extern "C" __global__ void first(float* x) {
    __shared__ float shared[N];
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = shared[N - 1 - threadIdx.x];
}
extern "C" __global__ void second(float* x) { *x = N; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small .cu file, and an empty cache."""
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.cu"
    path.write_text(SOURCE)
    return str(path)


def test_a_kernel_shows_what_became_of_it(source: str) -> None:
    kernel = Kernel(source, "first", {"N": 64}, dynamic_smem=1000)
    assert "not compiled" in repr(kernel) and kernel.cubin[:4] == b"\x7fELF" and ".target sm_90a" in kernel.ptx
    assert 0 < kernel.registers < 64 and kernel.spills == 0 and kernel.smem_bytes == 64 * 4 + 1000
    assert Kernel(source, "second", {"N": 64}).smem_bytes == 0
    assert "#define N 64" in kernel.source and "mbarrier_wait" in kernel.source  # with the headers it includes
    assert repr(kernel).startswith(f"Kernel(first: {kernel.registers} registers, 0 B spilled, 1256 B shared; ")


def test_sass_is_machine_code(nvdisasm: None, source: str) -> None:
    assert "STS" in Kernel(source, "first", {"N": 64}).sass


def test_errors_carry_the_log(source: str) -> None:
    for compiler in (Kernel.compile, compile_in_subprocess):
        with pytest.raises(CompileError, match='identifier "nonsense" is undefined'):
            compiler(Kernel(source, "first", {"N": "nonsense"}))
    with pytest.raises(CompileError, match="no extern 'C' __global__ function third"):
        _ = Kernel(source, "third", {"N": 64}).registers


def test_a_wrong_instruction_is_named_by_its_line(tmp_path: Path) -> None:
    """ptxas names the line of PTX that the compiler made; the error says whose it is, in a header too."""
    (tmp_path / "mine.cuh").write_text(
        '#pragma once\n__device__ void wrong() {\n    asm volatile("mul.f33 %r1, %r2;");\n}\n'
    )
    (tmp_path / "mine.cu").write_text(
        '#include "mine.cuh"\nextern "C" __global__ void mine() {\n    wrong();\n\n    asm volatile("add.q32 %r1, %r2;");\n}\n'
    )
    for compiler in (Kernel.compile, compile_in_subprocess):
        with pytest.raises(CompileError) as error:
            compiler(Kernel(str(tmp_path / "mine.cu"), "mine", {}))
        assert "(mine.cuh:3: mul.f33 %r1, %r2;); error" in str(error.value)
        assert "(mine.cu:5: add.q32 %r1, %r2;); error" in str(error.value)


def test_an_empty_log_leaves_python_s_bytes_alone(tmp_path: Path) -> None:
    """Python has one object for each single byte; with the b" " overwritten, torch.load read a 0 for every size of 32."""
    (tmp_path / "empty.cu").write_text('extern "C" __global__ void empty() {}\n')
    assert nvrtc.compile(str(tmp_path / "empty.cu"), ["--gpu-architecture=sm_90a"]).log == "" and b"a b"[1:2][0] == 32


def test_the_cache_is_used(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Kernel(source, "first", {"N": 64}).log
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    assert Kernel(source, "first", {"N": 64}).log == log
    assert Kernel(source, "second", {"N": 64}).log == log  # the same file, the same machine code


@pytest.mark.parametrize(
    "change",
    [
        lambda path: Kernel(path, "first", {"N": 65}),
        lambda path: Kernel(path, "first", {"N": 64}, options=("--maxrregcount=32",)),
        lambda path: Path(path).write_text(SOURCE.replace("N - 1", "N / 2")) and Kernel(path, "first", {"N": 64}),
    ],
    ids=["macro", "option", "source"],
)
def test_the_key_covers(source: str, change: Callable[[str], Kernel]) -> None:
    assert Kernel(source, "first", {"N": 64}).key != change(source).key


@pytest.mark.parametrize(
    ("include", "header", "complete"),
    [
        ('"mine.cuh"', "mine.cuh", True),
        ('"sub/outer.cuh"', "sub/mine.cuh", True),  # beside the header that includes it
        ('"ptx.cuh"', "ptx.cuh", True),  # before the package's of the same name
        ("MINE", "mine.cuh", False),
        ('"mine.cuh" // and no other', "mine.cuh", True),
        ('"mine.cuh" // a second #include', "mine.cuh", False),
        ('\\\n"mine.cuh"', "mine.cuh", False),
        ('/* mine */ "mine.cuh"', "mine.cuh", False),
        ("<mine.cuh>", "elsewhere/mine.cuh", False),
    ],
)
def test_a_header_beside_the_users_own_file_counts(
    include: str, header: str, complete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is included: it is in the key, or the machine code is not cached."""
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path / "cache"))
    options = (f"-I{tmp_path / 'elsewhere'}",) if "elsewhere" in header else ()
    (tmp_path / header).parent.mkdir(exist_ok=True)
    (tmp_path / "sub").mkdir(exist_ok=True)
    (tmp_path / "sub/outer.cuh").write_text('#include "mine.cuh"\n')
    path = tmp_path / "mine.cu"
    path.write_text(
        f'#define MINE "mine.cuh"\n#include {include}\nextern "C" __global__ void mine(int* x) {{ *x = WIDTH; }}\n'
    )
    made = []
    for width in ("4321", "4322"):
        (tmp_path / header).write_text(f"#define WIDTH {width}\n")
        kernel = Kernel(str(path), "mine", options=options)
        assert width in kernel.ptx and kernel.complete == complete and (width in kernel.source or not complete)
        made.append(kernel)
    assert made[0].key != made[1].key and len(list((tmp_path / "cache").glob("*.kernel"))) == (2 if complete else 0)


@pytest.mark.parametrize("option", ["-I/mine", "--include-path=/mine", "--pre-include=mine.cuh", "-include=mine.cuh"])
def test_options_that_name_headers_are_not_followed(source: str, option: str) -> None:
    """They may stand before CUDA's own of the same name."""
    assert Kernel(source, "first").complete and not Kernel(source, "first", options=(option,)).complete


def test_what_was_changed_before_it_was_compiled_is_not_cached_as_what_it_was(source: str) -> None:
    """`source` is read when it is asked for, and the compiler reads the files again."""
    kernel = Kernel(source, "second", {"N": 4321})
    assert "*x = N;" in kernel.source
    Path(source).write_text(SOURCE.replace("*x = N;", "*x = N + 1;"))
    kernel.compile()
    Path(source).write_text(SOURCE)
    assert Kernel(source, "second", {"N": 4321}).ptx != kernel.ptx


def test_headers_that_include_each_other_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "sub/../b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "sub/../a.cuh"\nconstexpr int WIDTH = 4321;\n')
    (tmp_path / "mine.cu").write_text('#include "a.cuh"\nextern "C" __global__ void mine(int* x) { *x = WIDTH; }\n')
    kernel = Kernel(str(tmp_path / "mine.cu"), "mine")
    assert "4321" in kernel.ptx and kernel.source.count("4321") == 1


def test_a_header_that_is_included_again_counts_again(tmp_path: Path) -> None:
    """One without a guard does something each time."""
    (tmp_path / "add.cuh").write_text("*x += 4321;\n")
    sources = ["", '#include "add.cuh"'], ['#include "add.cuh"', ""]
    keys = set()
    for first, second in sources:
        code = f'{{\n#include "add.cuh"\n{first}\n*x *= 3;\n{second}\n}}'
        (tmp_path / "mine.cu").write_text(f'extern "C" __global__ void mine(int* x) {code}\n')
        keys.add(Kernel(str(tmp_path / "mine.cu"), "mine").key)
    assert len(keys) == len(sources)


def test_a_source_that_is_no_utf8_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    keys = set()
    for letter in ("\u00e9", "\u00e8"):
        path.write_bytes(f'// {letter}\nextern "C" __global__ void mine(int* x) {{ *x = 1; }}\n'.encode("latin-1"))
        kernel = Kernel(str(path), "mine").compile()
        assert kernel.source.isascii()
        keys.add(kernel.key)
    assert len(keys) == 2


def test_a_kernel_that_two_threads_load_stays_loaded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread launches must not be unloaded because another, that began to load at the same time, ends later."""
    kernel, both = Kernel(source, "first", {"N": 64}).compile(), Barrier(2)

    def load(*_: object) -> object:
        both.wait(timeout=10)
        return object()

    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(compile, "capability_of", lambda _: (9, 0))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(kernel.function, (0, 0))
    assert first is second is kernel.function(0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 7), (8, 9), (9, 0), (12, 0), (99, 0)])
def test_a_gpu_gets_code_that_it_runs(
    source: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code for compute capability 8.0 runs on 8.6 and 8.9, not on Jetson Orin; of later GPUs those that NVRTC knows get
    their own, Hopper and unknown ones PTX. What all GPUs share is compiled for each."""
    monkeypatch.setattr(compile, "capability_of", lambda _: capability)
    ampere, shared = (Kernel(source, "first", {"N": 64}, arch=arch) for arch in (AMPERE, HOPPER))
    code = ampere._code_for(0)[0]
    if capability in ((8, 7), (12, 0)):
        assert code.startswith(b"\x7fELF") and code != ampere.cubin
    else:
        assert code == ampere.cubin if capability < (9, 0) else b".target sm_80" in code
    assert shared._code_for(0)[0] == (shared.cubin if capability == (9, 0) else code)


def test_a_crash_of_the_compiler_is_an_error(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing = tmp_path / "crash.py"
    crashing.write_text("import os\nos.abort()\n")
    monkeypatch.setattr(nvrtc, "__file__", str(crashing))
    with pytest.raises(CompileError, match="NVRTC crashed"):
        compile_in_subprocess(Kernel(source, "first", {"N": 64}))


def test_many_compile_in_parallel(source: str) -> None:
    kernels = compile_many([Kernel(source, "first", {"N": n}) for n in (32, 64, 32)], jobs=2)
    assert [kernel.smem_bytes for kernel in kernels] == [128, 256, 128] and len(list(cache.folder().iterdir())) == 2


# --- Every kernel of the package ---------------------------------------------------------------------------------------

KERNELS = list(gemm.all_kernels())


@pytest.fixture(scope="module")
def compiled() -> Callable[[Kernel], Kernel]:
    """A kernel once compiled. All start at once, a process a core; under pytest-xdist each worker compiles its own, and where
    NVRTC crashes another worker takes its place and the test has failed."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return Kernel.compile
    pool = ThreadPoolExecutor(os.cpu_count())
    futures: dict[int, Future[Kernel]] = {id(kernel): pool.submit(compile_in_subprocess, kernel) for kernel in KERNELS}
    return lambda kernel: futures[id(kernel)].result()


def kernels_to_compile() -> Iterator[Any]:
    """The full set alone has what others are between or beside: low-rank factors of two and three parts, rows of most numbers
    of experts, other activations than SwiGLU with a bias or weights in the other order."""
    for kernel in KERNELS:
        of = kernel.defines
        between = of.get("LOW_RANK") in (2, 3) or of.get("TOP_K") not in (None, 0, 1, 8)
        beside = of.get("ACTIVATION", "SILU") != "SILU" and (
            bool(of.get("HAS_BIAS")) or bool(of["B_MN"]) != (kernel.entry == "down_backward")
        )
        name = "-".join([kernel.entry, *(macro[2:] for macro in kernel.macros)])
        yield pytest.param(kernel, id=name, marks=[pytest.mark.full] if between or beside else [])


@pytest.mark.parametrize("kernel", kernels_to_compile())
def test_no_spills_and_no_serialised_wgmma(kernel: Kernel, compiled: Callable[[Kernel], Kernel]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(kernel).spills == 0, kernel.log
    assert kernel.smem_bytes <= kernel.arch.smem_limit and kernel.complete


OF_AMPERE = [kernel for kernel in KERNELS if kernel.arch is AMPERE]
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEAVY = {  # most registers of each file
    "up_forward": {"ACTIVATION": "SILU", "HAS_BIAS": True, "LOW_RANK": True, "B_MN": True},
    "linear": {"GATHER": True, "HAS_BIAS": True, "LOW_RANK": True, "B_MN": True},
    "down_backward": {"ACTIVATION": "SILU", "LOW_RANK": True},
    "weight_gradient": {"GATHER": True, "OUT_F32": True},
    "logits": {"WEIGHT_PARTS": 2},
}


def heavy(entry: str) -> Kernel:
    """The first that has most of these macros."""
    wanted = HEAVY[entry]
    ours = [kernel for kernel in OF_AMPERE if kernel.entry == entry]
    return max(ours, key=lambda kernel: sum(kernel.defines.get(name) == value for name, value in wanted.items()))


@pytest.mark.parametrize("entry", HEAVY)
def test_a_kernel_of_ampere_compiles_for_the_newest_gpus(entry: str) -> None:
    """sm_80 is among those above."""
    assert {*HEAVY} == {kernel.entry for kernel in OF_AMPERE}
    kernel = compile_in_subprocess(replace(heavy(entry), arch=replace(AMPERE, target="sm_120")))
    assert kernel.spills == 0 and kernel.complete


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_ampere_compiles_for_every_gpu(target: str) -> None:
    made = compile_many([replace(kernel, arch=replace(AMPERE, target=target)) for kernel in OF_AMPERE])
    assert not [kernel for kernel in made if kernel.spills or not kernel.complete]


STORAGES = (("mxfp4", 1, 32, 1), ("int4", 1, 128, 2, True), ("nf4", 1, 64, 4), ("fp8", 128, 128, 4))
STORED = [
    kernel(None, Variant(rank=rank, transposed=transposed, arch=AMPERE, stored=Storage(*of)))
    for of in STORAGES
    for rank in (0, 16)
    for kernel, transposed in (
        (up.kernel, False),
        (linear.kernel, False),
        (linear.kernel, True),
        (down_backward.kernel, False),
    )
]


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_that_decode_weights_compile_without_spills(target: str) -> None:
    made = compile_many([replace(kernel, arch=replace(AMPERE, target=target)) for kernel in STORED])
    assert not [kernel for kernel in made if kernel.spills or kernel.smem_bytes > AMPERE.smem_limit]


def layout_check(params: Params) -> str:
    """A kernel ``layout`` that compiles only if the struct lies in memory as described: where a field lies elsewhere, a call
    of a function without a body survives the optimiser. (NVRTC has no offsetof.)"""
    offsets = {name: MAP_BYTES * i for i, name in enumerate(params.maps)}
    offsets |= {name: params.words_offset + 8 * i for i, name in enumerate(params.words)}
    offsets |= {name: params.numbers_offset + 4 * i for i, name in enumerate(params.numbers)}
    fields = [
        f"if (reinterpret_cast<uint64_t>(&reinterpret_cast<{params.struct}*>(0)->{name}) != {at}) lies_elsewhere();"
        for name, at in offsets.items()
    ]
    lines = [
        f'#include "{params.header}"',
        f"static_assert(sizeof({params.struct}) == {params.size});",
        'extern "C" __device__ void lies_elsewhere();',
        f'extern "C" __global__ void layout() {{ {" ".join(fields)} }}',
    ]
    return "\n".join(lines)


STRUCTS = {
    "rows": (ROWS_PARAMS, gemm.kernel_for("up_forward")),
    "weights": (WEIGHT_PARAMS, gemm.kernel_for("up_backward_weight")),
    "rows of fp8": (QUANTIZED_ROWS_PARAMS, gemm.kernel_for("down_forward", precision="fp8")),
    "rows of stored weights": (STORED_ROWS_PARAMS, STORED[0]),
    "rows that are sent": (SENDING_ROWS_PARAMS, UP_FORWARD.kernel(None, Variant(sends=True))),
    "weights of fp8": (weight_fp8.PARAMS, weight_fp8.kernel()),
}


@pytest.mark.parametrize("which", STRUCTS)
def test_structs_lie_in_memory_as_launches_pack_them(which, tmp_path) -> None:
    """A kernel made of the description, compiled with a product's macros; and one of a wrong description, which must not."""
    params, like = STRUCTS[which]
    path, check = tmp_path / "layout.cu", layout_check(params)
    assert params.size <= driver.ArgumentBuffer.BYTES
    path.write_text(check)
    compile_in_subprocess(Kernel(str(path), "layout", like.defines))
    path.write_text(check.replace(f"!= {params.words_offset})", f"!= {params.words_offset + 8})"))
    with pytest.raises(CompileError, match="lies_elsewhere"):
        compile_in_subprocess(Kernel(str(path), "layout", like.defines))


# --- What can be asked for ---------------------------------------------------------------------------------------------


def test_a_changed_entry_of_the_table_holds_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gemm.kernel_for("up_forward")
    monkeypatch.setitem(TILES, "up_forward", TileConfig(deferred=False))
    assert "-DDEFERRED=0" in gemm.kernel_for("up_forward").macros and "-DDEFERRED=1" in before.macros


@pytest.mark.parametrize(
    ("columns", "tile_n"), [(64, 192), (256, 256), (768, 256), (1440, 256), (2880, 192), (4096, 256), (5120, 256)]
)
def test_tiles_are_as_wide_as_leaves_few_columns_idle(columns: int, tile_n: int) -> None:
    for product in ("down_forward", "up_backward_act"):
        assert tiles_for(product, columns) == replace(TILES[product], tile_n=tile_n)
    assert tiles_for("up_forward", columns) == TILES["up_forward"]


@pytest.mark.parametrize("product", CHOSEN)
def test_the_nearest_measured_layer_chooses_the_tiles(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for (rows, d, n), changes in MEASURED["hopper"][product].items():
        expected = replace(PLAIN[product], **changes)
        assert chosen(product, round(1000 * rows), 1000, d, n) == expected
        assert chosen(product, round(1040 * rows), 1000, round(1.02 * d), n) == expected
        assert expected in chosen_for_any(product, d, n)
    sizes = {(d, n) for _, d, n in MEASURED["hopper"][product]} | {(64, 64), (0, 0), (3000, 5000)}
    for (d, n), rows, experts in itertools.product(sizes, (0, 1, 7, 100, 6400, 10**6, 2**30), (1, 8, 512)):
        assert chosen(product, rows, experts, d, n) in chosen_for_any(product, d, n)
    monkeypatch.setitem(TILES, product, TileConfig(deferred=False))
    assert chosen(product, 1, 1, 64, 64) == TileConfig(deferred=False) and len(chosen_for_any(product, 64, 64)) == 1


def test_the_nearest_layer_is_nearest_by_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, d and n count alike."""
    layers: dict[tuple[float, int, int], dict[str, Any]] = {
        (100.0, 1000, 1000): {},
        (400.0, 1000, 1000): {"tickets": True},
        (100.0, 4000, 1000): {"cluster": 2},
    }
    layers |= {(100.0, 1000, 4000): {"few_rows": True}}
    # Three octaves of rows away from (50, 1000, 64000), and 1.9 of rows and of d: nearer, of squares.
    layers |= {(6.25, 1000, 64000): {"deferred": False}, (186.6, 3732, 64000): {"tile_n": 128}}
    monkeypatch.setitem(MEASURED["hopper"], "up_forward", layers)
    tiles._nearest.cache_clear()
    try:
        for sizes, changes in {
            (190, 1900, 1900): {},
            (230, 1900, 1900): {"tickets": True},
            (190, 2100, 1900): {"cluster": 2},
            (190, 1900, 2100): {"few_rows": True},
            (10**6, 1000, 1000): {"tickets": True},
            (50, 1000, 64000): {"tile_n": 128},
        }.items():
            rows, d, n = sizes
            assert chosen("up_forward", 8 * rows, 8, d, n) == replace(PLAIN["up_forward"], **changes), sizes
    finally:
        tiles._nearest.cache_clear()


@pytest.mark.parametrize("name", [name for name in gemm.PRODUCTS if name in TILES and name not in CHOSEN])
def test_rows_past_an_end_stay_unread_in_two_products(name: str) -> None:
    refuses(lambda: gemm.kernel_for(name, replace(TILES[name], few_rows=True)), "config")


def test_forced_tiles_are_every_launch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in FORCED[1:]:
        force(**changes)
        assert {chosen(name, rows, 8, 4096, 1536) for name in CHOSEN for rows in (1, 2000, 10**6)} == {
            replace(PLAIN[name], **changes) for name in CHOSEN
        }
    force()
    assert all(TILES[name] is PLAIN[name] for name in CHOSEN)
    in_table = {frozenset(changes.items()) for layers in MEASURED["hopper"].values() for changes in layers.values()}
    assert in_table - {frozenset({"few_rows": True, "tile_n": 128}.items())} <= {frozenset(f.items()) for f in FORCED}


@pytest.mark.full
@pytest.mark.parametrize("product", CHOSEN)
def test_the_tables_tiles_have_no_spills_in_any_variant(product: str) -> None:
    """Those of the compile-all list have the plain tiles."""
    made = gemm.PRODUCTS[product]
    assert made.kernel is not None
    choices = {tuple(changes.items()) for changes in MEASURED["hopper"][product].values()}
    options = {"activation": ACTIVATIONS} | ({"bias": (False, True)} if "bias" in made.options else {})
    ranks = variants(activation=TRANSPOSED, transposed=(False, True), rank=(16, 64))
    for changes, variant in itertools.product(choices, [*variants(**options), *ranks]):
        kernel = made.kernel(replace(PLAIN[product], **dict(changes)), variant, PACKAGE)
        assert kernel.spills == 0, (changes, variant)


def test_a_layer_gets_ready_the_tiles_that_its_launches_take() -> None:
    """2880 columns in one slice take tiles of 192, and so do some of the slices that many tokens are summed in."""
    layer = (Sizes(0, 2880, 64, 8, 4), Variant(), Variant())
    for product, variant in (("down_forward", {"bias": False}), ("up_backward_act", {})):
        wanted = {gemm.kernel_for(product, tiles_for(product, width), **variant) for width in slice_widths(2880)}
        assert set(gemm.PRODUCTS[product].for_layer(*layer)) == wanted and len(wanted) == 2


@pytest.mark.parametrize(
    ("product", "config"),
    [
        ("up_forward", TileConfig(cluster=2, tickets=True)),
        ("down_forward", TileConfig(tile_n=192, cluster=2)),
        ("up_backward_weight", TileConfig(tile_n=64, stages=8, cluster=2)),
        ("down_backward_act", TileConfig(tile_n=128, deferred=False)),
        ("up_forward", TileConfig(tile_n=192)),
        ("up_backward_weight", TileConfig(tile_n=192)),
        ("down_forward", TileConfig(tickets=True)),
    ],
)
def test_tiles_that_a_product_has_not_are_refused(product: str, config: TileConfig) -> None:
    refuses(lambda: gemm.kernel_for(product, config), "config")


@pytest.mark.parametrize(
    ("field", "value"), [("tile_n", 100), ("stages", 3), ("deferred", 1), ("tile_n", 256.0), ("few_rows", 1)]
)
def test_tiles_that_there_are_not_are_refused(field: str, value: Any) -> None:
    refuses(lambda: TileConfig(**{field: value}), field)


TILED = [
    (product, TileConfig(tile_n, stages, deferred))
    for product in ("up_forward", "down_forward", "up_backward_weight")
    for tile_n, stages, deferred in ((128, 4, True), (128, 2, False), (256, 2, True))
]


@pytest.mark.full
@pytest.mark.parametrize(("product", "config"), TILED)
def test_every_tile_on_offer_compiles(product: str, config: TileConfig) -> None:
    assert compile_in_subprocess(gemm.kernel_for(product, config)).smem_bytes <= HOPPER.smem_limit


def test_the_last_stage_of_low_rank_factors_is_as_short_as_the_rank() -> None:
    """wgmma of 16 elements in it, four in a whole stage."""
    assert [Variant(rank=rank).low_rank for rank in (0, 8, 16, 64, 72, 200)] == [0, 1, 1, 4, 4, 4]
