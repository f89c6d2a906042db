"""transformers' own tests of experts implementations, run on ours. From a folder of its sources, which lies elsewhere.

    python -m scripts.checks.transformers_suite FOLDER                                          # prints
    python -m scripts.checks.transformers_suite FOLDER --log results/cpu/transformers-tests.log # and keeps the lines

FOLDER is a checkout, or the unpacked source distribution of a release. The tests run with the transformers in its ``src``, as far
as it has them:

    sentinels   tests/kernels/test_moe_experts_forward.py
    models      test_eager_matches_batched_and_grouped_inference of tests/models, of each family with the decorator
    function    the function behind those tests, of tests/test_modeling_common.py, on the tiny models of our tests:
                a source distribution has no tests/models

Our implementation takes the place of ``batched_mm`` in each, beside ``eager`` and ``grouped_mm``. A line a test: its outcome, and
how many times our experts and `moe_mlp` were called in it; "theirs" where a test fails before it comes to our experts. The exit
code is 1 if one failed, or `moe_mlp` was called in none.
Needs what the tests import: pytest, parameterized, datasets, httpx.
"""

import argparse
import importlib
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

from scripts.bench.common import REPOSITORY
from scripts.command import argument_parser, refuse

TAKEN = "batched_mm"  # ours falls back to grouped_mm, whose place it can't take
SENTINELS = Path("tests/kernels/test_moe_experts_forward.py")
INIT = Path("src/transformers/__init__.py")
COMMON = Path("tests/test_modeling_common.py")
EAGER_MATCHES = "test_eager_matches_batched_and_grouped_inference"
STAND_IN_GATE = "test_utils._build_experts.<locals>.apply_gate"  # SwiGLU, of the sentinel tests' stand-in for a module
MARK = "| "  # begins a line that is kept
MIXINS = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
DTYPES = ("fp32", "fp16", "bf16")

experts, moe_mlp = Mock(), Mock()  # ours, whose calls are counted since the test began

# --- As a plugin of pytest -----------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Ours in the place of `TAKEN`, before a test imports it by name."""
    from transformers.integrations import moe

    from blazeproto.integrations import gates
    from blazeproto.integrations import transformers as ours

    experts.side_effect, moe_mlp.side_effect, ours.moe_mlp = ours.experts_forward, ours.moe_mlp, moe_mlp
    gates.GATES[STAND_IN_GATE] = gates.GATES[gates.DEFAULT_GATE]
    setattr(moe, f"{TAKEN}_experts_forward", experts)
    moe.ALL_EXPERTS_FUNCTIONS.register(TAKEN, experts)


def pytest_runtest_setup() -> None:
    experts.reset_mock()
    moe_mlp.reset_mock()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if report.skipped else crash.message if crash else report.longreprtext
        print(f"\n{line(report.nodeid, report.outcome, reason)}")


def line(test: str, outcome: str, reason: str = "") -> str:
    outcome = "theirs" if outcome == "failed" and not experts.called else outcome
    ran = f"experts {experts.call_count}, moe_mlp {moe_mlp.call_count}"
    return f"{MARK}{outcome:8s} {test}  {ran}  {' '.join(reason.split())[:200]}".rstrip()


# --- The function on tiny models -----------------------------------------------------------------------------------------


