"""The builders on the GPU, compared with the NumPy twin exactly."""

import numpy as np
import pytest
import torch
from routings import KINDS, capacities, differences, make_foreign, make_routing, make_varying, to_numpy

from blazeproto.dispatch import (
    build_dispatch,
    build_dispatch_varying,
    prepare_dispatch,
    reference,
    workspace_bytes,
)
from blazeproto.dispatch.build import fill_dispatch
from tests.gpu import no_waiting
from tests.refusals import refuses

pytestmark = pytest.mark.gpu

METHODS = ("tiled", "dense", "sort")
# (T, E, K): tails, one tile and many, E = 1, K = E, K above a warp and a block, E above a block's threads
SHAPES = [
    (0, 8, 2),
    (1, 1, 1),
    (31, 4, 4),
    (1000, 40, 8),
    (1025, 512, 10),
    (300, 300, 300),
    (700, 64, 33),
    (8192, 128, 8),
    (5000, 2000, 3),
    (70_000, 16, 4),
    (300_001, 8, 2),
]


def cuda(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def poisoned_outputs(num_pairs: int, num_experts: int, guard: int = 64, ids: str = "int32"):
    """Outputs inside buffers whose ends show a stray write."""
    sizes = {"expert_pair_indices": num_pairs, "expert_token_offsets": num_experts + 1, "token_index_map": num_pairs}
    if ids == "int64":
        sizes["token_expert_indices"] = num_pairs
    buffers = {
        name: torch.full((size + 2 * guard,), -77, dtype=torch.int32, device="cuda") for name, size in sizes.items()
    }
    return buffers, {name: buffer[guard:-guard] for name, buffer in buffers.items()}


def assert_guards(buffers, guard: int = 64) -> None:
    for name, buffer in buffers.items():
        assert (buffer[:guard] == -77).all() and (buffer[-guard:] == -77).all(), f"{name} was written out of bounds"


def assert_same(got, expected) -> None:
    lines = differences(got, expected)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_twin(method, shape):
    num_tokens, num_experts, top_k = shape
    for kind in KINDS:
        for dtype in ("int32", "int64") if num_tokens in (1, 1000, 1025) else ("int32",):
            ids = make_routing(kind, num_tokens, num_experts, top_k, dtype=dtype)
            buffers, out = poisoned_outputs(ids.size, num_experts, ids=dtype)
            got = build_dispatch(cuda(ids), num_experts, method=method, out=out)
            assert_guards(buffers)
            assert_same(got, reference.build_dispatch(ids, num_experts))


@pytest.mark.parametrize("shape", [(2**20, 128, 8), (2**20 + 77, 512, 10), (2**22, 256, 8)], ids=str)
def test_large(shape):
    num_tokens, num_experts, top_k = shape
    ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices.int()
    ids[torch.rand(ids.shape, device="cuda") < 0.05] = -1
    right = reference.build_dispatch(ids.cpu().numpy(), num_experts)
    for method in METHODS:
        assert_same(build_dispatch(ids, num_experts, method=method), right)


@pytest.mark.parametrize("method", METHODS)
def test_varying(method):
    for num_tokens, num_experts in [(0, 4), (1, 1), (3000, 9), (100_000, 128), (2000, 512)]:
        experts, tokens, offsets = make_varying(num_tokens, num_experts, spare=100)
        arguments = [cuda(array) for array in (experts, tokens, offsets)]
        got = build_dispatch_varying(*arguments, num_experts, method=method, validate=True)
        assert_same(got, reference.build_dispatch_varying(experts, tokens, offsets, num_experts))


@pytest.mark.parametrize("method", ["tiled", "dense"])
@pytest.mark.parametrize("num_tokens", [90, 20_000, 300_000])
def test_experts_named_twice_stay_in_bounds(method, num_tokens):
    for num_experts, top_k in [(3, 4), (128, 8), (512, 2), (1, 8)]:
        ids = np.random.default_rng(0).integers(-1, num_experts, (num_tokens, top_k)).astype(np.int32)
        ids[-1, :2] = num_experts - 1  # 90 tokens that draw 2 of 512 experts may all draw distinct ones
        buffers, out = poisoned_outputs(ids.size, num_experts)
        guarded = torch.full(
            (workspace_bytes(num_tokens, top_k, num_experts, method) // 4 + 65,), -77, device="cuda"
        ).int()
        build_dispatch(cuda(ids), num_experts, method=method, out=out, workspace=guarded[:-64])
        assert_guards(buffers)
        assert (guarded[-64:] == -77).all()
        offsets, rows, index_map = (
            to_numpy(out[name]) for name in ("expert_token_offsets", "expert_pair_indices", "token_index_map")
        )
        assert offsets[0] == 0 and (np.diff(offsets) >= 0).all() and offsets[-1] <= ids.size
        assert (rows[: offsets[-1]] >= 0).all() and (rows < ids.size).all() and (rows[offsets[-1] :] == -1).all()
        assert (index_map >= -1).all() and (index_map < offsets[-1]).all()
        with pytest.raises(ValueError, match="distinct"):
            build_dispatch(cuda(ids), num_experts, method=method, validate=True)


@pytest.mark.parametrize("method", ["tiled", "dense"])
def test_captured_in_a_graph_and_replayed_with_another_routing(method):
    num_tokens, num_experts, top_k = 9000, 64, 6
    first, second = (make_routing(kind, num_tokens, num_experts, top_k) for kind in ("random", "sentinels"))
    ids = cuda(first)
    _, out = poisoned_outputs(ids.numel(), num_experts)
    workspace = torch.empty(workspace_bytes(num_tokens, top_k, num_experts, method), dtype=torch.uint8, device="cuda")
    prepare_dispatch(num_tokens, top_k, num_experts, method=method)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = build_dispatch(ids, num_experts, method=method, out=out, workspace=workspace)
    for routing in (first, second):
        ids.copy_(cuda(routing))
        for array in out.values():
            array.fill_(-77)
        graph.replay()
        assert_same(got, reference.build_dispatch(routing, num_experts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 4, 2), (1, 1, 1), (1000, 2, 8), (3000, 40, 8), (700, 300, 5)], ids=str)
def test_a_capacity(method, shape):
    """No row, some rows and all rows beyond it; K > E with ids outside among the shapes."""
    num_tokens, num_experts, top_k = shape
    for dtype in ("int32", "int64"):
        ids = make_foreign(num_tokens, num_experts, top_k, dtype=dtype)
        num_rows = int(reference.build_dispatch(ids, num_experts).expert_token_offsets[-1])
        for capacity in capacities(num_rows):
            buffers, out = poisoned_outputs(ids.size, num_experts, ids=dtype)
            out["expert_pair_indices"] = out["expert_pair_indices"][:capacity]
            out["overflow"] = torch.full((1,), -77, dtype=torch.int32, device="cuda")
            expected = reference.build_dispatch(ids, num_experts, row_capacity=capacity)
            got = build_dispatch(cuda(ids), num_experts, row_capacity=capacity, method=method, out=out)
            assert_guards(buffers)
            assert_same(got, expected)
            assert (buffers["expert_pair_indices"][64 + min(capacity, ids.size) :] == -77).all()
            assert_same(build_dispatch(cuda(ids), num_experts, row_capacity=capacity, method=method), expected)


def test_a_capacity_of_a_varying_number():
    varying = make_varying(2000, 16)
    tensors = [cuda(array) for array in varying]
    for capacity in capacities(int(varying[2][-1])):
        got = build_dispatch_varying(*tensors, 16, row_capacity=capacity)
        assert_same(got, reference.build_dispatch_varying(*varying, 16, row_capacity=capacity))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_layers_lists_are_filled(dtype):
    ids = make_foreign(3000, 8, 6, dtype=dtype)
    for capacity in (0, 1000, ids.size):
        sizes = [capacity, 9, ids.size]
        lists = tuple(torch.full((size,), -77, dtype=torch.int32, device="cuda") for size in sizes)
        fill_dispatch(cuda(ids), 8, lists)
        right = reference.build_dispatch(ids, 8, row_capacity=capacity)
        wanted = (right.expert_pair_indices, right.expert_token_offsets, right.token_index_map)
        for mine, theirs in zip(lists, wanted, strict=True):
            np.testing.assert_array_equal(to_numpy(mine), theirs)


@pytest.mark.parametrize("method", ["tiled", "dense"])
def test_a_capacity_captured_in_a_graph(method):
    """Replayed with a routing that fits, and with one that does not."""
    num_tokens, num_experts, top_k, capacity = 3000, 8, 6, 2000
    few = make_foreign(num_tokens, num_experts, top_k)
    few[1500:] = -1
    many = make_routing("random", num_tokens, num_experts, top_k)
    ids = cuda(few)
    needed = workspace_bytes(num_tokens, top_k, num_experts, method, row_capacity=capacity)
    workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
    prepare_dispatch(num_tokens, top_k, num_experts, method=method, row_capacity=capacity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = build_dispatch(ids, num_experts, row_capacity=capacity, method=method, workspace=workspace)
    for routing in (few, many, few):
        ids.copy_(cuda(routing))
        graph.replay()
        expected = reference.build_dispatch(routing, num_experts, row_capacity=capacity)
        assert (expected.overflow[0] > 0) == (routing is many)
        assert_same(got, expected)


def test_the_same_bits_each_time():
    ids = cuda(make_routing("zipf", 100_000, 128, 8))
    first = build_dispatch(ids, 128)
    for _ in range(20):
        again = build_dispatch(ids, 128)
        assert torch.equal(first.expert_pair_indices, again.expert_pair_indices)
        assert torch.equal(first.token_index_map, again.token_index_map)


def test_no_waiting_for_the_device():
    ids = cuda(make_routing("random", 1000, 8, 2))
    build_dispatch(ids, 8)
    with no_waiting():
        for method in ("tiled", "dense"):
            build_dispatch(ids, 8, method=method)


def test_on_the_current_stream():
    """A busy stream, the ids written late in it: only work queued behind them sees them."""
    right = make_routing("random", 50_000, 64, 4)
    source, ids = cuda(right), torch.full((50_000, 4), -1, dtype=torch.int32, device="cuda")
    build_dispatch(ids, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        ids.copy_(source)
        got = build_dispatch(ids, 64)
    stream.synchronize()
    assert_same(got, reference.build_dispatch(right, 64))


@pytest.mark.parametrize("library", ["torch", "cupy", "numba", "dlpack"])
def test_arrays_of_every_library(library):
    import cupy

    ids = make_routing("random", 500, 16, 4)
    if library == "torch":
        array = cuda(ids)
    elif library == "cupy":
        array = cupy.asarray(ids)
    elif library == "numba":
        from numba import cuda as numba_cuda

        array = numba_cuda.to_device(ids)
    else:

        class OnlyDLPack:
            def __init__(self, inner):
                self.__dlpack__, self.__dlpack_device__ = inner.__dlpack__, inner.__dlpack_device__

        array = OnlyDLPack(cupy.asarray(ids))
    for method in METHODS:
        got = build_dispatch(array, 16, method=method, validate=True)
        kind = torch.Tensor if library == "torch" else cupy.ndarray
        assert isinstance(got.expert_pair_indices, kind)
        cupy.cuda.Device().synchronize()
        assert_same(got, reference.build_dispatch(ids, 16))


def test_a_workspace_that_is_too_small_is_refused():
    ids, workspace = cuda(make_routing("random", 100, 8, 2)), torch.empty(3, dtype=torch.int32, device="cuda")
    refuses(lambda: build_dispatch(ids, 8, workspace=workspace), "workspace")
