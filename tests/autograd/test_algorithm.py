"""The node is MoEBlaze's Algorithm 1: each line of its forward and backward names the line of the paper that it implements, or
frees what has been read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from blazeproto.autograd import node

SOURCE = Path(node.__file__).read_text()
LINES, TREE = SOURCE.splitlines(), ast.parse(SOURCE)
FUNCTIONS = {each.name: each for each in TREE.body if isinstance(each, ast.FunctionDef)}
PROCEDURES = {"forward": range(2, 15), "backward": range(15, 32)}  # in the paper
OF_FORWARD_AGAIN = range(4, 10)  # where A and B were not saved
KERNELS = {"forward": {4, 5, 6, 7, 8, 9, 10, 11}, "backward": {18, 20, 22, 24, 26, 28, 29, 30}}
MOST_OF_NEITHER = 5
NUMBERS = re.compile(r"  # ([\d, -]+):")


def code_of(name: str) -> Iterator[tuple[int, str]]:
    """The lines of a function's body, but for its docstring."""
    function = FUNCTIONS[name]
    for number in range(function.body[1].lineno, (function.end_lineno or 0) + 1):
        yield number, LINES[number - 1]


def numbers_in(line: str) -> set[int]:
    """Those of the paper's lines that a comment names."""
    found = NUMBERS.search(line)
    ends = [part.split("-") for part in found[1].split(",")] if found else []
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


def neither(name: str) -> list[str]:
    return [line for _, line in code_of(name) if not numbers_in(line) and not line.strip().startswith("del ")]


def test_each_line_is_one_of_the_paper_or_frees() -> None:
    lines = [line for name in PROCEDURES for line in neither(name)]
    assert len(lines) <= MOST_OF_NEITHER, lines
    assert all(line.strip().split()[0] in ("for", "if") for line in lines), lines


@pytest.mark.parametrize("name", PROCEDURES)
def test_the_numbers_are_of_the_procedure_and_none_is_left_out(name: str) -> None:
    named = set().union(*(numbers_in(line) for _, line in code_of(name)))
    again = OF_FORWARD_AGAIN if name == "backward" else ()
    assert named <= {*PROCEDURES[name], *again}
    assert named >= KERNELS[name], KERNELS[name] - named


@pytest.mark.parametrize("name", PROCEDURES)
def test_a_tensor_is_freed_below_the_line_that_reads_it_last(name: str) -> None:
    code = dict(code_of(name))
    freed = {number: re.findall(r"\w+", line)[1:] for number, line in code.items() if line.strip().startswith("del ")}
    assert freed
    for number, names in freed.items():
        for tensor in names:
            used = [at for at, line in code.items() if re.search(rf"\b{tensor}\b", line.partition("#")[0])]
            assert used[used.index(number) - 1] == number - 1, (tensor, number)


def test_forward_and_backward_fit_on_a_screen() -> None:
    assert len(LINES) <= 250
    for each in ast.walk(TREE):
        if isinstance(each, ast.FunctionDef):
            assert (each.end_lineno or 0) - each.lineno < 45, each.name
    slices = [each for each in ast.walk(TREE) if isinstance(each, ast.Slice)]
    assert not slices, [LINES[each.lineno - 1] for each in slices]
