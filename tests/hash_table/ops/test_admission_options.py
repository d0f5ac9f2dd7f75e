"""Impossible admission options are refused with one sentence."""

import pytest

from tests.support.tables import make
from torchrec_hkv.hash_table import MinFrequency, Probability, TableGroup, TableSpec


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"count": 1, "entries": 8}, r"count is 1, but must be an integer from 2 to 65535"),
        ({"count": 65536, "entries": 8}, r"count is 65536, but"),
        ({"count": 2.0, "entries": 8}, r"count is 2.0, but"),
        ({"count": True, "entries": 8}, r"count is True, but"),
        ({"count": 2}, r"neither of entries and sketch_bytes was given, but exactly one must be"),
        ({"count": 2, "entries": 8, "sketch_bytes": 16}, r"both of entries and sketch_bytes was"),
        ({"count": 2, "entries": 0}, r"entries is 0, but must be an integer from 1 to 4294967296"),
        ({"count": 2, "entries": 2**32 + 1}, r"entries is 4294967297, but"),
        ({"count": 2, "entries": "8"}, r"entries is '8', but"),
        ({"count": 2, "sketch_bytes": 15}, r"sketch_bytes is 15, but must be an integer from 16 t"),
        ({"count": 2, "sketch_bytes": 2**34 + 1}, r"sketch_bytes is 17179869185, but"),
        ({"count": 2, "entries": 8, "halve_every": 0}, r"halve_every is 0, but must be an integer"),
        ({"count": 2, "entries": 8, "halve_every": 2**32}, r"halve_every is 4294967296, but"),
    ],
)
def test_impossible_frequencies(options, match):
    with pytest.raises(ValueError, match=match) as caught:
        MinFrequency(**options)
    assert str(caught.value).startswith("MinFrequency: ")


@pytest.mark.parametrize("p", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.5", None, True])
def test_impossible_probabilities(p):
    with pytest.raises(ValueError, match=r"^Probability: p is .*, but must be above 0 and at most"):
        Probability(p)


@pytest.mark.parametrize("admission", [2, "lfu", {"count": 2}])
def test_other_objects(admission):
    match = r"table 'table': admission is .*, but must be a MinFrequency or a Probability, or None"
    with pytest.raises(ValueError, match=match):
        make("cpu", admission=admission)


def test_options_are_hashable():
    assert hash(MinFrequency(2, entries=8)) == hash(MinFrequency(2, entries=8))
    assert Probability(0.5) == Probability(0.5)
    assert MinFrequency(2, entries=8) != MinFrequency(2, sketch_bytes=16)


def test_too_small_an_hbm_bytes_names_what_counts_need():
    spec = TableSpec("t", 64, 4, hbm_bytes=4096, admission=MinFrequency(2, entries=1000))
    with pytest.raises(ValueError, match=r"hbm_bytes is 4096, but 64 rows need at least 1\d{4}:"):
        TableGroup([spec], [0])
