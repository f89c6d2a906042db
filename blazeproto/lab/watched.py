"""The program that ncu watches for `blazeproto.lab.counters`: one product, launched once while counters are read."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from blazeproto.gemm import TileConfig
from blazeproto.lab.workbench import Workbench


def main(arguments: Sequence[str]) -> None:
    """Two runs to warm up, and one for ncu. arguments: the product, T, d, n, E, K, and further options as JSON."""
    product, *numbers = arguments[:6]
    options: dict[str, Any] = json.loads(arguments[6])
    sources, config = options.pop("sources"), options.pop("config")
    sizes: dict[str, Any] = dict(zip("TdnEK", map(int, numbers), strict=True))
    bench = Workbench(product, **sizes, **options, config=TileConfig(**config) if config else None)
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
