"""The printed plan of a module: kernels by name, with the memory and time of each table."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.planner.types import Perf
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import StorageBytes
from torchrec_hkv.backends.workload import StepTime
from torchrec_hkv.planner.stages import IdExchange, StageTimes, input_dist_of, step_parts
from torchrec_hkv.planner.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class LossReport:
    """The loss of a table, compared with a table that has a dense row per id.

    Attributes:
        value: estimated loss, in the unit of the curves.
        what: what is given up.
        why: why no option with less loss was chosen.
        more: what one more GiB, spread over the ranks, would change; ``""`` if not applicable.
        left: free memory of the table's fullest rank.
        own_curves: whether the table's constraint has curves; otherwise the value is an AUC.
    """

    value: float
    what: str
    why: str
    more: str = ""
    left: str = ""
    own_curves: bool = False

    def __str__(self) -> str:
        unit = "by its quality_curves" if self.own_curves else "of AUC, by the built-in curves"
        more = f"; {self.more}" if self.more else ""
        return (
            f"loses an estimated {self.value:.4f} {unit}: {self.what}. Because: {self.why}{more}; "
            f"{self.left or 'nothing'} of the budget is left on its fullest rank"
        )


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """Groups of ranks that each hold all tables (``DMPCollection``).

    Attributes:
        groups: number of groups.
        sync_every: steps from one sync to the next.
    """

    groups: int = 1
    sync_every: int = 1


@dataclasses.dataclass(frozen=True)
class TableReport:
    """The report on one table.

    Attributes:
        kernel: name of the backend or stock kernel.
        sharding_type: TorchRec's sharding type.
        ranks: rank of each shard.
        rows: number of rows of each shard.
        dim: number of columns over all ranks.
        bytes: bytes of each shard: rows, optimizer states and index, without communication buffers.
        options: options that differ from their defaults.
        times: estimated milliseconds in a step for each shard: lookup, backward, exchanges.
        group_time: additional constant time of a group of tables on this kernel; None if ``times``
            come from nominal bandwidths.
        features: number of features that look the table up.
        bags: number of bags in a rank's batch.
        ids: number of ids in these bags.
        rejected: other kernels in the table's constraint, and why they were not chosen.
        calibrated: whether ``times`` come from measured constants rather than nominal bandwidths.
        loss: loss compared with a dense row per id; None without loss.
        traffic: bytes that a rank sends for the table in a step; None if unknown.
        sync_bytes: bytes that a rank with a shard of the table sends in a sync of replicas.
    """

    kernel: str
    sharding_type: str
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    dim: int
    bytes: tuple[StorageBytes, ...]
    options: str
    times: tuple[Perf, ...] = ()
    group_time: StepTime | None = None
    features: int = 1
    bags: float = 0.0
    ids: float = 0.0
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    calibrated: bool = False
    loss: LossReport | None = None
    traffic: Traffic | None = None
    sync_bytes: float = 0.0


class ReportedModulePlan(EmbeddingModuleShardingPlan):
    """TorchRec's plan of a module, which prints kernels, memory and times of its tables."""

    def __init__(
        self,
        shardings: Mapping[str, ParameterSharding],
        reports: Mapping[str, TableReport],
        stages: StageTimes | None = None,
        replicas: ReplicaGroups | None = None,
    ) -> None:
        """
        Args:
            shardings: shardings by table.
            reports: reports by table.
            stages: time of TorchRec's own code in the stages of a step; None or empty if not
                measured.
            replicas: number of groups of ranks that hold replicas of the tables; None: one.
        """
        super().__init__(shardings)
        self.replicas = replicas or ReplicaGroups()
        self.reports = dict(reports)
        self.stages = dict(stages or {})

    def step_times(self, rank: int) -> dict[str, float]:
        """Estimated milliseconds of the stages of a step on a rank.

        Tables on one kernel are treated as one group, whose constant time counts once. The exchange
        of gradients is part of the backward.
        """
        reports = self.reports.values()
        times = step_parts(
            self.stages, sum(report.features for report in reports), _exchanges(tuple(reports))
        )
        groups: dict[str, StepTime] = {}
        for report in self.reports.values():
            for owner, perf in zip(report.ranks, report.times, strict=True):
                if owner != rank:
                    continue
                times["input_dist"] += perf.input_dist_comms
                times["forward"] += perf.fwd_compute
                times["output_dist"] += perf.fwd_comms
                times["backward"] += perf.bwd_compute + perf.bwd_comms
                if report.group_time is not None:
                    groups[report.kernel] = report.group_time
        times["forward"] += sum(group.forward for group in groups.values())
        times["backward"] += sum(group.backward for group in groups.values())
        return times

    def traffic(self) -> Traffic:
        """Bytes that a rank sends in a step, on average."""
        traffics = [
            report.traffic for report in self.reports.values() if report.traffic is not None
        ]
        return sum(traffics, Traffic())

    def sync_bytes(self, rank: int) -> float:
        """Bytes that a rank sends in a sync of the replicas.

        Args:
            rank: in its group.
        """
        return sum(report.sync_bytes * report.ranks.count(rank) for report in self.reports.values())

    def __reduce__(self) -> tuple[type[ReportedModulePlan], tuple[Any, ...]]:
        # A dict subclass is pickled item by item, without its __init__'s other arguments.
        return type(self), (dict(self), self.reports, self.stages, self.replicas)

    def __str__(self) -> str:
        header = ("table", "kernel", "sharding", "ranks", "rows", "dim")
        header += ("HBM per rank", "host per rank", "ms a step")
        lines = [header]
        for name, report in self.reports.items():
            lines.append(
                (
                    name,
                    report.kernel,
                    report.sharding_type,
                    _joined([str(rank) for rank in report.ranks]),
                    _joined([f"{rows:,}" for rows in report.rows]),
                    str(report.dim),
                    _joined([format_bytes(part.hbm) for part in report.bytes]),
                    _joined([format_bytes(part.host) for part in report.bytes]),
                    _joined([f"{perf.total:.3g}" for perf in report.times]),
                )
            )
        # On a CPU no table takes HBM.
        in_hbm = any(part.hbm for report in self.reports.values() for part in report.bytes)
        shown = [i for i, name in enumerate(header) if name != "HBM per rank" or in_hbm]
        text = columns([[line[column] for column in shown] for line in lines])
        notes = [self._options(), self._uncalibrated(), self._steps(), self._traffic()]
        notes += [self._syncs(), self._choices()]
        return f"\n\n{text}\n{''.join([*notes, self._losses()])}"

    def _options(self) -> str:
        """A line per set of options, with its tables."""
        tables: dict[str, list[str]] = {}
        for name, report in self.reports.items():
            if report.options:
                tables.setdefault(report.options, []).append(name)
        lines = [
            _wrapped(f"options of {', '.join(tables_of_options)}: {text}")
            for text, tables_of_options in tables.items()
        ]
        return "\n" + "\n".join(lines) + "\n" if lines else ""

    def _uncalibrated(self) -> str:
        """A line about tables whose times were not measured."""
        timed = [name for name, report in self.reports.items() if report.times]
        names = [name for name in timed if not self.reports[name].calibrated]
        if not names:
            return ""
        tables = "" if names == timed else f" of {', '.join(names)}"
        text = f"Times{tables} are not calibrated: they come from nominal bandwidths."
        return f"\n{_wrapped(text)}\nMeasure a device by: torchrec-hkv calibrate\n"

    def _steps(self) -> str:
        """A line with the stages of a step on the slowest rank, if they were measured."""
        ranks = {rank for report in self.reports.values() for rank in report.ranks}
        if not ranks or not self.stages:
            return ""
        slowest = max(ranks, key=lambda rank: sum(self.step_times(rank).values()))
        parts = [f"{name} {time:.3g}" for name, time in self.step_times(slowest).items()]
        return f"\nA step of rank {slowest}, in ms: {', '.join(parts)}\n"

    def _traffic(self) -> str:
        """A line with the bytes sent between ranks; empty for one rank."""
        total = self.traffic()
        if not total.intra_host + total.inter_host:
            return ""
        text = f"A rank sends in a step, on average: {_size(total.intra_host)} to ranks of its host"
        if total.inter_host:
            text += f", {_size(total.inter_host)} to other hosts"
        across = {n: r.traffic.inter_host for n, r in self.reports.items() if r.traffic is not None}
        return f"\n{_wrapped(text + _maximum(across))}\n"

    def _syncs(self) -> str:
        """A line with the bytes of a sync; empty without replicas."""
        if self.replicas.groups == 1:
            return ""
        ranks = {rank for report in self.reports.values() for rank in report.ranks}
        maximum = max((self.sync_bytes(rank) for rank in ranks), default=0.0)
        every = self.replicas.sync_every
        a_step = f", {_size(maximum / every)} a step" if every > 1 else ""
        steps = f"every {every} steps" if every > 1 else "after each step"
        text = (
            f"A sync of {self.replicas.groups} replicas, {steps}, has a rank send up to "
            f"{_size(maximum)}{a_step}"
        )
        return (
            f"\n{_wrapped(text + _maximum({n: r.sync_bytes for n, r in self.reports.items()}))}\n"
        )

    def _choices(self) -> str:
        """A line per table with alternatives."""
        lines = []
        for name, report in self.reports.items():
            if report.rejected:
                rejected = [f"{kernel} rejected: {why}" for kernel, why in report.rejected.items()]
                lines.append(f"{name}: {report.kernel} chosen; {'; '.join(rejected)}")
        return "\n" + "\n".join(lines) + "\n" if lines else ""

    def _losses(self) -> str:
        """A line per table with loss."""
        lossy = {name: r.loss for name, r in self.reports.items() if r.loss is not None}
        lines = [_wrapped(f"{name} {loss}") for name, loss in lossy.items()]
        return "\n" + "\n".join(lines) + "\n" if lines else ""


