"""The clock of a group, which counts its calls, and its epoch."""

from __future__ import annotations

from collections.abc import Callable

from torchrec_hkv import _C


class GroupClock:
    """Clock and epoch of a group; a base of ``TableGroup``."""

    _group: _C.TableGroup
    _epoch = 0
    note_rewrite: Callable[[], None]

    @property
    def clock(self) -> int:
        """Number of counted calls so far. Synchronizes with the device."""
        return self._group.clock

    @property
    def first_open_step(self) -> int:
        """The earliest step whose rows may still change without another lookup: the step of the
        oldest pinned lookup whose backward has not run, otherwise the step after :attr:`clock`.
        Synchronizes with the device."""
        return self._group.first_open_step

    def set_clock(self, clock: int) -> None:
        """Sets the clock to the time of contents that will be loaded.

        Raises:
            ValueError: ``clock`` is out of range, or the backward of a lookup is pending.
        """
        self.note_rewrite()
        self._group.set_clock(clock)

    def advance_clock(self, clock: int) -> None:
        """Advances the clock, as if calls in between had looked up nothing.

        Raises:
            ValueError: ``clock`` is less than :attr:`clock`, or the backward of a lookup is
                pending.
        """
        now = self.clock
        if clock < now:
            raise ValueError(f"clock is {clock}, but must be at least {now}, what it is now.")
        if clock > now:
            self._group.set_clock(clock)

    @property
    def epoch(self) -> int:
        """The epoch of later calls for the epoch policies; see :meth:`set_epoch`."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of later calls for the epoch policies. Does not synchronize.

        Args:
            epoch: 0 to 2^32 - 1.

        Raises:
            ValueError: ``epoch`` is out of range.
        """
        if not 0 <= epoch < 1 << 32:
            raise ValueError(f"epoch is {epoch}, but must be from 0 to 2^32 - 1.")
        self._group.set_epoch(epoch)
        self._epoch = epoch
