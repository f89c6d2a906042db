"""The site has every page and every public module, and links lead to files, there as in the repository. `make site` builds it."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

import blazeproto
from scripts import site
from tests.integrations import titan

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
API = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
MODULES = re.findall(r"^::: (\S+)$", API, flags=re.MULTILINE)


def prose(page: str) -> str:
    """A page's Markdown; of a notebook its Markdown cells."""
    text = (ROOT / page).read_text()
    if not page.endswith(".ipynb"):
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def test_the_navigation_has_twelve_entries_and_leads_to_every_page_in_a_click() -> None:
    sources = {site.place(page): page for page in site.pages()}
    entries = [sources[to] for entry in PROJECT["nav"] for to in entry.values()]
    assert len(entries) == len({*entries}) <= 12
    linked = {path for entry in entries for path in site.turn_links(prose(entry), entry)[1]}
    assert not {*sources.values()} - {*entries} - linked


def test_the_landing_page_is_the_first_screen_of_readme() -> None:
    shown, _, rest = prose("README.md").partition(site.LANDING_ENDS)
    assert "make train" in shown and "## Other GPUs" in rest


def test_every_public_module_has_its_place_in_the_api() -> None:
    rooms = {f"blazeproto.{name}" for name in set(dir(blazeproto)) - set(blazeproto.__all__)}
    assert not ({"blazeproto"} | rooms) - set(MODULES)
    assert len(MODULES) == len(set(MODULES)), "a module that stands in two places has two anchors of one name"


@pytest.mark.parametrize("module", MODULES)
def test_what_the_api_names_is_a_module(module: str) -> None:
    if module.endswith(".torchtitan"):
        titan.load()
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("page", site.pages())
def test_links_lead_to_files(page: str) -> None:
    site.turn_links(prose(page), page)


@pytest.mark.parametrize(
    ("page", "link", "turned"),
    [
        ("README.md", "docs/kernels.md", "kernels.md"),
        ("README.md", "CHANGELOG.md#unreleased", "changelog.md#unreleased"),
        ("README.md", "blazeproto/gemm/cuda/up.cu", "repository/blazeproto/gemm/cuda/up.cu.md"),
        ("README.md", "results/README.md", "repository/results/README.md"),
        ("docs/kernels.md", "results.md#token-rounding", "results.md#token-rounding"),
        ("docs/kernels.md", "speed.png", "speed.png"),
        ("docs/kernels.md", "../results/h200/products.json", "repository/results/h200/products.json"),
        ("docs/api/lab.md", "../../README.md", "../index.md"),
        ("results/README.md", "../docs/results.md", "../../results.md"),
        ("docs/kernels.md", "#a-heading", "#a-heading"),
        ("docs/kernels.md", "https://arxiv.org/abs/2601.05296", "https://arxiv.org/abs/2601.05296"),
    ],
)
def test_links_are_turned_to_where_the_site_has_the_file(page: str, link: str, turned: str) -> None:
    text, _ = site.turn_links(f"[words]({link}), ![picture]({link})", page)
    assert text == f"[words]({turned}), ![picture]({turned})"


def test_a_notebook_is_a_page() -> None:
    assert site.place("docs/tutorial/1-dispatch.ipynb") == "tutorial/1-dispatch.md"


@pytest.mark.parametrize("link", ["nowhere.md", "api", "../../elsewhere.md", "../blazeproto/gemm/no.py"])
def test_a_link_to_what_is_no_file_of_the_repository_is_refused(link: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"docs/kernels.md: links to {link}")):
        site.turn_links(f"[words]({link})", "docs/kernels.md")
