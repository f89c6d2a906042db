"""Sentences of pages, docstrings and error messages that are hard to read at first.

    python -m scripts.checks.style            # lists them and ends with exit code 1 if there are any
    python -m scripts.checks.style FILE ...   # only these pages and sources

A sentence begins with its subject, names what it speaks of, and says who acts. The rules find what does not:

    opening      a sentence that begins with What, Who, Where, Of, Which or There is
    pointer      "that of", "those of", "what is here", "of today's", "as X has it" in place of a noun
    count        "so many", "as many as there are"
    existence    "there is", "that there are", "is no more", "is to be had"

Code, quotations of code, tables' headers, generated parts of pages and the pages of PAST are not looked at.
"""

import ast
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.command import argument_parser

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("blazeproto", "ptxsim", "scripts")
PAST = ("docs/decisions.md", "CHANGELOG.md")  # they record what was said then
RULES = {
    "opening": r"^(What|Who|Whoever|Whose|Where|Of|Which|There (is|are|was|were))\b(?!.*\?$)",
    "pointer": r"\b(that|those) of\b|\bwhat is here\b|\bof today's\b|\bas \w+ (has|have) it\b",
    "count": r"\bso many\b|\bas many as there are\b",
    "existence": r"(?<!^)(?<![.:] )\b[Tt]here (is|are|was|were)\b|\b(is|are) no more\b|\bto be had\b",
}
GENERATED = re.compile(r"<!-- (results:\w+) -->.*?<!-- /\1 -->", re.DOTALL)
CODE = re.compile(r"^(```|~~~).*?^\1|^(?: {4}|\t).*?$|<[^>\n]+>", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`+[^`]*`+")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) )|\n(?=\|)")
MARKS = re.compile(r"^\s*(?:[-*>]|\d+\.)\s+|\*+")
ENDS = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z])")


Offence = tuple[str, int, str, str]  # the file, the line, the rule that a sentence breaks, and the sentence


def sentences(prose: str) -> Iterator[tuple[int, str]]:
    """Each sentence of a page or docstring with the number of its paragraph's first line, from 0; code is left out."""
    for pattern in (GENERATED, CODE):
        prose = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), prose)
    prose = LINK.sub(r"\1", SPAN.sub("CODE", prose))
    for part in PARAGRAPHS.split(prose):
        line = prose[: prose.index(part)].count("\n")
        row = part.strip()
        if row and not row.startswith(("#", "|--", "| --")):
            for cell in row.strip("|").split(" | ") if row.startswith("|") else [row]:
                yield from ((line, words) for words in ENDS.split(MARKS.sub("", " ".join(cell.split()))))


def offences_in(prose: str, file: str, first: int = 1) -> Iterator[Offence]:
    """The broken rules of some prose, whose first line is line `first` of the file."""
    for (line, sentence), (rule, pattern) in itertools.product(sentences(prose), RULES.items()):
        if re.search(pattern, sentence):
            yield file, first + line, rule, sentence


def words_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings of what has no leading underscore, and texts of raised errors, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not getattr(node, "name", "").startswith("_") and (doc := ast.get_docstring(node)):
                yield node.body[0].lineno, doc
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "CODE" for p in parts)


def offences(path: Path) -> Iterator[Offence]:
    """All of a page, a notebook or a Python source."""
    text, parts = path.read_text(), [(1, path.read_text())]
    if path.suffix == ".py":
        parts = [*words_of_source(text)]
    elif path.suffix == ".ipynb":
        parts = [(1, "".join(cell["source"])) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    for line, prose in parts:
        yield from offences_in(prose, path.relative_to(ROOT).as_posix(), line)


def all_files() -> list[Path]:
    """README, pages, notebooks and the packages' sources."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    pages += [ROOT / "ptxsim/README.md", ROOT / "results/README.md"]
    pages += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {*pages} - {ROOT / page for page in PAST}
    return sorted(path for path in found if not {"tests", "build"} & {*path.relative_to(ROOT).parts})


def main() -> None:
    parser = argument_parser("scripts.checks.style", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all")
    files = [path.resolve() for path in parser.parse_args().files] or all_files()
    found = [offence for path in files for offence in offences(path)]
    for file, line, rule, sentence in found:
        print(f"{file}:{line}: {rule}: {sentence[:160]}")
    counts = Counter(rule for _, _, rule, _ in found)
    print(f"{len(found)} sentences: {', '.join(f'{rule} {counts[rule]}' for rule in RULES)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
