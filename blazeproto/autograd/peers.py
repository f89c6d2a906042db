"""Ranks inside the experts' operators: an *exchange*, by which rows come from other ranks and partial sums go back there.

    x ──send──> rows of all ranks' tokens ──up, down──> Y ──add_up──> out            and in backward dO, X, dX~ likewise

To an operator the tokens are the rank's own, and the pairs those that arrived. Operators take tensors, numbers and strings, so
they are told an exchange by its name, as torch's own collective operators are told a process group.
"""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

AddUp = Callable[..., None]
"""(y, rows, *, scores=None, columns=None, out): what `blazeproto.gemm.combine.launch` is on one rank."""


class Exchange(Protocol):
    """All ranks call the same functions in the same order. What ``send`` returns holds until the next ``send``."""

    places: int
    """Tokens that may arrive, of all ranks."""

    backend: str
    """The name of the backend whose rows ``add_up`` takes."""

    def send(self, t: Tensor, token_ranks: Tensor) -> Tensor:
        """t (T, d), this rank's own → (places, d), of all ranks' tokens those with an expert here; the other rows are anything.

        token_ranks: (T,) int32: bit r of a token: it has an expert on rank r."""

    def add_up(
        self,
        token_ranks: Tensor,
        y: Tensor,
        rows: Any,
        *,
        scores: Tensor | None = None,
        columns: range | None = None,
        out: Tensor,
    ) -> None:
        """y (R, d), rows in expert order → out (T, d): the sums over a token's ranks of their partial sums, rounded each.

        rows: the arrived pairs' dispatch, as the backend has it.  scores: of the arrived pairs.  columns: those of ``out`` that
        y has."""


EXCHANGES: MutableMapping[str, Exchange] = WeakValueDictionary()
"""Those that live, by name."""


class PeersNamed(NamedTuple):
    """An exchange in one call, as operators are told of it."""

    token_ranks: Tensor  # (T,) int32, as `Exchange.send` takes it
    exchange: str

    @property
    def places(self) -> int:
        """Tokens that may arrive."""
        return EXCHANGES[self.exchange].places

    @property
    def backend(self) -> str:
        """What the operators run on."""
        return EXCHANGES[self.exchange].backend


class Peers(NamedTuple):
    """The same inside an operator."""

    send: Callable[[Tensor], Tensor]
    add_up: AddUp
    places: int


def peers_of(exchange: str, token_ranks: Tensor | None) -> Peers | None:
    """None on one rank."""
    if token_ranks is None:
        return None
    found = EXCHANGES[exchange]
    return Peers(partial(found.send, token_ranks=token_ranks), partial(found.add_up, token_ranks), found.places)
