"""The compile cache as its users see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from blazeproto.runtime import cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chosen = tmp_path / "made when needed"
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(chosen))
    return chosen


def test_what_was_written_is_read(folder: Path) -> None:
    assert cache.folder() == folder
    assert cache.read("one.cubin") is None
    cache.write("one.cubin", b"code")
    cache.write("one.cubin", b"other code")
    assert cache.read("one.cubin") == b"other code"
    assert [path.name for path in folder.iterdir()] == ["one.cubin"]  # nothing is left beside it


def test_the_default_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLAZEPROTO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/blazeproto")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "blazeproto"


def test_a_folder_that_cannot_be_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder would be")
    cache.write("one.cubin", b"code")
    assert cache.read("one.cubin") is None
