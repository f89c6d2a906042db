"""The processes that torchrun starts: what a training run asks of them as a whole, and what happens when one is gone.

    with joined(device=None, timeout=300) as ranks:      # alone, where torchrun has not started this process
        ranks.rank, ranks.size, ranks.device
        ranks.mean(loss), ranks.sum(loads)               # in place, on the device
        folder = ranks.of_first(make_folder)             # rank 0 does it, all have what it returned or raised
        sums = ranks.of_each(sum_of_own)                 # all do it, and all have what all returned, or what one raised

CPU tensors travel by gloo and CUDA tensors by NCCL, in one process group, and no wait for another rank is longer than the group's
timeout. Beside that each rank tells torchrun's store twice a second that it is there. A rank that is killed falls silent, and the
others end with a line that names it; so they do for a rank that ended by an error of its own. A wait on the device, which no
signal reaches, ends so too: the thread that listens ends the process.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.lm.settings import device_named

Made = TypeVar("Made")

BEAT = 0.5  # seconds between two signs of life
SILENCE = 10.0  # seconds after which a rank is taken to be gone; torchrun kills the others after 30
GRACE = 3.0  # seconds that this rank has to end by itself, when another has ended by an error
HOST = torch.device("cpu")
DONE, ENDED = "done", "ended: "
OF_EXCHANGES = re.compile(
    "gloo|nccl|connection|timed out|peer", re.IGNORECASE
)  # their errors have no class of their own


class Watch(threading.Thread):
    """Says in torchrun's store that this rank is there, and ends the process where another one is gone."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        super().__init__(daemon=True)
        # A connection of its own, since one that waits in another thread is locked. A rank that torchrun starts again must not
        # read what the one before said.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        self.store = dist.PrefixStore(f"train_lm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self.rank, self.keys = rank, [f"beat/{each}" for each in range(size)]
        self.over = threading.Event()
        self.heard: dict[int, tuple[bytes, float]] = {}
        self.tell("0")
        self.start()

    def tell(self, what: str) -> None:
        self.store.set(self.keys[self.rank], what)

    def run(self) -> None:
        for beat in itertools.count(1):
            if self.over.wait(BEAT):
                return
            try:
                self.tell(str(beat))
                line = next(filter(None, map(self.verdict, range(len(self.keys)), self.store.multi_get(self.keys))), "")
            except RuntimeError as error:  # torchrun itself is gone, or rank 0's host
                line = f"the store of torchrun does not answer ({str(error).splitlines()[0]})"
            if line and not self.over.is_set():
                print(f"error: rank {self.rank} ends: {line}; --resume goes on", file=sys.stderr, flush=True)
                os._exit(1)

    def verdict(self, rank: int, word: bytes) -> str:
        """The fault of a rank that has said ``word``, or ""."""
        now, text = time.monotonic(), word.decode()
        if self.heard.get(rank, (b"",))[0] != word:
            self.heard[rank] = word, now
        silent = now - self.heard[rank][1]
        if rank == self.rank or text == DONE:
            return ""
        if text.startswith(ENDED):
            return f"rank {rank} {text}" if silent > GRACE else ""
        return f"rank {rank} is gone: not a word for {SILENCE:.0f} s" if silent > SILENCE else ""

    def leave(self, word: str) -> None:
        """The last word of this rank."""
        self.over.set()
        self.join()
        self.tell(word)

    def tell_of(self, error: BaseException) -> None:
        """This rank ends by an error: the others are told. If the error comes from a collective that failed, another rank is
        likely gone: the watch then names it and ends this process."""
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, RuntimeError) and OF_EXCHANGES.search(str(cause))):
            cause = cause.__context__
        if cause is not None:
            for number in (signal.SIGINT, signal.SIGTERM):  # which torchrun sends when it has seen the rank end
                signal.signal(number, signal.SIG_IGN)
            self.join(SILENCE + GRACE)
        self.leave(ENDED + (str(error).splitlines() or [""])[0] + f" ({type(error).__name__})")


