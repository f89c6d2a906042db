"""The program that ncu watches for `blazeproto.lab.counters`: one product, launched once while counters are read."""

import json
import sys
from collections.abc import Sequence

import torch

from blazeproto.gemm import TileConfig
from blazeproto.lab.workbench import Workbench


def main(arguments: Sequence[str]) -> None:
    """Two runs to warm up, and one for ncu. arguments: a `Workbench`'s, and its sources, as JSON."""
    options = json.loads(arguments[0])
    sources, config = options.pop("sources"), options.pop("config")
    bench = Workbench(**options, config=TileConfig(**config) if config else None)
    if sources:
        bench.reopen(sources)
    bench.run(), bench.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    bench.run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
