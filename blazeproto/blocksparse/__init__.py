"""MegaBlocks' formulation: the experts as products with one block-sparse matrix, and the layers that it was compared with.

A name is imported when it is first used: those without torch need none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blazeproto.blocksparse.baselines import DroppingMoE, SequentialMoE
    from blazeproto.blocksparse.dmoe import dMoE
    from blazeproto.blocksparse.rows import padded_gather, padded_scatter, score_grad
    from blazeproto.blocksparse.topology import Padding, Topology, topology_of

_HOME_OF = {
    "DroppingMoE": "baselines",
    "Padding": "topology",
    "SequentialMoE": "baselines",
    "Topology": "topology",
    "dMoE": "dmoe",
    "padded_gather": "rows",
    "padded_scatter": "rows",
    "score_grad": "rows",
    "topology_of": "topology",
}
__all__ = [
    "DroppingMoE",
    "Padding",
    "SequentialMoE",
    "Topology",
    "dMoE",
    "padded_gather",
    "padded_scatter",
    "score_grad",
    "topology_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto.blocksparse' has no attribute {name!r}")
    return getattr(importlib.import_module(f"blazeproto.blocksparse.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
