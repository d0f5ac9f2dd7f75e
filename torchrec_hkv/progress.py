"""A bar for what takes longer than two seconds, on the terminal of the first rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

#: Seconds before a bar is shown.
DELAY = 2.0
_local = threading.local()


class Progress:
    """How much of a task is done. Threads may add to it at the same time.

    Args:
        label: what is done, for people.
        total: bytes to do; 0 where that is not known.
        show: whether there is a bar on a terminal.
    """

    def __init__(self, label: str, total: int = 0, *, show: bool = True) -> None:
        self.label, self.total, self.done = label, total, 0
        #: Whether the bytes of tasks within it are added to its total.
        self.is_open = total == 0
        self._lock = threading.Lock()
        self._bar = None
        if show and not (dist.is_initialized() and dist.get_rank()):
            from tqdm import tqdm

            # disable=None: no bar where stderr is a file.
            self._bar = tqdm(
                desc=label,
                total=total or None,
                unit="B",
                unit_scale=True,
                delay=DELAY,
                disable=None,
                leave=False,
            )

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def set_total(self, total: int) -> None:
        """Says how many bytes there are, once that is known."""
        with self._lock:
            self.total = total
            if self._bar is not None:
                self._bar.total = total

    def expect(self, count: int) -> None:
        """Says that there are more bytes to do."""
        self.set_total(self.total + count)

    def add(self, count: int) -> None:
        """Says that more bytes are done."""
        with self._lock:
            self.done += count
            if self._bar is not None:
                self._bar.update(count)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()


def current() -> Progress | None:
    """The task that this thread works for."""
    return getattr(_local, "progress", None)


def adopt(progress: Progress | None) -> None:
    """Makes a task the one that this thread works for; the initializer of a pool of threads."""
    _local.progress = progress


def advance(count: int) -> None:
    """Adds bytes to the task that this thread works for, if there is one."""
    progress = current()
    if progress is not None:
        progress.add(count)


def expect(count: int) -> None:
    """Adds bytes to do to the task that this thread works for, if there is one."""
    progress = current()
    if progress is not None:
        progress.expect(count)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Within it, nothing is added to the task that this thread works for."""
    before = current()
    adopt(None)
    try:
        yield
    finally:
        adopt(before)


@contextlib.contextmanager
def reported(label: str, total: int = 0, *, show: bool = True) -> Iterator[Progress]:
    """Runs a task with a bar. Within another task there is no second bar: it adds to that one's,
    and to its total where that was not known when it began."""
    before = current()
    if before is not None:
        if before.is_open:
            before.expect(total)
        yield before
        return
    progress = Progress(label, total, show=show)
    adopt(progress)
    try:
        yield progress
    finally:
        adopt(None)
        progress.close()
