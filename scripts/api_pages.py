"""What the site's API pages show beside docstrings. mkdocstrings loads this extension of griffe by its path (zensical.toml).

Examples that begin with ">>>" become blocks of code; a NamedTuple gets its constructor; a field gets the comment behind it.
"""

import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function, Object, Parameter, ParameterKind, Parameters

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
BEFORE_CODE = re.compile(r"::$", re.MULTILINE)  # reStructuredText's


def as_markdown(docstring: str) -> str:
    """A docstring with its examples fenced, each up to the next empty line."""
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", BEFORE_CODE.sub(":", docstring))


def comment_of(field: Attribute) -> str:
    """The comment at the end of the first or the last line of a field's definition."""
    ends = (line.partition("  # ")[2] for line in (field.lines[0], field.lines[-1]))
    return next(filter(None, ends), "")


def is_field(member: Any) -> bool:
    return isinstance(member, Attribute) and member.annotation is not None and not member.name.startswith("_")


class ApiPages(Extension):
    """The extension; griffe calls its methods for what it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Turns the object's docstring into Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Gives fields their comments, and a NamedTuple the constructor that Python makes."""
        fields = [member for member in cls.members.values() if is_field(member)]
        for field in fields:
            if field.docstring is None and (comment := comment_of(field)):
                field.docstring = Docstring(comment, parent=field)
        if "NamedTuple" in map(str, cls.bases):
            kind = ParameterKind.positional_or_keyword
            given = [Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value) for field in fields]
            init = Function("__init__", parent=cls, parameters=Parameters(Parameter("self", kind=kind), *given))
            init.returns = "None"
            cls.set_member("__init__", init)
