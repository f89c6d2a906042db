"""Reads docstrings as a user does, and says where one and its signature disagree. `test_public.py` asks it of every public name.

What a docstring must have:

    parameters    each is named; what is written like one, "name: ..." at the start of a line or after two spaces, exists
    arrays        parameters that are annotated Any or Tensor: "x (T, d) bf16" or "x: (T, d) bf16": a shape, and before the
                  sentence ends a dtype
    raises        an exception's name, unless there is nothing to refuse
    source        where asked for: a paper or peer, and the section, algorithm, equation or table of it
    fields        of a record: named in the docstring, or followed by a comment
    methods       of a class: each public one that it defines itself has a docstring
"""

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from tests.integrations import titan

ROOMS = (
    "blazeproto",
    *(
        f"blazeproto.{room}"
        for room in ("gemm", "dispatch", "router", "stored", "autograd", "blocksparse", "distributed", "lab")
    ),
    *(f"blazeproto.integrations.{program}" for program in ("transformers", "peft")),
    *(() if titan.missing() else ("blazeproto.integrations.torchtitan",)),
)
SYMBOLS = "T d n E K R P G M N B k m out in rows group parts reduction columns d_model d_expert num_experts any"
DTYPES = (
    r"\b(bf16|fp(16|32|64)|bfloat16|float(16|32|64)|int(32|64)|integers?|floating[ -]point|dtype|uint8|bool|bytes)\b"
)
HEADINGS = {"Args", "Returns", "Raises", "Parameters", "Fields", "Floor", "Source"}
SOURCES = (
    r"MoEBlaze|SonicMoE|MegaBlocks|DeepSeek-V3|DeepSeekMoE|Switch Transformer|ST-MoE|GShard|Shazeer et al\.|Mixtral"
    r"|Zhou et al\.|Roller et al\.|Expert Choice|Hash Layers"
)
PLACE = r"§ ?\d|Algorithm \d|eqs?\. ?\d|equation \d|appendix [A-Z]|[Ss]ection \d|[Tt]able \d"


# --- What is public ----------------------------------------------------------------------------------------------------------


def public_names() -> Iterator[tuple[str, Any]]:
    """Every name of the rooms' ``__all__``, once, with what it stands for; of ptxsim's, functions."""
    seen: set[int] = set()
    for room in (*ROOMS, "ptxsim"):
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if room == "ptxsim" and not inspect.isfunction(thing):
                continue
            if id(thing) not in seen:
                seen.add(id(thing))
                yield f"{room}.{name}", thing


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of ours, or a base of ours, defines."""
    for base in cls.__mro__:
        if base.__module__.startswith("blazeproto"):
            for name, member in vars(base).items():
                function = _function_of(member)
                if not name.startswith("_") and function is not None:
                    yield name, function


def _function_of(member: Any) -> Callable | None:
    member = getattr(member, "__func__", member)  # of a classmethod or staticmethod
    member = getattr(member, "fget", None) or getattr(member, "func", None) or member  # of a property, a cached one
    return member if inspect.isfunction(member) and member.__module__.startswith("blazeproto") else None


# --- What a docstring says ---------------------------------------------------------------------------------------------------


def shapes_of(doc: str, name: str) -> list[str]:
    """The shapes that ``doc`` gives an array: "T, d" for ``name (T, d)``; further ones after "or", "and" or a comma."""
    found = []
    for match in re.finditer(rf"(?<![\w.]){re.escape(name)}`*(?:(?:, \w+)*:)? *(?=\()", doc):
        rest = doc[match.end() :]
        while rest.startswith("(") and (shape := _parenthesised(rest)) is not None and is_shape(shape):
            found.append(" ".join(shape.split()))
            rest = rest[len(shape) + 2 :]
            rest = rest[len(step[0]) :] if (step := re.match(r",? (?:or|and) (?=\()", rest)) else ""
    return found


def _parenthesised(text: str) -> str | None:
    """What stands in the parenthesis that ``text`` begins with."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[1:index]
    return None


def is_shape(text: str) -> bool:
    """Whether it is a list of lengths: expressions of the symbols, numbers, and calls of functions that compute lengths."""
    text = re.sub(r"`*\b[a-z]\w*`*\([^()]*\)", "1", text)
    tokens = re.findall(r"[A-Za-z_]+|\d+|\.\.\.|[^\sA-Za-z_\d]", text)
    known = {*SYMBOLS.split(), *"T·+*,/-", "...", "…"}
    # 2n, TK: products written without a sign
    return all(t in known or t.isdigit() or set(t) <= set("TKEGPRdnm") for t in tokens) and (
        "," in text or text in ("", "...")
    )


