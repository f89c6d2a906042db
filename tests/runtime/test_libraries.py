"""Public functions of arrays of any library: NumPy's and torch's on a CPU run the twin, and results are what came."""

import inspect
from functools import partial

import numpy as np
import pytest
import torch

from blazeproto import dispatch, gemm, router
from blazeproto.dispatch import Dispatch
from blazeproto.router import fallback as router_twins
from blazeproto.runtime import arrays, libraries, rounding
from tests.python import python
from tests.refusals import refuses
from tests.runtime.calls import (
    CALLS,
    FLOATS,
    FP32,
    IDS,
    LOGITS,
    NAMES,
    ROOMS,
    SCORES,
    UP,
    D,
    E,
    K,
    P,
    T,
    X,
    arguments_of,
    as_float,
    drawn,
    listed,
    run,
    to_bf16,
    twin,
    twins_of,
)


def test_no_public_function_of_arrays_is_left_out() -> None:
    """Those that take a topology are called in tests/blocksparse."""
    for room, calls in CALLS.items():
        twins = twins_of(room).keys() & ROOMS[room].__all__ - gemm.BLOCK_PRODUCTS.keys()
        assert calls.keys() == {name for name in twins if inspect.isfunction(getattr(ROOMS[room], name))}


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_numpy_float64_is_the_twin_unrounded(room: str, name: str) -> None:
    made, right = run(room, name, arguments_of(room, name)), twin(room, name, arguments_of(room, name))
    for mine, its in zip(made, right, strict=True):
        its = rounding.from_bfloat16_bits(its) if its.dtype == np.uint16 else its
        assert type(mine) is np.ndarray and mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(("room", "name"), FLOATS)
def test_numpy_float32_is_rounded_where_kernels_store_bf16(room: str, name: str) -> None:
    single = as_float(np.float32)
    options = {"round_to": "bf16"} if room == "gemm" else {}
    made = run(room, name, arguments_of(room, name, single))
    right = twin(room, name, arguments_of(room, name, single), **options)
    for mine, its in zip(made, right, strict=True):
        its = rounding.from_bfloat16_bits(its) if its.dtype == np.uint16 else its
        assert mine.dtype == its.dtype and mine.dtype != np.float64
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("name", CALLS["gemm"])
def test_a_products_float32_results_are_bf16_numbers_near_the_unrounded(name: str) -> None:
    """But for those that kernels store in fp32, which are not."""
    function = getattr(gemm, name)
    single = arguments_of("gemm", name, as_float(np.float32))
    unrounded = twin("gemm", name, arguments_of("gemm", name, as_float(np.float32)))
    outputs = {"up_forward": ("h", "act"), "down_backward_act": ("dh", "a_scaled", "d_scores")}.get(name)
    outputs = outputs or [key for key in inspect.signature(function).parameters if key in FP32] or ["bf16"]
    for output, mine, its in zip(outputs, listed(function(**single)), unrounded, strict=True):
        bf16 = np.array_equal(mine, torch.from_numpy(mine).bfloat16().float().numpy())
        assert bf16 == (output not in FP32), output
        np.testing.assert_allclose(mine, its, rtol=2**-7, atol=1e-6 if output in FP32 else 0.05)
        assert np.array_equal(mine, its) == (output in FP32)


def test_one_float64_array_is_enough_to_round_nothing() -> None:
    given = arguments_of("gemm", "combine", as_float(np.float32)) | {"scores": SCORES}
    np.testing.assert_array_equal(gemm.combine(**given), gemm.TWINS["combine"](**given))


def test_act_is_made_of_h_as_it_is_stored() -> None:
    h, act = gemm.up_forward(**arguments_of("gemm", "up_forward", as_float(np.float32)))
    from blazeproto.activations import activate

    np.testing.assert_array_equal(act, torch.from_numpy(activate(h, "swiglu")).bfloat16().float().numpy())


def test_fp32_weight_gradients_are_not_rounded() -> None:
    for name in ("down_backward_weight", "up_backward_weight", "expert_row_sum"):
        given = arguments_of("gemm", name, as_float(np.float32))
        right = twin("gemm", name, given)[0]
        output = "out" if name == "expert_row_sum" else "dw"
        mine = np.full_like(right, np.nan)
        assert getattr(gemm, name)(**given, **{output: mine}) is mine
        np.testing.assert_array_equal(mine, right)
        twice = getattr(gemm, name)(**given, **{output: mine}, accumulate=True)
        np.testing.assert_allclose(twice, 2 * right, rtol=1e-6)


