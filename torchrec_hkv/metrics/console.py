"""A progress line: redrawn on a terminal, printed once at the end elsewhere."""

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
    """Summarizes the metrics of all tables in one line.

    Args:
        metrics: metrics by table name.
        before: metrics of an earlier reading. If given, the hit rate covers the time since then.

    Returns:
        Hit rate, load factor, evictions, the mean half-life c of tables with aging counts, and
        nonzero counts of other events. If rows are in HBM and in host memory, also the hit rate
        and the bytes of each. ``""`` without tables.
    """
    if not metrics:
        return ""
    total = sum(metrics.values(), TableMetrics())
    earlier, none = before or {}, TableMetrics()
    # By table, because their counts may restart.
    recent = sum((now.since(earlier.get(name, none)) for name, now in metrics.items()), none)
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
    """A progress line with figures and the metrics of tables.

    On a terminal the line is redrawn, with a progress bar if rich is installed. Elsewhere only the
    final state is printed, by :meth:`close` or at the end of a ``with`` block.

    Args:
        title: text at the beginning of the line.
        steps: total number of steps; None if unknown.
        shown: False to print nothing, for ranks other than 0.
        file: stream for the live line, standard error by default. The final line goes to standard
            output.

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
        """Shows metrics; makes the line a sink of :class:`torchrec_hkv.metrics.Watch`. The hit rate
        covers the time since the previous call.

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
            step: number of steps done.
            samples: number of samples processed since the line was created.
            figures: values to show by name, such as ``loss``.

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
        """Prints the final state. Further calls do nothing. Close a :class:`Watch` first."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._live is not None:
            self._live.stop()
        if self._shown and self.line:
            text = f"{self.title}: {self.line}"
            print(_wrapped(text) if sys.stdout.isatty() else text, flush=True)

    def _show(self) -> None:
        """Starts the live line if the stream is a terminal."""
        if self._live is None and self._shown and self._file.isatty():
            self._live = _live_progress(self.title, self._steps, self._file)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(
                f"The ConsoleLine {self.title!r} is closed: close a Watch before its sinks."
            )


def _wrapped(text: str) -> str:
    """Wraps text at the terminal's width, with an indentation from the second line on."""
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
        """A progress bar, and below it the figures on one or more lines."""

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
    """A live line without rich. It is cut at the terminal's width, because a wrapped line can't be
    redrawn."""

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
