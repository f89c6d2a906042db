"""Stored weights against the arithmetic of the libraries that write them, restated here in NumPy."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import Tensor

from blazeproto import stored
from blazeproto.gemm.tiles import ELEMENTS
from blazeproto.stored import Nested
from tests.refusals import refuses

NF4 = (
    *(-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def assert_decodes_to(weight: stored.StoredWeight, expected: np.ndarray) -> None:
    """Bit for bit, -0 too; all experts and each alone."""
    bits = weight.decode().view(torch.int16).numpy().view(np.uint16)
    assert bits.shape == expected.shape == tuple(weight.shape)
    assert (bits == bf16_bits(expected)).all(), f"{(bits != bf16_bits(expected)).sum()} of {bits.size} differ"
    assert all(torch.equal(weight[e], one) for e, one in enumerate(weight.decode()))


def nibbles(codes: np.ndarray, *, high_first: bool = False) -> Tensor:
    """(..., in) codes -> (..., in / 2) bytes."""
    even, odd = codes[..., ::2], codes[..., 1::2]
    return torch.from_numpy((even * 16 + odd if high_first else odd * 16 + even).astype(np.uint8))


def int32s(codes: np.ndarray) -> Tensor:
    """(..., in) codes -> (..., in / 8), the first in the lowest bits."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.int64)
    return torch.from_numpy((eights << np.arange(0, 32, 4)).sum(-1)).to(torch.int32).contiguous()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("storage", sorted(stored.FORMATS))
def test_the_default_dtype_changes_nothing(storage, default, default_dtype):
    weight = torch.randn(2, 128, 128)
    expected = stored.quantize(weight, storage)
    numbers = expected.decode()
    torch.set_default_dtype(default)
    made = stored.quantize(weight, storage)
    assert torch.equal(made.values, expected.values) and torch.equal(made.decode(), numbers)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_every_pair_of_mxfp4(in_blocks):
    """16 numbers with 253 scales, down to bf16's subnormals."""
    codes = np.broadcast_to(np.arange(32) % 16, (1, 253, 32))
    scales = torch.arange(253, dtype=torch.uint8).view(1, 253, 1)
    values = nibbles(codes)
    weight = stored.mxfp4(values.view(1, 253, 1, 16) if in_blocks else values.view(torch.int8), scales)
    exact = np.array(E2M1)[codes] * 2.0 ** (np.arange(253.0)[:, None] - 127)
    assert_decodes_to(weight, exact.astype(np.float32))
    assert (weight.decode().double().numpy() == exact).all()
    assert torch.equal(stored.mxfp4(values, scales.view(torch.float8_e8m0fnu)).decode(), weight.decode())


