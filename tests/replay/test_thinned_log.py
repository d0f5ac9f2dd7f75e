"""A replay of a sample equals a replay of a log that has only the sample's ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.sampled_log import places
from torchrec_hkv.replay import Ids, Log, Part, Policy, Rule, TableSettings, replay
from torchrec_hkv.replay.arrays import ArrayLog

COLUMNS = ("a", "b")


class ThinnedLog(Log):
    """A log's samples, without the ids that a sample of ids lacks."""

    name, columns = "thinned", COLUMNS

    def __init__(self, columns, rate, part=7001):
        self._columns, self._rate, self._part = columns, rate, part

    def parts(self, columns):
        for begin in range(0, len(self._columns["a"]), self._part):
            kept = {}
            for column in columns:
                values = self._columns[column][begin : begin + self._part]
                at = places(values, self._rate)
                kept[column] = Ids(torch.from_numpy(values[at]), torch.from_numpy(at))
            yield Part(len(values), kept)


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("columns", [("a",), ("b", "a")])
def test_same_tables(rate, columns):
    generator = np.random.default_rng(int(100 * rate))
    ids = {name: (generator.random(120_000) ** 2 * 300_000).astype(np.int64) for name in COLUMNS}
    policies = (Policy("lru"), Policy("lfu"), Policy("lru", Rule(count=2, entries=20_000)))
    rows = (round(2000 / rate), round(2500 / rate))
    batch = 18_000  # the parts of both logs divide all steps alike
    whole = replay(
        ArrayLog("log", ids),
        {"t": TableSettings(columns, rows, policies)},
        batch_size=batch,
        sample=rate,
    )["t"]
    thinned_policies = (*policies[:2], Policy("lru", Rule(count=2, entries=round(rate * 20_000))))
    thinned = replay(
        ThinnedLog(ids, rate, batch),
        {"t": TableSettings(columns, (2000, 2500), thinned_policies)},
        batch_size=batch,
    )["t"]
    assert sum(point.evicted for curve in thinned.curves for point in curve.points) > 1000
    assert whole.lookups == 120_000 * len(columns)
    for curve, expected in zip(whole.curves, thinned.curves, strict=True):
        for point, other in zip(curve.points, expected.points, strict=True):
            for name in ("evicted", "returned", "unadmitted", "refused", "size"):
                assert getattr(point, name) == round(getattr(other, name) / rate)