def _size(count: float) -> str:
    return format_bytes(round(count))


def _maximum(sizes: Mapping[str, float]) -> str:
    """The tables with the most bytes; empty for a single table."""
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:3]
    if not largest or len(sizes) < 2:
        return ""
    return f" ({', '.join(f'{name} {_size(sizes[name])}' for name in largest)})"


def format_bytes(count: int) -> str:
    """A number of bytes with a unit: ``0``, ``512 B``, ``1.5 KiB``, ``16.0 GiB``."""
    if count < 1024:
        return f"{count} B" if count else "0"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _exchanges(reports: Sequence[TableReport]) -> list[IdExchange]:
    """The input distributions, one per sharding type."""
    exchanges = []
    for sharding_type in sorted({report.sharding_type for report in reports}):
        of_type = [report for report in reports if report.sharding_type == sharding_type]
        has_backends = any(report.kernel in registry.names() for report in of_type)
        name = input_dist_of(sharding_type, has_backends)
        if name is not None:
            exchanges.append(
                IdExchange(
                    name,
                    features=sum(report.features for report in of_type),
                    bags=sum(report.bags for report in of_type),
                    ids=sum(report.ids for report in of_type),
                )
            )
    return exchanges


def _joined(values: Sequence[str]) -> str:
    """Joins values: equal ones as one with a count, others one by one, at most four of them."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]} x{len(values)}"
    if len(values) > 4:
        return f"{values[0]}, {values[1]}, ... {values[-1]} ({len(values)})"
    return ", ".join(values)


def _wrapped(text: str) -> str:
    """Wraps text at 80 columns without breaking words, such as names of tables."""
    return textwrap.fill(
        text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Formats cells as a table; the first line is the header."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])
