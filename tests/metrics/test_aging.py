"""Metrics report the half-life of counts, and the hit rates from which it is chosen."""

import math

import pytest
import torch

from tests.support.tables import make
from torchrec_hkv.hash_table import AgedLFU
from torchrec_hkv.metrics import TableMetrics, TensorBoard, collect
from torchrec_hkv.metrics.console import describe


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step):
        self.scalars[tag] = scalar_value


def trained(device: str, eviction):
    table = make(device, 300, eviction=eviction)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        ids = (torch.rand(200, generator=generator) ** 3 * 2000).long()
        table.find_or_insert(ids.to(device))
    return table


def test_an_adaptive_table_tells_all(device_type):
    table = trained(device_type, "adaptive")
    (metrics,) = collect(table).values()
    rates = metrics.miniature_hit_rates
    assert list(rates) == [0.0, 1.0, 2.0, 4.0, 16.0]
    tally = table.group.miniature_counters[0].tolist()
    for k, rate in enumerate(rates.values()):
        assert rate == (tally[k] + tally[6 + k]) / (tally[5] + tally[11])
        assert 0 < rate < 1
    assert metrics.c == table.group.aged_lfu[0, 0].item()
    writer = Writer()
    TensorBoard(writer=writer)(1, {"t": metrics})
    assert writer.scalars["t/c"] == metrics.c
    assert writer.scalars["t/miniature_hit_rate_16"] == rates[16.0]
    assert f"c {metrics.c:.1f}" in describe({"t": metrics})


@pytest.mark.parametrize(("eviction", "c"), [(AgedLFU(2.5), 2.5), (AgedLFU(math.inf), 1e6)])
def test_a_fixed_half_life(device_type, eviction, c):
    (metrics,) = collect(trained(device_type, eviction)).values()
    assert metrics.c == c
    assert metrics.miniature_hit_rates == {}


def test_other_policies_have_none(device_type):
    (metrics,) = collect(trained(device_type, "lfu")).values()
    assert math.isnan(metrics.c)
    assert metrics.aged == metrics.miniature_lookups == 0
    writer = Writer()
    TensorBoard(writer=writer)(1, {"t": metrics})
    assert not [tag for tag in writer.scalars if "/c" in tag or "miniature" in tag]


def test_shards_add_up():
    shards = TableMetrics(aged=1, c_hundredths=100, miniature_lookups=10, miniature_hits_4=5)
    both = shards + TableMetrics(aged=1, c_hundredths=400, miniature_lookups=30, miniature_hits_4=9)
    assert both.c == 2.5
    assert both.miniature_hit_rates[4.0] == 14 / 40
