"""Progress that is redrawn on a terminal, and printed once at the end elsewhere."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from torchrec_hkv.metrics.table_metrics import TableMetrics


def describe(
    metrics: Mapping[str, TableMetrics], before: Mapping[str, TableMetrics] | None = None
) -> str:
    """Metrics of all tables together, in a few words.

    Args:
        metrics: by table.
        before: of an earlier time; the hit rate is that since then.

    Returns:
        Hit rate, load factor, evictions, the mean c of tables whose counts age, and what else there
        was; where rows lie in HBM and in host
        memory, the hit rate of each, and the bytes; "" without tables.
    """
    if not metrics:
        return ""
    total = sum(metrics.values(), TableMetrics())
    recent = total.since(sum((before or {}).values(), TableMetrics()))
    parts = []
    if recent.lookups:
        part = f"hit rate {recent.hit_rate:.1%}"
        if total.hbm_bytes and total.host_bytes:
            part += f" (HBM {recent.hbm_hit_rate:.1%}, host {recent.host_hit_rate:.1%})"
        parts.append(part)
    if total.capacity:
        parts.append(f"load factor {total.load_factor:.2f}")
    parts.append(f"evictions {total.evicted:,}")
    if total.aged:
        parts.append(f"c {total.c:.1f}")
    for name in ("returned", "refused", "unadmitted", "expired"):
        if count := getattr(total, name):
            parts.append(f"{name} {count:,}")
    if total.hbm_bytes and total.host_bytes:
        parts.append(f"{_gib(total.hbm_bytes)} of HBM, {_gib(total.host_bytes)} of host memory")
    return ", ".join(parts)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


class ConsoleLine:
    """A line of progress with figures and the metrics of tables.

    On a terminal the line is redrawn, with a bar where rich is installed; elsewhere only the last
    state is printed, by :meth:`close` or at the end of a ``with`` block.

    Args:
        title: at its beginning.
        steps: how many there will be; None where that is not known.
        shown: False prints nothing, as on ranks other than the first.
        file: standard error by default for the live line; the final one goes to standard output.

    Raises:
        ValueError: ``steps`` is negative.
    """

    def __init__(
        self,
        title: str,
        steps: int | None = None,
        shown: bool = True,
        file: TextIO | None = None,
    ) -> None:
        if steps is not None and steps < 0:
            raise ValueError(f"steps is {steps}, but must be None or at least 0.")
        self.title = title
        self.line = ""
        self._steps = steps
        self._step = 0
        self._shown = shown
        self._file = file or sys.stderr
        self._before: dict[str, TableMetrics] = {}
        self._tables = ""
        self._figures: dict[str, str] = {}
        self._began = time.perf_counter()
        self._live: Any = None
        self._is_closed = False

    def __enter__(self) -> ConsoleLine:
        self._check_open()
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, step: int, metrics: Mapping[str, TableMetrics]) -> None:
        """A sink of :class:`torchrec_hkv.metrics.Watch`; the hit rate is that since the last.

        Raises:
            ValueError: the line is closed.
        """
        self._check_open()
        self._tables = describe(metrics, self._before)
        self._before = dict(metrics)
        self.update(max(step, self._step))

    def update(self, step: int, samples: int | None = None, **figures: float) -> None:
        """Redraws the line.

        Args:
            step: how many are done.
            samples: how many were trained on since the line began.
            figures: such as ``loss``, by name.

        Raises:
            ValueError: the line is closed.
        """
        self._check_open()
        self._step = step
        if samples is not None:
            speed = samples / (time.perf_counter() - self._began)
            self._figures["speed"] = f"{speed:,.0f} samples/s"
        self._figures |= {name: f"{name} {value:.4f}" for name, value in figures.items()}
        self.line = ", ".join(filter(None, [*self._figures.values(), self._tables]))
        self._show()
        if self._live is not None:
            self._live.update(step, self.line)

    def close(self) -> None:
        """Prints the last state; another call does nothing. A :class:`Watch` is closed before."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._live is not None:
            self._live.stop()
        if self._shown and self.line:
            text = f"{self.title}: {self.line}"
            print(_wrapped(text) if sys.stdout.isatty() else text, flush=True)

    def _show(self) -> None:
        """Begins the live line where there is a terminal."""
        if self._live is None and self._shown and self._file.isatty():
            self._live = _live_progress(self.title, self._steps, self._file)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(
                f"The ConsoleLine {self.title!r} is closed: close a Watch before its sinks."
            )


def _wrapped(text: str) -> str:
    """Lines of the terminal's width, the second and others indented."""
    return textwrap.fill(
        text, shutil.get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False
    )


def _live_progress(title: str, steps: int | None, file: TextIO) -> Any:
    try:
        from rich.console import Console
        from rich.padding import Padding
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text
    except ImportError:
        return _PlainLine(title, file)

    class Lines(Progress):
        """The bar, and below it the figures, which may need several lines."""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                if task.fields["line"]:
                    yield Padding(Text(task.fields["line"], overflow="fold"), (0, 0, 0, 2))

    return _RichLine(
        Lines(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            console=Console(file=file),
            transient=True,
        ),
        title,
        steps,
    )


class _RichLine:
    def __init__(self, progress: Any, title: str, steps: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=steps, line="")
        progress.start()

    def update(self, step: int, line: str) -> None:
        self._progress.update(self._task, completed=step, line=line)

    def stop(self) -> None:
        self._progress.stop()


class _PlainLine:
    """Where rich is not installed. What is wider than the terminal is cut: a line that wraps can't
    be redrawn."""

    def __init__(self, title: str, file: TextIO) -> None:
        self._title = title
        self._file = file

    def update(self, step: int, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._file.write("\r\x1b[2K" + f"{self._title} {step}: {line}"[:width])
        self._file.flush()

    def stop(self) -> None:
        self._file.write("\r\x1b[2K")
        self._file.flush()
