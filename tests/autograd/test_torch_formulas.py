"""Every product's formula by torch is its formula by NumPy, which is the twin: in float64, with every option."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from blazeproto import gemm
from blazeproto.activations import ACTIVATIONS, activation_named
from blazeproto.autograd.torch_formulas import Torch, _empty_groups_are_zero, outputs
from blazeproto.dispatch import Dispatch
from blazeproto.dispatch.reference import build_dispatch, build_dispatch_varying
from blazeproto.gemm.linear import GROUPED_MM

T, D, N, E, K, RANK = 13, 6, 5, 4, 3, 2
SPECS = {name: product.spec for name, product in gemm.PRODUCTS.items()} | {"grouped_mm": GROUPED_MM}
RNG = np.random.default_rng(0)


def dispatches() -> Iterator[tuple[str, Dispatch]]:
    here, some = (np.argsort(RNG.random((T, count)), axis=1)[:, :K].astype(np.int32) for count in (E, E + 2))
    counts = RNG.integers(0, 4, T)
    lists = (
        RNG.integers(-1, E, counts.sum()),
        np.repeat(np.arange(T), counts),
        np.concatenate([[0], np.cumsum(counts)]),
    )
    yield "fixed", build_dispatch(here, E)
    yield "sentinels", build_dispatch(some, E)
    yield "capacity", build_dispatch(some, E, row_capacity=11)
    yield "no row", build_dispatch(some, E, row_capacity=0)
    yield "varying", build_dispatch_varying(*(array.astype(np.int32) for array in lists), E)
    yield "no token", build_dispatch(some[:0], E)


DISPATCHES = dict(dispatches())


def calls(name: str, dispatch: Dispatch) -> Iterator[dict[str, Any]]:
    """Arrays by name, and options: each value of each option that the product has, then several options at once."""
    parameters = inspect.signature(gemm.TWINS[name]).parameters
    options: dict[str, list[Any]] = {
        "activation": list(ACTIVATIONS),
        "gather": [False, True],
        "transposed": [False, True],
        "columns": [None, range(1, 4)],
        "low": [False, True],
        "optional": [False, True],
    }
    several = {"gather": True, "transposed": True, "low": True, "optional": True}
    known = [{}, several, several | {"columns": range(1, 4)}]
    known += [{key: value} for key, values in options.items() for value in values]
    for chosen in known:
        call: dict[str, Any] = {key: chosen[key] for key in chosen.keys() & parameters.keys() - {"low"}}
        halves = activation_named(call.get("activation", "swiglu")).halves
        sizes = gemm.Sizes(T, D, N, E, K, halves).letters | {"r": RANK, "width": D, "reduction": N}
        sizes |= {"T": dispatch.num_tokens, "R": dispatch.num_rows, "P": dispatch.num_pairs}
        defaults = {
            key: value.default for key, value in parameters.items() if value.default is not inspect.Parameter.empty
        }
        for array in SPECS[name].inputs:
            values = RNG.normal(size=[sizes[letter] for letter in array.shape_in(defaults | call).split()])
            if array.name.startswith("low "):
                call["low"] = (*call.get("low", ()), values)
            elif not array.optional or chosen.get("optional"):
                call[array.name] = values
        if not chosen.get("low"):
            call.pop("low", None)
        if name == "combine":  # y is as wide as the columns of an output, which must be given
            call.pop("columns", None)
        yield call


def to_torch(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(to_torch, value))
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)
@pytest.mark.parametrize("name", SPECS)
def test_formulas_by_torch_are_the_twins(name: str, dispatch: Dispatch) -> None:
    spec, lists = SPECS[name], {key: to_torch(array) for key, array in dispatch.arrays.items()}
    for call in calls(name, dispatch):
        shapes = {"token": (dispatch.num_tokens, D), "pair": (dispatch.num_pairs,)}
        added = {array.name: np.zeros(shapes[array.index]) for array in spec.outputs if array.added}
        right = gemm.TWINS[name](**call, **added, dispatch=dispatch)
        taken = inspect.signature(spec.formula).parameters.keys() & call.keys()
        if "activation" in inspect.signature(spec.formula).parameters:
            call.setdefault("activation", "swiglu")
            taken |= {"activation"}
        made = outputs(spec, replace(dispatch, **lists), torch.float64, **{key: to_torch(call[key]) for key in taken})
        both = zip(
            *(value if isinstance(value, tuple) else (value,) for value in (made, right)), spec.outputs, strict=True
        )
        for mine, its, array in both:
            used = int(dispatch.expert_token_offsets[-1]) if array.index == "row" else len(its)
            assert mine.dtype == torch.float64 and tuple(mine.shape) == its.shape
            np.testing.assert_allclose(
                mine[:used], its[:used], rtol=1e-12, atol=1e-12, err_msg=f"{array.name} {call.keys()}"
            )


@pytest.mark.parametrize("needs", [("dh",), ("a_scaled",), ("d_scores",), ("dh", "d_scores"), ()])
def test_only_what_is_needed_is_made(needs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = DISPATCHES["fixed"]
    rows = replace(dispatch, **{key: to_torch(array) for key, array in dispatch.arrays.items()})
    d_out, down, h, scores = (torch.randn(*s).double() for s in ((T, D), (E, D, N), (T * K, 2 * N), (T * K,)))
    if needs in ((), ("a_scaled",)):
        monkeypatch.setattr(Torch, "product", lambda *_, **__: pytest.fail("a product that is not needed"))
    spec, call = SPECS["down_backward_act"], {"d_out": d_out, "down_proj": down, "h": h, "scores": scores}
    made = outputs(spec, rows, torch.float64, **call, activation="swiglu", needs=needs)
    assert [value is not None for value in made] == [array.name in needs for array in spec.outputs]


@patch.object(torch.cuda, "get_device_capability", lambda _: (10, 0))
def test_empty_groups_are_zeroed_on_blackwell() -> None:
    assert not _empty_groups_are_zero(torch.device("cuda", 99))
