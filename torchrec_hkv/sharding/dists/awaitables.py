"""TorchRec's awaitables, without the interval that each draws for profilers.

That interval (``record_function``) takes longer than most of what is waited for.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torchrec.distributed.embedding_sharding import (
    KJTListAwaitable,
    KJTListSplitsAwaitable,
    _set_sharding_context_intra_a2a,
)
from torchrec.distributed.types import Awaitable

_T = TypeVar("_T")


class Unlogged:
    """A mixin before TorchRec's awaitables."""

    def wait(self) -> Any:
        """What the awaitable gives, as its callbacks leave it."""
        value = self._wait_impl()  # type: ignore[attr-defined]
        for callback in self._callbacks:  # type: ignore[attr-defined]
            value = callback(value)
        return value


class Ready(Unlogged, Awaitable[_T]):
    """What needs no waiting."""

    def __init__(self, value: _T) -> None:
        """
        Args:
            value: what :meth:`wait` gives.
        """
        super().__init__()
        self._value = value

    def _wait_impl(self) -> _T:
        return self._value


class BatchAwaitable(Unlogged, KJTListSplitsAwaitable):
    """The exchanges of a batch, one for each sharding."""

    def _wait_impl(self) -> KJTListAwaitable:
        exchanges = [exchange.wait() for exchange in self.awaitables]
        _set_sharding_context_intra_a2a(exchanges, self.ctx)
        return _ArrivingBatch(exchanges, self.ctx)


class _ArrivingBatch(Unlogged, KJTListAwaitable):
    """The batches of the shardings, on their way."""