def test_rounding_is_torchs() -> None:
    """To nearest, ties to even; infinities and NaN stay what they are."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000001], np.uint32)
    values = np.concatenate([bits.view(np.float32), drawn(999).astype(np.float32), [np.float32(np.nan)]])
    right = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounding.to_bfloat16(values), right)
    assert rounding.to_bfloat16(values.astype(np.float64)).dtype == np.float64


def test_the_same_lines_run_where_there_is_only_numpy() -> None:
    """Without torch, CuPy, Numba and CUDA: a forward and a backward of the experts."""
    code = """
import sys
for name in ("torch", "cupy", "numba", "cuda"):
    sys.modules[name] = None
import numpy as np
from blazeproto import dispatch, gemm
draw = np.random.default_rng(0).standard_normal
x, up, down = (draw(shape, dtype=np.float32) for shape in ((64, 32), (8, 48, 32), (8, 32, 24)))
logits = draw((64, 8), dtype=np.float32)
experts = np.argsort(-logits, axis=1)[:, :2].astype(np.int32)
scores = np.take_along_axis(logits, experts, axis=1)
rows = dispatch.build_dispatch(experts, 8)
h, act = gemm.up_forward(x, up, rows)
out = gemm.combine(gemm.down_forward(act, down, rows), rows, scores=scores)
dh, a_scaled, d_scores = gemm.down_backward_act(out, down, h, scores, rows)
gradients = (gemm.down_backward_weight(out, a_scaled, rows), gemm.up_backward_weight(dh, x, rows))
assert all(type(a) is np.ndarray and a.dtype == np.float32 for a in (h, act, out, dh, a_scaled, d_scores, *gradients))
assert type(rows.token_index_map) is np.ndarray
"""
    python("-c", code)


# --- Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "name"), FLOATS)
def test_uint16_is_refused_with_the_line_that_mends_it(room: str, name: str) -> None:
    given = arguments_of(room, name, as_float(np.float32))
    for key, array in given.items():
        if isinstance(array, np.ndarray) and array.dtype == np.float32 and (room, key) != ("gemm", "d_scores"):
            bits = rounding.bfloat16_bits(array)
            with pytest.raises(
                TypeError, match=f"{key}: expected dtype .*float32.*, got uint16; .*: {key} = "
            ) as caught:
                run(room, name, given | {key: bits})
            names = {"np": np, key: bits}
            exec(str(caught.value).rpartition(": ")[2], names)
            mended = np.asarray(names[key])
            np.testing.assert_array_equal(mended, rounding.to_bfloat16(array))
            if key != "bias":
                run(room, name, given | {key: mended})


# --- The kind that came ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("room", "name"), NAMES)
def test_cpu_tensors_give_tensors(room: str, name: str) -> None:
    """float32 and int32 ones with the numbers that NumPy gets; an output that was given is the one that is returned."""
    single = as_float(np.float32)
    right = run(room, name, arguments_of(room, name, single))
    given = arguments_of(room, name, lambda array: torch.from_numpy(single(array)))
    made = run(room, name, given)
    for mine, its in zip(made, right, strict=True):
        assert type(mine) is torch.Tensor
        assert mine.dtype == (torch.bfloat16 if name == "split_gradient" else getattr(torch, its.dtype.name))
        np.testing.assert_array_equal(mine.to(getattr(torch, its.dtype.name)).numpy(), its)
    for key in {"out_f32", "d_scores"} & given.keys() if room == "gemm" else ():
        assert made[0] is given[key] and (given[key] != 0).any()


@pytest.mark.parametrize("name", CALLS["gemm"])
def test_bf16_tensors_give_what_a_gpu_would(name: str) -> None:
    given = arguments_of("gemm", name, to_bf16)
    for key in ("scores", *FP32):
        if key in given:
            given[key] = given[key].float()
    as_numpy = arguments_of(
        "gemm", name, lambda array: to_bf16(array).float().numpy() if array.dtype.kind == "f" else array
    )
    as_numpy |= {key: given[key].numpy().copy() for key in ("scores", *FP32) if key in given}
    right, made = run("gemm", name, as_numpy), run("gemm", name, given)
    outputs = {"up_forward": ("h", "act"), "down_backward_act": ("dh", "a_scaled", "d_scores")}.get(name)
    outputs = outputs or [key for key in given if key in FP32] or ["bf16"]
    for output, mine, its in zip(outputs, made, right, strict=True):
        assert mine.dtype == (torch.float32 if output in FP32 else torch.bfloat16)
        np.testing.assert_array_equal(mine.float().numpy(), its)


def test_a_bf16_output_of_the_callers_is_filled() -> None:
    given = arguments_of("gemm", "combine", to_bf16)
    given["scores"] = given["scores"].float()
    out = torch.full((T, D), torch.nan, dtype=torch.bfloat16)
    right = gemm.combine(**given)
    assert gemm.combine(**given, out=out) is out and torch.equal(out, right)
    x, up = torch.nn.Parameter(to_bf16(X)), torch.nn.Parameter(to_bf16(UP))  # which need gradients
    h, _ = gemm.up_forward(x, up, given["dispatch"])
    assert h.dtype == torch.bfloat16 and not h.requires_grad


def test_bf16_logits_on_a_cpu() -> None:
    logits = to_bf16(LOGITS)
    scores, experts = router.topk_route(logits, K)
    right = router_twins.topk_route(logits.float().numpy(), K)
    assert (scores.dtype, experts.dtype) == (torch.float32, torch.int32)
    np.testing.assert_array_equal(scores.numpy(), right[0])
    assert router.topk_route_backward(logits, experts, scores).dtype == torch.bfloat16


def test_routers_fill_the_outputs_that_are_given() -> None:
    scores, experts = np.zeros((T, K)), np.zeros((T, K), np.int32)
    refuses(lambda: router.topk_route(LOGITS, K, out=(scores,)), "out")
    made = router.topk_route(LOGITS, K, out=(scores, experts))
    assert made[0] is scores and made[1] is experts
    np.testing.assert_array_equal(experts, router.topk_route(LOGITS, K)[1])
    lists = {
        key: torch.zeros(size, dtype=torch.int32)
        for key, size in (("expert_pair_indices", P), ("expert_token_offsets", E + 1), ("token_index_map", P))
    }
    built = dispatch.build_dispatch(torch.from_numpy(IDS), E, out=lists)
    assert all(getattr(built, key) is array for key, array in lists.items()) and built.expert_token_offsets[-1] == P


def test_ml_dtypes_arrays_come_back_as_they_came() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    h, act = gemm.up_forward(X.astype(bfloat16), UP.astype(bfloat16), dispatch.build_dispatch(IDS, E))
    assert h.dtype == act.dtype == bfloat16


class JaxArray:
    """What is asked of a JAX array on a GPU; its memory is NumPy's, and must not be written to."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.dtype = values, values.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


