"""Every kernel that Numba compiles, on the machine: as its twin says, and no race."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from adverse_scores import make_scores, size_of
from routings import capacities, differences, make_foreign, make_routing, make_varying

from blazeproto.dispatch import build_dispatch, build_dispatch_varying, reference
from blazeproto.router import (
    choose_pairs,
    fallback,
    finish_logits,
    hash_route,
    pairs,
    routing_losses,
    routing_losses_backward,
    score_pairs,
    score_pairs_backward,
    split_gradient,
    topk_route,
    topk_route_backward,
)
from blazeproto.router.kinds import WAYS
from blazeproto.router.scores import SCORES
from blazeproto.runtime import arrays
from blazeproto.runtime.rounding import from_bfloat16_bits
from blazeproto.runtime.target import launches_on

pytest.importorskip("numba.cuda", reason="needs numba-cuda")
from blazeproto.lab.target import Machine

FULL = pytest.mark.full
SCORE_NAMES = list(SCORES)


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=FULL)


@contextmanager
def on_machine(seed: int = 0) -> Iterator[Machine]:
    """Fails where a race is reported."""
    machine = Machine(seed=seed)
    with launches_on(machine), np.errstate(all="ignore"):
        yield machine
    assert machine.reports or seed < 0, "nothing ran on it"
    assert not [str(race) for report in machine.reports for race in report.races]


def close(made: Any, right: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for mine, its in zip(*(a if isinstance(a, tuple) else (a,) for a in (made, right)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=rtol, atol=atol, equal_nan=True)


# --- Dispatch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "num_tokens", "num_experts", "top_k", "dtype"),
    [
        ("tiled", "sentinels", 300, 37, 4, "int32"),
        ("dense", "zipf", 150, 37, 4, "int64"),
        ("tiled", "random", 70, 300, 2, "int32"),  # two experts a thread
        *(
            full(method, *case)
            for method in ("tiled", "dense")
            for case in [
                ("random", 0, 4, 2, "int32"),
                ("random", 1, 1, 1, "int64"),
                ("random", 1000, 128, 8, "int32"),
                ("zipf", 700, 512, 10, "int64"),
                ("sentinels", 515, 64, 2, "int64"),
                ("same", 300, 5, 5, "int32"),
                ("nobody_here", 140, 6, 2, "int32"),
                ("one_expert_busy", 333, 70, 35, "int32"),
            ]
        ),
    ],
)
def test_dispatch(method: Any, kind: str, num_tokens: int, num_experts: int, top_k: int, dtype: str) -> None:
    for seed in range(1 if num_experts in (37, 300) else 3):
        ids = make_routing(kind, num_tokens, num_experts, top_k, seed, dtype)
        with on_machine(seed):
            made = build_dispatch(ids, num_experts, method=method)
        assert not differences(made, reference.build_dispatch(ids, num_experts))


@pytest.mark.parametrize(
    ("method", "num_tokens", "num_experts", "top_k", "dtype"),
    [
        ("tiled", 300, 37, 4, "int64"),
        full("dense", 41, 5, 3, "int64"),
        full("tiled", 23, 2, 8, "int32"),
        full("tiled", 0, 3, 2, "int32"),
        full("tiled", 600, 128, 8, "int32"),
    ],
)
def test_a_capacity(method: Any, num_tokens: int, num_experts: int, top_k: int, dtype: str) -> None:
    """No row, some rows and all rows beyond it, of ids that are mostly elsewhere."""
    ids = make_foreign(num_tokens, num_experts, top_k, dtype=dtype)
    for capacity in capacities(int(reference.build_dispatch(ids, num_experts).expert_token_offsets[-1])):
        with on_machine():
            made = build_dispatch(ids, num_experts, row_capacity=capacity, method=method)
        assert not differences(made, reference.build_dispatch(ids, num_experts, row_capacity=capacity))


@pytest.mark.parametrize(
    ("method", "num_tokens", "capacity"),
    [full("tiled", 40, None), full("dense", 300, None), full("tiled", 300, 200), full("dense", 40, 20)],
)
def test_a_varying_number_of_experts(method: Any, num_tokens: int, capacity: int | None) -> None:
    varying = make_varying(num_tokens, 9)
    with on_machine():
        made = build_dispatch_varying(*varying, 9, row_capacity=capacity, method=method)
    assert not differences(made, reference.build_dispatch_varying(*varying, 9, row_capacity=capacity))


@pytest.mark.full
def test_chunks_whose_table_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a million tokens: the table of counts in a launch of its own."""
    from blazeproto.dispatch import tiled

    monkeypatch.setattr(tiled, "SIZES", tiled.SIZES._replace(few_chunks=0))
    large = tiled.plan(2**20, 2, 40)
    ids = make_routing("sentinels", large.chunk_tokens + large.tile_tokens + 77, 40, 2)
    chosen = large._replace(num_chunks=-(-len(ids) // large.chunk_tokens))
    monkeypatch.setattr(tiled, "plan", lambda *_: chosen)
    with on_machine() as machine:
        made = build_dispatch(ids, 40)
    assert len(machine.reports) == 3 and not differences(made, reference.build_dispatch(ids, 40))


# --- Choice and scores ---------------------------------------------------------------------------------------------------


def make_logits(num_tokens: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """(T, E): ties, equal logits, one that is no number, and a token whose scores may all underflow."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    if num_tokens > 4:
        logits[0], logits[1] = np.round(logits[0]), 0
        logits[2, num_experts // 2] = (np.nan, np.inf, -np.inf)[seed % 3]
        logits[3] -= 200
    return logits


@pytest.mark.parametrize(
    ("score", "num_tokens", "num_experts", "top_k", "half", "renormalize", "groups"),
    [
        ("softmax_topk", 37, 40, 3, False, False, None),
        ("sigmoid", 37, 40, 3, False, None, (5, 2)),
        full("topk_softmax", 37, 37, 3, True, None, None),
        full("sigmoid", 37, 40, 3, False, True, None),
        *(
            full(score, *case, renormalize, None)
            for score in SCORE_NAMES
            for renormalize in (False, True)
            for case in [
                (0, 8, 2, False),
                (1, 1, 1, False),
                (70, 8, 8, True),
                (19, 128, 8, False),
                (9, 512, 10, True),
                (33, 70, 16, False),
            ]
        ),
        full("sigmoid", 19, 256, 8, False, None, (8, 4)),  # DeepSeek-V3
        full("sigmoid", 19, 256, 8, True, None, (8, 4)),
        full("sigmoid", 37, 160, 6, False, None, (8, 3)),
        full("topk_softmax", 37, 36, 5, False, None, (12, 5)),
        full("topk_softmax", 19, 40, 3, True, None, (20, 2)),
        full("topk_softmax", 33, 7, 3, False, None, (7, 4)),
        full("softmax_topk", 37, 512, 16, False, None, (32, 4)),
    ],
)
def test_top_k(
    score: Any,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    half: bool,
    renormalize: bool | None,
    groups: tuple[int, int] | None,
) -> None:
    """groups: how many, and of how many experts are chosen."""
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": 1.5}
    choice = dict(zip(("num_groups", "top_groups"), groups, strict=True)) if groups else {}
    for seed in range(1 if num_tokens == 37 else 3):
        rng, logits = np.random.default_rng(seed), make_logits(num_tokens, num_experts, seed)
        given = (logits.view(np.uint32) >> 16).astype(np.uint16) if half else logits
        logits = from_bfloat16_bits(given) if half else logits
        choice["bias"] = rng.standard_normal(num_experts).astype(np.float32) if SCORES[score].elementwise else None
        scores, experts = fallback.topk_route(logits, top_k, **choice, **options)
        anyhow = rng.permuted(np.tile(np.arange(num_experts, dtype=np.int32), (num_tokens, 1)), axis=1)[:, :top_k]
        d_scores = rng.standard_normal(scores.shape).astype(np.float32)
        with on_machine(seed if num_tokens else -1):
            made = topk_route(given, top_k, **choice, **options)
            slopes = [
                topk_route_backward(given, np.ascontiguousarray(chosen), d_scores, **options)
                for chosen in (experts, anyhow)
            ]
        np.testing.assert_array_equal(made[1], experts)
        close(made[0], scores)
        for chosen, slope in zip((experts, anyhow), slopes, strict=True):
            right = fallback.topk_route_backward(logits, chosen, d_scores, **options)
            close(from_bfloat16_bits(slope) if half else slope, right, *((2**-8, 1e-6) if half else (1e-4, 1e-6)))


@pytest.mark.full
@pytest.mark.parametrize(("num_experts", "top_k"), [(40, 8), (8, 2), (8, 8), (70, 16), (128, 8), (200, 6)])
def test_top_k_of_logits_that_nearly_tie(num_experts: int, top_k: int) -> None:
    """They differ only in the bits that an expert's id takes in a key, the higher id being better."""
    rng = np.random.default_rng(0)
    near = (0x40200000 + np.arange(num_experts, dtype=np.uint32)).view(np.float32)
    some_clear = near.copy()  # the border between the last choice and the next expert is near
    some_clear[rng.permutation(num_experts)[: top_k - 1]] = 3 + np.arange(top_k - 1)
    rows = [near, some_clear]
    if (
        num_experts == 40
    ):  # two lanes; of a pair the better expert, with the higher id, is dropped in its lane, or in the merge
        for clear, pair in (([0, 1, 2, 3, 4, 5, 6], [7, 32]), ([0, 1, 2, 3, 24, 25, 26], [7, 31])):
            row = -1 - rng.random(num_experts, np.float32)
            row[clear], row[pair] = 10 + np.arange(7), near[:2]
            rows.append(row)
    logits = np.stack(rows)
    with on_machine():
        made = topk_route(logits, top_k)
    np.testing.assert_array_equal(made[1], fallback.topk_route(logits, top_k)[1])


def test_a_choice_that_is_clear_is_not_made_again() -> None:
    """Only where two of the best keys differ in the expert's bits alone are the logits read once more."""
    rng = np.random.default_rng(0)
    clear = np.stack([rng.permutation(40) for _ in range(8)]).astype(np.float32)
    steps = []
    for logits in (clear, np.where(clear == 35, np.float32(36), clear)):  # 36 is the last of the best four
        with on_machine() as machine:
            topk_route(logits, 4)
        steps.append(machine.reports[-1].steps)
    assert steps[0] < 0.75 * steps[1]


@pytest.mark.parametrize(
    ("score", "num_tokens", "num_experts", "renormalize"),
    [
        ("sigmoid", 21, 40, True),
        *(
            full(score, *case, renormalize)
            for score in SCORE_NAMES
            for renormalize in (False, True)
            for case in [(0, 4), (6, 1), (37, 70), (9, 512)]
        ),
    ],
)
def test_scores_of_pairs(score: Any, num_tokens: int, num_experts: int, renormalize: bool) -> None:
    options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": 1.5}
    for seed in range(1 if num_tokens == 21 else 3):
        rng, logits = np.random.default_rng(seed), make_logits(num_tokens, num_experts, seed)
        mask = rng.random(logits.shape) < 0.6
        mask[num_tokens // 2 :][:2] = False
        logits[num_tokens // 2 :][:1] = np.nan  # a masked token
        listed = np.concatenate([np.nonzero(mask)[1], [-1] * 5]).astype(np.int32)
        offsets = np.concatenate([[0], mask.sum(axis=1).cumsum()]).astype(np.int32)
        d_scores = rng.standard_normal(len(listed)).astype(np.float32)
        with on_machine(seed):
            scores = score_pairs(logits, listed, offsets, **options)
            d_logits = score_pairs_backward(logits, listed, offsets, d_scores, **options)
        close(scores, fallback.score_pairs(logits, listed, offsets, **options), atol=1e-12)
        close(d_logits, fallback.score_pairs_backward(logits, listed, offsets, d_scores, **options), 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("by", "kind", "num_tokens", "num_experts", "top_k"),
    [
        ("score", "ties", 36, 2, 1),
        full("score", "ties", 36, 3, 2),
        *(
            full(by, *case)
            for by in WAYS
            for case in [
                ("normal", 0, 3, 2),
                ("normal", 1, 1, 1),
                ("ties", 75, 3, 3),
                ("same", 67, 4, 2),
                ("one_expert", 65, 6, 2),
                ("saturated", 66, 5, 2),
                ("nan", 70, 3, 1),
            ]
        ),
    ],
)
def test_choices(by: str, kind: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    scores, experts = make_scores(kind, num_tokens, num_experts, top_k)
    draws = np.random.default_rng(0).random(num_experts, dtype=np.float32)
    size = size_of(by, num_tokens, top_k, num_experts)
    for seed, most in enumerate((size, 0, num_tokens) if (kind, num_experts) == ("ties", 3) else (size,)):
        given = scores, experts, by, max(most, 1) if size == 8 else most, num_tokens * num_experts + 3
        with on_machine(seed):
            made = choose_pairs(*given, draws=draws)
        for mine, right in zip(made, fallback.choose_pairs(*given, draws=draws), strict=True):
            np.testing.assert_array_equal(mine, right)


def of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many has an expert's block from now on. Where they are fewer than tokens they go on to further ones."""
    monkeypatch.setattr(pairs, "SELECT_THREADS", threads)
    monkeypatch.setattr(pairs, "choosing_kernels", pairs.choosing_kernels.__wrapped__)  # past its cache


@pytest.mark.full
@pytest.mark.parametrize(
    ("by", "kind", "num_tokens", "num_experts", "top_k", "threads"),
    [
        *((by, "normal", 70, 140, 8, 64) for by in WAYS),
        *((by, "ties", 40, 264, 10, 32) for by in ("nr_f", "expert_choice", "score")),
    ],
)
def test_choices_of_many_experts(
    by: str, kind: str, num_tokens: int, num_experts: int, top_k: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a tile of keys has, or than a block that counts or lists has threads. With 1024 threads an expert, as in
    `test_choices`, the machine would take minutes."""
    of_threads(threads, monkeypatch)
    test_choices(by, kind, num_tokens, num_experts, top_k)


@pytest.mark.parametrize(
    ("by", "masked", "threads"),
    [
        *((by, 13, 32) for by in ("nr_f", "expert_choice", "slot")),
        full("nr_f", 13, pairs.SELECT_THREADS),
        *(full(by, masked, 32) for by in WAYS for masked in (1, 30, 35, 36)),
    ],
)
def test_choices_with_masked_tokens(by: str, masked: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last tokens masked the pairs are those of the others alone. What lies at masked tokens is not read."""
    of_threads(threads, monkeypatch)
    scores, experts = make_scores("ties", 36, 3, 2)
    draws, kept = np.random.default_rng(0).random(3, dtype=np.float32), 36 - masked
    size = size_of(by, kept, 2, 3)
    right = fallback.choose_pairs(scores[:kept], experts[:kept], by, size, 108, draws=draws)
    right = [*right[:2], np.pad(right[2], (0, masked), mode="edge"), right[3]]
    scores[kept:], experts[kept:] = np.nan, -1
    with on_machine() as machine:
        made = [machine.empty(array.shape, np.int32) for array in right]
        views = [arrays.view(array) for array in (scores, experts, draws, *made)]
        limits = arrays.view(np.array([kept, size], np.int32))
        pairs.launch_choice((views[0].device, 0), tuple(views), by, (), 0, limits)
    for mine, expected in zip(made, right, strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_loads_balanced_over_experts_that_many_or_few_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    of_threads(32, monkeypatch)
    test_choices("balance_f", "one_expert", 30, 4, 2)


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(40, 3), *(full(*case) for case in [(1, 1), (7, 7), (100, 5), (512, 10)])]
)
def test_hashes(num_experts: int, top_k: int) -> None:
    ids = np.array([0, 5, -1, 2**40 + 3, 50256], np.int64)
    with on_machine():
        made = hash_route(ids, num_experts, top_k, seed=3)
    np.testing.assert_array_equal(made, fallback.hash_route(ids, num_experts, top_k, seed=3))


# --- Losses and logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "score", "balance", "z"),
    [
        (37, 40, 3, "sigmoid", True, True),
        full(1, 1, 1, "softmax_topk", True, True),
        full(9, 8, 2, "softmax_topk", True, True),
        full(37, 128, 8, "topk_softmax", False, True),
        full(70, 70, 3, "sigmoid", True, False),
        full(37, 512, 10, "softmax_topk", True, True),
        full(4, 7, 2, "softmax_topk", False, False),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_losses(
    num_tokens: int, num_experts: int, top_k: int, score: Any, balance: bool, z: bool, masked: bool
) -> None:
    """Tokens that are masked change nothing. Some ids are not here where none is masked: else the load says how many are left."""
    rng = np.random.default_rng(num_experts)
    values = 3 * rng.standard_normal((num_tokens, num_experts)).astype(np.float32)
    ids = np.arange(num_experts) if masked else np.arange(-1, num_experts + 1)
    everyone = np.tile(ids.astype(np.int32), (num_tokens, 1))
    experts = rng.permuted(everyone, axis=1)[:, :top_k].copy()
    options: dict[str, Any] = {"score": score, "balance": balance, "z": z, "masked": masked}
    if masked:
        values[1::3], experts[1::3] = np.nan, -1
    elif num_tokens == 70:
        values[5, 0], values[6] = np.inf, np.nan
    slopes = np.array(0.7, np.float32), np.array(-1.3, np.float32), top_k
    right = fallback.routing_losses(values, experts, **options)
    right_d = fallback.routing_losses_backward(values, right[0], *slopes, **options)
    for seed in range(1 if num_experts == 40 else 3):
        with on_machine(seed):
            made = routing_losses(values, experts, **options)
            d_logits = routing_losses_backward(values, right[0], *slopes, **options)
        close(made, right)
        close(d_logits, right_d, 1e-4, 1e-6 * float(np.nan_to_num(np.abs(right_d)).max()))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(37, 40), full(1, 1), full(37, 37), full(20, 128), full(9, 512)]
)
def test_logits(num_tokens: int, num_experts: int) -> None:
    rng = np.random.default_rng(num_experts)
    products, d_logits = rng.standard_normal((2, num_tokens, num_experts)).astype(np.float32)
    products[-1, 0], d_logits[0, :4] = np.inf, [np.nan, np.inf, 3.4e38, 1e-44][:num_experts]
    right = fallback.finish_logits(products)
    for seed in range(3):
        with on_machine(seed):
            made = finish_logits(products.copy())
        np.testing.assert_array_equal(made, right)
    for parts in (2, 3):
        with on_machine():
            split = split_gradient(d_logits, right, parts)
        right_split = fallback.split_gradient(d_logits, right, parts)
        np.testing.assert_array_equal(from_bfloat16_bits(split), from_bfloat16_bits(right_split))
