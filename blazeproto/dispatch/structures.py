"""A dispatch: the index lists of MoEBlaze §4.1, from which the products find their rows, and their addresses."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from blazeproto.runtime import shown
from blazeproto.runtime.arch import Arch, arch_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_EXPERTS = 16  # whose load a repr lists; of more it tells the least, the mean and the most


@dataclass(frozen=True, eq=False, repr=False)
class Dispatch(shown.Shown):
    """The row of each pair (MoEBlaze §4.1), for T tokens (num_tokens), E experts (num_experts), K experts a token (top_k).

    A pair is one (token, slot), numbered token·K + slot; a row is a pair's place in expert order.
    For 5 tokens, 4 experts, K = 2, the tokens' experts being {2,3} {0,1} {0,3} {1,2} {0,3} (the example of §4.1):

        token_expert_indices    2 3   0 1   0 3   1 2   0 3       expert of each pair: the router's choice, flat
        expert_pair_indices     2 4 8   3 6   0 7   1 5 9         pair of each row: by expert, ascending inside one
        expert_token_offsets    0       3     5     7       10    where each expert's rows begin, and the end
        token_index_map         5 7   0 3   1 8   4 6   2 9       row of each pair: the inverse
        expert_token_indices    1 2 4   1 3   0 3   0 2 4         token of each row: made when asked for

    All int32 and one-dimensional: lists by pair (P,) with P = T·K, lists by row (R,), offsets (E+1,). A pair whose expert id
    lies outside [0, E) has no row: its token_index_map is -1, and what is left at the end of expert_pair_indices is -1.

    R is P, or less with a ``row_capacity``: then the rows from R on, the last in expert order, are not there, their pairs
    have token_index_map -1, and overflow (1,) counts them.

    With a number of experts that varies from token to token, top_k is None, token_offsets (T+1,) says where each
    token's pairs begin and pair_tokens (P,) names each pair's token; with a fixed K both are None and nothing pays for
    them. The arrays are of whatever kind the ids were: torch, CuPy, NumPy for the twins.
    """

    expert_pair_indices: Any
    expert_token_offsets: Any
    token_index_map: Any
    token_expert_indices: Any  # None where nothing but the products will read the dispatch
    num_experts: int
    top_k: int | None
    num_tokens: int
    token_offsets: Any = None
    pair_tokens: Any = None
    overflow: Any = None  # None without a row_capacity

    @property
    def num_rows(self) -> int:
        """R, places for rows."""
        return int(self.expert_pair_indices.shape[0])

    @property
    def num_pairs(self) -> int:
        """P."""
        return int(self.token_index_map.shape[0])

    @property
    def arrays(self) -> dict[str, Any]:
        """Those that the products read, by name; None for those that a fixed K needs not."""
        names = ("expert_pair_indices", "expert_token_offsets", "token_index_map", "pair_tokens", "token_offsets")
        return {name: getattr(self, name) for name in names}

    @property
    def expert_token_indices(self) -> Any:
        """(R,) the paper's list: the token of each row, -1 where a row has no pair."""
        if self.top_k is not None:
            return self.expert_pair_indices // self.top_k
        used = (self.expert_pair_indices >= 0) * 1
        return self.pair_tokens[self.expert_pair_indices * used] * used - (1 - used)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The load of each expert as bars, by matplotlib, on ``ax`` or new axes; waits for the device. Returns the Axes."""
        made: Axes = shown.lab_views().plot_load(self, ax)
        return made

    def __repr__(self) -> str:
        """With the load, rows of each expert; it waits for the device."""
        per_token = "varying" if self.top_k is None else f"top_k={self.top_k}"
        offsets = self.expert_token_offsets.tolist()
        load = [end - begin for begin, end in pairwise(offsets)]
        shown = " ".join(map(str, load))
        if len(load) > SHOWN_EXPERTS:
            shown = f"{min(load)} to {max(load)}, mean {sum(load) / len(load):.1f}"
        return f"Dispatch(num_tokens={self.num_tokens}, num_experts={self.num_experts}, {per_token}, load: {shown})"


class Addresses(NamedTuple):
    """The addresses and lengths of a dispatch's arrays, the device and the stream: all that a launch needs, unchecked."""

    pair_to_token: tuple[int, int, int]  # gather.cuh: PairToToken: expert_pair_indices, pair_tokens or 0, a division
    expert_token_offsets: int
    token_index_map: int
    token_offsets: int  # 0 for none
    top_k: int  # 0 if it varies
    num_rows: int
    num_pairs: int
    num_experts: int
    device: int  # CUDA ordinal
    stream: int  # raw cudaStream_t
    where: tuple[int, int, int]  # (num_rows, num_experts, device): a product keeps its plans by it
    arch: Arch  # whose kernels are launched
    owner: Dispatch | None  # keeps the arrays alive


def addresses(dispatch: Dispatch, device: int, stream: int) -> Addresses:
    """dispatch: of torch tensors or DeviceArrays, contiguous and 16-byte aligned, which is not checked here."""
    tokens_at = 0 if dispatch.pair_tokens is None else dispatch.pair_tokens.data_ptr()
    multiplier, shift = division(dispatch.top_k) if dispatch.top_k else (0, 0)
    num_rows, num_experts = dispatch.expert_pair_indices.shape[0], dispatch.num_experts
    return Addresses(
        (dispatch.expert_pair_indices.data_ptr(), tokens_at, multiplier | shift << 32),
        dispatch.expert_token_offsets.data_ptr(),
        dispatch.token_index_map.data_ptr(),
        0 if dispatch.token_offsets is None else dispatch.token_offsets.data_ptr(),
        dispatch.top_k or 0,
        num_rows,
        dispatch.token_index_map.shape[0],
        num_experts,
        device,
        stream,
        (num_rows, num_experts, device),
        arch_on(device),
        dispatch,
    )


def addresses_of_rows(num_rows: int, offsets: int, device: int, stream: int) -> Addresses:
    """Those of rows that all belong to one matrix, which no product gathers.  offsets: where (0, num_rows) lies, int32."""
    return Addresses(
        (0, 0, 0), offsets, 0, 0, 0, num_rows, 0, 1, device, stream, (num_rows, 1, device), arch_on(device), None
    )


@cache
def division(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == n * multiplier >> shift for 0 <= n < 2**31 and a 32-bit multiplier."""
    log2 = divisor.bit_length() - 1
    if divisor == 1 << log2:
        return 1 << 31, 31 + log2
    return (1 << 32 + log2) // divisor + 1, 32 + log2
