"""Commands of the package.

python -m blazeproto tour                    the first minute: a dispatch, a kernel, an edit and a race, without a GPU
python -m blazeproto doctor                  what works on this machine, what is missing, and the command that mends it
python -m blazeproto doctor --check          oracle checks of the kernels on this GPU; after a failure "auto" takes torch here
python -m blazeproto tune T,d,n,E,K          times the ampere backend's tiles on this GPU and keeps the fastest
python -m blazeproto bench T,d,n,E,K         a layer of these sizes, timed beside its floor
python -m blazeproto kernels                 every compiled kernel: registers, spills, shared memory, CTAs, wgmma
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from blazeproto.runtime.optional import need

if TYPE_CHECKING:
    from blazeproto.gemm import Kernel, Sizes

CPU_SIZES, GPU_SIZES = "256,128,64,8,2", "24576,1536,512,64,4"  # of `bench`, if none are given
IN_ASCII = str.maketrans("─–✗", "--x")  # what tables are drawn with


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = Parser(
        prog="python -m blazeproto", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    as_json = Parser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON instead of a table")

    commands.add_parser("tour", help="a dispatch, a kernel, an edit and a race, in a minute and without a GPU")
    doctor = commands.add_parser("doctor", parents=[as_json], help="what works; exit code 1 where something is missing")
    doctor.add_argument("--check", action="store_true", help="check the kernels on this GPU; exit code 1 if any fails")

    bench = commands.add_parser("bench", parents=[as_json], help="time a layer beside its floor")
    tune = commands.add_parser("tune", help="time the ampere backend's tiles, and keep the fastest")
    for parser_of, default in ((bench, f"{GPU_SIZES}, on a CPU {CPU_SIZES}"), (tune, GPU_SIZES)):
        what = f"tokens, widths of model and expert, experts, experts a token; default {default}"
        parser_of.add_argument("sizes", nargs="?", type=sizes_of, metavar="T,d,n,E,K", help=what)
    tune.add_argument("--backend", choices=["auto", "ampere"], default="auto", help="ampere: on a Hopper GPU too")

    kernels = commands.add_parser("kernels", parents=[as_json], help="compile all kernels, or read them from the cache")
    kernels.add_argument(
        "--products", type=lambda word: word.split(","), metavar="A,B", help="these alone, e.g. up_forward"
    )

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where its encoding lacks a character that a table has
    given = parser.parse_args(arguments)
    try:
        return {
            "tour": run_tour,
            "doctor": run_doctor,
            "tune": run_tune,
            "bench": run_bench,
            "kernels": run_kernels,
        }[given.command](given)
    except ValueError as error:  # what the package says of the arguments
        parser.error(str(error))
    except (ImportError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


def sizes_of(word: str) -> Sizes:
    """``"T,d,n,E,K"`` -> Sizes."""
    from blazeproto.gemm import Sizes

    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){4}", word):
        raise argparse.ArgumentTypeError(f"expected T,d,n,E,K, five ints of at least 1, got {word!r}")
    sizes = Sizes(*map(int, word.split(",")))
    if sizes.K > sizes.E:
        raise argparse.ArgumentTypeError(f"expected K of at most E={sizes.E}, got {sizes.K}")
    return sizes


def show(view: Any) -> None:
    """On the terminal, or plainly into a pipe."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(view)
    else:
        say(view.text(width=200))


def say(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text if encoding.lower().startswith("utf") else text.translate(IN_ASCII))


def waiting(text: str) -> AbstractContextManager[Any]:
    """Shows on a terminal that something goes on. ImportError without rich."""
    need("rich")
    from rich.console import Console

    return Console(stderr=True).status(text)


# --- The commands ----------------------------------------------------------------------------------------------------------


def run_tour(given: argparse.Namespace) -> int:
    from blazeproto.lab.tour import tour

    tour(show, say, waiting)
    return 0


