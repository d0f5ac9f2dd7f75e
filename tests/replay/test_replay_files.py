"""Replays as files; and the best numbers of rows under a budget, as by enumeration."""

from __future__ import annotations

import itertools
import json

import pytest

from torchrec_hkv import HKVOptions, ParameterConstraints
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.hash_table import MinFrequency
from torchrec_hkv.replay import Curve, Point, Policy, Replayed, ReplayedLog, Rule

SEEN = IdFrequencies(((3, 10.0), (100, 1.5)), -4, 900)


def table(name, lookups, *curves):
    made = tuple(
        Curve(
            policy,
            tuple(
                Point(rows, rate, 0.001, 1, 2, 3, 4, 5, rows - 1, 10 * rows)
                for rows, rate in points
            ),
        )
        for policy, points in curves
    )
    return Replayed(name, lookups, 5000, 0.9, SEEN, made)


LRU, COUNTED = Policy("lru"), Policy("lfu", Rule(count=3, sketch_bytes=1 << 20), 50)
LOG = ReplayedLog(
    8192,
    0.01,
    {
        "user": table(
            "user",
            1000,
            (LRU, [(10, 0.2), (20, 0.5), (40, 0.6), (80, 0.61)]),
            (COUNTED, [(10, 0.1), (20, 0.3), (40, 0.65), (80, 0.7)]),
        ),
        "item": table("item", 3000, (LRU, [(10, 0.5), (20, 0.55), (40, 0.62), (80, 0.8)])),
    },
)


def test_written_and_read(tmp_path):
    LOG.write(tmp_path / "replay.json")
    assert ReplayedLog.read(tmp_path / "replay.json") == LOG


def test_what_the_planner_takes(tmp_path):
    user = LOG.tables["user"]
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        options=user.curves[1].policy.options(40),
        frequencies=user.frequencies,
    )
    assert constraint.options == HKVOptions(
        eviction="lfu", admission=MinFrequency(3, sketch_bytes=1 << 20), expire_after=50
    )
    assert constraint.frequencies.num_ids == 103


@pytest.mark.parametrize("rule", [Rule(), Rule(count=2), Rule(probability=0.25)])
def test_options_as_code_are_the_options(rule):
    policy = Policy("lfu", rule, expire_after=7)
    names = {"HKVOptions": HKVOptions, "MinFrequency": MinFrequency}
    from torchrec_hkv.hash_table import Probability

    made = eval(policy.code(1000), {**names, "Probability": Probability})
    assert made == policy.options(1000)


def test_rows_under_a_budget_are_the_best():
    """Enumerates all pairs of replayed points; between points the curves are straight."""

    def misses(name, rows):
        best = max(
            point.hit_rate
            for curve in LOG.tables[name].curves
            for point in curve.points
            if point.rows <= rows
        )
        return LOG.tables[name].lookups * (1 - best)

    for budget in range(200, 1700, 20):
        chosen = LOG.capacities(budget)
        assert sum(capacity.bytes for capacity in chosen.values()) <= budget
        expected = sum(
            LOG.tables[name].lookups * (1 - capacity.hit_rate) for name, capacity in chosen.items()
        )
        enumerated = min(
            misses("user", a) + misses("item", b)
            for a, b in itertools.product((10, 20, 40, 80), repeat=2)
            if 10 * (a + b) <= budget
        )
        assert expected <= enumerated + 1e-6
    everything = LOG.capacities(10**9)
    assert {name: capacity.rows for name, capacity in everything.items()} == {
        "user": 80,
        "item": 80,
    }
    assert everything["user"].options == COUNTED.options(80)


def test_importance_moves_rows():
    even = LOG.capacities(600)
    user = LOG.capacities(600, {"user": 100.0})
    assert user["user"].rows > even["user"].rows
    assert user["item"].rows < even["item"].rows


def test_impossible_budgets():
    with pytest.raises(
        ValueError, match=r"The budget is 199 bytes, but the fewest rows .* take 200:"
    ):
        LOG.capacities(199)
    with pytest.raises(ValueError, match="importance names table 'page', but there are user, item"):
        LOG.capacities(1000, {"page": 2.0})


def test_damaged_files(tmp_path):
    path = tmp_path / "replay.json"
    for change, sentence in (
        ({"version": 2}, "version is 2, but must be one of 1"),
        ({"tables": {"user": {}}}, "tables.user.lookups is missing"),
        ({"sample": "1"}, "sample is '1', but must be a finite number"),
    ):
        path.write_text(json.dumps({**LOG.content(), **change}))
        with pytest.raises(ValueError, match=sentence):
            ReplayedLog.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged: it is not JSON"):
        ReplayedLog.read(path)