def test_every_code_of_e4m3_with_many_scales():
    codes = np.arange(256)
    magnitude = np.where(codes & 0x78, 2.0 ** ((codes >> 3 & 15) - 7.0) * (1 + (codes & 7) / 8), (codes & 7) / 512)
    numbers = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    kept = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    values = torch.from_numpy(kept).repeat(10, 10_000, 1).view(torch.float8_e4m3fn)
    scales = torch.cat((torch.rand(90_000) * 0.02, torch.rand(10_000).log().exp2())).view(10, 10_000, 1)
    weight = stored.fp8(values, scales, block=(1, 256))
    assert_decodes_to(weight, numbers[kept] * scales.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_of_e4m3(dtype):
    values, scales = torch.randn(2, 256, 384).to(torch.float8_e4m3fn), (torch.rand(2, 2, 3) + 0.1).to(dtype)
    weight = stored.fp8(values, scales)
    wide = scales.float().numpy().repeat(128, 1).repeat(128, 2)
    assert_decodes_to(weight, values.float().numpy() * wide)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_nf4_with_many_scales(block):
    """16 numbers with 2^16 of absmax: all bf16 ones of 256 exponents, and any float32."""
    free = np.random.default_rng(0).uniform(0, 2, 2**15).astype(np.float32)
    rounded = (np.arange(2**15, dtype=np.uint32) % 0x7F00 << 16).view(np.float32)
    absmax = np.concatenate((free, rounded))
    codes = np.broadcast_to(np.arange(block) % 16, (len(absmax), block))
    packed = nibbles(codes, high_first=True).view(-1, 1)
    weight = stored.nf4(packed, torch.from_numpy(absmax), shape=(4, len(absmax) // 8, 2 * block), block=block)
    expected = np.array(NF4, np.float32)[codes] * absmax[:, None]
    assert_decodes_to(weight, expected.reshape(4, -1, 2 * block))


def test_double_quantized_absmax():
    rng, shape = np.random.default_rng(0), (2, 24, 512)
    codes, absmax = rng.integers(0, 16, shape), rng.integers(0, 256, 2 * 24 * 8).astype(np.uint8)
    code, outer = rng.uniform(-1, 1, 256).astype(np.float32), rng.uniform(0, 0.1, 2).astype(np.float32)
    offset = np.float32(0.3)
    nested = Nested(*map(torch.from_numpy, (code, outer)), offset)
    weight = stored.nf4(nibbles(codes, high_first=True), torch.from_numpy(absmax), shape=shape, nested=nested)
    wide = code[absmax] * outer.repeat(256)[: len(absmax)] + offset
    assert_decodes_to(weight, np.array(NF4, np.float32)[codes] * wide.reshape(2, 24, 8).repeat(64, 2))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int4_by_group_and_zero(group, dtype, with_zeros):
    """compressed-tensors' order: (q - z) in the scale's dtype, times the scale; each code meets each zero point."""
    experts, out, groups = 2, 64, 4
    codes = np.broadcast_to(np.arange(group * groups) % 16, (experts, out, group * groups))
    each = np.arange(experts)[:, None, None] + np.arange(out)[:, None]
    zeros = np.broadcast_to(each % 16, (experts, out, groups)) if with_zeros else None
    scales = (torch.rand(experts, out, groups) + 0.01).to(dtype)
    packed_zeros = None if zeros is None else int32s(zeros.transpose(0, 2, 1)).mT.contiguous()
    weight = stored.int4(int32s(codes), scales, packed_zeros, group=group)
    shifted = codes - (8 if zeros is None else zeros.repeat(group, 2))
    expected = (torch.from_numpy(shifted).to(dtype) * scales.repeat_interleave(group, 2)).float().numpy()
    assert_decodes_to(weight, expected)
    assert_decodes_to(weight[1:], expected[1:])


# ---- the object --------------------------------------------------------------------------------------------------

SHAPE = 3, 128, 256


@pytest.fixture(params=stored.FORMATS)
def weight(request) -> stored.StoredWeight:
    return stored.quantize(torch.randn(SHAPE), request.param)


def test_bytes_stay_as_they_lie():
    blocks, scales = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8)
    packed, absmax, eights = (
        torch.zeros(512, 1, dtype=torch.uint8),
        torch.ones(16),
        torch.zeros(2, 8, 8, dtype=torch.int32),
    )
    made = {
        (blocks, scales): stored.mxfp4(blocks, scales),
        (packed, absmax): stored.nf4(packed, absmax, shape=(2, 8, 64)),
        (eights, of_eights := torch.ones(2, 8, 2)): stored.int4(eights, of_eights, group=32),
    }
    for tensors, weight in made.items():
        held = (weight.values, weight.scales)
        assert [t.untyped_storage().data_ptr() for t in tensors] == [t.untyped_storage().data_ptr() for t in held]


def saved_and_loaded(weight: stored.StoredWeight) -> stored.StoredWeight:
    torch.save(weight, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_slices_copies_and_devices(weight):
    assert weight.shape == SHAPE and len(weight) == 3 and weight.dtype == torch.bfloat16
    assert (
        torch.equal(weight[1:].decode(), weight.decode()[1:])
        and weight[1:].values.data_ptr() != weight.values.data_ptr()
    )
    assert torch.equal(torch.stack([*weight]), weight.decode()) and torch.equal(weight[-1], weight[2])
    assert (
        torch.equal(wide := weight.decode(1, torch.float64), weight[1].double())
        and wide.dtype == weight.decode(dtype=torch.float64).dtype == torch.float64
    )
    for other in (copy.deepcopy(weight), saved_and_loaded(weight), weight.to("cpu")):
        assert torch.equal(other.decode(), weight.decode())
    assert weight.to("meta").device.type == "meta" and weight.format in repr(weight) and "(3, 128, 256)" in repr(weight)
    for error, call in (
        (IndexError, lambda: weight.decode(3)),
        (AttributeError, lambda: setattr(weight, "scales", None)),
        (TypeError, lambda: weight.to(torch.float16)),
    ):
        with pytest.raises(error):
            call()


def test_bytes_of_formats(weight):
    bits = {"mxfp4": 4.25, "nf4": 4.5, "int4": 4.5, "fp8": 8 + 32 / 128**2}[weight.format]
    assert 8 * weight.nbytes == bits * weight.shape.numel()
    assert stored.FORMATS[weight.format].element in ELEMENTS.values()


@pytest.mark.parametrize("format", ["mxfp4", "nf4", "int4"])
def test_quantizing_takes_the_nearest_code(format):
    """No other code of a block's 16 is nearer, but where a magnitude is beyond the largest."""
    weight = torch.randn(2, 16, 256)
    made = stored.quantize(weight, format)
    numbers = {"mxfp4": E2M1, "nf4": NF4, "int4": range(-8, 8)}[format]
    scales = made.scales.float().repeat_interleave(made.block[1], 2)
    codes = scales[..., None] * torch.tensor(numbers, dtype=torch.float32)
    error = (made.decode(dtype=torch.float32) - weight).abs()
    nearest = (codes - weight[..., None]).abs().amin(-1)
    assert format != "int4" or torch.equal(made.scales, (weight.unflatten(2, (-1, 32)).abs().amax(-1) / 7.5).bfloat16())
    assert (error <= nearest + 2**-8 * codes.abs().amax(-1)).all()


def test_what_a_format_can_say_is_kept(weight):
    """Zeros too, and a weight that was decoded."""
    again = stored.quantize(weight.decode(), weight.format, weight.block)
    off = (again.decode().float() - weight.decode().float()).norm() / weight.decode().float().norm()
    assert off <= {"mxfp4": 0, "nf4": 0.005, "int4": 0.1, "fp8": 0.005}[weight.format]
    assert not stored.quantize(torch.zeros(SHAPE), weight.format).decode().view(torch.int16).any()


def test_quantizing_keeps_every_number_of_mxfp4():
    """All scales, -0 too."""
    codes = nibbles(np.broadcast_to(np.arange(32) % 16, (1, 253, 32)))
    again = stored.quantize(
        stored.mxfp4(codes, scales := torch.arange(253, dtype=BYTE).view(1, 253, 1)).decode(), "mxfp4"
    )
    assert torch.equal(again.values, codes) and torch.equal(again.scales.view(BYTE), scales)


def test_ties_of_mxfp4():
    """The even one of two codes as near; beyond the largest, the largest."""
    given = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7.5, -0.75, *23 * [0]]).view(1, 1, 32)
    assert stored.quantize(given, "mxfp4").decode().flatten()[:9].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1]