@dataclass
class Ranks:
    """The processes of a run, this one being number ``rank`` of ``size``. Without a process group it is alone.

    timeout: seconds that a rank waits for another.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    timeout: float = 300.0
    watch: Watch | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and talks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """In place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        """In place; the same bits on every rank."""
        return self.sum(tensor).div_(self.size)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. The host waits for the other hosts, not for the device."""
        return bool(self.sum(torch.tensor([int(flag)])))

    def told(self, value: Made) -> Made:
        """Rank 0's value."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=HOST)
        return values[0]

    def of_first(self, make: Callable[[], Made]) -> Made:
        """The result of rank 0's ``make``, on all ranks; if it raises, its error on all."""
        return self.of_each(make if self.first else lambda: None)[0]  # type: ignore[arg-type, return-value]

    def of_each(self, make: Callable[[], Made]) -> list[Made]:
        """The results of all ranks' ``make``, on all ranks, in their order; if some raise, the first one's error on all."""
        try:
            tried: list[Any] = [(make(), None)]
        except Exception as error:  # noqa: BLE001  by which every rank has to end
            tried = [(None, error)]
        if self.size > 1:
            (own,), tried = tried, tried * self.size
            dist.all_gather_object(tried, own)
        if errors := [error for _, error in tried if error is not None]:
            raise errors[0]
        return [made for made, _ in tried]

    def rows(self, tensor: Tensor, parts: int = 1) -> list[Tensor]:
        """This rank's rows of each of ``parts`` equal parts of a batch."""
        return list(tensor.chunk(parts * self.size))[self.rank :: self.size]

    def repeats_first(self) -> bool:
        """Whether this rank has ended by the error that rank 0 has ended by, and that it prints."""
        if self.watch is None or self.first:
            return False
        time.sleep(1)  # in which rank 0 says it
        words = self.watch.store.multi_get(self.watch.keys)
        return bool(words[0] == words[self.rank])


@contextmanager
def joined(device: str | None, timeout: float) -> Iterator[Ranks]:
    """The ranks of this process's group; of torchrun's, which is made and left here; else this process alone.

    device: cpu or cuda, None for the better one; with several ranks a GPU of their own each.  timeout: seconds that a rank waits
    for another.

    Raises:
        ValueError: there is no such device, or fewer GPUs than ranks on this host.
    """
    chosen, ours = device_named(device), not dist.is_initialized()
    if ours and dist.is_torchelastic_launched():
        chosen = own_device(chosen)
        join(chosen, timeout)
    ranks = Ranks(chosen, timeout=timeout)
    if dist.is_initialized():
        ranks.rank, ranks.size = dist.get_rank(), dist.get_world_size()
    if ours and ranks.size > 1:
        ranks.watch = Watch(ranks.rank, ranks.size, timeout)
    try:
        yield ranks
    except BaseException as error:
        if ranks.watch is not None and not ranks.watch.over.is_set():
            ranks.watch.tell_of(error)
        ours = ours and ranks.watch is None  # a group that has lost a rank cannot be left
        raise
    finally:
        if ours and ranks.watch is not None:
            ranks.any(False)  # all have come here
            ranks.watch.leave(DONE)
        if ours and dist.is_initialized():  # a mode that shards needs a group also on one rank
            dist.destroy_process_group()


def join(device: torch.device, timeout: float) -> None:
    """A process group of torchrun's processes, or of this one alone."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    given = {} if dist.is_torchelastic_launched() else alone
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **given)


def own_device(device: torch.device) -> torch.device:
    """The GPU of this rank, chosen; the CPU stays."""
    if device.type != "cuda":
        return device
    here, local = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if device.index is not None:
        expected = "cpu or cuda under torchrun, where each rank has a GPU of its own"
        raise ValueError(f"device: expected {expected}, got '{device}'")
    if local > here:
        raise ValueError(f"device: expected a GPU for each of {local} ranks on this host, got {here}")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own
