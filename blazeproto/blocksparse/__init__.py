"""MegaBlocks' formulation: the experts as products with one block-sparse matrix, and the layers that it was compared with.

A name is imported when it is first used: `Topology` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blazeproto.blocksparse.baselines import DroppingMoE, SequentialMoE
    from blazeproto.blocksparse.topology import Topology

__all__ = ["DroppingMoE", "SequentialMoE", "Topology"]

_HOME_OF = {"DroppingMoE": "baselines", "SequentialMoE": "baselines", "Topology": "topology"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'blazeproto.blocksparse' has no attribute {name!r}")
    return getattr(importlib.import_module(f"blazeproto.blocksparse.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