def test_of(config: Any) -> unittest.TestCase:
    """A test with the attributes that the function asks of a model's test class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from tests.integrations.families import tokens

    case, classes = unittest.TestCase(), (MODEL_FOR_CAUSAL_LM_MAPPING[type(config)],)
    tester = SimpleNamespace(prepare_config_and_inputs_for_common=lambda: (config, {"input_ids": tokens()}))
    vars(case).update(all_model_classes=classes, model_tester=tester, _prepare_for_class=lambda inputs, _: inputs)
    return case


def module_of_common(folder: Path) -> Any:
    """Their tests/test_modeling_common.py, under another name than our tests have. Its imports for other tests that a
    source distribution lacks are empty classes."""
    sys.modules["theirs"] = package = ModuleType("theirs")
    package.__path__ = [str(folder / "tests")]
    for name, kind in MIXINS.items():
        if not (folder / "tests" / f"{name.replace('.', '/')}.py").exists():
            sys.modules[f"theirs.{name}"] = stub = ModuleType(f"theirs.{name}")
            setattr(stub, kind, type(kind, (), {}))
    return importlib.import_module("theirs.test_modeling_common")


def run_function(folder: Path) -> Iterator[str]:
    """The lines of the part "function"."""
    from transformers.utils import logging

    from tests.integrations import families

    logging.set_verbosity_error()
    function = getattr(module_of_common(folder), f"_{EAGER_MATCHES}")
    for family, dtype in itertools.product(families.causal_families(), DTYPES):
        config, outcome, reason = families.configuration(family), "passed", ""
        pytest_runtest_setup()
        try:
            function(test_of(config), dtype, dtype)
        except unittest.SkipTest as skipped:
            outcome, reason = "skipped", str(skipped)
        except Exception as error:  # noqa: BLE001  any failure is a line, and the others go on
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        yield line(f"{family}, {dtype}", outcome, reason)


# --- The command ---------------------------------------------------------------------------------------------------------


def tests_of_models(folder: Path) -> list[str]:
    """Files of tests/models, of families whose modeling file has the decorator."""
    paths = sorted((folder / "src/transformers/models").glob("*/modeling_*.py"))
    names = dict.fromkeys(path.parent.name for path in paths if "@use_experts_implementation" in path.read_text())
    found = [path for name in names for path in sorted((folder / "tests/models" / name).glob("test_modeling_*.py"))]
    return [str(path.relative_to(folder)) for path in found]


def parts(folder: Path) -> dict[str, list[str]]:
    """The command of each part that the folder has."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-s", "-W", "ignore", "-p", "no:cacheprovider"]
    pytest += ["-p", "scripts.checks.transformers_suite", "-o", "log_cli=false", "-o", "addopts="]
    models = tests_of_models(folder)
    function = [sys.executable, "-m", "scripts.checks.transformers_suite", str(folder), "--function"]
    found = {
        "sentinels": [*pytest, str(SENTINELS)] if (folder / SENTINELS).exists() else [],
        "models": [*pytest, "--continue-on-collection-errors", *models, "-k", EAGER_MATCHES] if models else [],
        "function": function if (folder / COMMON).exists() and not models else [],
    }
    return {name: command for name, command in found.items() if command}


def run(folder: Path, command: list[str]) -> tuple[list[str], str]:
    """The lines that a part marked, and what it printed."""
    home = REPOSITORY if "--function" in command else folder
    paths = [str(folder / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    printed = ran.stdout + ran.stderr
    return [text.removeprefix(MARK) for text in printed.splitlines() if text.startswith(MARK)], printed


def summary(lines: list[str]) -> str:
    """How many passed, and by which path."""
    outcomes = Counter(text.split(maxsplit=1)[0] for text in lines)
    used = sum("moe_mlp 0" not in text and text.startswith("passed") for text in lines)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return f"{counted or 'no test'}; passed by moe_mlp {used}, by grouped_mm {outcomes['passed'] - used}"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("scripts.checks.transformers_suite", __doc__)
    parser.add_argument("folder", type=Path, help="a checkout of transformers, or an unpacked source distribution")
    parser.add_argument("--log", type=Path, default=None, help="write the lines here, after what other versions left")
    parser.add_argument("--function", action="store_true", help="the part of that name, in this process")
    options = parser.parse_args(words)
    options.folder = options.folder.resolve()
    if not (options.folder / INIT).exists():
        refuse(f"folder: expected one with src/transformers, got {options.folder}")
    return options


def kept(log: Path, title: str) -> str:
    """The lines of a log that are of other versions."""
    sections = re.split(r"^(?=# )", log.read_text(), flags=re.MULTILINE) if log.exists() else []
    return "".join(section for section in sections if not section.startswith(f"# {title}:"))


def main() -> None:
    options = arguments()
    if options.function:
        pytest_configure()
        print(*run_function(options.folder), sep="\n")
        return
    version = re.search(r'^__version__ = "(.+)"', (options.folder / INIT).read_text(), re.MULTILINE)
    title, failed = f"transformers {version and version[1]}", False
    record = [f"# {title}: its own tests, {TAKEN} being ours; torch {importlib.metadata.version('torch')}"]
    for name, command in parts(options.folder).items():
        lines, printed = run(options.folder, command)
        record += ["", f"## {name}: {summary(lines)}", "", *lines]
        bad = not lines or any(text.startswith("failed") for text in lines)
        failed |= bad or not any("moe_mlp 0" not in text for text in lines)
        print("\n".join([f"{name}: {summary(lines)}", *([printed[-4000:]] if bad else [])]), flush=True)
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(kept(options.log, title) + "\n".join(record) + "\n\n")
    sys.exit(failed or len(record) == 1)


if __name__ == "__main__":
    main()
