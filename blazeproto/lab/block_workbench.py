"""A block-sparse product on the bench: `Workbench` for the products of `blazeproto.gemm.BLOCK_PRODUCTS`.

>>> from blazeproto.lab import BlockWorkbench
>>> bench = BlockWorkbench("DS^TD", m=72)
>>> bench.edit("my_kernels")         # change my_kernels/dsd.cu in an editor, then
>>> bench.check()                    # right, or a map of where it is wrong, by blocks

A map says where in the sparse matrix S (M, N) a wrong element belongs:

    SDD                          values (B, 128, 128)     its block; tiles of it are a consumer's rows and a slab's columns
    DSD, DSD^T, DDS^T, DD^TS^T   S times a matrix         its row of blocks
    DS^TD, DS^TD^T, DDS, DD^TS   S^T times a matrix       its column of blocks

DDS gives a transposed result: there tiles of columns are the rows or columns of blocks.
"""

from functools import cached_property
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from blazeproto import cost
from blazeproto.blocksparse import Topology
from blazeproto.gemm import BLOCK_PRODUCTS, Kernel, TileConfig
from blazeproto.gemm.blocks import BLOCK, FIELDS, Blocks
from blazeproto.gemm.dsd import tiles
from blazeproto.gemm.product import Build, Variant
from blazeproto.gemm.tiles import CHUNK, SLAB
from blazeproto.lab.accuracy import TINY, Bounds, Near, Reference, sum_error
from blazeproto.lab.calls import Output, Poisoned, sums_of
from blazeproto.lab.counters import HardwareCounters
from blazeproto.lab.oracle import BLOCK_CALLS, make_block_case, operands
from blazeproto.lab.verdict import Places
from blazeproto.lab.workbench import Inputs, Workbench
from blazeproto.runtime import checks

EXPERTS = np.repeat([0, 1, 3], [2, 1, 1])[:, None] == np.repeat(range(4), [2, 1, 1, 3])  # the third has no rows
STRIP = BLOCK // 2  # rows of a consumer


