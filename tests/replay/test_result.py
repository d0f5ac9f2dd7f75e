"""What follows from a curve: the knee, rows for a target, a hit rate between points."""

from __future__ import annotations

import pytest

from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.replay import Curve, Point, Policy, Replayed


def point(rows, hit_rate):
    return Point(rows, hit_rate, 0.0, 0, 0, 0, 0, 0, rows, 100 * rows)


def curve(*pairs, eviction="lru"):
    return Curve(Policy(eviction), tuple(point(*pair) for pair in pairs))


CURVE = curve((100, 0.3), (200, 0.6), (400, 0.7), (1000, 0.75))


def test_the_knee_is_where_more_rows_stop_to_pay():
    assert CURVE.knee.rows == 200
    assert curve((10, 0.1), (20, 0.2), (40, 0.4)).knee.rows in (10, 20, 40)  # a line has none
    assert curve((10, 0.5)).knee.rows == 10


def test_rows_for_a_target():
    assert CURVE.rows_for(0.6) == 200
    assert CURVE.rows_for(0.2) == 100
    assert CURVE.rows_for(0.75) == 1000
    assert CURVE.rows_for(0.76) is None
    assert CURVE.rows_for(0.65) == pytest.approx(200 * 2**0.5, abs=1)


def test_a_hit_rate_between_points_is_where_its_rows_are():
    for rate in (0.31, 0.5, 0.66, 0.72):
        assert CURVE.at(CURVE.rows_for(rate)) == pytest.approx(rate, abs=0.01)
    assert CURVE.at(50) == pytest.approx(0.15)
    assert CURVE.at(10**9) == 0.75


def test_more_rows_than_ids():
    """A table that evicted nothing has the hit rate of a row for each of its ids."""
    held = [Point(rows, 0.8, 0.0, 0, 0, 0, 0, 0, 300, rows) for rows in (10_000, 100_000)]
    alone = Curve(Policy("lru"), tuple(held))
    assert alone.at(300) == alone.at(5000) == alone.at(10**6) == 0.8
    assert alone.at(150) == pytest.approx(0.4)
    behind = Curve(Policy("lru"), (Point(100, 0.5, 0.0, 9, 0, 0, 0, 0, 100, 1), *held))
    assert behind.at(300) == behind.at(5000) == 0.8
    assert 0.5 < behind.at(200) < 0.8
    frequencies = IdFrequencies.of_counts([10] * 300)
    table = Replayed("t", 3000, 300, 0.8, frequencies, (alone, behind))
    assert table.frequencies_with(alone).shares == ((300, 1.0),)
    assert table.frequencies_with(behind).shares == ((100, 0.625), (300, 1.0))
    expired = Curve(Policy("lru"), (Point(10_000, 0.8, 0.0, 0, 0, 0, 0, 7, 300, 1),))
    assert expired.at(5000) == pytest.approx(0.4)


def test_policies_that_meet_a_target():
    lfu = curve((100, 0.5), (200, 0.55), (400, 0.65), (1000, 0.74), eviction="lfu")
    table = Replayed("t", 1000, 10, 0.8, None, (CURVE, lfu))
    assert [c.policy.eviction for c, _ in table.meeting(0.45)] == ["lfu", "lru"]
    assert [c.policy.eviction for c, _ in table.meeting(0.745)] == ["lru"]
    assert table.meeting(0.9) == []
    assert table.best is lfu
