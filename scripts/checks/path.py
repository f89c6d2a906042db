"""How much code a bf16 layer runs, forward and backward on the Hopper backend, file by file.

    python -m scripts.checks.path            # lists them
    python -m scripts.checks.path --write    # and fills in the counts of docs/reading.md

A layer is made and trained for two batches on a stand-in for the GPU (stand_in.py). A file counts, whole:

- a Python file, if one of its functions ran, or a dataclass or a NamedTuple of it was made. An import does not count, nor what
  it calls, such as a decorator: the package imports all products together;
- a table, which is a Python file without functions, if a file that counts imports it;
- the Python files that the kernels of router and dispatch are compiled from;
- the .cu files of the kernels that were launched, with all headers that they include.

Files of `OTHERS` do not count: they serve other layers, and a bf16 layer passes through them. A line of code holds more than
comments and docstrings.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType

import torch

from blazeproto import MoE
from blazeproto.gemm.compile import Kernel
from blazeproto.runtime.numba_kernel import NumbaKernel, _imported_files, source_files
from scripts.checks.stand_in import PACKAGE, Seen, launches
from scripts.command import argument_parser

OTHERS = {
    "fp8": {"gemm/e4m3.py", "gemm/recipe.py", "gemm/cuda/fp8.cuh"},
    "stored weights": {"gemm/stored.py", "gemm/cuda/quantized.cuh"}
    | {f"gemm/cuda/{name}.cuh" for name in ("decoders", "stored", "nibbles", "mxfp4", "int4", "nf4", "e4m3")},
    "LoRA": {"autograd/low_rank.py"},
    "distributed": {"autograd/ranks.py", "gemm/sending.py", "gemm/cuda/sending.cuh", "gemm/cuda/meeting.cuh"},
    "lab": {"gemm/cuda/timeline.cuh"},
}
NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
PAGE = PACKAGE.parent / "docs/reading.md"
COUNT = re.compile(
    r"^\| (\[`([\w/.]+)`\].+?|package .+?|\*\*all\*\*) \| [\d*]* ?\|", re.MULTILINE
)  # a file and its count
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def lines_of_code(path: Path) -> int:
    """Lines of a Python or CUDA file that hold more than comments and docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        without = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        return sum(bool(line.strip()) for line in without.splitlines())
    docs = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def is_table(path: Path) -> bool:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return not any(isinstance(node, functions) for node in ast.walk(ast.parse(path.read_text())))


@contextmanager
def modules_that_run() -> Iterator[set[str]]:
    """Names of the package's modules of which a function ran inside, and was not called by an import."""
    known, ran = set[CodeType](), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        made = frame.f_locals.get("_cls")  # a NamedTuple; the __init__ of a dataclass has the globals of its module
        name = frame.f_globals.get("__name__", "") if made is None else made.__module__
        if event == "call" and frame.f_code not in known and name.startswith("blazeproto.") and not importing(frame):
            known.add(frame.f_code)
            ran.add(name)

    def importing(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_flags & CO_OPTIMIZED:  # a module's code is not, nor a class's
            frame = frame.f_back
        return frame is not None and frame.f_globals["__name__"].startswith("blazeproto.")

    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(None)


def run_a_layer() -> tuple[set[str], Seen]:
    """Modules that ran, and what was launched, with few tokens and with more."""
    with launches() as seen, modules_that_run() as ran:
        layer = MoE(512, 512, num_experts=64, top_k=8, backend="hopper", dtype=torch.bfloat16)
        for num_tokens in (256, 1024):
            x = torch.randn(num_tokens, 512, dtype=torch.bfloat16, requires_grad=True)
            out, stats = layer(x)
            (out.float().square().sum() + stats.aux_loss).backward()
    return ran, seen


def files_of(kernel: Kernel | NumbaKernel) -> Iterable[Path]:
    if isinstance(kernel, NumbaKernel):
        return source_files(Path(kernel.make.__code__.co_filename).resolve())
    headers = re.findall(r"^// ---- (\S+)$", kernel.source, re.MULTILINE)
    return [kernel.path, *(kernel.folder / name for name in headers)]


def path_of_a_layer() -> dict[str, int]:
    """Lines of code by file. In a process in which no layer has run: what was loaded is not loaded again."""
    ran, seen = run_a_layer()
    files = {Path(str(sys.modules[name].__file__)) for name in ran} | {*chain(*map(files_of, seen.kernels))}
    python = [path for path in files if path.suffix == ".py"]
    files |= {path for path in chain(*map(_imported_files, python)) if is_table(path)}
    counts = {path.relative_to(PACKAGE).as_posix(): lines_of_code(path) for path in files}
    return {name: counts[name] for name in sorted(counts.keys() - set[str]().union(*OTHERS.values()))}


def page_with(counts: dict[str, int], page: str) -> str:
    """docs/reading.md with the counts. Packages' __init__.py share a row, and the last row has the total."""
    packages = sum(count for name, count in counts.items() if name.endswith("__init__.py"))
    cells = {
        **{name: f"{count}" for name, count in counts.items()},
        "package `__init__.py` files": f"{packages}",
        "**all**": f"**{sum(counts.values())}**",
    }
    return COUNT.sub(lambda row: f"| {row[1]} | {cells.get(row[2] or row[1], '')} |", page)


def main() -> None:
    parser = argument_parser("scripts.checks.path", __doc__)
    parser.add_argument("--write", action="store_true", help="fill in the counts of docs/reading.md")
    write, counts = parser.parse_args().write, path_of_a_layer()
    print(*(f"{count:6}  {name}" for name, count in counts.items()), sep="\n")
    print(f"{sum(counts.values()):6}  in all, {len(counts)} files")
    if write:
        PAGE.write_text(page_with(counts, PAGE.read_text()))


if __name__ == "__main__":
    main()
