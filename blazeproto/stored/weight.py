"""One weight of all experts as a checkpoint stores it, and the table of storage formats.

A weight (E, out, in) is values, scales and sometimes zero points, all views of the checkpoint's own bytes:

    values   (E, out, in / 2) uint8, two numbers a byte, or (E, out, in) e4m3
    scales   (E, out / rows, in / columns): one for each block of rows x columns numbers
    number   = (value - zero) * scale in float32, then rounded to bf16

That is the arithmetic of transformers, bitsandbytes and compressed-tensors for these formats: `StoredWeight.decode` gives their
bits. An expert is decoded when a product needs it, and dropped after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from blazeproto.gemm.tiles import ALIGNMENT, Element
from blazeproto.runtime.checks import require


@dataclass(frozen=True)
class Format:
    """A storage format.

    element: of its values.  block: the rows and columns that share a scale, unless a weight says otherwise.
    allows: whether a block of these rows and columns may.
    numbers: one expert's values -> (out, in) float32, before scales.
    quantize: (out, in) float32 and a block -> values and scales.
    scales: the word for scales in its checkpoints, and so in a layer's state.
    zeros: one expert's zero points -> (out, in / columns) float32.
    """

    element: Element
    block: tuple[int, int]
    allows: Callable[[int, int], bool]
    numbers: Callable[[Tensor], Tensor]
    quantize: Callable[[Tensor, tuple[int, int]], tuple[Tensor, Tensor]]
    scales: str = "scales"
    zeros: Callable[[Tensor], Tensor] | None = None


FORMATS: dict[str, Format] = {}
"""By name. A format's file adds its entry."""


