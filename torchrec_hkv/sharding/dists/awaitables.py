"""TorchRec's awaitables without profiler ranges.

A profiler range (``record_function``) takes longer than most of these waits.
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


class UnloggedAwaitable:
    """Waits without a profiler range; a mixin before TorchRec's awaitables."""

    def wait(self) -> Any:
        """Waits; returns the result after all callbacks."""
        value = self._wait_impl()  # type: ignore[attr-defined]
        for callback in self._callbacks:  # type: ignore[attr-defined]
            value = callback(value)
        return value


class ReadyAwaitable(UnloggedAwaitable, Awaitable[_T]):
    """An awaitable whose result is known."""

    def __init__(self, value: _T) -> None:
        """
        Args:
            value: the result.
        """
        super().__init__()
        self._value = value

    def _wait_impl(self) -> _T:
        return self._value


class BatchAwaitable(UnloggedAwaitable, KJTListSplitsAwaitable):
    """The count exchanges of a batch, one for each sharding."""

    def _wait_impl(self) -> KJTListAwaitable:
        exchanges = [exchange.wait() for exchange in self.awaitables]
        _set_sharding_context_intra_a2a(exchanges, self.ctx)
        return _ArrivingBatch(exchanges, self.ctx)


class _ArrivingBatch(UnloggedAwaitable, KJTListAwaitable):
    """The id exchanges of a batch, one for each sharding."""
