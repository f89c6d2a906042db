"""What a dispatch is: the index lists of MoEBlaze §4.1, from which the products find their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Who goes where. A pair is one (token, slot), numbered token·K + slot; a row is a pair's place in expert order.

    For 5 tokens, 4 experts, K = 2, the tokens' experts being {2,3} {0,1} {0,3} {1,2} {0,3} (the example of §4.1):

        token_expert_indices    2 3   0 1   0 3   1 2   0 3       expert of each pair: the router's choice, flat
        expert_pair_indices     2 4 8   3 6   0 7   1 5 9         pair of each row: by expert, ascending inside one
        expert_token_offsets    0       3     5     7       10    where each expert's rows begin, and the end
        token_index_map         5 7   0 3   1 8   4 6   2 9       row of each pair: the inverse
        expert_token_indices    1 2 4   1 3   0 3   0 2 4         token of each row: made when asked for

    All int32 and one-dimensional, (P,) with P = T·K, but offsets (E+1,). A pair whose expert id lies outside [0, E)
    has no row: its token_index_map is -1, and what is left at the end of expert_pair_indices is -1.

    With a number of experts that varies from token to token, top_k is None, token_offsets (T+1,) says where each
    token's pairs begin and pair_tokens (P,) names each pair's token; with a fixed K both are None and nothing pays for
    them.
    """

    expert_pair_indices: Any
    expert_token_offsets: Any
    token_index_map: Any
    token_expert_indices: Any
    num_experts: int
    top_k: int | None
    num_tokens: int
    token_offsets: Any = None
    pair_tokens: Any = None

    @property
    def expert_token_indices(self) -> Any:
        """(P,) the paper's list: the token of each row, -1 where a row has no pair."""
        if self.top_k is not None:
            return self.expert_pair_indices // self.top_k
        used = (self.expert_pair_indices >= 0) * 1
        return self.pair_tokens[self.expert_pair_indices * used] * used - (1 - used)

    def __repr__(self) -> str:
        per_token = "varying" if self.top_k is None else f"top_k={self.top_k}"
        return f"Dispatch(num_tokens={self.num_tokens}, num_experts={self.num_experts}, {per_token})"
