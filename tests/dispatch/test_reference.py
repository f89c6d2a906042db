"""The twin against the paper's example and against what a dispatch means."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routings import KINDS, capacities, differences, make_foreign, make_routing, make_varying

from blazeproto.dispatch.reference import build_dispatch, build_dispatch_varying


def test_the_papers_example():
    """MoEBlaze §4.1. The paper says L = 6 and lists five tokens, and prints eight of the ten token_expert_indices
    (token 2's are missing). Right is:"""
    topk_experts = np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
    dispatch = build_dispatch(topk_experts, 4)
    assert dispatch.num_tokens == 5 and dispatch.token_expert_indices.tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
    assert dispatch.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]  # as printed
    assert dispatch.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]  # as printed
    assert dispatch.token_index_map[:2].tolist() == [5, 7]  # "token_index_map[0] = {5, 7}"
    assert dispatch.token_index_map.tolist() == [5, 7, 0, 3, 1, 8, 4, 6, 2, 9]
    assert dispatch.expert_pair_indices.tolist() == [2, 4, 8, 3, 6, 0, 7, 1, 5, 9]


@st.composite
def routings(draw) -> tuple[np.ndarray, int]:
    num_experts = draw(st.one_of(st.integers(1, 12), st.sampled_from([40, 128, 512])))
    top_k = draw(st.integers(1, min(num_experts, 16)) | st.just(num_experts))
    num_tokens = draw(st.integers(0, 70))
    dtype = draw(st.sampled_from(["int32", "int64"]))
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**32 - 1))
    return make_routing(kind, num_tokens, num_experts, top_k, seed, dtype), num_experts


def check_meaning(dispatch, experts: np.ndarray, num_experts: int) -> None:
    """experts: flat ids (P,)."""
    offsets, rows, index_map = dispatch.expert_token_offsets, dispatch.expert_pair_indices, dispatch.token_index_map
    valid = (experts >= 0) & (experts < num_experts)
    used = offsets[-1]
    assert offsets[0] == 0 and used == valid.sum() and (np.diff(offsets) >= 0).all()
    assert sorted(rows[:used]) == np.flatnonzero(valid).tolist(), "each pair exactly once"
    assert (rows[used:] == -1).all() and (index_map[~valid] == -1).all()
    assert (index_map[rows[:used]] == np.arange(used)).all(), "the maps invert each other"
    assert (rows[index_map[valid]] == np.flatnonzero(valid)).all()
    for expert in range(num_experts):
        mine = rows[offsets[expert] : offsets[expert + 1]]
        assert (experts[mine] == expert).all()
        assert (np.diff(mine) > 0).all(), "stable"


@settings(deadline=None, max_examples=150)
@given(routings())
def test_the_lists_mean_what_they_say(routing):
    ids, num_experts = routing
    dispatch = build_dispatch(ids, num_experts, validate=True)
    check_meaning(dispatch, ids.reshape(-1), num_experts)
    rows = dispatch.expert_pair_indices
    assert (dispatch.expert_token_indices == np.where(rows >= 0, rows // ids.shape[1], -1)).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 1000), st.integers(0, 9))
def test_varying_counts(num_tokens, num_experts, seed, spare):
    experts, tokens, offsets = make_varying(num_tokens, num_experts, seed, spare)
    dispatch = build_dispatch_varying(experts, tokens, offsets, num_experts)
    check_meaning(dispatch, experts, num_experts)
    assert dispatch.top_k is None and dispatch.num_tokens == num_tokens
    rows = dispatch.expert_pair_indices
    assert (dispatch.expert_token_indices == np.where(rows >= 0, tokens[rows] if len(tokens) else 0, -1)).all()


def test_a_capacity_in_the_papers_example():
    """As dispatch/limit.py draws it."""
    topk_experts = np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
    dispatch = build_dispatch(topk_experts, 4, row_capacity=4)
    assert dispatch.expert_token_offsets.tolist() == [0, 3, 4, 4, 4]
    assert dispatch.expert_pair_indices.tolist() == [2, 4, 8, 3]
    assert dispatch.expert_token_indices.tolist() == [1, 2, 4, 1]
    assert dispatch.token_index_map.tolist() == [-1, -1, 0, 3, 1, -1, -1, -1, 2, -1]
    assert dispatch.overflow.tolist() == [6] and build_dispatch(topk_experts, 4).overflow is None


def check_capacity(dispatch, full, capacity: int) -> None:
    """``full``: the same dispatch without a capacity."""
    rows, num_rows = dispatch.expert_pair_indices, int(full.expert_token_offsets[-1])
    for name in ("expert_pair_indices", "expert_token_offsets", "token_index_map", "overflow"):
        assert getattr(dispatch, name).dtype == np.int32
    assert dispatch.overflow.tolist() == [max(num_rows - capacity, 0)]
    assert (rows == full.expert_pair_indices[:capacity]).all(), "the rows that stay are the first in expert order"
    assert rows.size == min(capacity, full.expert_pair_indices.size)
    assert (dispatch.expert_token_offsets == full.expert_token_offsets.clip(max=capacity)).all()
    stays = (full.token_index_map >= 0) & (full.token_index_map < capacity)
    assert (dispatch.token_index_map == np.where(stays, full.token_index_map, -1)).all()
    assert stays.sum() == min(num_rows, capacity)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 40), st.integers(1, 5), st.integers(1, 8), st.sampled_from(["int32", "int64"]), st.integers(0, 99)
)
def test_a_capacity(num_tokens, num_experts, top_k, dtype, seed):
    """K > E too, with ids that lie outside."""
    ids = make_foreign(num_tokens, num_experts, top_k, seed, dtype)
    full = build_dispatch(ids, num_experts, validate=True)
    varying = make_varying(num_tokens, num_experts, seed)
    full_varying = build_dispatch_varying(*varying, num_experts)
    for capacity in capacities(int(full.expert_token_offsets[-1])):
        check_capacity(build_dispatch(ids, num_experts, row_capacity=capacity), full, capacity)
        limited = build_dispatch_varying(*varying, num_experts, row_capacity=capacity)
        check_capacity(limited, full_varying, capacity)
        rows = limited.expert_pair_indices
        assert limited.expert_token_indices.tolist() == [varying[1][pair] if pair >= 0 else -1 for pair in rows]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("capacity", [None, 7])
def test_given_outputs_are_filled(dtype, capacity):
    """By name and in order, as the function fills them."""
    ids = make_routing("sentinels", 9, 5, 3, dtype=dtype)
    expected = build_dispatch(ids, 5, row_capacity=capacity)
    names = ["expert_pair_indices", "expert_token_offsets", "token_index_map"]
    names += ["token_expert_indices"] * (dtype == "int64") + ["overflow"] * (capacity is not None)
    out = {name: np.full_like(getattr(expected, name), -77) for name in names}
    by_name = build_dispatch(ids, 5, row_capacity=capacity, out=out)
    in_order = build_dispatch(ids, 5, row_capacity=capacity, out=tuple(np.full_like(a, -77) for a in out.values()))
    assert differences(by_name, expected) == differences(in_order, expected) == []
    assert all(getattr(by_name, name) is array for name, array in out.items())
