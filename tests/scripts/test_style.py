"""The rules of style: each finds what it is for, in pages, docstrings and errors, and leaves code and questions alone."""

import pytest

from scripts.checks.style import offences_in, words_of_source


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("What a load adds is counted.", "opening"),
        ("It is so. Where K is 8 memory limits it.", "opening"),
        ("There is one kernel.", "opening"),
        ("The bits are those of eager.", "pointer"),
        ("It takes so many rows.", "count"),
        ("None, since there is no GPU.", "existence"),
        ("| a | b |\n| --- | --- |\n| kernels that are no more | 3 |", "existence"),
    ],
)
def test_a_rule_finds_its_sentence(sentence: str, rule: str) -> None:
    assert [found for _, _, found, _ in offences_in(f"Plain.\n\n{sentence}", "page")] == [rule]


@pytest.mark.parametrize(
    "prose",
    [
        "What runs where?",
        "The kernel reads each row once.",
        "```python\n# What is this\n```",
        "    what = so_many(rows)",
        "<!-- results:one -->\n\nThere is a table.\n\n<!-- /results:one -->",
        "## Of headings",
    ],
)
def test_plain_sentences_and_code_pass(prose: str) -> None:
    assert not [*offences_in(prose, "page")]


def test_a_source_is_its_public_docstrings_and_errors() -> None:
    source = '''
def f(x):
    """What it is."""
    raise ValueError(f"x: expected one, got {x}")

def _g():
    """What it is."""
'''
    assert [*words_of_source(source)] == [(3, "What it is."), (4, "x: expected one, got CODE")]