@dataclass(frozen=True, eq=False, repr=False)
class StoredWeight:
    """A frozen weight (E, out, in) in 4 or 8 bits a number, made by `mxfp4`, `nf4`, `int4`, `fp8` or `quantize`.

    `blazeproto.moe_mlp` takes one in place of a bf16 weight. ``weight[e]`` is expert e in bf16. ``weight[a:b]`` holds
    experts a to b without a copy.

    Fields:
        how: ``format`` and ``block`` as one string, "nf4 1 64".
        values: (E, out, in / 2) uint8, or (E, out, in) e4m3.
        scales: (E, out / rows, in / columns).
        zeros: (E, out / 8, in / columns) int32, the zero points of int4; None without.
    """

    how: str  # torch.compile holds strings constant, but may make ints dynamic
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    dtype: ClassVar[torch.dtype] = torch.bfloat16  # of its numbers, decoded
    requires_grad: ClassVar[bool] = False  # none of its tensors does

    @property
    def format(self) -> str:
        """A name of `blazeproto.stored.FORMATS`."""
        return self.how.split()[0]

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns of the numbers that share a scale."""
        return int(self.how.split()[1]), int(self.how.split()[2])

    @property
    def shape(self) -> torch.Size:
        """(E, out, in)."""
        return logical_shape(self.format, self.values.shape)

    @property
    def device(self) -> torch.device:
        """The device of its values."""
        return self.values.device

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, scales and zero points."""
        return self.values, self.scales, self.zeros

    @property
    def nbytes(self) -> int:
        """The bytes of values, scales and zero points."""
        return sum(0 if t is None else t.nbytes for t in self.tensors)

    def dim(self) -> int:
        """3, as of a tensor."""
        return 3

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: int | slice) -> "Tensor | StoredWeight":
        return self._map(lambda t: t[which]) if isinstance(which, slice) else self.decode(which)

    def to(self, device: torch.device | str | int) -> "StoredWeight":
        """The same weight on another device."""
        return self._map(lambda t: t.to(device=device))

    def decode(self, expert: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The numbers, rounded to bf16: (out, in) of one expert, or (E, out, in) of all.

        dtype: they are cast from bf16 to it.  IndexError for an expert that the weight lacks.
        """
        if expert is None:
            made = torch.empty(self.shape, dtype=dtype, device=self.device)
            for index, place in enumerate(made):
                place.copy_(self.decode(index))
            return made
        if not -len(self) <= expert < len(self):
            raise IndexError(f"expert: expected one of {len(self)}, got {expert}")
        index = expert % len(self)
        (rows, columns), (_, out, width), format = self.block, self.shape, FORMATS[self.format]
        numbers = format.numbers(self.values[index])
        by_block = numbers.view(out // rows, rows, width // columns, columns)
        if self.zeros is not None and format.zeros is not None:
            by_block -= format.zeros(self.zeros[index])[:, None, :, None]
        by_block *= self.scales[index].float()[:, None, :, None]
        return numbers.bfloat16().to(dtype)

    def _map(self, change: Any) -> "StoredWeight":
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, values=change(self.values), scales=change(self.scales), zeros=zeros)

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(1, self.shape.numel())
        return f"StoredWeight({self.how!r}, shape={tuple(self.shape)}, {bits:.4g} bits a number, on {self.device})"


def logical_shape(format: str, values: Any) -> torch.Size:
    """(E, out, in) of values of this shape."""
    *experts_and_rows, width = values
    return torch.Size((*experts_and_rows, width * 8 // FORMATS[format].element.bits))


def quantize(weight: Tensor, format: str, block: tuple[int, int] | None = None) -> StoredWeight:
    """Quantize a weight in 16 slices of each expert's rows. Beside the result it holds less than one expert's weight in bf16, if
    out has 16 blocks' rows.

    weight: (E, out, in) of any floating dtype.  format: a name of `blazeproto.stored.FORMATS`.
    block: the rows and columns that share a scale; default: the format's.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """
    require(isinstance(format, str) and format in FORMATS, "format", f"one of {', '.join(FORMATS)}", repr(format))
    block = FORMATS[format].block if block is None else block
    check_dense("weight", weight, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
    require(
        weight.dim() == 3 and 0 not in weight.shape, "weight", "shape (E, out, in), none of them 0", tuple(weight.shape)
    )
    check_block("block", block, weight.shape, format)
    (experts, out, _), row, places = weight.shape, 0, list[Tensor]()
    for part in (part for one in weight.detach() for part in one.split(max(1, out // (16 * block[0])) * block[0])):
        finite = bool(part.bfloat16().isfinite().all())
        require(finite, "weight", "finite numbers in bf16", f"NaN, Inf or larger in expert {row // out}")
        made = FORMATS[format].quantize(part.float().contiguous(), block)
        places = places or [t.new_empty(experts * out * len(t) // len(part), *t.shape[1:]) for t in made]
        for place, t in zip(places, made, strict=True):
            place[row * len(t) // len(part) :][: len(t)] = t
        row += len(part)
    return StoredWeight(f"{format} {block[0]} {block[1]}", *(place.unflatten(0, (experts, -1)) for place in places))


# ---- what the formats share --------------------------------------------------------------------------------------


def of_nibbles(values: Tensor, numbers: tuple[float, ...], *, high_first: bool = False) -> Tensor:
    """(out, in / 2) bytes -> (out, in) float32: the 16 numbers by their codes.  high_first: the high nibble is the first."""
    table = torch.tensor(numbers, dtype=torch.float32, device=values.device)
    halves = table.repeat(16), table.repeat_interleave(16)  # by a byte's low and high nibble
    pairs = torch.stack(halves[::-1] if high_first else halves, dim=1)
    return pairs.index_select(0, values.reshape(-1).int()).view(len(values), -1)


def to_nibbles(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """(out, in) codes from 0 to 15 -> (out, in / 2) bytes."""
    first, second = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return first << 4 | second if high_first else first | second << 4


def largest_of(numbers: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """numbers (out, in) -> a view (out / rows, rows, in / columns, columns) of them, and the largest magnitude of each block."""
    by_block = numbers.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return by_block, by_block.abs().amax((1, 3), keepdim=True)


def check_dense(name: str, t: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """TypeError for what is no dense, local tensor of one of the dtypes; ValueError for one without numbers."""
    dense = isinstance(t, Tensor) and t.layout == torch.strided and not t.is_nested and not hasattr(t, "placements")
    if not dense or t.dtype not in dtypes:
        got = (t.dtype if dense else t.layout) if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name}: expected a dense, local torch.Tensor of {' or '.join(map(str, dtypes))}, got {got}")
    require(not t.is_meta, name, "a tensor that holds numbers", "one on the meta device")


def check_tensor(name: str, t: Any, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None) -> Tensor:
    """The tensor. TypeError or ValueError for one that is not frozen, contiguous and what `check_dense` takes.
    like: the weight's values, on whose device it has to be."""
    check_dense(name, t, dtypes)
    require(not t.requires_grad, name, "a tensor without requires_grad: stored weights are frozen", "one with it")
    require(t.is_contiguous(), name, "a contiguous tensor, as the checkpoint has it", f"strides {t.stride()}")
    aligned = t.is_cpu or t.data_ptr() % ALIGNMENT == 0  # safetensors maps tensors at any address of the host
    require(aligned, name, f"an address that is a multiple of {ALIGNMENT}", hex(t.data_ptr()))
    require(like is None or t.device == like.device, name, "all tensors on one device", t.device)
    return t.detach()


def check_block(name: str, block: Any, shape: Any, format: str) -> None:
    """ValueError unless the block is two sizes that the format allows and that divide out and in."""
    two = isinstance(block, tuple) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    require(two, name, "a tuple of two positive ints, rows and columns", repr(block))
    require(FORMATS[format].allows(*block), name, f"rows and columns that {format} has", block)
    whole = not any(size % side for size, side in zip(shape[1:], block, strict=True))
    require(whole, name, f"one that divides out and in, {tuple(shape[1:])}", block)


def check_scales(name: str, scales: Tensor) -> Tensor:
    """The scales. ValueError for one that is NaN, Inf or negative, or in e8m0 above 2^125: then 4 times it overflows bf16."""
    wide, most = scales.float(), 2.0**125 if scales.dtype == torch.float8_e8m0fnu else torch.finfo(torch.float32).max
    expected = "bytes from 0 to 252" if scales.dtype == torch.float8_e8m0fnu else f"scales from 0 to {most:g}"
    require(bool(((wide >= 0) & (wide <= most)).all()), name, expected, "NaN, Inf, less or more")
    return scales
