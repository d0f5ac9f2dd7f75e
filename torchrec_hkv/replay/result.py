"""What a replay tells: hit rates over rows, for each table and policy."""

from __future__ import annotations

import bisect
import dataclasses
import math

from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.replay.policy import Policy


@dataclasses.dataclass(frozen=True)
class Point:
    """A table of so many rows, over the whole log.

    Attributes:
        rows: of the table.
        hit_rate: share of lookups whose id was in the table when its step began.
        error: that the hit rate may be off by, since only a sample of the ids was replayed: two
            standard errors. 0 where all ids were.
        evicted: ids that had to leave.
        returned: ids placed that had been placed before.
        refused: lookups that found no place.
        unadmitted: lookups whose id was not admitted.
        expired: ids that left for their age.
        size: ids at the end.
        bytes: of the table: rows, optimizer states, index, and what its policy counts.
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


@dataclasses.dataclass(frozen=True)
class Curve:
    """Hit rates of a policy over rows.

    Attributes:
        policy: how the table chooses among ids.
        points: by rows, ascending.
    """

    policy: Policy
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point:
        """From which on one more row gains less than the rows up to the last point do on average.

        It is the point that lies farthest above the straight line from no rows to the last point.
        """
        last = self.points[-1]
        return max(
            self.points, key=lambda point: point.hit_rate - last.hit_rate * point.rows / last.rows
        )

    def rows_for(self, target: float) -> int | None:
        """Rows that the hit rate needs, interpolated; None where the last point has less.

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
        """The hit rate with so many rows, interpolated by their logarithm.

        Args:
            rows: more than the last point has count as that; fewer than the first has give in
                proportion.
        """
        counts = [point.rows for point in self.points]
        at = bisect.bisect_left(counts, rows)
        if at == len(counts):
            return self.points[-1].hit_rate
        if at == 0:
            return self.points[0].hit_rate * max(rows, 0.0) / counts[0]
        low, high = self.points[at - 1], self.points[at]
        share = math.log(rows / low.rows) / math.log(high.rows / low.rows)
        return low.hit_rate + share * (high.hit_rate - low.hit_rate)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What was learned of a table.

    Attributes:
        name: of the table.
        lookups: of the whole log.
        distinct: different ids; of a sample an estimate.
        unlimited_hit_rate: with a row for every id.
        frequencies: how often ids come.
        curves: one for each policy.
    """

    name: str
    lookups: int
    distinct: int
    unlimited_hit_rate: float
    frequencies: IdFrequencies
    curves: tuple[Curve, ...]

    def curve_of(self, policy: Policy) -> Curve:
        """The curve of a policy that was replayed."""
        return next(curve for curve in self.curves if curve.policy == policy)

    def frequencies_with(self, curve: Curve) -> IdFrequencies:
        """The frequencies, with the share of lookups that find a row by a curve: of those that find
        one where each id has a row."""
        most = self.unlimited_hit_rate
        if most <= 0:
            return self.frequencies
        shares, highest = [], 0.0
        for point in curve.points:
            highest = max(highest, min(point.hit_rate / most, 1.0))
            if highest > 0:
                shares.append((point.rows, highest))
        return dataclasses.replace(self.frequencies, shares=tuple(shares))

    def meeting(self, target: float) -> list[tuple[Curve, int]]:
        """Policies that reach a hit rate, with the rows that each needs, the fewest first.

        Args:
            target: hit rate, above 0.
        """
        found = [(curve, curve.rows_for(target)) for curve in self.curves]
        met = [(curve, rows) for curve, rows in found if rows is not None]
        return sorted(met, key=lambda pair: (pair[1], -pair[0].at(pair[1])))

    @property
    def best(self) -> Curve:
        """The policy of the highest hit rates, on average over the points."""
        return max(self.curves, key=lambda curve: sum(point.hit_rate for point in curve.points))
