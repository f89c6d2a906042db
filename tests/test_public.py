"""Every public name has a docstring that agrees with its signature and says what a user needs; the checker itself is checked."""

import importlib
import inspect
import re
from math import prod
from typing import Any

import numpy as np
import pytest

from blazeproto import dispatch, gemm, router
from blazeproto.router.choices import CHOICES
from tests import public_docs
from tests.public_docs import (
    complaints_about_class,
    complaints_about_function,
    complaints_about_raising,
    complaints_about_source,
)
from tests.runtime import calls

PUBLIC = dict(public_docs.public_names())
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing)}
REFUSES_NOTHING = {  # torch calls it, or there is nothing to give
    "blazeproto.autograd.checkpoint_policy",
    "blazeproto.autograd.checkpoint_contexts",
    "blazeproto.gemm.all_kernels",
}
NO_PAPERS = {"finish_logits", "logits_product", "split_gradient", "make_router", "routing_stats"}  # of router
WITH_SOURCE = {
    **{f"gemm.{name}": entry.run for name, entry in (gemm.PRODUCTS | gemm.BLOCK_PRODUCTS).items()},
    **{
        f"dispatch.{name}": getattr(dispatch, name) for name in ("build_dispatch", "build_dispatch_varying", "Dispatch")
    },
    **{
        f"router.{name}": thing
        for name in router.__all__
        if inspect.isfunction(thing := getattr(router, name)) and name not in NO_PAPERS
    },
    **{f"router.choices.{cls.__name__}": cls for cls in CHOICES.values() if cls is not None},
    "autograd.moe_mlp": PUBLIC["blazeproto.moe_mlp"],
    "autograd.SavePolicy": PUBLIC["blazeproto.SavePolicy"],
}


@pytest.mark.parametrize("room", public_docs.ROOMS)
def test_rooms_have_docstrings(room: str) -> None:
    assert len(importlib.import_module(room).__doc__ or "") > 40


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    assert not complaints_about_function(FUNCTIONS[name])


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name: str) -> None:
    assert not complaints_about_class(CLASSES[name])


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - REFUSES_NOTHING))
def test_what_is_raised_is_told(name: str) -> None:
    assert not complaints_about_raising(FUNCTIONS[name])


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_what_constructors_raise_is_told(name: str) -> None:
    cls = CLASSES[name]
    if hasattr(cls, "__post_init__") or ("__init__" in vars(cls) and not public_docs.is_record(cls)):
        assert not complaints_about_raising(cls)


@pytest.mark.parametrize("name", WITH_SOURCE)
def test_the_source_is_there(name: str) -> None:
    assert not complaints_about_source(WITH_SOURCE[name].__doc__)


# --- What docstrings say is so -----------------------------------------------------------------------------------------------

SIZES = {"T": calls.T, "K": calls.K, "d": calls.D, "n": calls.N, "E": calls.E, "R": calls.R, "P": calls.P, "G": 2}
SIZES |= {"m": 2 * calls.N}
WORDS = {"grouped_mm": {"reduction": calls.D, "columns": 2 * calls.N}}  # lengths that only these have
WORDS |= {"logits_product": {"parts": 2, "d": 24}, "split_gradient": {"parts": 3}}


def lengths(shape: str, words: dict[str, int]) -> tuple[int, ...] | None:
    """ "T, G n" in numbers; None where a length is a function's."""
    known, found = SIZES | words, []
    for item in filter(str.strip, shape.split(",")):
        tokens = re.findall(r"[A-Za-z_]+|\d+|[+]", item)
        if not all(token in known or token.isdigit() or token == "+" for token in tokens):
            return None
        terms = "".join(token if token == "+" else f"*{known.get(token, token)}" for token in tokens).split("+")
        found.append(sum(prod(int(factor) for factor in term.strip("*").split("*")) for term in terms))
    return tuple(found)


