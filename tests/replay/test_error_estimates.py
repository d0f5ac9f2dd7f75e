"""The error that a sampled replay states covers its difference from a full replay."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.ids import hashed
from benchmarks.replay import drifting, returning
from torchrec_hkv.replay import Policy, TableSettings, replay
from torchrec_hkv.replay.arrays import ArrayLog
from torchrec_hkv.replay.sample import Sample
from torchrec_hkv.replay.tables import ReplaySetting, slots_share

POLICIES = (Policy("lru"), Policy("lfu"), Policy("adaptive"))
TABLES = {"t": TableSettings(("ids",), (20_000, 40_000), POLICIES)}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [returning, drifting(0.9)], ids=["sessions", "drifting"])
def test_of_renamed_ids(stream):
    # A draw renames the ids, which changes the sample. The miniature tables of adaptive also see
    # other ids and may choose another c, so all ids are replayed for each draw.
    errors, stated = [], []
    ids = stream(600_000, 0)
    for draw in range(6):
        log = ArrayLog("log", {"ids": hashed(hashed(ids) + draw).numpy()})
        full = replay(log, TABLES, batch_size=2000)["t"]
        sampled = replay(log, TABLES, batch_size=2000, sample=0.1)["t"]
        for curve, whole in zip(sampled.curves, full.curves, strict=True):
            for point, expected in zip(curve.points, whole.points, strict=True):
                errors.append(point.hit_rate - expected.hit_rate)
                stated.append(point.error)
    # Two standard errors: 95 of 100 errors of a normal distribution are smaller.
    covered = [abs(error) <= two for error, two in zip(errors, stated, strict=True)]
    assert statistics.fmean(covered) >= 0.85
    # Rounding to buckets gives a small table more slots than rows, here by .7 %.
    assert abs(statistics.fmean(errors)) <= 0.0006
    assert statistics.fmean(stated) < 0.006


def test_slots_of_a_sample_over_their_share():
    def share(rows, rate):
        return slots_share(ReplaySetting(Policy("lru"), rows), Sample(rate))

    assert share(64 * 100_000, 0.01) == pytest.approx(1, abs=1e-3)
    assert share(20_000, 0.1) == pytest.approx(2016 / 2003.2, abs=1e-6)
