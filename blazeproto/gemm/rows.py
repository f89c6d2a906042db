"""Who is in which row: the index arrays of a dispatch as the kernels of this package read them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from blazeproto.arrays import DeviceArray, current_device, current_stream, expect


class Rows(NamedTuple):
    """Who is in which row: the index arrays of `blazeproto.dispatch.Dispatch` that the products read (all int32).

    pair_indices (R,): the pair in each row.  offsets (E + 1,): where each expert's rows begin.
    token_index_map (P,): the row of each pair, -1 if it has none.  top_k: experts per token (pair // top_k is the token);
    None when they vary, and then pair_tokens (P,) and token_offsets (T + 1,) say who is whose.
    """

    pair_indices: Any
    offsets: Any
    token_index_map: Any
    top_k: int | None
    pair_tokens: Any = None
    token_offsets: Any = None

    def views(self) -> Rows:
        """The same with every array as a checked DeviceArray; done once a layer, it is free afterwards."""
        if type(self) is RowViews:
            return self
        return RowViews(
            expect("rows.pair_indices", self.pair_indices, "int32"),
            expect("rows.offsets", self.offsets, "int32"),
            expect("rows.token_index_map", self.token_index_map, "int32"),
            self.top_k,
            None if self.pair_tokens is None else expect("rows.pair_tokens", self.pair_tokens, "int32"),
            None if self.token_offsets is None else expect("rows.token_offsets", self.token_offsets, "int32"),
        )

    @property
    def num_experts(self) -> int:
        return int(self.offsets.shape[0]) - 1

    @property
    def num_rows(self) -> int:
        return int(self.pair_indices.shape[0])

    @property
    def num_pairs(self) -> int:
        return int(self.token_index_map.shape[0])

    @property
    def num_tokens(self) -> int:
        if self.top_k:
            return self.num_pairs // self.top_k
        return int(self.token_offsets.shape[0]) - 1


class RowViews(Rows):
    """Rows that have been looked at: `Rows.views` made them."""


class RowAddresses(NamedTuple):
    """Rows, unchecked, as launches want them: where the arrays lie, how much there is, and where to run."""

    pair_to_token: tuple[int, int, int]  # gather.cuh: PairToToken, as three 8-byte words
    pair_indices: int
    offsets: int
    token_index_map: int
    pair_tokens: int  # 0 for none
    token_offsets: int
    top_k: int  # 0 if it varies
    num_rows: int
    num_experts: int
    num_pairs: int
    device: int  # CUDA ordinal
    where: tuple[int, int, int]  # (num_rows, num_experts, device): plans of launches are kept by it, so it is made once
    stream: int  # raw cudaStream_t
    owners: object  # keeps the arrays alive


def addresses(rows: Any, device: int, stream: int) -> RowAddresses:
    """rows: the fields of Rows, torch tensors or DeviceArrays, contiguous and 16-byte aligned, which is not checked here."""
    pair_indices, offsets, token_index_map, top_k, pair_tokens, token_offsets = rows
    pairs_at = pair_indices.data_ptr()
    tokens_at = 0 if pair_tokens is None else pair_tokens.data_ptr()
    multiplier, shift = division(top_k) if top_k else (0, 0)
    num_rows, num_experts = pair_indices.shape[0], offsets.shape[0] - 1
    return RowAddresses(
        (pairs_at, tokens_at, multiplier | shift << 32),
        pairs_at,
        offsets.data_ptr(),
        token_index_map.data_ptr(),
        tokens_at,
        0 if token_offsets is None else token_offsets.data_ptr(),
        top_k or 0,
        num_rows,
        num_experts,
        token_index_map.shape[0],
        device,
        (num_rows, num_experts, device),
        stream,
        rows,
    )


def on_current_gpu(rows: Rows, stream: int | None, **arrays: DeviceArray | None) -> RowAddresses:
    """:func:`addresses` for a launch on the current GPU and ``stream``, by default the current one of the first of ``arrays``.

    ValueError if one of ``arrays``, or of the rows' own, lies on another GPU.
    """
    device = current_device()
    index_arrays = {f"rows.{name}": array for name, array in zip(rows._fields, rows, strict=True)}
    for name, array in {**arrays, **index_arrays}.items():
        if isinstance(array, DeviceArray) and array.device != device:
            raise ValueError(
                f"{name}: expected an array on the current GPU, cuda:{device}, got one on cuda:{array.device}"
            )
    return addresses(rows, device, current_stream(next(iter(arrays.values()))) if stream is None else stream)


@cache
def division(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == n * multiplier >> shift for 0 <= n < 2**31 and a 32-bit multiplier."""
    log2 = divisor.bit_length() - 1
    if divisor == 1 << log2:
        return 1 << 31, 31 + log2
    return (1 << 32 + log2) // divisor + 1, 32 + log2
