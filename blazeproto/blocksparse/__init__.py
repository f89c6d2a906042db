"""MegaBlocks' formulation: the experts as products with one block-sparse matrix, and the layers that it was compared with."""

from blazeproto.blocksparse.topology import Topology

__all__ = ["Topology"]
