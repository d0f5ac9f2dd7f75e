"""Metrics of a served model, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

#: Upper bounds of the latency histogram, in seconds.
BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)


def histogram(name: str, counts: Iterable[int], total: float) -> Iterable[str]:
    """A histogram in the text format.

    Args:
        name: name of the metric.
        counts: the number of calls up to each of :data:`BUCKETS`, and beyond the last.
        total: sum of the calls' times in seconds.
    """
    running = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
        running += count
        yield f'{name}_bucket{{le="{bound}"}} {running}'
    yield f"{name}_sum {total}"
    yield f"{name}_count {running}"


def family(name: str, kind: str, about: str, lines: Iterable[str]) -> list[str]:
    """A metric with its heading, or no text if ``lines`` is empty."""
    lines = list(lines)
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines] if lines else []


def labelled(name: str, table: str, value: int) -> str:
    """The line of a table's value."""
    escaped = table.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}{{table="{escaped}"}} {value}'
