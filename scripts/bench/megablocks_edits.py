"""Two edits that let MegaBlocks' block-sparse layer run beside Triton 3.2 and later, in the files that are installed.

`python -m scripts.bench.blocksparse --edit-megablocks` makes them first. MegaBlocks refuses these versions of Triton, because
stanford-stk's kernels do not compile there: they load 16-bit indices and count in 32 bits.

- stk: every index that a kernel loads becomes an int32 at once.
- MegaBlocks: its check of Triton's version compares with a version that does not exist.

To install MegaBlocks with CUDA 13, first remove the argument `debug_synchronous` of both calls in its csrc/cumsum.h: cub has it
no more.
"""

import re
from importlib.util import find_spec
from pathlib import Path

INDICES = r"row_indices|column_indices|offsets|block_offsets_t"
EDITS = (
    ("stk", "backend/triton_kernels.py", rf"tl\.load\((?:{INDICES})(?: \+ [\w ]+)+\)(?!\.to)", r"\g<0>.to(tl.int32)"),
    ("megablocks", "layers/arguments.py", r"(triton\.__version__ >= )'3\.2\.0'", r"\1'999'"),
)


def edit() -> list[Path]:
    """The files that were changed; none where they were edited before. RuntimeError where a package is missing or differs."""
    changed = []
    for package, name, pattern, replacement in EDITS:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise RuntimeError(f"{package}: expected it to be installed, found none")
        path = Path(spec.origin).parent / name
        before = path.read_text()
        after = re.sub(pattern, replacement, before)
        if after != before:
            path.write_text(after)
            changed.append(path)
        elif re.sub(r"\\[g1](<0>)?", "", replacement) not in before:
            raise RuntimeError(f"{path}: expected what {pattern!r} matches, found none")
    return changed
