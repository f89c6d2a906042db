"""Arrays of JAX, CuPy and torch on a GPU: results are of the kind that came, without a copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blazeproto import dispatch, gemm, router
from blazeproto.runtime import arrays

E, K = 4, 2


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
