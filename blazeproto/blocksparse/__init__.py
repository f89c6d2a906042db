"""MegaBlocks' formulation: the experts as products with one block-sparse matrix, and the layers that it was compared with."""

from blazeproto.blocksparse.build import topology_of
from blazeproto.blocksparse.rows import padded_gather, padded_scatter, score_grad
from blazeproto.blocksparse.topology import Padding, Topology

__all__ = ["Padding", "Topology", "padded_gather", "padded_scatter", "score_grad", "topology_of"]
