"""Saves that write to the disk in a thread while training continues.

Everything is copied before the call returns, so the saved contents are consistent, bit for bit. The
copies take bounded memory: if they don't fit, the call waits for the disk.
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
#: Default host memory of a rank for the copies of a non-blocking save.
STAGING_BYTES = 4 << 30
# Unfinished saves of this process.
_running: set[SaveHandle] = set()


def check_staging(staging_bytes: int) -> None:
    """Checks a number of bytes.

    Raises:
        ValueError: it is not a positive integer.
    """
    is_count = isinstance(staging_bytes, int) and not isinstance(staging_bytes, bool)
    if not is_count or staging_bytes < 1:
        raise ValueError(f"staging_bytes is {staging_bytes!r}, but must be an integer, at least 1.")


def wait_for_saves() -> None:
    """Waits for unfinished saves. Their errors are raised by their own :meth:`SaveHandle.wait`."""
    for handle in list(_running):
        with contextlib.suppress(Exception):
            handle.wait()


class SaveHandle:
    """A running save.

    Args:
        path: path of the save.
        staging_bytes: memory for copies that are not written yet. A larger piece is copied alone.

    Raises:
        ValueError: ``staging_bytes`` is not a positive integer.
    """

    def __init__(self, path: Path, staging_bytes: int = STAGING_BYTES) -> None:
        check_staging(staging_bytes)
        self.path = path
        self._limit = staging_bytes
        self._jobs: collections.deque[tuple[Callable[[], Any], int, bool]] = collections.deque()
        self._changed = threading.Condition()
        self._staged = self._most = 0  # bytes of copies now, and their maximum
        self._queued = self._written = 0  # bytes in total
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
        """Whether the save has ended, successfully or not."""
        return self._is_done

    @property
    def progress(self) -> float:
        """The share of bytes on the disk, from 0 to 1; 1 after the end of the save."""
        if self._is_done:
            return 1.0
        return min(0.999, self._written / self._queued) if self._queued else 0.0

    @property
    def staged_bytes(self) -> int:
        """The maximal host memory that copies took."""
        return self._most

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which the call that started the save waited for the disk."""
        return self._waited

    def wait(self, timeout: float | None = None) -> Path:
        """Waits for the end of the save.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The folder.

        Raises:
            TimeoutError: the save has not ended within the time; it continues.
            OSError: writing failed. Any other error of the save is raised, too. The previous save
                is complete.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"The save to {self.path} has not ended in {timeout} s.")
        if self._error is not None:
            raise self._error
        return self.path

    # -- for what saves ---------------------------------------------------------------------------

    def defer(self, job: Callable[[], Any], size: int = 0, *, always: bool = False) -> None:
        """Queues a job for the thread. Jobs run in order.

        Args:
            job: function to call; skipped after a job has failed.
            size: bytes that the job holds, reserved by :meth:`reserve`.
            always: whether to run the job even if an earlier one has failed.
        """
        with self._changed:
            self._queued += size
            self._jobs.append((job, size, always))
            self._changed.notify_all()

    def reserve(self, size: int) -> None:
        """Waits until there is room for a number of bytes, and reserves it."""
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
        """Registers a function to call if the save fails."""
        self._undo.append(undo)

    def close(self, last: Callable[[BaseException | None], None] | None = None) -> None:
        """Ends the queue of jobs.

        Args:
            last: called at the end by the thread with the error of a job, or None. It may raise an
                error itself.
        """
        with self._changed:
            self._last, self._is_closed = last, True
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Ends a save that failed while copying, and waits for its thread."""
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
            del job  # frees the copy that it holds
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
    """Runs a job now, or in the thread of a non-blocking save."""
    if handle is None:
        job()
    else:
        handle.defer(job, size)