def run_doctor(given: argparse.Namespace) -> int:
    """Its lines are plain text: it must run where nothing is installed."""
    from blazeproto import doctor

    if given.check and given.json:
        raise ValueError("--json: expected without --check, whose report is text, got both")
    if given.check:
        return 0 if doctor.check(say) else 1
    checks = doctor.examine()
    code = 0 if all(check.ok for check in checks) else 1
    if given.json:
        print(json.dumps([asdict(check) | {"ok": check.ok} for check in checks], indent=2))
        return code
    for check in checks:
        say(f"{check.name:<17}{check.version:<14}{'' if check.ok else '✗ '}{check.verdict:<15}{check.detail}".rstrip())
    faults = [check for check in checks if not check.ok]
    say("\nTo mend it" if faults else "\nThis machine has all that it can run.")
    for check in faults:
        say(f"mend {check.name:<17}{check.mend}")
    return code


def run_bench(given: argparse.Namespace) -> int:
    import torch

    from blazeproto.lab.layer_times import layer_times

    sizes = given.sizes or sizes_of(GPU_SIZES if torch.cuda.is_available() else CPU_SIZES)
    try:
        with waiting("timing"):
            times = layer_times(sizes)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"T,d,n,E,K: expected sizes that fit in the GPU's memory, got {error}") from error
    if given.json:
        print(json.dumps(asdict(times) | {"sizes": sizes._asdict()}, indent=2))
    else:
        show(times.view())
    return 0


def run_tune(given: argparse.Namespace) -> int:
    """Its table is plain text too."""
    from blazeproto.lab.card import tune

    gpu, file, times = tune(given.sizes or sizes_of(GPU_SIZES), given.backend)
    say(f"{gpu}: ms of a call, by columns of a tile\n\n{'product':<24}{'256':>10}{'128':>10}")
    for product, (wide, narrow) in times.items():
        say(f"{product:<24}{wide:>10.4f}{narrow:>10.4f}")
    say(f"\nThe fastest are kept in {file}")
    return 0


def run_kernels(given: argparse.Namespace) -> int:
    from blazeproto import gemm
    from blazeproto.gemm.compile import compile_many
    from blazeproto.gemm.registry import kernels_by_use
    from blazeproto.gemm.tiles import DEVICE_CONSTANTS
    from blazeproto.lab.tables import Table, View, in_bytes
    from blazeproto.lab.views import resources
    from blazeproto.runtime import cache, checks

    uses = kernels_by_use()
    if given.products is not None:
        for name in given.products:
            checks.one_of("--products", name, tuple(gemm.PRODUCTS))
        uses = {kernel: name for name in reversed(given.products) for kernel in gemm.PRODUCTS[name].kernels()}
    with waiting(f"compiling {len(uses)} kernels"), ThreadPoolExecutor() as pool:  # each waits for a disassembler
        found = dict(zip(uses, pool.map(resources, compile_many([*uses])), strict=True))

    def named(kernel: Kernel) -> dict[str, str]:
        return {"product": uses[kernel], "element": kernel.element.name, "arch": kernel.arch.name}

    if given.json:
        listed = [
            {**named(kernel), "entry": kernel.entry, "file": kernel.file, "macros": dict(kernel.defines), **asdict(has)}
            for kernel, has in found.items()
        ]
        print(json.dumps(listed, indent=2))
        return 0
    rows, constants = [], {*DEVICE_CONSTANTS, "SMEM_LIMIT"}
    for kernel, has in found.items():
        macros = " ".join(macro[2:] for macro in kernel.macros if macro[2:].split("=")[0] not in constants)
        numbers = [has.registers, has.spills, in_bytes(has.smem_bytes), has.threads, has.ctas]
        wgmma = "–" if has.wgmma is None else str(has.wgmma)
        rows.append([*named(kernel).values(), kernel.entry, *map(str, numbers), wgmma, macros])
    words = ["product", "element", "architecture", "kernel"]
    columns = [*words, "registers", "spills", "shared", "threads", "CTAs", "wgmma", "macros"]
    show(
        View(
            f"{len(rows)} kernels",
            {"cache": str(cache.folder())},
            [Table(columns, rows, left=[*words, "macros"])],
            "Registers: those a thread starts with. Spills: bytes a thread. CTAs: of a multiprocessor at a time.",
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
