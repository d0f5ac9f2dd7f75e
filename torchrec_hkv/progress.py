"""A progress bar for operations longer than two seconds, on the terminal of the first rank."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

#: Seconds after which a bar is shown.
DELAY = 2.0
_local = threading.local()


@functools.cache
def _bar_class() -> Any:
    """tqdm with a lock of this process.

    Forked processes share tqdm's own lock. A process that is killed while it holds the lock would
    block all others forever.
    """
    from tqdm import tqdm

    class Bar(tqdm):
        _lock = threading.RLock()

    os.register_at_fork(after_in_child=lambda: Bar.set_lock(threading.RLock()))
    return Bar


class TaskProgress:
    """Progress of an operation. Several threads may add to it.

    Args:
        label: name of the operation to show.
        total: total number of bytes; 0 if unknown.
        show: whether to show a bar on a terminal.
        unit: what is counted.
    """

    def __init__(self, label: str, total: int = 0, *, show: bool = True, unit: str = "B") -> None:
        self.label, self.total, self.done = label, total, 0
        #: Whether the bytes of nested tasks are added to its total.
        self.is_open = total == 0
        self._lock = threading.Lock()
        self._bar = None
        if show and not (dist.is_initialized() and dist.get_rank()):
            # disable=None: no bar if stderr is not a terminal.
            self._bar = _bar_class()(
                desc=label,
                total=total or None,
                unit=unit,
                unit_scale=True,
                delay=DELAY,
                disable=None,
                leave=False,
            )

    @property
    def share(self) -> float:
        """The completed share, from 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def set_total(self, total: int) -> None:
        """Sets the total number of bytes."""
        with self._lock:
            self.total = total
            if self._bar is not None:
                self._bar.total = total

    def expect(self, count: int) -> None:
        """Adds bytes to the total."""
        self.set_total(self.total + count)

    def add(self, count: int) -> None:
        """Adds completed bytes."""
        with self._lock:
            self.done += count
            if self._bar is not None:
                self._bar.update(count)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()


def current() -> TaskProgress | None:
    """The operation that this thread works for."""
    return getattr(_local, "progress", None)


def use_progress(progress: TaskProgress | None) -> None:
    """Sets the operation that this thread works for; use it as the initializer of a pool."""
    _local.progress = progress


def advance(count: int) -> None:
    """Adds completed bytes to the operation that this thread works for, if any."""
    progress = current()
    if progress is not None:
        progress.add(count)


def expect(count: int) -> None:
    """Adds bytes to the total of the operation that this thread works for, if any."""
    progress = current()
    if progress is not None:
        progress.expect(count)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """A context in which nothing is added to the operation that this thread works for."""
    before = current()
    use_progress(None)
    try:
        yield
    finally:
        use_progress(before)


@contextlib.contextmanager
def reported(
    label: str, total: int = 0, *, show: bool = True, unit: str = "B"
) -> Iterator[TaskProgress]:
    """Runs a task with a bar. A task within another task has no bar of its own: it adds to the
    outer bar, and to its total if the total was unknown at first."""
    before = current()
    if before is not None:
        if before.is_open:
            before.expect(total)
        yield before
        return
    progress = TaskProgress(label, total, show=show, unit=unit)
    use_progress(progress)
    try:
        yield progress
    finally:
        use_progress(None)
        progress.close()
