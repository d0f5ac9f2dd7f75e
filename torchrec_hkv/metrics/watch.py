"""Periodic readings of metrics that do not block a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_hkv.metrics.sources import DEVICE_FIELDS, HOST_FIELDS, Source, probes_of
from torchrec_hkv.metrics.table_metrics import TableMetrics

Metrics = dict[str, TableMetrics]
#: A callable that receives the number of a step and the metrics at that step.
Sink = Callable[[int, Mapping[str, TableMetrics]], None]


def collect(source: Source, group: dist.ProcessGroup | None = None) -> Metrics:
    """Reads the metrics of all tables now. Waits for the device.

    Args:
        source: a sharded model, a module with embeddings of :mod:`torchrec_hkv.nn`, or a HashTable.
        group: ranks whose counts are added up; all of them call this. None: this rank's tables.

    Returns:
        Metrics by full name. In a sharded model the name is the key in the ``state_dict`` without
        ``.weight``, such as ``"ebc.embedding_bags.user"``. A column shard that does not begin at
        column 0 has ``/`` and its first column appended. A table of a module has the module's path
        and its own name. A HashTable is ``"table"``.

    Raises:
        TypeError: the source is of another type.
        ValueError: the source has no tables of this package.
    """
    reading = _Reader(source, group).begin(0)
    reading.wait()
    return reading.metrics()


class Watch:
    """Reads the metrics of a model every ``every`` steps, without making a step wait.

    A reading and its copy to the host run on the device. The first :meth:`step` after the copy has
    finished, or :meth:`close`, passes the reading to the sinks. The end of a ``with`` block closes
    the watch; if the block ends with an error, no reading is started or waited for.

    Args:
        source: as for :func:`collect`.
        every: number of steps between two readings.
        sinks: callables that receive the step of a reading and the reading, on every rank.
        group: as for :func:`collect`. NCCL sums without making a step wait; gloo waits.

    Raises:
        TypeError: the source is of another type, or a sink is not callable.
        ValueError: ``every`` is not positive, or the source has no tables of this package.
    """

    def __init__(
        self,
        source: Source,
        every: int = 100,
        sinks: Sequence[Sink] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}, but must be a number of steps, at least 1.")
        self._every = every
        self._sinks = list(sinks)
        for sink in self._sinks:
            if not callable(sink):
                raise TypeError(
                    f"A sink is {sink!r}, but must be callable with a step and its metrics, such "
                    "as a ConsoleLine."
                )
        self._reader = _Reader(source, group)
        self._steps = 0
        # Step at which the last reading was started.
        self._last_begun_step = 0
        self._open: list[_PendingMetrics] = []
        #: The last completed reading; empty before the first.
        self.latest: Metrics = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            # Do not start a reading: other ranks may not take part, and it would block.
            self._report_finished()

    def step(self) -> None:
        """Counts a step. Starts a reading if due, and passes completed readings to the sinks."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._begin()
        self._report_finished()

    def close(self) -> None:
        """Starts a reading of the last step, waits for all readings and passes them to the sinks.
        Further calls do nothing."""
        if self._steps > self._last_begun_step:
            self._begin()
        while self._open:
            reading = self._open.pop(0)
            reading.wait()
            self._report(reading)

    def _begin(self) -> None:
        self._open.append(self._reader.begin(self._steps))
        self._last_begun_step = self._steps

    def _report_finished(self) -> None:
        while self._open and self._open[0].is_done():
            self._report(self._open.pop(0))

    def _report(self, pending: _PendingMetrics) -> None:
        self.latest = pending.metrics()
        for sink in self._sinks:
            sink(pending.step, self.latest)


@dataclasses.dataclass(frozen=True)
class _PendingMetrics:
    """Metrics that are being copied to the host."""

    step: int
    names: tuple[str, ...]
    values: Tensor  # int64 [tables, fields] in host memory
    event: torch.cuda.Event | None

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def metrics(self) -> Metrics:
        fields = (*DEVICE_FIELDS, *HOST_FIELDS)
        return {
            name: TableMetrics(**dict(zip(fields, row, strict=True)))
            for name, row in zip(self.names, self.values.tolist(), strict=True)
        }


class _Reader:
    """Starts readings. All ranks know the names of all tables, because some tables may be on some
    ranks only."""

    def __init__(self, source: Source, group: dist.ProcessGroup | None) -> None:
        self._probes = probes_of(source)
        self._group = group
        local_names = [name for probe in self._probes for name in probe.names]
        names = [local_names]
        if group is not None:
            names = [[] for _ in range(group.size())]
            dist.all_gather_object(names, local_names, group=group)
        self._names = tuple(dict.fromkeys(name for each in names for name in each))
        self._rows = [self._names.index(name) for name in local_names]
        if not self._names:
            raise ValueError("There are no tables of this package to watch.")

    def begin(self, step: int) -> _PendingMetrics:
        """Starts the reading of a step."""
        parts = [probe.counts() for probe in self._probes]
        device = parts[0].device if parts else self._backend_device()
        host = torch.tensor([row for probe in self._probes for row in probe.sizes()])
        values = torch.zeros(
            len(self._names), len(DEVICE_FIELDS) + len(HOST_FIELDS), dtype=torch.int64
        )
        if device.type == "cuda":
            values = values.pin_memory()
        for row, sizes in zip(self._rows, host.tolist(), strict=True):
            values[row, len(DEVICE_FIELDS) :] = torch.tensor(sizes)
        on_device = values.to(device, non_blocking=True)
        for row, counts in zip(self._rows, [row for part in parts for row in part], strict=True):
            on_device[row, : len(DEVICE_FIELDS)] = counts
        if self._group is not None:
            dist.all_reduce(on_device, group=self._group)
        if device.type != "cuda":
            return _PendingMetrics(step, self._names, on_device, None)
        result = torch.empty(on_device.shape, dtype=torch.int64, pin_memory=True)
        result.copy_(on_device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _PendingMetrics(step, self._names, result, event)

    def _backend_device(self) -> torch.device:
        """The device for collectives on a rank without tables."""
        nccl = self._group is not None and dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
