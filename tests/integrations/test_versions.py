"""Which versions of its package an integration takes: others are refused, and a newer one is warned of and looked at."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from blazeproto.runtime import optional
from tests.integrations import titan

USED = {  # something that an integration uses: the module, and its name there
    "transformers": ("transformers.integrations.moe", "grouped_mm_experts_forward"),
    "peft": ("peft.tuners.lora.layer", "ParamWrapper"),
    "torchtitan": ("torchtitan.config.override", "derive"),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The versions that pip knows of, to be filled."""
    versions = {"transformers": "5.23.0"}
    monkeypatch.setattr(optional, "installed", lambda names: {n: versions[n] for n in names if n in versions})
    optional.need.cache_clear()
    yield versions
    optional.need.cache_clear()


def entrance(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """What looks at the version: ``register``, or torchtitan's import."""
    pytest.importorskip(name)
    if name == "torchtitan":
        module = titan.load().__name__
        optional.need.cache_clear()  # it may have looked just now
        monkeypatch.delitem(sys.modules, module)
        return lambda: importlib.import_module(module)
    return importlib.import_module(f"blazeproto.integrations.{name}").register


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *(("transformers", version) for version in ("4.57.1", "5.16.2", "6.0.0.dev0", None)),
        *(("peft", version) for version in ("0.19.1", "1.0.0.dev0", None)),
        *(("torchtitan", version) for version in ("0.2.2", "1.3.0", None)),
    ],
)
def test_other_versions_are_refused(
    name: str, version: str | None, installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, installed[name] = entrance(name, monkeypatch), version
    if version is None:
        del installed[name]
        monkeypatch.setattr(optional, "_is_importable", lambda module: module != name)
    with pytest.raises(ImportError, match=rf"expected {name}>=.*, got {version or 'none'}: pip install"):
        enter()


@pytest.mark.parametrize(("name", "version"), [("transformers", "5.25.0"), ("peft", "0.22.0"), ("torchtitan", "0.4.0")])
def test_a_newer_version_is_warned_of_and_refused_by_what_it_lacks(
    name: str, version: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, installed[name] = entrance(name, monkeypatch), version
    module, used = USED[name]
    monkeypatch.delattr(sys.modules[module], used)
    with (
        pytest.warns(UserWarning, match=f"{name} {version} is newer than"),
        pytest.raises(ImportError, match=f"^{name} {version}: expected .*{used}"),
    ):
        enter()


def test_a_newer_version_with_all_of_it_is_taken(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning, of the caller's line."""
    register, installed["transformers"] = entrance("transformers", monkeypatch), "5.25.0"
    with pytest.warns(UserWarning, match="is newer than") as told:
        register()
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, blazeproto\nassert not {'torch', 'numpy', 'cupy', 'numba', 'transformers'} & set(sys.modules)\n"
        "import blazeproto.integrations.transformers, blazeproto.integrations.peft\n"
        "assert not {'peft', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
