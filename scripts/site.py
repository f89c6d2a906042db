"""The documentation site: README, pages, notebooks and the sources they link to, laid out in build/docs and built into site/.

    python -m scripts.site

Links are written for a reader of the repository. In the site a page of docs/ has its own name, README is the first page, a
notebook is a page, and a source that a page links to is a page with its text; links are turned accordingly. What is wrong with
a link, a reference or a docstring ends the build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
STAGE = ROOT / "build" / "docs"
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGE = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}  # of files that become pages
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
COMPLAINT = re.compile(r"^(mkdocstrings|griffe): ", re.MULTILINE)  # zensical's strict mode does not count these


def place(path: str) -> str:
    """Where build/docs has a file of the repository. path is relative to the root, as is the result to build/docs."""
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    there = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
    suffix = PurePosixPath(path).suffix
    if suffix == ".ipynb":
        return str(PurePosixPath(there).with_suffix(".md"))
    return f"{there}.md" if suffix in LANGUAGE else there


def pages() -> list[str]:
    """The site's pages by their paths in the repository, those left out that it has because another links to them."""
    found = [path for suffix in (".md", ".ipynb") for path in (ROOT / "docs").rglob(f"*{suffix}")]
    kept = [path.relative_to(ROOT).as_posix() for path in found if ".ipynb_checkpoints" not in path.parts]
    return [*FROM_ROOT, *sorted(kept)]


def turn_links(text: str, page: str) -> tuple[str, list[str]]:
    """The text with links as the site has them, and the files of the repository that they lead to."""
    linked = []

    def turn(match: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath(page).parent / match[1])
        if path.startswith("..") or not (ROOT / path).is_file():
            raise SystemExit(f"{page}: links to {match[1]}, which is no file of the repository")
        linked.append(path)
        return os.path.relpath(place(path), PurePosixPath(place(page)).parent)

    return LINK.sub(turn, text), linked


def text_of(page: str) -> str:
    """What a page says, in Markdown; a notebook's pictures are laid beside it."""
    path, suffix = ROOT / page, PurePosixPath(page).suffix
    if suffix in LANGUAGE:
        return f'# {path.name}\n\n``````{LANGUAGE[suffix]} title="{page}" linenums="1"\n{path.read_text()}``````\n'
    if suffix != ".ipynb":
        return path.read_text()
    from nbconvert import MarkdownExporter

    names = {"output_files_dir": f"{path.stem}_files", "unique_key": path.stem}
    text, resources = MarkdownExporter().from_filename(str(path), names)
    for picture, content in resources["outputs"].items():
        beside = STAGE / PurePosixPath(place(page)).parent / picture
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
    return text


def stage() -> None:
    """Writes build/docs anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    wanted, done = pages(), set[str]()
    while wanted:
        if (path := wanted.pop()) in done:
            continue
        done.add(path)
        target = STAGE / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        suffix = PurePosixPath(path).suffix
        if suffix in LANGUAGE:
            target.write_text(text_of(path))
        elif suffix in (".md", ".ipynb"):
            text, linked = turn_links(text_of(path), path)
            target.write_text(text)
            wanted += linked
        else:
            shutil.copy(ROOT / path, target)


def build() -> int:
    """Runs zensical in its strict mode. 0 where neither it nor mkdocstrings has anything to complain of."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    return run.returncode or int(COMPLAINT.search(run.stdout) is not None)


if __name__ == "__main__":
    stage()
    sys.exit(build())
