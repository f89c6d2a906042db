"""The checks and the tuner of a user's GPU, and what follows from their notes. No test here needs a GPU: its part is patched."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from blazeproto import __version__, doctor, gemm
from blazeproto.__main__ import main
from blazeproto.autograd import backends
from blazeproto.doctor import Gpu, Run
from blazeproto.gemm import tiles, weight
from blazeproto.gemm.product import Variant
from blazeproto.gemm.tiles import OF_AMPERE, TUNED
from blazeproto.lab import card
from blazeproto.lab.oracle import make_case
from blazeproto.runtime import notes, optional
from blazeproto.runtime.arch import AMPERE
from tests.gpu import cleared

NAME = "NVIDIA RTX 6000/8000"
GPU = Gpu(NAME, (8, 0), "535.1", (12, 2))
SMALL = gemm.Sizes(200, 72, 40, 4, 2)
CACHES = backends.backend_on, backends._missing_on_device, backends._failed_check


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def set_all(monkeypatch: pytest.MonkeyPatch, owner: Any, **answers: Any) -> None:
    """Functions of a module give these answers, whatever they are asked."""
    for name, answer in answers.items():
        monkeypatch.setattr(owner, name, lambda *_, answer=answer: answer)


# --- Notes -------------------------------------------------------------------------------------------------------------------


def test_a_note_is_of_a_gpu_and_a_version(folder: Path) -> None:
    assert notes.noted("check", NAME) == {}
    file = notes.note("check", NAME, failed="3 of 8")
    assert file == folder / f"check-NVIDIA-RTX-6000-8000-{__version__}.json"
    assert notes.noted("check", NAME) == {"failed": "3 of 8"}
    assert notes.noted("check", "another") == notes.noted("tiles", NAME) == {}


@pytest.mark.parametrize("text", ["", "{", "3", "[1]", "null"])
def test_a_damaged_note_is_none(text: str) -> None:
    notes.note("tiles", NAME).write_text(text)
    assert notes.noted("tiles", NAME) == {}


# --- doctor --check ----------------------------------------------------------------------------------------------------------

Check = Callable[..., int]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """The command's exit code on a GPU where the checks give ``run``, without a package that is ``missing``."""

    def run(gpu: Gpu | None, run: Run, missing: str = "") -> int:
        set_all(monkeypatch, doctor, find_gpu=gpu)
        monkeypatch.setattr(doctor, "probe", {"card": run}.__getitem__)
        monkeypatch.setattr(optional, "missing", {missing: f"{missing}>=13"}.get)
        return main(["doctor", "--check"])

    return run


@pytest.mark.parametrize(
    ("gpu", "package", "lacks"),
    [
        (None, "", "a GPU of compute capability 8.0 or later; there is none"),
        (Gpu("old", (7, 5), "535.1", (12, 2)), "", "a GPU of compute capability 8.0 or later; this one has 7.5"),
        (GPU, "cupy", "cupy>=13"),
    ],
)
def test_the_check_says_what_is_missing(
    check: Check, capsys: pytest.CaptureFixture[str], gpu: Gpu | None, package: str, lacks: str
) -> None:
    assert check(gpu, Run("ok"), package) == 1 and capsys.readouterr().out == f"The check needs {lacks}.\n"


