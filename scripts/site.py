"""The documentation site: README, pages, notebooks and the sources they link to, laid out in build/docs and built into site/.

    python -m scripts.site

Links are written for a reader of the repository. In the site a page of docs/ has its own name, README's first screen is the
landing page, a notebook is a page, and a source that a page links to is a page with its text; links are turned accordingly. A
wrong link, reference or docstring ends the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from scripts.command import argument_parser, refuse

ROOT = Path(__file__).resolve().parents[1]
STAGE = ROOT / "build" / "docs"
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "ptxsim/README.md": "ptxsim.md",
}
LANDING_ENDS = "<!-- the landing page ends here -->"  # in README
LANGUAGE = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}  # of files that become pages
STYLE = "docs/site.css"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
ROW = re.compile(r"^\|.*$", re.MULTILINE)  # of a table
SHAPE = re.compile(
    r"(?<![\w.])(?:\d+|[TdnEK])(?:, (?:\d+|[TdnEK])(?![\w.]))+"
)  # "T, d, n, E, K", "40960, 768, 256, 128, 8"
COMPLAINT = re.compile(r"^(mkdocstrings|griffe): ", re.MULTILINE)  # zensical's strict mode does not count these


def place(path: str) -> str:
    """The place in build/docs of a file of the repository. path is relative to the root, the result to build/docs."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    there = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
    return f"{there}.md" if PurePosixPath(path).suffix in LANGUAGE else there.replace(".ipynb", ".md")


def pages() -> list[str]:
    """The site's pages by their paths in the repository, those left out that it has because another links to them."""
    found = [path for suffix in (".md", ".ipynb") for path in (ROOT / "docs").rglob(f"*{suffix}")]
    kept = [path.relative_to(ROOT).as_posix() for path in found if ".ipynb_checkpoints" not in path.parts]
    return [*FROM_ROOT, *sorted(kept)]


def turn_links(text: str, page: str) -> tuple[str, list[str]]:
    """The text with links as the site has them, and the files that they lead to. ValueError for a link to none."""
    linked = []

    def turn(match: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath(page).parent / match[1])
        if path.startswith("..") or not (ROOT / path).is_file():
            raise ValueError(f"{page}: links to {match[1]}, which is no file of the repository")
        linked.append(path)
        return os.path.relpath(place(path), PurePosixPath(place(page)).parent)

    return LINK.sub(turn, text), linked


def keep_shapes_whole(text: str) -> str:
    """The text with no-break spaces in the shapes of its tables."""
    return ROW.sub(lambda row: SHAPE.sub(lambda shape: shape[0].replace(" ", "&nbsp;"), row[0]), text)


def source_page(path: str) -> str:
    """A source as a page."""
    name = PurePosixPath(path)
    return f'# {name.name}\n\n``````{LANGUAGE[name.suffix]} title="{path}"\n{(ROOT / path).read_text()}``````\n'


def notebook_page(path: str) -> tuple[str, list[str]]:
    """A notebook with its stored outputs as a page, and the files that it links to. Its pictures are laid beside it."""
    import nbformat
    from nbconvert import MarkdownExporter

    notebook = nbformat.read(ROOT / path, as_version=4)
    notebook.metadata.setdefault("language_info", {"name": "python"})
    linked = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source, found = turn_links(cell.source, path)
            linked += found
    name = PurePosixPath(path).stem
    names = {"output_files_dir": f"{name}_files", "unique_key": name}
    text, resources = MarkdownExporter().from_notebook_node(notebook, names)
    for picture, content in resources["outputs"].items():
        write(str(PurePosixPath(place(path)).parent / picture), content)
    return text, linked


def write(there: str, content: str | bytes) -> None:
    """A file of build/docs."""
    target = STAGE / there
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.encode() if isinstance(content, str) else content)


def page_of(path: str) -> tuple[str | bytes, list[str]]:
    """The content of a file of the repository in build/docs, and the files that it links to."""
    suffix = PurePosixPath(path).suffix
    if suffix == ".md":
        return turn_links(keep_shapes_whole((ROOT / path).read_text().partition(LANDING_ENDS)[0]), path)
    if suffix == ".ipynb":
        return notebook_page(path)
    return source_page(path) if suffix in LANGUAGE else (ROOT / path).read_bytes(), []


def stage() -> None:
    """Writes build/docs anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    wanted, done = [*pages(), STYLE], set[str]()
    while wanted:
        if (path := wanted.pop()) not in done:
            content, linked = page_of(path)
            write(place(path), content)
            done.add(path)
            wanted += linked


def build() -> int:
    """Runs zensical in its strict mode. 0 where neither it nor mkdocstrings has anything to complain of."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    return run.returncode or int(COMPLAINT.search(run.stdout) is not None)


def main() -> None:
    argument_parser("scripts.site", __doc__).parse_args()
    try:
        stage()
    except ValueError as error:
        refuse(str(error))
    sys.exit(build())


if __name__ == "__main__":
    main()
