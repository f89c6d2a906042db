"""The compile cache as its users see it."""

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from blazeproto.runtime import cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chosen = tmp_path / "made when needed"
    monkeypatch.setenv("BLAZEPROTO_CACHE", str(chosen))
    return chosen


def test_what_was_written_is_read(folder: Path) -> None:
    assert cache.folder() == folder and cache.read("one.cubin") is None
    cache.write("one.cubin", b"code")
    cache.write("one.cubin", b"other code")
    assert cache.read("one.cubin") == b"other code"
    assert [path.name for path in folder.iterdir()] == ["one.cubin"]  # nothing is left beside it


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-1], lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), lambda _: b""]
)
def test_a_damaged_file_is_none(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    cache.write("kernel", b"code" * 99)
    (folder / "kernel").write_bytes(damage((folder / "kernel").read_bytes()))
    assert cache.read("kernel") is None


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
    assert zlib.decompress((tmp_path / "my cache" / "one.cubin").read_bytes()) == b"code"


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


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's owners and modes")
@pytest.mark.parametrize("what", ["folder", "file"])
@pytest.mark.parametrize("mode", [0o020, 0o002, None], ids=["group", "others", "another user"])
def test_what_somebody_else_may_write_is_not_read(
    folder: Path, what: str, mode: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning says why, and what mends it."""
    cache.write("one.cubin", b"code")
    path = folder if what == "folder" else folder / "one.cubin"
    if mode is None:
        owner, stat = path.stat().st_uid, os.stat_result
        other = stat([*path.stat()[:4], owner + 1, *path.stat()[5:]])
        if what == "folder":
            monkeypatch.setattr(Path, "stat", lambda *_, **__: other)
        else:
            monkeypatch.setattr(os, "fstat", lambda _: other)
        mend = "set BLAZEPROTO_CACHE to a folder of your own"
    else:
        path.chmod(path.stat().st_mode | mode)
        mend = f"chmod go-w {path}"
    with pytest.warns(
        RuntimeWarning, match=f"{path}: expected a folder or file .* alone may write, .*: {mend}"
    ) as given:
        assert cache.read("one.cubin") is None and cache.read("one.cubin") is None
    assert len(given) == 1
    if what == "folder":
        cache.write("two.cubin", b"code")
        assert sorted(path.name for path in folder.iterdir()) == ["one.cubin"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's owners and modes")
def test_what_is_written_is_read_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache.write("one.cubin", b"code")
    finally:
        os.umask(before)
    assert cache.read("one.cubin") == b"code"
