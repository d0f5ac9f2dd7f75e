"""Replay results as JSON, and the rows of tables under a budget."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_hkv.backends.hkv import HKVOptions
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.json_schema import (
    Choice,
    Fields,
    Integer,
    Items,
    JsonPlace,
    Map,
    Number,
    OrNull,
    Text,
    parse_json,
)
from torchrec_hkv.planner import ParameterConstraints
from torchrec_hkv.replay.policy import Policy, Rule, parse_eviction
from torchrec_hkv.replay.result import Curve, Point, Replayed
from torchrec_hkv.text_files import replace_text

_FORMAT, _VERSION = "torchrec_hkv replay", 1


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Rows chosen for a table.

    Attributes:
        rows: value for ``num_embeddings``.
        bytes: bytes of the table.
        hit_rate: expected hit rate.
        policy: policy with this hit rate.
    """

    rows: int
    bytes: int
    hit_rate: float
    policy: Policy

    @property
    def options(self) -> HKVOptions:
        """Options for the table's constraint."""
        return self.policy.options(self.rows)


@dataclasses.dataclass(frozen=True)
class ReplayedLog:
    """The results of replaying a log.

    Attributes:
        batch_size: samples of a step.
        sample: share of the ids that was replayed.
        tables: results by table name.
    """

    batch_size: int
    sample: float
    tables: dict[str, Replayed]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ReplayedLog:
        """Reads the file that ``torchrec-hkv replay --out`` wrote.

        Raises:
            OSError: the file can't be read.
            ValueError: the file has another format. The message names the key and what is allowed.
        """
        file = os.fspath(path)
        return cls.of(parse_json(file, Path(path).read_bytes()), file)

    @classmethod
    def of(cls, content: object, file: str = "the replay") -> ReplayedLog:
        """Creates a log from the result of :meth:`content`.

        Raises:
            ValueError: as in :meth:`read`.
        """
        return _LOG.read(content, JsonPlace(file))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for :meth:`read`.

        Raises:
            OSError: the file can't be written.
        """
        replace_text(Path(path), json.dumps(self.content()) + "\n")

    def content(self) -> dict[str, Any]:
        """The results as a dictionary for JSON."""
        tables = {}
        for name, table in self.tables.items():
            frequencies = table.frequencies
            fields = {
                **vars(table),
                "frequencies": {
                    "histogram": [list(pair) for pair in frequencies.histogram],
                    "lowest": frequencies.lowest,
                    "highest": frequencies.highest,
                },
            }
            fields["curves"] = [_curve_content(curve) for curve in table.curves]
            del fields["name"]
            tables[name] = fields
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "batch_size": self.batch_size,
            "sample": self.sample,
            "tables": tables,
        }

    def constraints(
        self,
        max_bytes: int | None = None,
        importance: Mapping[str, float] | None = None,
        *,
        sharding_types: Sequence[str] | None = None,
    ) -> dict[str, ParameterConstraints]:
        """Constraints of hash tables for the planner, by table name.

        Each constraint has the frequencies of the log's ids, the measured hit rates, and the best
        policy. Without a budget the planner chooses the number of rows, and the number of rows in
        HBM, so that the tables fit. Then set ``num_embeddings`` to the largest number of rows that
        a table may have, such as :attr:`Replayed.distinct`.

        Args:
            max_bytes: budget for all tables together, in bytes; :meth:`capacities` then chooses the
                rows. None: the planner chooses the rows.
            importance: argument of :meth:`capacities`.
            sharding_types: sharding types for the planner to choose from. None: all.

        Raises:
            ValueError: as in :meth:`capacities`, or ``importance`` is given without ``max_bytes``.
        """
        if max_bytes is None and importance is not None:
            raise ValueError(
                "importance weighs tables under a budget: give max_bytes, or leave it out."
            )
        capacities = {} if max_bytes is None else self.capacities(max_bytes, importance)
        found = {}
        for name, table in self.tables.items():
            chosen = capacities.get(name)
            curve = table.best if chosen is None else table.curve_of(chosen.policy)
            options = curve.policy.options(table.distinct)
            if chosen is not None:
                options = dataclasses.replace(chosen.options, capacity=chosen.rows)
            found[name] = ParameterConstraints(
                compute_kernels=["hkv"],
                sharding_types=None if sharding_types is None else list(sharding_types),
                options=options,
                frequencies=table.frequencies_with(curve),
                choose_sizes=chosen is None,
            )
        return found

    def capacities(
        self, max_bytes: int, importance: Mapping[str, float] | None = None
    ) -> dict[str, Capacity]:
        """Divides a budget among the tables so that the fewest lookups miss.

        Each byte goes to the table in which it saves the most misses. The number of rows of a table
        is between the smallest and the largest number that was replayed.

        Args:
            max_bytes: bytes of all tables together.
            importance: weight of a miss, by table name; 1 by default.

        Raises:
            ValueError: the budget is too small for the fewest rows, or a table is unknown.
        """
        for name in importance or ():
            if name not in self.tables:
                raise ValueError(
                    f"importance names table {name!r}, but there are {', '.join(self.tables)}."
                )
        hulls = {name: _hull(table) for name, table in self.tables.items()}
        chosen = {name: hull[0] for name, hull in hulls.items()}
        remaining = max_bytes - sum(capacity.bytes for capacity in chosen.values())
        if remaining < 0:
            raise ValueError(
                f"The budget is {max_bytes:,} bytes, but the fewest rows that were replayed take "
                f"{max_bytes - remaining:,}: replay fewer rows, or give more."
            )
        steps = [
            (gain / (high.bytes - low.bytes), at, name, low, high)
            for name, hull in hulls.items()
            for at, (low, high) in enumerate(itertools.pairwise(hull))
            if (
                gain := (high.hit_rate - low.hit_rate)
                * self.tables[name].lookups
                * (importance or {}).get(name, 1.0)
            )
            > 0
        ]
        for _, _, name, low, high in sorted(steps, key=lambda step: (-step[0], step[1])):
            spent = min(remaining, high.bytes - low.bytes)
            chosen[name] = _between(low, high, spent / (high.bytes - low.bytes))
            remaining -= spent
            if remaining <= 0:
                break
        return chosen


def _between(low: Capacity, high: Capacity, share: float) -> Capacity:
    if share >= 1:
        return high
    return Capacity(
        rows=low.rows + int(share * (high.rows - low.rows)),
        bytes=low.bytes + int(share * (high.bytes - low.bytes)),
        hit_rate=low.hit_rate + share * (high.hit_rate - low.hit_rate),
        policy=high.policy,
    )


def _hull(table: Replayed) -> list[Capacity]:
    """The best points of all policies by bytes (concave hull): each byte gains less than the one
    before."""
    points = sorted(
        (
            Capacity(point.rows, point.bytes, point.hit_rate, curve.policy)
            for curve in table.curves
            for point in curve.points
        ),
        key=lambda point: (point.bytes, -point.hit_rate),
    )
    # Start with the smallest number of rows, under the best policy for it.
    fewest = min(point.rows for point in points)
    start = max((p for p in points if p.rows == fewest), key=lambda point: point.hit_rate)
    hull = [start]
    for point in points:
        if point.bytes <= start.bytes or point.hit_rate <= hull[-1].hit_rate:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(low: Capacity, high: Capacity) -> float:
    return (high.hit_rate - low.hit_rate) / (high.bytes - low.bytes)


def _curve_content(curve: Curve) -> dict[str, Any]:
    return {
        "eviction": curve.policy.eviction_text,
        "admission": dataclasses.asdict(curve.policy.rule),
        "expire_after": curve.policy.expire_after,
        "epoch_samples": curve.policy.epoch_samples,
        "points": [dataclasses.asdict(point) for point in curve.points],
    }


def _curve(
    eviction: str,
    admission: Rule,
    expire_after: int | None,
    epoch_samples: int | None,
    points: tuple[Point, ...],
) -> Curve:
    return Curve(Policy(parse_eviction(eviction), admission, expire_after, epoch_samples), points)


def _log(
    format: str, version: int, batch_size: int, sample: float, tables: dict[str, dict[str, Any]]
) -> ReplayedLog:
    read = {name: Replayed(name=name, **fields) for name, fields in tables.items()}
    return ReplayedLog(batch_size, sample, read)


_COUNT = Integer(0, (1 << 63) - 1)
_MANY = Integer(1, (1 << 63) - 1)
_ID = OrNull(Integer(-(1 << 63), (1 << 63) - 1))
_RATE = Number(0.0)
_POINT = Fields(
    {
        field.name: _RATE if field.type == "float" else _MANY if field.name == "rows" else _COUNT
        for field in dataclasses.fields(Point)
    },
    Point,
)
_RULE = Fields(
    {
        "count": _COUNT,
        "entries": OrNull(_MANY),
        "sketch_bytes": OrNull(_MANY),
        "probability": _RATE,
    },
    Rule,
)
_CURVE = Fields(
    {
        "eviction": Text(),
        "admission": _RULE,
        "expire_after": OrNull(_MANY),
        "epoch_samples": OrNull(_MANY),
        "points": Items(_POINT),
    },
    _curve,
)
_TABLE = Fields(
    {
        "lookups": _MANY,
        "distinct": _MANY,
        "unlimited_hit_rate": _RATE,
        "frequencies": Fields(
            {"histogram": Items(Items(_RATE, 2)), "lowest": _ID, "highest": _ID}, IdFrequencies
        ),
        "curves": Items(_CURVE),
    }
)
_LOG = Fields(
    {
        "format": Choice([_FORMAT]),
        "version": Choice([_VERSION]),
        "batch_size": _MANY,
        "sample": _RATE,
        "tables": Map(Text(), _TABLE),
    },
    _log,
)
