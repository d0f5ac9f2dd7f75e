"""Non-blocking saves: threads write to the disk while training goes on.

The call only copies the contents, so that the save is consistent, bit for bit. Threads lay the
copies out as files, compute checksums, compress, write and sync. They begin when the call has
copied everything, or when half of the memory for copies is full. Earlier, they would slow down the
copying, for which training waits. When the memory is full, the call waits for the disk.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)
#: Default host memory limit of a rank for the copies of a non-blocking save, in bytes.
STAGING_BYTES = 4 << 30
#: Default number of threads of a rank that write copies.
THREADS = 4
# Share of a GPU's memory that copies leave free by default, for allocations of training.
_FREE_SHARE = 0.1
# Share of staging_bytes that copies fill before the first one is written. Until then the threads
# leave the cores to the call that copies, so that training waits only for the copying.
_DEFERRED_SHARE = 0.5
# Running saves of this process.
_running: set[SaveHandle] = set()


def check_staging(staging_bytes: int, device_staging_bytes: int | None = None) -> None:
    """Checks memory limits.

    Raises:
        ValueError: ``staging_bytes`` is not a positive integer, or ``device_staging_bytes`` is
            neither None nor an integer of at least 0.
    """
    if not _is_count(staging_bytes, 1):
        raise ValueError(f"staging_bytes is {staging_bytes!r}, but must be an integer, at least 1.")
    if device_staging_bytes is not None and not _is_count(device_staging_bytes, 0):
        raise ValueError(
            f"device_staging_bytes is {device_staging_bytes!r}, but must be an integer, at least "
            "0, or None."
        )


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def wait_for_saves() -> None:
    """Waits for unfinished saves. Their errors are raised by their own :meth:`SaveHandle.wait`."""
    for handle in list(_running):
        with contextlib.suppress(Exception):
            handle.wait()


class SaveHandle:
    """A running save.

    Args:
        path: the folder of the save.
        staging_bytes: host memory limit for copies that are not written yet. A single piece may be
            larger if no other copy waits.
        device_staging_bytes: limit of GPU memory for copies. Further copies go to host memory.
            None: the free memory, including memory that PyTorch caches, less a tenth of the GPU's
            memory.
        threads: number of threads that write.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        path: Path,
        staging_bytes: int = STAGING_BYTES,
        device_staging_bytes: int | None = None,
        threads: int = THREADS,
    ) -> None:
        check_staging(staging_bytes, device_staging_bytes)
        self.path = path
        self._limit, self._device_limit = staging_bytes, device_staging_bytes
        self._jobs: collections.deque[_Job] = collections.deque()
        self._busy: set[Hashable] = set()  # lanes of jobs that are being done
        self._changed = threading.Condition()
        self._staged = self._maximum = 0  # bytes of host memory that wait now, and at most so far
        self._on_device = self._max_on_device = 0  # the same for a GPU's memory
        self._queued = self._written = 0  # total bytes
        self._waited = 0.0
        self._writes_now = False  # whether copies are written before all have been made
        self._error: BaseException | None = None
        self._last: Callable[[BaseException | None], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_closed = self._is_done = False
        _running.add(self)
        self._helpers = [
            threading.Thread(target=self._work, name=f"save to {path}", daemon=True)
            for _ in range(threads - 1)
        ]
        self._thread = threading.Thread(target=self._run, name=f"save to {path}")
        for thread in (self._thread, *self._helpers):
            thread.start()

    # -- for users --------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._is_done

    @property
    def progress(self) -> float:
        """Share of the bytes that are on the disk, from 0 to 1; 1 when the save has ended."""
        if self._is_done:
            return 1.0
        return min(0.999, self._written / self._queued) if self._queued else 0.0

    @property
    def staged_bytes(self) -> int:
        """Maximal host memory that copies took so far, in bytes."""
        return self._maximum

    @property
    def device_staged_bytes(self) -> int:
        """Maximal GPU memory that copies took so far, in bytes."""
        return self._max_on_device

    @property
    def blocked_seconds(self) -> float:
        """Time for which the call that started the save waited for the disk."""
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

    # -- for saves --------------------------------------------------------------------------------

    def defer(
        self,
        job: Callable[[], Any],
        size: int = 0,
        *,
        lane: Hashable = None,
        always: bool = False,
    ) -> None:
        """Queues a job for the threads.

        Args:
            job: a function to call. It is skipped if an earlier job has failed.
            size: bytes of host memory that the job holds, taken by :meth:`reserve` before.
            lane: jobs of one lane run in order; jobs of different lanes may run at the same time.
                A job of lane None runs after all earlier jobs and before all later ones.
            always: whether to run the job even if another one has failed.
        """
        self.defer_all([(lane, job)], size, always=always)

    def defer_all(
        self,
        jobs: Sequence[tuple[Hashable, Callable[[], Any]]],
        size: int = 0,
        device_size: int = 0,
        *,
        always: bool = False,
    ) -> None:
        """Queues several jobs that hold the same memory, which is free when all have run.

        Args:
            jobs: pairs of lane and function, as for :meth:`defer`.
            size: bytes of host memory that they hold, taken by :meth:`reserve` before.
            device_size: bytes of GPU memory that they hold, taken by :meth:`reserve_on_device`
                before.
            always: as for :meth:`defer`.
        """
        piece = _Piece(len(jobs), size, device_size)
        with self._changed:
            self._queued += size + device_size
            self._jobs += [_Job(job, lane, piece, always) for lane, job in jobs]
            if not (self._defers_writes and piece.holds_memory):
                self._changed.notify_all()

    def reserve(self, size: int) -> None:
        """Takes host memory for a copy. Waits until there is room.

        Args:
            size: number of bytes.
        """
        with self._changed:
            if self._staged + size > self._limit * _DEFERRED_SHARE:
                self._start_writes()
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
            self._maximum = max(self._maximum, self._staged)

    def reserve_on_device(self, size: int, device: torch.device) -> bool:
        """Takes GPU memory for a copy. Returns False if there is no room.

        Args:
            size: number of bytes.
            device: the GPU.
        """
        with self._changed:
            if self._device_limit is None:
                self._device_limit = _free_device_bytes(device)
            if self._on_device + size > self._device_limit:
                self._start_writes()
                return False
            self._on_device += size
            self._max_on_device = max(self._max_on_device, self._on_device)
            return True

    @property
    def _defers_writes(self) -> bool:
        """Whether threads don't write copies yet, because the call is copying and has room."""
        return not (self._is_closed or self._writes_now)

    def _start_writes(self) -> None:
        if not self._writes_now:
            self._writes_now = True
            self._changed.notify_all()

    def on_error(self, undo: Callable[[], None]) -> None:
        """Registers a function to call if the save fails."""
        self._undo.append(undo)

    def close(self, last: Callable[[BaseException | None], None] | None = None) -> None:
        """Ends the queue of jobs.

        Args:
            last: called by a thread when all jobs have run, with the error of a job or None. It may
                raise an error itself.
        """
        with self._changed:
            self._last, self._is_closed = last, True
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Ends a save that failed while copying, and waits for its threads."""
        with self._changed:
            self._error = self._error or error
        self.close()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                if self._error is None or job.always:
                    job.run()
            except BaseException as error:
                self._error = self._error or error
            job.run = None  # frees the objects that the job references
            self._end(job)

    def _take(self) -> _Job | None:
        """Waits for the next job that may run. Returns None if there will be no more."""
        with self._changed:
            while True:
                index = self._next()
                if index is not None:
                    job = self._jobs[index]
                    del self._jobs[index]
                    self._busy.add(job.lane)
                    return job
                if self._is_closed and not self._jobs:
                    return None
                self._changed.wait()

    def _next(self) -> int | None:
        """Index of the first job that may run now; None if there is none."""
        if None in self._busy:
            return None
        waiting = set(self._busy)
        for index, job in enumerate(self._jobs):
            if job.lane is None:  # all later jobs wait, too
                return index if index == 0 and not self._busy else None
            if job.lane not in waiting and not (self._defers_writes and job.piece.holds_memory):
                return index
            waiting.add(job.lane)
        return None

    def _end(self, job: _Job) -> None:
        with self._changed:
            self._busy.discard(job.lane)
            piece = job.piece
            piece.jobs -= 1
            if piece.jobs == 0:
                self._staged -= piece.size
                self._on_device -= piece.device_size
                self._written += piece.size + piece.device_size
            self._changed.notify_all()

    def _run(self) -> None:
        self._work()
        for helper in self._helpers:
            helper.join()
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


def _free_device_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that copies may take by default. Cached memory of PyTorch's allocator
    counts as free, because it includes the memory of an earlier save's copies. Free parts of
    segments that are in use do not count, because copies may not fit into them."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    reserved, used, unusable = (
        stats.get(f"{name}.all.current", 0)
        for name in ("reserved_bytes", "allocated_bytes", "inactive_split_bytes")
    )
    return max(0, int(free + reserved - used - unusable - _FREE_SHARE * total))


class _Piece:
    """Memory that several jobs hold."""

    def __init__(self, jobs: int, size: int, device_size: int) -> None:
        self.jobs, self.size, self.device_size = jobs, size, device_size
        self.holds_memory = size + device_size > 0


class _Job:
    def __init__(self, run: Callable[[], Any], lane: Hashable, piece: _Piece, always: bool) -> None:
        self.run: Any = run
        self.lane, self.piece, self.always = lane, piece, always


def sync_file(path: Path) -> None:
    """Flushes a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def run_or_defer(handle: SaveHandle | None, job: Callable[[], Any], size: int = 0) -> None:
    """Runs a job now, or queues it for the threads of a non-blocking save."""
    if handle is None:
        job()
    else:
        handle.defer(job, size)
