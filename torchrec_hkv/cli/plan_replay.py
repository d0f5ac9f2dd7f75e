"""Rows, policies and frequencies from a replay, for ``torchrec-hkv plan``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.planner import ParameterConstraints
from torchrec_hkv.replay import Curve, Replayed, ReplayedLog


@dataclasses.dataclass(frozen=True)
class PlannedReplay:
    """The tables of a replay that are planned.

    Attributes:
        tables: replayed tables by name.
        path: path of the replay.
    """

    tables: dict[str, Replayed]
    path: str

    @classmethod
    def read(cls, path: str, names: Sequence[str]) -> PlannedReplay:
        """Reads the tables from a file.

        Args:
            path: a file of ``torchrec-hkv replay --out``.
            names: names of the planned tables, in order.

        Raises:
            OSError: the file can't be read.
            ValueError: it is another file, or has none of the tables.
        """
        log = ReplayedLog.read(path)
        tables = {name: log.tables[name] for name in names if name in log.tables}
        if not tables:
            raise ValueError(
                f"--replay is {path!r}, which has tables {', '.join(log.tables)}, but --table "
                f"names {', '.join(names)}: name one of its tables."
            )
        return cls(tables, path)

    def rows(self, name: str) -> int:
        """The maximal number of rows of a table: one for each id.

        Raises:
            ValueError: the table was not replayed.
        """
        if name not in self.tables:
            raise ValueError(
                f"--table {name!r} has no number of rows, and {self.path!r} lacks the table: give "
                "a number of rows."
            )
        return self.tables[name].distinct

    def _curve(self, name: str, rows: int | None) -> Curve:
        """The hit-rate curve of the table's policy."""
        table = self.tables[name]
        return table.best if rows is None else max(table.curves, key=lambda one: one.at(rows))

    def constraint(
        self, name: str, base: ParameterConstraints, rows: int | None
    ) -> ParameterConstraints:
        """The constraint of a table.

        Args:
            name: name of the table.
            base: constraint of tables that were not replayed.
            rows: number of rows; None if the planner chooses it.
        """
        if name not in self.tables:
            return base
        table, curve = self.tables[name], self._curve(name, rows)
        options = curve.policy.options(table.distinct if rows is None else rows)
        if isinstance(base.options, HKVOptions):
            options = dataclasses.replace(options, hbm_bytes=base.options.hbm_bytes)
        return dataclasses.replace(
            base,
            options=options,
            frequencies=table.frequencies_with(curve),
            choose_sizes=rows is None,
        )

    def expected(self, name: str, planned: int, rows: int | None) -> dict[str, Any]:
        """The expected hit rate of a planned table, as JSON values.

        Args:
            name: name of the table.
            planned: number of rows in the plan, over all ranks.
            rows: the argument ``rows`` of :meth:`constraint`.
        """
        table, curve = self.tables[name], self._curve(name, rows)
        share = table.frequencies_with(curve).share_of(planned)
        return {
            "rows": planned,
            "options": curve.policy.code(planned),
            "hit_rate": share * table.unlimited_hit_rate,
            "unlimited_hit_rate": table.unlimited_hit_rate,
        }


def replay_lines(expected: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of text about expected hit rates.

    Args:
        expected: results of :meth:`PlannedReplay.expected` by table.
    """
    return [
        f"{name}: about {found['hit_rate']:.2%} of lookups hit with {found['rows']:,} rows (with a "
        f"row for each id {found['unlimited_hit_rate']:.2%}); num_embeddings={found['rows']}, "
        f"options={found['options']}"
        for name, found in expected.items()
    ]
