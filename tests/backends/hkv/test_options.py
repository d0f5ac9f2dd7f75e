"""``HKVOptions`` refuses bad values at construction, in one sentence that names the field."""

from __future__ import annotations

import math

import pytest

from torchrec_hkv import HKVOptions
from torchrec_hkv.hash_table import MinFrequency

NO_NUMBER = [True, 0, -5, 1.5, "9", math.nan, 1 << 64]
NO_FLAG = [1, 0, None, "yes"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(
            ({"eviction": value}, "eviction is .* 'customized', or an Aged")
            for value in ("fifo", None, [])
        ),
        *(({"hbm_bytes": value}, "hbm_bytes is .* 'index' or a number") for value in NO_NUMBER),
        ({"hbm_bytes": "all"}, "hbm_bytes is 'all'"),
        *(({"seed": value}, r"seed is .* -2\^63") for value in (True, 0.5, None, "1", 1 << 63)),
        ({"initializer": (0.0, 1.0)}, r"initializer is \(0.0, 1.0\), but must be a Uniform, Nor"),
        ({"initializer": 3}, "initializer is 3"),
        ({"admission": 2}, "admission is 2, but must be a MinFrequency or a Probability, or None"),
        *(({"expire_after": v}, "expire_after is .* number of calls from 1") for v in NO_NUMBER),
        *(({"initial_capacity": v}, "initial_capacity is .* number of rows") for v in NO_NUMBER),
        *(({"remember_evicted": v}, "remember_evicted is .* number of ids") for v in NO_NUMBER),
        *(({"strict": value}, "strict is .* True or False") for value in NO_FLAG),
        *(({"dense": value}, "dense is .* True or False") for value in NO_FLAG),
        *(({"deterministic": value}, "deterministic is .* True or False") for value in NO_FLAG),
        ({"remember_evicted": 9, "dense": True}, "leave remember_evicted at None"),
        ({"expire_after": 9, "dense": True}, "leave expire_after at None"),
        ({"initial_capacity": 9, "dense": True}, "leave initial_capacity at None"),
        ({"admission": MinFrequency(2, 8), "dense": True}, "leave admission at None"),
    ],
)
def test_refused(options, match):
    with pytest.raises(ValueError, match=rf"^HKVOptions: .*{match}") as refusal:
        HKVOptions(**options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {"hbm_bytes": 1},
        {"hbm_bytes": "index"},
        {"seed": -(1 << 63)},
        {"expire_after": 1, "initial_capacity": 1, "remember_evicted": 1},
    ],
)
def test_bounds_are_taken(options):
    assert hash(HKVOptions(**options)) == hash(HKVOptions(**options))
