"""Several calls of one thread that no other thread's calls come between."""

from __future__ import annotations

import types

from torchrec_hkv import _C


class Hold:
    """Holds a group within a ``with`` block.

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


class GroupHolds:
    """Holds of a group by one thread. Part of ``TableGroup``, which has the rest."""

    _group: _C.TableGroup

    def unchanged(self) -> Hold:
        """Keeps the tables of the group as they are within a ``with`` block.

        All that is read within it is of one moment: saves of several tables, exports, counters.
        Calls of other threads that change a table wait until the block ends; those that read don't.
        Replays of CUDA graphs are not seen by the host and do not wait.

        Raises:
            RuntimeError: within the block, where the thread itself changes a table.
        """
        return Hold(self._group, _C.Hold.UNCHANGED)

    def alone(self) -> Hold:
        """Keeps all calls of other threads out within a ``with`` block.

        Other threads see what is done within it as one change.

        Raises:
            RuntimeError: the thread is within :meth:`unchanged`.
        """
        return Hold(self._group, _C.Hold.ALONE)
