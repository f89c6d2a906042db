"""Finds kernels with the same machine code as another checkout's, though their sources differ. Needs no GPU.

    git worktree add .base COMMIT
    python -m scripts.checks.equal_kernels --old .base             # those of the registry and of the committed results
    python -m scripts.checks.equal_kernels --old .base --write     # extends results/equal.json

Code and constants are compared, without -lineinfo and entry names, and what a launch says: threads, registers, shared memory.
Rows of the committed results keep their standing by that table.
A checkout's kernels are compiled once; their hashes are kept in a file (--kept).
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blazeproto import gemm
from blazeproto.gemm import nvrtc
from blazeproto.gemm.compile import CompileError, Kernel
from scripts.bench import identity
from scripts.command import argument_parser

Side = dict[str, dict[str, Any]]  # by identity: a kernel's description, and the hash of its code


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each section of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    found = [struct.unpack_from("<II8x8xQQ", cubin, table + index * entry) for index in range(count)]
    for name, _, offset, size in found:
        start = found[names][2] + name
        yield cubin[start : cubin.index(0, start)].decode(), cubin[offset : offset + size]


def code_of(kernel: Kernel) -> str:
    """The hash of what a launch of a kernel runs; "" where the sources here are not made for its macros."""
    try:
        binary = kernel._obtain(lambda file, options: nvrtc.compile(file, [o for o in options if o != "-lineinfo"]))
    except CompileError:
        return ""
    parts = [str((kernel.threads, kernel.start_registers, kernel.dynamic_smem)).encode()]
    for name, code in sorted(sections(binary.cubin)):
        if name.startswith((".text.", ".nv.constant")) and name.endswith(f".{kernel.entry}"):
            parts += [name.removesuffix(kernel.entry).encode(), code]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def side_here(descriptions: list[identity.Description], kept: Path) -> Side:
    """This checkout's kernels: the registry's, and the described ones that are still made here. kept: a file of hashes by
    compiler and identity."""
    codes: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    again = (
        each for each in map(identity.made_again, descriptions) if isinstance(each, Kernel) and each.path.is_file()
    )
    kernels = {f"{nvrtc.version()} {identity.identity(kernel)}": kernel for kernel in (*gemm.all_kernels(), *again)}
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(os.cpu_count()) as pool:
        os.environ["BLAZEPROTO_CACHE"] = cache
        lacking = [key for key in kernels if key not in codes]
        for key, code in zip(lacking, pool.map(code_of, (kernels[key] for key in lacking)), strict=True):
            codes[key] = code
            kept.write_text(json.dumps(codes))  # so that a run that is cut short goes on
    return {
        identity.identity(kernel): {"described": identity.described(kernel), "code": codes[key]}
        for key, kernel in kernels.items()
        if codes[key]
    }


def described_in_results() -> list[identity.Description]:
    """The CUDA kernels of all committed results."""
    found: dict[str, identity.Description] = {}
    for file in sorted(identity.EQUAL.parent.rglob("*.json")):
        record = json.loads(file.read_text())
        kernels = record.get("kernels", {}) if isinstance(record, dict) and file != identity.EQUAL else {}
        found |= {name: each for name, each in kernels.items() if "file" in each}
    return [*found.values()]


def extended(table: dict[str, Any], old: Side, new: Side) -> dict[str, Any]:
    """The table with the identities of old kernels whose code a new one has; what it led to before leads there too."""
    equal, described = dict[str, str](), dict[str, Any]()
    for name, kernel in old.items():
        if found := [each for each in new if new[each]["code"] == kernel["code"] and name not in new]:
            alike = [each for each in found if new[each]["described"] == kernel["described"]]
            equal[name] = today = (alike or found)[0]
            described |= {} if alike else {today: new[today]["described"]}
    kernels = {name: equal.get(today, today) for name, today in table["kernels"].items()} | equal
    led = {equal.get(name, name): each for name, each in table["descriptions"].items()}
    described |= {name: each for name, each in led.items() if name in kernels.values() and name not in described}
    return table | {"kernels": dict(sorted(kernels.items())), "descriptions": dict(sorted(described.items()))}


def main() -> None:
    parser = argument_parser("scripts.checks.equal_kernels", __doc__)
    parser.add_argument("--old", type=Path, help="folder of the other checkout")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "equal_kernels.json", help="hashes")
    parser.add_argument("--write", action="store_true", help="extend results/equal.json")
    given = parser.parse_args()
    if given.old is None:  # the process of a checkout, which is asked for its kernels
        print(json.dumps(side_here(json.load(sys.stdin), given.kept)))
        return
    descriptions, sides = json.dumps(described_in_results()), []
    for root in (given.old.resolve(), identity.REPOSITORY):
        environment = os.environ | {"PYTHONPATH": str(root)}
        command = [sys.executable, "-P", __file__, "--kept", str(given.kept)]
        done = subprocess.run(
            command, env=environment, input=descriptions, stdout=subprocess.PIPE, text=True, check=True
        )
        sides.append(json.loads(done.stdout))
    old, new = sides
    codes = {kernel["code"] for kernel in new.values()}
    differ = [kernel["described"] for name, kernel in old.items() if name not in new and kernel["code"] not in codes]
    for described in differ:
        print("differs:", described["file"], described["entry"], described["defines"])
    print(f"{len(old)} kernels before, {len(new)} now: {len(old.keys() - new)} other sources, {len(differ)} other code")
    if given.write:
        identity.EQUAL.write_text(
            json.dumps(extended(json.loads(identity.EQUAL.read_text()), old, new), indent=1) + "\n"
        )
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
