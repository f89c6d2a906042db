"""Adds to the site's API pages what the sources' text lacks: an extension of griffe, which mkdocstrings loads (zensical.toml).

Examples that begin with ">>>" become blocks of code; a NamedTuple gets its constructor; a field gets the comment behind it; and
a docstring or signature that the program makes, as for the options of `MoE`, stands in place of the one in the source.
"""

import inspect
import re
from contextlib import suppress
from enum import Enum
from typing import Any

from griffe import (
    Attribute,
    Class,
    Docstring,
    Extension,
    Function,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
    dynamic_import,
)

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
BEFORE_CODE = re.compile(r"^(\S.*?[ :].*?)::?\n\n?(?=    \S)", re.MULTILINE)  # a sentence; a section's title is a word


def as_markdown(docstring: str) -> str:
    """A docstring with its examples fenced, each up to the next empty line, and other code apart from the sentence before it."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", BEFORE_CODE.sub(r"\1:\n\n", docstring))


def comment_of(field: Attribute) -> str:
    """The comment at the end of the first or the last line of a field's definition."""
    ends = (line.partition("  # ")[2] for line in (field.lines[0], field.lines[-1]))
    return next(filter(None, ends), "")


def is_field(member: Any) -> bool:
    plain = isinstance(member, Attribute) and "property" not in member.labels and not member.name.startswith("_")
    return plain and member.annotation is not None


def as_parameter(given: inspect.Parameter) -> Parameter:
    """A parameter in griffe's form."""
    annotation = given.annotation if isinstance(given.annotation, str) else inspect.formatannotation(given.annotation)
    default = str(given.default.value) if isinstance(given.default, Enum) else given.default
    value = None if given.default is given.empty else repr(default)
    return Parameter(given.name, annotation=annotation, kind=ParameterKind(given.kind.description), default=value)


class ApiPages(Extension):
    """The extension; griffe calls its methods for what it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Takes what the program makes of the object, and turns its docstring into Markdown."""
        made: Any = None
        if isinstance(obj, Class | Function):
            with suppress(ImportError):  # of what is not installed here, such as torchtitan
                made = dynamic_import(obj.path)
        if isinstance(obj, Function) and (signature := getattr(made, "__signature__", None)):
            written = {parameter.name: parameter for parameter in obj.parameters}
            given = signature.parameters.items()
            obj.parameters = Parameters(*(written.get(name) or as_parameter(parameter) for name, parameter in given))
        if obj.docstring is not None:
            obj.docstring.value = as_markdown((made and inspect.getdoc(made)) or obj.docstring.value)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Gives fields their comments, and a NamedTuple the constructor that Python makes."""
        fields = [member for member in cls.members.values() if is_field(member)]
        for field in fields:
            if field.docstring is None and (comment := comment_of(field)):
                field.docstring = Docstring(comment, parent=field)
        if "NamedTuple" in map(str, cls.bases):
            kind = ParameterKind.positional_or_keyword
            given = [
                Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value) for field in fields
            ]
            init = Function("__init__", parent=cls, parameters=Parameters(Parameter("self", kind=kind), *given))
            init.returns = "None"
            cls.set_member("__init__", init)
