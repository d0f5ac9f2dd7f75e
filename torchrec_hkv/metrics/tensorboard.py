"""Metrics of tables as TensorBoard scalars."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torchrec_hkv.metrics.table_metrics import COUNTED, TableMetrics

_STATES = ("size", "load_factor", "hbm_bytes", "host_bytes", "c")
# Written only for tables that have rows in HBM and in host memory.
_BY_MEMORY = ("host_hits", "hbm_hit_rate", "host_hit_rate")


class Writer(Protocol):
    """The methods of ``torch.utils.tensorboard.SummaryWriter`` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Writes one scalar."""

    def close(self) -> Any:
        """Flushes and closes the file."""


class TensorBoard:
    """A sink of :class:`torchrec_hkv.metrics.Watch` that writes TensorBoard scalars.

    The tags are ``{table}/{metric}``. Counts and hit rates cover the time since the previous
    reading; size, load factor, bytes, c and the hit rates of miniature tables are current values.
    A table has only the metrics that it uses: a count is written from the first reading in which it
    is not zero, evictions from the first insertion on, and hits by memory only for tables with rows
    in HBM and in host memory.

    Args:
        log_dir: folder for the files; None if ``writer`` is given.
        writer: an existing writer; :meth:`close` does not close it.

    Raises:
        ImportError: the package ``tensorboard`` can't be imported.
        ValueError: both or neither of the arguments are given.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, writer: Writer | None = None
    ) -> None:
        if (log_dir is None) == (writer is None):
            raise ValueError("TensorBoard needs a log_dir or a writer: give exactly one of them.")
        self._owns_writer = writer is None
        if writer is None:
            writer = summary_writer_class()(str(log_dir))
        self.writer: Writer = writer
        self._before: dict[str, TableMetrics] = {}
        # The metrics that each table has used so far, in order.
        self._used: dict[str, dict[str, None]] = {}

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, step: int, metrics: Mapping[str, TableMetrics]) -> None:
        """Writes the metrics of a reading."""
        for table, now in metrics.items():
            recent = now.since(self._before[table]) if table in self._before else now
            used = self._used.setdefault(table, {})
            used |= dict.fromkeys(_used(now))
            for name in used:
                if name in _STATES:
                    value = getattr(now, name)
                elif name in COUNTED or recent.lookups:
                    value = getattr(recent, name)
                else:  # a rate without lookups
                    continue
                self.writer.add_scalar(f"{table}/{name}", value, step)
            for c, rate in now.miniature_hit_rates.items():
                self.writer.add_scalar(f"{table}/miniature_hit_rate_{c:g}", rate, step)
        self._before = dict(metrics)

    def scalars(self, step: int, **figures: float) -> None:
        """Writes other scalars by name, such as ``loss``."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes a writer that this object created."""
        if self._owns_writer:
            self.writer.close()


def _used(now: TableMetrics) -> list[str]:
    """The metrics that a table uses, derived from its counts."""
    names = [name for name in COUNTED if getattr(now, name) and name not in _BY_MEMORY]
    if now.inserted:
        names.append("evicted")
    if now.lookups:
        names.append("hit_rate")
    if now.aged:
        names.append("c")
    if now.hbm_bytes and now.host_bytes:
        names += _BY_MEMORY
    names += [name for name in ("hbm_bytes", "host_bytes") if getattr(now, name)]
    return [*names, "size", "load_factor"] if now.capacity else names


def summary_writer_class() -> Callable[[str], Writer]:
    """The class ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: the package ``tensorboard`` is not installed, or PyTorch can't use it.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoard needs the package tensorboard, which can't be imported ({error}): "
            "pip install tensorboard."
        ) from None
    return SummaryWriter
