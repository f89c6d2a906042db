"""A test that leaves changed what others read is found: conftest.py, on tests that do. And locks."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.locks import alone

ROOT = Path(__file__).resolve().parents[1]
LEAVES = """
import os

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_a_new_variable():
    os.environ["SOME_VARIABLE"] = "1"

def test_a_changed_variable():
    os.environ["HOME"] = "/elsewhere"

def test_a_variable_that_is_gone():
    del os.environ["HOME"]

def test_what_a_library_sets():
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/elsewhere"

def test_what_monkeypatch_puts_back(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.chdir(tmp_path)

def test_all_is_as_it_was():
    assert os.environ["HOME"] == "/home" and "SOME_VARIABLE" not in os.environ
    assert os.getcwd() == FOLDER
"""


def test_what_is_left_changed_is_told_and_put_back(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{LEAVES}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/home"}
    done = subprocess.run(
        [*command, "test_leaves.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "7 passed, 4 errors" in done.stdout, done.stdout + done.stderr
    for line in (
        "the current folder: ",
        "{'SOME_VARIABLE': '1'} after",
        "{'HOME': '/elsewhere'} after",
        "os.environ: {'HOME'",
    ):
        assert line in done.stdout, line


def test_of_two_one_is_alone() -> None:
    entered = threading.Event()

    def second() -> None:
        with alone("test"):
            entered.set()

    other = threading.Thread(target=second)
    with alone("test"):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    other.join()