def test_quantizing_takes_magnitudes_whose_scale_would_be_0(weight):
    made = stored.quantize(torch.zeros(SHAPE).index_fill_(2, torch.tensor(0), 1e-44), weight.format)
    assert made.decode().isfinite().all()


def test_values_may_lie_anywhere_on_a_cpu():
    """safetensors maps a file, in which a tensor may begin at any byte."""
    weight = nf4(values := torch.randint(256, (513,), dtype=BYTE)[1:], absmax := torch.rand(17)[1:])
    assert weight.values.data_ptr() == values.data_ptr()
    assert torch.equal(weight.decode(), nf4(values.clone(), absmax.clone()).decode())


BYTE, WORD, FLOAT = torch.uint8, torch.int32, torch.float32


def zeros(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def mxfp4(blocks=zeros(2, 8, 2, 16, dtype=BYTE), scales=zeros(2, 8, 2, dtype=BYTE)):
    return stored.mxfp4(blocks, scales)


def nf4(packed=zeros(512, 1, dtype=BYTE), absmax=zeros(16), shape=(2, 8, 64), **more):
    return stored.nf4(packed, absmax, shape=shape, **more)


def int4(packed=zeros(2, 8, 8, dtype=WORD), scales=zeros(2, 8, 2), zeros=None, group=32):
    return stored.int4(packed, scales, zeros, group=group)


def fp8(weight=zeros(2, 128, 256).to(torch.float8_e4m3fn), scale_inv=zeros(2, 1, 2), **more):
    return stored.fp8(weight, scale_inv, **more)


NAN_CODE = torch.full((2, 128, 256), 0xFF, dtype=BYTE).view(torch.float8_e4m3fn)
WORDS = zeros(2, 4, 8, dtype=WORD)
VALUES = {  # the argument that is named -> calls
    "blocks": [
        lambda: mxfp4(blocks=zeros(2, 8, 32, dtype=BYTE)[..., ::2]),
        lambda: mxfp4(blocks=zeros(2, 8, 4, 8, dtype=BYTE)),
        lambda: mxfp4(blocks=zeros(2, 8, 24, dtype=BYTE)),
        lambda: mxfp4(blocks=zeros(2, 8, 2, 16, dtype=BYTE).to("meta")),
    ],
    "scales": [
        lambda: mxfp4(scales=zeros(2, 8, 1, dtype=BYTE)),
        lambda: mxfp4(scales=zeros(2, 8, 2, dtype=BYTE) + 253),
        lambda: mxfp4(scales=zeros(2, 8, 2, dtype=BYTE) + 255),
        lambda: int4(scales=zeros(2, 8, 4)),
        lambda: int4(scales=zeros(2, 8, 2) + float("nan")),
        lambda: int4(scales=zeros(2, 8, 2).requires_grad_()),
    ],
    "packed": [
        lambda: nf4(packed=zeros(511, 1, dtype=BYTE)),
        lambda: int4(zeros(8, 8, dtype=WORD)),
    ],
    "absmax": [
        lambda: nf4(absmax=zeros(15)),
        lambda: nf4(absmax=zeros(16) - 1),
        lambda: nf4(absmax=zeros(16) + float("inf")),
    ],
    "block": [
        lambda: nf4(block=16),
        lambda: nf4(shape=(2, 16, 32)),
        lambda: fp8(block=(100, 128)),
        lambda: fp8(block=128),
        lambda: stored.quantize(zeros(2, 8, 64), "mxfp4", (1, 64)),
        lambda: stored.quantize(zeros(2, 8, 48), "nf4"),
        lambda: nf4(absmax=zeros(4), shape=(2, 2, 256), block=256),
    ],
    "shape": [lambda: nf4(shape=(2, 512)), lambda: nf4(shape=None)],
    "group": [lambda: int4(group=48), lambda: int4(group=0)],
    "zeros": [
        lambda: int4(zeros=zeros(2, 2, 2, dtype=WORD)),
        lambda: int4(WORDS, zeros(2, 4, 2), zeros(2, 1, 2, dtype=WORD)),
    ],
    "weight": [
        lambda: fp8(weight=NAN_CODE),
        lambda: fp8(weight=(NAN_CODE.view(BYTE) - 128).view(NAN_CODE.dtype)),
        lambda: fp8(weight=NAN_CODE[0]),
        lambda: stored.quantize(zeros(8, 64), "nf4"),
        lambda: stored.quantize(zeros(0, 8, 64), "nf4"),
        lambda: stored.quantize(zeros(2, 8, 64) + float("inf"), "nf4"),
        lambda: stored.quantize(zeros(2, 8, 64) + 3.4e38, "nf4"),  # inf in bf16
        lambda: stored.quantize(zeros(2, 8, 64).double() + 1e300, "int4"),
    ],
    "scale_inv": [lambda: fp8(scale_inv=zeros(2, 2, 1)), lambda: fp8(scale_inv=zeros(2, 1, 2) - 1)],
    "format": [lambda: stored.quantize(zeros(2, 8, 64), "fp4"), lambda: stored.quantize(zeros(2, 8, 64), None)],
    "nested.code": [lambda: nf4(absmax=zeros(16, dtype=BYTE), nested=Nested(zeros(16), zeros(1), 0.0))],
    "nested.absmax": [lambda: nf4(absmax=zeros(16, dtype=BYTE), nested=Nested(zeros(256), zeros(2), 0.0))],
    "nested.offset": [lambda: nf4(absmax=zeros(16, dtype=BYTE), nested=Nested(zeros(256), zeros(1), zeros(16)))],
}
TYPES = {
    "blocks": [
        lambda: mxfp4(blocks=zeros(2, 8, 2, 16)),
        lambda: mxfp4(blocks=None),
        lambda: mxfp4(blocks=zeros(2, 8, 32, dtype=BYTE).as_subclass(type("Sharded", (Tensor,), {"placements": ()}))),
    ],
    "scales": [lambda: int4(scales=zeros(2, 8, 2).half()), lambda: mxfp4(scales=zeros(2, 8, 2))],
    "packed": [lambda: nf4(packed=zeros(512)), lambda: int4(packed=zeros(2, 8, 8, dtype=torch.int64))],
    "absmax": [lambda: nf4(absmax=zeros(16, dtype=BYTE)), lambda: nf4(absmax=zeros(16).double())],
    "group": [lambda: int4(group=32.0)],
    "weight": [lambda: fp8(weight=zeros(2, 128, 256)), lambda: stored.quantize(zeros(2, 8, 64, dtype=WORD), "nf4")],
    "scale_inv": [lambda: fp8(scale_inv=zeros(2, 1, 2).half())],
    "nested": [lambda: nf4(absmax=zeros(16, dtype=BYTE), nested=(zeros(256), zeros(1), 0.0))],
}


@pytest.mark.parametrize(("argument", "call"), [(name, call) for name, calls in VALUES.items() for call in calls])
def test_values_that_do_not_fit_are_refused_by_name(argument, call):
    refuses(call, argument)


@pytest.mark.parametrize(("argument", "call"), [(name, call) for name, calls in TYPES.items() for call in calls])
def test_types_that_do_not_fit_are_refused_by_name(argument, call):
    refuses(call, argument, TypeError)
