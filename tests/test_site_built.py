"""The site as it is built: what its HTML says of classes and examples, and how a browser lays it out."""

import html
import importlib
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import public_docs
from tests.python import python
from tests.test_site import MODULES, ROOT

pytest.importorskip("zensical")
pytest.importorskip("mkdocstrings")
pytestmark = [pytest.mark.costly_fixture, pytest.mark.full]  # CI builds the site after its tests

COPIED = (
    "blazeproto",
    "ptxsim",
    "docs",
    "results",
    "scripts",
    "tests",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "zensical.toml",
)
WITHOUT_MEMBERS = {"blazeproto", "blazeproto.lab"}  # whose names are shown where they are defined
OF_HERE = [module for module in MODULES if module not in WITHOUT_MEMBERS and not module.endswith(".torchtitan")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built of a copy of the repository."""
    folder = tmp_path_factory.mktemp("site")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    python("-m", "scripts.site", variables={"PYTHONPATH": str(folder)}, cwd=folder, timeout=300)
    return folder / "site"


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def ours(cls: type) -> bool:
    return cls.__module__.startswith("blazeproto")


def of_class(page: str, path: str) -> str:
    """From a class's heading to the end of its signature, or to the next heading where it has none."""
    after = page[page.index(f'id="{path}"') :]
    return text_of(re.split(r"</pre>|<h[2-6]", after, maxsplit=1)[0])


def classes(module: str) -> Iterator[tuple[str, type]]:
    """The public ones of a module's page, by name: those that a package takes up, those that another module defines."""
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    for name in listed or vars(loaded):
        thing = getattr(loaded, name)
        if (
            inspect.isclass(thing)
            and ours(thing)
            and not name.startswith("_")
            and (listed or thing.__module__ == module)
        ):
            yield name, thing


def takes(cls: type) -> list[str]:
    """The parameters of a constructor that a class of ours has."""
    if not (public_docs.is_record(cls) or any("__init__" in vars(base) for base in cls.__mro__ if ours(base))):
        return []
    return [name for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]


def test_examples_are_code(built: Path) -> None:
    for page in (built / "api").glob("*.html"):
        prose = re.sub(r"<pre>.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        assert "&gt;&gt;&gt;" not in prose and "<blockquote" not in prose, page.name
    layer = (built / "api/blazeproto.html").read_text()
    assert any(
        "gate_up_proj (E, 2n, d), gate rows" in text_of(code)
        for code in re.findall(r"<pre>.*?</pre>", layer, re.DOTALL)
    )
    workbench = text_of((built / "api/lab.html").read_text())
    assert '>>> bench.edit("my_kernels")' in workbench and "...     loss.backward()" in workbench


@pytest.mark.parametrize("module", OF_HERE)
def test_classes_have_their_constructors_and_fields(built: Path, module: str) -> None:
    room = next(
        page.stem for page in (ROOT / "docs" / "api").glob("*.md") if f"::: {module}\n" in page.read_text() + "\n"
    )
    page = (built / f"api/{room}.html").read_text()
    for name, cls in classes(module):
        shown, given = of_class(page, f"{module}.{name}"), takes(cls)
        assert not given or f"{name}(" in shown, cls
        assert not [parameter for parameter in given if not re.search(rf"\b{parameter}\b", shown)], cls
        if public_docs.is_record(cls):
            assert re.findall(r"[(,]\s*\**(\w+)(?=:)", shown) == given, cls
            fields = public_docs.commented_fields(cls)
            assert not [field for field in fields if f'id="{module}.{name}.{field}"' not in page], cls


@pytest.mark.parametrize("name", ["MoE", "MoEStats", "Router", "Workbench", "Kernel"])
def test_classes_that_people_make(built: Path, name: str) -> None:
    """So that the test above has something to look at."""
    module = {"MoE": "layer", "MoEStats": "router", "Router": "router", "Workbench": "lab.workbench", "Kernel": "gemm"}[
        name
    ]
    pages = "".join(page.read_text() for page in (built / "api").glob("*.html"))
    found = re.search(rf'id="blazeproto\.{module}[\w.]*\.{name}"', pages)
    assert found and f"{name}(" in of_class(pages, found[0][4:-1])


def test_shapes_in_tables_do_not_wrap(built: Path) -> None:
    for page in built.rglob("*.html"):
        cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page.read_text(), flags=re.DOTALL)
        assert not [cell for cell in cells if re.match(r"(\d+|T), +(\d+|d), ", cell)], page
    assert "T,\xa0d,\xa0n,\xa0E,\xa0K" in text_of((built / "results.html").read_text())


# --- In a browser ------------------------------------------------------------------------------------------------------------

LAID_OUT = """() => {
    const width = document.documentElement.clientWidth;
    const inside = box => box.getBoundingClientRect().right <= width + 1;
    const scrolls = box => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    const kept = box => box && (scrolls(box) && inside(box) || kept(box.parentElement));  // by a box that scrolls
    const beyond = [], words = document.createTreeWalker(document.querySelector(".md-main"), NodeFilter.SHOW_TEXT);
    while (words.nextNode()) {
        const range = document.createRange();
        range.selectNodeContents(words.currentNode);
        const { right, width: wide } = range.getBoundingClientRect();
        if (wide && right > width + 1 && !kept(words.currentNode.parentElement))
            beyond.push(words.currentNode.textContent.trim().slice(0, 80));
    }
    const cut = [...document.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1);
    const longest = code => Math.max(...code.textContent.split("\\n").map(line => line.length));
    return { beyond, wider: document.documentElement.scrollWidth > width, cut: cut.length,
             hidden: cut.filter(code => !scrolls(code) || !inside(code)).length,
             short: width > 1000 ? cut.map(longest).filter(columns => columns <= 90) : [] };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    programs = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs a Chromium")
    with programs.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_beyond_the_page(built: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    cut = 0
    for file in sorted(built.rglob("*.html")):
        page.goto(file.as_uri())
        found = page.evaluate(LAID_OUT)
        cut += found.pop("cut")
        assert not any(found.values()), (file.relative_to(built), found)
    assert cut, "some code scrolls"