JaxArray.__module__ = "jaxlib._jax"


def test_jax_arrays_come_back_as_jax_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for JAX and CuPy: what goes in, what comes out, what is copied, and that the host waits at the end."""
    waited: list[int] = []
    monkeypatch.setattr(libraries, "_to_cupy", lambda array, copy: array.values.copy() if copy else array.values)
    monkeypatch.setattr(libraries, "_to_jax", JaxArray)
    monkeypatch.setattr(libraries, "_wait", waited.append)
    monkeypatch.setattr(libraries.arrays, "view", lambda array, name="": array)
    monkeypatch.setattr(libraries.memory, "on_stream", lambda array, stream: libraries.memory.nullcontext(7))
    seen: dict[str, np.ndarray] = {}

    @libraries.any_library("gemm", {"out": "float32"})
    def scaled(x, rows: Dispatch, *, out=None, stream=None):
        seen.update(x=x, map=rows.token_index_map, out=out)
        out = np.empty_like(x) if out is None else out
        out[...] = 2 * x
        return out

    rows = dispatch.build_dispatch(IDS, E)
    lists = (rows.expert_pair_indices, rows.expert_token_offsets, rows.token_index_map)
    rows = Dispatch(*map(JaxArray, lists), None, E, K, T)
    x, out = JaxArray(drawn(3)), JaxArray(np.zeros(3))
    made = scaled(x, rows)
    assert type(made) is JaxArray and np.array_equal(made.values, 2 * x.values)
    assert seen["x"] is x.values and seen["map"] is rows.token_index_map.values and waited == [7]
    filled = scaled(x, rows, out=out)
    assert type(filled) is JaxArray and np.array_equal(filled.values, 2 * x.values) and not out.values.any()


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray])
@pytest.mark.parametrize(("room", "name"), NAMES)
def test_arrays_whose_operators_or_values_mean_something_else_are_refused(
    room: str, name: str, kind: type[np.ndarray]
) -> None:
    """Whichever argument it is; a matrix has two dimensions."""
    given = arguments_of(room, name)
    changed = 0
    for argument, array in given.items():
        if isinstance(array, np.ndarray) and (kind is not np.matrix or array.ndim == 2):
            refuses(partial(run, room, name, {**given, argument: array.view(kind)}), argument, TypeError)
            changed += 1
    assert changed or kind is np.matrix


def test_a_memory_map_is_an_array() -> None:
    given = arguments_of("gemm", "up_forward")
    right = run("gemm", "up_forward", given)
    made = run("gemm", "up_forward", {**given, "x": given["x"].view(np.memmap)})
    np.testing.assert_array_equal(made[0], right[0])


# --- On a GPU: results are of the kind that came, without a copy ---------------------------------------------------------


@pytest.mark.gpu
def test_jax_on_the_gpu() -> None:
    """Skipped where there is no JAX: bf16 in and out by DLPack, without a copy, with torch's numbers."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("needs a JAX that sees the GPU")
    cupy = pytest.importorskip("cupy")
    try:
        cupy.from_dlpack(jax.numpy.ones(8, jax.numpy.bfloat16))
    except NotImplementedError:
        pytest.skip("needs a CuPy that has bf16")
    width, tokens = 64, 256
    torch_x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    torch_up = torch.randn(E, 2 * width, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, E, device="cuda").argsort(dim=1)[:, :K].int().contiguous()
    right = gemm.up_forward(torch_x, torch_up, dispatch.build_dispatch(ids, E))
    x, up, jax_ids = (jax.dlpack.from_dlpack(tensor) for tensor in (torch_x, torch_up, ids))
    rows = dispatch.build_dispatch(jax_ids, E)
    made = gemm.up_forward(x, up, rows)
    assert isinstance(rows.token_index_map, jax.Array) and rows.token_index_map.dtype == "int32"
    for mine, its in zip(made, right, strict=True):
        assert isinstance(mine, jax.Array) and mine.dtype == jax.numpy.bfloat16
        assert torch.equal(torch.from_dlpack(mine), its)
    scores, experts = router.topk_route(jax.numpy.ones((tokens, E)), K)
    assert isinstance(scores, jax.Array) and (np.asarray(experts) == np.arange(K)).all()
    sums = jax.numpy.zeros((tokens, width), jax.numpy.float32)
    down = jax.numpy.ones((E, width, width), jax.numpy.bfloat16)
    out = gemm.down_forward_fused(made[1], down, jax.numpy.ones((tokens, K)), rows, out_f32=sums)
    dx = gemm.up_backward_act_fused(made[0], up, rows, dx_f32=sums)
    assert all(isinstance(one, jax.Array) and np.asarray(one).any() for one in (out, dx)) and not np.asarray(sums).any()


@pytest.mark.gpu
def test_tensors_and_cupy_arrays_on_the_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    width, tokens = 64, 256
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(E, 2 * width, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, E, device="cuda").argsort(dim=1)[:, :K].int().contiguous()
    rows = dispatch.build_dispatch(ids, E)
    right = gemm.up_forward(x, up, rows)
    assert all(type(array) is torch.Tensor and array.dtype == torch.bfloat16 and array.is_cuda for array in right)
    bits = [cupy.from_dlpack(tensor.view(torch.int16)).view("uint16") for tensor in (x, up)]
    made = gemm.up_forward(*bits, dispatch.build_dispatch(cupy.from_dlpack(ids), E))
    for mine, its in zip(made, right, strict=True):
        assert type(mine) is cupy.ndarray and mine.dtype == "uint16"
        assert torch.equal(torch.from_dlpack(mine.view("int16")).view(torch.bfloat16), its)
    wrapped = gemm.up_forward(*map(arrays.BFloat16Array, bits), rows)
    assert all(type(array) is arrays.BFloat16Array for array in wrapped)
    assert torch.equal(torch.from_dlpack(wrapped[1].bits).view(torch.bfloat16), right[1])