def test_a_failure_is_noted_and_a_pass_removes_it(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(GPU, Run("ampere: swiglu: FAILED\n  dx: norm", "1 of 8 checks failed")) == 1
    out, file = capsys.readouterr().out, notes.note_path("check", NAME)
    for words in (NAME, "compute capability 8.0", "driver 535.1", f"torch {torch.__version__}", "dx: norm", str(file)):
        assert words in out
    assert notes.noted("check", NAME) == {"failed": "1 of 8 checks failed"}
    assert check(GPU, Run("", "ModuleNotFoundError: torch")) == 1 and file.exists()  # which says nothing of the kernels
    assert check(GPU, Run("ampere: swiglu: ok")) == 0 and not file.exists()
    assert "All checks passed." in capsys.readouterr().out and check(GPU, Run("ampere: swiglu: ok")) == 0


@pytest.mark.parametrize(
    ("run", "noted"),
    [
        (Run("ampere: swiglu:", "crashed (signal 11)"), True),
        (Run("no answer", "no answer in 900 s"), True),
        (Run("ampere: swiglu:", "torch.OutOfMemoryError: CUDA out of memory"), False),
        (Run("ampere: swiglu:", "Compile with TORCH_USE_CUDA_DSA", "CUDA error: out of memory\n"), False),
        (Run("ampere: swiglu:", "crashed (signal 9)"), False),
        (Run("", "RuntimeError: no CUDA"), False),
    ],
)
def test_which_errors_are_the_kernels(check: Check, run: Run, noted: bool) -> None:
    assert check(GPU, run) == 1 and notes.note_path("check", NAME).exists() == noted


def test_a_folder_that_cannot_be_written_is_named(check: Check, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(SystemExit, match="1"):
        check(GPU, Run("ampere: swiglu: FAILED", "1 of 8 checks failed"))
    assert notes.noted("check", NAME) == {}


def test_a_hang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CARD_TIMEOUT", 0.2)
    monkeypatch.setitem(doctor.PROBES, "card", "import time; time.sleep(60)")
    assert doctor.probe("card") == Run("no answer", "no answer in 0.2 s")


def test_the_probe_needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        run = doctor.probe("card")
        assert run.printed == "" and run.error and "NameError" not in run.error and "Import" not in run.error


# --- What auto takes after a failure -----------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_all(monkeypatch, torch.cuda, get_device_capability=(8, 0), get_device_name=NAME, device_count=1)
    set_all(monkeypatch, optional, missing=None)
    with cleared(*CACHES):
        yield


@pytest.mark.usefixtures("on_gpu")
def test_auto_takes_torch_where_a_check_failed(recwarn: pytest.WarningsRecorder) -> None:
    here = torch.device("cuda", 0), torch.bfloat16
    notes.note("check", "another GPU", failed="1 of 8")
    made = [backends.backend_on("auto", *here, 8, 64, needs=needs) for needs in ((), ("fp8",))]
    assert made == [backends.ampere_backend, backends.torch_backend]
    file = notes.note("check", NAME, failed="1 of 8")
    for function in CACHES:
        function.cache_clear()
    assert all(backends.backend_on("auto", *here, E, 64) is backends.torch_backend for E in (8, 16))
    assert backends.what_runs("auto", *here, 8, 64).startswith("torch: the kernels need `python -m blazeproto doctor")
    assert not backends.has_dispatch_kernels("auto", here[0])
    (warning,) = [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    assert "doctor --check" in warning and str(file) in warning and NAME in warning
    assert backends.backend_on("ampere", *here, 8, 64) is backends.ampere_backend
    assert backends.has_dispatch_kernels("ampere", here[0])


# --- The checks themselves ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "SIZES", SMALL)
    monkeypatch.setattr(gemm, "prepare", lambda *_, **__: [])


@pytest.mark.usefixtures("small")
def test_right_layers_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(card.reference, "moe_mlp", wraps=card.reference.moe_mlp) as exact:
        card.check("cpu", "torch")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(card.LAYERS) and all(line.endswith(": ok") for line in lines)
    assert {call.kwargs["x"].dtype for call in exact.call_args_list} == {torch.float64}


@pytest.mark.usefixtures("small")
def test_a_wrong_output_and_a_wrong_gradient_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right, calls = card.moe_mlp, []

    def wrong(x: Any, gate_up_proj: Any, **rest: Any) -> Any:
        calls.append(gate_up_proj.is_contiguous())
        if len(calls) % 2 == 0:  # the yardstick
            return right(x, gate_up_proj, **rest)
        up = gate_up_proj if rest["activation"] == "relu2" else 1.01 * gate_up_proj.detach() + 0 * gate_up_proj
        out = right(x, up, **rest)
        return out * torch.ones(len(x), 1).index_fill_(0, torch.tensor([7]), torch.nan) if up is gate_up_proj else out

    monkeypatch.setattr(card, "moe_mlp", wrong)
    monkeypatch.setattr(
        card, "logits_product", lambda x, w: (x.double() @ w.double().T).index_fill(0, torch.tensor(3), torch.nan)
    )
    with pytest.raises(SystemExit, match="8 of 8 checks failed"):
        card.check("cpu", "torch")
    out = capsys.readouterr().out
    assert "logits of a router: FAILED\n  4 of 800 exceed" in out and out.count("d_up_proj: norm") == len(card.LAYERS)
    assert "out: norm" in out and calls.count(False) == 2 * card.SEEDS * 3  # transposed


def test_each_output_is_large_enough_to_judge_finely() -> None:
    _, d, n, E, _, _ = card.SIZES
    assert card.SEEDS * min(E * n, E * d, card.SIZES.rows) >= 10_000
    assert any(routing == "half_empty" for _, routing, *_ in card.LAYERS)


# --- tune --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The tuner on a GPU of this capability, where 128 columns win in up_forward alone."""

    def timed(calls: Mapping[str, Any], **_: Any) -> dict[str, float]:
        product = calls["256"].func.__name__
        assert {width: call.keywords["config"] for width, call in calls.items()} == {
            str(width): config for width, config in OF_AMPERE.items()
        }
        return {"256": 1.0, "128": 0.5 if product == "up_forward" else 0.995}

    monkeypatch.setattr(card, "interleaved_ms", timed)
    set_all(monkeypatch, card, make_case=make_case(SMALL, device="cpu"))
    set_all(monkeypatch, torch.cuda, is_available=True, get_device_name=NAME)
    return lambda capability: set_all(monkeypatch, torch.cuda, get_device_capability=capability)


@pytest.mark.parametrize(
    ("capability", "options"), [((8, 6), ()), ((8, 6), ("--backend", "ampere")), ((9, 0), ("--backend", "ampere"))]
)
def test_tune_keeps_the_fastest(
    tuned: Callable[..., None],
    capability: tuple[int, int],
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned(capability)
    assert main(["tune", "200,72,40,4,2", *options]) == 0
    out = capsys.readouterr().out
    assert NAME in out and str(notes.note_path("tiles", NAME)) in out and all(product in out for product in TUNED)
    assert notes.noted("tiles", NAME) == dict.fromkeys(TUNED, 256) | {"up_forward": 128}


def test_tune_says_where_it_does_not_run(tuned: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    for capability, lacks in (
        ((7, 5), "expected a GPU of compute capability 8.0 or later"),
        ((9, 0), "--backend ampere"),
    ):
        tuned(capability)
        with pytest.raises(SystemExit):
            main(["tune", "200,72,40,4,2"])
        assert lacks in capsys.readouterr().err and not notes.noted("tiles", NAME)


def test_tune_names_sizes_that_do_not_fit(
    tuned: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned((8, 0))
    monkeypatch.setattr(card, "_times", MagicMock(side_effect=torch.OutOfMemoryError("full")))
    with pytest.raises(SystemExit):
        main(["tune", "200,72,40,4,2"])
    assert "expected sizes that fit in the GPU's memory, got full" in capsys.readouterr().err


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ampere's tiles as before the first launch, on a GPU of the name ``NAME``."""
    answers = {"cuda.runtime.getDeviceProperties.return_value": {"name": NAME.encode()}}
    set_all(monkeypatch, optional, cupy=MagicMock(**answers))
    with cleared(tiles.table_of), patch.dict(AMPERE.tiles):
        yield


@pytest.mark.usefixtures("fresh")
def test_launches_take_the_tiles_that_tune_kept() -> None:
    notes.note("tiles", NAME, up_forward=128, down_forward=128, up_backward_weight=128, down_backward_act=128, x=128)
    assert tiles.chosen("up_forward", 8, 8, 64, 64, arch=AMPERE) is OF_AMPERE[128]
    assert tiles.chosen_for_any("up_forward", 64, 64, arch=AMPERE) == [OF_AMPERE[128]]
    assert tiles.tiles_for("down_forward", 264, arch=AMPERE) is OF_AMPERE[128]
    assert tiles.tiles_for("up_backward_weight", 256, arch=AMPERE) is OF_AMPERE[128]
    assert tiles.tiles_for("down_forward", 256, arch=AMPERE) is OF_AMPERE[256]  # its output may lie over its rows
    assert tiles.chosen("down_backward_act", 8, 8, 64, 64, arch=AMPERE) is OF_AMPERE[256]
    assert tiles.tiles_for("up_backward_act", 264, arch=AMPERE) is OF_AMPERE[256] and "x" not in AMPERE.tiles
    assert tiles.chosen("up_forward", 8, 8, 64, 64).stages == 4  # Hopper's own


@pytest.mark.usefixtures("fresh")
def test_a_weight_gradient_may_be_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    notes.note("tiles", NAME, up_backward_weight=128)
    at, widths = SimpleNamespace(arch=AMPERE, where=(8, 4, 0)), list[int]()
    monkeypatch.setattr(weight, "_plan", lambda *given: widths.append(given[5].tile_n))
    with pytest.raises(TypeError):  # this is no plan
        weight.launch(weight.UP, None, None, at, dw=torch.empty(4, 64, 64), f32=False)
    assert widths == [weight.kernel(None, Variant(True, True, arch=AMPERE)).defines["BN"]] == [128]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("width", [64, "128", None, [128]])
def test_widths_that_no_kernel_has_are_left_out(width: Any) -> None:
    notes.note("tiles", NAME, up_forward=width)
    assert tiles.chosen("up_forward", 8, 8, 64, 64, arch=AMPERE) is OF_AMPERE[256]


@pytest.mark.usefixtures("fresh")
def test_an_entry_that_was_changed_stays() -> None:
    notes.note("tiles", NAME, up_forward=128)
    for changed in (gemm.TileConfig(stages=2, deferred=False), OF_AMPERE[128]):
        AMPERE.tiles["up_forward"] = changed
        assert tiles.chosen("up_forward", 8, 8, 64, 64, arch=AMPERE) is changed
