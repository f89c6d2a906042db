"""The compile cache as its users see it."""

from __future__ import annotations

import errno
import os
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


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLAZEPROTO_CACHE", "~/my cache")
    cache.write("one.cubin", b"code")
    assert (tmp_path / "my cache" / "one.cubin").read_bytes() == b"code"


def test_want_of_a_home_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLAZEPROTO_CACHE", "~nobody-of-this-name/cache")
    cache.write("one.cubin", b"code")
    assert cache.read("one.cubin") is None


def test_a_full_disk_keeps_no_half_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    cache.write("one.cubin", b"code")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder would be")
    cache.write("one.cubin", b"code")
    assert cache.read("one.cubin") is None
