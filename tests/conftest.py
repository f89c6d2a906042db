"""What every test shares: the ``gpu`` marker, seeds, an order of one's own, and that a test leaves things as it found them.

python -m pytest --order 7        # the tests shuffled by this seed
"""

import gc
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from blazeproto.runtime.arch import missing
from tests.gpu import passes_for
from tests.locks import alone

# Several of xdist's processes share the GPUs, whose memory is not enough for all on one; JAX would take three quarters of one's.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# On some CPUs MKL's bits depend on where an operand lies in memory, unless it is told otherwise before its first call.
os.environ.setdefault("MKL_CBWR", "AUTO")
if len(gpus := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) > 1:
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def _why_no_hopper() -> str | None:
    lacks = missing(torch.cuda.get_device_capability() if torch.cuda.is_available() else None, name="hopper")
    return f"needs {lacks}" if lacks else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", type=int, metavar="SEED", help="shuffle the tests by this seed")


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--order")
    return "order: as collected" if seed is None else f"order: shuffled, --order {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _why_no_hopper()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: not item.get_closest_marker("costly_fixture"))
    if (seed := config.getoption("--order")) is not None:
        random.Random(seed).shuffle(items)  # the same in each of xdist's processes


def pytest_collection() -> None:
    """No garbage is made meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Whoever collects garbage need not look at the tests and at the modules, which stay: a second each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes share a GPU: a test that takes much of its memory waits for others that do, and what a test took goes back."""
    much = request.node.get_closest_marker("much_gpu_memory") and torch.cuda.is_available()
    with alone("gpu-" + os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]) if much else nullcontext():
        yield
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 29:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def nvdisasm() -> None:
    """For tests that need it."""
    from blazeproto.gemm import nvrtc

    try:
        nvrtc.find_tool("nvdisasm")
    except FileNotFoundError:
        pytest.skip("needs nvdisasm")


@pytest.fixture
def default_dtype() -> Iterator[None]:
    """For tests that change torch's."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["hopper", "ampere"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each that has kernels: a Hopper GPU runs both, and passes for a GPU that runs the one alone."""
    with passes_for(request.param):
        yield request.param


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Torch's name of one of `DEVICES`."""
    name, _, backend = request.param.partition("-")
    with passes_for(backend) if backend else nullcontext():
        yield name


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every torch.empty comes filled with NaN (indices: the largest integer)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


# --- As it was found -------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """Something that outlives a test: how to look at it, and how to put it back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _table(module: str, name: str) -> Kept:
    """A module's dictionary, or a list; of the activations without those that a name with parameters has made."""

    def found() -> Any:
        return getattr(importlib.import_module(module), name)

    def read() -> Any:
        table = found()
        if isinstance(table, dict):
            return {key: value for key, value in table.items() if "(" not in str(key)}
        return list(table) if isinstance(table, list) else table

    def write(value: Any) -> None:
        table = found()
        if isinstance(table, dict):
            for key in [key for key in table if "(" not in str(key)]:
                del table[key]
            table.update(value)
        elif isinstance(table, list):
            table[:] = value
        else:
            setattr(sys.modules[module], name, value)

    return Kept(read, write)


def _write_environment(value: dict[str, str]) -> None:
    for key in _environment().keys() - value.keys():
        del os.environ[key]
    os.environ.update(value)


def _environment() -> dict[str, str]:
    """But for what libraries, and train_lm, set once they are imported or first used."""
    return {key: value for key, value in os.environ.items() if not key.startswith(LIBRARIES)}


LIBRARIES = (
    *("CUBLAS_", "CUDA_", "DISABLE_CUPTI", "GOMP_", "HF_", "JAX_", "KMP_", "MPL", "NCCL_", "PYTEST_", "PYTORCH_"),
    *("TEARDOWN_CUPTI", "TF_", "TOKENIZERS_", "TORCH", "TPU_", "TRITON_", "XLA_", "_TORCH"),
)


def _gpus() -> tuple[int, ...]:
    """The current GPU, as torch and as CuPy have it."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ()
    cupy = sys.modules.get("cupy")
    return (torch.cuda.current_device(), *([] if cupy is None else [cupy.cuda.runtime.getDevice()]))


KEPT = {
    **{
        f"{module}.{name}": _table(f"blazeproto.{module}", name)
        for module, name in (
            ("activations", "ACTIVATIONS"),
            ("activations", "_TABLE"),
            ("gemm.tiles", "TILES"),
            ("gemm.tiles", "CANDIDATES"),
            ("gemm.registry", "PRODUCTS"),
            ("gemm.product", "DEBUG"),
            ("gemm.product", "_edited"),
            ("gemm.tiles", "NARROW"),
            ("router.router", "ROUTERS"),
            ("router.scores", "SCORES"),
            ("router.choices", "CHOICES"),
        )
    },
    "the current GPU": Kept(_gpus, lambda value: torch.cuda.set_device(value[0]) if value else None),
    "torch's default dtype": Kept(torch.get_default_dtype, torch.set_default_dtype),
    "torch's deterministic algorithms": Kept(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch's filling of new memory": Kept(
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "torch's threads": Kept(torch.get_num_threads, torch.set_num_threads),
    "torch's matmul precision": Kept(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "whether gradients are on": Kept(torch.is_grad_enabled, torch.set_grad_enabled),
    "who compiles frames": Kept(eval_frame.get_eval_frame_callback, eval_frame.set_eval_frame),
    "torch's modes": Kept(
        lambda: (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()), lambda value: None
    ),
    "os.environ": Kept(_environment, _write_environment),
    "the current folder": Kept(os.getcwd, os.chdir),
}


def _unlike(value: Any, other: Any) -> Any:
    """The entries of a dictionary that the other one has not; another value itself."""
    if not isinstance(value, dict):
        return value
    return {key: entry for key, entry in value.items() if key not in other or other[key] != entry}


@pytest.fixture(autouse=True)
def as_it_was_found() -> Iterator[None]:
    """Puts back what a test has left changed, and fails it: the next test must not depend on it."""
    before = {name: kept.read() for name, kept in KEPT.items()}
    yield
    changed = []
    for name, kept in KEPT.items():
        after = kept.read()
        if name == "the current GPU" and len(before[name]) < len(after):  # initialised since
            before[name] = (0,) * len(after)
        if after != before[name]:
            kept.write(before[name])
            changed.append(f"{name}: {_unlike(before[name], after)} before, {_unlike(after, before[name])} after")
    if changed:
        pytest.fail("the test leaves changed what others read: " + "; ".join(changed), pytrace=False)