@pytest.mark.parametrize(("room", "name"), calls.NAMES)
def test_shapes_are_those_that_it_says(room: str, name: str) -> None:
    """Shapes of every array that goes in, and of every result that the docstring names."""
    function, words = getattr(calls.ROOMS[room], name), WORDS.get(name, {})
    doc = inspect.cleandoc(function.__doc__)
    arguments = calls.arguments_of(room, name)
    arrays: dict[str, Any] = {key: value for key, value in arguments.items() if isinstance(value, np.ndarray)}
    outputs = re.findall(r"(?!or\b)\b([a-z_]\w*) \(", doc.partition("→")[2].partition("\n\n")[0])
    if outputs and room != "dispatch":
        results = calls.run(room, name, calls.arguments_of(room, name))
        assert len(outputs) == len(results), (outputs, len(results))
        arrays |= dict(zip(outputs, results, strict=True))
    assert outputs or room == "dispatch"
    for key, array in arrays.items():
        told = [lengths(shape, words) for shape in public_docs.shapes_of(doc, key)]
        assert array.shape in told, f"{key}: {array.shape} is not among {told}"
        wanted = {"i": r"int32|int64|integer", "f": r"fp32|bf16|float|dtype"}[array.dtype.kind]
        assert re.search(wanted, public_docs.sentence_after(doc, key)), key


# --- The checker -------------------------------------------------------------------------------------------------------------


def sound(x: Any, weights: Any, *, bias: Any = None, top_k: int = 1) -> Any:
    """y = x W^T (+ bias). MoEBlaze Algorithm 1, line 10.

    x (T, d) bf16, weights (E, n, d) and bias (E, n), both bf16 → y (T, n) bf16.

    top_k: K.  Raises ValueError naming the argument.
    """


MUTATIONS = [
    ("x (T, d) bf16, ", "", "x: no shape"),
    ("x (T, d) bf16, ", "z (T, d) bf16, ", "x: no shape"),
    ("x (T, d)", "x", "x: no shape"),
    ("x (T, d)", "x (see above)", "x: no shape"),
    ("bf16", "", "x: no dtype"),
    ("bias (E, n)", "(E, n)", "bias: no shape"),
    ("top_k: K.  ", "", "top_k: not in the docstring"),
    ("top_k: K.", "topk: K.", "topk: in the docstring, but no parameter"),
    ("K.  Raises", "K.  clamp: none.  Raises", "clamp: in the docstring, but no parameter"),
    ("top_k: K.", "top_k: K.\nlimit: of it.", "limit: in the docstring, but no parameter"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), MUTATIONS)
def test_a_wrong_docstring_is_found(old: str, new: str, complaint: str) -> None:
    doc = inspect.cleandoc(sound.__doc__)
    assert complaints_about_function(sound, doc) == [] and old in doc
    assert complaint in complaints_about_function(sound, doc.replace(old, new))


def test_wrong_sources_and_exceptions_are_found() -> None:
    doc = sound.__doc__
    assert complaints_about_source(doc) == [] == complaints_about_raising(sound)
    assert complaints_about_source(doc.replace("MoEBlaze Algorithm 1, line 10.", "")) == ["names no source"]
    assert complaints_about_source(doc.replace("Algorithm 1, line 10", "")) == ["names no place in its source"]
    assert complaints_about_raising(sound, doc.replace("ValueError", "an error")) == ["names no exception"]
    assert complaints_about_raising(sound, doc.replace("ValueError", "WeltError")) == ["WeltError: no exception"]


SHAPES = dict.fromkeys(("T, d", "E, G n, d", "E, 2n, d", "P,", "", "T+1,", "T, parts E", "..., d_model", "..."), True)
SHAPES |= {"score_partials(n), R": True}
SHAPES |= dict.fromkeys(("see above", "scores, experts", "the router's choice", "T, width of x"), False)


@pytest.mark.parametrize("text", SHAPES)
def test_what_is_a_shape(text: str) -> None:
    assert bool(public_docs.is_shape(text)) == SHAPES[text]
