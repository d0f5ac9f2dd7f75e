"""Saves that write to the disk in a thread of their own, while training goes on.

All that a save holds is copied before the call returns, so that it is of one moment, bit for bit.
What is copied waits in bounded memory: where there is no room, the call waits for the disk.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
#: Host memory of a rank that copies of a save which does not block may take.
STAGING_BYTES = 4 << 30
# Saves of this process that have not ended.
_running: set[SaveHandle] = set()


def check_staging(staging_bytes: int) -> None:
    """Refuses an impossible number.

    Raises:
        ValueError: it is not a positive integer.
    """
    is_count = isinstance(staging_bytes, int) and not isinstance(staging_bytes, bool)
    if not is_count or staging_bytes < 1:
        raise ValueError(f"staging_bytes is {staging_bytes!r}, but must be an integer, at least 1.")


def wait_for_saves() -> None:
    """Waits for the end of saves that are under way; their errors are raised where they are waited
    for."""
    for handle in list(_running):
        with contextlib.suppress(Exception):
            handle.wait()


class SaveHandle:
    """A save that is under way.

    Args:
        path: that it is saved to.
        staging_bytes: memory that copies which are not written yet may take; a piece that is larger
            by itself passes alone.

    Raises:
        ValueError: ``staging_bytes`` is not a positive integer.
    """

    def __init__(self, path: Path, staging_bytes: int = STAGING_BYTES) -> None:
        check_staging(staging_bytes)
        self.path = path
        self._limit = staging_bytes
        self._jobs: collections.deque[tuple[Callable[[], Any], int, bool]] = collections.deque()
        self._changed = threading.Condition()
        self._staged = self._most = 0  # bytes that wait now, and that have waited at most
        self._queued = self._written = 0  # bytes in all
        self._waited = 0.0
        self._error: BaseException | None = None
        self._last: Callable[[BaseException | None], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_closed = self._is_done = False
        _running.add(self)
        self._thread = threading.Thread(target=self._work, name=f"save to {path}")
        self._thread.start()

    # -- for users --------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the save has ended, well or with an error."""
        return self._is_done

    @property
    def progress(self) -> float:
        """The share of bytes that are on the disk, from 0 to 1; 1 once the save has ended."""
        if self._is_done:
            return 1.0
        return min(0.999, self._written / self._queued) if self._queued else 0.0

    @property
    def staged_bytes(self) -> int:
        """The most host memory that copies took at a time."""
        return self._most

    @property
    def blocked_seconds(self) -> float:
        """How long the call that began the save waited for the disk, as there was no room."""
        return self._waited

    def wait(self, timeout: float | None = None) -> Path:
        """Waits for the end of the save.

        Args:
            timeout: seconds; None to wait as long as it takes.

        Returns:
            The folder.

        Raises:
            TimeoutError: it has not ended in that time; it goes on.
            OSError: writing failed. Whatever error the save met is raised; what was there before
                is whole.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"The save to {self.path} has not ended in {timeout} s.")
        if self._error is not None:
            raise self._error
        return self.path

    # -- for what saves ---------------------------------------------------------------------------

    def defer(self, job: Callable[[], Any], size: int = 0, *, always: bool = False) -> None:
        """Has something done by the thread, after all that was deferred before.

        Args:
            job: what is done; skipped once one has failed.
            size: bytes that it holds, for which there is room (:meth:`reserve`).
            always: do it although one has failed.
        """
        with self._changed:
            self._queued += size
            self._jobs.append((job, size, always))
            self._changed.notify_all()

    def reserve(self, size: int) -> None:
        """Waits until there is room for bytes that are going to be deferred, and takes it."""
        with self._changed:
            if size and self._staged and self._staged + size > self._limit:
                if not self._waited:
                    _log.warning(
                        "The save to %s holds staging_bytes=%d of copies: training waits for the "
                        "disk until the rest is copied.",
                        self.path,
                        self._limit,
                    )
                began = time.monotonic()
                self._changed.wait_for(
                    lambda: not self._staged or self._staged + size <= self._limit
                )
                self._waited += time.monotonic() - began
            self._staged += size
            self._most = max(self._most, self._staged)

    def on_error(self, undo: Callable[[], None]) -> None:
        """Has something done if the save fails."""
        self._undo.append(undo)

    def close(self, last: Callable[[BaseException | None], None] | None = None) -> None:
        """Says that nothing more will be deferred.

        Args:
            last: is done at the end by the thread, with the error that a job has met, or None. It
                may raise one itself.
        """
        with self._changed:
            self._last, self._is_closed = last, True
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Ends a save that failed before all was copied, and waits for its end."""
        with self._changed:
            self._error = self._error or error
        self.close()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    break
                job, size, always = self._jobs.popleft()
            try:
                if self._error is None or always:
                    job()
            except BaseException as error:
                self._error = self._error or error
            del job  # and what it holds
            with self._changed:
                self._staged -= size
                self._written += size
                self._changed.notify_all()
        try:
            if self._last is not None:
                self._last(self._error)
        except BaseException as error:
            self._error = self._error or error
        if self._error is not None:
            for undo in self._undo:
                try:
                    undo()
                except OSError:
                    _log.exception("The save to %s failed, and so did removing it.", self.path)
            _log.error("The save to %s failed: %s", self.path, self._error)
        self._undo.clear()
        self._last = None
        self._is_done = True
        _running.discard(self)


def run_or_defer(handle: SaveHandle | None, job: Callable[[], Any], size: int = 0) -> None:
    """Does something now, or by the thread of a save that does not block."""
    if handle is None:
        job()
    else:
        handle.defer(job, size)
