"""The plan of a module as people read it: backends by name, with what each rank gives to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import Perf
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding

from torchrec_hkv.backends.protocol import StorageBytes
from torchrec_hkv.backends.workload import StepTime


@dataclasses.dataclass(frozen=True)
class TableReport:
    """One line of the report.

    Attributes:
        kernel: the backend's name, or the stock kernel's.
        sharding_type: TorchRec's.
        ranks: of the shards, in order.
        rows: of each shard.
        dim: columns over all ranks.
        bytes: of each shard: rows, optimizer states and index, without communication buffers.
        options: those that differ from their defaults.
        times: estimates for each shard, in milliseconds a step: lookup, backward, exchanges.
        group_time: what a group of tables on this kernel takes besides, once; None where nothing
            was measured and ``times`` come from bandwidths.
        rejected: other kernels that the table's constraint names, and why they were not chosen.
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
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict)


class ReportedModulePlan(EmbeddingModuleShardingPlan):
    """TorchRec's plan of a module, which prints what backends serve and what it costs."""

    def __init__(
        self,
        shardings: Mapping[str, ParameterSharding],
        reports: Mapping[str, TableReport],
    ) -> None:
        """
        Args:
            shardings: by table.
            reports: by table.
        """
        super().__init__(shardings)
        self.reports = dict(reports)

    def __reduce__(self) -> tuple[type[ReportedModulePlan], tuple[dict, dict]]:
        # A dict subclass is pickled item by item, without its __init__'s other arguments.
        return type(self), (dict(self), self.reports)

    def __str__(self) -> str:
        header = ("table", "kernel", "sharding", "ranks", "rows", "dim")
        header += ("HBM per rank", "host per rank", "ms a step", "options")
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
                    report.options,
                )
            )
        return "\n\n" + _columns(lines) + "\n" + self._choices()

    def _choices(self) -> str:
        """A line for each table whose constraint left the choice open."""
        lines = []
        for name, report in self.reports.items():
            if report.rejected:
                rejected = [f"{kernel} rejected: {why}" for kernel, why in report.rejected.items()]
                lines.append(f"{name}: {report.kernel} chosen; {'; '.join(rejected)}")
        return "\n" + "\n".join(lines) + "\n" if lines else ""


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


def _joined(values: Sequence[str]) -> str:
    """Equal values once, with their number; others one by one, shortened after the fourth."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]} x{len(values)}"
    if len(values) > 4:
        return f"{values[0]}, {values[1]}, ... {values[-1]} ({len(values)})"
    return ", ".join(values)


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])
