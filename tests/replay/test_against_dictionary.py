"""Hits, evictions and returns of a replay equal those of a Python dictionary."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.replay import Policy, Rule, TableSettings, evictions, replay
from torchrec_hkv.replay.arrays import ArrayLog


class Model:
    """A table of one bucket: exact LRU or LFU, one id per step."""

    def __init__(self, eviction, rows, admitted_at=1, expire_after=None):
        self.eviction, self.rows, self.admitted_at = eviction, rows, admitted_at
        self.held, self.asked, self.placed = {}, {}, set()
        self.hits = self.evicted = self.returned = self.unadmitted = 0

    def lookup(self, ident, step):
        if ident in self.held:
            self.hits += 1
            self.held[ident] = (self.held[ident][0] + 1, step)
            return
        self.asked[ident] = self.asked.get(ident, 0) + 1
        if self.asked[ident] < self.admitted_at:
            self.unadmitted += 1
            return
        self.asked[ident] = 0
        if len(self.held) == self.rows:
            place = (lambda i: self.held[i][1]) if self.eviction == "lru" else self.held.get
            del self.held[min(self.held, key=place)]
            self.evicted += 1
        self.returned += ident in self.placed
        self.placed.add(ident)
        self.held[ident] = (1, step)


def stream(n, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = (300 * torch.rand(n, generator=generator) ** 3).long()
    ids[n // 2 :] += 40  # other ids become frequent
    return ids * 7919 - 5


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("admitted_at", [1, 3])
def test_one_bucket(eviction, admitted_at):
    ids = stream(4000)
    rows = (20, 50, 64)
    rule = Rule() if admitted_at == 1 else Rule(count=admitted_at, entries=1 << 16)
    policy = Policy(eviction, rule)
    told = replay(
        ArrayLog("log", {"ids": ids.numpy()}),
        {"user": TableSettings(("ids",), rows, (policy,))},
        batch_size=1,
        threads=1,
    )["user"]
    assert told.lookups == 4000
    assert told.distinct == ids.unique().numel()
    assert told.unlimited_hit_rate == pytest.approx(1 - told.distinct / 4000, abs=1e-12)
    for count, point in zip(rows, told.curves[0].points, strict=True):
        model = Model(eviction, count, admitted_at)
        for step, ident in enumerate(ids.tolist()):
            model.lookup(ident, step)
        assert point.rows == count
        assert point.hit_rate == pytest.approx(model.hits / 4000, abs=1e-12)
        assert (point.evicted, point.returned) == (model.evicted, model.returned)
        assert (point.unadmitted, point.refused, point.size) == (
            model.unadmitted,
            0,
            len(model.held),
        )
        assert point.error == 0


def test_an_id_hits_if_it_was_there_before_its_step():
    ids = torch.tensor([1, 1, 2, 1, 3, 3, 2, 2, 9])  # steps of three, including the last one
    told = replay(
        ArrayLog("log", {"ids": ids.numpy()}),
        {"t": TableSettings(("ids",), (10,), (Policy("lru"),))},
        batch_size=3,
    )["t"]
    assert told.curves[0].points[0].hit_rate == pytest.approx(3 / 9)
    assert told.unlimited_hit_rate == pytest.approx(3 / 9)


def test_expired_ids_are_counted():
    ids = torch.arange(2000) % 500
    told = replay(
        ArrayLog("log", {"ids": ids.numpy()}),
        {"t": TableSettings(("ids",), (1000,), (Policy("lru", expire_after=2), Policy("lru")))},
        batch_size=100,
    )["t"]
    forgets, keeps = (curve.points[0] for curve in told.curves)
    assert keeps.hit_rate == pytest.approx(0.75)
    assert forgets.hit_rate < 0.05
    assert forgets.expired > 1000
    assert keeps.expired == 0


def test_epochs_begin_where_they_should():
    """In an epoch's first steps, ids of the previous epoch leave first, whatever their counts."""
    frequent, others = torch.arange(50).repeat(20), torch.arange(1000, 1050)
    ids = torch.cat([frequent, others, others, others])
    policies = [Policy("lfu"), Policy("epoch_lfu", epoch_samples=1000)]
    told = replay(
        ArrayLog("log", {"ids": ids.numpy()}),
        {"t": TableSettings(("ids",), (50,), tuple(policies))},
        batch_size=10,
    )["t"]
    lfu, epochs = (curve.points[0].hit_rate for curve in told.curves)
    assert lfu < 960 / 1150
    assert epochs == pytest.approx((950 + 100) / 1150)


def test_every_policy_of_the_options_is_replayed():
    assert {"lru", "lfu"} <= set(evictions())
    names = [name for name in evictions() if not name.startswith("epoch")]
    ids = stream(3000)
    told = replay(
        ArrayLog("log", {"ids": ids.numpy()}),
        {"t": TableSettings(("ids",), (100,), tuple(map(Policy, names)))},
        batch_size=20,
    )["t"]
    for curve, name in zip(told.curves, names, strict=True):
        assert 0.3 < curve.points[0].hit_rate < told.unlimited_hit_rate
        assert curve.policy.options(100).eviction == name


def test_several_tables_columns_and_threads():
    generator = torch.Generator().manual_seed(5)
    log = ArrayLog(
        "log",
        {
            name: torch.randint(80, (5000,), generator=generator).pow(2).numpy()
            for name in ("a", "b", "c")
        },
    )
    policies = (Policy("lru"), Policy("lfu", Rule(probability=0.5)))
    told = [
        replay(
            log,
            {
                "one": TableSettings(("a",), (20, 40), policies),
                "two": TableSettings(("b", "c"), (30,), policies),
            },
            batch_size=64,
            threads=threads,
        )
        for threads in (1, 3)
    ]
    assert told[0] == told[1]
    assert told[0]["two"].lookups == 10_000
    # Each step has the ids of one feature, then those of the other.
    both = [log._columns[name] for name in ("b", "c")]
    steps = [c[at : at + 64].tolist() for at in range(0, 5000, 64) for c in both]
    joined = torch.tensor([ident for step in steps for ident in step])
    alone = replay(
        ArrayLog("log", {"ids": joined.numpy()}),
        {"two": TableSettings(("ids",), (30,), policies[:1])},
        batch_size=128,
    )
    assert alone["two"].curves[0].points[0].hit_rate == pytest.approx(
        told[0]["two"].curves[0].points[0].hit_rate, abs=1e-12
    )


def test_an_exhausted_log_is_refused():
    log = ArrayLog("log", {"ids": torch.empty(0, dtype=torch.int64).numpy()})
    with pytest.raises(ValueError, match="Table 't': the log has no ids"):
        replay(log, {"t": TableSettings(("ids",), (10,), (Policy("lru"),))})
