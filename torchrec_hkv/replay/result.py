"""Results of a replay: hit rates over rows, for each table and policy."""

from __future__ import annotations

import bisect
import dataclasses
import math

from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.replay.policy import Policy


@dataclasses.dataclass(frozen=True)
class Point:
    """The result of a table with a number of rows, over the whole log.

    Attributes:
        rows: rows of the table.
        hit_rate: share of lookups whose id was in the table when its step began.
        error: two standard errors of the hit rate if a sample of the ids was replayed, else 0.
        evicted: ids that were evicted.
        returned: evicted ids that were inserted again.
        refused: lookups of ids that found no slot.
        unadmitted: lookups of ids that were not admitted.
        expired: ids that expired.
        size: ids in the table at the end.
        bytes: bytes of the table: rows, optimizer states, index, and the counts of its policy.
    """

    rows: int
    hit_rate: float
    error: float
    evicted: int
    returned: int
    refused: int
    unadmitted: int
    expired: int
    size: int
    bytes: int

    @property
    def fewest_rows(self) -> int:
        """The fewest rows that are known to have this hit rate: without evictions, one for each id
        in the table."""
        has_held_all = not (self.evicted or self.refused or self.expired)
        return max(min(self.rows, self.size), 1) if has_held_all else self.rows


@dataclasses.dataclass(frozen=True)
class Curve:
    """Hit rates of a policy over rows.

    Attributes:
        policy: policy of the table.
        points: results, by ascending rows.
    """

    policy: Policy
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point:
        """The point after which one more row gains less than the average row up to the last point.

        It is the point that lies farthest above the straight line from no rows to the last point.
        """
        last = self.points[-1]
        return max(
            self.points, key=lambda point: point.hit_rate - last.hit_rate * point.rows / last.rows
        )

    def rows_for(self, target: float) -> int | None:
        """Rows that reach a hit rate, interpolated, or None if the last point is below it.

        Args:
            target: hit rate, above 0.
        """
        before: Point | None = None
        for point in self.points:
            if point.hit_rate >= target:
                if before is None:
                    return point.rows
                share = (target - before.hit_rate) / (point.hit_rate - before.hit_rate)
                rows = before.rows * (point.rows / before.rows) ** share
                return min(math.ceil(rows), point.rows)
            before = point
        return None

    def at(self, rows: float) -> float:
        """The hit rate of a number of rows, interpolated over its logarithm.

        Args:
            rows: number of rows. Above the last point its hit rate is returned; below the first
                point the hit rate is proportional to the rows.
        """
        by_rows = self.by_fewest_rows
        counts = [count for count, _ in by_rows]
        at = bisect.bisect_left(counts, rows)
        if at == len(counts):
            return by_rows[-1][1]
        if at == 0:
            return by_rows[0][1] * max(rows, 0.0) / counts[0]
        (low, before), (high, behind) = by_rows[at - 1], by_rows[at]
        share = math.log(rows / low) / math.log(high / low)
        return before + share * (behind - before)

    @property
    def by_fewest_rows(self) -> list[tuple[int, float]]:
        """Rows and hit rates, by ascending rows: those of the points, but with the fewest rows
        instead of more than the table has ids."""
        selected: list[tuple[int, float]] = []
        for point in self.points:
            before = selected[-1][0] if selected else 0
            if point.rows > before:
                selected.append((max(point.fewest_rows, before + 1), point.hit_rate))
                if point.fewest_rows < point.rows:
                    break
        return selected


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The results of a table.

    Attributes:
        name: name of the table.
        lookups: lookups in the whole log.
        distinct: number of distinct ids; an estimate if a sample was replayed.
        unlimited_hit_rate: hit rate with a row per id.
        frequencies: histogram of the ids.
        curves: the curves, one per policy.
    """

    name: str
    lookups: int
    distinct: int
    unlimited_hit_rate: float
    frequencies: IdFrequencies
    curves: tuple[Curve, ...]

    def curve_of(self, policy: Policy) -> Curve:
        """The curve of a replayed policy."""
        return next(curve for curve in self.curves if curve.policy == policy)

    def frequencies_with(self, curve: Curve) -> IdFrequencies:
        """The frequencies, with a curve's hit rates as shares of the hit rate with a row for each
        id."""
        maximum = self.unlimited_hit_rate
        if maximum <= 0:
            return self.frequencies
        shares, highest = [], 0.0
        for rows, hit_rate in curve.by_fewest_rows:
            highest = max(highest, min(hit_rate / maximum, 1.0))
            if highest > 0:
                shares.append((rows, highest))
        return dataclasses.replace(self.frequencies, shares=tuple(shares))

    def meeting(self, target: float) -> list[tuple[Curve, int]]:
        """Policies that reach a hit rate, with the rows that each needs, in ascending order of
        rows.

        Args:
            target: hit rate, above 0.
        """
        found = [(curve, curve.rows_for(target)) for curve in self.curves]
        reached = [(curve, rows) for curve, rows in found if rows is not None]
        return sorted(reached, key=lambda pair: (pair[1], -pair[0].at(pair[1])))

    @property
    def best(self) -> Curve:
        """The policy with the highest hit rate, averaged over the points."""
        return max(self.curves, key=lambda curve: sum(point.hit_rate for point in curve.points))