def sentence_after(doc: str, name: str) -> str:
    """From the array's shape on, to the end of the sentence."""
    for match in re.finditer(rf"(?<![\w.]){re.escape(name)}`*(?:(?:, \w+)*:)? *(?=\()", doc):
        rest = doc[match.end() :]
        if (shape := _parenthesised(rest)) is not None and is_shape(shape):
            return re.split(r"\.(?:\s|$)|\n\n", rest)[0]
    return ""


def written_like_parameters(doc: str) -> set[str]:
    """The names of entries "name: ..." or "name, other: ..." at the start of a line or after two spaces."""
    entries = re.findall(
        r"(?:^[ \t]*|\S  )`{0,2}([a-z_]\w*(?:, [a-z_]\w*)*)`{0,2}(?: \([^()\n]*\))?: ", doc, re.MULTILINE
    )
    return {name for entry in entries for name in entry.split(", ")}


def named(doc: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", doc) is not None


# --- Complaints --------------------------------------------------------------------------------------------------------------


def is_array(parameter: inspect.Parameter) -> bool:
    """By its annotation: Any, Tensor, or either or None."""
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = {
        word.rpartition(".")[2]
        for word in re.split(r"\s*\|\s*", str(text) if "|" not in str(annotation) else str(annotation))
    }
    return kinds - {"None", "NoneType"} <= {"Any", "Tensor"} and parameter.kind is not parameter.VAR_KEYWORD


def complaints_about_function(
    function: Callable, doc: str | None = None, *, others: set[str] = frozenset()
) -> list[str]:
    """doc: instead of its own docstring.  others: names that may stand like parameters: results, fields."""
    doc = inspect.cleandoc(function.__doc__ or "") if doc is None else doc
    if not doc.strip():
        return ["no docstring"]
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    }
    found = [f"{name}: not in the docstring" for name in parameters if not named(doc, name)]
    results = set(re.findall(r"[a-z_]\w*", " ".join(re.findall(r"→([^\n]*(?:\n[^\n]+)*)", doc)))) | others
    unknown = written_like_parameters(doc) - parameters.keys() - results - HEADINGS - exceptions_in(doc)
    found += [f"{name}: in the docstring, but no parameter" for name in sorted(unknown)]
    for name, parameter in parameters.items():
        if is_array(parameter) and named(doc, name):
            if not shapes_of(doc, name):
                found.append(f"{name}: no shape")
            elif not re.search(DTYPES, sentence_after(doc, name)):
                found.append(f"{name}: no dtype")
    return found


def complaints_about_class(cls: type) -> list[str]:
    """Docstrings of the class, its constructor, its fields and its own methods."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    if not doc or doc.startswith(f"{cls.__name__}("):  # what dataclasses and NamedTuples make themselves
        return ["no docstring"]
    fields = {name for name in getattr(cls, "__annotations__", ()) if not name.startswith("_")}
    found = []
    if is_record(cls):
        comments = commented_fields(cls)
        found += [
            f"{name}: neither in the docstring nor commented"
            for name in sorted(fields - comments)
            if not named(doc, name)
        ]
    elif "__init__" in vars(cls) and not getattr(cls, "_is_protocol", False):  # which gets one from typing
        both = f"{doc}\n\n{inspect.cleandoc(cls.__init__.__doc__ or '')}"
        of_methods = {name for name, _ in own_methods(cls)}
        found += complaints_about_function(cls.__init__, both, others=fields | of_methods)
    for name, method in own_methods(cls):
        found += [f".{name}: {complaint}" for complaint in complaints_about_function(method)]
    return found


def is_record(cls: type) -> bool:
    """A dataclass or a NamedTuple: its constructor takes its fields."""
    return hasattr(cls, "__dataclass_fields__") or hasattr(cls, "_fields")


def commented_fields(cls: type) -> set[str]:
    """Fields whose line, or the lines of whose default, end with a comment."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    body = next(node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if "  # " in lines[node.lineno - 1] or "  # " in lines[(node.end_lineno or node.lineno) - 1]
    }


def exceptions_in(doc: str) -> set[str]:
    return set(re.findall(r"\b[A-Z]\w*(?:Error|Exception)\b", doc))


OUR_EXCEPTIONS = ("CompileError", "MachineError", "PtxError")


def complaints_about_raising(function: Callable, doc: str | None = None) -> list[str]:
    """That no exception is named, or one that there is not."""
    doc = function.__doc__ or "" if doc is None else doc
    names = exceptions_in(doc)
    known = {name for name in names if hasattr(builtins, name) or name in OUR_EXCEPTIONS}
    return ["names no exception"] if not names else [f"{name}: no exception" for name in sorted(names - known)]


def complaints_about_source(doc: str | None) -> list[str]:
    """That no paper or peer is named, or not where in it."""
    text = " ".join((doc or "").split())
    if not re.search(SOURCES, text):
        return ["names no source"]
    return [] if re.search(rf"(?:{SOURCES})[^;]{{0,60}}?(?:{PLACE})", text) else ["names no place in its source"]
