"""A wire for replicas in threads of one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.hash_table.replicas import Wire

_REDUCTIONS: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: lambda parts: torch.stack(parts).sum(dim=0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(dim=0),
}


class _Exchange:
    """State that the replicas share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Tensor | None] = [None] * size
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, int], queue.Queue[Tensor]] = {}

    def messages(self, rank: int, number: int) -> queue.Queue[Tensor]:
        """Returns the queue for a replica's message with this number."""
        # Sender and receiver may ask for it at the same time, and must get the same queue. A
        # defaultdict may return two different queues.
        with self._lock:
            return self._messages.setdefault((rank, number), queue.Queue())

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        parts = list(self.given)
        self.barrier.wait()
        return parts


class _Arrival:
    """A message that has not arrived."""

    def __init__(self, coming: queue.Queue[Tensor], tensor: Tensor) -> None:
        self._coming, self._tensor = coming, tensor

    def wait(self) -> None:
        message = self._coming.get(timeout=300)
        assert message.shape == self._tensor.shape
        self._tensor.copy_(message)


class _Departure:
    """A sent message. It is read during the wait; until then its memory must not change."""

    def __init__(self, going: queue.Queue[Tensor], tensor: Tensor) -> None:
        self._tensor, self._sent = tensor, tensor.clone()
        going.put(self._sent)

    def wait(self) -> None:
        assert torch.equal(self._tensor, self._sent)


class ThreadWire(Wire):
    """A wire between threads.

    Args:
        swaps: whether two replicas send messages to each other instead of using collective calls.
    """

    def __init__(self, rank: int, size: int, exchange: _Exchange, swaps: bool = True) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange
        self.sent_bytes, self._swaps = 0, swaps

    @classmethod
    def make(cls, size: int, swaps: bool = True) -> list[ThreadWire]:
        """Creates one wire per replica."""
        exchange = _Exchange(size)
        return [cls(rank, size, exchange, swaps) for rank in range(size)]

    def swaps(self, device: torch.device) -> bool:
        return self._swaps and super().swaps(device)

    def _send(self, tensor: Tensor, number: int) -> _Departure:
        return _Departure(self._exchange.messages(1 - self.rank, number), tensor)

    def _receive(self, tensor: Tensor, number: int) -> _Arrival:
        return _Arrival(self._exchange.messages(self.rank, number), tensor)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        tensor.copy_(_REDUCTIONS[op](self._exchange.exchange(self.rank, tensor)))

    def _all_gather(self, parts: list[Tensor], tensor: Tensor) -> None:
        for part, tensor_of_rank in zip(
            parts, self._exchange.exchange(self.rank, tensor), strict=True
        ):
            part.copy_(tensor_of_rank)


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs calls at the same time; returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
