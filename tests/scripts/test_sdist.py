"""The sdist, by MANIFEST.in: setuptools puts the package, pyproject.toml, README and LICENSE in; the rest must be listed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_sdist_has_what_running_the_tests_takes() -> None:
    rules = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    folders, files = (
        {name for rule, *names in rules if rule == kind for name in names} for kind in ("graft", "include")
    )
    assert folders >= {"docs", "results", "scripts", "tests"}
    assert files >= {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}
    assert all((ROOT / name).exists() for name in folders | files)
