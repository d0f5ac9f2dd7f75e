"""Locks of a group for several calls of one thread."""

from __future__ import annotations

import types

from torchrec_hkv import _C


class GroupLock:
    """A context that locks a group.

    Args:
        group: the group.
        kind: what other threads may do meanwhile.
    """

    def __init__(self, group: _C.TableGroup, kind: _C.Hold) -> None:
        self._group, self._kind = group, kind

    def __enter__(self) -> None:
        self._group.hold(self._kind)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._group.release(self._kind)


class UnchangedLock(GroupLock):
    """A lock under which nothing changes, and no table is in the middle of growing.

    Args:
        group: the group.
    """

    def __init__(self, group: _C.TableGroup) -> None:
        super().__init__(group, _C.Hold.UNCHANGED)

    def __enter__(self) -> None:
        if not self._group.splitting():
            super().__enter__()
            if not self._group.splitting():
                return
            self._group.release(self._kind)  # another thread's table began to grow
        self._group.hold(_C.Hold.ALONE)
        try:
            self._group.finish_growth()
            super().__enter__()
        finally:
            self._group.release(_C.Hold.ALONE)


class GroupLocks:
    """Locks of a group; a base of ``TableGroup``."""

    _group: _C.TableGroup

    def unchanged(self) -> GroupLock:
        """A context in which the tables of the group do not change.

        Everything read in it is consistent: saves of several tables, exports, counters. Calls of
        other threads that change a table wait until the context ends; calls that only read do not
        wait. Replays of CUDA graphs do not wait, because the host does not see them.

        Raises:
            RuntimeError: this thread changes a table within the context.
        """
        return UnchangedLock(self._group)

    def reading(self) -> GroupLock:
        """Like :meth:`unchanged`, but a table may be in the middle of growing."""
        return GroupLock(self._group, _C.Hold.UNCHANGED)

    def alone(self) -> GroupLock:
        """A context in which calls of other threads wait.

        Other threads see the changes made in it as one.

        Raises:
            RuntimeError: the thread is within :meth:`unchanged`.
        """
        return GroupLock(self._group, _C.Hold.ALONE)
