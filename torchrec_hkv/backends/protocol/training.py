"""Settings that a training loop changes between steps: epochs, and gradient accumulation."""

from __future__ import annotations

from contextlib import AbstractContextManager


class TrainingLookup:
    """Settings of later training lookups of a group."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of later lookups, 0 to 2^32 - 1, for tables whose options have epochs
        (:attr:`BackendOptions.has_epochs`). The default does nothing."""

    def epoch(self) -> int:
        """The current epoch; 0 by default."""
        return 0

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which lookups accumulate gradients: their backward stores the gradient
        instead of updating rows.

        The backward of the next lookup made outside the context applies all stored gradients in
        one update. Only called if :attr:`Backend.accumulates`.
        """
        raise NotImplementedError

    def has_open_lookup(self) -> bool:
        """Whether the backward of a training lookup has not run yet. The lookup's rows can't be
        replaced until then. Synchronizes with the device. False by default."""
        return False