class BlockWorkbench(Workbench):
    """One block-sparse product at one topology, its inputs, and what it should give. MegaBlocks §5.1.

    It has all of `Workbench` but `counters` and `score`. It runs on a Hopper GPU, or without one on the machine (ptxsim).

    product: as MegaBlocks names it: SDD, SDD^T, DSD, DSD^T, DS^TD, DS^TD^T, DDS, DD^TS, DDS^T or DD^TS^T.
    mask (M / 128, N / 128) bool, NumPy's: the blocks that S has, one at least; default: four experts of unequal width and load.
    k: columns of SDD's left matrix, which are summed over.  m: columns of the dense matrix of the others. Multiples of 8.
    seed: of the inputs, which are bf16 at unit scale, what they are multiplied with at 1/√fan-in.
    config: the tiles; default: those that the product takes.  device: "cpu" for the machine even with a Hopper GPU.

    An element's bound (`lab.accuracy`) allows for a sum of products, with as many terms as its row of blocks has, and for one
    rounding. ``use`` takes the edited kernel for every call of the function: sdd, dsd or dds.

    ValueError or TypeError for arguments that no product takes.
    """

    def __init__(
        self,
        product: str = "SDD",
        mask: np.ndarray | None = None,
        k: int = 256,
        m: int = 256,
        seed: int = 0,
        config: TileConfig | None = None,
        device: str = "auto",
    ) -> None:
        checks.one_of("product", product, tuple(BLOCK_CALLS))
        self.mask = EXPERTS if mask is None else mask
        Topology.of_blocks(self.mask)  # refuses what is no mask
        if not self.mask.any():
            raise ValueError("mask: expected at least one block, got none")
        for name, width in (("k", k), ("m", m)):
            if checks.integer(name, width, least=1) % CHUNK:
                raise ValueError(f"{name}: expected a multiple of {CHUNK}, got {width}")
        self.k, self.m = k, m
        function, _, options = BLOCK_CALLS[product]
        self._set_up(product, BLOCK_PRODUCTS[function], seed, config, device)
        flags = [name for name in signature(self.entry.spec.formula).parameters if name.startswith("transpose")]
        self.options = {name: options.get(name, False) for name in flags}
        self.of_columns = self.options.get("transpose_s", False) != (function == "dds")  # S^T times a matrix
        self.part = "block" if function == "sdd" else "block column" if self.of_columns else "block row"
        self.operations, self.ragged = cost.block_operations(int(self.mask.sum()), k if function == "sdd" else m), 1
        self._kernels(Build())  # refuses tiles that it cannot have

    @property
    def _shape(self) -> str:
        rows, columns = self.mask.shape
        width = f"k={self.k}" if self.part == "block" else f"m={self.m}"
        return f"{self.mask.sum()} of {rows} x {columns} blocks, {width}"

    @property
    def _tiles(self) -> TileConfig:
        return self.config or (
            TileConfig() if self.part == "block" else tiles(self.m, self.mask.shape[self.of_columns])
        )

    def _kernels(self, build: Build) -> list[Kernel]:
        lies = self.options
        variants = {
            "sdd": lambda: Variant(transposed=lies["transpose_b"]),
            "dsd": lambda: Variant(transposed=self.of_columns, dense_transposed=lies["transpose_b"]),
            "dds": lambda: Variant(
                transposed=self.of_columns, dense_transposed=not lies["transpose_a"], out_transposed=True
            ),
        }
        assert self.entry.kernel is not None
        return [self.entry.kernel(self._tiles, variants[self.entry.name](), build)]

    def _floor_ms(self, gpu: str) -> float:
        """As in sdd.cu and dsd.cu."""
        moved = sum(array.nbytes for array in self._inputs.arguments.values() if isinstance(array, Tensor))
        return cost.floor_ms(self.operations, moved, gpu)

    def counters(self) -> HardwareCounters:
        """NotImplementedError: ncu's process makes the inputs of a layer's product."""
        raise NotImplementedError(f"counters: expected a product of blazeproto.gemm.PRODUCTS, got {self.product}")

    @cached_property
    def _inputs(self) -> Inputs:
        case = make_block_case(self.mask, self.k, self.m, device="cuda" if self.on_gpu else "cpu", seed=self.seed)
        names = [array.name for array in self.entry.spec.inputs]
        given = dict(zip(names, operands(case, self.product), strict=True))
        exact, absolute, terms = (
            self.entry.spec.formula(
                Blocks(case.topology, torch.cat),
                **{name: of(array.double()) for name, array in given.items()},
                **self.options,
            )
            for of in (torch.clone, torch.abs, torch.ones_like)
        )
        near = Bounds.stored(Near(exact, sum_error(terms, absolute)))
        references = {"out": Reference(near.exact, (near.error + TINY).float())}
        read = given | {f"topology.{name}": getattr(case.topology, name) for name in FIELDS}
        memory = {"out": Poisoned(Output("", tuple(exact.shape), tile=(BLOCK, self._tiles.tile_n)), exact.device)}
        arguments = {
            **given,
            **self.options,
            "topology": case.topology,
            "out": memory["out"].values,
            "config": self._tiles,
        }
        return Inputs(case, arguments, memory, references, {"out": self._places(exact)}, read, sums_of(read), {})

    def _numbers(self, name: str) -> Tensor:
        return self._inputs.values[name]

    def _places(self, out: Tensor) -> Places:
        shape, width = (out.shape[:-1].numel(), out.shape[-1]), self._tiles.tile_n
        lines, columns = (torch.arange(size, device=out.device) for size in shape)
        if self.entry.name == "dds":
            return Places(shape, torch.full_like(lines, -1), lines, None, lines // width, columns // BLOCK)
        inside, width = lines % BLOCK, SLAB if self.part == "block" else width
        return Places(shape, lines // BLOCK, inside, None, inside // STRIP, columns // width)
