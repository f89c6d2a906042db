"""The Python of README and pages runs, with tiny models, and type-checks; commands have the options that pages give them."""

import ast
import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import pages
from tests.python import python

TYPES = ("--allow-untyped-defs", "--ignore-missing-imports")  # a page may leave out annotations, and import axolotl


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to write into, and no stand-in left behind."""
    monkeypatch.chdir(tmp_path)
    for name in pages.AXOLOTL:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def run(page: str, *, hopper: bool) -> None:
    program = pages.program(page, hopper=hopper)
    for package in re.findall(r"^from (transformers|peft)\b", program, re.MULTILINE):
        pytest.importorskip(package)
    exec(compile(program, page, "exec"), {})


def test_there_are_pages_with_python() -> None:
    assert {"transformers.md", "peft.md", "kernels.md", "glossary.md"} <= {*pages.pages()}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", pages.pages())
def test_the_python_of_a_page_runs(page: str) -> None:
    run(page, hopper=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", pages.pages())
def test_the_python_of_a_page_runs_on_a_gpu(page: str) -> None:
    run(page, hopper=True)


@pytest.mark.full
def test_the_python_of_readme_and_pages_type_checks(tmp_path: Path) -> None:
    sources = [
        pages.ROOT / "README.md",
        pages.ROOT / "ptxsim/README.md",
        *(pages.DOCS / page for page in pages.pages()),
    ]
    for source in sources:
        name = "_".join(source.relative_to(pages.ROOT).with_suffix("").parts)
        (tmp_path / f"{name}.py").write_text("\n".join(pages.BLOCK.findall(source.read_text())))
    options = ("--config-file", str(pages.ROOT / "pyproject.toml"), *TYPES)
    python("-m", "mypy", *options, str(tmp_path), cwd=pages.ROOT, timeout=600)


# --- Examples in docstrings, which the API pages show ------------------------------------------------------------------------

SOURCES = sorted((pages.ROOT / "blazeproto").rglob("*.py"))
EXAMPLES = [path.relative_to(pages.ROOT).as_posix() for path in SOURCES if ">>> " in path.read_text()]
NEEDS_A_GPU = re.compile(r"\.(check|time|score|timeline)\(|\bcounters\(|\brecord\(|\bpicture\b")
GIVEN = """
from functools import partial
import rich, torch
from blazeproto import MoE, dispatch as dispatching, gemm
from blazeproto.gemm.compile import Kernel
from blazeproto.lab import Workbench
from blazeproto.runtime.arrays import BFloat16Array

device = "cuda" if torch.cuda.is_available() else "cpu"
num_experts, topk_experts = 16, torch.randint(16, (64, 1), device=device, dtype=torch.int32)
x = torch.randn(64, 512, device=device, dtype=torch.bfloat16)
up_proj = torch.randn(16, 512, 512, device=device, dtype=torch.bfloat16)
dispatch = dispatching.build_dispatch(topk_experts, num_experts)
bench = Workbench("up_forward", T=64, d=64, n=64, E=4, K=2)
MoE = partial(MoE, device=device)
layer = MoE(d_model=512, d_expert=64, num_experts=4, top_k=2, dtype=torch.bfloat16)
array = BFloat16Array(torch.zeros(4, dtype=torch.uint16).numpy())


def criterion(out):
    return out.float().square().mean()
"""


def run_examples(path: str, *, hopper: bool) -> int:
    """Runs those of a file's docstrings, and says how many statements they were."""
    names: dict[str, Any] = {}
    ran = 0
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse((pages.ROOT / path).read_text())):
        for example in doctest.DocTestParser().get_examples(
            (isinstance(node, nodes) and ast.get_docstring(node)) or ""
        ):
            if not names:
                exec(GIVEN, names)
            if hopper or not NEEDS_A_GPU.search(example.source):
                exec(compile(example.source, path, "single"), names)
                ran += 1
    return ran


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("path", EXAMPLES)
def test_the_examples_of_a_file_run(path: str) -> None:
    assert run_examples(path, hopper=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("path", EXAMPLES)
def test_the_examples_of_a_file_run_on_a_gpu(path: str) -> None:
    if "counters" in path:
        pytest.skip("needs ncu")
    assert run_examples(path, hopper=True)


# --- Commands ----------------------------------------------------------------------------------------------------------------

TEXT = "\n".join(
    (pages.ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "results/README.md")
) + "\n".join(page.read_text() for page in sorted(pages.DOCS.glob("*.md")))
COMMANDS = re.findall(r"python -m ((?:scripts|blazeproto)[\w.]*)([^`\n#]*)", TEXT)
OPTIONS = {
    module: {option for name, rest in COMMANDS if name == module for option in re.findall(r"(?<= )--[a-z][\w-]*", rest)}
    for module, _ in COMMANDS
}


def test_there_are_commands() -> None:
    assert {"scripts.checks.fuzz", "scripts.bench.plot_results", "blazeproto"} <= OPTIONS.keys()
    assert "--debug" in OPTIONS["scripts.checks.fuzz"]


@pytest.mark.parametrize("module", OPTIONS)
def test_the_commands_are_programs(module: str) -> None:
    assert importlib.util.find_spec(module.rstrip("."))


@pytest.mark.full
@pytest.mark.parametrize("module", [module for module in OPTIONS if OPTIONS[module]])
def test_the_commands_have_their_options(module: str) -> None:
    listed = python("-m", module, "--help", cwd=pages.ROOT, timeout=120)
    assert not [option for option in OPTIONS[module] if not re.search(rf"{option}\b", listed)]
