"""What a sample of the ids says about the whole log."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.ids import hashed, power_law
from tests.support.sampled_log import groups, places
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.replay import Policy, TableSettings, replay
from torchrec_hkv.replay.arrays import ArrayLog
from torchrec_hkv.replay.sample import GROUPS

ROWS = (20_000, 40_000, 60_000)
TABLES = {"t": TableSettings(("ids",), ROWS, (Policy("lru"), Policy("lfu")))}


def stream(n, ids, power, seed=0):
    """A power law; in each tenth of the stream, a tenth of the positions gets new ids."""
    torch.manual_seed(seed)
    parts = []
    for tenth in range(10):
        position = power_law(n // 10, ids, power, torch.device("cpu"))
        parts.append(hashed(position + ids * ((position * 2654435761 % 1000003 + tenth) // 10)))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def ids():
    return stream(2_000_000, 200_000, 0.9)


@pytest.fixture(scope="module")
def log(ids):
    return ArrayLog("log", {"ids": ids.numpy()})


@pytest.fixture(scope="module")
def full(log):
    return replay(log, TABLES, batch_size=2000)["t"]


def test_hit_rates_are_those_of_the_whole_log(log, full):
    sampled = replay(log, TABLES, batch_size=2000, sample=0.1)["t"]
    assert sampled.lookups == full.lookups
    assert sampled.distinct == pytest.approx(full.distinct, rel=0.02)
    assert sampled.unlimited_hit_rate == pytest.approx(full.unlimited_hit_rate, abs=0.005)
    for curve, whole in zip(sampled.curves, full.curves, strict=True):
        for point, expected in zip(curve.points, whole.points, strict=True):
            assert point.hit_rate == pytest.approx(expected.hit_rate, abs=0.005)
            assert 0 < point.error < 0.01
            assert point.bytes == expected.bytes
            for name in ("evicted", "returned", "size"):
                assert getattr(point, name) == pytest.approx(getattr(expected, name), rel=0.06)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_id_of_many_lookups_changes_nothing(ids, is_sampled):
    """An id with a quarter of all lookups: whether the sample has it says nothing about others."""
    candidates = np.arange(1, 101)  # ids that the stream lacks
    inside = np.isin(candidates, candidates[places(candidates, 0.1)])
    hot = int(candidates[inside == is_sampled][0])
    stream_with = ids.clone()
    stream_with[::4] = hot
    log = ArrayLog("log", {"ids": stream_with.numpy()})
    whole = replay(log, TABLES, batch_size=2000)["t"]
    sampled = replay(log, TABLES, batch_size=2000, sample=0.1)["t"]
    assert sampled.frequencies.share_of(1) == pytest.approx(0.25, abs=0.01)
    for curve, expected in zip(sampled.curves, whole.curves, strict=True):
        for point, other in zip(curve.points, expected.points, strict=True):
            assert point.hit_rate == pytest.approx(other.hit_rate, abs=0.005)


def test_frequencies_of_a_sample(ids, log):
    whole = IdFrequencies.of_ids(ids)
    seen = replay(log, TABLES, batch_size=2000, sample=0.1)["t"].frequencies
    assert (seen.lowest, seen.highest) == (whole.lowest, whole.highest)
    assert seen.lookups == pytest.approx(whole.lookups, rel=0.01)
    for rows in (10, 1000, 20_000, 100_000):
        assert seen.share_of(rows) == pytest.approx(whole.share_of(rows), abs=0.02)
    for lookups in (100, 10_000, 300_000):
        assert seen.distinct(lookups) == pytest.approx(whole.distinct(lookups), rel=0.04)


@pytest.mark.parametrize("name", ["sequential", "strided", "hashed", "fields"])
@pytest.mark.parametrize("rate", [0.01, 0.25])
def test_a_sample_is_a_fair_share_of_any_ids(name, rate):
    index = torch.arange(400_000)
    streams = {
        "sequential": index - 200_000,
        "strided": index << 24,
        "hashed": hashed(index),
        "fields": (index % 64 << 48) | index // 64,
    }
    ids = streams[name].numpy()
    at = places(ids, rate)
    assert len(at) == pytest.approx(400_000 * rate, rel=4 / (400_000 * rate) ** 0.5)
    counts = np.bincount(groups(ids[at]), minlength=GROUPS)
    expected = len(at) / GROUPS
    assert ((counts - expected) ** 2 / expected).sum() < 210  # chi-square, 127 degrees


def test_too_small_a_sample_is_refused(log):
    with pytest.raises(ValueError, match=r"a sample of 0\.01 leaves 200 of 20,000 rows, but must"):
        replay(log, TABLES, sample=0.01)


def test_a_burst_makes_no_frequent_id():
    """Ids that occur a thousand times in a row, and never again."""
    ids = torch.arange(3000).repeat_interleave(1000)
    log = ArrayLog("log", {"ids": ids.numpy()})
    seen = replay(log, TABLES, batch_size=2000, sample=0.1)["t"].frequencies
    assert seen.num_ids == pytest.approx(3000, rel=0.2)
    assert seen.share_of(30) == pytest.approx(0.01, abs=0.003)


def test_one_number_of_rows_is_corrected_as_several_are(log):
    def hit_rates(*rows):
        tables = {"t": TableSettings(("ids",), rows, (Policy("lru"), Policy("lfu")))}
        curves = replay(log, tables, batch_size=2000, sample=0.1)["t"].curves
        return [[(point.rows, point.hit_rate) for point in curve.points] for curve in curves]

    one, two = hit_rates(20_000), hit_rates(20_000, 40_000)
    assert one == [points[:1] for points in two]
