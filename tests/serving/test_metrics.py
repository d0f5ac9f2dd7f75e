"""Metrics of a served model in Prometheus's format."""

from __future__ import annotations

import re

from tests.support.served_models import random_batch
from torchrec_hkv import serving

LINE = re.compile(r'([a-z_]+)(\{(table|le)="[^"]*"\})? (\d+(\.\d+)?(e-?\d+)?)')


def test_metrics(served):
    model = serving.load(served[0])
    for seed in range(5):
        model(*random_batch(seed, 4))
    values = {}
    for line in model.metrics().splitlines():
        if not line.startswith("# "):
            name, label, _, value, *_ = LINE.fullmatch(line).groups()
            values[name + (label or "")] = float(value)
    prefix = "torchrec_hkv_serving_"
    for table, counts in model.counters().items():
        assert values[f'{prefix}lookups_total{{table="{table}"}}'] == counts["lookups"]
        assert values[f'{prefix}unknown_total{{table="{table}"}}'] == counts["unknown"]
    assert values[f"{prefix}following"] == 0
    assert values[f"{prefix}call_seconds_count"] == 5
    assert values[f'{prefix}call_seconds_bucket{{le="+Inf"}}'] == 5
    bounds = [value for name, value in values.items() if "_bucket" in name]
    assert bounds == sorted(bounds)
    assert f"{prefix}version" not in values  # unknown
